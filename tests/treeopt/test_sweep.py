"""The sweep finds the optimum over budgets, and says when it is not to speculate."""

import json
from dataclasses import replace

import pytest

from treeopt import AcceptanceTable, LatencyProfile, search
from treeopt.app.sweep import best_point, sweep_budgets, sweep_document, sweep_figure

TABLE = AcceptanceTable.from_marginals([[0.6, 0.2], [0.5, 0.1]])
LINEAR = LatencyProfile.from_medians({n: 1 + 0.1 * (n - 1) for n in range(1, 13)})
STEEP = LatencyProfile.from_medians({n: float(n) for n in range(1, 9)})


def test_tau_of_the_worked_example() -> None:
    points = sweep_budgets(TABLE, [1, 2, 3, 4, 6, 8, 12])
    expected = [1, 1.3, 1.45, 1.6, 1.8, 1.933333, 2.1]
    assert [point.acceptance_length for point in points] == pytest.approx(expected, abs=1e-6)
    assert all(point.acceptance_length <= point.upper_bound <= point.acceptance_length + 1e-8 for point in points)
    assert best_point(points).budget == 12
    assert points[0].speedup is None
    assert not points[0].no_speculation


def test_speedup_of_the_worked_example_is_reached_at_budget_4() -> None:
    points = sweep_budgets(TABLE, range(1, 13), LINEAR)
    assert [point.speedup for point in points[3:]] == pytest.approx([1.264368] * 9, abs=1e-6)
    best = best_point(points)
    assert (best.budget, best.no_speculation) == (4, False)
    for point in points:
        seconds = 1 + 0.1 * (point.budget - 1)
        assert point.one_size_speedup == pytest.approx(point.acceptance_length / seconds)
        assert point.speedup == search(TABLE, point.budget, LINEAR).speedup


def test_no_speculation_is_found_where_every_tree_is_slower() -> None:
    best = best_point(sweep_budgets(TABLE, [1, 2, 4, 8], STEEP))
    assert (best.budget, best.speedup, best.no_speculation) == (1, 1.0, True)


def test_no_speculation_is_found_though_padding_is_faster() -> None:
    padded = LatencyProfile.from_medians({1: 1.0, 2: 0.5, 4: 9.0})
    no_guess = AcceptanceTable.from_marginals([[0.0], [0.0]])
    best = best_point(sweep_budgets(no_guess, [1, 2, 4], padded))
    assert (best.budget, best.speedup, best.no_speculation) == (2, 2.0, True)


def test_only_measured_sizes_are_promised() -> None:
    gaps = LatencyProfile.from_medians({1: 1.0, 4: 1.2, 8: 1.5})
    points = {point.budget: point for point in sweep_budgets(TABLE, [3, 4, 7, 8, 20], gaps)}
    assert (points[3].speedup, points[3].one_size_speedup) == (1.0, None)
    assert points[7].speedup == points[4].speedup == search(TABLE, 7, gaps).speedup
    assert points[7].one_size_speedup is None
    assert points[8].one_size_speedup == pytest.approx(points[8].acceptance_length / 1.5)
    assert points[20].speedup == points[8].speedup
    assert points[20].one_size_speedup is None


def test_batches_have_one_size_for_all_states() -> None:
    batched = replace(LINEAR, batch_size=4)
    points = sweep_budgets(TABLE, [2, 4, 8], batched)
    best_so_far = 0.0
    for point in points:
        one_size = max(
            search(TABLE, n).acceptance_length / (1 + 0.1 * (n - 1))  # type: ignore[operator]
            for n in range(1, point.budget + 1)
        )
        best_so_far = max(best_so_far, one_size)
        assert point.speedup == pytest.approx(best_so_far)


def test_documents_mark_the_best() -> None:
    points = sweep_budgets(TABLE, [1, 4, 8], LINEAR)
    best = best_point(points)
    documents = [json.loads(json.dumps(sweep_document(point, best), allow_nan=False)) for point in points]
    assert [(document["budget"], document["best"]) for document in documents] == [(1, False), (4, True), (8, False)]
    assert documents[1]["speedup"] == pytest.approx(1.264368, abs=1e-6)


def test_figure_marks_the_optimum() -> None:
    points = sweep_budgets(TABLE, range(1, 13), LINEAR)
    speed, tau = sweep_figure(points, TABLE, LINEAR, "independent").axes
    drawn = {str(line.get_label()): line for line in speed.lines}
    assert list(drawn["each state its size"].get_ydata()) == [point.speedup for point in points]
    mark = drawn["best: 1.264× at 4"]
    assert (list(mark.get_xdata()), mark.get_ydata()[0]) == ([4], pytest.approx(1.264368, abs=1e-6))
    assert "plain decoding" in speed.get_ylabel()
    assert "tokens per step" in tau.get_ylabel()


def test_figure_says_when_no_speculation_is_best() -> None:
    points = sweep_budgets(TABLE, [1, 2, 4, 8], STEEP)
    labels = [line.get_label() for line in sweep_figure(points, TABLE, STEEP, "independent").axes[0].lines]
    assert "best: no speculation" in labels


def test_figure_without_a_profile_has_tau_alone() -> None:
    points = sweep_budgets(TABLE, [1, 2, 4])
    (axes,) = sweep_figure(points, TABLE, None, "independent").axes
    assert list(axes.lines[1].get_ydata()) == [point.acceptance_length for point in points]
