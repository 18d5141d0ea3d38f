"""What can be odd about a measurement, decided from plain figures.

===========  =====================================================================================
noisy        a point's interquartile range is over 10 % of its median
contended    other programs used the device while the point was timed
throttled    the device lowered its own clocks (heat, power brake) while the point was timed
drifted      L(1), measured again at the end, is off by more than 10 %
===========  =====================================================================================

A whole profile carries a point's flag when it concerns more than a tenth of its points, or the point of one token,
which every ratio divides by; drifted is a property of the whole profile.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from profiler.summary import interquartile_range, median

__all__ = [
    "CONTENDED",
    "DRIFTED",
    "NOISY",
    "THROTTLED",
    "Conditions",
    "drift_of",
    "is_noisy",
    "profile_flags",
    "visit_flags",
]

NOISY = "noisy"
CONTENDED = "contended"
THROTTLED = "throttled"
DRIFTED = "drifted"

NOISY_IQR = 0.10
"""Interquartile range over median above which a point is noisy."""

CONTENDED_CPU = 0.25
"""Share of the machine's processors that other processes may use."""

DRIFT_LIMIT = 0.10
"""Relative change of L(1) between the curve and the end of the measurement."""

POINT_SHARE = 0.10
"""Share of odd points above which the profile is odd."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What the machine did during an interval; None where it cannot be told.

    Parameters
    ----------
    foreign_cpu : float or None
        Share of all processors used by other processes, or stolen by the hypervisor, 0 to 1.
    foreign_gpu_processes : int or None
        Other compute processes on the GPU.
    throttled : bool or None
        The device lowered its clocks because of heat or a power brake.
    """

    foreign_cpu: float | None = None
    foreign_gpu_processes: int | None = None
    throttled: bool | None = None


def visit_flags(conditions: Conditions) -> frozenset[str]:
    """Return contended and throttled as they apply.

    Examples
    --------
    >>> sorted(visit_flags(Conditions(foreign_cpu=0.6, throttled=True)))
    ['contended', 'throttled']
    """
    flags = set()
    if (conditions.foreign_cpu or 0.0) > CONTENDED_CPU or (conditions.foreign_gpu_processes or 0) > 0:
        flags.add(CONTENDED)
    if conditions.throttled:
        flags.add(THROTTLED)
    return frozenset(flags)


def is_noisy(samples_s: Sequence[float]) -> bool:
    """Tell whether the step times, seconds, scatter by more than the limit."""
    return interquartile_range(samples_s) > NOISY_IQR * median(samples_s)


def drift_of(curve_s: float, end_s: float) -> bool:
    """Tell whether L(1), seconds, moved by more than the limit."""
    return abs(end_s / curve_s - 1) > DRIFT_LIMIT


def profile_flags(point_flags: Mapping[int, Iterable[str]], *, drifted: bool = False) -> tuple[str, ...]:
    """Return the flags of a profile, sorted, from those of its points.

    Parameters
    ----------
    point_flags : mapping of int to iterable of str
        Flags of each point, by num_tokens; empty for a sound one.
    drifted : bool
        L(1) moved.

    Examples
    --------
    >>> profile_flags({1: [], 2: ["noisy"], 4: ["noisy"], 8: []})
    ('noisy',)
    >>> profile_flags({n: ["contended"] if n == 7 else [] for n in range(1, 65)})
    ()
    """
    flags = {DRIFTED} if drifted else set()
    for flag in (NOISY, CONTENDED, THROTTLED):
        odd = {n for n, names in point_flags.items() if flag in names}
        if 1 in odd or len(odd) > POINT_SHARE * len(point_flags):
            flags.add(flag)
    return tuple(sorted(flags))
