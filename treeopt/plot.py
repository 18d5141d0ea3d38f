"""Pictures of curves, and writing any picture to a file.

Pictures are `matplotlib.figure.Figure` objects without pyplot's global state. The same input gives the same bytes:
fonts are the ones that come with matplotlib, settings of the user's machine are set aside, and no date is written.
"""

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from treeopt.artifact import write_bytes
from treeopt.errors import DocumentError

__all__ = [
    "BLUE",
    "FIGURE_FORMATS",
    "GREEN",
    "GREY",
    "INK",
    "ORANGE",
    "PURPLE",
    "Curve",
    "Mark",
    "Panel",
    "check_figure_path",
    "curves_figure",
    "plain_style",
    "save_figure",
]

FIGURE_FORMATS = ("png", "svg", "pdf")

# Okabe and Ito's colours, told apart by every kind of colour vision ("Color Universal Design", 2008).
BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
INK, GREY = "#222222", "#767676"

_DPI = 150
_WIDTH_IN, _PANEL_HEIGHT_IN, _HEADER_IN, _LINE_IN, _FOOTER_IN = 7.2, 2.7, 0.44, 0.17, 0.6

_STYLES = ((BLUE, "o", "-"), (ORANGE, "s", "--"), (GREEN, "^", "-."), (PURPLE, "D", ":"))
"""Colour, marker and dashes of the first, second, .. curve: each alone tells the curves apart."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One curve over budgets.

    Parameters
    ----------
    name : str
        For the legend.
    x, y : sequence of float
        Points, x increasing; curves may skip an x.
    low, high : sequence of float, optional
        A band around the curve.
    style : int
        Colour, marker and dashes, 0 to 3.
    stairs : bool
        Whether y keeps its value up to the next x.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    style: int = 0
    stairs: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A point to point out, and what the legend says of it."""

    x: float
    y: float
    name: str


@dataclass(frozen=True, slots=True)
class Panel:
    """Axes of a figure: what y is, with its unit, and the curves.

    Parameters
    ----------
    y_label : str
        Name and unit.
    curves : sequence of Curve
        What to draw.
    reference : (float, str), optional
        A level to compare with, and its name.
    mark : Mark, optional
        A point to point out.
    log_y : bool
        Whether y is drawn on a logarithmic scale.
    """

    y_label: str
    curves: Sequence[Curve]
    reference: tuple[float, str] | None = None
    mark: Mark | None = None
    log_y: bool = False


@contextmanager
def plain_style() -> Iterator[None]:
    """Set the machine's matplotlib settings aside, so that pictures look, and are, the same everywhere."""
    machine = {"backend", "backend_fallback", "interactive", "toolbar", "timezone", "webagg.port", "webagg.address"}
    defaults = {name: value for name, value in matplotlib.rcParamsDefault.items() if name not in machine}
    with matplotlib.rc_context({**defaults, "svg.hashsalt": "treeopt", "font.family": "DejaVu Sans"}):
        yield


def curves_figure(title: str, subtitle: str, panels: Sequence[Panel], x_label: str) -> Figure:
    """Draw panels of curves above one another over a common x axis.

    Parameters
    ----------
    title, subtitle : str
        What is shown; of what.
    panels : sequence of Panel
        From top to bottom.
    x_label : str
        Name and unit of the common axis.

    Returns
    -------
    Figure
    """
    with plain_style():
        header = _HEADER_IN + _LINE_IN * len(subtitle.splitlines())
        height = header + len(panels) * _PANEL_HEIGHT_IN + _FOOTER_IN
        figure = Figure(figsize=(_WIDTH_IN, height), dpi=_DPI, facecolor="white")
        figure.text(0.14 / _WIDTH_IN, 1 - 0.16 / height, title, size=12.5, weight="bold", color=INK, va="top")
        figure.text(0.14 / _WIDTH_IN, 1 - 0.46 / height, subtitle, size=9, color=GREY, va="top", parse_math=False)
        every_x = sorted({x for panel in panels for curve in panel.curves for x in curve.x})
        for i, panel in enumerate(panels):
            bottom = _FOOTER_IN + (len(panels) - 1 - i) * _PANEL_HEIGHT_IN
            axes = figure.add_axes(
                (0.9 / _WIDTH_IN, bottom / height, 1 - 1.1 / _WIDTH_IN, (_PANEL_HEIGHT_IN - 0.42) / height)
            )
            _draw_panel(axes, panel)
            _set_budget_axis(axes, every_x)
            if i == len(panels) - 1:
                axes.set_xlabel(x_label, color=INK, labelpad=6)
            else:
                axes.tick_params(labelbottom=False)
        return figure


def _draw_panel(axes: Axes, panel: Panel) -> None:
    for spine in ("top", "right"):
        axes.spines[spine].set_visible(False)
    axes.grid(color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_ylabel(panel.y_label, color=INK)
    axes.yaxis.set_label_coords(-0.47 / (_WIDTH_IN - 1.1), 0.5, transform=axes.transAxes)
    axes.tick_params(labelsize=9)
    if panel.reference is not None:
        axes.axhline(panel.reference[0], color=GREY, linewidth=1.2, dashes=(1, 1.5), label=panel.reference[1])
    for curve in panel.curves:
        colour, marker, dashes = _STYLES[curve.style]
        if curve.low is not None and curve.high is not None:
            axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.22, linewidth=0)
        few = len(curve.x) <= 24
        axes.plot(
            curve.x, curve.y, color=colour, linestyle=dashes, linewidth=1.8, label=curve.name,
            drawstyle="steps-post" if curve.stairs else "default",
            marker=marker if few else None, markersize=5.5, markeredgecolor="white", markeredgewidth=0.7,
        )  # fmt: skip
    if panel.mark is not None:
        axes.plot(
            [panel.mark.x], [panel.mark.y], linestyle="none", marker="*", markersize=15, zorder=5, clip_on=False,
            color=INK, markeredgecolor="white", label=panel.mark.name,
        )  # fmt: skip
    if panel.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.margins(x=0.03, y=0.12)
    # Above the axes, where no curve can run through it.
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.012, 0.995), ncols=4, frameon=False, fontsize=8.5, borderaxespad=0.2,
        handlelength=2.2, handletextpad=0.5, columnspacing=1.4,
    )  # fmt: skip


def _set_budget_axis(axes: Axes, every_x: Sequence[float]) -> None:
    """Evenly for evenly spaced budgets, by powers of two for doubling ones."""
    steps = np.diff(every_x)
    if len(steps) > 1 and steps.max() > 3 * steps.min():
        axes.set_xscale("log", base=2)
        ticks = list(every_x) if len(every_x) <= 12 else _powers_of_two(every_x[0], every_x[-1])
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    elif len(every_x) == 1:
        axes.set_xticks(list(every_x))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=9, steps=[1, 1.6, 2, 4, 8, 10]))


def _powers_of_two(low: float, high: float) -> list[float]:
    return [2.0**i for i in range(32) if low <= 2**i <= high]


def check_figure_path(path: str | os.PathLike[str]) -> None:
    """Refuse a place that no picture can be written to, before the work for it is done.

    Raises
    ------
    DocumentError
        When the folder is missing, or the path is a folder.
    """
    target = Path(path)
    if target.is_dir():
        raise DocumentError(f"{target}: is a folder; name a file in it")
    if not target.parent.is_dir():
        raise DocumentError(f"{target}: there is no folder {target.parent}; make it first")


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure as PNG, SVG or PDF, by the file's suffix, whole or not at all.

    Raises
    ------
    DocumentError
        When the suffix is another one, or the file cannot be written.
    """
    kind = Path(path).suffix.lower().removeprefix(".")
    # Neither dates nor versions: the same picture has the same bytes.
    metadata: dict[str, dict[str, str | None]] = {
        "png": {"Software": None},
        "svg": {"Date": None, "Creator": None},
        "pdf": {"CreationDate": None, "Producer": None, "Creator": None},
    }
    if kind not in metadata:
        raise DocumentError(f"{os.fspath(path)}: pictures are written as .png, .svg or .pdf; change the file's ending")
    picture = io.BytesIO()
    with plain_style():
        figure.savefig(picture, format=kind, metadata=metadata[kind])
    write_bytes(picture.getvalue(), path)
