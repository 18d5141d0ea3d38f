"""Trees without states, and trees that may leave no rank out, against every tree."""

import numpy as np
import pytest

from tests.formats.shapes import every_tree, expected_tokens, without_gaps
from tests.treeopt import designs
from treeopt.acceptance import acceptance_trie
from treeopt.errors import SearchError
from treeopt.exact import exact_trees, free_guess_trees
from treeopt.types import AcceptanceTable


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_best_tree_of_every_size(seed, consecutive):
    rng = np.random.default_rng(seed)
    rows = designs.random_rows(rng, 2, 3)
    trie = acceptance_trie(AcceptanceTable.from_marginals(rows, tokens_per_prompt_token=0), consecutive=consecutive)
    for depth in (0, 1, 2):
        values, tree = free_guess_trees(trie, 6, depth)
        best = np.zeros(6)
        for paths in every_tree(3, depth, 5):
            if not consecutive or without_gaps(paths):
                best[len(paths)] = max(best[len(paths)], expected_tokens(paths, rows))
        assert values == pytest.approx(np.maximum.accumulate(best), abs=1e-12)
        for size in range(1, 7):
            paths = [node.path for node in tree(size).nodes[1:]]
            assert len(paths) < size
            assert not consecutive or without_gaps(paths)
            assert max(map(len, paths), default=0) <= depth
            assert expected_tokens(paths, rows) == pytest.approx(values[size - 1], abs=1e-12)


def test_a_gap_is_only_filled_where_the_worse_rank_pays_for_it():
    table = AcceptanceTable.from_marginals([[0.1, 0.0, 0.6]], tokens_per_prompt_token=0)
    gaps, closed = acceptance_trie(table), acceptance_trie(table, consecutive=True)
    assert free_guess_trees(gaps, 4, 1)[0] == pytest.approx([1, 1.6, 1.7, 1.7])
    assert free_guess_trees(closed, 4, 1)[0] == pytest.approx([1, 1.1, 1.1, 1.7])


@pytest.mark.parametrize(("cost", "budget"), [(0, 6), (1, 6), (2, 7)])
@pytest.mark.parametrize("seed", range(4))
def test_designs_without_gaps(seed, cost, budget, monkeypatch):
    rows = designs.random_rows(np.random.default_rng(seed), 2, 2)[::-1]
    rows = [row[::-1] for row in rows]  # the better rank second, so that gaps would pay
    every = designs.all_trees
    monkeypatch.setattr(
        designs,
        "all_trees",
        lambda *args: (nodes for nodes in every(*args) if without_gaps([path for path in nodes if path])),
    )

    def conditional(path):
        return rows[len(path) - 1][path[-1]]

    table = AcceptanceTable.from_marginals(rows, tokens_per_prompt_token=cost)
    found = exact_trees(acceptance_trie(table, consecutive=True), budget)
    wanted = designs.best_by_enumeration(conditional, 2, 2, cost, budget, None)
    assert found.evaluation.acceptance_length == pytest.approx(wanted, abs=1e-8)
    assert found.upper_bound == pytest.approx(wanted, abs=1e-8)
    assert all(without_gaps([node.path for node in tree.nodes[1:]]) for tree in found.trees)


def test_joint_shares_without_gaps():
    # Rank 1 is never right at the root; below rank 2 only rank 0 is.
    ranks = ((0, 1, 3), (2, 0, 5), (3, 3, 2))
    marginals = ((0.3, 0.0, 0.5), (0.5, 0.3, 0.0))
    table = AcceptanceTable("m", "s", "greedy", 0.0, 10, marginals, ranks, tokens_per_prompt_token=0)
    values, tree = free_guess_trees(acceptance_trie(table, "joint", consecutive=True), 6, 2)
    assert values == pytest.approx([1, 1.3, 1.3, 1.8, 2.3, 2.3])
    assert [node.path for node in tree(5).nodes] == [(), (0,), (1,), (2,), (2, 0)]


def test_guesses_that_cost_tokens_are_refused():
    with pytest.raises(SearchError, match="tokens_per_prompt_token"):
        free_guess_trees(acceptance_trie(AcceptanceTable.from_marginals([[0.5]])), 4, 1)
