"""``treeopt advise``."""

from typing import TYPE_CHECKING, Annotated

import typer

from treeopt.bundled import DEFAULT_TABLE
from treeopt.cli.common import (
    Acceptance,
    AcceptanceModel,
    AsJson,
    Budget,
    Database,
    Seed,
    note,
    print_json,
    progress_bar,
)

if TYPE_CHECKING:
    from rich.console import Console

    from treeopt.app.advise import Advice

__all__ = ["AUTO", "AdviceLatency", "Ranks", "advise"]

AdviceLatency = Annotated[
    list[str],
    typer.Option(
        "--latency",
        metavar="auto|FILE|NAME",
        help="Latency profile the verdict is for: this device's stored one, a file, or a stored profile's digest. "
        "Given again: other batch sizes and contexts, for break-even.",
    ),
]
AUTO = ["auto"]
Ranks = Annotated[
    str | None,
    typer.Option(
        "--replay", metavar="RANKS", help="Rank record: tokens per step, and their error, by replay of whole texts."
    ),
]


def advise(
    budget: Budget = 64,
    acceptance: Acceptance = DEFAULT_TABLE,
    latency: AdviceLatency = AUTO,
    replay: Ranks = None,
    acceptance_model: AcceptanceModel = "independent",
    seed: Seed = 0,
    as_json: AsJson = False,
    db: Database = None,
) -> None:
    """Say whether to use a tree, a chain or nothing here, how much faster it is, and how sure that is.

    Example: treeopt advise --acceptance vicuna-7b-m3 --latency latency.json --budget 64
    """
    from treeopt.app.advise import advice_document, load_advice_inputs
    from treeopt.app.advise import advise as weigh

    table, profiles, record, line = load_advice_inputs(acceptance, latency, replay, db)
    if line is not None:
        note(line)
    with progress_bar("advise") as progress:
        advice = weigh(table, profiles, budget, record, acceptance_model=acceptance_model, seed=seed, progress=progress)
    if as_json:
        print_json(advice_document(advice))
        return
    from rich.console import Console

    _print(advice, Console(markup=False, highlight=False))


def _print(advice: "Advice", console: "Console") -> None:
    from treeopt.app.advise_text import doubt_line, headline, reason, tied_line, wider_or_deeper

    latency = advice.latency
    console.print(
        f"{advice.table.model} on {latency.device['name']}, {latency.dtype}, batch {latency.batch_size}, context "
        f"{latency.context_len}; at most {advice.budget} tokens a pass"
    )
    console.print(headline(advice), style="bold")
    console.print(reason(advice))
    _print_contenders(advice, console)
    console.print(tied_line(advice))
    console.print(doubt_line(advice))
    _print_break_even(advice, console)
    first, *rest = wider_or_deeper(advice)
    console.print(first, style="bold")
    for line in rest:
        console.print(f"  {line}")


def _print_contenders(advice: "Advice", console: "Console") -> None:
    from rich.box import SIMPLE
    from rich.table import Table

    from treeopt.app.advise_text import against_best, interval

    shown = Table(box=SIMPLE, pad_edge=False)
    for i, name in enumerate(("design", "tau", "speedup", "95 % interval", "against the best")):
        shown.add_column(name, justify="right" if 0 < i < 4 else "left")
    for each in advice.shown:
        shown.add_row(
            each.name,
            f"{each.acceptance_length:.3f}",
            f"{each.speedup:.3f}x",
            "" if each.kind == "none" else interval(each),
            against_best(each, advice.verdict),
        )
    console.print(shown)


def _print_break_even(advice: "Advice", console: "Console") -> None:
    from rich.box import SIMPLE
    from rich.table import Table

    from treeopt.app.advise_text import break_even_line

    shown = Table(box=SIMPLE, pad_edge=False)
    for name in ("batch", "context", "best pass", "needs tau", "has tau", "optimum", "use"):
        shown.add_column(name, justify="right")
    for row in advice.break_even:
        shown.add_row(
            str(row.batch_size),
            str(row.context_len),
            str(row.num_tokens),
            f"{row.needed:.3f}",
            f"{row.acceptance_length:.3f}",
            f"{row.speedup:.3f}x",
            row.kind,
        )
    console.print(shown)
    console.print(break_even_line(advice.break_even))
