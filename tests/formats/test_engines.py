"""vLLM, SGLang, TensorRT-LLM and llama.cpp: each validator broken rule by rule."""

import ast
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeopt.errors import InvalidValueError
from treeopt.formats import choices, llama_cpp, sglang, tensorrt_llm, vllm
from treeopt.types import LatencyProfile


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_vllm_tree_reads_back(widths):
    paths = vllm.uniform_paths(widths)
    text = vllm.token_tree_text(paths, len(paths))
    assert choices.paths_from_value(ast.literal_eval(text)) == paths
    vllm.check_token_tree(ast.literal_eval(text), len(paths))


@pytest.mark.parametrize(
    ("paths", "rule"),
    [
        ([], "is empty"),
        ([()], "lists the root"),
        ([(1,), (0,)], "sorted by depth"),
        ([(0,), (0,)], "sorted by depth"),
        ([(0, 0)], "lacks its prefix"),
        ([(0,), (2,)], "leaves out [1]"),
        ([(-1,), (0,)], "below 0"),
        ([(0,), (1,), (0, 0)], "nodes at depth 1 have [0, 1] children"),
    ],
)
def test_vllm_tree_names_the_rule_that_is_broken(paths, rule):
    with pytest.raises(InvalidValueError) as caught:
        vllm.check_token_tree(paths)
    assert rule in str(caught.value)


def test_vllm_tree_must_have_as_many_nodes_as_tokens():
    with pytest.raises(InvalidValueError, match="is 3; the tree has 2 nodes"):
        vllm.check_token_tree([(0,), (0, 0)], 3)


@pytest.mark.parametrize(
    ("ranges", "rule"),
    [
        ([], "is empty"),
        ([[1, 2]], "three whole numbers"),
        ([[1, 2, 0.5]], "three whole numbers"),
        ([[2, 4, 1]], "must start at 1"),
        ([[1, 4, 2], [4, 8, 1]], "inside or before"),
        ([[1, 4, 2], [8, 6, 1]], "before it starts"),
        ([[1, 4, -1]], "0 is the least"),
        ([[1, 4, 6]], "num_speculative_tokens allows 5"),
    ],
)
def test_vllm_ranges_name_the_rule_that_is_broken(ranges, rule):
    with pytest.raises(InvalidValueError, match="num_speculative_tokens_per_batch_size") as caught:
        vllm.check_batch_ranges(ranges, 5)
    assert rule in str(caught.value)


def test_vllm_ranges_are_json():
    assert json.loads(vllm.batch_ranges_text([(1, 4, 5), (5, 16, 0)], 5)) == [[1, 4, 5], [5, 16, 0]]


def test_sglang_pool():
    # Level 1 has topk candidates, each later one topk for each of the topk nodes kept.
    assert [sglang.pool_size(steps, 3) for steps in (1, 2, 3)] == [3, 12, 21]
    sglang.EagleFlags(2, 3, 13)


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        ((0, 2, 2), "num_steps: is 0"),
        ((1, 0, 2), "topk: is 0"),
        ((2, 2, 1), "num_draft_tokens: is 1"),
        ((3, 1, 5), "it must be 4"),
        ((2, 3, 14), "draft only 12 candidates"),
    ],
)
def test_sglang_flags_name_the_rule_that_is_broken(flags, rule):
    with pytest.raises(InvalidValueError) as caught:
        sglang.EagleFlags(*flags)
    assert rule in str(caught.value)


@pytest.mark.parametrize(
    ("table", "rule"),
    [
        (((), (), 1), "is empty"),
        (((0,), (1.0,), 1), "starts at 0"),
        (((2, 2), (1.0, 1.0), 2), "strictly increasing"),
        (((1, 2), (1.0,), 2), "has 1 entries"),
        (((1,), (0.0,), 1), "finite and above 0"),
        (((1,), (float("nan"),), 1), "finite and above 0"),
        (((1, 8), (2.0, 1.0), 7), "below the largest sample 8"),
    ],
)
def test_dspark_table_names_the_rule_that_is_broken(table, rule):
    with pytest.raises(InvalidValueError) as caught:
        sglang.StepsTable(*table)
    assert rule in str(caught.value)


def test_dspark_table_joins_batch_sizes_and_takes_the_slower():
    one = LatencyProfile.from_medians({1: 0.5, 4: 1.0})
    four = replace(LatencyProfile.from_medians({1: 0.8, 2: 2.0}), batch_size=4)
    assert json.loads(sglang.steps_table([one, four]).text()) == {
        "sample_batch_tokens": [1, 4, 8],
        "sample_steps_per_sec": [2.0, 1.0, 0.5],
        "max_batch_tokens": 8,
    }


@pytest.mark.parametrize(
    ("tree", "rule"),
    [
        ((0, 1, 1), "max_draft_len: is 0"),
        ((1, 1, 0), "dynamic_tree_max_topK: is 0"),
        ((3, 2, 4), "at least max_draft_len, 3"),
        ((3, 13, 4), "at most topK * max_draft_len, 12"),
    ],
)
def test_tensorrt_llm_names_the_rule_that_is_broken(tree, rule):
    with pytest.raises(InvalidValueError) as caught:
        tensorrt_llm.DynamicTree(*tree)
    assert rule in str(caught.value)


def test_tensorrt_llm_settings_are_json_and_python():
    text = tensorrt_llm.DynamicTree(3, 12, 4).text()
    wanted = {"max_draft_len": 3, "max_total_draft_tokens": 12, "dynamic_tree_max_topK": 4}
    assert json.loads(text) == ast.literal_eval(text) == wanted


@pytest.mark.parametrize(
    ("schedule", "rule"),
    [
        ({}, "is empty"),
        ({8: 1, 4: 3}, "sorted by batch size"),
        ({0: 3}, "batch size 0"),
        ({1: 3, 4: -1}, "0 is the least"),
        ({1: 2, 4: 1}, "must equal max_draft_len, 3"),
        ({1: 3, 4: 4}, "above max_draft_len, 3"),
    ],
)
def test_schedule_names_the_rule_that_is_broken(schedule, rule):
    with pytest.raises(InvalidValueError, match="draft_len_schedule") as caught:
        tensorrt_llm.check_schedule(schedule, 3)
    assert rule in str(caught.value)


@given(st.dictionaries(st.integers(1, 512), st.integers(0, 5), min_size=1, max_size=5))
def test_schedule_reads_back(lengths):
    schedule = dict(sorted(lengths.items()))
    schedule[min(schedule)] = 5
    assert ast.literal_eval(tensorrt_llm.schedule_text(schedule, 5)) == schedule


@pytest.mark.parametrize(
    ("flags", "rule"), [((0, 0.5), "spec-draft-n-max"), ((1, 1.5), "p-min"), ((1, float("nan")), "p-min")]
)
def test_llama_cpp_names_the_rule_that_is_broken(flags, rule):
    with pytest.raises(InvalidValueError, match=rule):
        llama_cpp.DraftFlags(*flags)


def test_batch_costs_are_per_token_and_stop_at_the_first_gap():
    profile = LatencyProfile.from_medians({1: 0.1, 2: 0.12, 3: 0.15, 5: 0.2})
    assert llama_cpp.batch_costs_text(llama_cpp.batch_costs(profile)) == "1,0.6,0.5"
    with pytest.raises(InvalidValueError, match="batch size 1"):
        llama_cpp.batch_costs(replace(profile, batch_size=2))


@pytest.mark.parametrize("costs", [[], [0.5], [1, 0.0], [1, float("inf")]])
def test_batch_costs_name_the_rule_that_is_broken(costs):
    with pytest.raises(InvalidValueError, match="GGML_BATCH_COSTS"):
        llama_cpp.check_batch_costs(costs)
