"""Appendix B: one number three ways, the published trees, and chains that break naive solvers."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.treeopt.designs import long_run, random_rows
from treeopt import AcceptanceTable, SparseTree, TreeDesign, search
from treeopt.acceptance import AcceptanceTrie, acceptance_trie, exit_share
from treeopt.bundled import load_acceptance
from treeopt.errors import InvalidValueError
from treeopt.greedy import greedy_trees
from treeopt.markov import (
    acceptance_length,
    evaluate,
    evaluate_design,
    exit_probabilities,
    expected_tokens,
    lookahead_tokens,
    occupancy,
    path_probabilities,
    removal_loss,
    transition_row,
)

PUBLISHED = json.loads((Path(__file__).parent / "published_trees.json").read_text())["trees"]
WORKED = acceptance_trie(AcceptanceTable.from_marginals([[0.6, 0.2], [0.5, 0.1]]))
WORKED_TREES = (
    SparseTree.from_prompt_tokens({(): 2}),
    SparseTree.from_prompt_tokens({(): 2, (0,): 1, (1,): 1}),
    SparseTree.from_prompt_tokens({(): 2, (0,): 2, (0, 0): 1, (1,): 1}),
)


def test_worked_example() -> None:
    value = evaluate(WORKED, WORKED_TREES)
    assert value.expected_tokens == pytest.approx((1, 1.8, 2.1))
    assert np.array(value.transitions) == pytest.approx(np.array([[0, 0, 1], [0, 0.8, 0.2], [0, 0.5, 0.5]]))
    assert value.occupancy == pytest.approx((0, 5 / 7, 2 / 7))
    assert value.acceptance_length == pytest.approx(1.885714, abs=1e-6)
    assert value.sizes == (3, 7, 10)


def test_path_and_exit_probabilities_of_the_worked_example() -> None:
    assert path_probabilities(WORKED, WORKED_TREES[2]) == pytest.approx([1, 0.6, 0.2, 0.3])
    assert exit_probabilities(WORKED, WORKED_TREES[2]) == pytest.approx([0.2, 0.3, 0.2, 0.3])


def test_lookahead_and_removal_loss_follow_propositions_2_and_3() -> None:
    assert lookahead_tokens(WORKED, WORKED_TREES, 2) == pytest.approx(2.1 + 0.5 * 1.8 + 0.5 * 2.1)
    # Removing one of the two prompt tokens of node (0,) sends its exits to state 1: dF is what F loses.
    fewer = SparseTree.from_prompt_tokens({(): 2, (0,): 1, (0, 0): 1, (1,): 1})
    lost = lookahead_tokens(WORKED, WORKED_TREES, 2) - lookahead_tokens(WORKED, (*WORKED_TREES[:2], fewer), 2)
    # The removed tree's own f is unchanged, so the difference is exactly the proposition's.
    assert removal_loss(WORKED, WORKED_TREES, 2, 1) == pytest.approx(lost)
    with pytest.raises(InvalidValueError, match="none to remove"):
        removal_loss(WORKED, (SparseTree.from_prompt_tokens({(): 0}), *WORKED_TREES[1:]), 0, 0)


@pytest.mark.parametrize("case", [c for c in PUBLISHED if "states" in c], ids=lambda c: f"{c['table']}-{c['budget']}")
def test_published_trees(case: dict) -> None:
    trie = acceptance_trie(load_acceptance(case["table"])[0])
    states = [
        SparseTree.from_prompt_tokens({tuple(path): held for path, held in case["states"][k]}) for k in ("1", "2", "3")
    ]
    value = evaluate(trie, (SparseTree.from_prompt_tokens({(): 3}), *states))
    assert value.expected_tokens == pytest.approx(case["f"], abs=1e-6)
    assert value.occupancy == pytest.approx(case["occupancy"], abs=1e-6)
    assert value.acceptance_length == pytest.approx(case["tau"], abs=1e-6)
    assert list(value.sizes) == case["sizes"]


@pytest.mark.parametrize("case", PUBLISHED, ids=lambda c: f"{c['table']}-{c['budget']}")
def test_searches_are_never_below_the_published_trees(case: dict) -> None:
    table = load_acceptance(case["table"])[0]
    trees = greedy_trees(acceptance_trie(table), case["budget"])
    greedy = acceptance_length(acceptance_trie(table), trees)
    exact = search(table, case["budget"])
    assert max(tree.size(1) for tree in trees) <= case["budget"]
    assert greedy >= case["tau"] - 1e-6
    assert exact.acceptance_length >= greedy - 1e-12


def simulate(trie: AcceptanceTrie, trees: tuple[SparseTree, ...], num_steps: int, seed: int) -> tuple[float, float]:
    """Decode for real: draw every guess's outcome. Returns tokens per step and its standard error (by batches)."""
    rng = np.random.default_rng(seed)
    held = [{node.path: node.prompt_tokens for node in tree.nodes} for tree in trees]
    state, produced = len(trees) - 1, np.zeros(num_steps)
    for step in range(num_steps):
        path, node = (), 0
        while node >= 0:
            draw, chosen = rng.random(), None
            for rank, (share, child) in trie.children[node].items():
                if draw < share:
                    chosen = (rank, child)
                    break
                draw -= share
            if chosen is None or (*path, chosen[0]) not in held[state]:
                break
            path, node = (*path, chosen[0]), chosen[1]
        produced[step] = len(path) + 1
        state = held[state][path]
    batches = produced[: num_steps // 100 * 100].reshape(100, -1).mean(axis=1)
    return float(batches.mean()), float(batches.std() / 10)


def test_closed_form_long_run_and_simulation_agree() -> None:
    rng = np.random.default_rng(1)
    for case in range(4):
        table = AcceptanceTable.from_marginals(random_rows(rng, 3, 3))
        trie = acceptance_trie(table)
        trees = search(table, int(rng.integers(6, 25))).trees
        value = evaluate(trie, trees)
        # Average of the first N distributions, by plain stepping.
        chain, share, total = np.array(value.transitions), np.eye(4)[3], np.zeros(4)
        for _ in range(20_000):
            total += share
            share = share @ chain
        assert value.occupancy == pytest.approx(total / 20_000, abs=1e-3)
        drawn, error = simulate(trie, trees, 30_000, case)
        assert abs(drawn - value.acceptance_length) < 5 * error + 1e-9


def test_periodic_chain() -> None:
    assert occupancy(np.array([[0.0, 1.0], [1.0, 0.0]]), 1) == pytest.approx([0.5, 0.5])


def test_closed_classes_are_reached_in_proportion() -> None:
    chain = np.array([[1.0, 0, 0, 0], [0, 0, 1.0, 0], [0, 1.0, 0, 0], [0.3, 0.1, 0.4, 0.2]])
    # From state 3: into {0} with 3/8, into the cycle {1, 2} with 5/8.
    assert occupancy(chain, 3) == pytest.approx([3 / 8, 5 / 16, 5 / 16, 0])


def test_probabilities_of_any_size_keep_their_precision() -> None:
    tiny = 1e-200
    assert occupancy(np.array([[1 - tiny, tiny], [3 * tiny, 1 - 3 * tiny]]), 1) == pytest.approx([0.75, 0.25])


@pytest.mark.parametrize("tiny", [1e-17, 1e-200, 1e-300])
def test_moves_that_are_almost_never_made_do_not_overflow(tiny: float) -> None:
    climb = np.array([[0.0, 1.0, 0.0, 0.0], [tiny, 0.0, 1.0, 0.0], [0.0, tiny, 0.0, 1.0], [0.0, 0.0, tiny, 1.0]])
    assert occupancy(climb, 0) == pytest.approx([0, 0, 0, 1], abs=1e-12)
    assert occupancy(np.array([[1.0, tiny], [0.0, 1.0]]), 0) == pytest.approx([0, 1])


def test_moves_below_the_normal_doubles_are_never_made() -> None:
    assert occupancy(np.array([[1.0, 5e-324], [0.0, 1.0]]), 0) == pytest.approx([1, 0])
    assert occupancy(np.array([[0.0, 1.0], [5e-324, 1.0]]), 0) == pytest.approx([0, 1])


@given(st.integers(2, 6), st.integers(0, 2**32 - 1))
def test_occupancy_equals_the_lazy_chain_and_is_stationary(n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    chain = rng.dirichlet(np.ones(n), n) * (rng.random((n, n)) < 0.5)
    chain[chain.sum(axis=1) == 0, 0] = 1.0
    chain /= chain.sum(axis=1, keepdims=True)
    share = occupancy(chain, n - 1)
    assert share.sum() == pytest.approx(1)
    assert share @ chain == pytest.approx(share, abs=1e-9)
    assert share == pytest.approx(long_run(chain), abs=1e-6)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2), st.integers(0, 2**32 - 1))
def test_exit_probabilities_sum_to_one(m: int, num_ranks: int, e: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = AcceptanceTable.from_marginals(random_rows(rng, m, num_ranks), tokens_per_prompt_token=e)
    trie = acceptance_trie(table)
    for tree in search(table, int(rng.integers(1, 20))).trees:
        exits = exit_probabilities(trie, tree)
        assert exits.min() >= 0
        assert exits.sum() == pytest.approx(1, abs=1e-9)
        assert transition_row(trie, tree).sum() == pytest.approx(1, abs=1e-9)
        # Both are E[accepted tokens]: sum of P, and depth + 1 weighted by exits.
        depths = np.array([node.depth + 1 for node in tree.nodes])
        assert expected_tokens(trie, tree) == pytest.approx(float(exits @ depths), abs=1e-9)


def test_children_that_sum_to_one_leave_no_way_out() -> None:
    assert exit_share([0.1] * 10) == 0.0
    assert exit_share([0.5, 0.4999]) == pytest.approx(1e-4)


def test_design_for_other_distances_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="states 0 to 2, the table needs 0 to 1"):
        evaluate(acceptance_trie(AcceptanceTable.from_marginals([[0.5]])), WORKED_TREES)


def test_rank_outside_the_table_is_refused() -> None:
    trees = (*WORKED_TREES[:1], SparseTree.from_prompt_tokens({(): 2, (2,): 0}), WORKED_TREES[2])
    with pytest.raises(InvalidValueError, match="rank 2 is outside the table"):
        evaluate(WORKED, trees)


def test_other_tokens_per_prompt_token_are_refused() -> None:
    design = TreeDesign(WORKED_TREES, None, "imported", "tau", None, 2, (5, 11, 16), None, None)
    with pytest.raises(InvalidValueError, match="2 tokens per prompt token, the table 1"):
        evaluate_design(WORKED, design)
