"""What reaches the screen: names as they are, figures whole, one line per problem, wherever the output goes."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.command import Command
from treeopt import AcceptanceTable, LatencyProfile, write_document
from treeopt.cli.common import one_line

TABLE = AcceptanceTable.from_marginals([[0.6, 0.2], [0.5, 0.1]])
JOINT = AcceptanceTable(
    "toy",
    "made up",
    "greedy",
    0.0,
    10,
    ((0.6, 0.2), (0.5, 0.1)),
    ((0, 0, 5), (0, 2, 1), (1, 1, 1), (1, 2, 1), (2, 2, 2)),
)


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``treeopt ..`` as a shell does, with redirections."""
    script = f"{sys.executable} -m treeopt {command}"
    return subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


@pytest.mark.parametrize("command", ["search", "sweep", "compare", "evaluate"])
def test_names_are_printed_as_they_are_and_never_as_markup(treeopt: Command, tmp_path: Path, command: str) -> None:
    name = "[/red] [bold]x"
    table, latency, tree = (str(tmp_path / name) for name in ("table.json", "latency.json", "tree.json"))
    write_document(replace(TABLE, model=name), table)
    write_document(replace(LatencyProfile.from_medians({1: 1.0, 4: 1.1}), device={"name": name}), latency)
    assert treeopt("search", "--acceptance", table, "--budget", 4, "--out", tree, "--json").code == 0
    arguments = {
        "search": ("--acceptance", table, "--latency", latency, "--budget", 4),
        "sweep": ("--acceptance", table, "--latency", latency, "--budgets", "1-4"),
        "compare": ("--acceptance", table, "--budgets", "3,4"),
        "evaluate": (tree, "--acceptance", table, "--latency", latency),
    }[command]
    done = treeopt(command, *arguments)
    assert done.code == 0
    assert command == "evaluate" or name in done.out


@pytest.mark.parametrize("command", ["search --budget 8", "sweep --budgets 8", "compare --budgets 8"])
def test_a_narrow_terminal_cuts_no_figure_short(command: str) -> None:
    wide = shell(f"{command} --acceptance vicuna-7b-m3", COLUMNS="200")
    narrow = shell(f"{command} --acceptance vicuna-7b-m3", COLUMNS="24")
    assert wide.returncode == narrow.returncode == 0
    assert "…" not in narrow.stdout
    assert re.findall(r"[0-9]+\.[0-9]+", narrow.stdout) == re.findall(r"[0-9]+\.[0-9]+", wide.stdout)


def test_states_and_drawing_speak_of_the_model_that_was_searched_under(treeopt: Command, tmp_path: Path) -> None:
    write_document(JOINT, tmp_path / "table.json")
    for model in ("independent", "joint"):
        done = treeopt("search", "--acceptance", tmp_path / "table.json", "--budget", 9, "--acceptance-model", model)
        drawn = re.search(r"f = ([0-9.]+) tokens/step; used in ([0-9.]+) %", done.out)
        assert drawn is not None
        state = re.search(r"State ([0-9])", done.out)
        assert state is not None
        row = next(line.split() for line in done.out.splitlines() if line.split()[:1] == [state[1]])
        assert (row[-1], f"{float(row[1]):.1f}") == (drawn[1], drawn[2])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("command", ["search --budget 4", "search --budget 4 --json", "--help"])
def test_a_full_disk_is_one_line(command: str) -> None:
    done = shell(f"{command} >/dev/full")
    assert done.returncode == 1
    assert "No space left on device" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["search --budget 4 --latency none", "--version"])
def test_no_stdout_at_all_is_no_problem(command: str) -> None:
    done = shell(f"{command} >&-")
    assert (done.returncode, done.stderr) == (0, "")


def test_messages_are_one_printable_line() -> None:
    assert one_line("a\nb\x1b[31m\ud800é") == "a\\nb\\x1b[31m\\ud800é"
    long = one_line("table.json: " + "k" * 10**6 + ": remove it")
    assert len(long) < 2100
    assert long.startswith("table.json: k")
    assert long.endswith("k: remove it")
