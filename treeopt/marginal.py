"""Wider or deeper: what one more candidate, or one more prompt token, would bring to a design.

A candidate makes a tree wider: it may be accepted now. A prompt token makes the next tree deeper: it prepares a guess
that the next step can use. Both cost tokens of a pass, so they are compared by gain per token; with a latency profile
also by what the longer pass costs. What the last level of depth is worth is seen from the outside: the optimum with one
distance less, in the same budget.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from treeopt.acceptance import acceptance_trie
from treeopt.exact import exact_trees
from treeopt.markov import evaluate
from treeopt.types import AcceptanceTable, LatencyProfile, SparseTree, TreeDesign

__all__ = ["Addition", "Marginal", "marginal_values"]


@dataclass(frozen=True, slots=True)
class Addition:
    """One thing more in one tree, and what it brings.

    Parameters
    ----------
    kind : {"candidate", "prompt_token"}
        What is added.
    state : int
        The tree it is added to.
    path : tuple of int
        The new candidate, or the node that gets the prompt token.
    prompt_tokens : int
        Prompt tokens of that node afterwards.
    num_tokens : int
        Tokens added to the tree.
    gain : float
        More tokens per step, in the long run.
    speedup : float or None
        Predicted speedup with it; None without a latency profile, or when no measured size holds the tree then.
    """

    kind: str
    state: int
    path: tuple[int, ...]
    prompt_tokens: int
    num_tokens: int
    gain: float
    speedup: float | None = None

    @property
    def gain_per_token(self) -> float:
        """More tokens per step for each token of the tree."""
        return self.gain / self.num_tokens


@dataclass(frozen=True, slots=True)
class Marginal:
    """The best addition of each kind, and what depth is worth.

    Parameters
    ----------
    wider, deeper : Addition or None
        The candidate, and the prompt token, of most gain per token; None when nothing can be added.
    last_distance_gain : float or None
        Tokens per step that the farthest distance adds at this budget; None when there is one distance only.
    speedup : float or None
        Predicted speedup of the design as it is; None without a latency profile.
    advice : {"wider", "deeper", "neither", "unknown"}
        Which of the two brings more per token; neither when no addition gains anything, or with a latency profile when
        none makes decoding faster; unknown when that hangs on sizes that were not measured.
    """

    wider: Addition | None
    deeper: Addition | None
    last_distance_gain: float | None
    speedup: float | None
    advice: str


def marginal_values(
    design: TreeDesign, table: AcceptanceTable, budget: int, latency: LatencyProfile | None = None
) -> Marginal:
    """Find the best candidate and the best prompt token to add to a design.

    Parameters
    ----------
    design : TreeDesign
        The design; its ``acceptance_model`` says which model values it, independent when it names none.
    table : AcceptanceTable
        How often the guesses are right.
    budget : int
        For the value of the last distance, tokens. Additions may exceed it: whether more is worth having is asked.
    latency : LatencyProfile, optional
        Adds speedups. A tree that fits its pass costs nothing more; one that does not is padded to the cheapest
        measured size that holds it.

    Returns
    -------
    Marginal

    Raises
    ------
    InvalidValueError
        When design and table do not belong together.

    Examples
    --------
    >>> from treeopt import search
    >>> table = AcceptanceTable.from_marginals([[0.6, 0.2], [0.5, 0.1]])
    >>> marginal_values(search(table, 6), table, 6).advice
    'deeper'
    """
    model = design.acceptance_model or "independent"
    trie = acceptance_trie(table, model)
    before = evaluate(trie, design.trees)
    best: dict[str, Addition] = {}
    for state, share in enumerate(before.occupancy):
        if share == 0:
            continue  # what a state that never occurs gains is never seen
        for addition, tree in _additions(design, table, state):
            trees = (*design.trees[:state], tree, *design.trees[state + 1 :])
            passes = None if latency is None else _passes(design, state, tree, latency)
            after = evaluate(trie, trees, None if passes is None else latency, passes)
            gained = replace(addition, gain=after.acceptance_length - before.acceptance_length, speedup=after.speedup)
            known = best.get(gained.kind)
            if known is None or gained.gain_per_token > known.gain_per_token:
                best[gained.kind] = gained
    now = None if latency is None else evaluate(trie, design.trees, latency, design.pass_tokens).speedup
    wider, deeper = best.get("candidate"), best.get("prompt_token")
    return Marginal(wider, deeper, _last_distance(table, budget, model), now, _advice(wider, deeper, now))


def _advice(wider: Addition | None, deeper: Addition | None, now: float | None) -> str:
    gaining = [addition for addition in (wider, deeper) if addition is not None and addition.gain > 0]
    worth = [
        addition for addition in gaining if now is None or (addition.speedup is not None and addition.speedup > now)
    ]
    if not worth:
        unknown = now is not None and any(addition.speedup is None for addition in gaining)
        return "unknown" if unknown else "neither"
    best = max(worth, key=lambda addition: addition.gain_per_token)
    return "wider" if best.kind == "candidate" else "deeper"


def _additions(design: TreeDesign, table: AcceptanceTable, state: int) -> Iterator[tuple[Addition, SparseTree]]:
    """Yield every candidate, with every number of prompt tokens, and every prompt token that the tree of a state lacks.

    Of the missing children of a node only the best rank is tried: the others are less probable.
    """
    tree, e = design.trees[state], design.tokens_per_prompt_token
    m = table.num_distances
    held = {node.path: node.prompt_tokens for node in tree.nodes}
    for node in tree.nodes:
        if e and node.prompt_tokens < m:
            grown = SparseTree.from_prompt_tokens(held | {node.path: node.prompt_tokens + 1})
            yield Addition("prompt_token", state, node.path, node.prompt_tokens + 1, e, 0.0), grown
        if node.depth < state:
            missing = [rank for rank in range(table.num_ranks) if (*node.path, rank) not in held]
            if not missing:
                continue
            path = (*node.path, max(missing, key=lambda rank: table.marginals[node.depth][rank]))
            for own in range(m + 1) if e else (m,):
                grown = SparseTree.from_prompt_tokens(held | {path: own})
                yield Addition("candidate", state, path, own, 1 + e * own, 0.0), grown


def _passes(design: TreeDesign, state: int, tree: SparseTree, latency: LatencyProfile) -> Sequence[int] | None:
    """Pass tokens once a state has a larger tree; None when no measured size holds it."""
    size = tree.size(design.tokens_per_prompt_token)
    passes = list(design.pass_tokens)
    if size > passes[state]:
        point = latency.cheapest(size, latency.points[-1].num_tokens)
        if point is None:
            return None
        passes[state] = point.num_tokens
        if latency.batch_size > 1:  # texts of a batch share one pass
            passes = [max(passes)] * len(passes)
    return passes


def _last_distance(table: AcceptanceTable, budget: int, model: str) -> float | None:
    if table.num_distances == 1:
        return None
    whole = exact_trees(acceptance_trie(table, model), budget).evaluation.acceptance_length
    ranks: dict[tuple[int, ...], int] = {}
    for row in table.ranks or ():
        ranks[row[:-2]] = ranks.get(row[:-2], 0) + row[-1]
    shallower = replace(
        table,
        marginals=table.marginals[:-1],
        ranks=None if table.ranks is None else tuple((*path, count) for path, count in sorted(ranks.items())),
        intervals=None,
    )
    return whole - exact_trees(acceptance_trie(shallower, model), budget).evaluation.acceptance_length
