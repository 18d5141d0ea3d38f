"""The command line: parses, prints, and turns every treeopt error into one line on stderr.

Exit codes: 0 done; 1 a problem with a file or the machine; 2 wrong usage.
"""

import os
import sys

import typer

from treeopt._version import __version__
from treeopt.cli.advise import advise
from treeopt.cli.bench import bench
from treeopt.cli.common import note
from treeopt.cli.compare import compare
from treeopt.cli.convert import export, import_
from treeopt.cli.db import app as db_app
from treeopt.cli.demo import demo
from treeopt.cli.evaluate import evaluate
from treeopt.cli.generate import generate
from treeopt.cli.measure import measure
from treeopt.cli.plot import app as plot
from treeopt.cli.profile import app as profile_app
from treeopt.cli.report_html import report
from treeopt.cli.search import search
from treeopt.cli.show import show
from treeopt.cli.sweep import sweep
from treeopt.cli.tables import tables
from treeopt.cli.train import train
from treeopt.errors import TreeOptError

__all__ = ["app", "main"]

EXTRAS = {
    **dict.fromkeys(("accelerate", "gguf", "jinja2", "safetensors", "torch", "transformers"), "runtime"),
    **dict.fromkeys(("alembic", "apscheduler", "filelock", "platformdirs", "psutil", "sqlalchemy"), "profile"),
    "psycopg": "postgresql",
}
"""Packages that only some commands need, and the extra that brings them."""

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"treeopt {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """Find the speculation tree that makes a language model fastest on this machine, with proof."""


app.command("search")(search)
app.command("evaluate")(evaluate)
app.command("tables")(tables)
app.command("show")(show)
app.command("compare")(compare)
app.command("sweep")(sweep)
app.command("export")(export)
app.command("import")(import_)
app.command("bench")(bench)
app.command("demo")(demo)
app.add_typer(plot, name="plot")
app.command("generate")(generate)
app.command("measure")(measure)
app.command("train")(train)
app.add_typer(profile_app, name="profile")
app.add_typer(db_app, name="db")
app.command("advise")(advise)
app.command("report")(report)


def main() -> None:
    """Run the command line."""
    try:
        try:
            app(prog_name="treeopt")
        finally:
            if sys.stdout is not None:  # closed before we started, as in `>&-`
                sys.stdout.flush()
    except TreeOptError as error:
        note(f"treeopt: {error}")
        sys.exit(1)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        command = f"pip install 'treeopt[{EXTRAS[package]}]'"
        note(f"treeopt: this command needs {package}, which is not installed; run: {command}")
        sys.exit(1)
    except OSError as error:
        # A reader that has gone (as in `| head`) is no problem; a full disk is. Leave nothing for the interpreter to
        # flush there once more.
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            place = "the output" if error.filename is None else error.filename
            note(f"treeopt: {place}: {error.strerror or error}; check the disk and its rights")
        sys.exit(1)
