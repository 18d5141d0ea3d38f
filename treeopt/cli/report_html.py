"""``treeopt report``."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from treeopt.bundled import DEFAULT_TABLE
from treeopt.cli.advise import AUTO, AdviceLatency, Ranks
from treeopt.cli.common import Acceptance, AcceptanceModel, Budget, Database, Seed, note, progress_bar

__all__ = ["report"]


def report(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="HTML file to write.")] = Path("report.html"),
    budget: Budget = 64,
    acceptance: Acceptance = DEFAULT_TABLE,
    latency: AdviceLatency = AUTO,
    replay: Ranks = None,
    bench: Annotated[
        Path | None,
        typer.Option("--bench", metavar="FILE", help="What `treeopt bench --out` wrote: adds measurements."),
    ] = None,
    acceptance_model: AcceptanceModel = "independent",
    seed: Seed = 0,
    db: Database = None,
) -> None:
    """Write one HTML page with machine, model, tables, trees, curves and advice; it needs nothing else to be read.

    Example: treeopt report --acceptance vicuna-7b-m3 --latency latency.json --out report.html
    """
    from treeopt.app.advise import advise, load_advice_inputs
    from treeopt.app.report import report_page
    from treeopt.artifact import write_text
    from treeopt.plot import check_figure_path

    check_figure_path(out)
    curves = None
    if bench is not None:
        from treeopt.speedup_plot import read_bench

        curves = read_bench(bench)
    table, profiles, record, line = load_advice_inputs(acceptance, latency, replay, db)
    if line is not None:
        note(line)
    with progress_bar("report") as progress:
        advice = advise(
            table, profiles, budget, record, acceptance_model=acceptance_model, seed=seed, progress=progress
        )
        page = report_page(
            advice,
            acceptance_model=acceptance_model,
            bench=curves,
            command=shlex.join(["treeopt", *sys.argv[1:]]),
            progress=progress,
        )
    write_text(page, out)
    note(f"written to {out}")
