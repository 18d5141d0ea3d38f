"""Curves, and pictures that are written whole, the same everywhere."""

from pathlib import Path

import matplotlib
import pytest

from treeopt.errors import DocumentError
from treeopt.plot import Curve, Mark, Panel, check_figure_path, curves_figure, save_figure

PANEL = Panel("tau (tokens per step)", [Curve("one", [1, 2, 3], [1.0, 1.5, 1.7])], (1.0, "plain"), Mark(3, 1.7, "best"))
STARTS = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.mark.parametrize("suffix", STARTS)
def test_pictures_are_what_their_suffix_says_and_the_same_whatever_the_settings(suffix: str, tmp_path: Path) -> None:
    for name, settings in (("a", {}), ("b", {"font.size": 30, "axes.facecolor": "red", "savefig.dpi": 20})):
        with matplotlib.rc_context(settings):
            save_figure(curves_figure("title", "of this", [PANEL], "budget (tokens)"), tmp_path / f"{name}.{suffix}")
    first = (tmp_path / f"a.{suffix}").read_bytes()
    assert first.startswith(STARTS[suffix])
    assert first == (tmp_path / f"b.{suffix}").read_bytes()


def test_settings_of_the_machine_stay_as_they_were() -> None:
    with matplotlib.rc_context({"font.size": 30}):
        curves_figure("title", "of this", [PANEL], "budget (tokens)")
        assert matplotlib.rcParams["font.size"] == 30


def test_axes_have_names_units_legend_and_mark() -> None:
    figure = curves_figure("title", "of this", [PANEL, PANEL], "budget (tokens)")
    assert [axes.get_ylabel() for axes in figure.axes] == ["tau (tokens per step)"] * 2
    assert [axes.get_xlabel() for axes in figure.axes] == ["", "budget (tokens)"]
    legend = figure.axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["plain", "one", "best"]


@pytest.mark.parametrize(
    ("budgets", "scale"), [([8, 16, 32, 64], "log"), (list(range(1, 129)), "linear"), ([64], "linear")]
)
def test_doubling_budgets_are_spaced_evenly(budgets: list[int], scale: str) -> None:
    panel = Panel("tau (tokens per step)", [Curve("one", budgets, [1.0] * len(budgets))])
    axes = curves_figure("title", "of this", [panel], "budget (tokens)").axes[0]
    assert axes.get_xscale() == scale
    if scale == "log":
        assert list(axes.get_xticks()) == budgets


def test_logarithmic_y_has_plain_numbers() -> None:
    panel = Panel("time (s)", [Curve("one", [1, 2, 4], [0.01, 0.1, 1.0])], log_y=True)
    figure = curves_figure("title", "of this", [panel], "budget (tokens)")
    figure.draw_without_rendering()
    assert figure.axes[0].get_yscale() == "log"
    assert {"0.01", "0.1", "1"} <= {text.get_text() for text in figure.axes[0].get_yticklabels()}


def test_model_names_with_dollars_are_names(tmp_path: Path) -> None:
    save_figure(curves_figure("title", r"a$\frac$b", [PANEL], "budget (tokens)"), tmp_path / "a.png")


def test_other_suffixes_folders_and_missing_folders_are_refused(tmp_path: Path) -> None:
    figure = curves_figure("title", "of this", [PANEL], "budget (tokens)")
    with pytest.raises(DocumentError, match=r"picture\.txt: pictures are written as \.png, \.svg or \.pdf"):
        save_figure(figure, tmp_path / "picture.txt")
    with pytest.raises(DocumentError, match="cannot be written"):
        save_figure(figure, tmp_path / "none" / "a.png")
    with pytest.raises(DocumentError, match="make it first"):
        check_figure_path(tmp_path / "none" / "a.png")
    (tmp_path / "folder.png").mkdir()
    for refuse in (lambda path: save_figure(figure, path), check_figure_path):
        with pytest.raises(DocumentError, match="is a folder"):
            refuse(tmp_path / "folder.png")
    check_figure_path(tmp_path / "a.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.png"]
