"""Acceptance figures of other projects: JetSpec, the PPD authors, Medusa."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treeopt.errors import InvalidValueError
from treeopt.formats import jetspec, medusa_accuracies, ppd
from treeopt.types import AcceptanceTable

rows = st.lists(st.lists(st.floats(0, 0.2), min_size=3, max_size=3), min_size=1, max_size=4)


@given(rows)
def test_jetspec_reads_back(marginals):
    table = AcceptanceTable.from_marginals(marginals, tokens_per_prompt_token=0)
    assert jetspec.table_from_profile(json.loads(jetspec.profile_text(table))) == table


def test_jetspec_shares_of_drafted_nodes_are_turned_into_shares_of_accepted_parents():
    # 10 rounds: 6 accept rank 0 and 2 rank 1 at depth 1; of these 8 parents 4 go on with rank 0.
    meta = {"profile_definition": "..", "accepted_counts": [[6, 2], [4, 0]], "rounds_counted": 10}
    table = jetspec.table_from_profile({"depth_rank_accept": [[0.6, 0.2], [0.1, 0.0]], "meta": meta})
    assert table.marginals == ((0.6, 0.2), (0.5, 0.0))


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ([], "depth_rank_accept"),
        ({"depth_rank_accept": []}, "depth_rank_accept"),
        ({"depth_rank_accept": [[0.9, 0.4]]}, "marginals"),
        ({"depth_rank_accept": [[0.5]], "meta": 3}, "meta"),
        ({"depth_rank_accept": [[0.5]], "meta": {"profile_definition": "x"}}, "meta.profile_definition"),
        ({"depth_rank_accept": [[0.5]], "meta": {"accepted_counts": [[3]], "rounds_counted": 2}}, "accepted_counts"),
        ({"depth_rank_accept": [[0.5]], "meta": {"accepted_counts": [[-1]], "rounds_counted": 2}}, "accepted_counts"),
        ({"depth_rank_accept": [["x"]]}, "marginals"),
    ],
)
def test_jetspec_names_the_field_that_is_wrong(value, place):
    with pytest.raises(InvalidValueError) as caught:
        jetspec.table_from_profile(value)
    assert place in caught.value.field


def test_authors_tree_gets_its_root_and_state_0():
    design = ppd.design_from_trees({1: [[[0], 0.5, 2], [[1], 0.1, 1]], 2: [[[0], 0.3, 1], [[0, 0], 0.2, 2]]})
    held = [{node.path: node.prompt_tokens for node in tree.nodes} for tree in design.trees]
    assert held == [{(): 2}, {(): 2, (0,): 2, (1,): 1}, {(): 2, (0,): 1, (0, 0): 2}]
    assert (design.tokens_per_prompt_token, design.pass_tokens) == (1, (3, 8, 8))


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ([], "dynamic_sparse_trees"),
        ({}, "dynamic_sparse_trees"),
        ({2: []}, "dynamic_sparse_trees"),
        ({1: 3}, "states.1"),
        ({1: [[[0], 0.5]]}, "states.1[0]"),
        ({1: [[[], 0.5, 1]]}, "states.1[0][0]"),
        ({1: [[[-1], 0.5, 1]]}, "states.1[0][0]"),
        ({1: [[[0], math.inf, 1]]}, "states.1[0][1]"),
        ({1: [[[0], 0.5, 0]]}, "states.1[0][2]"),
        ({1: [[[0], 0.5, 2]]}, "states.1[0][2]"),
        ({1: [[[0], 0.5, 1], [[0], 0.5, 1]]}, "states.1[1]"),
        ({1: [[[0, 0], 0.5, 1]]}, "nodes[1]"),
        ({1: [[[0], 0.5, 1], [[0, 0], 0.5, 1]]}, "states.1"),
    ],
)
def test_authors_tree_names_the_entry_that_is_wrong(value, place):
    with pytest.raises(InvalidValueError) as caught:
        ppd.design_from_trees(value)
    assert caught.value.field == place


def test_authors_accuracies_are_shares_of_positions():
    # 4 positions, 1 row, 3 ranks
    first = torch.tensor([[[1, 0, 0]], [[0, 1, 0]], [[1, 0, 0]], [[0, 0, 0]]], dtype=torch.bool)
    second = torch.tensor([[[0, 0, 1]], [[0, 0, 0]]], dtype=torch.bool)
    table = ppd.table_from_accuracies([first, second])
    assert table.marginals == ((0.5, 0.25, 0.0), (0.0, 0.0, 0.5))
    assert table.num_samples == 2


@pytest.mark.parametrize(
    "value",
    [
        [],
        3,
        [torch.zeros(2, 3, dtype=torch.bool)],
        [torch.zeros(2, 1, 3)],
        [torch.ones(2, 1, 3, dtype=torch.bool)],
        [torch.zeros(1, dtype=torch.bool).expand(10**4, 10**4, 10**4)],
        ["abc"],
    ],
)
def test_other_values_are_no_accuracies(value):
    with pytest.raises(InvalidValueError, match="accuracies"):
        ppd.table_from_accuracies(value)


HEADER = "Name,train/medusa0_top1,train/medusa0_top2,train/medusa1_top1,train/medusa1_top2\n"


def test_medusa_accuracies_are_differences():
    tables = medusa_accuracies.tables_from_csv(HEADER + "a,0.5,0.75,0.25,0.25\nb,,,,\na,0.5,0.5,0.5,0.5\n")
    assert list(tables) == ["a", "a-2"]
    assert tables["a"].marginals == ((0.5, 0.25), (0.25, 0.0))
    assert tables["a"].tokens_per_prompt_token == 0


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("Name,loss\na,1\n", "no columns like"),
        ("Name,medusa0_top2\na,1\n", "lacks the column medusa0_top1"),
        ("Name,medusa0_top1,medusa1_top1,medusa1_top2\na,1\n", "lacks the column medusa0_top2"),
        (HEADER, "no row"),
        (HEADER + "a,0.5,0.4,0.1,0.1\n", "accuracies are cumulative"),
        (HEADER + "a,x,0.4,0.1,0.1\n", "give a number"),
        (HEADER + "a,nan,0.4,0.1,0.1\n", "cumulative"),
        (HEADER + "a,0.5,1.4,0.1,0.1\n", "marginals"),
        (HEADER + 'a,"' + "9" * 200_000 + '",1,1,1\n', "cannot be parsed"),
    ],
)
def test_medusa_accuracies_name_what_is_wrong(text, rule):
    with pytest.raises(InvalidValueError) as caught:
        medusa_accuracies.tables_from_csv(text)
    assert rule in str(caught.value)
