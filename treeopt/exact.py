"""The exact optimum: one tree per state, chosen together, with a certificate (beyond the paper).

Decoding is an average-reward semi-Markov decision process. State: prompt tokens at the last accepted node. Action: a
tree and the tokens its pass is padded to. Reward: expected tokens. Duration: 1, or the measured latency of the pass.

outer problem
    Policy iteration. Evaluate the design: relative values ``h`` and gain ``g`` from
    ``h_k + g L_k = f_k + sum_i p(s_i | s_k) h_i``. Improve: in every state the tree and size that maximise
    ``W_k[b] - g L(b)``. Stop when no state changes.
inner problem
    ``W_k[b]``: the best ``sum_v P(v) + sum_v q(v) h[d_v]`` of a tree of depth k in b tokens. Because ``q`` is ``P``
    less the children's ``P``, it splits over the tree: below an accepted node with d prompt tokens,
    ``h[d] + sum_r a_r (1 + G_r[b_r] - h[d])`` over the ranks r that get a child with ``b_r`` tokens of its own. Ranks
    are joined one after the other by max-plus convolution.
certificate
    For any ``h`` whatever, no design beats ``max_k max_b (W_k[b] - h_k) / L(b)``: weigh the inequality
    ``f_k + sum_i p(s_i | s_k) h_i - h_k <= bound * L_k`` with a design's own occupancy and the h cancel.
"""

from bisect import bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from treeopt.acceptance import AcceptanceTrie
from treeopt.errors import SearchError
from treeopt.markov import Evaluation, evaluate, expected_tokens, transition_row
from treeopt.types import LatencyProfile, SparseTree

__all__ = ["ExactResult", "exact_trees", "free_guess_trees"]

Floats = npt.NDArray[np.float64]
Path = tuple[int, ...]

RESTART = 1e-9
"""Probability of a jump into state m, added to every row while relative values are solved: it makes the chain unichain,
so that the linear system is never singular. Reported figures are evaluated without it."""

BETTER = 1e-12
"""A state keeps its action unless another is better by more than this, relative to the largest |h|."""

_CHUNK = 1 << 18
"""Numbers handled at once by a convolution: bounds memory, not the result."""


@dataclass(frozen=True, slots=True)
class ExactResult:
    """An optimal design and the proof that it is one, under the acceptance model.

    Parameters
    ----------
    trees : tuple of SparseTree
        One per state.
    evaluation : Evaluation
        The design's value, without the restart.
    upper_bound : float
        No design under the budget beats this, in the objective's unit.
    num_iterations : int
        Policy iterations.
    """

    trees: tuple[SparseTree, ...]
    evaluation: Evaluation
    upper_bound: float
    num_iterations: int


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The sizes a pass may be run at, and what each costs."""

    tokens: npt.NDArray[np.int64]
    duration: Floats

    def cheapest(self, size: int) -> int:
        """Return the index of the cheapest size that holds ``size`` tokens, the smallest on ties."""
        first = int(np.searchsorted(self.tokens, size))
        return first + int(np.argmin(self.duration[first:]))


@dataclass(frozen=True, slots=True)
class _Action:
    """One state's tree with its reward, transitions and duration."""

    tree: SparseTree
    reward: float
    row: Floats
    duration: float


def exact_trees(
    trie: AcceptanceTrie,
    budget: int,
    latency: LatencyProfile | None = None,
    progress: Callable[[str], None] | None = None,
) -> ExactResult:
    """Find the best trees under an acceptance model, and prove it.

    Parameters
    ----------
    trie : AcceptanceTrie
        The acceptance model.
    budget : int
        Cap on every state's forward pass, tokens.
    latency : LatencyProfile, optional
        With it tokens per second are maximised over the measured sizes, without it tokens per step.
    progress : callable, optional
        Called with one line per state and iteration.

    Returns
    -------
    ExactResult

    Raises
    ------
    SearchError
        When the iteration does not settle, which would be a defect.

    Notes
    -----
    One inner solution costs O(m^2 K m n c) for budget n and subtrees of at most c <= n tokens; two to six policy
    iterations are usual.
    """
    if latency is not None and latency.batch_size > 1:
        return _best_common_size(trie, budget, latency, progress)
    return _policy_iteration(trie, _run_sizes(budget, latency), latency, progress)


def free_guess_trees(trie: AcceptanceTrie, budget: int, depth: int) -> tuple[Floats, Callable[[int], SparseTree]]:
    """Find the best tree of every size for guesses that cost no tokens (e = 0): there is one state and no chain.

    Parameters
    ----------
    trie : AcceptanceTrie
        The acceptance model; its tokens per prompt token must be 0.
    budget : int
        Largest size, tokens.
    depth : int
        Largest depth, at most m.

    Returns
    -------
    expected_tokens : ndarray, shape (budget,)
        ``f`` of the best tree of at most 1, 2, .. budget tokens; its increments are what one more token is worth.
    tree : callable
        ``tree(num_tokens)`` reads the best tree of at most that many tokens.

    Raises
    ------
    SearchError
        When guesses cost tokens.
    """
    if trie.tokens_per_prompt_token:
        raise SearchError("tokens_per_prompt_token: is above 0; trees without states need guesses that cost no tokens")
    inner = _Inner(trie, np.zeros(trie.num_distances + 1), depth, budget)
    return inner.values_at(np.arange(1, budget + 1)), inner.tree


def _best_common_size(
    trie: AcceptanceTrie, budget: int, latency: LatencyProfile, progress: Callable[[str], None] | None
) -> ExactResult:
    """Give all states one size, ``max_b tau(b) / L(b)``: rows of a batch in different states share one padded pass."""
    results = []
    for point in latency.points:
        if point.num_tokens > budget:
            break
        found = _policy_iteration(trie, _run_sizes(point.num_tokens, None), None, progress)
        passes = [point.num_tokens] * len(found.trees)
        evaluation = evaluate(trie, found.trees, latency, passes)
        results.append(replace(found, evaluation=evaluation, upper_bound=found.upper_bound / point.median_s))
    best = max(results, key=lambda result: result.evaluation.tokens_per_second or 0.0)
    return replace(best, upper_bound=max(result.upper_bound for result in results))


def _policy_iteration(
    trie: AcceptanceTrie,
    sizes: "_Sizes",
    latency: LatencyProfile | None,
    progress: Callable[[str], None] | None,
) -> ExactResult:
    """Evaluate, improve, and prove; see the module's notes."""
    budget = int(sizes.tokens[-1])
    m = trie.num_distances
    root_only = SparseTree.from_prompt_tokens({(): 0 if trie.tokens_per_prompt_token else m})
    actions = [_action(trie, sizes, root_only) for _ in range(m + 1)]
    seen: set[tuple[tuple[SparseTree, float], ...]] = set()
    solved: dict[int, _Inner] = {}
    while True:
        design = tuple((action.tree, action.duration) for action in actions)
        if design in seen:
            raise SearchError(
                f"the exact search does not settle at budget {budget}; report the table, use --method greedy"
            )
        seen.add(design)
        values, gain = _relative_values(actions)
        scaled = (1.0 - RESTART) * values
        margin = BETTER * max(1.0, float(np.abs(values).max()))
        bound, changed = -np.inf, False
        for k in range(m + 1):
            if progress is not None:
                progress(f"iteration {len(seen)}, state {k} of {m}")
            if trie.tokens_per_prompt_token or k not in solved:
                # Without prompt tokens every node leads to state m, where h is 0: the inner problem never changes.
                solved[k] = _Inner(trie, scaled, k, budget)
            inner = solved[k]
            worth = inner.values_at(sizes.tokens)
            bound = max(bound, float(((worth - scaled[k]) / sizes.duration).max()))
            better = _improve(inner, worth - gain * sizes.duration, sizes, actions[k], gain, margin)
            if better is not None:
                actions[k], changed = better, True
        if not changed:
            break
    trees = tuple(action.tree for action in actions)
    passes = [int(sizes.tokens[sizes.cheapest(tree.size(trie.tokens_per_prompt_token))]) for tree in trees]
    evaluation = evaluate(trie, trees, latency, passes if latency is not None else None)
    reached = evaluation.acceptance_length if evaluation.tokens_per_second is None else evaluation.tokens_per_second
    return ExactResult(trees, evaluation, max(bound, reached), len(seen))


def _run_sizes(budget: int, latency: LatencyProfile | None) -> _Sizes:
    if latency is None:
        return _Sizes(np.arange(1, budget + 1), np.ones(budget))
    points = [point for point in latency.points if point.num_tokens <= budget]
    return _Sizes(np.array([p.num_tokens for p in points]), np.array([p.median_s for p in points], dtype=np.float64))


def _action(trie: AcceptanceTrie, sizes: _Sizes, tree: SparseTree) -> _Action:
    place = sizes.cheapest(tree.size(trie.tokens_per_prompt_token))
    return _Action(tree, expected_tokens(trie, tree), transition_row(trie, tree), float(sizes.duration[place]))


def _relative_values(actions: list[_Action]) -> tuple[Floats, float]:
    """Solve the evaluation equations with the restart and ``h_m = 0``: relative values, shape (m + 1,), and gain."""
    m = len(actions) - 1
    rows = np.array([action.row for action in actions])
    system = np.eye(m + 1) - (1.0 - RESTART) * rows
    system[:, m] = [action.duration for action in actions]
    solution = np.linalg.solve(system, np.array([action.reward for action in actions]))
    return np.append(solution[:m], 0.0), float(solution[m])


def _improve(
    inner: "_Inner", advantage: Floats, sizes: _Sizes, current: _Action, gain: float, margin: float
) -> _Action | None:
    """Return a better action than the current one, or None when it is as good as any."""
    kept = current.reward + float(current.row @ inner.values) - gain * current.duration
    best = float(advantage.max())
    if best <= kept + margin:
        return None
    # Among the new choices fewer tokens win a tie.
    place = int(np.flatnonzero(advantage >= max(best - margin, kept + margin))[0])
    return _action(inner.trie, sizes, inner.tree(int(sizes.tokens[place])))


class _Inner:
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
