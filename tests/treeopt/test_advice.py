"""Advice: intervals that can be worked out by hand, ties, and what would break them."""

import math
from dataclasses import replace

import numpy as np
import pytest

from treeopt import AcceptanceTable, LatencyPoint, LatencyProfile, RankRecord, SparseTree, TreeDesign
from treeopt.acceptance import acceptance_trie
from treeopt.advice import break_even, chain_trie, contenders, judge, kind_of
from treeopt.markov import evaluate
from treeopt.uncertainty import draw_acceptance, draw_latency

# One distance, one rank. The tree guesses one token and costs 4 tokens a pass.
HALF = AcceptanceTable.from_marginals([[0.5]])
HIT, MISS = ((0,),) * 4, ((1,),) * 4
"""Replayed with the tree: 4 tokens in 2 steps, and 4 tokens in 4 steps, all of them in state 1."""

TOY = AcceptanceTable.from_marginals([[0.6, 0.2], [0.5, 0.1]])


def design(trees: list[dict], passes: tuple[int, ...]) -> TreeDesign:
    built = tuple(SparseTree.from_prompt_tokens(tree) for tree in trees)
    return TreeDesign(built, None, "imported", "tau", "independent", 1, passes, None, None)


PLAIN = ("plain", design([{(): 0}, {(): 0}], (1, 1)))
GUESS = ("tree", design([{(): 1}, {(): 1, (0,): 1}], (2, 4)))


def record(*sequences) -> RankRecord:
    return RankRecord("toy", "made up", "greedy", 0.0, 1, tuple(sequences))


def profile(*points: tuple[int, tuple[float, ...]]) -> LatencyProfile:
    """Points with raw samples; the median is the middle one."""
    base = LatencyProfile.from_medians({1: 1.0})
    built = [LatencyPoint(n, sorted(s)[len(s) // 2], num_samples=len(s), samples_s=s) for n, s in points]
    return replace(base, points=tuple(built))


STEADY = profile((1, (1.0,) * 3), (2, (1.0,) * 3), (4, (1.2,) * 3))


def decide(latency: LatencyProfile, *sequences):
    return judge([PLAIN, GUESS], acceptance_trie(HALF), HALF, latency, record(*sequences))


def test_doubt_about_acceptance_is_that_of_whole_sequences() -> None:
    # Both sequences drawn once in 2 of 4 draws, one of them twice in 1 of 4 each: 8/6, 4/2 and 4/4 tokens per step.
    verdict = decide(STEADY, HIT, MISS)
    best, plain = verdict.contenders
    assert (best.name, best.kind, plain.kind) == ("tree", "chain", "none")
    assert best.acceptance_length == pytest.approx(8 / 6)
    assert best.speedup == pytest.approx(8 / 6 / 1.2)
    assert (best.low, best.high) == (pytest.approx(1 / 1.2), pytest.approx(2 / 1.2))
    assert (verdict.basis, verdict.unit, verdict.num_samples, verdict.num_steps) == ("replay", "sequences", 2, 3)
    # The interval holds 1, so the data do not show that guessing pays.
    assert plain.tied
    assert verdict.use == "none"
    ratio = math.log(8 / 6 / 1.2)
    logs = np.log([2 / 1.2, 8 / 6 / 1.2, 8 / 6 / 1.2, 1 / 1.2])
    assert plain.times_samples == pytest.approx((1.96 / ratio) ** 2 * logs.var(), rel=0.1)
    assert plain.latency_share == 0


def test_equal_sequences_and_steady_times_leave_no_doubt() -> None:
    verdict = decide(STEADY, HIT, HIT, HIT)
    best, plain = verdict.contenders
    assert (best.low, best.speedup, best.high) == pytest.approx((2 / 1.2,) * 3)
    assert not plain.tied
    assert plain.times_samples == 0
    assert verdict.use == "chain"


def test_doubt_about_latency_is_that_of_the_raw_times() -> None:
    # The median of three draws from (1.2, 1.2, 3) is 3 in 7 of 27 draws.
    latency = profile((1, (1.0,) * 3), (2, (1.0,) * 3), (4, (1.2, 1.2, 3.0)))
    verdict = decide(latency, HIT, HIT)
    best, plain = verdict.contenders
    assert best.speedup == pytest.approx(2 / 1.2)
    assert (best.low, best.high) == (pytest.approx(2 / 3), pytest.approx(2 / 1.2))
    assert plain.latency_share == 1
    assert verdict.use == "none"
    drawn, fewest = draw_latency(latency, [1, 4])
    assert fewest == 3
    assert (drawn[4] == 3.0).mean() == pytest.approx(7 / 27, abs=0.03)
    assert (drawn[1] == 1.0).all()


def test_unknown_errors_are_said_to_be_unknown() -> None:
    bare = LatencyProfile.from_medians({1: 1.0, 2: 1.0, 4: 1.2})
    verdict = decide(bare, HIT, MISS)
    assert not verdict.interval_known
    assert [each.low for each in verdict.contenders] == [None, None]
    assert [each.tied for each in verdict.contenders] == [None, None]
    assert verdict.use == "chain"  # by the estimate alone
    assert decide(STEADY, HIT).unit is None  # one sequence says nothing of others
    without = judge([PLAIN, GUESS], acceptance_trie(HALF), HALF, STEADY)
    assert (without.basis, without.unit) == ("independent", None)
    assert without.best.speedup == pytest.approx(1.5 / 1.2)


def test_what_never_pays_is_not_advised() -> None:
    slow = profile((1, (1.0,) * 3), (2, (2.0,) * 3), (4, (3.0,) * 3))
    verdict = decide(slow, HIT, MISS)
    assert (verdict.use, verdict.best.kind, verdict.best.speedup) == ("none", "none", 1.0)
    assert not verdict.contenders[1].tied  # even the best draw, 2 tokens a step, is slower


def test_quartiles_stand_for_raw_times() -> None:
    point = LatencyPoint(1, 1.0, iqr_s=0.1349, num_samples=100)
    drawn, fewest = draw_latency(replace(STEADY, points=(point,)), [1])
    assert fewest == 100
    assert drawn[1].mean() == pytest.approx(1.0, abs=0.001)
    assert drawn[1].std() == pytest.approx(0.012533, rel=0.06)  # 1.2533 sigma / sqrt(n), sigma 0.1


TREES = [
    SparseTree.from_prompt_tokens(tree)
    for tree in ({(): 1}, {(): 2, (0,): 1, (1,): 0}, {(): 2, (0,): 2, (1,): 1, (0, 0): 0, (1, 1): 2})
]
PASSES = (2, 6, 12)
COUNTS = ((0, 0, 30), (0, 1, 12), (0, 2, 18), (1, 0, 9), (1, 1, 3), (1, 2, 8), (2, 0, 11), (2, 2, 9))


def test_drawn_tables_are_valued_as_the_chain_values_them() -> None:
    table = replace(TOY, num_samples=200)
    drawn = draw_acceptance([_toy_design()], acceptance_trie(table), table, seed=5, num_draws=20)
    random = np.random.default_rng(5)
    rows = [random.multinomial(200, [*row, 1 - sum(row)], size=20)[:, :-1] / 200 for row in table.marginals]
    for i in range(20):
        again = AcceptanceTable.from_marginals([row[i].tolist() for row in rows])
        expected = evaluate(acceptance_trie(again), TREES)
        assert drawn.behaviours[0].drawn_tokens[i] == pytest.approx(expected.acceptance_length, abs=1e-6)
        assert drawn.behaviours[0].drawn_occupancy[i] == pytest.approx(expected.occupancy, abs=1e-6)
    assert drawn.behaviours[0].tokens == evaluate(acceptance_trie(table), TREES).acceptance_length
    assert (drawn.unit, drawn.num_samples) == ("positions", 200)


@pytest.mark.parametrize("model", ["joint", "independent"])
def test_joint_counts_are_drawn_together(model: str) -> None:
    marginals = ((0.6, 0.2), (0.5, 0.15))
    table = AcceptanceTable("toy", "made up", "greedy", 0.0, 100, marginals, COUNTS)
    drawn = draw_acceptance([_toy_design()], acceptance_trie(table, model), table, seed=3, num_draws=20)
    counts = np.array([row[-1] for row in COUNTS])
    weights = np.random.default_rng(3).multinomial(100, counts / 100, size=20)
    for i in range(20):
        ranks = tuple((*row[:-1], int(n)) for row, n in zip(COUNTS, weights[i], strict=True) if n)
        shares = tuple(tuple(sum(row[-1] for row in ranks if row[j] == r) / 100 for r in range(2)) for j in range(2))
        again = AcceptanceTable("toy", "made up", "greedy", 0.0, 100, shares, ranks)
        expected = evaluate(acceptance_trie(again, model), TREES).acceptance_length
        assert drawn.behaviours[0].drawn_tokens[i] == pytest.approx(expected, abs=1e-6)


def _toy_design() -> TreeDesign:
    return TreeDesign(tuple(TREES), None, "imported", "tau", "independent", 1, PASSES, None, None)


def test_contenders_are_plain_tree_chain_and_every_measured_size() -> None:
    trie = acceptance_trie(TOY)
    latency = LatencyProfile.from_medians({n: 1 + 0.02 * (n - 1) for n in (1, 2, 4, 8, 12, 16)})
    named = dict(contenders(trie, 12, latency))
    sizes = ["chain of 2 tokens", "chain of 4 tokens", "tree of 8 tokens", "tree of 12 tokens"]
    assert list(named) == ["plain", "best tree", "best chain", *sizes]
    verdict = judge(list(named.items()), trie, TOY, latency)
    best = verdict.best
    assert best.name == "best tree"
    assert all(best.speedup >= each.speedup for each in verdict.contenders)
    fixed = next(each for each in verdict.contenders if each.name == "tree of 12 tokens")
    assert (fixed.acceptance_length, fixed.speedup) == (pytest.approx(2.1), pytest.approx(2.1 / 1.22))
    chain = named["best chain"]
    assert kind_of(chain.trees, evaluate(trie, chain.trees).occupancy) == "chain"


def test_a_chain_keeps_the_most_probable_child() -> None:
    trie = chain_trie(acceptance_trie(AcceptanceTable.from_marginals([[0.2, 0.6], [0.0, 0.0]])))
    assert trie.children == ({1: (0.6, 1)}, {})


def test_shapes_count_only_states_that_occur() -> None:
    bare = SparseTree.from_prompt_tokens({(): 0})
    one = SparseTree.from_prompt_tokens({(): 1, (0,): 0})
    two = SparseTree.from_prompt_tokens({(): 1, (0,): 0, (1,): 0})
    assert kind_of([bare, two], [1.0, 0.0]) == "none"
    assert kind_of([bare, one], [0.5, 0.5]) == "chain"
    assert kind_of([bare, two], [0.5, 0.5]) == "tree"


def test_break_even_by_hand() -> None:
    # tau(4) = 1.6 and L(4) / L(1) = 1.3; every state at its own size reaches 1.264368.
    cheap = LatencyProfile.from_medians({n: 1 + 0.1 * (n - 1) for n in range(1, 5)})
    dear = replace(LatencyProfile.from_medians({n: float(n) for n in range(1, 5)}), batch_size=2, context_len=64)
    alone = replace(LatencyProfile.from_medians({1: 1.0, 9: 2.0}), batch_size=4)
    rows = break_even(acceptance_trie(TOY), 4, [alone, dear, cheap])
    assert [(row.batch_size, row.context_len, row.kind) for row in rows] == [(1, 0, "tree"), (2, 64, "none")]
    first, second = rows
    assert (first.num_tokens, first.acceptance_length, first.needed) == (4, pytest.approx(1.6), pytest.approx(1.3))
    assert first.speedup == pytest.approx(1.264368, abs=1e-6)
    assert (second.num_tokens, second.acceptance_length, second.needed) == (2, pytest.approx(1.3), pytest.approx(2.0))
    assert second.speedup == 1.0


def test_drawn_latencies_are_medians_of_the_samples() -> None:
    point = LatencyPoint(1, 2.0, num_samples=3, samples_s=(1.0, 2.0, 3.0))
    drawn, fewest = draw_latency(replace(LatencyProfile.from_medians({1: 2.0}), points=(point,)), [1], num_draws=500)
    assert fewest == 3
    assert set(drawn[1].tolist()) <= {1.0, 2.0, 3.0}
    # By hand: of the 27 draws of three, 7 have the median 1, 13 the median 2, 7 the median 3.
    assert (drawn[1] == 2.0).mean() == pytest.approx(13 / 27, abs=0.07)
