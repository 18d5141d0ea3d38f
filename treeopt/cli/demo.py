"""``treeopt demo``."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from treeopt.cli.common import Database, FigureOut, note, progress_bar, shows_unicode

if TYPE_CHECKING:
    from rich.console import Console

    from treeopt.app.demo import DemoResult, SideBySide

__all__ = ["demo"]

MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=8, help="Tokens per answer.")]

BAR_WIDTH = 36


Fresh = Annotated[bool, typer.Option("--fresh", help="Measure the latency curve anew.")]


def demo(max_new_tokens: MaxNewTokens = 40, fresh: Fresh = False, out: FigureOut = None, db: Database = None) -> None:
    """Show it all on this machine in a few minutes: fetch a small model, measure, search, decode, compare.

    Example: treeopt demo --out tree.svg
    """
    if out is not None:
        from treeopt.plot import check_figure_path

        check_figure_path(out)
    from rich.console import Console

    from treeopt.app.demo import run_demo

    console = Console()
    with progress_bar("demo") as progress:

        def told(text: str) -> None:
            progress(text)
            # A bar comes and goes; which curve is used stays, and so does all that takes long where there is no bar.
            if text.startswith("latency curve") or (text.startswith("latency") and not sys.stderr.isatty()):
                note(text)

        result = run_demo(
            db_url=db,
            max_new_tokens=max_new_tokens,
            fresh=fresh,
            progress=told,
            on_text=lambda pair: _print_pair(pair, console),
        )
    _print_result(result, console)
    if out is not None:
        from treeopt.acceptance import acceptance_trie
        from treeopt.picture import design_figure
        from treeopt.plot import save_figure

        save_figure(design_figure(result.shown, acceptance_trie(result.table), model=result.table.model), out)
        note(f"written to {out}")


def _print_pair(pair: "SideBySide", console: "Console") -> None:
    console.print(f"\n> {pair.prompt}", style="bold", highlight=False, markup=False)
    console.print(pair.text.strip(), highlight=False, markup=False)
    same = "the same text" if pair.identical else "the texts differ"
    console.print(
        f"plain {pair.plain_tokens_per_second:.1f} tokens/s, with the tree {pair.tree_tokens_per_second:.1f}: {same}",
        style="dim",
        highlight=False,
    )


def _print_result(result: "DemoResult", console: "Console") -> None:
    from treeopt.acceptance import acceptance_trie
    from treeopt.draw import draw_design

    shown, row, known = result.shown, result.result, result.result.prediction
    busiest = max(range(len(row.occupancy)), key=lambda k: row.occupancy[k])
    console.print(f"\nThe tree that {row.occupancy[busiest]:.0%} of the steps used:\n", highlight=False)
    drawing = draw_design(shown, acceptance_trie(result.table), states=[busiest], ascii_only=not shows_unicode())
    console.print(drawing, highlight=False, markup=False, soft_wrap=True)
    bars = [("plain decoding", 1.0, "")]
    if known is not None and known.speedup is not None:
        bars.append(("predicted", known.speedup, _interval(known.low, known.high)))
    bars.append(("measured", row.speedup.value, _interval(row.speedup.low, row.speedup.high)))
    most = max(value for _, value, _ in bars)
    block = "█" if shows_unicode() else "#"
    console.print("\nspeed, plain decoding = 1", style="bold")
    for name, value, interval in bars:
        bar = block * max(1, round(BAR_WIDTH * value / most))
        console.print(f"{name:<15} {bar:<{BAR_WIDTH}} {value:.2f}{interval}", highlight=False)
    expected = "" if known is None else f", {known.acceptance_length:.2f} expected"
    console.print(
        f"\n{row.acceptance_length.value:.2f} tokens per step{expected}; {row.identical} of {row.num_prompts} texts "
        f"identical to plain decoding; {result.report.device}, context about {result.report.context_len}",
        highlight=False,
    )
    if not result.tree_pays:
        console.print("The search finds that no tree pays on this machine: it advises plain decoding.", highlight=False)
    for finding in result.report.findings:
        # What bench calls --latency fresh, is --fresh here.
        console.print(f"! {finding.replace('--latency fresh', '--fresh')}", highlight=False, markup=False)
    console.print("Next: treeopt bench --budgets 1,4,8,16, also with a model of yours (--model).", highlight=False)


def _interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f" ({low:.2f} to {high:.2f})"
