"""Predictions: the definition of the speedup, replay before tables, intervals that carry both errors."""

from dataclasses import replace

import numpy as np
import pytest

from treeopt import AcceptanceTable, LatencyProfile, search
from treeopt.acceptance import acceptance_trie
from treeopt.app.predict import pad_design, predict
from treeopt.markov import evaluate_design, occupancy
from treeopt.replay import replay
from treeopt.types import LatencyPoint, RankRecord

TABLE = AcceptanceTable.from_marginals([[0.6, 0.2], [0.5, 0.1]])
STAIRS = LatencyProfile.from_medians({1: 1.0, 2: 1.2, 4: 1.3, 7: 2.0, 8: 1.8, 16: 3.0})


def record(num_sequences: int = 12, seed: int = 0) -> RankRecord:
    random = np.random.default_rng(seed)
    sequences = tuple(
        tuple(tuple(int(r) for r in random.choice(3, size=2, p=[0.6, 0.2, 0.2])) for _ in range(20))
        for _ in range(num_sequences)
    )
    return RankRecord("toy", "test", "greedy", 0.0, 2, sequences)


def with_samples(profile: LatencyProfile, spread: float) -> LatencyProfile:
    """The same medians, with raw step times that spread evenly around them."""
    points = tuple(
        LatencyPoint(
            p.num_tokens, p.median_s, samples_s=tuple(p.median_s * (1 + spread * i / 10) for i in range(-10, 11))
        )
        for p in profile.points
    )
    return replace(profile, points=points)


def test_without_a_record_the_definition_holds_term_by_term() -> None:
    design = pad_design(search(TABLE, 8), STAIRS)
    known = predict(design, TABLE, STAIRS)
    assert known is not None
    pi = known.occupancy
    assert pi == pytest.approx(occupancy(np.array(evaluate_design(acceptance_trie(TABLE), design).transitions), 2))
    seconds = sum(share * STAIRS.median_s(n) for share, n in zip(pi, design.pass_tokens, strict=True) if share)
    assert known.basis == "independent"
    assert known.seconds_per_step == pytest.approx(seconds)
    assert known.speedup == pytest.approx(known.acceptance_length / seconds * 1.0)
    assert (known.low, known.high, known.tau_low) == (None, None, None)


def test_a_record_decides_and_agrees_with_replay() -> None:
    design = pad_design(search(TABLE, 8), STAIRS)
    known, replayed = predict(design, TABLE, STAIRS, record()), replay(design, record(), STAIRS)
    assert known is not None
    assert known.basis == "replay"
    assert known.acceptance_length == replayed.acceptance_length == known.tau_by_model["replay"]
    assert known.speedup == pytest.approx(replayed.speedup)
    assert known.occupancy == pytest.approx(replayed.occupancy)
    assert set(known.tau_by_model) == {"independent", "replay"}
    # Two bootstraps of the same thing, drawn differently.
    assert (known.tau_low, known.tau_high) == pytest.approx((replayed.low, replayed.high), rel=0.02)


def test_the_interval_is_unknown_without_raw_times_and_grows_with_their_spread() -> None:
    design = pad_design(search(TABLE, 8), STAIRS)
    widths = []
    for spread in (0.0, 0.2, 0.9):
        known = predict(design, TABLE, with_samples(STAIRS, spread), record())
        assert known is not None
        assert known.low is not None
        assert known.high is not None
        assert known.low < known.speedup < known.high
        widths.append(known.high - known.low)
    assert widths == sorted(widths)
    assert widths[2] > 1.5 * widths[0]
    bare = predict(design, TABLE, STAIRS, record())
    assert bare is not None
    assert (bare.low, bare.high) == (None, None)
    # Without spread only the record's error is left: the speedup is tau over fixed times, up to occupancy.
    assert widths[0] < 0.5


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Records drawn from known shares: the 95 % interval of tau holds the exact tau about that often."""
    table = AcceptanceTable.from_marginals([[0.6, 0.2], [0.6, 0.2]])
    design = search(table, 8)
    truth = evaluate_design(acceptance_trie(table), design).acceptance_length
    held = 0
    for seed in range(60):
        known = predict(design, table, None, record(40, seed))
        assert known is not None
        assert known.tau_low is not None
        assert known.tau_high is not None
        held += known.tau_low <= truth <= known.tau_high
    assert 50 <= held <= 60


def test_sizes_that_nobody_measured_are_not_promised() -> None:
    short = LatencyProfile.from_medians({1: 1.0, 2: 1.1})
    design = pad_design(search(TABLE, 8), short)
    assert design.pass_tokens == design.sizes()
    known = predict(design, TABLE, short, record())
    assert known is not None
    assert (known.speedup, known.seconds_per_step, known.low) == (None, None, None)
    assert known.acceptance_length > 1


def test_padding_keeps_within_the_budget_and_takes_falling_stairs() -> None:
    for budget in range(1, 17):
        design = pad_design(search(TABLE, budget), STAIRS)
        for size, passes in zip(design.sizes(), design.pass_tokens, strict=True):
            fits = [p for p in STAIRS.points if size <= p.num_tokens <= budget]
            assert passes == (min(fits, key=lambda p: p.median_s).num_tokens if fits else size)


def test_nothing_known_predicts_nothing() -> None:
    assert predict(search(TABLE, 4), None, STAIRS) is None
