"""A design's trees as networkx graphs, for people who want to analyse or draw them with other tools."""

import io

import networkx as nx

from treeopt.acceptance import AcceptanceTrie
from treeopt.markov import exit_probabilities, path_probabilities
from treeopt.types import SparseTree, TreeDesign

__all__ = ["design_graph", "graphml", "tree_graph"]


def tree_graph(tree: SparseTree, trie: AcceptanceTrie | None = None) -> "nx.DiGraph[tuple[int, ...]]":
    """Return a tree as a directed graph, edges from parent to child.

    Parameters
    ----------
    tree : SparseTree
        The tree.
    trie : AcceptanceTrie, optional
        Adds ``path_probability`` and ``exit_probability`` to every node.

    Returns
    -------
    networkx.DiGraph
        Nodes are paths, with ``prompt_tokens`` and ``depth``; edges carry the child's ``rank``.

    Examples
    --------
    >>> graph = tree_graph(SparseTree.from_prompt_tokens({(): 2, (0,): 1, (1,): 0}))
    >>> nx.is_arborescence(graph), graph.nodes[(0,)]["prompt_tokens"]
    (True, 1)
    """
    graph: nx.DiGraph[tuple[int, ...]] = nx.DiGraph()
    for node in tree.nodes:
        graph.add_node(node.path, prompt_tokens=node.prompt_tokens, depth=node.depth)
        if node.path:
            graph.add_edge(node.path[:-1], node.path, rank=node.path[-1])
    if trie is not None:
        paths = [node.path for node in tree.nodes]
        for name, values in (
            ("path_probability", path_probabilities(trie, tree)),
            ("exit_probability", exit_probabilities(trie, tree)),
        ):
            nx.set_node_attributes(graph, dict(zip(paths, values.tolist(), strict=True)), name)
    return graph


def design_graph(
    design: TreeDesign, trie: AcceptanceTrie | None = None, states: list[int] | None = None
) -> "nx.DiGraph[str]":
    """Return a design's trees as one graph; a node is named ``state:rank.rank.rank`` and knows its ``state``."""
    parts = []
    for k in range(len(design.trees)) if states is None else states:
        graph = tree_graph(design.trees[k], trie)
        nx.set_node_attributes(graph, k, "state")
        parts.append(nx.relabel_nodes(graph, {path: f"{k}:{'.'.join(map(str, path))}" for path in graph}))
    return nx.union_all(parts)


def graphml(design: TreeDesign, trie: AcceptanceTrie | None = None, states: list[int] | None = None) -> bytes:
    """Return a design's trees as GraphML, which Gephi, yEd, igraph and others read."""
    buffer = io.BytesIO()
    nx.write_graphml_xml(design_graph(design, trie, states), buffer)
    return buffer.getvalue()
