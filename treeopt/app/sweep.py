"""Use case: what a budget buys, tokens per step and, with a latency profile, speedup (Figure 8b)."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from treeopt.acceptance import acceptance_trie
from treeopt.exact import ExactResult, exact_trees
from treeopt.types import AcceptanceTable, LatencyProfile

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SweepPoint", "best_point", "sweep_budgets", "sweep_document", "sweep_figure"]

Progress = Callable[[str], None]

_AS_GOOD = 1e-9
"""Budgets whose value is this close to the best one, relatively, are as good: the smallest of them is the optimum."""


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """What the best trees under one budget reach, under the acceptance model.

    Parameters
    ----------
    budget : int
        Cap on the tokens of a forward pass.
    acceptance_length, upper_bound : float
        Best tokens per step (tau), and the bound that proves it.
    speedup : float or None
        Best predicted speed over plain decoding when every state may use any measured size up to the budget; None
        without a latency profile.
    one_size_speedup : float or None
        The paper's rule: trees of best tau, every pass exactly the budget long, ``tau(n) L(1) / L(n)``. None where that
        size was not measured.
    speedup_acceptance_length : float or None
        Tokens per step of the design behind ``speedup``; 1 means no speculation.
    """

    budget: int
    acceptance_length: float
    upper_bound: float
    speedup: float | None = None
    one_size_speedup: float | None = None
    speedup_acceptance_length: float | None = None

    @property
    def no_speculation(self) -> bool:
        """Whether one token a pass beats every tree on this machine."""
        return self.speedup_acceptance_length is not None and self.speedup_acceptance_length <= 1 + _AS_GOOD


def sweep_budgets(
    table: AcceptanceTable,
    budgets: Sequence[int],
    latency: LatencyProfile | None = None,
    *,
    acceptance_model: str = "independent",
    progress: Progress | None = None,
) -> tuple[SweepPoint, ...]:
    """Compute the optimum at every budget.

    Parameters
    ----------
    table : AcceptanceTable
        How often the guesses are right.
    budgets : sequence of int
        Tokens per forward pass.
    latency : LatencyProfile, optional
        Adds speedups.
    acceptance_model : {"independent", "joint"}
        The model that is searched and judged under.
    progress : callable, optional
        Called once per budget.

    Returns
    -------
    tuple of SweepPoint
        One per budget.

    Raises
    ------
    SearchError
        When the table cannot serve the acceptance model.
    """
    trie = acceptance_trie(table, acceptance_model)
    measured = {} if latency is None else {point.num_tokens: point.median_s for point in latency.points}
    fastest: dict[int, ExactResult] = {}
    points = []
    for budget in budgets:
        longest = exact_trees(trie, budget)
        tau = longest.evaluation.acceptance_length
        speedup = one_size = tau_of_fastest = None
        if latency is not None:
            # Only measured sizes can be run, so budgets between two of them have one answer.
            last = max(size for size in measured if size <= budget)
            if last not in fastest:
                fastest[last] = exact_trees(trie, last, latency)
            evaluation = fastest[last].evaluation
            speedup, tau_of_fastest = evaluation.speedup, evaluation.acceptance_length
            one_size = tau * measured[1] / measured[budget] if budget in measured else None
        points.append(SweepPoint(budget, tau, longest.upper_bound, speedup, one_size, tau_of_fastest))
        if progress is not None:
            progress(f"budget {budget}")
    return tuple(points)


def best_point(points: Sequence[SweepPoint]) -> SweepPoint:
    """Return the smallest budget that reaches the best speedup, or without a latency profile the best tau."""
    values = [point.acceptance_length if point.speedup is None else point.speedup for point in points]
    enough = max(values) * (1 - _AS_GOOD)
    return next(point for point, value in zip(points, values, strict=True) if value >= enough)


def sweep_document(point: SweepPoint, best: SweepPoint) -> dict[str, Any]:
    """Return one budget's results as a JSON object; ``best`` marks the optimum of the sweep."""
    return {**asdict(point), "best": point == best}


def sweep_figure(
    points: Sequence[SweepPoint], table: AcceptanceTable, latency: LatencyProfile | None, acceptance_model: str
) -> "Figure":
    """Draw speedup, when there is a latency profile, and tau over budgets, with the optimum marked."""
    from treeopt.plot import Curve, Mark, Panel, curves_figure

    best = best_point(points)
    budgets = [point.budget for point in points]
    tau = Curve("best trees", budgets, [point.acceptance_length for point in points])
    tau_label = "acceptance length\n(tokens per step)"
    subtitle = f"{table.model}, m = {table.num_distances}, {acceptance_model} acceptance model"
    if latency is None or best.speedup is None:
        mark = Mark(best.budget, best.acceptance_length, f"best: {best.acceptance_length:.3f} at {best.budget}")
        panels = [Panel(tau_label, [tau], (1.0, "plain decoding"), mark)]
        return curves_figure("What a budget buys", subtitle, panels, "budget (tokens per forward pass)")
    name = "best: no speculation" if best.no_speculation else f"best: {best.speedup:.3f}× at {best.budget}"
    one_size = [point for point in points if point.one_size_speedup is not None]
    curves = [
        Curve(
            "each state its size" if latency.batch_size == 1 else "best shared size",
            budgets,
            [point.speedup or 0.0 for point in points],
            stairs=True,
        ),
        Curve(
            "one size for all",
            [point.budget for point in one_size],
            [point.one_size_speedup or 0.0 for point in one_size],
            style=1,
        ),
    ]
    panels = [
        Panel("predicted speedup\n(× plain decoding)", curves, (1.0, "plain"), Mark(best.budget, best.speedup, name)),
        Panel(tau_label, [tau]),
    ]
    device = f"\n{latency.device['name']}, {latency.dtype}, batch {latency.batch_size}, context {latency.context_len}"
    return curves_figure("What a budget buys", subtitle + device, panels, "budget (tokens per forward pass)")
