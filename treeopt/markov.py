"""Appendix B of the paper: decoding as a Markov chain over trees.

A step that uses tree ``T_k`` ends at one node, the last accepted one. The number of prompt tokens there is the next
state, so the chain's rows are exit probabilities gathered by prompt tokens:

====================  ============================================================================
``P(v)``              path probability: product of child probabilities from the root
``q(v)``              exit probability: v is the last accepted node; ``P(v)`` less the children's
``f(T_k)``            expected tokens of a step, the root included (Prop. B.1)
``p(s_i | s_k)``      sum of ``q(v)`` over nodes with i prompt tokens
``F(T_k)``            ``f(T_k) + sum_i p(s_i | s_k) f(T_i)`` (Prop. B.2)
``dF``                what removing one prompt token loses (Prop. B.3)
``R(T)``, tau         ``sum_i pi_i f(T_i)`` (Prop. B.4)
====================  ============================================================================

``pi`` is the long-run share of steps per state started from state m, which is what prefill leaves. It exists for every
chain, periodic or with several closed classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from treeopt.acceptance import AcceptanceTrie, exit_share
from treeopt.errors import InvalidValueError
from treeopt.types import LatencyProfile, SparseTree, TreeDesign

__all__ = [
    "Evaluation",
    "acceptance_length",
    "design_passes",
    "evaluate",
    "evaluate_design",
    "exit_probabilities",
    "expected_tokens",
    "lookahead_tokens",
    "occupancy",
    "path_probabilities",
    "removal_loss",
    "transition_row",
]

Floats = npt.NDArray[np.float64]


def path_probabilities(trie: AcceptanceTrie, tree: SparseTree) -> Floats:
    """Return ``P(v)`` of every node, in the tree's order; shape (num_nodes,).

    Raises
    ------
    InvalidValueError
        When a path has a rank or a depth that the table lacks.
    """
    return _walk(trie, tree)[0]


def exit_probabilities(trie: AcceptanceTrie, tree: SparseTree) -> Floats:
    """Return ``q(v)``, the probability that each node is the last accepted one; shape (num_nodes,), sums to 1.

    Raises
    ------
    InvalidValueError
        When a path has a rank or a depth that the table lacks.
    """
    probabilities, below = _walk(trie, tree)
    leaving = np.array([exit_share(shares) if shares else 1.0 for shares in below], dtype=np.float64)
    exits: Floats = probabilities * leaving
    return exits


def _walk(trie: AcceptanceTrie, tree: SparseTree) -> tuple[Floats, list[list[float]]]:
    """Path probability of each node, and the conditional probabilities of its children in the tree."""
    index = {node.path: i for i, node in enumerate(tree.nodes)}
    probabilities = np.ones(len(tree.nodes))
    places = [0] * len(tree.nodes)
    below: list[list[float]] = [[] for _ in tree.nodes]
    for i, node in enumerate(tree.nodes[1:], start=1):
        if node.depth > trie.num_distances:
            raise InvalidValueError(
                "path", f"{list(node.path)} is {node.depth} deep; the table guesses {trie.num_distances} distances"
            )
        parent = index[node.path[:-1]]
        share, places[i] = trie.step(places[parent], node.path[-1])
        probabilities[i] = probabilities[parent] * share
        below[parent].append(share)
    return probabilities, below


def expected_tokens(trie: AcceptanceTrie, tree: SparseTree) -> float:
    """Return ``f(T_k)``, expected tokens of a step with this tree, the root included (Prop. B.1)."""
    return float(path_probabilities(trie, tree).sum())


def transition_row(trie: AcceptanceTrie, tree: SparseTree) -> Floats:
    """Return ``p(s_i | s_k)`` for i = 0..m; shape (m + 1,)."""
    prompt_tokens = [node.prompt_tokens for node in tree.nodes]
    most = max(prompt_tokens)
    if most > trie.num_distances:
        raise InvalidValueError(
            "prompt_tokens", f"a node carries {most}; the table guesses {trie.num_distances} distances"
        )
    weights = exit_probabilities(trie, tree)
    return np.bincount(prompt_tokens, weights, minlength=trie.num_distances + 1).astype(np.float64)


def lookahead_tokens(trie: AcceptanceTrie, trees: Sequence[SparseTree], state: int) -> float:
    """Return ``F(T_k)``, expected tokens of this step and the next (Prop. B.2)."""
    f = np.array([expected_tokens(trie, tree) for tree in trees])
    return float(f[state] + transition_row(trie, trees[state]) @ f)


def removal_loss(trie: AcceptanceTrie, trees: Sequence[SparseTree], state: int, node: int) -> float:
    """Return ``dF`` of removing one prompt token from a node of ``T_k`` (Prop. B.3).

    The probability in the proposition is the exit probability: the prompt tokens of a node only matter when the node
    is the last accepted one.

    Raises
    ------
    InvalidValueError
        When the node has no prompt token to remove.
    """
    held = trees[state].nodes[node].prompt_tokens
    if held == 0:
        raise InvalidValueError(f"nodes[{node}].prompt_tokens", "is 0; there is none to remove")
    gain = expected_tokens(trie, trees[held]) - expected_tokens(trie, trees[held - 1])
    return float(exit_probabilities(trie, trees[state])[node] * gain)


def occupancy(transitions: Floats, start: int) -> Floats:
    """Return the long-run share of steps spent in each state of a Markov chain, started in one state.

    Parameters
    ----------
    transitions : ndarray, shape (n, n)
        Row-stochastic.
    start : int
        First state.

    Returns
    -------
    ndarray, shape (n,)
        The Cesaro limit of the start's distribution: right for periodic chains and for several closed classes, where
        power iteration oscillates and a single linear solve is singular.
    """
    n = len(transitions)
    # Probabilities below the normal doubles have lost their digits, and ratios of them are infinite.
    transitions = np.where(transitions < np.finfo(np.float64).tiny, 0.0, transitions)
    reach = np.eye(n, dtype=bool) | (transitions > 0)
    for via in range(n):
        reach |= np.outer(reach[:, via], reach[via])
    # A state is recurrent when everything it reaches reaches it back.
    recurrent = np.array([all(reach[j, i] for j in np.flatnonzero(reach[i])) for i in range(n)])
    visited = reach[start]
    transient = np.flatnonzero(visited & ~recurrent)
    arrival = np.zeros(n)
    arrival[start] = 1.0
    if len(transient):
        # Expected visits to transient states, then the mass that leaves them for each recurrent state.
        moves = transitions.copy()
        np.fill_diagonal(moves, 0.0)
        # 1 - p(i, i) as the sum of what leaves i: not 0, however rarely i is left.
        system = np.diag(moves.sum(axis=1)[transient]) - moves[np.ix_(transient, transient)]
        visits = np.linalg.solve(system.T, arrival[transient])
        arrival = np.where(recurrent, arrival, 0.0)
        arrival += np.where(recurrent, visits @ transitions[transient], 0.0)
    share = np.zeros(n)
    pending = {int(i) for i in np.flatnonzero(visited & recurrent)}
    while pending:
        members = np.flatnonzero(reach[min(pending)])
        share[members] = arrival[members].sum() * _closed_class(transitions[np.ix_(members, members)])
        pending -= set(members.tolist())
    total: Floats = share / share.sum()
    return total


def _closed_class(transitions: Floats) -> Floats:
    """Stationary distribution of one irreducible class, by Grassmann-Taksar-Heyman elimination.

    It only adds and divides non-negative numbers, so no precision is lost however small a probability is.
    """
    work = transitions.copy()
    n = len(work)
    for last in range(n - 1, 0, -1):
        work[:last, last] /= work[last, :last].sum()
        work[:last, :last] += np.outer(work[:last, last], work[last, :last])
    share = np.ones(n)
    for i in range(1, n):
        share[i] = share[:i] @ work[:i, i]
        share /= max(1.0, share[i])  # only ratios matter: keep them from overflowing
    total: Floats = share / share.sum()
    return total


def acceptance_length(trie: AcceptanceTrie, trees: Sequence[SparseTree]) -> float:
    """Return ``R(T)``, long-run tokens per step of one tree per state (Prop. B.4)."""
    return evaluate(trie, trees).acceptance_length


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What the model says of one design.

    Parameters
    ----------
    expected_tokens : tuple of float, length m + 1
        ``f(T_k)``.
    transitions : tuple of tuple of float, shape (m + 1, m + 1)
        ``p(s_i | s_k)``, row k.
    occupancy : tuple of float, length m + 1
        ``pi``, started from state m.
    acceptance_length : float
        tau, tokens per step.
    sizes, pass_tokens : tuple of int, length m + 1
        Tokens each tree needs; tokens its pass is padded to.
    seconds_per_step, tokens_per_second, speedup : float or None
        With a latency profile: mean step latency, and the predicted speed and its ratio to plain decoding.
    """

    expected_tokens: tuple[float, ...]
    transitions: tuple[tuple[float, ...], ...]
    occupancy: tuple[float, ...]
    acceptance_length: float
    sizes: tuple[int, ...]
    pass_tokens: tuple[int, ...]
    seconds_per_step: float | None = None
    tokens_per_second: float | None = None
    speedup: float | None = None


def design_passes(design: TreeDesign, latency: LatencyProfile) -> tuple[int, ...]:
    """Return the tokens each state of a design is padded to on a machine with this latency profile.

    A design that was searched with a profile has chosen its pass tokens, and keeps those that were measured here too.
    Other trees are padded to the cheapest measured size that holds them. A tree larger than anything measured keeps its
    size: latencies are never extrapolated, so asking for its latency is an error, unless its state is never entered.
    """
    measured = {point.num_tokens for point in latency.points}
    passes = []
    for tokens, size in zip(design.pass_tokens, design.sizes(), strict=True):
        if design.latency_digest is not None and tokens in measured:
            passes.append(tokens)
        else:
            point = latency.cheapest(size, latency.points[-1].num_tokens)
            passes.append(size if point is None else point.num_tokens)
    return tuple(passes)


def evaluate(
    trie: AcceptanceTrie,
    trees: Sequence[SparseTree],
    latency: LatencyProfile | None = None,
    padded: Sequence[int] | None = None,
) -> Evaluation:
    """Evaluate one tree per state under an acceptance model.

    Parameters
    ----------
    trie : AcceptanceTrie
        The acceptance model.
    trees : sequence of SparseTree, length m + 1
        ``trees[k]`` is used in state k.
    latency : LatencyProfile, optional
        Adds speed and speedup.
    padded : sequence of int, optional
        Pass tokens per state; the sizes themselves without it.

    Returns
    -------
    Evaluation

    Raises
    ------
    InvalidValueError
        When the trees do not fit the table, or a pass has no measured latency.
    """
    m = trie.num_distances
    if len(trees) != m + 1:
        raise InvalidValueError(
            "states",
            f"the design has states 0 to {len(trees) - 1}, the table needs 0 to {m}; use a table of that model",
        )
    sizes = tuple(tree.size(trie.tokens_per_prompt_token) for tree in trees)
    f = np.array([expected_tokens(trie, tree) for tree in trees])
    transitions = np.array([transition_row(trie, tree) for tree in trees])
    pi = occupancy(transitions, m)
    tau = float(pi @ f)
    passes = sizes if padded is None else tuple(padded)
    seconds = None
    if latency is not None:
        # States that are never entered may be larger than anything measured.
        seconds = float(sum(pi[k] * latency.median_s(passes[k]) for k in np.flatnonzero(pi > 0)))
    return Evaluation(
        expected_tokens=tuple(f.tolist()),
        transitions=tuple(tuple(row) for row in transitions.tolist()),
        occupancy=tuple(pi.tolist()),
        acceptance_length=tau,
        sizes=sizes,
        pass_tokens=passes,
        seconds_per_step=seconds,
        tokens_per_second=None if seconds is None else tau / seconds,
        speedup=None if seconds is None or latency is None else tau / seconds * latency.median_s(1),
    )


def evaluate_design(trie: AcceptanceTrie, design: TreeDesign, latency: LatencyProfile | None = None) -> Evaluation:
    """Evaluate a design at its own pass tokens, or with a profile at those of `design_passes`.

    Raises
    ------
    InvalidValueError
        When table and design do not belong together.
    """
    if design.tokens_per_prompt_token != trie.tokens_per_prompt_token:
        raise InvalidValueError(
            "tokens_per_prompt_token",
            f"the design counts {design.tokens_per_prompt_token} tokens per prompt token, the table "
            f"{trie.tokens_per_prompt_token}; use the table the design was made for",
        )
    passes = design.pass_tokens if latency is None else design_passes(design, latency)
    return evaluate(trie, design.trees, latency, passes)
