"""Static trees as lists of rank paths: ``[[0], [0, 0], [1], ..]``.

Medusa calls them ``medusa_choices`` (Hydra shares them), EAGLE-1 ``choices``, TensorRT-LLM ``eagle_choices``. The root
is not listed. Guesses cost no tokens there, so one tree of a design matters, and every node carries all m guesses.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from treeopt.errors import InvalidValueError
from treeopt.types import MAX_BUDGET, SparseTree, TreeDesign

__all__ = [
    "MAX_RANK",
    "check_choices",
    "check_consecutive",
    "check_eagle_choices",
    "choices_text",
    "design_from_paths",
    "eagle_choices_text",
    "paths_from_value",
    "paths_of_design",
]

Path = tuple[int, ...]

MAX_RANK = 9
"""Medusa and EAGLE-1 look up the ten best tokens of each head (``TOPK = 10``)."""


def check_choices(paths: Sequence[Path], num_heads: int | None = None) -> None:
    """Check a tree against what Medusa and Hydra can run.

    Parameters
    ----------
    paths : sequence of tuple of int
        Rank paths, any order.
    num_heads : int, optional
        Heads of the model: the depth limit.

    Raises
    ------
    InvalidValueError
        Naming the rule that is broken.
    """
    if not paths:
        raise InvalidValueError(
            "choices", "is empty; the engine needs at least one path, or run it without speculation"
        )
    if len(paths) >= MAX_BUDGET:
        raise InvalidValueError("choices", f"has {len(paths)} paths; {MAX_BUDGET - 1} is the most a tree may have")
    known = set(paths)
    if len(known) != len(paths):
        repeated = next(path for path in paths if paths.count(path) > 1)
        raise InvalidValueError("choices", f"repeats {list(repeated)}; keep one of the two")
    for path in paths:
        place = f"choices {list(path)}"
        if not path:
            raise InvalidValueError("choices", "lists the root, []; it is implied, remove it")
        if min(path) < 0:
            raise InvalidValueError(place, "has a rank below 0; ranks count from 0")
        if max(path) > MAX_RANK:
            raise InvalidValueError(place, f"uses rank {max(path)}; the engine looks up ranks 0 to {MAX_RANK} only")
        if num_heads is not None and len(path) > num_heads:
            raise InvalidValueError(place, f"is {len(path)} deep; the model has {num_heads} heads")
        if len(path) > 1 and path[:-1] not in known:
            raise InvalidValueError(place, f"lacks its prefix {list(path[:-1])}; every prefix must be listed")


def check_eagle_choices(paths: Sequence[Path], num_heads: int | None = None) -> None:
    """Check a tree against what EAGLE-1 and TensorRT-LLM can run: Medusa's rules, and no rank left out.

    TensorRT-LLM drafts as many best tokens as a node has children, so the children are ranks 0, 1, .. whatever they
    are called.

    Raises
    ------
    InvalidValueError
        Naming the rule that is broken.
    """
    check_choices(paths, num_heads)
    check_consecutive(paths)


def check_consecutive(paths: Iterable[Path]) -> None:
    """Check that every node's children are ranks 0, 1, .. without gaps.

    Raises
    ------
    InvalidValueError
        Naming the first rank that is missing.
    """
    known = set(paths)
    for path in sorted(known, key=lambda path: (len(path), path)):
        if path[-1] and (*path[:-1], path[-1] - 1) not in known:
            missing = [*path[:-1], path[-1] - 1]
            raise InvalidValueError(
                f"choices {list(path)}", f"leaves out {missing}; the engine numbers children, so no rank may be missing"
            )


def choices_text(paths: Iterable[Path], num_heads: int | None = None) -> str:
    """Return ``medusa_choices``, sorted by depth, then path.

    Raises
    ------
    InvalidValueError
        When Medusa cannot run the tree.

    Examples
    --------
    >>> choices_text([(1,), (0,), (0, 2)])
    '[[0], [1], [0, 2]]'
    """
    paths = _sorted(paths)
    check_choices(paths, num_heads)
    return str([list(path) for path in paths])


def eagle_choices_text(paths: Iterable[Path], num_heads: int | None = None) -> str:
    """Return EAGLE-1's and TensorRT-LLM's choices, sorted by depth, then path.

    Raises
    ------
    InvalidValueError
        When the engines cannot run the tree.
    """
    paths = _sorted(paths)
    check_eagle_choices(paths, num_heads)
    return str([list(path) for path in paths])


def _sorted(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: (len(path), path))


def paths_from_value(value: Any) -> list[Path]:
    """Turn a parsed list of lists (or tuples) of whole numbers into paths.

    Raises
    ------
    InvalidValueError
        When it is something else.
    """
    if not isinstance(value, list | tuple):
        raise InvalidValueError("choices", f"is a {type(value).__name__}; give a list of rank paths")
    paths = []
    for i, path in enumerate(value):
        whole = isinstance(path, list | tuple) and all(isinstance(r, int) and not isinstance(r, bool) for r in path)
        if not whole:
            raise InvalidValueError(f"choices[{i}]", "is no list of whole numbers; give ranks from the root down")
        paths.append(tuple(path))
    return paths


def paths_of_design(design: TreeDesign, engine: str) -> list[Path]:
    """Return the candidate paths of a design's last state, for an engine without prompt tokens.

    Raises
    ------
    InvalidValueError
        When the design counts on prompt tokens.
    """
    if design.tokens_per_prompt_token:
        raise InvalidValueError(
            "tokens_per_prompt_token",
            f"is {design.tokens_per_prompt_token}: the design needs prompt tokens, {engine} has none; search a tree "
            "for it with `treeopt search --target`",
        )
    return [node.path for node in design.trees[-1].nodes[1:]]


def design_from_paths(paths: Iterable[Path], num_distances: int | None = None) -> TreeDesign:
    """Build the design of a static tree without prompt tokens.

    Parameters
    ----------
    paths : iterable of tuple of int
        Rank paths, without the root.
    num_distances : int, optional
        ``m``, the guesses that are made; the tree's depth (at least 1) without it.

    Returns
    -------
    TreeDesign
        Method ``imported``. State m uses the whole tree, state k its first k levels; with guesses that cost nothing
        only state m is ever entered.

    Raises
    ------
    InvalidValueError
        When a prefix is missing or the tree is deeper than ``num_distances``.
    """
    paths = list(paths)
    depth = max((len(path) for path in paths), default=0)
    m = max(1, depth) if num_distances is None else num_distances
    if depth > m:
        raise InvalidValueError("choices", f"are {depth} deep; there are guesses for {m} distances")
    trees = tuple(
        SparseTree.from_prompt_tokens({path: m for path in [(), *paths] if len(path) <= k}) for k in range(m + 1)
    )
    return TreeDesign(
        trees=trees,
        budget=None,
        method="imported",
        objective="tau",
        acceptance_model=None,
        tokens_per_prompt_token=0,
        pass_tokens=tuple(tree.size(0) for tree in trees),
        acceptance_length=None,
        upper_bound=None,
    )
