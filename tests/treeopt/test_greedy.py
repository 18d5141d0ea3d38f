"""The paper's greedy: its removal order, its budget, and its place between the baselines and the optimum."""

import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.treeopt.designs import random_rows
from treeopt import AcceptanceTable, LatencyProfile, search
from treeopt.acceptance import acceptance_trie
from treeopt.errors import SearchError
from treeopt.greedy import _allocate, greedy_trees, naive_trees, random_trees
from treeopt.markov import acceptance_length, exit_probabilities, expected_tokens, removal_loss
from treeopt.types import SparseTree


def allocate_step_by_step(exits: np.ndarray, gains: np.ndarray, num_removals: int) -> list[int]:
    """Remove one prompt token at a time, the cheapest that is there to remove: the paper's words as a loop."""
    m = len(gains)
    held = [m] * len(exits)
    for _ in range(num_removals):
        losses = [(exits[c] * gains[held[c] - 1], -c) for c in range(len(exits)) if held[c] > 1]
        held[-min(losses)[1]] -= 1
    return held


@given(st.integers(1, 5), st.integers(0, 12), st.data())
def test_one_sort_equals_removing_one_by_one(m: int, count: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    exits, gains = rng.random(count), rng.random(m)  # gains in no order: the f of later states need not be concave
    removals = data.draw(st.integers(0, count * (m - 1)))
    assert _allocate(exits, gains, removals).tolist() == allocate_step_by_step(exits, gains, removals)


def test_gains_of_the_allocation_are_the_propositions_losses() -> None:
    trie = acceptance_trie(AcceptanceTable.from_marginals([[0.5, 0.2], [0.4, 0.1], [0.3, 0.1]]))
    trees = greedy_trees(trie, 30)
    full = SparseTree.from_prompt_tokens({node.path: 3 for node in trees[3].nodes})
    gain = expected_tokens(trie, trees[3]) - expected_tokens(trie, trees[2])
    for node, leaving in enumerate(exit_probabilities(trie, full)):
        assert removal_loss(trie, (*trees[:3], full), 3, node) == pytest.approx(leaving * gain)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2), st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_keeps_the_papers_rules_and_stays_below_the_optimum(m: int, num_ranks: int, e: int, extra: int, seed: int):
    rows = random_rows(np.random.default_rng(seed), m, num_ranks)
    table = AcceptanceTable.from_marginals(rows, tokens_per_prompt_token=e)
    budget = 1 + e * m + extra
    trees = greedy_trees(acceptance_trie(table), budget)
    for k, tree in enumerate(trees):
        assert tree.size(e) <= budget
        assert tree.depth <= k
        assert tree.nodes[0].prompt_tokens == m
        assert all(node.prompt_tokens >= 1 for node in tree.nodes)
    exact = search(table, budget)
    assert exact.acceptance_length >= acceptance_length(acceptance_trie(table), trees) - 1e-9


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 2), st.integers(0, 2**32 - 1))
def test_value_never_falls_when_the_budget_grows(m: int, num_ranks: int, e: int, seed: int) -> None:
    rows = random_rows(np.random.default_rng(seed), m, num_ranks)
    table = AcceptanceTable.from_marginals(rows, tokens_per_prompt_token=e)
    values = [search(table, budget).acceptance_length for budget in range(1, 16)]
    assert all(after >= before - 1e-9 for before, after in pairwise(values))


def test_budgets_below_the_root_and_its_prompt_tokens_are_refused() -> None:
    trie = acceptance_trie(AcceptanceTable.from_marginals([[0.5], [0.4], [0.3]]))
    with pytest.raises(SearchError, match="budget 3 is below 4, the root and its 3 prompt tokens"):
        greedy_trees(trie, 3)


def test_baselines_are_valid_and_no_better_than_greedy() -> None:
    table = AcceptanceTable.from_marginals([[0.5, 0.15, 0.08], [0.3, 0.15, 0.08], [0.2, 0.1, 0.08]])
    trie = acceptance_trie(table)
    greedy = acceptance_length(trie, greedy_trees(trie, 40))
    drawn = [random_trees(trie, 40, seed) for seed in range(5)]
    for trees in (naive_trees(trie, 40), *drawn):
        assert max(tree.size(1) for tree in trees) <= 40
        assert acceptance_length(trie, trees) <= greedy + 1e-12
    assert drawn[0] == random_trees(trie, 40, 0)
    assert len(set(drawn)) > 1


def test_with_latencies_one_size_serves_all_states() -> None:
    table = AcceptanceTable.from_marginals([[0.5, 0.2], [0.4, 0.1]])
    profile = LatencyProfile.from_medians({1: 1.0, 4: 1.1, 8: 1.2, 16: 3.0})
    found = search(table, 16, profile, method="greedy")
    assert len(set(found.pass_tokens)) == 1
    taus = {n: search(table, n, method="greedy").acceptance_length for n in (4, 8, 16)}
    assert found.tokens_per_second == pytest.approx(max(taus[n] / profile.median_s(n) for n in taus))
    with pytest.raises(SearchError, match="no size from 3 to 3 tokens was measured"):
        search(table, 3, profile, method="greedy")


def test_tables_of_zeros_and_of_certainty() -> None:
    assert search(AcceptanceTable.from_marginals([[0.0, 0.0]]), 64, method="greedy").acceptance_length == 1.0
    assert search(AcceptanceTable.from_marginals([[0.0, 0.0]]), 64).acceptance_length == 1.0
    certain = AcceptanceTable.from_marginals([[1.0], [1.0]])
    assert search(certain, 64, method="greedy").acceptance_length == pytest.approx(3)
    assert search(certain, 64).acceptance_length == pytest.approx(3)


@pytest.mark.parametrize("budget", [0, -3, 4097, True, 2.0])
def test_budgets_out_of_range_are_refused(budget: object) -> None:
    with pytest.raises(SearchError, match="budget: must be a whole number from 1 to 4096"):
        search(AcceptanceTable.from_marginals([[0.5]]), budget)  # type: ignore[arg-type]


def test_unknown_method_and_model_and_missing_ranks_are_refused() -> None:
    table = AcceptanceTable.from_marginals([[0.5]])
    with pytest.raises(SearchError, match="method: must be exact, greedy, naive or random"):
        search(table, 4, method="best")
    with pytest.raises(SearchError, match="acceptance model: must be independent or joint"):
        search(table, 4, acceptance_model="both")
    with pytest.raises(SearchError, match="has no joint counts"):
        search(table, 4, acceptance_model="joint")


def test_a_bound_that_is_known_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    table = AcceptanceTable.from_marginals([[0.6, 0.2], [0.5, 0.1]])
    greedy, bound = search(table, 8, method="greedy"), search(table, 8).upper_bound
    monkeypatch.delattr(sys.modules["treeopt.search"], "exact_trees")  # treeopt.search is the function
    assert search(table, 8, method="greedy", upper_bound=bound) == greedy
