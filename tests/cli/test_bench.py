"""``treeopt bench``, ``treeopt plot speedup`` and ``treeopt demo`` as a shell sees them, on a tiny model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ppd_runtime.models import LoadedModel, wrap_model
from profiler.latency import StoppingRule
from tests.cli.command import Command
from tests.ppd_runtime.letters import letters
from tests.ppd_runtime.tiny import tiny_model
from treeopt import AcceptanceTable, write_document
from treeopt.app import bench_inputs, bench_latency
from treeopt.app import demo as demo_module
from treeopt.types import RankRecord

FIELDS = [
    "budget", "state_sizes", "predicted_tau", "measured_tau", "predicted_speedup", "predicted_low", "predicted_high",
    "measured_speedup", "measured_low", "measured_high", "identical", "num_prompts", "num_tokens",
]  # fmt: skip


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> LoadedModel:
    loaded = wrap_model(tiny_model(dtype=torch.float32, max_position_embeddings=512), letters(), name="tiny")
    monkeypatch.setattr(bench_inputs, "load_model", lambda *_, **__: loaded)
    monkeypatch.setattr(
        bench_latency, "RULE", StoppingRule(halfwidth=0.9, min_samples=7, min_s=0.0, max_s=0.2, max_samples=9)
    )
    monkeypatch.setattr(bench_latency, "HARMLESS_FLAGS", frozenset({"noisy", "contended", "drifted", "throttled"}))
    monkeypatch.setenv("TREEOPT_LOCK_DIR", str(tmp_path / "locks"))
    monkeypatch.setenv("TREEOPT_DB", str(tmp_path / "bench.db"))
    (tmp_path / "prompts.txt").write_text("hello\nabc abc abc\nxyz\n")
    table = AcceptanceTable.from_marginals([[0.3, 0.1], [0.2, 0.1], [0.1, 0.1]], model="tiny")
    write_document(table, tmp_path / "table.json")
    ranks = tuple(tuple((i % 3, (i + s) % 3, 2) for i in range(9)) for s in range(4))
    write_document(RankRecord("tiny", "test", "greedy", 0.0, 2, ranks), tmp_path / "ranks.json")
    return loaded


def arguments(folder: Path, *more: object) -> list[object]:
    known = ["--prompts", folder / "prompts.txt", "--max-new-tokens", 8, "--budgets", "1,4"]
    return ["bench", *known, "--guesses", "free", *more]


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_one_json_line_per_budget_and_per_baseline_and_nothing_else(treeopt: Command, tmp_path: Path) -> None:
    done = treeopt(
        *arguments(tmp_path), "--acceptance", tmp_path / "table.json", "--ranks", tmp_path / "ranks.json", "--json"
    )
    assert done.code == 0, done.err
    lines = lines_of(done.out)
    budgets, baselines = lines[:2], lines[2:]
    assert [list(line) for line in budgets] == [FIELDS, FIELDS]
    assert [line["budget"] for line in budgets] == [1, 4]
    assert [line["identical"] for line in budgets] == [3, 3]
    assert [len(line["state_sizes"]) for line in budgets] == [4, 4]
    assert all(max(line["state_sizes"]) <= line["budget"] for line in budgets)
    # With a record and raw step times every figure is known.
    assert all(line[name] is not None for line in budgets for name in FIELDS)
    assert budgets[0]["predicted_tau"] == budgets[0]["measured_tau"] == 1.0
    assert baselines[0]["baseline"] == "none"
    assert {"generate", "prompt_lookup"} <= {line["baseline"] for line in baselines}
    assert "decode runs stored" in done.err


def test_the_second_run_takes_the_stored_curve(treeopt: Command, tmp_path: Path) -> None:
    assert "measured now" in treeopt(*arguments(tmp_path), "--json", "--no-library").err
    assert "measured before" in treeopt(*arguments(tmp_path), "--json", "--no-library").err


def test_people_see_tables_and_the_document_is_drawn(treeopt: Command, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    done = treeopt(*arguments(tmp_path), "--acceptance", tmp_path / "table.json", "--no-store", "--out", out)
    assert done.code == 0, done.err
    for words in ("speedup over plain decoding", "ways to decode", "prompt_lookup", "forward", "3 of 3"):
        assert words in done.out
    assert "stored" not in done.err
    drawn = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for picture in drawn:
        done = treeopt("plot", "speedup", out, "--out", picture)
        assert done.code == 0, done.err
    assert "best measured: " in done.out
    assert drawn[0].read_bytes() == drawn[1].read_bytes()
    svg = drawn[0].read_text()
    for words in ("best measured", "best predicted", "achieved", "independent", "mean step, measured"):
        assert words in svg


def test_rough_figures_promise_nothing(treeopt: Command, tmp_path: Path) -> None:
    done = treeopt(*arguments(tmp_path), "--json", "--no-library", "--latency", "none")
    assert "nothing is predicted" in " ".join(done.err.split())
    for line in lines_of(done.out)[:2]:
        assert [line[name] for name in FIELDS if name.startswith("predicted")] == [None] * 4
        assert line["measured_speedup"] > 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--objective", "speedy"), "must be tau or speed"),
        (("--graph-mode", "compiled"), "needs --cache static"),
        (("--max-new-tokens", "1"), "greater than or equal to 2"),
        (("--guesses", "oracle"), "must be prompt or free or lookup"),
    ],
)
def test_wrong_usage(treeopt: Command, tmp_path: Path, more: tuple[str, str], message: str) -> None:
    done = treeopt("bench", *more)
    assert done.code == 2
    assert message in " ".join(done.err.split()).replace("│ ", "")


def test_a_table_of_other_guesses_is_refused_in_one_line(treeopt: Command, tmp_path: Path) -> None:
    write_document(AcceptanceTable.from_marginals([[0.3], [0.2]], model="tiny"), tmp_path / "two.json")
    done = treeopt(*arguments(tmp_path), "--acceptance", tmp_path / "two.json")
    assert done.code == 1
    (line,) = done.err.splitlines()
    assert line.endswith("the free guesses have m = 3 with 1; give their own table")


def test_what_is_no_benchmark_is_refused_in_one_line(treeopt: Command, tmp_path: Path) -> None:
    for content in ("{}", '{"format": "treeopt.bench/1"}', "[]"):
        (tmp_path / "wrong.json").write_text(content)
        done = treeopt("plot", "speedup", tmp_path / "wrong.json", "--out", tmp_path / "a.png")
        assert done.code == 1
        assert "give a file written by treeopt bench --out" in done.err
        assert len(done.err.splitlines()) == 1


def test_the_demo_shows_both_speedups_and_the_tree(
    treeopt: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_module, "SIZES", (1, 2, 4))
    monkeypatch.setattr(demo_module, "BUDGET", 4)
    done = treeopt("demo", "--max-new-tokens", 8, "--out", tmp_path / "tree.svg")
    assert done.code == 0, done.err
    for words in ("> Write a Python function", "plain decoding", "measured", "tokens per step", "3 of 3 texts"):
        assert words in " ".join(done.out.split())
    assert (tmp_path / "tree.svg").read_text().startswith("<?xml")
