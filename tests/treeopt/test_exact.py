"""The exact search against enumeration of every design, and its certificate."""

import numpy as np
import pytest

from tests.treeopt.designs import best_by_enumeration, random_rows
from treeopt import AcceptanceTable, LatencyProfile, search
from treeopt.acceptance import acceptance_trie
from treeopt.exact import exact_trees
from treeopt.markov import evaluate_design

# (distances, ranks, tokens per prompt token, largest budget): small enough to enumerate
SHAPES = [
    (1, 3, 1, 8),
    (1, 2, 2, 9),
    (2, 2, 1, 7),
    (2, 2, 2, 8),
    (2, 1, 1, 8),
    (2, 2, 0, 6),
    (3, 1, 1, 6),
    (1, 3, 0, 4),
]
CASES_PER_SHAPE = 80


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "m{}-K{}-e{}-n{}".format(*shape))
def test_equals_the_best_of_all_designs(shape: tuple[int, int, int, int]) -> None:
    m, num_ranks, e, largest = shape
    rng = np.random.default_rng([7, *shape])
    for _ in range(CASES_PER_SHAPE):
        rows = random_rows(rng, m, num_ranks)
        budget = int(rng.integers(1, largest + 1))
        table = AcceptanceTable.from_marginals(rows, tokens_per_prompt_token=e)
        # Stairs and dips: a larger pass may be cheaper. Not every size is measured.
        measured = [1, *(n for n in range(2, largest + 1) if rng.random() < 0.7)]
        latency_s = {n: float(1 + 0.1 * (n - 1) + 0.3 * rng.random()) for n in measured}

        def conditional(path: tuple[int, ...], rows: list[list[float]] = rows) -> float:
            return rows[len(path) - 1][path[-1]]

        by_tau = search(table, budget)
        by_speed = search(table, budget, LatencyProfile.from_medians(latency_s))
        best_tau = best_by_enumeration(conditional, m, num_ranks, e, budget, None)
        best_speed = best_by_enumeration(conditional, m, num_ranks, e, budget, latency_s)
        assert by_tau.acceptance_length == pytest.approx(best_tau, abs=1e-8)
        assert by_speed.tokens_per_second == pytest.approx(best_speed, abs=1e-8)
        assert -1e-12 <= by_tau.upper_bound - best_tau < 1e-8 * best_tau + 1e-12
        assert -1e-12 <= by_speed.upper_bound - best_speed < 1e-8 * best_speed + 1e-12


def test_joint_equals_the_best_of_all_designs() -> None:
    rng = np.random.default_rng(11)
    for _ in range(60):
        counts = rng.integers(0, 30, size=(3, 3)) * rng.integers(0, 2, size=(3, 3))
        counts[2, 2] += 1  # "worse than recorded" at both distances, so that the table is never empty
        ranks = tuple((i, j, int(counts[i, j])) for i in range(3) for j in range(3) if counts[i, j])
        total = int(counts.sum())
        table = AcceptanceTable(
            "toy",
            "random",
            "greedy",
            0.0,
            total,
            (tuple((counts[:2].sum(axis=1) / total).tolist()), tuple((counts[:, :2].sum(axis=0) / total).tolist())),
            ranks,
        )

        def conditional(path: tuple[int, ...], counts: np.ndarray = counts) -> float:
            whole = counts.sum() if len(path) == 1 else counts[path[0]].sum()
            part = counts[path[0]].sum() if len(path) == 1 else counts[path]
            return float(part / whole) if whole else 0.0

        budget = int(rng.integers(1, 7))
        found = search(table, budget, acceptance_model="joint")
        best = best_by_enumeration(conditional, 2, 2, 1, budget, None)
        assert found.acceptance_length == pytest.approx(best, abs=1e-8)


@pytest.mark.parametrize(
    ("budget", "tau"), [(1, 1.0), (2, 1.3), (3, 1.45), (4, 1.6), (6, 1.8), (8, 1.9333333333), (12, 2.1), (40, 2.28)]
)
def test_worked_example(budget: int, tau: float) -> None:
    table = AcceptanceTable.from_marginals([[0.6, 0.2], [0.5, 0.1]])
    assert search(table, budget).acceptance_length == pytest.approx(tau, abs=1e-9)


def test_ties_between_designs_do_not_end_the_search_early() -> None:
    # Policy iteration that prefers fewer tokens among equals stops at 2.0 here.
    assert search(AcceptanceTable.from_marginals([[1.0], [0.6]]), 5).acceptance_length == pytest.approx(2.3)


def test_certificate_bounds_every_other_design() -> None:
    """The bound is an upper bound for designs it was not made from: greedy's, and random ones."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        table = AcceptanceTable.from_marginals(random_rows(rng, 3, 4))
        bound = search(table, 24).upper_bound
        for method in ("greedy", "naive", "random"):
            assert search(table, 24, method=method).acceptance_length <= bound + 1e-12


def test_batches_share_one_size() -> None:
    table = AcceptanceTable.from_marginals([[0.6, 0.2], [0.5, 0.1]])
    medians = {1: 1.0, 4: 1.1, 8: 1.2, 12: 2.0}
    single = LatencyProfile.from_medians(medians)
    batch = LatencyProfile(single.device, "unnamed", "float32", 4, 0, "sdpa", "eager", single.points)
    found = search(table, 12, batch)
    expected = max(search(table, n).acceptance_length / medians[n] for n in medians)
    assert len(set(found.pass_tokens)) == 1
    assert found.tokens_per_second == pytest.approx(expected)
    assert found.upper_bound == pytest.approx(expected)


def test_no_speculation_wins_when_longer_passes_cost_too_much() -> None:
    table = AcceptanceTable.from_marginals([[0.3], [0.2]])
    found = search(table, 8, LatencyProfile.from_medians({n: float(n) for n in range(1, 9)}))
    assert found.speedup == 1.0
    assert found.trees[2].num_candidates == 0


def test_a_pass_is_padded_to_a_larger_size_that_is_faster() -> None:
    table = AcceptanceTable.from_marginals([[0.5], [0.4]])
    found = search(table, 4, LatencyProfile.from_medians({1: 1.0, 2: 1.4, 3: 1.5, 4: 1.01}))
    assert set(found.pass_tokens) <= {1, 4}


def test_sizes_beyond_the_last_measurement_are_not_used() -> None:
    table = AcceptanceTable.from_marginals([[0.5, 0.2], [0.4, 0.1]])
    found = search(table, 64, LatencyProfile.from_medians({1: 1.0, 2: 1.0, 3: 1.0}))
    assert max(found.pass_tokens) <= 3


def test_guessers_without_prompt_tokens_take_the_most_probable_paths() -> None:
    """With e = 0 the state is always m, so the best tree is the most probable prefix-closed set of paths."""
    rng = np.random.default_rng(5)
    rows = np.sort(rng.dirichlet(np.ones(6), 3)[:, :5], axis=1)[:, ::-1]
    table = AcceptanceTable.from_marginals(rows.tolist(), tokens_per_prompt_token=0)
    paths = [rows[0][i] * a * b for i in range(5) for a in (1, *rows[1]) for b in ((1, *rows[2]) if a != 1 else (1,))]
    for budget in (1, 2, 9, 40):
        expected = 1 + sum(sorted(paths, reverse=True)[: budget - 1])
        assert search(table, budget).acceptance_length == pytest.approx(expected)


def test_same_input_same_design_and_claims_hold() -> None:
    table = AcceptanceTable.from_marginals([[0.5, 0.2, 0.1], [0.4, 0.1, 0.1], [0.2, 0.2, 0.2]])
    profile = LatencyProfile.from_medians({n: 1 + 0.03 * n for n in range(1, 33)})
    first, second = search(table, 32, profile), search(table, 32, profile)
    assert first == second
    value = evaluate_design(acceptance_trie(table), first, profile)
    assert value.acceptance_length == first.acceptance_length
    assert value.tokens_per_second == first.tokens_per_second
    assert value.speedup == first.speedup


def test_large_budget_reaches_everything_that_can_be_accepted() -> None:
    rows = [[0.5, 0.2], [0.4, 0.1], [0.2, 0.1]]
    trie = acceptance_trie(AcceptanceTable.from_marginals(rows))
    found = exact_trees(trie, 4096)
    assert found.evaluation.acceptance_length == pytest.approx(1 + 0.7 + 0.7 * 0.5 + 0.7 * 0.5 * 0.3)
