"""``treeopt search``."""

from typing import Annotated

import typer

from treeopt.bundled import DEFAULT_TABLE
from treeopt.cli.common import (
    Acceptance,
    AcceptanceModel,
    AsJson,
    Budget,
    Latency,
    note,
    one_of,
    print_json,
    progress_bar,
)

__all__ = ["search"]

Method = Annotated[
    str,
    typer.Option(
        "--method",
        metavar="exact|greedy",
        help="The proven optimum, or the paper's greedy search.",
        callback=lambda value: one_of(value, ("exact", "greedy")),
    ),
]
Out = Annotated[str | None, typer.Option("--out", metavar="FILE", help="Write the tree design to this file.")]
Ranks = Annotated[
    str | None,
    typer.Option("--replay", metavar="RANKS", help="Rank record to judge the design on; the table's own when bundled."),
]


def search(
    budget: Budget = 64,
    acceptance: Acceptance = DEFAULT_TABLE,
    latency: Latency = None,
    method: Method = "exact",
    acceptance_model: AcceptanceModel = "independent",
    replay: Ranks = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Find the best tree for a model's guesses, a budget and a machine, and prove it.

    Example: treeopt search --acceptance vicuna-7b-m3 --budget 64 --out tree.json
    """
    from treeopt.app.search import bundled_ranks, load_inputs, run_search, search_report
    from treeopt.artifact import read_document, to_document, write_document
    from treeopt.types import RankRecord

    inputs = load_inputs(acceptance, latency)
    record = bundled_ranks(acceptance) if replay is None else read_document(replay, RankRecord)
    with progress_bar("search") as progress:
        design = run_search(inputs, budget, method, acceptance_model, progress)
        report = None if as_json else search_report(inputs, design, record, progress)
    if out is not None:
        write_document(design, out)
    if report is None:
        print_json(to_document(design))
        return
    from rich.console import Console

    from treeopt.cli.report import print_search

    print_search(report, inputs, Console())
    if out is not None:
        note(f"written to {out}; draw it with: treeopt show {out}")
