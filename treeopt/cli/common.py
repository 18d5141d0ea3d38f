"""What the commands share: the options that mean the same everywhere, progress on stderr, JSON on stdout."""

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treeopt.types import MAX_BUDGET

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = [
    "PICTURES",
    "Acceptance",
    "AcceptanceModel",
    "AsJson",
    "Budget",
    "Budgets",
    "Database",
    "Device",
    "Dtype",
    "FigureOut",
    "Latency",
    "Model",
    "PromptTokens",
    "Raw",
    "Seed",
    "console",
    "file_ending",
    "note",
    "one_line",
    "one_of",
    "parse_budgets",
    "print_json",
    "print_table",
    "progress_bar",
    "shows_unicode",
]

Acceptance = Annotated[
    str,
    typer.Option(
        "--acceptance", metavar="FILE|NAME", help="Acceptance table: a file, or a name from `treeopt tables`."
    ),
]
AcceptanceModel = Annotated[
    str,
    typer.Option(
        "--acceptance-model",
        metavar="independent|joint",
        help="Distances independent (the paper), or shares of whole recorded paths.",
        callback=lambda value: one_of(value, ("independent", "joint")),
    ),
]
Budget = Annotated[
    int, typer.Option("--budget", min=1, max=MAX_BUDGET, help="Cap on the tokens of every forward pass.")
]
Latency = Annotated[
    str | None, typer.Option("--latency", metavar="FILE", help="Latency profile: maximise tokens per second with it.")
]
Database = Annotated[
    str | None,
    typer.Option(
        "--db", metavar="URL", help="Database: URL or SQLite file. Default: TREEOPT_DB, else one in the data folder."
    ),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of whatever is drawn at random.")]
Budgets = Annotated[
    str,
    typer.Option(
        "--budgets",
        metavar="LIST",
        help="Budgets, as in 8,16,32 or 1-128 or 4-64:4 (every fourth).",
        callback=lambda value: _checked_budgets(value),
    ),
]
FigureOut = Annotated[
    str | None,
    typer.Option(
        "--out",
        metavar="FILE",
        help="Write a picture to this file: .png, .svg or .pdf.",
        callback=lambda value: file_ending(value, PICTURES),
    ),
]
PICTURES = (".png", ".svg", ".pdf")
Model = Annotated[
    str, typer.Option("--model", metavar="NAME|FOLDER|FILE.gguf", help="Hub id, folder, GGUF file, or demo.")
]
PromptTokens = Annotated[str | None, typer.Option("--prompt-tokens", metavar="FOLDER", help="Trained prompt tokens.")]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="float32|bfloat16|float16|float64",
        help="Number format of the model.",
        callback=lambda value: one_of(value, ("float32", "bfloat16", "float16", "float64")),
    ),
]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, or auto.")]
Raw = Annotated[bool, typer.Option("--raw", help="Leave out the chat template.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else on stdout.")]

_LONGEST_LINE = 2000
"""Characters of a message; a longer one loses its middle, so that place and remedy stay."""

_ANY_WIDTH = 10_000
"""Columns that no table of ours needs."""

_QUIET_S = 1.0
"""Work shorter than this shows no progress bar."""


def one_of(value: str, choices: tuple[str, ...]) -> str:
    """Return the value of an option that has a few choices; anything else is wrong usage."""
    if value not in choices:
        raise typer.BadParameter(f"must be {' or '.join(choices)}, not {value!r}")
    return value


def parse_budgets(text: str) -> list[int]:
    """Read a list of budgets: numbers, ranges and ranges with a step, separated by commas; sorted, each once.

    Raises
    ------
    typer.BadParameter
        When it is no such list, or a budget is out of range.

    Examples
    --------
    >>> parse_budgets("1-4,8,16-32:8")
    [1, 2, 3, 4, 8, 16, 24, 32]
    """
    budgets: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?\s*", part)
        if match is None:
            raise typer.BadParameter(f"{part!r} is no budget; write a list such as 8,16,32 or 1-128 or 4-64:4")
        low, high, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if not 1 <= low <= high <= MAX_BUDGET:
            raise typer.BadParameter(f"{part!r}: budgets go upwards from 1 to {MAX_BUDGET} tokens")
        if step < 1:
            raise typer.BadParameter(f"{part!r}: the step must be at least 1")
        budgets.update(range(low, high + 1, step))
    return sorted(budgets)


def _checked_budgets(text: str) -> str:
    parse_budgets(text)
    return text


def file_ending(path: str | None, endings: tuple[str, ...]) -> str | None:
    """Return the file named by an option that knows a few endings; anything else is wrong usage."""
    if path is not None and not path.lower().endswith(endings):
        raise typer.BadParameter(f"must end in {', '.join(endings)}, not {path!r}")
    return path


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON object on one line of stdout."""
    print(json.dumps(document, allow_nan=False))  # noqa: T201


def console() -> "Console":
    """Return the console that reports for people go to: names out of files are printed as they are, not as markup."""
    from rich.console import Console

    return Console(markup=False, highlight=False)


def print_table(table: "Table", console: "Console") -> None:
    """Print a table of figures whole: where the terminal is too narrow lines run over, no figure is cut short."""
    from rich.measure import Measurement

    needed = Measurement.get(console, console.options.update(max_width=_ANY_WIDTH), table).maximum
    if needed > console.width:
        table.width = needed
    console.print(table, crop=False)


def note(text: str) -> None:
    """Say one line to people, on stderr."""
    print(one_line(text), file=sys.stderr)  # noqa: T201


def one_line(text: str) -> str:
    r"""Return a message as one printable line of bounded length, whatever the file that it quotes holds.

    Examples
    --------
    >>> one_line("table.json: w\nat: unknown field")
    'table.json: w\\nat: unknown field'
    """
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    half = _LONGEST_LINE // 2
    return line if len(line) <= _LONGEST_LINE else f"{line[:half]} .. {line[-half:]}"


def shows_unicode() -> bool:
    """Whether stdout can show the characters of a drawing."""
    try:
        "├└│─◆".encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


@contextmanager
def progress_bar(title: str, total: int | None = None) -> Iterator[Callable[[str], None]]:
    """Show a bar on stderr once the work has taken over a second; nothing when stderr is no terminal.

    Parameters
    ----------
    title : str
        What is being done.
    total : int, optional
        Number of calls to expect; without it the bar only says that work goes on.

    Yields
    ------
    callable
        Call it with one line of text each time a part is done.
    """
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(title, total=total)
    start = time.monotonic()

    def advance(text: str) -> None:
        bar.update(task, advance=0 if total is None else 1, description=f"{title}: {text}")
        if time.monotonic() - start > _QUIET_S:
            bar.start()

    try:
        yield advance
    finally:
        bar.stop()
