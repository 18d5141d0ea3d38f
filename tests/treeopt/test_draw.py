"""The terminal drawing says what the tree is: it can be read back."""

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeopt import AcceptanceTable, SparseTree, TreeDesign, search
from treeopt.acceptance import acceptance_trie
from treeopt.draw import describe_design, draw_design
from treeopt.errors import InvalidValueError
from treeopt.markov import evaluate_design

TABLE = AcceptanceTable.from_marginals([[0.6, 0.2], [0.5, 0.1]])


def imported(*trees: dict[tuple[int, ...], int], pass_tokens: tuple[int, ...] | None = None, e: int = 1) -> TreeDesign:
    """A design of given trees, as other engines' trees come in."""
    built = tuple(SparseTree.from_prompt_tokens(tree) for tree in trees)
    return TreeDesign(
        trees=built,
        budget=None,
        method="imported",
        objective="tau",
        acceptance_model=None,
        tokens_per_prompt_token=e,
        pass_tokens=pass_tokens or tuple(tree.size(e) for tree in built),
        acceptance_length=None,
        upper_bound=None,
    )


WORKED = imported({(): 2}, {(): 2, (0,): 1, (1,): 1}, {(): 2, (0,): 2, (0, 0): 1, (1,): 1})


@st.composite
def designs(draw: st.DrawFn) -> TreeDesign:
    m = draw(st.integers(1, 5))
    num_ranks = draw(st.integers(1, 12))
    shares = np.array(draw(st.lists(st.floats(0.01, 1), min_size=m * num_ranks, max_size=m * num_ranks)))
    rows = shares.reshape(m, num_ranks)
    rows = rows / rows.sum(axis=1, keepdims=True) * draw(st.floats(0.1, 1))
    return search(AcceptanceTable.from_marginals(rows.tolist()), draw(st.integers(1, 60)))


def read_back(block: str) -> SparseTree:
    """Read one state's ASCII drawing: three columns of branches per depth, stars for prompt tokens."""
    lines = block.splitlines()
    lines = lines[lines.index(next(line for line in lines if line.startswith("rank"))) + 1 :]
    prompt_tokens: dict[tuple[int, ...], int] = {(): lines[0].count("*")}
    path: list[int] = []
    for line in lines[1:]:
        branch = re.match(r"((?:\|  |   )*)[+`]- (\d+)", line)
        assert branch is not None, line
        path = [*path[: len(branch[1]) // 3], int(branch[2])]
        prompt_tokens[tuple(path)] = line.count("*")
    return SparseTree.from_prompt_tokens(prompt_tokens)


def test_worked_example_with_probabilities() -> None:
    # Path probabilities 1, .6, .3, .2; each less its children's: .2, .3, .3, .2. The chain spends 2/7 in state 2.
    assert draw_design(WORKED, acceptance_trie(TABLE), [2]) == "\n".join(
        (
            "State 2",
            "  10 tokens = root + 3 candidates + 6 prompt tokens; depth 2",
            "  f = 2.1000 tokens/step; used in 28.6 % of steps",
            "rank        prompt tokens  path probability  exit probability",
            "root        ◆◆                     100.00 %           20.00 %",
            "├─ 0        ◆◆                      60.00 %           30.00 %",
            "│  └─ 0     ◆                       30.00 %           30.00 %",
            "└─ 1        ◆                       20.00 %           20.00 %",
        )
    )


def test_states_with_the_same_tree_are_merged_and_said_so() -> None:
    tree = {(): 2, (0,): 1}
    text = draw_design(imported({(): 2}, tree, tree), acceptance_trie(TABLE))
    assert text.count("rank ") == 2
    assert "States 1 and 2 (the same tree)" in text
    assert "used in 60.0 % and 40.0 % of steps" in text  # p(1|1) = p(1|2) = .6


@given(designs())
def test_the_drawing_can_be_read_back_and_fits_80_columns(design: TreeDesign) -> None:
    for k, tree in enumerate(design.trees):
        block = draw_design(design, states=[k], ascii_only=True)
        assert block.isascii()
        assert read_back(block) == tree
        same = draw_design(design, states=[k]).translate(str.maketrans("├└│─◆", "+`|-*"))
        assert same == block
        assert max(map(len, block.splitlines())) <= 80


def test_probabilities_of_deep_trees_fit_80_columns() -> None:
    table = AcceptanceTable.from_marginals([[0.9, 0.05]] * 10)
    design = search(table, 100)
    assert design.trees[10].depth == 10
    assert max(map(len, draw_design(design, acceptance_trie(table)).splitlines())) <= 80


def test_free_guesses_and_padding_are_said() -> None:
    free = imported({(): 2}, {(): 2, (0,): 2}, {(): 2, (0,): 2}, e=0)
    assert "no prompt tokens needed: every node has all 2 guesses for free" in draw_design(free, states=[1])
    assert "1 token = root + 0 candidates; depth 0" in draw_design(free, states=[0])
    padded = imported({(): 2}, {(): 2, (0,): 1}, {(): 2}, pass_tokens=(4, 5, 8))
    assert "padded to 8 tokens" in draw_design(padded, states=[2])
    assert "padded" not in draw_design(padded, states=[1])
    ensemble = draw_design(imported({(): 1}, {(): 1, (0,): 1}, e=2), states=[1])
    assert "6 tokens = root + 1 candidate + 2 x 2 prompt tokens" in ensemble


def test_description_holds_the_trees_and_their_probabilities() -> None:
    table = AcceptanceTable.from_marginals([[0.6, 0.2], [0.5, 0.1], [0.3, 0.2]])
    design, trie = search(table, 20), acceptance_trie(table)
    described = json.loads(json.dumps(describe_design(design, trie)))
    evaluation = evaluate_design(trie, design)
    assert described["evaluated"] == {"acceptance_model": "independent", "acceptance_length": design.acceptance_length}
    for k, state in enumerate(described["states"]):
        nodes = {tuple(node["path"]): node["prompt_tokens"] for node in state["nodes"]}
        assert SparseTree.from_prompt_tokens(nodes) == design.trees[k]
        assert (state["size"], state["expected_tokens"], state["occupancy"]) == (
            design.sizes()[k],
            evaluation.expected_tokens[k],
            evaluation.occupancy[k],
        )
        assert sum(node["path_probability"] for node in state["nodes"]) == pytest.approx(state["expected_tokens"])
        assert sum(node["exit_probability"] for node in state["nodes"]) == pytest.approx(1)


def test_description_names_the_state_whose_tree_is_the_same() -> None:
    tree = {(): 2, (0,): 1}
    described = describe_design(imported({(): 2}, tree, tree), states=[2])
    assert [(s["state"], s["same_tree_as_state"]) for s in described["states"]] == [(2, 1)]
    assert "expected_tokens" not in described["states"][0]


@pytest.mark.parametrize("state", [-1, 3])
def test_a_state_the_design_lacks_is_refused(state: int) -> None:
    with pytest.raises(InvalidValueError, match="state: must be 0 to 2"):
        draw_design(WORKED, states=[state])
    with pytest.raises(InvalidValueError, match="state: must be 0 to 2"):
        describe_design(WORKED, states=[state])
