"""SGLang: the three EAGLE flags, and DSpark's table of steps per second.

EAGLE's draft keeps the ``topk`` best nodes of each level and gives each ``topk`` children. Of all these candidates the
best ``num_draft_tokens - 1`` are verified, the root being the first token of the pass.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise

from treeopt.errors import InvalidValueError
from treeopt.types import LatencyProfile

__all__ = ["EagleFlags", "StepsTable", "pool_size", "steps_table"]


def pool_size(num_steps: int, topk: int) -> int:
    """Return how many candidates EAGLE drafts: ``topk + (num_steps - 1) topk^2``."""
    return topk + (num_steps - 1) * topk * topk


@dataclass(frozen=True, slots=True)
class EagleFlags:
    """The flags of a draft tree; building one checks it.

    Parameters
    ----------
    num_steps : int
        Depth of the draft.
    topk : int
        Nodes kept per level, and children of each.
    num_draft_tokens : int
        Tokens of the verifying pass, the root included.

    Raises
    ------
    InvalidValueError
        Naming the rule that is broken.

    Examples
    --------
    >>> EagleFlags(3, 1, 4).text()
    '--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4'
    """

    num_steps: int
    topk: int
    num_draft_tokens: int

    def __post_init__(self) -> None:
        for name, least in (("num_steps", 1), ("topk", 1), ("num_draft_tokens", 2)):
            if getattr(self, name) < least:
                raise InvalidValueError(name, f"is {getattr(self, name)}; {least} is the least")
        if self.topk == 1 and self.num_draft_tokens != self.num_steps + 1:
            raise InvalidValueError(
                "num_draft_tokens",
                f"is {self.num_draft_tokens}; with topk 1 the draft is a chain of {self.num_steps} and it must be "
                f"{self.num_steps + 1}",
            )
        pool = pool_size(self.num_steps, self.topk)
        if self.num_draft_tokens - 1 > pool:
            raise InvalidValueError(
                "num_draft_tokens",
                f"is {self.num_draft_tokens}; {self.num_steps} steps of topk {self.topk} draft only {pool} candidates "
                "and the root comes on top",
            )

    def text(self) -> str:
        """Return the flags as they are typed."""
        return (
            f"--speculative-num-steps {self.num_steps} --speculative-eagle-topk {self.topk} "
            f"--speculative-num-draft-tokens {self.num_draft_tokens}"
        )


@dataclass(frozen=True, slots=True)
class StepsTable:
    """DSpark's cost table; building one checks it.

    Parameters
    ----------
    sample_batch_tokens : tuple of int
        Tokens of a pass, all requests together; strictly increasing.
    sample_steps_per_sec : tuple of float
        Passes per second at each.
    max_batch_tokens : int
        The largest pass planned for, at least the last sample.

    Raises
    ------
    InvalidValueError
        Naming the rule that is broken.
    """

    sample_batch_tokens: tuple[int, ...]
    sample_steps_per_sec: tuple[float, ...]
    max_batch_tokens: int

    def __post_init__(self) -> None:
        tokens, steps = self.sample_batch_tokens, self.sample_steps_per_sec
        if not tokens:
            raise InvalidValueError("sample_batch_tokens", "is empty; give at least one sample")
        if tokens[0] < 1:
            raise InvalidValueError("sample_batch_tokens", f"starts at {tokens[0]}; a pass has at least 1 token")
        if any(after <= before for before, after in pairwise(tokens)):
            raise InvalidValueError("sample_batch_tokens", "must be strictly increasing; sort them and drop repeats")
        if len(steps) != len(tokens):
            raise InvalidValueError(
                "sample_steps_per_sec", f"has {len(steps)} entries; give one for each of the {len(tokens)} samples"
            )
        if not all(math.isfinite(speed) and speed > 0 for speed in steps):
            raise InvalidValueError("sample_steps_per_sec", "must be finite and above 0")
        if self.max_batch_tokens < tokens[-1]:
            raise InvalidValueError(
                "max_batch_tokens", f"is {self.max_batch_tokens}, below the largest sample {tokens[-1]}; raise it"
            )

    def text(self) -> str:
        """Return the JSON file."""
        return json.dumps(asdict(self))


def steps_table(profiles: Iterable[LatencyProfile]) -> StepsTable:
    """Turn latency profiles, of one or several batch sizes, into DSpark's table.

    Where two profiles have passes of the same number of tokens the slower counts: DSpark then plans with care.
    """
    speeds: dict[int, float] = {}
    for profile in profiles:
        for point in profile.points:
            tokens = profile.batch_size * point.num_tokens
            speeds[tokens] = min(speeds.get(tokens, math.inf), 1.0 / point.median_s)
    tokens_sorted = tuple(sorted(speeds))
    return StepsTable(tokens_sorted, tuple(speeds[n] for n in tokens_sorted), tokens_sorted[-1] if tokens_sorted else 0)
