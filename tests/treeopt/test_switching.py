"""Switching tables: every pair is served, by as few designs as possible, and ranges say what the pairs say."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treeopt import AcceptanceTable, LatencyProfile, SwitchEntry, search
from treeopt.acceptance import acceptance_trie
from treeopt.errors import SearchError
from treeopt.switching import plan_switch, run_design

TABLE = AcceptanceTable.from_marginals([[0.6, 0.2], [0.5, 0.1]])
TRIE = acceptance_trie(TABLE)
SIZES = (1, 2, 3, 4, 6, 8, 12)


def profile(slope: float, batch_size: int = 1, context_len: int = 128, sizes=SIZES) -> LatencyProfile:
    """L(n) = 1 + slope (n - 1)."""
    line = LatencyProfile.from_medians({n: 1 + slope * (n - 1) for n in sizes})
    return replace(line, batch_size=batch_size, context_len=context_len)


def plan(slopes: dict[tuple[int, int], float], as_good: float = 0.01):
    profiles = {key: profile(slope, *key) for key, slope in slopes.items()}
    optima = {key: search(TABLE, 12, each) for key, each in profiles.items()}
    return plan_switch(TRIE, optima, profiles, as_good=as_good), optima, profiles


def test_ranges_join_where_neighbours_share_a_design() -> None:
    # Free tokens: the tree of best tau, 2.1 with 12 tokens. Dear tokens: one token a pass.
    free, dear = 0.0, 1.0
    found, optima, _ = plan({(1, 128): free, (1, 1024): free, (1, 8192): dear, (2, 128): dear, (2, 1024): dear,
                             (2, 8192): dear, (4, 128): dear, (4, 1024): dear, (4, 8192): dear})  # fmt: skip
    entries = found.table.entries
    assert [(entry.batch_max, entry.context_max) for entry in entries] == [(1, 1024), (1, 8192), (4, 8192)]
    assert entries[0].tree.acceptance_length == pytest.approx(2.1)
    assert entries[0].tree.speedup == pytest.approx(2.1)
    assert [entry.tree.speedup for entry in entries[1:]] == pytest.approx([1.0, 1.0])
    assert found.num_designs == 2
    # An entry's claims are those of its upper end.
    assert entries[0].tree.latency_digest == optima[1, 1024].latency_digest
    assert entries[2].tree.latency_digest == optima[4, 8192].latency_digest


def test_batches_are_run_at_one_common_size() -> None:
    design = search(TABLE, 12, profile(0.02))
    assert design.pass_tokens == (3, 8, 12)
    alone = run_design(TRIE, design, profile(0.02))
    assert alone is not None
    assert alone.speedup == pytest.approx(design.speedup)
    together = run_design(TRIE, design, profile(0.02, batch_size=2))
    assert together is not None
    assert together.speedup == pytest.approx(design.acceptance_length / 1.22)  # L(12) = 1.22 in every step
    # A size that was not measured is not guessed.
    assert run_design(TRIE, design, profile(0.02, sizes=(1, 4, 8))) is None


@settings(max_examples=25)
@given(st.lists(st.floats(0.0, 0.6), min_size=6, max_size=6), st.sampled_from([0.0, 0.01, 0.1]))
def test_every_pair_is_served_and_no_smaller_set_would_do(slopes: list[float], as_good: float) -> None:
    keys = [(b, c) for b in (1, 2) for c in (128, 1024, 8192)]
    found, optima, profiles = plan(dict(zip(keys, slopes, strict=True)), as_good)
    for cell in found.cells:
        key = cell.batch_size, cell.context_len
        assert cell.best_tokens_per_second == pytest.approx(optima[key].tokens_per_second)
        assert -1e-9 <= cell.loss <= as_good + 1e-9
        entry = found.table.entries[found.table.place(*key)]
        assert entry.tree.trees == cell.design.trees
        assert entry.tree.pass_tokens == cell.design.pass_tokens
        again = run_design(TRIE, cell.design, profiles[key])
        assert again is not None
        assert cell.design.tokens_per_second == pytest.approx(again.tokens_per_second)
    assert found.num_designs <= _fewest(optima, profiles, as_good) + (as_good > 0)


def _fewest(optima, profiles, as_good: float) -> int:
    """Size of the smallest set of the pairs' optima that serves every pair; by trying them all."""

    def serves(design, key) -> bool:
        run = run_design(TRIE, design, profiles[key])
        return run is not None and run.tokens_per_second >= optima[key].tokens_per_second * (1 - as_good - 1e-9)

    served = [{key for key in optima if serves(design, key)} for design in optima.values()]
    return next(
        size
        for size in range(1, len(optima) + 1)
        if any(set().union(*chosen) == set(optima) for chosen in itertools.combinations(served, size))
    )


def test_a_missing_pair_is_named() -> None:
    profiles = {(1, 128): profile(0.1), (2, 1024): profile(0.1, 2, 1024)}
    optima = {key: search(TABLE, 8, each) for key, each in profiles.items()}
    with pytest.raises(SearchError, match="no profile of batch 1, context 1024; measure every pair"):
        plan_switch(TRIE, optima, profiles)


def test_entries_are_plain_values() -> None:
    found, _, _ = plan({(1, 128): 0.0})
    (entry,) = found.table.entries
    assert isinstance(entry, SwitchEntry)
    assert hash(found.table) == hash(replace(found.table))
