"""A design as a figure: one panel per state, drawn as the forward pass sees it.

The vertical position is the token position past the root. A candidate of depth d stands at +d, its children at +(d+1),
and so does the first prompt token of its chain, because that is the position it is embedded at. Reading the best-ranked
path means following the left edge of the tree; line widths and labels are path probabilities.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.path import Path as Outline

from treeopt.acceptance import AcceptanceTrie
from treeopt.draw import checked_states, counted
from treeopt.layout import TreeLayout, tree_layout
from treeopt.markov import Evaluation, evaluate_design, path_probabilities
from treeopt.plot import BLUE, GREY, INK, ORANGE, plain_style
from treeopt.types import SparseTree, TreeDesign

__all__ = ["design_figure"]

Path = tuple[int, ...]
Point = tuple[float, float]

# Inches, at full scale. Trees wider than _FULL_WIDTH are drawn with everything on their columns scaled down.
_COLUMN, _LEVEL = 0.45, 0.53
_FULL_WIDTH = 30.0
_ROW_WIDTH = 11.2
_LEAST_PAGE = 8.6
_LEAST_PANEL = 3.3
_MARGIN, _AXIS, _GAP, _TITLE, _ROW_GAP = 0.25, 0.45, 0.35, 0.72, 0.12
_HEADER, _LEGEND = 0.85, 0.5

_EDGE, _BAND = "#9CC3E0", "#F4F4F2"
_BEND = [Outline.MOVETO, Outline.CURVE4, Outline.CURVE4, Outline.CURVE4]
_DPI = 150
_LONGEST_NAME = 40
"""Characters of a model's name that the narrowest page has room for."""


@dataclass(frozen=True, slots=True)
class _Box:
    """One panel's place on the page: state, layout, row, left edge and width in inches."""

    state: int
    layout: TreeLayout
    row: int
    left: float
    width: float


def _pack(layouts: dict[int, TreeLayout], column: float) -> list[_Box]:
    """Fill rows with panels in the order of the states; the last panel of a row reaches the right edge of the page."""
    widths = {k: max(_LEAST_PANEL, layout.num_columns * column) for k, layout in layouts.items()}
    room = max(_ROW_WIDTH, *widths.values())
    rows: list[list[_Box]] = [[]]
    for k, layout in layouts.items():
        left = rows[-1][-1].left + rows[-1][-1].width + _GAP if rows[-1] else 0.0
        if left and left + widths[k] > room:
            rows.append([])
            left = 0.0
        rows[-1].append(_Box(k, layout, len(rows) - 1, left, widths[k]))
    page = max(_LEAST_PAGE, *(row[-1].left + row[-1].width for row in rows))
    return [box for row in rows for box in (*row[:-1], replace(row[-1], width=page - row[-1].left))]


def design_figure(
    design: TreeDesign,
    trie: AcceptanceTrie | None = None,
    states: Sequence[int] | None = None,
    *,
    model: str | None = None,
) -> Figure:
    """Draw a design, one panel per state.

    Parameters
    ----------
    design : TreeDesign
        The design.
    trie : AcceptanceTrie, optional
        Adds path probabilities, as line widths and as labels in per cent, and every state's f and occupancy.
    states : sequence of int, optional
        The states wanted; all without it.
    model : str, optional
        Name of the model for the title.

    Returns
    -------
    Figure
        Grows with the trees; candidates are blue circles with their rank, prompt tokens orange diamonds.

    Raises
    ------
    InvalidValueError
        When the design has no such state, or does not fit the table.
    """
    wanted = checked_states(design, states)
    evaluation = None if trie is None else evaluate_design(trie, design)
    layouts = {k: tree_layout(design.trees[k], design.tokens_per_prompt_token > 0) for k in wanted}
    column = min(_COLUMN, _FULL_WIDTH / max(layout.num_columns for layout in layouts.values()))
    boxes = _pack(layouts, column)
    heights = [
        _TITLE + _LEVEL * max(box.layout.num_levels for box in boxes if box.row == row) + _ROW_GAP
        for row in range(boxes[-1].row + 1)
    ]
    width = 2 * _MARGIN + _AXIS + boxes[-1].left + boxes[-1].width
    height = _HEADER + sum(heights) + _LEGEND
    with plain_style():
        figure = Figure(figsize=(width, height), dpi=_DPI, facecolor="white")
        _write_header(figure, design, evaluation, trie, model)
        for box in boxes:
            top = _HEADER + sum(heights[: box.row])
            levels = max(other.layout.num_levels for other in boxes if other.row == box.row)
            bottom = height - top - _TITLE - _LEVEL * levels
            axes = figure.add_axes(
                (
                    (_MARGIN + _AXIS + box.left) / width,
                    bottom / height,
                    box.width / width,
                    _LEVEL * levels / height,
                )
            )
            _set_axes(axes, box, column, levels)
            _write_panel_title(axes, design, box.state, evaluation)
            _draw_tree(axes, design.trees[box.state], box.layout, trie, column / _COLUMN)
        _add_legend(figure, design, trie)
        return figure


def _write_header(
    figure: Figure, design: TreeDesign, evaluation: Evaluation | None, trie: AcceptanceTrie | None, model: str | None
) -> None:
    width, height = figure.get_size_inches()
    budget = "" if design.budget is None else f" for a budget of {counted(design.budget, 'token')} per forward pass"
    kind = {"exact": "Best speculation trees", "imported": "Imported speculation trees"}
    title = kind.get(design.method, f"{design.method.capitalize()} speculation trees") + budget
    parts = [] if model is None else [model if len(model) <= _LONGEST_NAME else model[:_LONGEST_NAME] + "…"]
    if evaluation is not None and trie is not None:
        parts.append(f"acceptance length {evaluation.acceptance_length:.3f} tokens per step")
        parts.append(f"under the {trie.name} acceptance model")
    elif design.acceptance_length is not None:
        parts.append(f"acceptance length {design.acceptance_length:.3f} tokens per step")
        if design.acceptance_model is not None:
            parts.append(f"under the {design.acceptance_model} acceptance model")
    figure.text(_MARGIN / width, 1 - 0.2 / height, title, size=15, weight="bold", color=INK, va="top")
    figure.text(
        _MARGIN / width, 1 - 0.54 / height, "  ·  ".join(parts), size=10, color=GREY, va="top", parse_math=False
    )


def _set_axes(axes: Axes, box: _Box, column: float, levels: int) -> None:
    """Columns and levels as data units; a faint band behind every second level."""
    span = box.width / column
    slack = span - box.layout.num_columns
    axes.set_xlim(-0.5 - slack / 2, box.layout.num_columns - 0.5 + slack / 2)
    axes.set_ylim(levels - 0.5, -0.5)
    for level in range(0, levels, 2):
        axes.axhspan(level - 0.5, level + 0.5, color=_BAND, linewidth=0, zorder=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_xticks([])
    axes.set_yticks(range(levels) if box.left == 0 else [])
    axes.set_yticklabels(["0", *(f"+{level}" for level in range(1, levels))] if box.left == 0 else [])
    axes.tick_params(axis="y", length=0, labelsize=8, labelcolor=GREY, pad=3)
    if box.left == 0:
        # Low panels have no room for the long name.
        label = "position past root (tokens)" if levels > 2 else "position\n(tokens)"
        axes.set_ylabel(label, size=8 if levels > 2 else 6.5, color=GREY, labelpad=2)


def _write_panel_title(axes: Axes, design: TreeDesign, state: int, evaluation: Evaluation | None) -> None:
    tree, e = design.trees[state], design.tokens_per_prompt_token
    same = [k for k in range(state) if design.trees[k] == tree]
    name = f"State {state}" + (f" (same tree as state {same[0]})" if same else "")
    prompts = f" + {'' if e == 1 else f'{e} × '}{counted(tree.num_prompt_tokens, 'prompt token')}" if e else ""
    lines = [f"{counted(tree.size(e), 'token')} = root + {counted(tree.num_candidates, 'candidate')}{prompts}"]
    if evaluation is not None:
        lines.append(
            f"f = {evaluation.expected_tokens[state]:.3f} tokens/step, "
            f"{100 * evaluation.occupancy[state]:.1f} % of steps"
        )
    axes.annotate(
        name, (0, 1), (0, 34 if len(lines) == 2 else 22), xycoords="axes fraction", textcoords="offset points",
        size=11, weight="bold", color=INK, va="bottom",
    )  # fmt: skip
    axes.annotate(
        "\n".join(lines), (0, 1), (0, 7), xycoords="axes fraction", textcoords="offset points",
        size=8.5, color=GREY, va="bottom", linespacing=1.3,
    )  # fmt: skip


def _draw_tree(axes: Axes, tree: SparseTree, layout: TreeLayout, trie: AcceptanceTrie | None, scale: float) -> None:
    """Draw lines, then markers over them, then texts; each kind at once, since trees may have thousands of nodes."""
    place = {node.path: (layout.column[node.path], float(node.depth)) for node in tree.nodes}
    reach = dict.fromkeys(place, 0.1)
    if trie is not None:
        reach = dict(zip(place, path_probabilities(trie, tree).tolist(), strict=True))
    chains, prompts = _chain_parts(tree, layout)
    _draw_lines(axes, chains, ORANGE, [1.1 * scale] * len(chains), zorder=1, linestyle=(0, (2, 1.5)))
    edges = [Outline(_bend(place[path[:-1]], place[path]), _BEND) for path in place if path]
    widths = [_line_width(reach[path]) * scale for path in place if path]
    _draw_lines(axes, edges, _EDGE, widths, zorder=2)
    _draw_markers(axes, prompts, "D", ORANGE, 7 * scale)
    _draw_markers(axes, [place[path] for path in place if path], "o", BLUE, 16.5 * scale)
    _draw_markers(axes, [place[()]], "s", INK, 18 * scale)
    for path, (x, y) in place.items():
        text = str(path[-1]) if path else "root"
        size = (9 if len(text) == 1 else 7.5 if len(text) == 2 else 5.6) * scale
        axes.text(x, y, text, size=size, color="white", ha="center", va="center_baseline", zorder=4)
        if path and trie is not None:
            axes.text(
                x, y - 0.385, _percent(reach[path]), size=6.6 * scale, color=INK, ha="center", va="center", zorder=4,
                bbox={"facecolor": "white", "linewidth": 0, "pad": 0.6 * scale, "alpha": 0.85},
            )  # fmt: skip


def _chain_parts(tree: SparseTree, layout: TreeLayout) -> tuple[list[Outline], list[Point]]:
    """Lines and places of all prompt tokens."""
    lines, places = [], []
    for node in tree.nodes:
        if node.path in layout.chain:
            column, top = layout.chain[node.path], float(node.depth)
            here = (layout.column[node.path], top)
            bend = _bend(here, (column, top + 1))
            lines.append(Outline([*bend, (column, top + node.prompt_tokens)], [*_BEND, Outline.LINETO]))
            places += [(column, top + i) for i in range(1, node.prompt_tokens + 1)]
    return lines, places


def _draw_lines(axes: Axes, outlines: list[Outline], colour: str, widths: list[float], **style: Any) -> None:
    axes.add_collection(
        PathCollection(
            outlines, facecolors="none", edgecolors=colour, linewidths=widths, transform=axes.transData, **style
        ),
        autolim=False,
    )


def _draw_markers(axes: Axes, places: list[Point], marker: str, colour: str, size: float) -> None:
    axes.plot(
        [x for x, _ in places], [y for _, y in places], linestyle="none", marker=marker, color=colour,
        markersize=size, markeredgecolor="white", markeredgewidth=min(1.0, size / 10), zorder=3,
    )  # fmt: skip


def _bend(start: Point, end: Point) -> list[Point]:
    """Leave sideways, arrive from straight above: lines to farther nodes pass above the labels of nearer ones."""
    (x0, y0), (x1, y1) = start, end
    return [(x0, y0), (x0, y0 + 0.34), (x1, y0 + 0.08), (x1, y1)]


def _line_width(share: float) -> float:
    """Width in points: proportional to probability, never too thin to see."""
    return max(0.7, 13.0 * share)


def _percent(share: float) -> str:
    """Two digits, in per cent, in at most five characters."""
    value = 100 * share
    if 0 < value < 0.005:
        return "<0.01"
    return f"{value:.0f}" if value >= 9.95 or value == 0 else f"{value:.1f}" if value >= 0.095 else f"{value:.2f}"


def _add_legend(figure: Figure, design: TreeDesign, trie: AcceptanceTrie | None) -> None:
    candidate = "candidate: rank inside" + ("" if trie is None else ", path probability in % above")
    handles = [
        Line2D([], [], linestyle="none", marker="s", color=INK, markersize=9, label="root"),
        Line2D([], [], linestyle="none", marker="o", color=BLUE, markersize=10, label=candidate),
    ]
    if design.tokens_per_prompt_token:
        handles.append(Line2D([], [], linestyle="none", marker="D", color=ORANGE, markersize=7, label="prompt token"))
    if trie is not None:
        handles += [
            Line2D([], [], color=_EDGE, linewidth=_line_width(share), label=f"{100 * share:.0f} %")
            for share in (0.1, 0.5)
        ]
    figure.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(_MARGIN / figure.get_size_inches()[0] - 0.005, 0.0),
        ncols=len(handles), frameon=False, fontsize=9, columnspacing=2.2,
    )  # fmt: skip
