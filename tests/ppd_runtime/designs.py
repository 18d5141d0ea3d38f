"""Tree designs for tests, given as path -> prompt tokens, and random ones."""

from collections.abc import Mapping, Sequence

from hypothesis import strategies as st

from treeopt.types import SparseTree, TreeDesign

Tree = Mapping[tuple[int, ...], int]


def make_design(trees: Sequence[Tree], *, e: int = 1, padding: int = 0) -> TreeDesign:
    """Build a design from one mapping per state, each pass padded by some rows."""
    built = tuple(SparseTree.from_prompt_tokens(tree) for tree in trees)
    return TreeDesign(
        trees=built,
        budget=None,
        method="imported",
        objective="tau",
        acceptance_model=None,
        tokens_per_prompt_token=e,
        pass_tokens=tuple(tree.size(e) + padding for tree in built),
        acceptance_length=None,
        upper_bound=None,
    )


def uniform_design(m: int, paths: Sequence[tuple[int, ...]], *, e: int = 1, padding: int = 0) -> TreeDesign:
    """Every state has the paths that fit its depth; every node carries m prompt tokens."""
    return make_design(
        [{(): m} | {path: m for path in paths if len(path) <= k} for k in range(m + 1)], e=e, padding=padding
    )


DEEP = uniform_design(3, [(0,), (0, 0), (0, 0, 0), (1,), (0, 1), (1, 0), (1, 0, 0)])
WIDE = make_design(
    [{(): 3}, {(): 3} | {(r,): r % 4 for r in range(9)}]
    + [{(): 3} | {(r,): 1 for r in range(12)} | {(0, r): 2 for r in range(3)}] * 2,
    padding=2,
)
CHAIN = uniform_design(3, [(0,), (0, 0), (0, 0, 0)])
EMPTY = make_design([{(): 0}] * 4)
DESIGNS = {"deep": DEEP, "wide": WIDE, "chain": CHAIN, "empty": EMPTY}


@st.composite
def designs(draw: st.DrawFn, *, max_m: int = 3, max_nodes: int = 9, max_rank: int = 4, e: int = 1) -> TreeDesign:
    """Draw a design with trees of any shape and any prompt tokens on any node."""
    m = draw(st.integers(1, max_m))
    trees: list[Tree] = []
    for k in range(m + 1):
        tree: dict[tuple[int, ...], int] = {(): m if e == 0 else draw(st.integers(0, m))}
        for _ in range(draw(st.integers(0, max_nodes)) if k else 0):
            parent = draw(st.sampled_from(sorted(path for path in tree if len(path) < k)))
            tree[(*parent, draw(st.integers(0, max_rank)))] = m if e == 0 else draw(st.integers(0, m))
        trees.append(tree)
    return make_design(trees, e=e, padding=draw(st.integers(0, 2)))
