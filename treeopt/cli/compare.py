"""``treeopt compare``."""

from typing import Annotated

import typer

from treeopt.bundled import DEFAULT_TABLE
from treeopt.cli.common import (
    Acceptance,
    AcceptanceModel,
    AsJson,
    Budgets,
    FigureOut,
    console,
    note,
    parse_budgets,
    print_json,
    print_table,
    progress_bar,
)

__all__ = ["compare"]


def compare(
    budgets: Budgets = "8,16,32,64,128",
    acceptance: Acceptance = DEFAULT_TABLE,
    acceptance_model: AcceptanceModel = "independent",
    seeds: Annotated[int, typer.Option("--seeds", min=1, max=1000, help="Repetitions of random allocation.")] = 10,
    out: FigureOut = None,
    as_json: AsJson = False,
) -> None:
    """Compare the optimum with the paper's greedy search, naive and random allocation, over budgets.

    Example: treeopt compare --acceptance vicuna-7b-m3 --budgets 8,16,32,64 --out compare.png
    """
    from treeopt.app.compare import compare_methods, comparison_document, comparison_figure, least_heuristic_budget
    from treeopt.bundled import load_acceptance

    wanted = parse_budgets(budgets)
    if out is not None:
        from treeopt.plot import check_figure_path

        check_figure_path(out)
    table = load_acceptance(acceptance)[0]
    with progress_bar("compare", len(wanted)) as progress:
        rows = compare_methods(table, wanted, acceptance_model=acceptance_model, num_seeds=seeds, progress=progress)
    if out is not None:
        from treeopt.plot import save_figure

        save_figure(comparison_figure(rows, table, acceptance_model), out)
    if as_json:
        for row in rows:
            print_json(comparison_document(row))
        return
    from rich.box import SIMPLE
    from rich.table import Table

    screen = console()
    screen.print(
        f"{table.model}: tokens per step (tau) under the {acceptance_model} acceptance model",
    )
    shown = Table(box=SIMPLE, pad_edge=False)
    for name in ("budget", "exact", "greedy", "naive", "random", "greedy is below by"):
        shown.add_column(name, justify="right")
    for row in rows:
        below = "" if row.greedy is None else f"{100 * (1 - row.greedy / row.exact):.2f} %"
        random = _tau(row.random_mean) + ("" if row.random_std is None else f" +- {row.random_std:.4f}")
        shown.add_row(str(row.budget), _tau(row.exact), _tau(row.greedy), _tau(row.naive), random, below)
    print_table(shown, screen)
    least = least_heuristic_budget(table)
    if wanted[0] < least:
        screen.print(
            f"below {least} tokens only exact has an answer: the others give the root all {table.num_distances} "
            "prompt tokens"
        )
    screen.print(
        f"naive: as many prompt tokens on every candidate; random: {'1 seed' if seeds == 1 else f'{seeds} seeds'}, "
        "mean +- standard deviation"
    )
    if out is not None:
        note(f"written to {out}")


def _tau(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
