"""Sequoia's growmaps (``.pt``), their JSON twin in UMbreLLa, and Sequoia's acceptance vector.

A growmap lists a tree level by level, nodes numbered breadth first:

==============  =====================================================================
``roots``       node numbers of each level
``branches``    number of children of each node, in the shape of ``roots``
``Successors``  node numbers of each node's children
``mask``        n x n, 1 where a row's node sees a column's node: its ancestors and itself
``depth``       depth of each node
``size``        n, the root included
==============  =====================================================================

Children are the drafts of rank 0, 1, .. of their parent, so no rank can be left out.
"""

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from treeopt.errors import InvalidValueError
from treeopt.formats.choices import check_consecutive
from treeopt.formats.reading import save_torch
from treeopt.types import MAX_BUDGET, AcceptanceTable

__all__ = [
    "check_growmap_paths",
    "growmap",
    "growmap_bytes",
    "growmap_text",
    "paths_from_growmap",
    "table_from_vector",
]

Path = tuple[int, ...]
Json = dict[str, Any]

_FIELDS = ("roots", "branches", "Successors", "mask", "depth", "size")


def check_growmap_paths(paths: Sequence[Path]) -> None:
    """Check that a tree can be written as a growmap.

    Raises
    ------
    InvalidValueError
        Naming the rule that is broken: every prefix present, no rank left out.
    """
    if len(paths) >= MAX_BUDGET:
        raise InvalidValueError("size", f"is {len(paths) + 1}; {MAX_BUDGET} is the most a tree may have")
    known = {(), *paths}
    for path in paths:
        if path[:-1] not in known:
            raise InvalidValueError(f"choices {list(path)}", f"lacks its prefix {list(path[:-1])}; list it too")
    check_consecutive(paths)


def growmap(paths: Iterable[Path]) -> Json:
    """Return the growmap of a tree, in plain lists; the root alone is a tree too.

    Raises
    ------
    InvalidValueError
        When the tree cannot be written as one.

    Examples
    --------
    >>> growmap([(0,), (1,), (0, 0)])["Successors"]
    [[1, 2], [3], [], []]
    """
    nodes = sorted({(), *paths}, key=lambda path: (len(path), path))
    check_growmap_paths(nodes[1:])
    number = {path: i for i, path in enumerate(nodes)}
    successors: list[list[int]] = [[] for _ in nodes]
    roots: list[list[int]] = [[] for _ in range(len(nodes[-1]) + 1)]
    for i, path in enumerate(nodes):
        roots[len(path)].append(i)
        if path:
            successors[number[path[:-1]]].append(i)
    return {
        "roots": roots,
        "branches": [[len(successors[i]) for i in level] for level in roots],
        "Successors": successors,
        "mask": _mask(successors).tolist(),
        "depth": [len(path) for path in nodes],
        "size": len(nodes),
    }


def _mask(successors: list[list[int]]) -> npt.NDArray[np.int64]:
    mask = np.eye(len(successors), dtype=np.int64)
    for parent, children in enumerate(successors):
        for child in children:
            mask[child] |= mask[parent]
    return mask


def growmap_text(paths: Iterable[Path]) -> str:
    """Return the JSON file that UMbreLLa reads.

    Raises
    ------
    InvalidValueError
        When the tree cannot be written as a growmap.
    """
    return json.dumps(growmap(paths))


def growmap_bytes(paths: Iterable[Path]) -> bytes:
    """Return the ``.pt`` file that Sequoia reads.

    Raises
    ------
    InvalidValueError
        When the tree cannot be written as a growmap.
    DocumentError
        When torch is missing.
    """
    content = growmap(paths)

    import torch

    content["mask"] = torch.tensor(content["mask"], dtype=torch.long)
    content["depth"] = torch.tensor(content["depth"], dtype=torch.long)
    return save_torch(content)


def paths_from_growmap(value: Any) -> list[Path]:
    """Check a growmap and return its candidate paths.

    Parameters
    ----------
    value : mapping
        A growmap whose ``mask`` and ``depth`` are lists or tensors.

    Raises
    ------
    InvalidValueError
        Naming the field that is wrong.
    """
    if not isinstance(value, dict):
        raise InvalidValueError("growmap", f"is a {type(value).__name__}; give a dictionary with {', '.join(_FIELDS)}")
    for name in _FIELDS:
        if name not in value:
            raise InvalidValueError(name, "is missing; a growmap has " + ", ".join(_FIELDS))
    paths = _numbered_paths(value["Successors"])
    expected = growmap(paths[1:])
    if not _whole(value["size"]) or value["size"] != len(paths):
        raise InvalidValueError("size", f"must be {len(paths)}, the number of Successors")
    for name in ("roots", "branches"):
        if not _is_ragged(value[name], len(paths)) or value[name] != expected[name]:
            raise InvalidValueError(name, f"does not follow from Successors; it must begin {str(expected[name])[:60]}")
    if not _equals(value["depth"], np.array(expected["depth"])):
        raise InvalidValueError("depth", "does not follow from Successors; give each node's depth, the root's is 0")
    if not _equals(value["mask"], np.array(expected["mask"])):
        raise InvalidValueError("mask", "must be 1 exactly where a node sees its ancestors and itself")
    return paths[1:]


def _numbered_paths(successors: Any) -> list[Path]:
    """Return every node's path; the numbering must be breadth first."""
    if not isinstance(successors, list) or not 1 <= len(successors) <= MAX_BUDGET:
        raise InvalidValueError("Successors", f"must be a list with one entry per node, 1 to {MAX_BUDGET}")
    if not _is_ragged(successors, len(successors)):
        raise InvalidValueError("Successors", "must be lists of node numbers, every node but the root in one of them")
    paths: list[Path] = [()]
    for node, children in enumerate(successors):
        if node >= len(paths):
            raise InvalidValueError(f"Successors[{node}]", "belongs to a node that is nobody's child; remove it")
        if children != list(range(len(paths), len(paths) + len(children))):
            raise InvalidValueError(
                f"Successors[{node}]",
                f"must number its children from {len(paths)} on: nodes are numbered breadth first",
            )
        paths += [(*paths[node], rank) for rank in range(len(children))]
    if len(paths) != len(successors):
        raise InvalidValueError("Successors", f"names {len(paths)} nodes but has {len(successors)} entries")
    return paths


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_ragged(value: Any, most: int) -> bool:
    """Say whether a value is a list of lists of whole numbers, at most ``most`` numbers in all."""
    if not isinstance(value, list) or len(value) > most or not all(isinstance(row, list) for row in value):
        return False
    return sum(map(len, value)) <= most and all(_whole(item) for row in value for item in row)


def _equals(value: Any, expected: npt.NDArray[np.int64]) -> bool:
    """Compare a list or tensor with an array, its shape first: a small file can describe a huge tensor."""
    if hasattr(value, "shape"):
        return tuple(value.shape) == expected.shape and bool(np.array_equal(np.asarray(value), expected))
    if not isinstance(value, list) or len(value) != len(expected):
        return False
    if expected.ndim == 1:
        return all(_whole(item) for item in value) and value == expected.tolist()
    return all(
        isinstance(row, list) and len(row) == len(expected) and all(map(_whole, row)) and row == wanted.tolist()
        for row, wanted in zip(value, expected, strict=True)
    )


def table_from_vector(value: Any, num_distances: int) -> AcceptanceTable:
    """Read Sequoia's acceptance vector: one probability per rank, the same at every distance.

    Parameters
    ----------
    value : tensor or list, shape (K + 2,)
        Entry 0 and the last entry are not ranks.
    num_distances : int
        Distances to build rows for; Sequoia's ``max_depth`` less 1, because it counts the root.

    Raises
    ------
    InvalidValueError
        When it is no vector of probabilities.
    """
    shape = tuple(value.shape) if hasattr(value, "shape") else (len(value),) if isinstance(value, list) else ()
    if len(shape) != 1 or not 3 <= shape[0] <= MAX_BUDGET:
        raise InvalidValueError("acceptance vector", "must be one-dimensional, with at least one rank between its ends")
    row = [float(x) for x in (value.tolist() if hasattr(value, "tolist") else value)][1:-1]
    if not all(math.isfinite(x) for x in row):
        raise InvalidValueError("acceptance vector", "must be finite")
    if num_distances < 1:
        raise InvalidValueError("distances", f"is {num_distances}; 1 is the least")
    return AcceptanceTable(
        model="unknown",
        source="Sequoia acceptance vector",
        rule="sample",
        temperature=1.0,
        num_samples=None,
        marginals=(tuple(row),) * num_distances,
        tokens_per_prompt_token=0,
    )
