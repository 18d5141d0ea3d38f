"""The exact optimum: one tree per state, chosen together, with a certificate (beyond the paper).

Decoding is an average-reward semi-Markov decision process. State: prompt tokens at the last accepted node. Action: a
tree and the tokens its pass is padded to. Reward: expected tokens. Duration: 1, or the measured latency of the pass.

outer problem
    Policy iteration. Evaluate the design: relative values ``h`` and gain ``g`` from
    ``h_k + g L_k = f_k + sum_i p(s_i | s_k) h_i``. Improve: in every state the tree and size that maximise
    ``W_k[b] - g L(b)``. Stop when no state changes.
inner problem
    ``W_k[b]``: the best ``sum_v P(v) + sum_v q(v) h[d_v]`` of a tree of depth k in b tokens: `treeopt.inner`.
certificate
    For any ``h`` whatever, no design beats ``max_k max_b (W_k[b] - h_k) / L(b)``: weigh the inequality
    ``f_k + sum_i p(s_i | s_k) h_i - h_k <= bound * L_k`` with a design's own occupancy and the h cancel.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from treeopt.acceptance import AcceptanceTrie
from treeopt.errors import SearchError
from treeopt.inner import InnerProblem
from treeopt.markov import Evaluation, evaluate, expected_tokens, transition_row
from treeopt.types import LatencyProfile, SparseTree

__all__ = ["ExactResult", "exact_trees", "free_guess_trees"]

Floats = npt.NDArray[np.float64]

RESTART = 1e-9
"""Probability of a jump into state m, added to every row while relative values are solved: it makes the chain unichain,
so that the linear system is never singular. Reported figures are evaluated without it."""

BETTER = 1e-12
"""A state keeps its action unless another is better by more than this, relative to the largest |h|."""


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
    inner = InnerProblem(trie, np.zeros(trie.num_distances + 1), depth, budget)
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
    solved: dict[int, InnerProblem] = {}
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
                solved[k] = InnerProblem(trie, scaled, k, budget)
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
    inner: InnerProblem, advantage: Floats, sizes: _Sizes, current: _Action, gain: float, margin: float
) -> _Action | None:
    """Return a better action than the current one, or None when it is as good as any."""
    kept = current.reward + float(current.row @ inner.values) - gain * current.duration
    best = float(advantage.max())
    if best <= kept + margin:
        return None
    # Among the new choices fewer tokens win a tie.
    place = int(np.flatnonzero(advantage >= max(best - margin, kept + margin))[0])
    return _action(inner.trie, sizes, inner.tree(int(sizes.tokens[place])))
