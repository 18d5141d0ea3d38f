"""``treeopt search --contexts --batches`` as people and programs use it."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.command import Command
from treeopt import AcceptanceTable, LatencyProfile, SwitchTable, read_document, write_document
from treeopt.artifact import from_document

PAIRS = [(b, c) for b in (1, 2) for c in (128, 1024)]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Arguments: a table, and one profile per pair; tokens are free alone and dear in batches."""
    write_document(AcceptanceTable.from_marginals([[0.6, 0.2], [0.5, 0.1]]), tmp_path / "table.json")
    arguments = ["--acceptance", str(tmp_path / "table.json"), "--budget", "12"]
    for batch, context in PAIRS:
        line = LatencyProfile.from_medians({n: 1 + (batch - 1) * (n - 1) for n in (1, 4, 8, 12)})
        path = tmp_path / f"{batch}-{context}.json"
        write_document(replace(line, batch_size=batch, context_len=context), path)
        arguments += ["--latency", str(path)]
    return arguments


def test_json_is_the_switching_table_and_nothing_else(treeopt: Command, files: list[str], tmp_path: Path) -> None:
    out = tmp_path / "switch.json"
    done = treeopt("search", *files, "--contexts", "1024,128", "--batches", "1,2", "--json", "--out", out)
    assert (done.code, done.err) == (0, "")
    table = from_document(done.json(), "stdout", SwitchTable)
    assert read_document(out, SwitchTable) == table
    assert [(entry.batch_max, entry.context_max) for entry in table.entries] == [(1, 1024), (2, 1024)]
    assert [entry.tree.speedup for entry in table.entries] == pytest.approx([2.1, 1.0])
    assert all(len(entry.tree.latency_digest or "") == 64 for entry in table.entries)


def test_people_see_pairs_ranges_and_what_few_designs_cost(treeopt: Command, files: list[str]) -> None:
    done = treeopt("search", *files, "--contexts", "128,1024", "--batches", "1,2")
    assert done.code == 0
    for text in ("2 designs for 4 measured pairs", "2.100x", "1.000x", "no speculation", "0.00 %"):
        assert text in done.out


@pytest.mark.parametrize("text", ["", "0", "a", "1,,2", "-1", "1.5"])
def test_wrong_lists_are_wrong_usage(treeopt: Command, text: str) -> None:
    done = treeopt("search", "--contexts", "128", f"--batches={text}")
    assert (done.code, done.out) == (2, "")
    assert "--batches" in done.err


def test_pairs_that_were_not_measured_say_which_command_measures_them(treeopt: Command, files: list[str]) -> None:
    done = treeopt("search", *files, "--contexts", "128,8192", "--batches", "1")
    assert done.code == 1
    assert done.err.startswith(
        "treeopt: no latency profile of batch 1, context 8192; run: treeopt profile run --model "
    )
    assert "--contexts 128,8192 --batch-sizes 1" in done.err


def test_profiles_of_different_settings_are_refused(treeopt: Command, files: list[str], tmp_path: Path) -> None:
    other = replace(read_document(tmp_path / "1-1024.json", LatencyProfile), dtype="bfloat16")
    write_document(other, tmp_path / "1-1024.json")
    done = treeopt("search", *files, "--contexts", "128,1024", "--batches", "1")
    assert done.code == 1
    assert "batch 1, context 1024 has dtype 'bfloat16', the first one 'float32'; measure all pairs alike" in done.err
