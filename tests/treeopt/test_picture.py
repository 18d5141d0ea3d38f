"""Nothing in the figure of a design overlaps, whatever the tree."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection
from matplotlib.colors import to_rgba
from matplotlib.text import Text

from treeopt import AcceptanceTable, SparseTree, TreeDesign, search
from treeopt.acceptance import acceptance_trie
from treeopt.bundled import load_acceptance
from treeopt.layout import tree_layout
from treeopt.picture import design_figure
from treeopt.plot import BLUE, ORANGE, save_figure

DEEP = AcceptanceTable.from_marginals(
    [[0.62, 0.12, 0.06], [0.5, 0.1, 0.1], [0.4, 0.1, 0.1], [0.4, 0.1, 0], [0.3, 0.1, 0]]
)


@st.composite
def trees(draw: st.DrawFn) -> SparseTree:
    paths = draw(st.lists(st.lists(st.integers(0, 4), max_size=4).map(tuple), max_size=12))
    closed = {path[:i] for path in [(), *paths] for i in range(len(path) + 1)}
    return SparseTree.from_prompt_tokens({path: draw(st.integers(0, 3)) for path in sorted(closed)})


@given(trees(), st.booleans())
def test_no_two_parts_share_a_place(tree: SparseTree, draw_prompts: bool) -> None:
    layout = tree_layout(tree, draw_prompts)
    places = [(node.depth, layout.column[node.path]) for node in tree.nodes]
    if draw_prompts:
        for node in tree.nodes:
            places += [(node.depth + i, layout.chain[node.path]) for i in range(1, node.prompt_tokens + 1)]
    for level in range(layout.num_levels):
        columns = sorted(column for depth, column in places if depth == level)
        assert all(right - left >= 1 for left, right in itertools.pairwise(columns))
        assert columns
        assert 0 <= columns[0] <= columns[-1] <= layout.num_columns - 1
    assert max(depth for depth, _ in places) == layout.num_levels - 1


@given(trees())
def test_children_stand_below_their_parent_in_the_order_of_their_ranks(tree: SparseTree) -> None:
    column = tree_layout(tree, draw_prompts=True).column
    for node in tree.nodes:
        below = [column[other.path] for other in tree.nodes if other.path[:-1] == node.path and other.path]
        assert below == sorted(below)
        if below and node.prompt_tokens == 0:
            assert column[node.path] == pytest.approx((below[0] + below[-1]) / 2)


def design_and_table(name: str, budget: int) -> tuple[TreeDesign, AcceptanceTable]:
    table = DEEP if name == "m = 5" else load_acceptance(name)[0]
    return search(table, budget), table


@pytest.mark.parametrize(
    ("name", "budget"), [("vicuna-7b-m3", 64), ("vicuna-68m-m3", 64), ("vicuna-7b-m2", 1), ("m = 5", 64)]
)
def test_texts_overlap_neither_each_other_nor_the_edge(name: str, budget: int) -> None:
    design, table = design_and_table(name, budget)
    figure = design_figure(design, acceptance_trie(table), model=table.model)
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    texts = [text for text in dict.fromkeys(figure.findobj(Text)) if text.get_text().strip()]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts if text.get_visible()]
    assert len(boxes) > 5
    for (one, box), (other, second) in itertools.combinations(boxes, 2):
        assert not box.padded(-0.5).overlaps(second.padded(-0.5)), (one, other)
    for text, box in boxes:
        assert figure.bbox.contains(box.x0, box.y0), text
        assert figure.bbox.contains(box.x1, box.y1), text


def test_one_panel_per_state_with_every_node_and_prompt_token() -> None:
    design, table = design_and_table("vicuna-7b-m3", 32)
    figure = design_figure(design, acceptance_trie(table))
    assert len(figure.axes) == 4
    for axes, tree in zip(figure.axes, design.trees, strict=True):
        drawn = {line.get_marker(): line for line in axes.lines}
        assert len(drawn["o"].get_xdata()) == tree.num_candidates
        assert len(drawn["D"].get_xdata()) == tree.num_prompt_tokens
        assert (drawn["o"].get_color(), drawn["D"].get_color()) == (BLUE, ORANGE)
        ranks = sorted(int(t.get_text()) for t in axes.texts if t.get_text().isdigit() and t.get_color() == "white")
        assert ranks == sorted(node.path[-1] for node in tree.nodes[1:])


def test_line_widths_grow_with_path_probability() -> None:
    table = AcceptanceTable.from_marginals([[0.6, 0.3], [0.5, 0.1]])
    figure = design_figure(search(table, 12), acceptance_trie(table), [2])
    edges = [
        lines
        for lines in figure.axes[0].collections
        if isinstance(lines, PathCollection) and not (lines.get_edgecolor() == to_rgba(ORANGE)).all()
    ]
    widths = sorted(edges[0].get_linewidths())
    design = search(table, 12)
    assert len(widths) == design.trees[2].num_candidates
    assert widths[-2] / widths[-1] == pytest.approx(0.5)  # .3 and .6


def test_without_a_table_no_probability_is_shown() -> None:
    figure = design_figure(search(DEEP, 12))
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert not any("f =" in text or "%" in text for text in texts)


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_same_design_same_bytes(suffix: str, tmp_path: Path) -> None:
    design, table = design_and_table("vicuna-7b-m3", 16)
    for name in ("a", "b"):
        save_figure(design_figure(design, acceptance_trie(table)), tmp_path / f"{name}.{suffix}")
    assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()
