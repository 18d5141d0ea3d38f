"""The picture of predicted against measured: what is drawn is what was measured."""

import json
from pathlib import Path

import pytest

from treeopt.artifact import to_document
from treeopt.errors import DocumentError
from treeopt.speedup_plot import best_measured, best_predicted, read_bench, speedup_figure
from treeopt.types import LatencyPoint, LatencyProfile

MEASURED = {1: 0.98, 4: 1.2, 8: 1.3, 16: 1.1}
PREDICTED = {1: 1.0, 4: 1.31, 8: 1.29, 16: None}


def document(folder: Path, **changes: object) -> Path:
    profile = LatencyProfile(
        {"name": "toy"}, "demo", "float32", 1, 64, "sdpa", "eager",
        tuple(LatencyPoint(n, n / 10, samples_s=(n / 20, n / 10, n / 5)) for n in (1, 4, 8, 64)),
    )  # fmt: skip
    budgets = [
        {
            "budget": budget,
            "measured_speedup": measured, "measured_low": measured - 0.1, "measured_high": measured + 0.2,
            "predicted_speedup": PREDICTED[budget], "predicted_low": None, "predicted_high": None,
            "measured_tau": 1 + budget / 20, "measured_tau_low": None, "measured_tau_high": None,
            "tau_by_model": {"independent": 1 + budget / 10, "replay": 1 + budget / 21},
            "split": {"step_s": budget / 9},
        }
        for budget, measured in MEASURED.items()
    ]  # fmt: skip
    found = {
        "format": "treeopt.bench/1", "model": "demo", "guesses": "prompt", "device": "toy", "dtype": "float32",
        "kernels": "own", "graph_mode": "eager", "context_len": 60, "budgets": budgets[::-1],
        "baselines": [{"baseline": "none", "measured_speedup": 1.0}, {"baseline": "generate", "measured_speedup": 0.7}],
        "latency": to_document(profile),
    }  # fmt: skip
    (folder / "bench.json").write_text(json.dumps({**found, **changes}))
    return folder / "bench.json"


def test_both_optima_are_found_and_marked(tmp_path: Path) -> None:
    bench = read_bench(document(tmp_path))
    assert [point.budget for point in bench.points] == [1, 4, 8, 16]
    assert best_measured(bench.points).budget == 8
    predicted = best_predicted(bench.points)
    assert predicted is not None
    assert predicted.budget == 4
    assert bench.generate == 0.7
    speedup, tau, latency = speedup_figure(bench).axes
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in speedup.lines}
    assert lines["measured"] == (list(MEASURED), list(MEASURED.values()))
    assert lines["predicted"] == ([1, 4, 8], [1.0, 1.31, 1.29])
    assert lines["best measured: 8"] == ([8], [1.3])
    assert lines["best predicted: 4"] == ([4], [1.31])
    # Only what has an interval everywhere gets a band.
    assert len(speedup.collections) == 1
    assert {line.get_label() for line in tau.lines} == {"achieved", "independent", "replay"}
    curve = {line.get_label(): list(line.get_xdata()) for line in latency.lines}
    assert curve["L(n), the curve used"] == [1, 4, 8]  # 64 tokens are outside the picture


def test_without_predictions_and_latency_the_measurements_remain(tmp_path: Path) -> None:
    path = document(tmp_path, latency=None)
    content = json.loads(path.read_text())
    for entry in content["budgets"]:
        entry.update(predicted_speedup=None, tau_by_model={})
    path.write_text(json.dumps(content))
    bench = read_bench(path)
    assert best_predicted(bench.points) is None
    speedup, tau, latency = speedup_figure(bench).axes
    assert {line.get_label() for line in speedup.lines} == {"_nolegend_", "measured", "best measured: 8"}
    assert len(tau.lines) == len(latency.lines) == 1


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"format": "treeopt.bench/2"}, "format"),
        ({"budgets": []}, "budgets"),
        ({"budgets": [{"budget": "four"}]}, "budgets.0.budget"),
        ({"latency": {"format": "treeopt.latency/1"}}, "latency"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, changes: dict[str, object], place: str) -> None:
    with pytest.raises(DocumentError, match=place.replace(".", r"\.")) as caught:
        read_bench(document(tmp_path, **changes))
    assert "\n" not in str(caught.value)
