"""``treeopt sweep``."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.command import Command
from treeopt import AcceptanceTable, LatencyProfile, read_document, write_document


@pytest.fixture
def table(tmp_path: Path) -> Path:
    write_document(AcceptanceTable.from_marginals([[0.6, 0.2], [0.5, 0.1]]), tmp_path / "table.json")
    return tmp_path / "table.json"


def profile(folder: Path, seconds_per_token: float) -> Path:
    points = {n: 1 + seconds_per_token * (n - 1) for n in range(1, 9)}
    write_document(LatencyProfile.from_medians(points), folder / "latency.json")
    return folder / "latency.json"


def test_json_lines_with_the_best_marked(treeopt: Command, table: Path, tmp_path: Path) -> None:
    latency = profile(tmp_path, 0.1)
    done = treeopt("sweep", "--acceptance", table, "--latency", latency, "--budgets", "1-6", "--json")
    assert (done.code, done.err) == (0, "")
    lines = done.json_lines()
    assert [line["budget"] for line in lines if line["best"]] == [4]
    assert lines[3]["speedup"] == lines[5]["speedup"] == pytest.approx(1.264368, abs=1e-6)
    assert lines[3]["one_size_speedup"] == pytest.approx(1.6 / 1.3)


def test_people_are_told_the_optimum_and_what_was_not_measured(treeopt: Command, table: Path, tmp_path: Path) -> None:
    latency = profile(tmp_path, 0.1)
    done = treeopt("sweep", "--acceptance", table, "--latency", latency, "--budgets", "4,8,16")
    assert done.code == 0
    assert "best: 1.264x plain decoding, reached at budget 4" in done.out
    assert "sizes above 8 tokens were not measured" in done.out
    assert max(map(len, done.out.splitlines())) <= 80


def test_no_speculation_is_said_plainly(treeopt: Command, table: Path, tmp_path: Path) -> None:
    latency = profile(tmp_path, 1.0)
    done = treeopt("sweep", "--acceptance", table, "--latency", latency, "--budgets", "1-8")
    assert "No speculation is best here" in done.out


def test_rows_of_a_batch_are_said_to_share_one_size(treeopt: Command, table: Path, tmp_path: Path) -> None:
    one = read_document(profile(tmp_path, 0.1), LatencyProfile)
    write_document(replace(one, batch_size=4), tmp_path / "four.json")
    done = treeopt("sweep", "--acceptance", table, "--latency", tmp_path / "four.json", "--budgets", "1-8")
    assert "all states share the measured size" in done.out
    assert "every state uses" not in done.out


def test_without_a_stored_profile_auto_says_so(treeopt: Command, table: Path) -> None:
    done = treeopt("sweep", "--acceptance", table, "--latency", "auto", "--budgets", "2", "--json")
    assert done.code == 0
    assert "no latency profile" in done.err


def test_without_a_profile_it_says_what_is_missing(treeopt: Command, table: Path) -> None:
    done = treeopt("sweep", "--acceptance", table, "--budgets", "2,8")
    assert done.code == 0
    assert "speedup" not in done.out
    assert "1.9333 at budget 8" in done.out
    assert "--latency" in done.out


@pytest.mark.parametrize("with_profile", [True, False])
def test_plot_is_written_and_the_same_twice(treeopt: Command, table: Path, tmp_path: Path, with_profile: bool) -> None:
    more = ("--latency", profile(tmp_path, 0.1)) if with_profile else ()
    for name in ("a.png", "b.png"):
        done = treeopt("sweep", "--acceptance", table, "--budgets", "1-8", *more, "--out", tmp_path / name)
        assert done.code == 0
        assert "written to" in done.err
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_files_that_do_not_serve_are_refused_in_one_line(treeopt: Command, table: Path, tmp_path: Path) -> None:
    for arguments in (
        ("--out", tmp_path / "none" / "a.png"),
        ("--latency", table),
        ("--acceptance-model", "joint"),
    ):
        done = treeopt("sweep", "--acceptance", table, "--budgets", "4", *arguments)
        assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
