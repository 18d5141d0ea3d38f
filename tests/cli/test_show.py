"""``treeopt show``: terminal, JSON and figure."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import Command
from treeopt import AcceptanceTable, TreeDesign, read_document, search, write_document


@pytest.fixture
def tree(treeopt: Command, tmp_path: Path) -> Path:
    path = tmp_path / "tree.json"
    assert treeopt("search", "--acceptance", "vicuna-7b-m3", "--budget", 20, "--out", path).code == 0
    return path


@pytest.fixture
def own_tree(tmp_path: Path) -> Path:
    """A design of a table that does not come with treeopt, and that table beside it."""
    table = AcceptanceTable.from_marginals([[0.6, 0.2], [0.5, 0.1]])
    write_document(table, tmp_path / "table.json")
    write_document(search(table, 8), tmp_path / "own.json")
    return tmp_path / "own.json"


def test_draws_every_state_with_the_probabilities_of_its_bundled_table(treeopt: Command, tree: Path) -> None:
    done = treeopt("show", tree)
    assert (done.code, done.err) == (0, "")
    assert [line for line in done.out.splitlines() if line.startswith("State")] == [
        "State 0",
        "State 1",
        "States 2 and 3 (the same tree)",
    ]
    assert "├─ 0" in done.out
    assert "48.33 %" in done.out or "48.34 %" in done.out  # the best guess at distance 1: 0.48335
    assert max(map(len, done.out.splitlines())) <= 80


def test_without_a_known_table_there_are_no_probabilities(treeopt: Command, own_tree: Path) -> None:
    plain = treeopt("show", own_tree)
    assert plain.code == 0
    assert "%" not in plain.out
    assert "◆" in plain.out
    told = treeopt("show", own_tree, "--acceptance", own_tree.with_name("table.json"))
    assert (told.code, told.err) == (0, "")
    assert "60.00 %" in told.out


def test_another_table_than_the_designs_own_is_noted(treeopt: Command, tree: Path) -> None:
    done = treeopt("show", tree, "--acceptance", "vicuna-13b-m3")
    assert done.code == 0
    assert "was not made with this table" in done.err


def test_json_describes_the_design_and_nothing_else(treeopt: Command, tree: Path) -> None:
    done = treeopt("show", tree, "--json")
    described, design = done.json(), read_document(tree, TreeDesign)
    assert done.err == ""
    assert described["acceptance_length"] == described["evaluated"]["acceptance_length"] == design.acceptance_length
    assert [state["size"] for state in described["states"]] == list(design.sizes())
    assert [state["state"] for state in treeopt("show", tree, "--json", "--state", 2).json()["states"]] == [2]


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_figure_is_written_beside_the_drawing(treeopt: Command, tree: Path, suffix: str) -> None:
    picture = tree.with_name(f"tree.{suffix}")
    done = treeopt("show", tree, "--out", picture, "--state", 1)
    assert done.code == 0
    assert done.out.startswith("State 1\n")
    assert "written to" in done.err
    assert picture.stat().st_size > 2000


def test_terminals_without_box_drawing_get_ascii(tree: Path) -> None:
    code = "import sys; from treeopt.cli import main; sys.argv = ['treeopt', 'show', sys.argv[1]]; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, tree], env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"+- 0" in done.stdout
    assert done.stdout.isascii()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--state", 4), "states 0 to 3"),
        (("--state", -1), "--state"),
        (("--out", "tree.txt"), ".png, .svg, .pdf"),
        (("--acceptance-model", "psychic"), "independent or joint"),
    ],
)
def test_wrong_usage(treeopt: Command, tree: Path, arguments: tuple[object, ...], complaint: str) -> None:
    done = treeopt("show", tree, *arguments)
    assert (done.code, done.out) == (2, "")
    assert complaint in done.err


def test_files_that_do_not_serve_are_refused_in_one_line(treeopt: Command, tree: Path, own_tree: Path) -> None:
    table = own_tree.with_name("table.json")
    for arguments, complaint in (
        ((table,), "treeopt.tree/1"),
        ((tree.parent,), "cannot be read"),
        ((tree, "--acceptance", "vicuna-7b-m2"), "the design has states 0 to 3, the table needs 0 to 2"),
        ((tree, "--acceptance-model", "joint"), "no joint counts"),
        ((tree, "--out", tree.parent / "none" / "tree.png"), "make it first"),
    ):
        done = treeopt("show", *arguments)
        assert (done.code, done.out) == (1, "")
        assert complaint in done.err
        assert done.err.count("\n") == 1


def test_description_is_one_line_of_json(treeopt: Command, tree: Path) -> None:
    lines = treeopt("show", tree, "--json").out.splitlines()
    assert len(lines) == 1
    json.loads(lines[0])
