"""The search inside an engine's limits: best by enumeration, and never over a limit."""

import ast
import io
import itertools
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.formats.shapes import every_tree, expected_tokens, without_gaps
from tests.treeopt.designs import random_rows
from treeopt import LatencyProfile, search
from treeopt.app.target import TARGETS, search_for_target
from treeopt.errors import SearchError
from treeopt.formats import choices, growmap, llama_cpp, sglang, tensorrt_llm, vllm
from treeopt.types import AcceptanceTable

TREES = ("medusa", "eagle", "sequoia", "umbrella", "vllm")
SCHEDULES = ("vllm-schedule", "tensorrt-llm-schedule")


def table_of(rows):
    return AcceptanceTable.from_marginals(rows, tokens_per_prompt_token=0)


def paths_of(target, content):
    """Read an answer back, through the format's own validator."""
    if target == "sequoia":
        return growmap.paths_from_growmap(torch.load(io.BytesIO(content), weights_only=True))
    if target == "umbrella":
        return growmap.paths_from_growmap(json.loads(content))
    if not content:
        return []
    paths = choices.paths_from_value(ast.literal_eval(content))
    check = {"medusa": choices.check_choices, "eagle": choices.check_eagle_choices, "vllm": vllm.check_token_tree}
    check[target](paths)
    return paths


def uniform(paths):
    children = {path: sum(p[:-1] == path for p in paths) for path in [(), *paths]}
    depth = max(map(len, paths), default=0)
    return all(len({n for path, n in children.items() if len(path) == d}) == 1 for d in range(depth))


def stairs(rng, budget):
    """A latency curve with stairs that also fall, and sizes that were not measured."""
    sizes = [1, *sorted(rng.choice(np.arange(2, budget + 3), size=budget // 2, replace=False).tolist())]
    return LatencyProfile.from_medians({n: float(1 + 0.08 * n + 0.2 * rng.random()) for n in sizes})


@pytest.mark.parametrize("target", TREES)
@pytest.mark.parametrize("seed", range(6))
def test_trees_are_the_best_of_all_that_fit(target, seed):
    rng = np.random.default_rng(seed)
    rows = random_rows(rng, 2, 3)
    budget = 6
    fits = [
        (len(paths) + 1, expected_tokens(paths, rows), max(map(len, paths), default=0))
        for paths in every_tree(3, 2, budget - 1)
        if (target == "medusa" or without_gaps(paths)) and (target != "vllm" or uniform(paths))
    ]
    for latency, draft_s in ((None, 0.0), (stairs(rng, budget), 0.0), (stairs(rng, budget), 0.1)):
        if latency is None:
            wanted = max(tokens for _, tokens, _ in fits)
        else:
            # A tree may be run at any measured size that holds it.
            wanted = max(
                tokens / (point.median_s + depth * draft_s)
                for size, tokens, depth in fits
                for point in latency.points
                if size <= point.num_tokens <= budget
            )
        found = search_for_target(target, table_of(rows), budget, [latency] if latency else [], draft_s=draft_s)
        paths = paths_of(target, found.content)
        assert len(paths) < budget
        assert expected_tokens(paths, rows) == pytest.approx(found.expected_tokens, abs=1e-12)
        reached = found.expected_tokens if latency is None else found.speedup / latency.median_s(1)
        assert reached == pytest.approx(wanted, abs=1e-9)


def pool_tokens(rows, steps, topk, candidates):
    """EAGLE's draft, node by node: keep topk nodes a level, give each topk children, verify the best of all."""
    kept, pool = [(1.0, ())], []
    for row in rows[:steps]:
        level = [(share * row[rank], (*path, rank)) for share, path in kept for rank in range(topk)]
        kept = sorted(level, key=lambda node: -node[0])[:topk]
        pool += level
    if candidates > len(pool):
        return None
    return 1.0 + sum(sorted((share for share, _ in pool), reverse=True)[:candidates])


@pytest.mark.parametrize("target", ["sglang", "tensorrt-llm"])
@pytest.mark.parametrize("seed", range(6))
def test_pools_are_the_best_of_all_settings(target, seed):
    rng = np.random.default_rng(seed)
    rows = [sorted(row, reverse=True) for row in random_rows(rng, 3, 3)]
    budget = 12
    for latency in (None, stairs(rng, budget)):
        wanted = 1.0 if latency is None else 1.0 / latency.median_s(1)
        for steps, topk, size in itertools.product(range(1, 4), range(1, 4), range(2, budget + 1)):
            chain_breaks = topk == 1 and size != steps + 1
            over = target == "tensorrt-llm" and not steps <= size - 1 <= topk * steps
            tokens = pool_tokens(rows, steps, topk, size - 1)
            measured = latency is None or size in [point.num_tokens for point in latency.points]
            if tokens is not None and measured and not chain_breaks and not over:
                wanted = max(wanted, tokens / (1.0 if latency is None else latency.median_s(size)))
        found = search_for_target(target, table_of(rows), budget, [latency] if latency else [])
        reached = found.expected_tokens if latency is None else found.speedup / latency.median_s(1)
        assert reached == pytest.approx(wanted, abs=1e-9)
        if found.content:
            first, second, third = map(int, re.findall(r"\d+", found.content))
            setting = (first, second, third) if target == "sglang" else (first, third, second + 1)
            assert pool_tokens(rows, setting[0], setting[1], setting[2] - 1) == pytest.approx(found.expected_tokens)


def test_only_kept_nodes_are_drafted_on():
    # Flat rows: grandchildren of nodes that were not kept would be worth more than most of the pool.
    rows = [[0.51, 0.49]] * 4
    for budget in range(2, 24):
        pools = [pool_tokens(rows, steps, 2, size - 1) for steps in range(1, 5) for size in range(2, budget + 1)] + [
            pool_tokens(rows, steps, 1, steps) for steps in range(1, min(5, budget))
        ]
        found = search_for_target("sglang", table_of(rows), budget)
        assert found.expected_tokens == pytest.approx(max(tokens for tokens in pools if tokens is not None))


shares = st.floats(0, 0.2)
tables = st.integers(1, 4).flatmap(
    lambda ranks: st.lists(st.lists(shares, min_size=ranks, max_size=ranks), min_size=1, max_size=3)
)
slopes = st.one_of(st.none(), st.floats(0, 1))


@given(tables, st.integers(1, 24), slopes, st.integers(1, 4))
def test_no_limit_is_ever_broken(rows, budget, slope, max_depth):
    table = table_of(rows)
    latency = None if slope is None else LatencyProfile.from_medians({n: 1 + slope * n for n in range(1, 30)})
    depth = min(len(rows), max_depth)
    for target in TARGETS:
        if target in SCHEDULES:
            if latency is None:
                continue
            profiles = [replace(latency, batch_size=8), replace(latency, batch_size=2)]
            text = search_for_target(target, table, budget, profiles, max_depth=max_depth).content
            if text:
                found = ast.literal_eval(text)
                lengths = [entry[2] for entry in found] if target == "vllm-schedule" else list(found.values())
                check = vllm.check_batch_ranges if target == "vllm-schedule" else tensorrt_llm.check_schedule
                check(found, max(lengths))
                assert max(lengths) <= min(depth, budget - 1)
            continue
        text = search_for_target(target, table, budget, [latency] if latency else [], max_depth=max_depth).content
        numbers = [float(number) for number in re.findall(r"-?\d+\.?\d*(?:e-\d+)?", str(text))]
        if target in TREES:
            paths = paths_of(target, text)
            assert len(paths) < budget
            assert max(map(len, paths), default=0) <= depth
        elif target == "sglang" and text:
            flags = sglang.EagleFlags(*map(int, numbers))
            assert flags.num_draft_tokens <= budget
            assert flags.num_steps <= depth
        elif target == "tensorrt-llm" and text:
            tree = tensorrt_llm.DynamicTree(*map(int, numbers))
            assert tree.max_total_draft_tokens < budget
            assert tree.max_draft_len <= depth
        elif target == "llama.cpp" and text != llama_cpp.NO_SPECULATION:
            flags = llama_cpp.DraftFlags(int(numbers[0]), numbers[1])
            assert flags.n_max <= min(depth, budget - 1)


@pytest.mark.parametrize("target", TARGETS)
def test_no_speculation_is_offered_when_it_wins(target):
    steep = LatencyProfile.from_medians({n: float(n) for n in range(1, 9)})
    found = search_for_target(target, table_of([[0.6, 0.2], [0.5, 0.1]]), 8, [steep])
    assert found.expected_tokens == 1.0
    assert found.speedup == 1.0
    assert any("no speculation" in note for note in found.notes)
    if target == "llama.cpp":
        assert found.content == "--spec-type none"
    elif target in ("sequoia", "umbrella"):
        assert paths_of(target, found.content) == []
    else:
        assert found.content == ""


@pytest.mark.parametrize(
    ("target", "content"),
    [
        ("medusa", "[[0], [0, 0]]"),
        ("eagle", "[[0], [0, 0]]"),
        ("vllm", "[(0,), (0, 0)]"),
        ("sglang", "--speculative-num-steps 2 --speculative-eagle-topk 1 --speculative-num-draft-tokens 3"),
        ("tensorrt-llm", '{"max_draft_len": 2, "max_total_draft_tokens": 2, "dynamic_tree_max_topK": 1}'),
        # g = 2.6 tokens / 1.2 s, 0.1 s more per token
        ("llama.cpp", "--spec-draft-n-max 2 --spec-draft-p-min 0.2166"),
    ],
)
def test_a_chain_is_offered_when_it_wins(target, content):
    latency = LatencyProfile.from_medians({n: 1 + 0.1 * (n - 1) for n in range(1, 9)})
    assert search_for_target(target, table_of([[0.8, 0.05], [1.0, 0.0]]), 8, [latency]).content == content


def test_medusa_stops_at_its_ten_ranks():
    rows = [[0.01] * 10 + [0.5]]
    paths = ast.literal_eval(search_for_target("medusa", table_of(rows), 64).content)
    assert paths == [[rank] for rank in range(10)]


def profile(batch_size, slope):
    return replace(LatencyProfile.from_medians({n: 1 + slope * (n - 1) for n in range(1, 9)}), batch_size=batch_size)


def test_schedules_follow_the_latency_of_each_batch_size():
    # f of chains of 0..3: 1, 1.6, 1.9, 2.02; a token is worth its slope times f / L.
    table = table_of([[0.6], [0.5], [0.4]])
    profiles = [profile(16, 0.7), profile(1, 0.02), profile(4, 0.1), profile(8, 0.12)]
    ranges = search_for_target("vllm-schedule", table, 8, profiles)
    assert ranges.content == "[[1, 1, 3], [2, 8, 2], [9, 16, 0]]"
    assert "set num_speculative_tokens to 3 beside it" in ranges.notes
    schedule = search_for_target("tensorrt-llm-schedule", table, 8, profiles)
    assert schedule.content == "{1: 3, 8: 2, 16: 0}"


def test_tensorrt_llm_never_drafts_more_than_at_the_smallest_batch_size():
    table = table_of([[0.6], [0.5], [0.4]])
    profiles = [profile(1, 0.3), profile(4, 0.0)]
    assert search_for_target("vllm-schedule", table, 8, profiles).content == "[[1, 1, 1], [2, 4, 3]]"
    assert search_for_target("tensorrt-llm-schedule", table, 8, profiles).content == "{4: 1}"


def test_joint_counts_serve_trees_and_chains():
    ranks = ((0, 0, 40), (0, 1, 10), (1, 1, 30), (2, 2, 20))
    marginals = ((0.5, 0.3), (0.4, 0.4))
    table = AcceptanceTable("m", "s", "greedy", 0.0, 100, marginals, ranks)
    free = replace(table, tokens_per_prompt_token=0)
    for budget in range(1, 7):
        found = search_for_target("medusa", table, budget, acceptance_model="joint")
        wanted = search(free, budget, acceptance_model="joint").acceptance_length
        assert found.expected_tokens == pytest.approx(wanted)
    assert search_for_target("llama.cpp", table, 8, acceptance_model="joint").expected_tokens == pytest.approx(1.9)
    # Cut to one distance the counts are those of the first.
    cut = search_for_target("medusa", table, 8, acceptance_model="joint", max_depth=1)
    assert cut.expected_tokens == pytest.approx(1.8)


def test_a_table_of_prompt_tokens_is_used_and_said():
    rows = [[0.6, 0.2], [0.5, 0.1]]
    free = search_for_target("medusa", table_of(rows), 5)
    found = search_for_target("medusa", AcceptanceTable.from_marginals(rows), 5)
    assert found.content == free.content
    assert found.notes[:-1] == free.notes
    assert "measured with prompt tokens" in found.notes[-1]


@pytest.mark.parametrize(
    ("target", "options", "problem"),
    [
        ("hydra2", {}, "must be one of"),
        ("medusa", {"budget": 0}, "budget"),
        ("medusa", {"budget": 4097}, "budget"),
        ("medusa", {"latencies": [profile(1, 0.1), profile(2, 0.1)]}, "takes one latency profile"),
        ("vllm-schedule", {}, "needs latency profiles"),
        ("vllm-schedule", {"latencies": [profile(2, 0.1), profile(2, 0.1)]}, "same batch size"),
        ("vllm", {"acceptance_model": "joint"}, "independent model only"),
        ("medusa", {"acceptance_model": "joint"}, "no joint counts"),
        ("medusa", {"max_depth": 0}, "max depth"),
        ("medusa", {"draft_s": 0.1}, "latency profile to compare with"),
        ("medusa", {"draft_s": -1.0}, "draft seconds"),
    ],
)
def test_what_cannot_be_answered_is_refused(target, options, problem):
    with pytest.raises(SearchError, match=problem):
        search_for_target(target, table_of([[0.5]]), **{"budget": 8, **options})
