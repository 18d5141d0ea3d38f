"""Lists of rank paths: Medusa, Hydra, EAGLE-1, TensorRT-LLM."""

import ast

import pytest
from hypothesis import given

from tests.formats.shapes import by_depth, prefix_closed
from treeopt.errors import InvalidValueError
from treeopt.formats import choices
from treeopt.types import SparseTree, TreeDesign


@given(prefix_closed())
def test_medusa_text_reads_back_as_the_same_design(paths):
    text = choices.choices_text(paths)
    design = choices.design_from_paths(choices.paths_from_value(ast.literal_eval(text)))
    assert choices.paths_of_design(design, "medusa") == by_depth(paths)
    assert choices.choices_text(choices.paths_of_design(design, "medusa")) == text


@given(prefix_closed(gaps=False))
def test_eagle_text_reads_back(paths):
    text = choices.eagle_choices_text(paths)
    assert choices.paths_from_value(ast.literal_eval(text)) == by_depth(paths)


@pytest.mark.parametrize(
    ("paths", "rule"),
    [
        ([], "is empty"),
        ([(0, 0)], "lacks its prefix [0]"),
        ([(10,)], "uses rank 10"),
        ([(-1,)], "below 0"),
        ([(0,), (0,)], "repeats [0]"),
        ([()], "lists the root"),
        ([(0,), (0, 0), (0, 0, 0)], "is 3 deep; the model has 2 heads"),
        ([(rank,) for rank in range(10)] * 410, "4095 is the most"),
    ],
)
def test_medusa_names_the_rule_that_is_broken(paths, rule):
    with pytest.raises(InvalidValueError, match="choices") as caught:
        choices.check_choices(paths, num_heads=2)
    assert rule in str(caught.value)


def test_medusa_takes_gaps_and_eagle_names_the_missing_rank():
    paths = [(0,), (0, 2)]
    choices.check_choices(paths)
    with pytest.raises(InvalidValueError, match=r"leaves out \[0, 1\]"):
        choices.check_eagle_choices(paths)
    choices.check_eagle_choices([(0,), (0, 1), (0, 0)])


@pytest.mark.parametrize("value", [3, {"a": 1}, [3], [[0.5]], [[True]], [["0"]]])
def test_other_values_are_no_paths(value):
    with pytest.raises(InvalidValueError, match="choices"):
        choices.paths_from_value(value)


def test_imported_design_has_one_tree_per_state_and_all_guesses_on_every_node():
    design = choices.design_from_paths([(0,), (1,), (0, 0)], num_distances=3)
    assert [tree.depth for tree in design.trees] == [0, 1, 2, 2]
    assert [len(tree.nodes) for tree in design.trees] == [1, 3, 4, 4]
    assert {node.prompt_tokens for tree in design.trees for node in tree.nodes} == {3}
    assert (design.method, design.tokens_per_prompt_token, design.pass_tokens) == ("imported", 0, (1, 3, 4, 4))
    with pytest.raises(InvalidValueError, match="2 deep; there are guesses for 1"):
        choices.design_from_paths([(0,), (0, 0)], num_distances=1)


def test_designs_that_count_on_prompt_tokens_are_refused():
    root, more = SparseTree.from_prompt_tokens({(): 1}), SparseTree.from_prompt_tokens({(): 1, (0,): 1})
    design = TreeDesign((root, more), None, "imported", "tau", None, 1, (2, 4), None, None)
    with pytest.raises(InvalidValueError, match="needs prompt tokens, medusa has none"):
        choices.paths_of_design(design, "medusa")
