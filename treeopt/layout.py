"""Where the parts of a drawn tree stand, in columns and levels, so that nothing overlaps."""

from dataclasses import dataclass

from treeopt.types import SparseTree

__all__ = ["TreeLayout", "tree_layout"]

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """Where a tree's parts stand, in columns from 0.

    Parameters
    ----------
    column : dict
        Path to column of each node.
    chain : dict
        Path to column of the node's prompt tokens; a leaf's hang right below it.
    num_columns, num_levels : int
        Extent; levels count the root's.
    """

    column: dict[Path, float]
    chain: dict[Path, float]
    num_columns: int
    num_levels: int


def tree_layout(tree: SparseTree, draw_prompts: bool) -> TreeLayout:
    """Lay a tree out: each leaf, and each inner node's chain of prompt tokens, has a column of its own.

    Parameters
    ----------
    tree : SparseTree
        The tree.
    draw_prompts : bool
        Whether prompt tokens are drawn; they are not where they cost nothing.

    Returns
    -------
    TreeLayout
        In it no two parts share a place: columns of one level are at least 1 apart.
    """
    children: dict[Path, list[Path]] = {node.path: [] for node in tree.nodes}
    for node in tree.nodes[1:]:
        children[node.path[:-1]].append(node.path)
    held = {node.path: node.prompt_tokens if draw_prompts else 0 for node in tree.nodes}
    column: dict[Path, float] = {}
    chain: dict[Path, float] = {}
    used = 0
    # Lexicographic order of paths is the reading order of the tree: a node, then everything below it.
    for path in sorted(children):
        if children[path] and not held[path]:
            continue
        if held[path]:
            chain[path] = used
        if not children[path]:
            column[path] = used
        used += 1
    for path in sorted(children, key=len, reverse=True):
        if children[path]:
            below = [column[child] for child in children[path]] + ([chain[path]] if path in chain else [])
            column[path] = (min(below) + max(below)) / 2
    levels = 1 + max(len(path) + held[path] for path in children)
    return TreeLayout(column, chain, used, levels)
