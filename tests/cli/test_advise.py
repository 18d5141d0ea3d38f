"""``treeopt advise`` as people and programs use it."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.command import Command
from treeopt import AcceptanceTable, LatencyPoint, LatencyProfile, RankRecord, write_document

HIT, MISS = ((0,),) * 4, ((1,),) * 4


def latency(*points: tuple[int, float], batch_size: int = 1) -> LatencyProfile:
    """Every step took the same time."""
    built = tuple(LatencyPoint(n, s, num_samples=3, samples_s=(s,) * 3) for n, s in points)
    return replace(LatencyProfile.from_medians({1: 1.0}), points=built, batch_size=batch_size)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """One distance, one rank; texts that always, and never, have it right; 4 tokens cost 1.2 times as much as one."""
    write_document(AcceptanceTable.from_marginals([[0.5]], model="toy"), tmp_path / "table.json")
    write_document(RankRecord("toy", "made up", "greedy", 0.0, 1, (HIT, MISS)), tmp_path / "ranks.json")
    write_document(latency((1, 1.0), (2, 1.2), (4, 1.2)), tmp_path / "1.json")
    write_document(latency((1, 1.0), (2, 3.0), (4, 4.0), batch_size=8), tmp_path / "8.json")
    return ["--acceptance", str(tmp_path / "table.json"), "--latency", str(tmp_path / "1.json"), "--budget", "4"]


def test_json_gives_the_figures_of_the_verdict(treeopt: Command, files: list[str], tmp_path: Path) -> None:
    done = treeopt("advise", *files, "--latency", tmp_path / "8.json", "--replay", tmp_path / "ranks.json", "--json")
    assert (done.code, done.err) == (0, "")
    said = done.json()
    # Two texts of 4 tokens in 2 and in 4 steps; drawn again, 2 / 1.2 and 1 / 1.2 at the ends.
    assert said["speedup"] == pytest.approx(8 / 6 / 1.2)
    assert (said["low"], said["high"]) == (pytest.approx(1 / 1.2), pytest.approx(2 / 1.2))
    assert said["use"] == "none"
    assert (said["basis"], said["resampled"], said["num_samples"], said["num_timed_steps"]) == (
        "replay", "sequences", 2, 3
    )  # fmt: skip
    plain = next(each for each in said["designs"] if each["kind"] == "none")
    assert plain["tied_with_best"]
    assert plain["samples_to_separate"] > 2
    assert [(row["batch_size"], row["needed"], row["kind"]) for row in said["break_even"]] == [
        (1, pytest.approx(1.2), "chain"),
        (8, pytest.approx(3.0), "none"),
    ]
    assert treeopt("advise", *files, "--json").json()["use"] == "chain"  # the bare table's estimate, no interval


def test_people_get_one_page(treeopt: Command, files: list[str], tmp_path: Path) -> None:
    done = treeopt("advise", *files, "--latency", tmp_path / "8.json", "--replay", tmp_path / "ranks.json")
    assert done.code == 0
    text = " ".join(done.out.split())
    for wanted in (
        "Use no speculation: decode one token a pass.",
        "looks like 1.111x (0.833x to 1.667x), which the data cannot tell from 1 (until about ",
        "Tied with the best chain: ",
        "plain (until about ",
        "by replay of recorded text, 2 sequences; latencies are medians of at least 3 timed steps; 100 % of the doubt",
        "speculation pays at every context with batch 1; at no context with batch 8",
        "Neither wider nor deeper",
    ):
        assert wanted in text
    assert len(done.out.splitlines()) <= 45
    assert max(map(len, done.out.splitlines())) <= 80


def test_where_guessing_pays_for_sure_it_is_advised(treeopt: Command, files: list[str], tmp_path: Path) -> None:
    write_document(RankRecord("toy", "made up", "greedy", 0.0, 1, (HIT, HIT, HIT)), tmp_path / "sure.json")
    done = treeopt("advise", *files, "--replay", tmp_path / "sure.json")
    assert "Use a chain: 1.667x plain decoding (95 %: 1.667x to 1.667x)." in done.out
    assert "No other design is tied with the best chain." in done.out


def test_without_latencies_the_error_says_how_to_get_them(treeopt: Command) -> None:
    done = treeopt("advise")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("treeopt: advice needs latencies; no latency profile yet: ")
    assert "treeopt profile run --model demo, or give a file with --latency" in done.err


def test_a_profile_without_a_size_to_weigh_is_refused(treeopt: Command, files: list[str]) -> None:
    done = treeopt("advise", *files[:-1], "1")
    assert done.code == 1
    assert "no size from 2 to 1 tokens was measured" in done.err


def test_report_writes_the_same_advice_as_a_page(treeopt: Command, files: list[str], tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    done = treeopt("report", *files, "--replay", tmp_path / "ranks.json", "--out", out)
    assert (done.code, done.out, done.err) == (0, "", f"written to {out}\n")
    page = out.read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert "Use no speculation: decode one token a pass." in page
    assert "looks like 1.111× (0.833× to 1.667×)" in page
    assert "treeopt report --acceptance" in page
    missing = treeopt("report", *files, "--out", tmp_path / "nowhere" / "report.html")
    assert missing.code == 1
    assert "there is no folder" in missing.err
