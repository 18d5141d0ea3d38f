"""The paper's greedy search (section 4.2), and the two allocations it is compared with in Figure 8a.

For a given number of candidates per state, take the most probable paths, hang m prompt tokens on each, then remove the
prompt token whose loss ``dF`` is smallest until the budget holds. The number of candidates is searched: first one
number for all states, then state by state for as long as that helps.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from treeopt.acceptance import AcceptanceTrie
from treeopt.errors import SearchError
from treeopt.markov import acceptance_length, occupancy
from treeopt.types import SparseTree

__all__ = ["greedy_trees", "naive_trees", "random_trees"]

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The most probable paths of depth 1..k, best first; a parent always stands before its children."""

    paths: tuple[Path, ...]
    probability: Floats
    parent: Counts  # place of the parent, -1 for the root

    def exits(self, count: int) -> tuple[Floats, float]:
        """Return exit probabilities of the first ``count`` candidates, and the root's."""
        below = np.zeros(count + 1)
        np.add.at(below, self.parent[:count] + 1, self.probability[:count])
        held = np.concatenate(([1.0], self.probability[:count]))
        left = held - below
        left[left < 1e-12 * held] = 0.0
        return left[1:], float(left[0])


def _most_probable(trie: AcceptanceTrie, depth: int, count: int) -> _Candidates:
    paths: list[Path] = []
    probability: list[float] = []
    parent: list[int] = []
    frontier: list[tuple[float, int, Path, int, int]] = []

    def open_below(path: Path, node: int, share: float, place: int) -> None:
        if len(path) < depth:
            for rank, (conditional, child) in trie.children[node].items():
                heapq.heappush(frontier, (-share * conditional, len(path) + 1, (*path, rank), child, place))

    open_below((), 0, 1.0, -1)
    while frontier and len(paths) < count:
        negative, _, path, node, above = heapq.heappop(frontier)
        paths.append(path)
        probability.append(-negative)
        parent.append(above)
        open_below(path, node, -negative, len(paths) - 1)
    return _Candidates(tuple(paths), np.array(probability), np.array(parent, dtype=np.int64))


def _allocate(exits: Floats, gains: Floats, num_removals: int) -> Counts:
    """Prompt tokens per candidate after the cheapest ``num_removals`` removals.

    Parameters
    ----------
    exits : ndarray, shape (candidates,)
        Exit probabilities.
    gains : ndarray, shape (m,)
        ``gains[i-1] = f(T_i) - f(T_{i-1})``.
    num_removals : int
        Prompt tokens to remove; each candidate keeps one.

    Notes
    -----
    A candidate's prompt tokens go one after the other, m to m - 1 to m - 2 and so on, and the cheapest that can go next
    always goes. That order is the order of running maxima along each candidate's losses, so one sort replaces a heap.
    """
    m = len(gains)
    losses = np.maximum.accumulate(exits[:, None] * gains[None, :0:-1], axis=1)
    candidate, turn = np.indices(losses.shape)
    order = np.lexsort((turn.ravel(), -candidate.ravel(), losses.ravel()))[:num_removals]
    return m - np.bincount(candidate.ravel()[order], minlength=len(exits))


class _Split:
    """Value of one choice of the number of candidates per state."""

    def __init__(self, trie: AcceptanceTrie, budget: int) -> None:
        self.m, self.e, self.budget = trie.num_distances, trie.tokens_per_prompt_token, budget
        least = 1 + self.e * self.m
        if budget < least:
            raise SearchError(
                f"method greedy: budget {budget} is below {least}, the root and its {self.m} prompt tokens; "
                "raise --budget or use --method exact"
            )
        room = (budget - least) // (1 + self.e)
        self.candidates = [_most_probable(trie, k, room) for k in range(self.m + 1)]
        self.most = [len(c.paths) for c in self.candidates]

    def prompt_tokens(self, counts: list[int]) -> list[Counts]:
        f = np.array([1.0 + c.probability[:n].sum() for c, n in zip(self.candidates, counts, strict=True)])
        return [self._of_state(k, n, np.diff(f)) for k, n in enumerate(counts)]

    def _of_state(self, k: int, count: int, gains: Floats) -> Counts:
        excess = 1 + self.e * self.m + count * (1 + self.e * self.m) - self.budget
        if self.e == 0 or excess <= 0:
            return np.full(count, self.m)
        return _allocate(self.candidates[k].exits(count)[0], gains, -(-excess // self.e))

    def tau(self, counts: list[int]) -> float:
        rows = np.zeros((self.m + 1, self.m + 1))
        for k, held in enumerate(self.prompt_tokens(counts)):
            exits, root_exit = self.candidates[k].exits(counts[k])
            rows[k] = np.bincount(held, weights=exits, minlength=self.m + 1)
            rows[k, self.m] += root_exit
        f = [1.0 + float(c.probability[:n].sum()) for c, n in zip(self.candidates, counts, strict=True)]
        return float(occupancy(rows, self.m) @ np.array(f))

    def trees(self, counts: list[int]) -> tuple[SparseTree, ...]:
        return tuple(self._tree(k, held.tolist()) for k, held in enumerate(self.prompt_tokens(counts)))

    def _tree(self, k: int, held: list[int]) -> SparseTree:
        paths = self.candidates[k].paths[: len(held)]
        return SparseTree.from_prompt_tokens({(): self.m, **dict(zip(paths, held, strict=True))})


def _best_counts(split: _Split, progress: Callable[[str], None] | None) -> list[int]:
    """Numbers of candidates per state: the best common number, then coordinate ascent until nothing improves."""
    common = [[min(n, most) for most in split.most] for n in range(max(split.most) + 1)]
    best, best_tau = common[0], split.tau(common[0])
    for counts in common[1:]:
        tau = split.tau(counts)
        if tau > best_tau:
            best, best_tau = counts, tau
    improved = True
    while improved:
        improved = False
        for k in range(1, split.m + 1):
            if progress is not None:
                progress(f"candidates of state {k}, tau {best_tau:.6f}")
            for count in range(split.most[k] + 1):
                counts = [*best[:k], count, *best[k + 1 :]]
                tau = split.tau(counts)
                # Rounding alone must not keep the ascent going.
                if tau > best_tau + 1e-13:
                    best, best_tau, improved = counts, tau, True
    return best


def greedy_trees(
    trie: AcceptanceTrie, budget: int, progress: Callable[[str], None] | None = None
) -> tuple[SparseTree, ...]:
    """Find trees by the paper's two greedy stages (section 4.2).

    Parameters
    ----------
    trie : AcceptanceTrie
        The acceptance model.
    budget : int
        Cap on every state's forward pass, tokens; at least ``1 + e m``, since the root keeps all m prompt tokens.
    progress : callable, optional
        Called with one line now and then.

    Returns
    -------
    tuple of SparseTree
        One per state.

    Raises
    ------
    SearchError
        When the budget is below ``1 + e m``.
    """
    split = _Split(trie, budget)
    return split.trees(_best_counts(split, progress))


def naive_trees(trie: AcceptanceTrie, budget: int) -> tuple[SparseTree, ...]:
    """Give every candidate the same number of prompt tokens, the best such number (a baseline of Figure 8a).

    Raises
    ------
    SearchError
        When the budget is below ``1 + e m``.
    """
    split = _Split(trie, budget)
    m, e = split.m, split.e
    designs = []
    for held in range(1, m + 1) if e else [m]:
        room = (budget - 1 - e * m) // (1 + e * held)
        counts = [min(room, most) for most in split.most]
        designs.append(tuple(split._tree(k, [held] * counts[k]) for k in range(m + 1)))
    return max(designs, key=lambda trees: acceptance_length(trie, trees))


def random_trees(trie: AcceptanceTrie, budget: int, seed: int) -> tuple[SparseTree, ...]:
    """Remove prompt tokens at random from the greedy search's candidates (a baseline of Figure 8a).

    Raises
    ------
    SearchError
        When the budget is below ``1 + e m``.
    """
    split = _Split(trie, budget)
    rng = np.random.default_rng(seed)
    trees = []
    for k, held in enumerate(split.prompt_tokens(_best_counts(split, None))):
        removable = np.repeat(np.arange(len(held)), split.m - 1)
        removed = rng.permutation(removable)[: split.m * len(held) - int(held.sum())]
        trees.append(split._tree(k, (split.m - np.bincount(removed, minlength=len(held))).tolist()))
    return tuple(trees)
