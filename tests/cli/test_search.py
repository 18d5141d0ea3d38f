"""``treeopt search``, ``evaluate`` and ``tables`` as people and programs use them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.command import Command
from treeopt import AcceptanceTable, LatencyProfile, RankRecord, TreeDesign, read_document, search, write_document
from treeopt.artifact import document_digest, from_document
from treeopt.bundled import load_acceptance


@pytest.fixture
def joint(tmp_path: Path) -> Path:
    table = AcceptanceTable(
        "toy",
        "made up",
        "greedy",
        0.0,
        10,
        ((0.6, 0.2), (0.5, 0.1)),
        ((0, 0, 5), (0, 2, 1), (1, 1, 1), (1, 2, 1), (2, 2, 2)),
    )
    write_document(table, tmp_path / "joint.json")
    return tmp_path / "joint.json"


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    write_document(LatencyProfile.from_medians({1: 1.0, 4: 1.1, 8: 1.3, 16: 2.0}), tmp_path / "latency.json")
    return tmp_path / "latency.json"


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    entries = tuple((i % 3, (i * 7) % 3) for i in range(50))
    write_document(RankRecord("toy", "made up", "greedy", 0.0, 2, (entries, entries[5:])), tmp_path / "ranks.json")
    return tmp_path / "ranks.json"


def test_json_is_the_tree_document_and_nothing_else(treeopt: Command) -> None:
    done = treeopt("search", "--acceptance", "vicuna-7b-m3", "--budget", 64, "--json")
    assert done.code == 0
    assert "treeopt profile run --model lmsys/vicuna-7b-v1.3" in done.err
    assert len(done.err.splitlines()) == 1
    assert treeopt("search", "--latency", "none", "--json").err == ""
    design = from_document(done.json(), "stdout", TreeDesign)
    table, digest = load_acceptance("vicuna-7b-m3")
    assert design == search(table, 64)
    assert design.acceptance_digest == digest
    assert design.acceptance_length == pytest.approx(2.244665, abs=1e-6)


def test_same_input_same_bytes(treeopt: Command, tmp_path: Path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    assert treeopt("search", "--out", first).code == treeopt("search", "--out", second).code == 0
    assert first.read_bytes() == second.read_bytes()


def test_report_shows_greedy_bound_and_the_assumption(treeopt: Command) -> None:
    done = treeopt("search", "--acceptance", "vicuna-7b-m3", "--budget", 64)
    assert done.code == 0
    for text in ("exact", "greedy", "2.244604", "no design beats 2.24466", "under the independent", "acceptance model"):
        assert text in " ".join(done.out.split())  # lines are broken at the width of the terminal


def test_a_large_tree_is_not_drawn_below_the_figures(treeopt: Command) -> None:
    small, large = (treeopt("search", "--acceptance", "vicuna-7b-m3", "--budget", n).out for n in (64, 512))
    assert "root + 20 candidates" in small
    assert "root + 134 candidates" not in large
    assert "the tree of state 3 has 134 candidates" in large
    assert len(large.splitlines()) < 30


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_tiny_budgets_say_why_greedy_is_absent(treeopt: Command, budget: int) -> None:
    done = treeopt("search", "--budget", budget)
    assert done.code == 0
    assert f"budget {budget} is below 4" in done.out
    assert ("No speculation is best" in done.out) == (budget == 1)


@pytest.mark.parametrize("budget", ["0", "-3", "abc", "99999999999", "4097", "2.5"])
def test_wrong_budgets_are_wrong_usage(treeopt: Command, budget: str) -> None:
    done = treeopt("search", "--budget", budget)
    assert (done.code, done.out) == (2, "")
    assert "--budget" in done.err


@pytest.mark.parametrize(
    "arguments", [("--method", "best"), ("--acceptance-model", "both"), ("--nope",), ("extra",)], ids=str
)
def test_wrong_options_are_wrong_usage(treeopt: Command, arguments: tuple[str, ...]) -> None:
    assert treeopt("search", *arguments).code == 2


def test_latency_turns_the_aim_to_tokens_per_second(treeopt: Command, profile: Path) -> None:
    design = treeopt("search", "--latency", profile, "--budget", 16, "--json").json()
    assert design["objective"] == "tokens_per_second"
    assert design["latency_digest"] == document_digest(json.loads(profile.read_text()))
    assert design["speedup"] > 1
    assert set(design["pass_tokens"].values()) <= {1, 4, 8, 16}
    report = treeopt("search", "--latency", profile, "--budget", 64)
    assert "sizes above 16 tokens were not measured" in report.out


def test_slow_machines_have_figures_too(treeopt: Command, tmp_path: Path) -> None:
    write_document(LatencyProfile.from_medians({1: 3600.0, 4: 3700.0}), tmp_path / "hours.json")
    arguments = ("search", "--latency", tmp_path / "hours.json", "--budget", 4)
    reached = treeopt(*arguments, "--json").json()["tokens_per_second"]
    assert 1e-4 < reached < 1e-3
    report = treeopt(*arguments).out
    assert f" {reached:.6f} " in report
    assert float(report.split("no design beats ")[1].split()[0]) == pytest.approx(reached, rel=1e-6)


def test_a_profile_to_be_doubted_is_said_to_be(treeopt: Command, profile: Path, tmp_path: Path) -> None:
    assert treeopt("search", "--latency", profile, "--json").err == ""
    doubtful = replace(read_document(profile, LatencyProfile), complete=False, flags=("noisy", "drifted"))
    write_document(doubtful, tmp_path / "partial.json")
    for command in ("search", "sweep"):
        done = treeopt(command, "--latency", tmp_path / "partial.json", "--json")
        assert done.code == 0
        assert "partial.json: is not complete: sizes are missing" in done.err
        assert done.err.endswith("; is flagged noisy, drifted\n")


def test_speed_of_a_batch_is_said_to_be_of_one_text(treeopt: Command, profile: Path, tmp_path: Path) -> None:
    write_document(replace(read_document(profile, LatencyProfile), batch_size=4), tmp_path / "batch.json")
    assert "of one of the 4 texts" in treeopt("search", "--latency", tmp_path / "batch.json").out
    assert "of one of the" not in treeopt("search", "--latency", profile).out


def test_joint_model_and_replay_in_the_report(treeopt: Command, joint: Path, ranks: Path) -> None:
    done = treeopt("search", "--acceptance", joint, "--acceptance-model", "joint", "--budget", 6, "--replay", ranks)
    assert done.code == 0
    for text in ("under the joint", "independent distances", "joint counts", "replay of recorded text"):
        assert text in done.out


def test_evaluate_repeats_what_search_claimed(treeopt: Command, joint: Path, profile: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree.json"
    treeopt("search", "--acceptance", joint, "--latency", profile, "--budget", 8, "--out", tree)
    claimed = read_document(tree, TreeDesign)
    found = treeopt("evaluate", tree, "--acceptance", joint, "--latency", profile, "--json").json()
    assert found["independent"]["acceptance_length"] == claimed.acceptance_length
    assert found["independent"]["tokens_per_second"] == claimed.tokens_per_second
    assert found["independent"]["speedup"] == claimed.speedup
    assert found["joint"]["acceptance_length"] > 0
    assert found["replay"] is None


def test_evaluate_finds_the_bundled_table_by_its_digest(treeopt: Command, joint: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree.json"
    treeopt("search", "--acceptance", "vicuna-13b-m3", "--budget", 16, "--out", tree)
    assert treeopt("evaluate", tree).code == 0
    treeopt("search", "--acceptance", joint, "--budget", 6, "--out", tree)
    done = treeopt("evaluate", tree)
    assert (done.code, done.out) == (1, "")
    assert "give it with --acceptance" in done.err


def test_evaluate_replays(treeopt: Command, joint: Path, ranks: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree.json"
    treeopt("search", "--acceptance", joint, "--budget", 6, "--out", tree)
    found = treeopt("evaluate", tree, "--replay", ranks, "--json").json()["replay"]
    assert found["num_steps"] == sum(found["steps_per_state"])
    assert found["acceptance_length"] == found["num_tokens"] / found["num_steps"]
    assert "tokens in" in treeopt("evaluate", tree, "--replay", ranks).out
    write_document(RankRecord("toy", "made up", "greedy", 0.0, 2, (((0,), (1,)),)), ranks)
    done = treeopt("evaluate", tree, "--replay", ranks)
    assert (done.code, done.out) == (1, "")
    assert f"{ranks}: sequences: record 1 distance" in done.err
    done = treeopt("evaluate", tree, "--acceptance", "vicuna-7b-m3")
    assert (done.code, done.out) == (1, "")
    assert "states 0 to 2, the table needs 0 to 3" in done.err


def test_tables_lists_names_and_sources(treeopt: Command) -> None:
    rows = {row["name"]: row for row in treeopt("tables", "--json").json_lines()}
    assert rows["vicuna-7b-m3"]["num_distances"] == 3
    assert "hmarkc/parallel-prompt-decoding" in rows["vicuna-13b-m3"]["source"]
    assert "vicuna-68m-m3" in treeopt("tables").out


def test_version(treeopt: Command) -> None:
    assert treeopt("--version").out == "treeopt 0.1.0\n"


def huge(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(200 * 2**20)


@pytest.mark.parametrize(
    "make",
    [
        lambda path: None,
        lambda path: path.mkdir(),
        lambda path: path.touch(),
        huge,
        lambda path: path.write_text('{"format": "treeopt.latency/1"}'),
        lambda path: path.write_bytes("{}".encode("utf-16")),
        lambda path: path.write_text("[" * 20_000),
        lambda path: path.write_bytes(bytes(range(256))),
    ],
    ids=["missing", "folder", "empty", "huge", "other-format", "utf16", "nested", "binary"],
)
def test_bad_files_take_one_line_and_exit_1(treeopt: Command, tmp_path: Path, make) -> None:
    path = tmp_path / "input.json"
    make(path)
    for arguments in (("search", "--acceptance", path), ("search", "--latency", path), ("evaluate", path)):
        done = treeopt(*arguments)
        assert (done.code, done.out) == (1, ""), arguments
        assert len(done.err.splitlines()) == 1
        assert done.err.startswith("treeopt: ")
        assert f"{path}: " in done.err


def test_a_result_that_cannot_be_written_prints_nothing(treeopt: Command, tmp_path: Path) -> None:
    done = treeopt("search", "--json", "--out", tmp_path / "missing" / "tree.json")
    assert (done.code, done.out) == (1, "")
    assert "missing/tree.json: cannot be written" in done.err
    assert len(done.err.splitlines()) == 1


def test_a_problem_stands_alone_on_stderr(treeopt: Command, ranks: Path) -> None:
    for arguments, problem in (
        (("--acceptance-model", "joint", "--acceptance", "vicuna-7b-m3"), "the table has no joint counts"),
        (("--acceptance", "vicuna-7b-m3", "--replay", ranks), f"{ranks}: sequences: record 2 distances"),
        (("--target", "medusa", "--draft-s", "inf"), "draft seconds"),
    ):
        done = treeopt("search", *arguments)
        assert (done.code, done.out) == (1, "")
        assert problem in done.err
        assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (("--target", "medusa", "--json"), "--json"),
        (("--target", "medusa", "--method", "greedy"), "--method"),
        (("--contexts", "128", "--target", "medusa"), "--target"),
        (("--contexts", "128", "--max-depth", "2"), "--max-depth"),
        (("--batches", "1", "--draft-s", "0.1"), "--draft-s"),
    ],
)
def test_options_that_would_be_ignored_are_refused(treeopt: Command, arguments: tuple[str, ...], flag: str) -> None:
    done = treeopt("search", *arguments)
    assert (done.code, done.out) == (2, "")
    assert f"{flag}: does not go with" in done.err
