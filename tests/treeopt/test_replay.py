"""Replay counts what a decoder would do, exactly."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treeopt import AcceptanceTable, LatencyProfile, RankRecord, SparseTree, TreeDesign, search
from treeopt.acceptance import acceptance_trie
from treeopt.errors import InvalidValueError
from treeopt.markov import evaluate_design
from treeopt.replay import replay, replay_sequences


def record_of(*sequences: list[list[int]], max_rank: int = 4) -> RankRecord:
    frozen = tuple(tuple(tuple(entry) for entry in sequence) for sequence in sequences)
    return RankRecord("toy", "hand", "greedy", 0.0, max_rank, frozen)


def design_of(*states: dict[tuple[int, ...], int]) -> TreeDesign:
    trees = tuple(SparseTree.from_prompt_tokens(nodes) for nodes in states)
    return TreeDesign(trees, None, "imported", "tau", None, 1, tuple(t.size(1) for t in trees), None, None)


DESIGN = design_of({(): 2}, {(): 1, (0,): 0}, {(): 2, (0,): 1, (0, 1): 0})


def test_walk_by_hand() -> None:
    record = record_of([[0, 1], [9 % 4, 0], [1, 1], [0, 0], [0, 3], [0, 0], [4, 4]])
    # i=0 state 2: accepts (0, 1), exit carries 0. i=3 state 0: bare root, back to state 2.
    # i=4 state 2: accepts (0), exit carries 1. i=6 state 1: root only, text ends.
    run = replay_sequences(DESIGN, record)[0]
    assert run.steps_per_state == (1, 1, 2)
    assert run.num_tokens == 7


def test_every_sequence_starts_in_state_m_and_the_last_step_counts_in_full() -> None:
    found = replay(DESIGN, record_of([[0, 1]], [[0, 1]]))
    assert (found.num_steps, found.num_tokens, found.steps_per_state) == (2, 6, (0, 0, 2))
    assert (found.low, found.high) == (3.0, 3.0)


def test_speed_is_total_tokens_over_total_time() -> None:
    profile = LatencyProfile.from_medians({1: 1.0, 3: 2.0, 6: 5.0})
    found = replay(DESIGN, record_of([[0, 1], [0, 0], [0, 0], [0, 0]]), profile)
    # State 2 (6 tokens, 5 s) yields 3, then state 0 (size 3, 2 s) yields 1.
    assert found.tokens_per_second == pytest.approx(4 / 7)
    assert found.speedup == pytest.approx(4 / 7)


@settings(max_examples=8)
@given(st.integers(0, 2**32 - 1))
def test_long_texts_of_independent_guesses_approach_the_model(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = np.array([[0.5, 0.2], [0.4, 0.1]])
    table = AcceptanceTable.from_marginals(rows.tolist())
    design = search(table, int(rng.integers(1, 12)))
    draws = [rng.choice(3, size=20_000, p=[*row, 1 - row.sum()]) for row in rows]
    record = record_of(np.stack(draws, axis=1).tolist(), max_rank=2)
    expected = evaluate_design(acceptance_trie(table), design).acceptance_length
    assert replay(design, record).acceptance_length == pytest.approx(expected, rel=0.03)


def test_interval_needs_its_seed_and_repeats() -> None:
    rng = np.random.default_rng(0)
    record = record_of(*[rng.integers(0, 3, size=(30, 2)).tolist() for _ in range(12)])
    first, second = replay(DESIGN, record, seed=1), replay(DESIGN, record, seed=1)
    assert first == second
    assert first.low < first.acceptance_length < first.high
    other = replay(DESIGN, record, seed=2)
    assert (other.low, other.high) != (first.low, first.high)


def test_other_distances_and_unrecorded_ranks_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="record 1 distances, the design needs 2"):
        replay(DESIGN, record_of([[0]]))
    with pytest.raises(InvalidValueError, match="is 1, but the design uses rank 1"):
        replay(DESIGN, record_of([[0, 0]], max_rank=1))
