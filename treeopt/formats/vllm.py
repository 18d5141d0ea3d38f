"""vLLM: ``speculative_token_tree`` and ``num_speculative_tokens_per_batch_size``.

The token tree is a Python literal, a list of tuples of ranks sorted by depth, then path. vLLM's tree attention gave all
nodes of a level the same number of children, the best ranks; it was removed in May 2026.
"""

from collections.abc import Iterable, Sequence

from treeopt.errors import InvalidValueError
from treeopt.formats.choices import check_consecutive

__all__ = ["batch_ranges_text", "check_batch_ranges", "check_token_tree", "token_tree_text", "uniform_paths"]

Path = tuple[int, ...]


def check_token_tree(paths: Sequence[Path], num_speculative_tokens: int | None = None) -> None:
    """Check a tree against what vLLM's tree attention could run.

    Parameters
    ----------
    paths : sequence of tuple of int
        The tree, in the order of the text.
    num_speculative_tokens : int, optional
        What stands beside it in the configuration.

    Raises
    ------
    InvalidValueError
        Naming the rule that is broken.
    """
    if not paths:
        raise InvalidValueError("speculative_token_tree", "is empty; run vLLM without a speculative configuration")
    if any(not path for path in paths):
        raise InvalidValueError("speculative_token_tree", "lists the root, (); it is implied, remove it")
    if list(paths) != sorted(set(paths), key=lambda path: (len(path), path)):
        raise InvalidValueError("speculative_token_tree", "must be sorted by depth, then path, without repeats")
    if num_speculative_tokens is not None and len(paths) != num_speculative_tokens:
        raise InvalidValueError(
            "num_speculative_tokens",
            f"is {num_speculative_tokens}; the tree has {len(paths)} nodes and the two must be equal",
        )
    known = {(), *paths}
    children = dict.fromkeys(known, 0)
    for path in paths:
        if min(path) < 0:
            raise InvalidValueError(f"speculative_token_tree {path}", "has a rank below 0; ranks count from 0")
        if path[:-1] not in known:
            raise InvalidValueError(f"speculative_token_tree {path}", f"lacks its prefix {path[:-1]}; list it too")
        children[path[:-1]] += 1
    check_consecutive(paths)
    for depth in range(len(paths[-1])):
        counts = {count for path, count in children.items() if len(path) == depth}
        if len(counts) > 1:
            raise InvalidValueError(
                "speculative_token_tree",
                f"nodes at depth {depth} have {sorted(counts)} children; vLLM gives all nodes of a level as many",
            )


def token_tree_text(paths: Iterable[Path], num_speculative_tokens: int | None = None) -> str:
    """Return the value of ``speculative_token_tree``.

    Raises
    ------
    InvalidValueError
        When vLLM could not run the tree.

    Examples
    --------
    >>> token_tree_text([(0, 0), (1, 0), (0,), (1,)])
    '[(0,), (1,), (0, 0), (1, 0)]'
    """
    paths = sorted(paths, key=lambda path: (len(path), path))
    check_token_tree(paths, num_speculative_tokens)
    return str(paths)


def uniform_paths(widths: Sequence[int]) -> list[Path]:
    """Return the paths of the tree whose nodes at depth d each have ``widths[d]`` children."""
    level: list[Path] = [()]
    paths: list[Path] = []
    for width in widths:
        level = [(*path, rank) for path in level for rank in range(width)]
        paths += level
    return paths


def check_batch_ranges(ranges: Sequence[Sequence[int]], num_speculative_tokens: int | None = None) -> None:
    """Check ``num_speculative_tokens_per_batch_size``.

    Parameters
    ----------
    ranges : sequence of (first batch size, last batch size, K)
        Draft tokens by batch size, both ends included.
    num_speculative_tokens : int, optional
        The largest draft length of the configuration.

    Raises
    ------
    InvalidValueError
        Naming the rule that is broken.
    """
    name = "num_speculative_tokens_per_batch_size"
    if not ranges:
        raise InvalidValueError(name, "is empty; give at least one range")
    end = 0
    for i, entry in enumerate(ranges):
        place = f"{name}[{i}]"
        whole = len(entry) == 3 and all(isinstance(x, int) and not isinstance(x, bool) for x in entry)
        if not whole:
            raise InvalidValueError(place, "must be three whole numbers: first batch size, last batch size, tokens")
        first, last, tokens = entry
        if i == 0 and first != 1:
            raise InvalidValueError(place, f"starts at batch size {first}; the first range must start at 1")
        if first <= end:
            raise InvalidValueError(
                place, f"starts at {first}, inside or before the range that ends at {end}; sort them"
            )
        if last < first:
            raise InvalidValueError(place, f"ends at {last}, before it starts at {first}; swap them")
        if tokens < 0:
            raise InvalidValueError(place, f"asks for {tokens} draft tokens; 0 is the least")
        if num_speculative_tokens is not None and tokens > num_speculative_tokens:
            raise InvalidValueError(
                place, f"asks for {tokens} draft tokens; num_speculative_tokens allows {num_speculative_tokens}"
            )
        end = last


def batch_ranges_text(ranges: Sequence[Sequence[int]], num_speculative_tokens: int | None = None) -> str:
    """Return the value of ``num_speculative_tokens_per_batch_size``, as JSON.

    Raises
    ------
    InvalidValueError
        When vLLM would refuse it.
    """
    check_batch_ranges(ranges, num_speculative_tokens)
    return str([list(entry) for entry in ranges])
