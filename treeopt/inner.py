"""The inner problem of the exact search: the best tree of one state for every size, given what next states are worth.

A tree of depth k is worth ``sum_v P(v) + sum_v q(v) h[d_v]``: its expected tokens, and the relative value of the state
that each exit leads to. Because ``q`` is ``P`` less the children's ``P``, the sum splits over the tree: below an
accepted node with d prompt tokens, ``h[d] + sum_r a_r (1 + G_r[b_r] - h[d])`` over the ranks r that get a child with
``b_r`` tokens of its own. Ranks are joined one after the other by max-plus convolution.
"""

from bisect import bisect_right, insort

import numpy as np
import numpy.typing as npt

from treeopt.acceptance import AcceptanceTrie
from treeopt.types import SparseTree

__all__ = ["InnerProblem"]

Floats = npt.NDArray[np.float64]
Path = tuple[int, ...]

_CHUNK = 1 << 18
"""Numbers handled at once by a convolution: bounds memory, not the result."""


class InnerProblem:
    """The inner problem of one state: best trees of depth ``state`` for every size up to the budget.

    ``best[node][b]`` is G: the best value below an accepted trie node with b tokens left for its own prompt tokens and
    its descendants. Arrays stop where more tokens cannot help any more.
    """

    def __init__(self, trie: AcceptanceTrie, values: Floats, state: int, budget: int) -> None:
        self.trie = trie
        self.values = values
        self.state = state
        e = trie.tokens_per_prompt_token
        # A guesser without prompt tokens gives every node all m guesses for free.
        self.held = np.arange(trie.num_distances + 1) if e else np.array([trie.num_distances])
        self.cost = e * self.held
        self.budget = budget
        self.leaf: Floats = self._own(int(min(self.cost[-1], budget - 1))).max(axis=0)
        self.best: dict[int, Floats] = {}
        for node in range(len(trie.depths) - 1, -1, -1):
            if trie.depths[node] < min(state, budget):
                self.best[node] = self._finished(self._stages(node)).max(axis=0)

    def values_at(self, num_tokens: npt.NDArray[np.int64]) -> Floats:
        """Return ``W_k[b]`` for passes of these sizes."""
        root = self._below(0)
        worth: Floats = 1.0 + root[np.minimum(num_tokens - 1, len(root) - 1)]
        return worth

    def _below(self, node: int) -> Floats:
        return self.best.get(node, self.leaf)

    def _own(self, most: int) -> Floats:
        """Value of each number of prompt tokens alone, for 0..most tokens; shape (choices, most + 1)."""
        affordable = np.arange(most + 1) >= self.cost[:, None]
        own: Floats = np.where(affordable, self.values[self.held][:, None], -np.inf)
        return own

    def _stages(self, node: int) -> list[Floats]:
        """Best values as ranks are offered one by one; each of shape (choices, tokens + 1).

        A rank may be left out, unless ranks are consecutive: then stage i holds exactly the first i ranks.
        """
        children = self.trie.children[node]
        useful = int(self.cost[-1]) + sum(len(self._below(child)) for _, child in children.values())
        stages = [self._own(min(useful, self.budget - 1 - self.trie.depths[node]))]
        for most, (share, child) in zip(self._most_tokens(node, stages[0].shape[1]), children.values(), strict=True):
            with_child = _with_child(stages[-1], *self._offer(share, child, most))
            stages.append(with_child if self.trie.consecutive else np.maximum(stages[-1], with_child))
        return stages

    def _finished(self, stages: list[Floats]) -> Floats:
        """Values once no more ranks are offered."""
        return np.maximum.reduce(stages) if self.trie.consecutive else stages[-1]

    def _most_tokens(self, node: int, length: int) -> list[int]:
        """Return the tokens worth offering to each child: a better guess of the same kind gets at least as many.

        Were it not so, the two children could exchange what hangs below them and gain.
        """
        better: dict[int, list[float]] = {}
        most = []
        for share, child in self.trie.children[node].values():
            before = better.setdefault(child, [])
            most.append(max(1, (length - 1) // (1 + bisect_right(before, -share))))
            insort(before, -share)
        return most

    def _offer(self, share: float, child: int, most: int) -> tuple[Floats, npt.NDArray[np.int64]]:
        """Return what a child adds, shape (choices, options), and the tokens each takes: only sizes that pay."""
        below = self._below(child)[:most]
        pays = np.concatenate(([0], 1 + np.flatnonzero(below[1:] > below[:-1])))
        added = share * (1.0 + below[pays] - self.values[self.held][:, None])
        return added, 1 + pays

    def tree(self, num_tokens: int) -> SparseTree:
        """Read the best tree of at most ``num_tokens`` tokens back from the values."""
        prompt_tokens: dict[Path, int] = {}
        memo: dict[int, tuple[list[Floats], list[int]]] = {}
        pending: list[tuple[Path, int, int]] = [((), 0, num_tokens - 1)]
        while pending:
            path, node, left = pending.pop()
            if node not in self.best:
                prompt_tokens[path] = self._leaf_choice(left)
                continue
            if node not in memo:
                stages = self._stages(node)
                memo[node] = stages, self._most_tokens(node, stages[0].shape[1])
            stages, most = memo[node]
            left = min(left, stages[-1].shape[1] - 1)
            choice = int(self._finished(stages)[:, left].argmax())  # the first, so the fewest prompt tokens
            prompt_tokens[path] = int(self.held[choice])
            children = list(self.trie.children[node].items())
            offered = len(children)
            if self.trie.consecutive:
                offered = int(np.argmax([stage[choice, left] for stage in stages]))
            for place in range(offered - 1, -1, -1):
                rank, (share, child) = children[place]
                value = stages[place + 1][choice, left]
                if not self.trie.consecutive and stages[place][choice, left] == value:
                    continue
                added, taken = self._offer(share, child, most[place])
                fits = taken <= left
                reached = stages[place][choice, left - taken[fits]] + added[choice, fits]
                option = int(np.flatnonzero(reached == value)[0])
                pending.append(((*path, rank), child, int(taken[option]) - 1))
                left -= int(taken[option])
        return SparseTree.from_prompt_tokens(prompt_tokens)

    def _leaf_choice(self, left: int) -> int:
        affordable = self.values[self.held][self.cost <= left]
        return int(self.held[int(affordable.argmax())])


def _with_child(values: Floats, added: Floats, taken: npt.NDArray[np.int64]) -> Floats:
    """Max-plus convolution: for every number of tokens, the best option of a child; -inf where none fits.

    Parameters
    ----------
    values : ndarray, shape (choices, tokens)
        Best values without the child.
    added : ndarray, shape (choices, options)
        What each option adds.
    taken : ndarray, shape (options,)
        Tokens each option takes, increasing.
    """
    choices, length = values.shape
    taken = taken[taken < length]
    best = np.full_like(values, -np.inf)
    if not len(taken):
        return best
    reach = int(taken[-1])
    padded = np.concatenate((np.full((choices, reach), -np.inf), values), axis=1)
    # windows[c, s] is padded[c, s : s + length], without a copy.
    strides = (padded.strides[0], padded.strides[1], padded.strides[1])
    windows = np.lib.stride_tricks.as_strided(padded, (choices, reach + 1, length), strides, writeable=False)
    width = max(1, _CHUNK // (choices * length))
    for start in range(0, len(taken), width):
        part = slice(start, start + width)
        reached = windows[:, reach - taken[part]] + added[:, : len(taken)][:, part, None]
        np.maximum(best, reached.max(axis=1), out=best)
    return best
