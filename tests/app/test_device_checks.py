"""The benchmark scripts that check predictions on real passes, run in small."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmarks import forged_speedup, gpu_check
from benchmarks.forged_speedup import ForgedGuesses
from ppd_runtime.buffers import compile_tree
from ppd_runtime.guesses import NO_GUESS
from ppd_runtime.models import LoadedModel, wrap_model
from profiler.latency import StoppingRule
from tests.ppd_runtime.letters import letters
from tests.ppd_runtime.tiny import tiny_model
from treeopt import AcceptanceTable, SparseTree
from treeopt.app import bench_latency

QUICK = StoppingRule(halfwidth=0.9, min_samples=1, max_s=0.05, max_samples=3)
TABLE = AcceptanceTable.from_marginals([[0.6, 0.2], [0.3, 0.5]])


@pytest.fixture
def loaded() -> LoadedModel:
    return wrap_model(tiny_model(dtype=torch.float32, max_position_embeddings=512), letters(), name="tiny")


def test_forged_ranks_follow_the_table_jointly_and_per_state(loaded: LoadedModel) -> None:
    source = ForgedGuesses(loaded, TABLE, [[1, 2, 3]])
    for state in (1, 2):
        drawn = Counter(tuple(source.draw(state)) for _ in range(2000))
        for first, share in enumerate((0.6, 0.2, 0.2)):
            for second, other in enumerate((0.3, 0.5, 0.2)):
                # Independent distances: shares of pairs are products, and stratified draws are close to them.
                assert drawn[first, second] / 2000 == pytest.approx(share * other, abs=0.01)


def test_forged_guesses_are_right_at_the_drawn_ranks_and_nowhere_else(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ForgedGuesses(loaded, TABLE, [[1, 2, 3, 4, 5]])
    paths = {(): 2, (0,): 0, (1,): 0, (0, 0): 0, (1, 0): 0, (1, 1): 0}
    tree = compile_tree(SparseTree.from_prompt_tokens(paths), 2, 8, vocab_size=61)
    guesser = source.begin([1, 2])
    guesser.extend([3])
    monkeypatch.setattr(source, "draw", lambda state: [1, 0])
    # The root is 3: distance 1 is 4, at rank 1; distance 2 is 5, at rank 0.
    expected = {(): NO_GUESS, (0,): NO_GUESS, (1,): 4, (0, 0): 5, (1, 0): 5, (1, 1): NO_GUESS}
    assert dict(zip(tree.paths, guesser.guess(tree, None).tolist(), strict=True)) == expected
    guesser.extend([4, 5])
    assert guesser.guess(tree, None).tolist() == [NO_GUESS] * 6


def test_the_forged_comparison_runs_and_counts_agreement(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(forged_speedup, "load_for_bench", lambda *_, **__: loaded)
    monkeypatch.setattr(bench_latency, "RULE", QUICK)
    monkeypatch.setenv("TREEOPT_LOCK_DIR", str(tmp_path / "locks"))
    options = ["--budgets", "4", "--num-prompts", "2", "--max-new-tokens", "6", "--db", str(tmp_path / "x.db")]
    rows = forged_speedup.main(options)
    assert [row["table"] for row in rows] == list(forged_speedup.TABLES)
    assert all(row["identical"] == row["num_prompts"] == 2 for row in rows)
    assert all(row["difference"] == row["measured_speedup"] / row["predicted_speedup"] - 1 for row in rows)
    assert "agree within 5%" in capsys.readouterr().err


def test_the_gpu_check_runs_on_a_cpu_in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "RULE", QUICK)
    small = ["--config", "tiny", "--dtype", "float32", "--device", "cpu", "--budgets", "2,4"]
    reports = gpu_check.main([*small, "--max-new-tokens", "6", "--num-prompts", "2", "--prompt-tokens", "8"])
    assert [(report.cache, report.graph_mode) for report in reports] == [("dynamic", "eager"), ("static", "eager")]
    for report in reports:
        assert [result.identical for result in report.budgets] == [2, 2]
        assert report.latency is not None
        assert [point.num_tokens for point in report.latency.points] == [1, 2, 4]
    assert gpu_check.main([*small, "--seconds", "0", "--max-new-tokens", "4", "--prompt-tokens", "4"]) == []
