"""The search: an acceptance table, a budget and, when there is one, a latency profile in; the best design out."""

from collections.abc import Callable

from treeopt.acceptance import AcceptanceTrie, acceptance_trie
from treeopt.artifact import digest
from treeopt.errors import SearchError
from treeopt.exact import exact_trees
from treeopt.greedy import greedy_trees, naive_trees, random_trees
from treeopt.markov import Evaluation, evaluate
from treeopt.types import MAX_BUDGET, AcceptanceTable, LatencyProfile, SparseTree, TreeDesign

__all__ = ["search"]

Progress = Callable[[str], None]
Heuristic = Callable[[AcceptanceTrie, int], tuple[SparseTree, ...]]


def search(
    table: AcceptanceTable,
    budget: int,
    latency: LatencyProfile | None = None,
    *,
    method: str = "exact",
    acceptance_model: str = "independent",
    seed: int = 0,
    upper_bound: float | None = None,
    progress: Progress | None = None,
) -> TreeDesign:
    """Find the tree design that makes decoding fastest under an acceptance model.

    Parameters
    ----------
    table : AcceptanceTable
        How often the guesses are right.
    budget : int
        Cap on the tokens of every state's forward pass, 1 to 4096.
    latency : LatencyProfile, optional
        With it the objective is tokens per second and sizes are chosen among the measured ones; without it the
        objective is tau, tokens per step. A profile of batches above 1 gives all states one common size, because rows
        in different states share one padded pass.
    method : {"exact", "greedy", "naive", "random"}
        The proven optimum, the paper's greedy search, or one of its two baselines.
    acceptance_model : {"independent", "joint"}
        The paper's independence, or shares of whole recorded paths.
    seed : int
        For method random only.
    upper_bound : float, optional
        For the other methods than exact: the bound that an exact search of the same question has proven, so that it is
        not computed again.
    progress : callable, optional
        Called with one line now and then.

    Returns
    -------
    TreeDesign
        With ``upper_bound``, which no design under the budget can beat under the acceptance model, whatever the method.

    Raises
    ------
    SearchError
        When the budget is out of range or too small for the method, or the table cannot serve the model.

    Examples
    --------
    >>> table = AcceptanceTable.from_marginals([[0.6, 0.2], [0.5, 0.1]])
    >>> design = search(table, 8)
    >>> round(design.acceptance_length, 6)
    1.933333
    >>> profile = LatencyProfile.from_medians({n: 1 + 0.1 * (n - 1) for n in range(1, 9)})
    >>> round(search(table, 8, profile).speedup, 6)
    1.264368
    """
    if isinstance(budget, bool) or not isinstance(budget, int) or not 1 <= budget <= MAX_BUDGET:
        raise SearchError(f"budget: must be a whole number from 1 to {MAX_BUDGET} tokens, not {budget!r}")
    trie = acceptance_trie(table, acceptance_model)
    if method != "exact":
        trees, evaluation = _best_of_one_size(trie, budget, latency, _heuristic(method, seed, progress))
    if method == "exact" or upper_bound is None:
        # The optimum is computed for every method: it is the bound that the others are measured by.
        optimum = exact_trees(trie, budget, latency, progress)
        upper_bound = optimum.upper_bound
        if method == "exact":
            trees, evaluation = optimum.trees, optimum.evaluation
    return TreeDesign(
        trees=trees,
        budget=budget,
        method=method,
        objective="tau" if latency is None else "tokens_per_second",
        acceptance_model=acceptance_model,
        tokens_per_prompt_token=table.tokens_per_prompt_token,
        pass_tokens=evaluation.pass_tokens,
        acceptance_length=evaluation.acceptance_length,
        upper_bound=upper_bound,
        tokens_per_second=evaluation.tokens_per_second,
        speedup=evaluation.speedup,
        acceptance_digest=digest(table),
        latency_digest=None if latency is None else digest(latency),
    )


def _heuristic(method: str, seed: int, progress: Progress | None) -> Heuristic:
    if method == "greedy":
        return lambda trie, budget: greedy_trees(trie, budget, progress)
    if method == "naive":
        return naive_trees
    if method == "random":
        return lambda trie, budget: random_trees(trie, budget, seed)
    raise SearchError(f"method: must be exact, greedy, naive or random, not {method!r}")


def _best_of_one_size(
    trie: AcceptanceTrie, budget: int, latency: LatencyProfile | None, heuristic: Heuristic
) -> tuple[tuple[SparseTree, ...], Evaluation]:
    """Give all states one size, swept over the measured ones: the paper's rule ``tau(n) / L(n)``."""
    if latency is None:
        trees = heuristic(trie, budget)
        return trees, evaluate(trie, trees)
    least = 1 + trie.tokens_per_prompt_token * trie.num_distances
    sizes = [point.num_tokens for point in latency.points if least <= point.num_tokens <= budget]
    if not sizes:
        raise SearchError(
            f"method: no size from {least} to {budget} tokens was measured, and a root needs {least}; profile such "
            "sizes, raise --budget, or use --method exact"
        )
    designs = []
    for size in sizes:
        trees = heuristic(trie, size)
        designs.append((trees, evaluate(trie, trees, latency, [size] * len(trees))))
    return max(designs, key=lambda design: design[1].tokens_per_second or 0.0)
