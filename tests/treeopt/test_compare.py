"""The comparison of methods agrees with each method on its own."""

import json
import statistics

import pytest

from treeopt import AcceptanceTable, search
from treeopt.app.compare import compare_methods, comparison_document, comparison_figure, least_heuristic_budget
from treeopt.bundled import load_acceptance
from treeopt.errors import SearchError

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


@pytest.mark.parametrize("acceptance_model", ["independent", "joint"])
def test_every_method_is_what_its_search_finds(acceptance_model: str) -> None:
    (row,) = compare_methods(JOINT, [9], acceptance_model=acceptance_model, num_seeds=3)
    for method in ("exact", "greedy", "naive"):
        design = search(JOINT, 9, method=method, acceptance_model=acceptance_model)
        assert getattr(row, method) == design.acceptance_length
    random = [search(JOINT, 9, method="random", acceptance_model=acceptance_model, seed=s) for s in range(3)]
    assert row.random == tuple(design.acceptance_length for design in random)


def test_published_table_exact_is_best_at_every_budget() -> None:
    table, _ = load_acceptance("vicuna-7b-m3")
    for row in compare_methods(table, [8, 16, 32, 64], num_seeds=4):
        assert row.greedy is not None
        assert row.naive is not None
        assert row.exact <= row.upper_bound <= row.exact + 1e-8
        assert max(row.greedy, row.naive, *row.random) <= row.exact + 1e-12
        assert row.random_mean == pytest.approx(statistics.fmean(row.random))
        assert row.random_mean <= row.greedy + 1e-12
        assert row.random_std == pytest.approx(statistics.stdev(row.random))


def test_budgets_too_small_for_the_heuristics_have_exact_alone() -> None:
    assert least_heuristic_budget(TABLE) == 3
    below, at = compare_methods(TABLE, [2, 3])
    assert below.exact == pytest.approx(1.3)
    assert (below.greedy, below.naive, below.random, below.random_mean, below.random_std) == (
        None,
        None,
        (),
        None,
        None,
    )
    assert at.greedy is not None
    assert len(at.random) == 10


def test_free_guesses_need_no_room_for_prompt_tokens() -> None:
    free = AcceptanceTable.from_marginals([[0.6, 0.2], [0.5, 0.1]], tokens_per_prompt_token=0)
    (row,) = compare_methods(free, [1], num_seeds=1)
    assert (row.exact, row.greedy, row.naive, row.random) == (1, 1, 1, (1,))
    assert row.random_std is None


def test_document_is_json_with_one_budget() -> None:
    below, row = compare_methods(TABLE, [2, 8], num_seeds=2)
    document = json.loads(json.dumps(comparison_document(row), allow_nan=False))
    assert document["budget"] == 8
    assert document["exact_tau"] == pytest.approx(1.933333, abs=1e-6)
    assert document["num_seeds"] == 2
    assert comparison_document(below)["greedy_tau"] is None


def test_progress_is_told_once_per_budget() -> None:
    told: list[str] = []
    compare_methods(TABLE, [1, 2, 3], num_seeds=1, progress=told.append)
    assert told == ["budget 1", "budget 2", "budget 3"]


def test_joint_needs_joint_counts() -> None:
    with pytest.raises(SearchError, match="no joint counts"):
        compare_methods(TABLE, [4], acceptance_model="joint")


def test_figure_draws_the_values() -> None:
    rows = compare_methods(TABLE, [2, 4, 8, 16], num_seeds=3)
    tau, below = comparison_figure(rows, TABLE, "independent").axes
    drawn = {str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata())) for line in tau.lines}
    assert drawn["exact optimum"] == ([2, 4, 8, 16], [row.exact for row in rows])
    assert drawn["greedy (paper)"] == ([4, 8, 16], [row.greedy for row in rows[1:]])
    assert "tokens per step" in tau.get_ylabel()
    assert "%" in below.get_ylabel()
    assert below.get_xlabel() == "budget (tokens per forward pass)"
    gap = next(line for line in below.lines if line.get_label() == "greedy (paper)").get_ydata()
    assert list(gap) == pytest.approx([100 * (1 - (row.greedy or 0) / row.exact) for row in rows[1:]])
    assert len(comparison_figure(rows[:1], TABLE, "independent").axes) == 1
