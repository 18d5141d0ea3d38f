"""llama.cpp: flags of its draft chain, and the batch costs of an open pull request."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from treeopt.errors import InvalidValueError
from treeopt.types import LatencyProfile

__all__ = ["NO_SPECULATION", "DraftFlags", "batch_costs", "batch_costs_text", "check_batch_costs"]

NO_SPECULATION = "--spec-type none"
"""What turns speculation off."""


@dataclass(frozen=True, slots=True)
class DraftFlags:
    """Flags of a draft chain; building one checks it.

    Parameters
    ----------
    n_max : int
        Most draft tokens per step.
    p_min : float
        Drafting stops at a token less probable than this.

    Raises
    ------
    InvalidValueError
        Naming the rule that is broken.

    Examples
    --------
    >>> DraftFlags(4, 0.25).text()
    '--spec-draft-n-max 4 --spec-draft-p-min 0.25'
    """

    n_max: int
    p_min: float

    def __post_init__(self) -> None:
        if self.n_max < 1:
            raise InvalidValueError("spec-draft-n-max", f"is {self.n_max}; 1 is the least, or use {NO_SPECULATION}")
        if not 0 <= self.p_min <= 1:
            raise InvalidValueError("spec-draft-p-min", f"is {self.p_min}; a probability is between 0 and 1")

    def text(self) -> str:
        """Return the flags as they are typed."""
        return f"--spec-draft-n-max {self.n_max} --spec-draft-p-min {self.p_min:.4g}"


def batch_costs(profile: LatencyProfile) -> tuple[float, ...]:
    """Return what one token of a pass of 1, 2, .. tokens costs, relative to a pass of 1 token.

    Entry n - 1 is ``L(n) / (n L(1))``. The list ends before the first size that was not measured.

    Raises
    ------
    InvalidValueError
        When the profile is of several rows: llama.cpp's batch is one sequence here.
    """
    if profile.batch_size != 1:
        raise InvalidValueError(
            "batch_size", f"is {profile.batch_size}; the costs are those of one sequence, batch size 1"
        )
    one = profile.points[0].median_s
    return tuple(point.median_s / (n * one) for n, point in enumerate(profile.points, start=1) if point.num_tokens == n)


def check_batch_costs(costs: Sequence[float]) -> None:
    """Check ``GGML_BATCH_COSTS``: it starts with 1, and every cost is finite and above 0.

    Raises
    ------
    InvalidValueError
        Naming the rule that is broken.
    """
    if not costs or costs[0] != 1:
        raise InvalidValueError("GGML_BATCH_COSTS", "must start with 1, the cost of a pass of one token")
    for n, cost in enumerate(costs, start=1):
        if not (math.isfinite(cost) and cost > 0):
            raise InvalidValueError("GGML_BATCH_COSTS", f"entry {n} is {cost}; costs are finite and above 0")


def batch_costs_text(costs: Sequence[float]) -> str:
    """Return the value of ``GGML_BATCH_COSTS``: costs per token for batches of 1, 2, .. tokens.

    Raises
    ------
    InvalidValueError
        When a rule is broken.
    """
    check_batch_costs(costs)
    return ",".join(f"{cost:.6g}" for cost in costs)
