"""Which latency curve a benchmark takes: the stored one of this very setup, or a new one."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ppd_runtime.models import LoadedModel, wrap_model
from profiler.flags import Conditions
from profiler.latency import StoppingRule
from tests.ppd_runtime.tiny import tiny_model
from treeopt import LatencyProfile, write_document
from treeopt.app import bench_latency as module
from treeopt.app.bench_latency import bench_latency, needed_tokens
from treeopt.errors import TreeOptError


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> LoadedModel:
    monkeypatch.setattr(module, "RULE", StoppingRule(halfwidth=0.9, min_samples=1, max_s=0.05, max_samples=3))
    # Whether this machine is busy now is not what is tested.
    monkeypatch.setattr(module, "HARMLESS_FLAGS", frozenset({"noisy", "contended", "drifted", "throttled"}))
    monkeypatch.setenv("TREEOPT_LOCK_DIR", str(tmp_path / "locks"))
    return wrap_model(tiny_model(dtype=torch.float32), name="tiny")


def test_auto_measures_what_is_needed_once_and_takes_it_again(loaded: LoadedModel, tmp_path: Path) -> None:
    db = str(tmp_path / "x.db")
    told: list[str] = []
    first, line = bench_latency(loaded, "auto", [4, 6], 20, db_url=db, progress=told.append)
    assert first is not None
    assert line == "latency curve of 4 sizes measured now, context 20"
    assert [point.num_tokens for point in first.points] == [1, 2, 4, 6]
    assert (first.model, first.context_len, first.kernels, first.cache) == ("tiny", 20, "own", "dynamic")
    assert all(point.samples_s for point in first.points)
    assert len(told) == 4
    again, line = bench_latency(loaded, "auto", [4], 25, db_url=db)
    assert again == first
    assert "measured before" in line


@pytest.mark.parametrize(
    "other",
    [{"context_len": 60}, {"budgets": [4, 8]}, {"cache": "static"}, {"kernels": "swap:2-4"}, {"digest": "another"}],
    ids=lambda other: next(iter(other)),
)
def test_auto_refuses_a_curve_of_another_setup(loaded: LoadedModel, tmp_path: Path, other: dict[str, object]) -> None:
    db = str(tmp_path / "x.db")
    bench_latency(loaded, "auto", [4], 20, db_url=db)
    changed = replace(loaded, **{name: other[name] for name in ("kernels", "digest") if name in other})
    _, line = bench_latency(
        changed,
        "auto",
        other.get("budgets", [4]),
        other.get("context_len", 20),
        cache=other.get("cache", "dynamic"),
        db_url=db,
    )
    assert "measured now" in line


def test_fresh_measures_in_any_case(loaded: LoadedModel, tmp_path: Path) -> None:
    db = str(tmp_path / "x.db")
    bench_latency(loaded, "auto", [2], 20, db_url=db)
    assert "measured now" in bench_latency(loaded, "fresh", [2], 20, db_url=db)[1]


def test_a_disturbed_curve_is_measured_again_unless_it_is_young_and_that_was_asked_for(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HARMLESS_FLAGS", frozenset({"noisy", "drifted", "throttled"}))
    busy = Conditions(foreign_cpu=0.9)
    monkeypatch.setattr(module.Probe, "conditions", lambda self: busy)
    db = str(tmp_path / "x.db")
    profile, line = bench_latency(loaded, "auto", [2], 20, db_url=db)
    assert profile is not None
    assert "contended" in (profile.flags or ())
    assert line.endswith("(it is flagged contended: predictions are doubtful)")
    assert "measured now" in bench_latency(loaded, "auto", [2], 20, db_url=db)[1]
    again, line = bench_latency(loaded, "auto", [2], 20, db_url=db, keep_flagged_s=600)
    assert "measured before on this device (it is flagged contended" in line
    assert again is not None


def test_a_file_is_taken_as_it_is_and_what_differs_is_said(loaded: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "latency.json"
    write_document(LatencyProfile.from_medians({1: 1.0, 4: 1.2}, model="other"), path)
    profile, line = bench_latency(loaded, str(path), [64], 200)
    assert profile == LatencyProfile.from_medians({1: 1.0, 4: 1.2}, model="other")
    assert "differs: model other there, tiny here; context 0 there, 200 here" in line
    assert bench_latency(loaded, "none", [4], 20)[0] is None
    with pytest.raises(TreeOptError, match="no profile is stored"):
        bench_latency(loaded, "abcdef", [4], 20, db_url=str(tmp_path / "none.db"))


def test_needed_sizes_hold_plain_decoding_every_budget_and_the_usual_ones() -> None:
    assert needed_tokens([1]) == (1,)
    assert needed_tokens([4, 10]) == (1, 2, 4, 8, 10)
    assert needed_tokens([3, 5]) == (1, 2, 3, 4, 5)
