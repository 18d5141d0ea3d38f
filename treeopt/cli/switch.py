"""The part of ``treeopt search`` that makes switching tables."""

import re
from typing import TYPE_CHECKING

import typer

from treeopt.cli.common import note, print_json, progress_bar

if TYPE_CHECKING:
    from rich.console import Console

    from treeopt.app.switch import SwitchSearch

__all__ = ["parse_numbers", "search_switch_table"]


def parse_numbers(text: str, flag: str) -> list[int]:
    """Read a list of whole numbers from 1, separated by commas; sorted, each once.

    Raises
    ------
    typer.BadParameter
        When it is no such list.

    Examples
    --------
    >>> parse_numbers("8192,128,1024", "--contexts")
    [128, 1024, 8192]
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,9}", part) and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"must be whole numbers from 1, as in 1,2,4, not {text!r}", param_hint=flag)
    return sorted({int(part) for part in parts})


def search_switch_table(
    acceptance: str,
    latency: list[str],
    budget: int,
    batches: list[int],
    contexts: list[int],
    method: str,
    acceptance_model: str,
    out: str | None,
    as_json: bool,
    db: str | None,
) -> None:
    """Search a switching table, write it and print it."""
    from treeopt.app.switch import search_switch
    from treeopt.artifact import to_document, write_document

    if "none" in latency:
        raise typer.BadParameter("none does not go with --contexts and --batches: ranges come from latencies")
    with progress_bar("search", len(batches) * len(contexts)) as progress:
        found = search_switch(
            acceptance,
            latency,
            budget,
            batches,
            contexts,
            method=method,
            acceptance_model=acceptance_model,
            db_url=db,
            progress=progress,
        )
    if out is not None:
        write_document(found.plan.table, out)
    if as_json:
        print_json(to_document(found.plan.table))
        return
    from rich.console import Console

    _print_switch(found, Console(markup=False, highlight=False))
    if out is not None:
        note(f"written to {out}; decode with it: treeopt generate --tree {out}")


def _print_switch(found: "SwitchSearch", console: "Console") -> None:
    """Print one row per measured pair, then the ranges."""
    from rich.box import SIMPLE
    from rich.table import Table

    from treeopt.draw import counted
    from treeopt.switching import AS_GOOD

    plan, first = found.plan, found.profiles[0]
    console.print(
        f"{found.table.model} on {first.device['name']}, {first.dtype}: {counted(plan.num_designs, 'design')} for "
        f"{counted(len(plan.cells), 'measured pair')} of batch size and context length"
    )
    shown = Table(box=SIMPLE, pad_edge=False)
    for name in ("batch", "context", "tau", "speedup", "pass tokens by state", "below the pair's best"):
        shown.add_column(name, justify="right")
    for cell in plan.cells:
        shown.add_row(
            str(cell.batch_size),
            str(cell.context_len),
            f"{cell.design.acceptance_length:.4f}",
            f"{cell.design.speedup:.3f}x",
            " ".join(map(str, cell.design.pass_tokens)),
            f"{100 * max(0.0, cell.loss):.2f} %",
        )
    console.print(shown)
    ranges = Table(box=SIMPLE, pad_edge=False)
    for name in ("batch up to", "context up to", "largest tree", "pass tokens by state"):
        ranges.add_column(name, justify="right")
    for entry in plan.table.entries:
        largest = max(tree.num_candidates for tree in entry.tree.trees)
        ranges.add_row(
            str(entry.batch_max),
            str(entry.context_max),
            counted(largest, "candidate") if largest else "no speculation",
            " ".join(map(str, entry.tree.pass_tokens)),
        )
    console.print(ranges)
    console.print(
        f"A design within {100 * AS_GOOD:g} % of a pair's best serves it, so that few are needed. A range was measured "
        "at its upper end; past the last one the nearest range applies."
    )
