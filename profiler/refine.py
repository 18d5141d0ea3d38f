"""Which input lengths to measure, coarse to fine.

Powers of two give a usable curve at once; the gaps are then closed where it matters. Latencies have stairs, and stairs
may fall, so no gap is ever taken for straight: the order follows the bends, but with time every length gets measured.
"""

import itertools
from collections.abc import Collection, Mapping

from treeopt.errors import ProfileError

__all__ = ["coarse_tokens", "refine_tokens"]


def coarse_tokens(max_tokens: int) -> tuple[int, ...]:
    """Return 1, 2, 4, .. up to ``max_tokens``, which is included.

    Examples
    --------
    >>> coarse_tokens(48)
    (1, 2, 4, 8, 16, 32, 48)
    """
    if max_tokens < 1:
        raise ProfileError(f"max_tokens: must be at least 1, not {max_tokens}")
    powers = [2**i for i in range(max_tokens.bit_length()) if 2**i <= max_tokens]
    return tuple(sorted({*powers, max_tokens}))


def refine_tokens(curve_s: Mapping[int, float], count: int, chosen: Collection[int] = ()) -> tuple[int, ...]:
    """Return up to ``count`` further input lengths between those measured.

    Each is the middle of a gap. Gaps come first beside a length that a search would choose, where one token more or
    less may be better; then by how far the curve bends at their ends, times their width, then by how far it
    rises or falls.

    Parameters
    ----------
    curve_s : mapping of int to float
        Median latency, seconds, by num_tokens.
    count : int
        Most lengths to return.
    chosen : collection of int
        Lengths that a search with this curve chooses.

    Returns
    -------
    tuple of int
        Increasing; empty when no gap is left.

    Examples
    --------
    A stair between 4 and 8 is looked at before the straight parts:

    >>> refine_tokens({1: 1.0, 2: 1.0, 4: 1.0, 8: 3.0, 16: 3.0}, count=1)
    (6,)
    """
    known = sorted(curve_s)
    slopes = [(curve_s[b] - curve_s[a]) / (b - a) for a, b in itertools.pairwise(known)]
    scored = []
    for i, (a, b) in enumerate(itertools.pairwise(known)):
        if b - a < 2:
            continue
        bend = sum(abs(slopes[i] - slopes[j]) for j in (i - 1, i + 1) if 0 <= j < len(slopes))
        beside = any(n in chosen for n in (a, b))
        rise_s = abs(curve_s[b] - curve_s[a])
        scored.append((not beside, -bend * (b - a), -rise_s, -(b - a), (a + b) // 2))
    return tuple(sorted(n for *_, n in sorted(scored)[:count]))
