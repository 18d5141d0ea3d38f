"""A design for the terminal, and as a plain description for other programs.

Each state's tree is one block of lines, one line per node, with its prompt tokens and, when an acceptance model is
given, the node's path probability and exit probability. States that use the same tree share a block.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treeopt.acceptance import AcceptanceTrie
from treeopt.errors import InvalidValueError
from treeopt.markov import Evaluation, evaluate_design, exit_probabilities, path_probabilities
from treeopt.types import SparseTree, TreeDesign

__all__ = ["checked_states", "counted", "describe_design", "draw_design"]

Path = tuple[int, ...]

_WIDTH = 80
"""Columns of a terminal that everything must fit in."""


@dataclass(frozen=True, slots=True)
class _Glyphs:
    """What branches and prompt tokens are drawn with."""

    branch: str
    last: str
    bar: str
    dash: str
    prompt: str


_UNICODE = _Glyphs("├", "└", "│", "─", "◆")
_ASCII = _Glyphs("+", "`", "|", "-", "*")


def describe_design(
    design: TreeDesign, trie: AcceptanceTrie | None = None, states: Sequence[int] | None = None
) -> dict[str, Any]:
    """Describe a design as a JSON object: its claims, and per state the size, shape and nodes.

    Parameters
    ----------
    design : TreeDesign
        The design.
    trie : AcceptanceTrie, optional
        Adds probabilities: per state f and occupancy, per node path probability and exit probability.
    states : sequence of int, optional
        The states wanted; all without it.

    Returns
    -------
    dict
        Keys ``method``, ``objective``, ``budget``, ``acceptance_length``, ``upper_bound``, ``speedup``,
        ``tokens_per_prompt_token`` and ``states``; with a trie also ``evaluated``.

    Raises
    ------
    InvalidValueError
        When the design has no such state, or does not fit the table.
    """
    evaluation = None if trie is None else evaluate_design(trie, design)
    first_with: dict[SparseTree, int] = {}
    described = []
    wanted = checked_states(design, states)
    for k, tree in enumerate(design.trees):
        first = first_with.setdefault(tree, k)
        if k not in wanted:
            continue
        entry: dict[str, Any] = {
            "state": k,
            "same_tree_as_state": first if first != k else None,
            "size": tree.size(design.tokens_per_prompt_token),
            "pass_tokens": design.pass_tokens[k],
            "num_candidates": tree.num_candidates,
            "num_prompt_tokens": tree.num_prompt_tokens,
            "depth": tree.depth,
        }
        if evaluation is not None:
            entry["expected_tokens"] = evaluation.expected_tokens[k]
            entry["occupancy"] = evaluation.occupancy[k]
        entry["nodes"] = _describe_nodes(tree, trie)
        described.append(entry)
    document: dict[str, Any] = {
        name: getattr(design, name)
        for name in ("method", "objective", "budget", "acceptance_length", "upper_bound", "speedup")
    }
    document["tokens_per_prompt_token"] = design.tokens_per_prompt_token
    if trie is not None and evaluation is not None:
        document["evaluated"] = {"acceptance_model": trie.name, "acceptance_length": evaluation.acceptance_length}
    return {**document, "states": described}


def _describe_nodes(tree: SparseTree, trie: AcceptanceTrie | None) -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = [
        {"path": list(node.path), "prompt_tokens": node.prompt_tokens} for node in tree.nodes
    ]
    if trie is not None:
        shares = zip(path_probabilities(trie, tree).tolist(), exit_probabilities(trie, tree).tolist(), strict=True)
        for node, (path_share, exit_share) in zip(nodes, shares, strict=True):
            node["path_probability"] = path_share
            node["exit_probability"] = exit_share
    return nodes


def checked_states(design: TreeDesign, states: Sequence[int] | None) -> list[int]:
    """Return the states wanted, sorted; all of the design's for None.

    Raises
    ------
    InvalidValueError
        When the design has no such state.
    """
    known = range(design.num_distances + 1)
    for state in states or ():
        if state not in known:
            raise InvalidValueError("state", f"must be 0 to {design.num_distances} for this design, not {state}")
    return sorted(set(known if states is None else states))


def draw_design(
    design: TreeDesign,
    trie: AcceptanceTrie | None = None,
    states: Sequence[int] | None = None,
    *,
    ascii_only: bool = False,
) -> str:
    """Draw a design for the terminal, 80 columns wide or less for trees up to 15 deep.

    Parameters
    ----------
    design : TreeDesign
        The design.
    trie : AcceptanceTrie, optional
        Adds path probability and exit probability to every node, f and occupancy to every state.
    states : sequence of int, optional
        The states wanted; all without it.
    ascii_only : bool
        For terminals that cannot show box-drawing characters.

    Returns
    -------
    str
        Lines, without a newline at the end.

    Raises
    ------
    InvalidValueError
        When the design has no such state, or does not fit the table.

    Examples
    --------
    >>> import treeopt
    >>> table = treeopt.AcceptanceTable.from_marginals([[0.6, 0.2], [0.5, 0.1]])
    >>> print(draw_design(treeopt.search(table, budget=8), states=[2]))
    State 2
      8 tokens = root + 3 candidates + 4 prompt tokens; depth 2
    rank        prompt tokens
    root        ◆
    ├─ 0        ◆
    │  └─ 0     ◆
    └─ 1        ◆
    """
    glyphs = _ASCII if ascii_only else _UNICODE
    evaluation = None if trie is None else evaluate_design(trie, design)
    groups: dict[tuple[SparseTree, int], list[int]] = {}
    for k in checked_states(design, states):
        groups.setdefault((design.trees[k], design.pass_tokens[k]), []).append(k)
    blocks = []
    for members in groups.values():
        lines = _headline(design, members, evaluation)
        lines += _tree_lines(design.trees[members[0]], design.num_distances, trie, glyphs)
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _headline(design: TreeDesign, members: list[int], evaluation: Evaluation | None) -> list[str]:
    k = members[0]
    tree, e = design.trees[k], design.tokens_per_prompt_token
    size = tree.size(e)
    parts = ["root", counted(tree.num_candidates, "candidate")]
    if e:
        parts.append(("" if e == 1 else f"{e} x ") + counted(tree.num_prompt_tokens, "prompt token"))
    notes = [f"{counted(size, 'token')} = {' + '.join(parts)}; depth {tree.depth}"]
    if design.pass_tokens[k] > size:
        notes.append(f"padded to {counted(design.pass_tokens[k], 'token')}, the cheapest pass measured that holds it")
    if e == 0:
        notes.append(f"no prompt tokens needed: every node has all {design.num_distances} guesses for free")
    if evaluation is not None:
        shares = _listed([f"{100 * evaluation.occupancy[i]:.1f} %" for i in members])
        notes.append(f"f = {evaluation.expected_tokens[k]:.4f} tokens/step; used in {shares} of steps")
    name = f"State {k}" if len(members) == 1 else f"States {_listed(members)} (the same tree)"
    return [name, *(line for text in notes for line in textwrap.wrap(text, _WIDTH - 2, initial_indent="  "))]


def counted(count: int, noun: str) -> str:
    """Return a count with its noun in the right number.

    Examples
    --------
    >>> counted(1, "token"), counted(4, "token")
    ('1 token', '4 tokens')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _listed(items: Sequence[object]) -> str:
    texts = [str(item) for item in items]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def _tree_lines(tree: SparseTree, most_prompts: int, trie: AcceptanceTrie | None, glyphs: _Glyphs) -> list[str]:
    """One line per node, a node's children below it, with columns aligned over the whole tree."""
    step = 3 if tree.depth <= 8 else 2
    labels = _labels(tree, step, glyphs)
    # Paths in lexicographic order are the tree in reading order: a node, then everything below it.
    order = sorted(range(len(tree.nodes)), key=lambda i: tree.nodes[i].path)
    header = ["rank", "prompt tokens"]
    rows = [[labels[tree.nodes[i].path], _prompts(tree.nodes[i].prompt_tokens, most_prompts, glyphs)] for i in order]
    if trie is not None:
        header += ["path probability", "exit probability"]
        reach, leave = path_probabilities(trie, tree), exit_probabilities(trie, tree)
        for row, i in zip(rows, order, strict=True):
            row += [_percent(reach[i]), _percent(leave[i])]
    widths = [max(len(row[c]) for row in [header, *rows]) for c in range(len(header))]
    widths[0] = max(widths[0], 10)
    lines = []
    for row in [header, *rows]:
        cells = [f"{cell:{'<' if c < 2 else '>'}{widths[c]}}" for c, cell in enumerate(row)]
        lines.append("  ".join(cells).rstrip())
    return lines


def _labels(tree: SparseTree, step: int, glyphs: _Glyphs) -> dict[Path, str]:
    """Branches and rank of every node."""
    last_child: dict[Path, Path] = {}
    for node in tree.nodes[1:]:
        last_child[node.path[:-1]] = node.path
    labels: dict[Path, str] = {(): "root"}
    indents: dict[Path, str] = {(): ""}
    for node in tree.nodes[1:]:
        path, parent = node.path, node.path[:-1]
        is_last = last_child[parent] == path
        dash = glyphs.dash * (step - 2)
        labels[path] = f"{indents[parent]}{glyphs.last if is_last else glyphs.branch}{dash} {path[-1]}"
        indents[path] = indents[parent] + (" " if is_last else glyphs.bar) + " " * (step - 1)
    return labels


def _prompts(count: int, most: int, glyphs: _Glyphs) -> str:
    return glyphs.prompt * count if most <= 10 else str(count)


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
