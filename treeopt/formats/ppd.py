"""The PPD authors' files (hmarkc/parallel-prompt-decoding): ``dynamic_sparse_trees_N`` and accuracy tensors.

A dictionary maps a state k = 1..m to its candidates, each ``[path, exit probability, prompt tokens]``. The root is not
listed and always keeps m prompt tokens, state 0 is never entered, and N counts neither the root nor its prompt tokens.
"""

import math
from typing import Any

from treeopt.errors import InvalidValueError
from treeopt.types import AcceptanceTable, SparseTree, TreeDesign

__all__ = ["design_from_trees", "table_from_accuracies"]

Path = tuple[int, ...]


def design_from_trees(value: Any) -> TreeDesign:
    """Build the design of one of the authors' dictionaries.

    Parameters
    ----------
    value : mapping
        ``{1: [[[0], 0.48, 3], ..], .., m: [..]}``.

    Raises
    ------
    InvalidValueError
        Naming the state and entry that are wrong.
    """
    if not isinstance(value, dict) or not value:
        raise InvalidValueError("dynamic_sparse_trees", "must be a dictionary from state to candidates")
    m = len(value)
    if set(value) != set(range(1, m + 1)):
        raise InvalidValueError(
            "dynamic_sparse_trees", f"must have the states 1 to {m}; they are {_shown(list(value))}"
        )
    trees = [SparseTree.from_prompt_tokens({(): m})]
    for state in range(1, m + 1):
        entries = value[state]
        if not isinstance(entries, list):
            raise InvalidValueError(f"states.{state}", "must be a list of candidates")
        held: dict[Path, int] = {(): m}
        for i, entry in enumerate(entries):
            path, tokens = _candidate(entry, f"states.{state}[{i}]", m)
            if path in held:
                raise InvalidValueError(f"states.{state}[{i}]", f"repeats {list(path)}; keep one of the two")
            held[path] = tokens
        trees.append(SparseTree.from_prompt_tokens(held))
    return TreeDesign(
        trees=tuple(trees),
        budget=None,
        method="imported",
        objective="tau",
        acceptance_model=None,
        tokens_per_prompt_token=1,
        pass_tokens=tuple(tree.size(1) for tree in trees),
        acceptance_length=None,
        upper_bound=None,
    )


def _candidate(entry: Any, place: str, m: int) -> tuple[Path, int]:
    if not isinstance(entry, list | tuple) or len(entry) != 3:
        raise InvalidValueError(place, "must be [path, exit probability, prompt tokens]")
    path, probability, tokens = entry
    if not isinstance(path, list | tuple) or not path or not all(_whole(rank) and rank >= 0 for rank in path):
        raise InvalidValueError(f"{place}[0]", "must be a path of ranks, 0 or more; the root is not listed")
    if isinstance(probability, bool) or not isinstance(probability, int | float) or not math.isfinite(probability):
        raise InvalidValueError(f"{place}[1]", "must be a probability")
    if not _whole(tokens) or not 1 <= tokens <= m:
        raise InvalidValueError(f"{place}[2]", f"must be 1 to {m} prompt tokens")
    return tuple(path), tokens


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: object) -> str:
    return str(value)[:60]


def table_from_accuracies(value: Any) -> AcceptanceTable:
    """Read the authors' accuracy tensors as an acceptance table.

    Parameters
    ----------
    value : list of bool tensors, each of shape (positions, rows, K)
        One per distance: whether the rank-r guess was the true token.

    Raises
    ------
    InvalidValueError
        When it is something else, or two ranks are right at once.

    Notes
    -----
    Positions of different distances are not aligned across prompts, so no joint counts can be made.
    """
    if not isinstance(value, list | tuple) or not value:
        raise InvalidValueError("accuracies", "must be a list of tensors, one per distance")
    rows = []
    num_samples = []
    for j, hits in enumerate(value):
        place = f"accuracies[{j}]"
        if getattr(hits, "ndim", None) != 3 or "bool" not in str(getattr(hits, "dtype", "")):
            raise InvalidValueError(place, "must be a bool tensor of shape (positions, rows, ranks)")
        if hits.numel() > 2**28 or not hits.numel():
            raise InvalidValueError(place, f"has {hits.numel()} entries; 1 to {2**28} are read")
        flat = hits.reshape(-1, hits.shape[2]).numpy()
        if (flat.sum(axis=1) > 1).any():
            raise InvalidValueError(place, "has positions at which two ranks are right; ranks must be distinct tokens")
        rows.append(tuple(float(share) for share in flat.mean(axis=0)))
        num_samples.append(len(flat))
    return AcceptanceTable(
        model="unknown",
        source="accuracy tensors of hmarkc/parallel-prompt-decoding",
        rule="greedy",
        temperature=0.0,
        num_samples=min(num_samples),
        marginals=tuple(rows),
    )
