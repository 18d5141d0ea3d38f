"""Use case: the exact optimum beside the paper's greedy search and two simple allocations, over budgets (Figure 8a)."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from treeopt.acceptance import acceptance_trie
from treeopt.exact import exact_trees
from treeopt.greedy import greedy_trees, naive_trees, random_trees
from treeopt.markov import acceptance_length
from treeopt.types import AcceptanceTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Comparison", "compare_methods", "comparison_document", "comparison_figure", "least_heuristic_budget"]

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Acceptance length tau, tokens per step, that each method reaches under one budget.

    Parameters
    ----------
    budget : int
        Tokens per forward pass.
    exact, upper_bound : float
        The optimum, and the bound that proves it.
    greedy, naive : float or None
        The paper's greedy search; the same number of prompt tokens on every candidate. None below the least budget
        they can serve.
    random : tuple of float
        Prompt tokens removed at random, one value per seed 0, 1, ..; empty where greedy is None.
    """

    budget: int
    exact: float
    upper_bound: float
    greedy: float | None
    naive: float | None
    random: tuple[float, ...]

    @property
    def random_mean(self) -> float | None:
        """Mean over the seeds."""
        return statistics.fmean(self.random) if self.random else None

    @property
    def random_std(self) -> float | None:
        """Sample standard deviation over the seeds; None for fewer than two."""
        return statistics.stdev(self.random) if len(self.random) > 1 else None


def least_heuristic_budget(table: AcceptanceTable) -> int:
    """Return the least budget that greedy, naive and random can serve: the root and its m prompt tokens."""
    return 1 + table.tokens_per_prompt_token * table.num_distances


def compare_methods(
    table: AcceptanceTable,
    budgets: Sequence[int],
    *,
    acceptance_model: str = "independent",
    num_seeds: int = 10,
    progress: Progress | None = None,
) -> tuple[Comparison, ...]:
    """Compute tau of every method at every budget.

    Parameters
    ----------
    table : AcceptanceTable
        How often the guesses are right.
    budgets : sequence of int
        Tokens per forward pass.
    acceptance_model : {"independent", "joint"}
        The model that all methods search and are judged under.
    num_seeds : int
        Repetitions of the random allocation.
    progress : callable, optional
        Called once per budget.

    Returns
    -------
    tuple of Comparison
        One per budget.

    Raises
    ------
    SearchError
        When the table cannot serve the acceptance model.
    """
    trie = acceptance_trie(table, acceptance_model)
    least = least_heuristic_budget(table)
    rows = []
    for budget in budgets:
        optimum = exact_trees(trie, budget)
        greedy = naive = None
        random: tuple[float, ...] = ()
        if budget >= least:
            greedy = acceptance_length(trie, greedy_trees(trie, budget))
            naive = acceptance_length(trie, naive_trees(trie, budget))
            random = tuple(acceptance_length(trie, random_trees(trie, budget, seed)) for seed in range(num_seeds))
        rows.append(
            Comparison(budget, optimum.evaluation.acceptance_length, optimum.upper_bound, greedy, naive, random)
        )
        if progress is not None:
            progress(f"budget {budget}")
    return tuple(rows)


def comparison_document(row: Comparison) -> dict[str, Any]:
    """Return one budget's results as a JSON object; ``*_tau`` in tokens per step."""
    return {
        "budget": row.budget,
        "exact_tau": row.exact,
        "upper_bound_tau": row.upper_bound,
        "greedy_tau": row.greedy,
        "naive_tau": row.naive,
        "random_mean_tau": row.random_mean,
        "random_std_tau": row.random_std,
        "num_seeds": len(row.random),
    }


def comparison_figure(rows: Sequence[Comparison], table: AcceptanceTable, acceptance_model: str) -> "Figure":
    """Draw tau over budgets, and below it what each method leaves on the table."""
    from treeopt.plot import Curve, Panel, curves_figure

    reached = [row for row in rows if row.random]
    budgets = [row.budget for row in reached]

    def curves(of_row: Callable[[Comparison, float], float]) -> list[Curve]:
        random = [statistics.fmean(of_row(row, tau) for tau in row.random) for row in reached]
        spread = [
            statistics.stdev(of_row(row, tau) for tau in row.random) if len(row.random) > 1 else 0.0 for row in reached
        ]
        return [
            Curve("greedy (paper)", budgets, [of_row(row, row.greedy or 0.0) for row in reached], style=1),
            Curve("naive", budgets, [of_row(row, row.naive or 0.0) for row in reached], style=2),
            Curve(
                "random, mean ± std",
                budgets,
                random,
                [mean - std for mean, std in zip(random, spread, strict=True)],
                [mean + std for mean, std in zip(random, spread, strict=True)],
                style=3,
            ),
        ]

    exact = Curve("exact optimum", [row.budget for row in rows], [row.exact for row in rows])
    panels = [
        Panel("acceptance length\n(tokens per step)", [exact, *curves(lambda _, tau: tau)]),
        Panel("below the optimum\n(% of tokens per step)", curves(lambda row, tau: 100 * (1 - tau / row.exact))),
    ]
    return curves_figure(
        "How much the allocation of prompt tokens matters",
        f"{table.model}, m = {table.num_distances}, {acceptance_model} acceptance model",
        panels if reached else panels[:1],
        "budget (tokens per forward pass)",
    )
