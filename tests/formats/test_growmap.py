"""Sequoia's and UMbreLLa's growmaps."""

import copy
import io
import json

import pytest
import torch
from hypothesis import given

from tests.formats.shapes import by_depth, prefix_closed
from treeopt.errors import InvalidValueError
from treeopt.formats import growmap

PATHS = [(0,), (1,), (0, 0), (0, 1), (1, 0)]


@given(prefix_closed(gaps=False))
def test_text_reads_back(paths):
    assert growmap.paths_from_growmap(json.loads(growmap.growmap_text(paths))) == by_depth(paths)


@given(prefix_closed(gaps=False))
def test_bytes_read_back_as_the_same_tree_with_tensors(paths):
    value = torch.load(io.BytesIO(growmap.growmap_bytes(paths)), weights_only=True)
    assert value["mask"].dtype == value["depth"].dtype == torch.int64
    assert growmap.paths_from_growmap(value) == by_depth(paths)


def test_every_field_of_a_small_tree():
    assert growmap.growmap(PATHS) == {
        "roots": [[0], [1, 2], [3, 4, 5]],
        "branches": [[2], [2, 1], [0, 0, 0]],
        "Successors": [[1, 2], [3, 4], [5], [], [], []],
        "mask": [
            [1, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0],
            [1, 0, 1, 0, 0, 0],
            [1, 1, 0, 1, 0, 0],
            [1, 1, 0, 0, 1, 0],
            [1, 0, 1, 0, 0, 1],
        ],
        "depth": [0, 1, 1, 2, 2, 2],
        "size": 6,
    }
    assert growmap.paths_from_growmap(growmap.growmap([])) == []


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("roots", [[0], [1, 2], [3, 4]]),
        ("roots", 5),
        ("branches", [[2], [1, 2], [0, 0, 0]]),
        ("Successors", [[1, 2], [4, 3], [5], [], [], []]),
        ("Successors", [[1, 2], [], [], [], [], []]),
        ("Successors", [[1], [2], [3], [4], [5], [6]]),
        ("Successors", [[1, 2], [3, 4], "5", [], [], []]),
        ("Successors", []),
        ("mask", [[1] * 6] * 6),
        ("mask", [[1]]),
        ("mask", torch.ones(1).expand(10**6, 10**6)),
        ("depth", [0, 1, 1, 2, 2, 3]),
        ("depth", [0, 1, 1, 2, 2, 2.0]),
        ("size", 5),
        ("size", True),
    ],
)
def test_names_the_field_that_is_wrong(field, wrong):
    value = copy.deepcopy(growmap.growmap(PATHS))
    growmap.paths_from_growmap(value)
    with pytest.raises(InvalidValueError) as caught:
        growmap.paths_from_growmap({**value, field: wrong})
    assert caught.value.field.startswith(field)
    del value[field]
    with pytest.raises(InvalidValueError, match=f"{field}: is missing"):
        growmap.paths_from_growmap(value)


@pytest.mark.parametrize(("paths", "rule"), [([(0,), (2,)], "leaves out"), ([(0, 0)], "lacks its prefix")])
def test_trees_that_have_no_growmap(paths, rule):
    with pytest.raises(InvalidValueError, match=rule):
        growmap.growmap(paths)


def test_vector_drops_its_ends():
    table = growmap.table_from_vector(torch.tensor([0.9, 0.5, 0.25, 0.8]), 3)
    assert table.marginals == ((0.5, 0.25),) * 3
    assert table.tokens_per_prompt_token == 0


@pytest.mark.parametrize(
    "vector", [torch.ones(2, 3), [0.1, 0.2], torch.zeros(1).expand(10**12), [0.0, float("nan"), 0.0], "abc"]
)
def test_other_values_are_no_vector(vector):
    with pytest.raises(InvalidValueError, match="acceptance vector"):
        growmap.table_from_vector(vector, 2)
