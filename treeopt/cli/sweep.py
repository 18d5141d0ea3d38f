"""``treeopt sweep``."""

from typing import TYPE_CHECKING

from treeopt.bundled import DEFAULT_TABLE
from treeopt.cli.common import (
    Acceptance,
    AcceptanceModel,
    AsJson,
    Budgets,
    FigureOut,
    Latency,
    console,
    note,
    parse_budgets,
    print_json,
    print_table,
    progress_bar,
)

if TYPE_CHECKING:
    from rich.console import Console

    from treeopt.app.sweep import SweepPoint
    from treeopt.types import LatencyProfile

__all__ = ["sweep"]


def sweep(
    budgets: Budgets = "1-128",
    acceptance: Acceptance = DEFAULT_TABLE,
    latency: Latency = None,
    acceptance_model: AcceptanceModel = "independent",
    out: FigureOut = None,
    as_json: AsJson = False,
) -> None:
    """Say what a budget buys: tokens per step and, with a latency profile, speedup over budgets.

    Example: treeopt sweep --acceptance vicuna-7b-m3 --latency latency.json --budgets 1-128 --out sweep.png
    """
    from treeopt.app.search import load_inputs
    from treeopt.app.sweep import best_point, sweep_budgets, sweep_document, sweep_figure

    wanted = parse_budgets(budgets)
    if out is not None:
        from treeopt.plot import check_figure_path

        check_figure_path(out)
    inputs, line = load_inputs(acceptance, latency or "none")
    with progress_bar("sweep", len(wanted)) as progress:
        points = sweep_budgets(
            inputs.table, wanted, inputs.latency, acceptance_model=acceptance_model, progress=progress
        )
    best = best_point(points)
    if line is not None:
        note(line)
    if out is not None:
        from treeopt.plot import save_figure

        save_figure(sweep_figure(points, inputs.table, inputs.latency, acceptance_model), out)
    if as_json:
        for point in points:
            print_json(sweep_document(point, best))
        return
    screen = console()
    screen.print(f"{inputs.table.model}: the best trees under the {acceptance_model} acceptance model")
    _print_points(points, best, inputs.latency, screen)
    screen.print(_verdict(best))
    if out is not None:
        note(f"written to {out}")


def _print_points(
    points: "tuple[SweepPoint, ...]", best: "SweepPoint", latency: "LatencyProfile | None", screen: "Console"
) -> None:
    from rich.box import SIMPLE
    from rich.table import Table

    from treeopt.draw import counted

    shown = Table(box=SIMPLE, pad_edge=False)
    for name in ("budget", "tau", *(() if latency is None else ("speedup", "one size for all")), ""):
        shown.add_column(name, justify="right")
    for point in points:
        row = [str(point.budget), f"{point.acceptance_length:.4f}"]
        if latency is not None:
            row += [_ratio(point.speedup), _ratio(point.one_size_speedup)]
        shown.add_row(*row, "best" if point == best else "")
    print_table(shown, screen)
    if latency is None:
        return
    # Rows of a batch are in different states and share one padded pass.
    sizes = "every state uses" if latency.batch_size == 1 else "all states share"
    screen.print(
        f"speedup: {sizes} the measured size, up to the budget, that is best; one size for all: every pass is exactly "
        "the budget long, blank where that size was not measured"
    )
    last = latency.points[-1].num_tokens
    if points[-1].budget > last:
        screen.print(f"sizes above {counted(last, 'token')} were not measured, so they are not considered")


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}x"


def _verdict(best: "SweepPoint") -> str:
    if best.speedup is None:
        return (
            f"most tokens per step: {best.acceptance_length:.4f} at budget {best.budget}; what that is worth in time "
            "depends on the machine, give its --latency profile"
        )
    if best.no_speculation:
        return "No speculation is best here: every tree is slower than decoding one token a pass."
    return f"best: {best.speedup:.3f}x plain decoding, reached at budget {best.budget}"
