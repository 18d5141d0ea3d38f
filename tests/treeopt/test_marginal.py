"""Wider or deeper: the best addition is the best of all, tried one by one."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treeopt import AcceptanceTable, LatencyProfile, SparseTree, search
from treeopt.acceptance import acceptance_trie
from treeopt.marginal import marginal_values
from treeopt.markov import acceptance_length, evaluate

TOY = AcceptanceTable.from_marginals([[0.6, 0.2], [0.5, 0.1]])


def grown_trees(tree: SparseTree, state: int, num_ranks: int, m: int) -> Iterator[tuple[str, int, SparseTree]]:
    """Every tree that has one candidate, or one prompt token, more."""
    held = {node.path: node.prompt_tokens for node in tree.nodes}
    for path, own in held.items():
        if own < m:
            yield "prompt_token", 1, SparseTree.from_prompt_tokens(held | {path: own + 1})
        for rank in range(num_ranks):
            child = (*path, rank)
            if len(child) <= state and child not in held:
                for its in range(m + 1):
                    yield "candidate", 1 + its, SparseTree.from_prompt_tokens(held | {child: its})


rows = st.lists(st.lists(st.floats(0.0, 0.3), min_size=3, max_size=3), min_size=2, max_size=2)


@settings(max_examples=25)
@given(rows, st.integers(3, 9))
def test_the_best_addition_is_the_best_of_all(marginals: list[list[float]], budget: int) -> None:
    table = AcceptanceTable.from_marginals(marginals)
    trie, design = acceptance_trie(table), search(table, budget)
    before = evaluate(trie, design.trees)
    best = {"candidate": -9.0, "prompt_token": -9.0}
    for state, share in enumerate(before.occupancy):
        for kind, tokens, tree in grown_trees(design.trees[state], state, 3, 2) if share > 0 else ():
            trees = [*design.trees]
            trees[state] = tree
            gain = (acceptance_length(trie, trees) - before.acceptance_length) / tokens
            best[kind] = max(best[kind], gain)
    found = marginal_values(design, table, budget)
    for kind, addition in (("candidate", found.wider), ("prompt_token", found.deeper)):
        assert (addition is None) == (best[kind] == -9.0)
        if addition is not None:
            assert addition.gain_per_token == pytest.approx(best[kind], abs=1e-12)
    if max(best.values()) <= 0:
        assert found.advice == "neither"


def test_the_last_distance_is_worth_the_difference_of_two_optima() -> None:
    one = AcceptanceTable.from_marginals([[0.6, 0.2]])
    found = marginal_values(search(TOY, 12), TOY, 12)
    assert found.last_distance_gain == pytest.approx(2.1 - search(one, 12).acceptance_length)
    assert marginal_values(search(one, 8), one, 8).last_distance_gain is None


def test_the_last_distance_of_joint_counts_keeps_their_sum() -> None:
    table = AcceptanceTable("toy", "made up", "greedy", 0.0, 10, ((0.6, 0.2), (0.5, 0.1)),
                            ((0, 0, 5), (0, 2, 1), (1, 1, 1), (1, 2, 1), (2, 2, 2)))  # fmt: skip
    shallow = AcceptanceTable("toy", "made up", "greedy", 0.0, 10, ((0.6, 0.2),), ((0, 6), (1, 2), (2, 2)))
    found = marginal_values(search(table, 8, acceptance_model="joint"), table, 8)
    wanted = (search(each, 8, acceptance_model="joint").acceptance_length for each in (table, shallow))
    assert found.last_distance_gain == pytest.approx(next(wanted) - next(wanted))


def test_time_decides_whether_more_is_worth_having() -> None:
    free = LatencyProfile.from_medians(dict.fromkeys(range(1, 13), 1.0))
    dear = LatencyProfile.from_medians({n: 1.0 if n <= 4 else 9.0 for n in range(1, 13)})
    design = search(TOY, 4, free)
    assert marginal_values(design, TOY, 4, free).advice != "neither"
    stuck = marginal_values(search(TOY, 4, dear), TOY, 4, dear)
    assert stuck.advice == "neither"
    assert stuck.wider is not None
    assert stuck.wider.gain > 0
    # Where nothing larger was measured the speed is not known.
    short = LatencyProfile.from_medians({1: 1.0, 4: 1.0})
    found = marginal_values(search(TOY, 4, short), TOY, 4, short)
    assert found.wider.speedup is None
    assert found.advice == "unknown"


def test_guesses_without_prompt_tokens_can_only_get_wider() -> None:
    table = AcceptanceTable.from_marginals([[0.6, 0.2], [0.5, 0.1]], tokens_per_prompt_token=0)
    found = marginal_values(search(table, 2), table, 2)
    assert found.deeper is None
    # The tree of 2 tokens holds (0); below it (0, 0) adds 0.6 x 0.5, beside it (1) only 0.2.
    assert found.wider is not None
    assert (found.wider.path, found.wider.gain) == ((0, 0), pytest.approx(0.3))
    assert found.advice == "wider"
