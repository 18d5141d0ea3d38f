"""TensorRT-LLM: the dynamic draft tree's three numbers, and the draft length per batch size.

Both print as flow mappings that YAML files and Python programs take alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from treeopt.errors import InvalidValueError
from treeopt.formats.sglang import pool_size

__all__ = ["DynamicTree", "check_schedule", "schedule_text"]


@dataclass(frozen=True, slots=True)
class DynamicTree:
    """Settings of an EAGLE-3 dynamic tree; building one checks it.

    Parameters
    ----------
    max_draft_len : int
        Depth of the draft.
    max_total_draft_tokens : int
        Candidates that are verified; the root comes on top.
    topk : int
        ``dynamic_tree_max_topK``: nodes kept per level, and children of each.

    Raises
    ------
    InvalidValueError
        Naming the rule that is broken.

    Examples
    --------
    >>> DynamicTree(3, 9, 4).text()
    '{"max_draft_len": 3, "max_total_draft_tokens": 9, "dynamic_tree_max_topK": 4}'
    """

    max_draft_len: int
    max_total_draft_tokens: int
    topk: int

    def __post_init__(self) -> None:
        if self.max_draft_len < 1:
            raise InvalidValueError("max_draft_len", f"is {self.max_draft_len}; 1 is the least")
        if self.topk < 1:
            raise InvalidValueError("dynamic_tree_max_topK", f"is {self.topk}; 1 is the least")
        if self.max_total_draft_tokens < self.max_draft_len:
            raise InvalidValueError(
                "max_total_draft_tokens",
                f"is {self.max_total_draft_tokens}; it must be at least max_draft_len, {self.max_draft_len}",
            )
        most = self.topk * self.max_draft_len
        if self.max_total_draft_tokens > most:
            raise InvalidValueError(
                "max_total_draft_tokens",
                f"is {self.max_total_draft_tokens}; it must be at most topK * max_draft_len, {most}",
            )
        pool = pool_size(self.max_draft_len, self.topk)
        if self.max_total_draft_tokens > pool:
            raise InvalidValueError(
                "max_total_draft_tokens", f"is {self.max_total_draft_tokens}; only {pool} candidates are drafted"
            )

    def text(self) -> str:
        """Return the settings as one mapping."""
        return (
            f'{{"max_draft_len": {self.max_draft_len}, "max_total_draft_tokens": {self.max_total_draft_tokens}, '
            f'"dynamic_tree_max_topK": {self.topk}}}'
        )


def check_schedule(schedule: Mapping[int, int], max_draft_len: int | None = None) -> None:
    """Check ``draft_len_schedule``.

    Parameters
    ----------
    schedule : mapping of int to int
        Largest batch size of a range to the draft length in it; above the last one speculation is off.
    max_draft_len : int, optional
        What stands beside it in the configuration.

    Raises
    ------
    InvalidValueError
        Naming the rule that is broken.
    """
    if not schedule:
        raise InvalidValueError("draft_len_schedule", "is empty; give at least one batch size")
    if list(schedule) != sorted(schedule):
        raise InvalidValueError("draft_len_schedule", "must be sorted by batch size")
    for batch_size, length in schedule.items():
        if batch_size < 1:
            raise InvalidValueError("draft_len_schedule", f"has batch size {batch_size}; 1 is the least")
        if length < 0:
            raise InvalidValueError(f"draft_len_schedule[{batch_size}]", f"is {length}; 0 is the least")
    first = next(iter(schedule))
    longest = schedule[first] if max_draft_len is None else max_draft_len
    if schedule[first] != longest:
        raise InvalidValueError(
            f"draft_len_schedule[{first}]",
            f"is {schedule[first]}; at the smallest batch size it must equal max_draft_len, {longest}",
        )
    for batch_size, length in schedule.items():
        if length > longest:
            raise InvalidValueError(
                f"draft_len_schedule[{batch_size}]", f"is {length}, above max_draft_len, {longest}; that is the most"
            )


def schedule_text(schedule: Mapping[int, int], max_draft_len: int | None = None) -> str:
    """Return the value of ``draft_len_schedule``.

    Raises
    ------
    InvalidValueError
        When TensorRT-LLM would refuse it.
    """
    check_schedule(schedule, max_draft_len)
    return str(dict(schedule))
