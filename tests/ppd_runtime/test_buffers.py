import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppd_runtime.buffers import StateBuffers, compile_design, plain_buffers
from ppd_runtime.prompt_tokens import MASKS, prompt_visibility
from tests.ppd_runtime.designs import designs, make_design
from treeopt.errors import DecodeError
from treeopt.types import SparseTree


def rows_by_hand(tree: SparseTree, num_epts: int) -> list[tuple[tuple[int, ...], int, int]]:
    """List the rows of a pass as (path, prompt token j, ept); j = 0 is the node itself."""
    rows = [(node.path, 0, 0) for node in tree.nodes]
    for node in tree.nodes:
        rows += [(node.path, j, ept) for j in range(1, node.prompt_tokens + 1) for ept in range(num_epts)]
    return rows


def sees(mine: tuple, other: tuple, mask: str) -> bool:
    """Say from the definition whether a row sees another."""
    (path, j, ept), (other_path, other_j, other_ept) = mine, other
    if other_j == 0:
        return path[: len(other_path)] == other_path
    if j == 0 or path != other_path or other_j > j:
        return False
    if mask == "ensemble":
        return ept == other_ept
    return mask == "encoder" or (other_j, other_ept) <= (j, ept)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_every_row_sees_what_the_definition_says(data: st.DataObject) -> None:
    num_epts = data.draw(st.integers(1, 3))
    mask = data.draw(st.sampled_from(MASKS))
    design = data.draw(designs(e=num_epts))
    m = design.num_distances
    visibility = prompt_visibility(m, num_epts, mask)
    compiled = compile_design(design, num_distances=m, vocab_size=9, num_epts=num_epts, visibility=visibility)
    for tree, buffers in zip(design.trees, compiled, strict=True):
        rows = rows_by_hand(tree, num_epts)
        assert (buffers.size, buffers.num_nodes) == (len(rows), len(tree.nodes))
        for i in range(buffers.pass_tokens):
            for other in range(buffers.pass_tokens):
                expected = sees(rows[i], rows[other], mask) if max(i, other) < len(rows) else i == other
                assert bool(buffers.mask[i, other]) == expected
        assert buffers.offsets[: len(rows)].tolist() == [len(path) + j for path, j, _ in rows]
        assert buffers.prompt_index.tolist() == [(j - 1) * num_epts + ept for _, j, ept in rows if j]
        for v, node in enumerate(tree.nodes):
            first = buffers.prompt_starts[v]
            count = buffers.prompt_counts[v] * num_epts
            assert all(row[0] == node.path and row[1] for row in rows[first : first + count])
            assert buffers.prompt_counts[v] == node.prompt_tokens
            assert [buffers.paths[child] for child in buffers.children[v]] == sorted(
                other.path for other in tree.nodes if other.path and other.path[:-1] == node.path
            )


def test_guessers_that_cost_nothing_get_no_prompt_rows() -> None:
    design = make_design([{(): 2}, {(): 2, (0,): 2}, {(): 2, (0,): 2, (0, 1): 2}], e=0)
    last = compile_design(design, num_distances=2, vocab_size=5, num_epts=0)[2]
    assert (last.size, last.pass_tokens, last.prompt_counts, last.num_ranks) == (3, 3, (2, 2, 2), 2)


def test_plain_decoding_is_one_row() -> None:
    plain: StateBuffers = plain_buffers()
    assert (plain.num_nodes, plain.size, plain.pass_tokens, plain.prompt_counts) == (1, 1, 1, (0,))
    assert torch.equal(plain.mask, torch.ones(1, 1, dtype=torch.bool))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_distances": 3}, "has states 0 to 1, the guesses reach distance 3; search a tree for m = 3"),
        ({"num_epts": 0}, "counts 1 tokens per prompt token, the guesses need 0"),
        ({"vocab_size": 4}, r"states.1 asks for rank 4 in path \[4\], the vocabulary has 4 tokens"),
    ],
)
def test_designs_that_do_not_fit_are_refused(given: dict, message: str) -> None:
    design = make_design([{(): 1}, {(): 1, (4,): 0}])
    with pytest.raises(DecodeError, match=message):
        compile_design(design, **{"num_distances": 1, "vocab_size": 5, "num_epts": 1} | given)
