"""``treeopt compare``, and the list of budgets that compare and sweep read."""

from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.command import Command
from treeopt.cli.common import parse_budgets


def test_json_lines_one_per_budget(treeopt: Command) -> None:
    done = treeopt("compare", "--acceptance", "vicuna-7b-m3", "--budgets", "2,8,16", "--seeds", 2, "--json")
    assert (done.code, done.err) == (0, "")
    below, eight, sixteen = done.json_lines()
    assert [below["budget"], eight["budget"], sixteen["budget"]] == [2, 8, 16]
    assert (below["greedy_tau"], below["random_mean_tau"], below["num_seeds"]) == (None, None, 0)
    assert eight["exact_tau"] == pytest.approx(1.70037, abs=1e-5)
    assert eight["naive_tau"] <= eight["greedy_tau"] <= eight["exact_tau"] < sixteen["exact_tau"]
    assert sixteen["num_seeds"] == 2


def test_table_for_people_says_why_cells_are_empty(treeopt: Command) -> None:
    done = treeopt("compare", "--acceptance", "vicuna-7b-m3", "--budgets", "2,8", "--seeds", 1)
    assert done.code == 0
    assert "lmsys/vicuna-7b-v1.3" in done.out
    assert "below 4 tokens only exact has an answer" in done.out
    assert "1.7004" in done.out
    assert "1 seed," in done.out
    assert "independent acceptance" in done.out
    assert max(map(len, done.out.splitlines())) <= 80


def test_plot_is_written_and_the_same_twice(treeopt: Command, tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        done = treeopt("compare", "--budgets", "4,8", "--seeds", 2, "--out", tmp_path / name, "--json")
        assert done.code == 0
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize(
    ("text", "budgets"),
    [
        ("64", [64]),
        ("8,16,8", [8, 16]),
        ("16, 8", [8, 16]),
        ("1-4", [1, 2, 3, 4]),
        ("4-12:4,64", [4, 8, 12, 64]),
        ("5-5", [5]),
        ("4095-4096", [4095, 4096]),
    ],
)
def test_budget_lists(text: str, budgets: list[int]) -> None:
    assert parse_budgets(text) == budgets


@pytest.mark.parametrize(
    "text", ["", ",", "8,", "0", "-3", "abc", "99999999999", "4097", "8-4", "0-4", "1-4:0", "1.5", "1-2-3", "0x8", "٣"]
)
def test_other_lists_are_wrong_usage(treeopt: Command, text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_budgets(text)
    for command in ("compare", "sweep"):
        done = treeopt(command, f"--budgets={text}")
        assert (done.code, done.out) == (2, "")
        assert "--budgets" in done.err


@given(st.lists(st.integers(1, 4096), min_size=1, max_size=20))
def test_numbers_read_back_sorted_and_once(budgets: list[int]) -> None:
    assert parse_budgets(",".join(map(str, budgets))) == sorted(set(budgets))


@pytest.mark.parametrize("arguments", [("--seeds", 0), ("--out", "plot.jpg"), ("--acceptance-model", "both")])
def test_wrong_usage(treeopt: Command, arguments: tuple[object, ...]) -> None:
    done = treeopt("compare", "--budgets", "8", *arguments)
    assert (done.code, done.out) == (2, "")


def test_files_that_do_not_serve_are_refused_in_one_line(treeopt: Command, tmp_path: Path) -> None:
    for arguments in (("--out", tmp_path / "none" / "a.png"), ("--acceptance", tmp_path), ("--acceptance", "no-such")):
        done = treeopt("compare", "--budgets", "8", *arguments)
        assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
