"""Acceptance models: the conditional probability that a guess is right, as one trie that every search walks.

Two models read the same table:

independent
    The paper's: distances do not depend on each other, so a path's probability is the product of its marginals. All
    nodes of one depth look alike and are folded into one trie node per depth.
joint
    Beyond the paper: shares of whole recorded rank paths. One trie node for all recorded paths of one depth below which
    everything is equally probable: most long paths were recorded once, so most nodes look like others.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from treeopt.errors import InvalidValueError, SearchError
from treeopt.types import AcceptanceTable

__all__ = ["AcceptanceTrie", "acceptance_trie", "exit_share"]

_ROUNDING = 1e-12
"""Probability left over below this is rounding of children that sum to 1, not a way to leave."""


@dataclass(frozen=True, slots=True)
class AcceptanceTrie:
    """Child probabilities of every node that a tree can reach.

    Parameters
    ----------
    name : {"independent", "joint"}
        Which acceptance model this is.
    num_distances : int
        ``m``; nodes at depth m have no children.
    num_ranks : int
        ``K``.
    tokens_per_prompt_token : int
        ``e``.
    depths : tuple of int
        Depth of each trie node; node 0 is the root.
    children : tuple of dict
        ``children[node][rank] = (probability, child)``: probability that the rank-``rank`` guess is right, given that
        ``node`` was accepted; only ranks with a probability above 0. ``child`` is -1 at depth m.
    consecutive : bool
        Whether a rank may stand in a tree only together with all better ranks of the same parent, as in engines that
        number a node's children instead of naming their ranks. ``children`` then lists every rank up to the last one
        with a probability above 0.
    """

    name: str
    num_distances: int
    num_ranks: int
    tokens_per_prompt_token: int
    depths: tuple[int, ...]
    children: tuple[Mapping[int, tuple[float, int]], ...] = field(hash=False)
    consecutive: bool = False

    def step(self, node: int, rank: int) -> tuple[float, int]:
        """Return probability and trie node of one guess below ``node``; (0, -1) where none was ever right.

        Raises
        ------
        InvalidValueError
            When the table has no such rank.
        """
        if rank >= self.num_ranks:
            raise InvalidValueError(
                "path", f"rank {rank} is outside the table, which has ranks 0 to {self.num_ranks - 1}"
            )
        return self.children[node].get(rank, (0.0, -1)) if node >= 0 else (0.0, -1)


def exit_share(child_probabilities: npt.ArrayLike) -> float:
    """Return the probability that none of the given children is right: 1 minus their sum, never below 0."""
    left = 1.0 - math.fsum(np.atleast_1d(np.asarray(child_probabilities, dtype=np.float64)))
    return left if left > _ROUNDING else 0.0


def acceptance_trie(table: AcceptanceTable, model: str = "independent", *, consecutive: bool = False) -> AcceptanceTrie:
    """Read a table under one of the two acceptance models.

    Parameters
    ----------
    table : AcceptanceTable
        Marginals, and joint counts for the joint model. A row that exceeds 1 by rounding is scaled to 1.
    model : {"independent", "joint"}
        The model.
    consecutive : bool
        Whether children may leave no rank out; see `AcceptanceTrie`.

    Returns
    -------
    AcceptanceTrie

    Raises
    ------
    SearchError
        When the joint model is asked of a table without joint counts.
    """
    if model == "independent":
        trie = _independent(table)
    elif model == "joint":
        trie = _joint(table)
    else:
        raise SearchError(f"acceptance model: must be independent or joint, not {model!r}")
    return _without_gaps(trie) if consecutive else trie


def _without_gaps(trie: AcceptanceTrie) -> AcceptanceTrie:
    """List the ranks that were never right too, where a better-known worse rank needs them."""
    children = tuple(
        {rank: below.get(rank, (0.0, -1)) for rank in range(1 + max(below, default=-1))} for below in trie.children
    )
    return replace(trie, children=children, consecutive=True)


def _independent(table: AcceptanceTable) -> AcceptanceTrie:
    m = table.num_distances
    levels = []
    for j, row in enumerate(table.marginals):
        scale = max(1.0, math.fsum(row))
        child = j + 1 if j + 1 < m else -1
        levels.append({r: (float(share) / scale, child) for r, share in enumerate(row) if share > 0})
    return AcceptanceTrie(
        "independent", m, table.num_ranks, table.tokens_per_prompt_token, tuple(range(m)), tuple(levels)
    )


def _joint(table: AcceptanceTable) -> AcceptanceTrie:
    if table.ranks is None:
        raise SearchError(
            "acceptance model joint: the table has no joint counts (field ranks); measure them with `treeopt measure`, "
            "or use --acceptance-model independent"
        )
    m, num_ranks = table.num_distances, table.num_ranks
    counts: dict[tuple[int, ...], int] = {(): 0}
    for *ranks, count in table.ranks:
        counts[()] += count
        for depth in range(1, m + 1):
            if ranks[depth - 1] >= num_ranks:
                break  # K stands for "K or worse": no candidate can be built on it
            path = tuple(ranks[:depth])
            counts[path] = counts.get(path, 0) + count
    inner = sorted((path for path in counts if len(path) < m), key=lambda path: (len(path), path))
    node_of = {path: node for node, path in enumerate(inner)}
    children: tuple[dict[int, tuple[float, int]], ...] = tuple({} for _ in inner)
    for path in sorted(counts, key=lambda path: (len(path), path))[1:]:
        parent = path[:-1]
        children[node_of[parent]][path[-1]] = (counts[path] / counts[parent], node_of.get(path, -1))
    depths = tuple(len(path) for path in inner)
    return _folded(AcceptanceTrie("joint", m, num_ranks, table.tokens_per_prompt_token, depths, children))


def _folded(trie: AcceptanceTrie) -> AcceptanceTrie:
    """Keep one of all nodes with the same depth and the same children; children have higher numbers than parents."""
    kept: dict[tuple[int, tuple[tuple[int, tuple[float, int]], ...]], int] = {}
    stands_for = {-1: -1}
    for node in range(len(trie.depths) - 1, -1, -1):
        below = tuple((rank, (share, stands_for[child])) for rank, (share, child) in trie.children[node].items())
        stands_for[node] = kept.setdefault((trie.depths[node], below), node)
    number = {-1: -1} | {node: i for i, node in enumerate(sorted(kept.values()))}
    nodes = sorted((node, depth, below) for (depth, below), node in kept.items())
    return replace(
        trie,
        depths=tuple(depth for _, depth, _ in nodes),
        children=tuple({rank: (share, number[child]) for rank, (share, child) in below} for *_, below in nodes),
    )
