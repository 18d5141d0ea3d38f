"""``treeopt plot``: pictures of what was measured."""

from pathlib import Path
from typing import Annotated

import typer

from treeopt.cli.common import note

__all__ = ["app", "speedup"]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Draw what was measured.",
)


@app.callback()
def _plot() -> None:
    """Draw what was measured."""


def _picture(path: Path) -> Path:
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise typer.BadParameter(f"must end in .png, .svg or .pdf, not {path.name!r}")
    return path


@app.command("speedup")
def speedup(
    bench: Annotated[Path, typer.Argument(metavar="BENCH", help="What `treeopt bench --out` wrote.")],
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="Picture to write: .png, .svg or .pdf.", callback=_picture)
    ] = Path("speedup.svg"),
) -> None:
    """Draw predicted against measured speedup over tree sizes, tokens per step, and the latency curve beneath.

    Example: treeopt plot speedup bench.json --out speedup.svg
    """
    from treeopt.plot import check_figure_path, save_figure
    from treeopt.speedup_plot import best_measured, best_predicted, read_bench, speedup_figure

    check_figure_path(out)
    curves = read_bench(bench)
    save_figure(speedup_figure(curves), out)
    measured, predicted = best_measured(curves.points), best_predicted(curves.points)
    line = f"best measured: {measured.measured:.3f} at budget {measured.budget}"
    if predicted is not None:
        line += f"; best predicted: {predicted.predicted:.3f} at budget {predicted.budget}"
    typer.echo(line)
    note(f"written to {out}")
