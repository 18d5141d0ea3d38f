"""Designs as networkx graphs."""

import io
from pathlib import Path

import networkx as nx
import pytest

from tests.cli.command import Command
from treeopt import AcceptanceTable, search
from treeopt.acceptance import acceptance_trie
from treeopt.graph import design_graph, graphml, tree_graph
from treeopt.markov import evaluate

TABLE = AcceptanceTable.from_marginals([[0.6, 0.2], [0.5, 0.1]])
DESIGN = search(TABLE, 12)


def test_trees_are_arborescences_with_the_models_probabilities() -> None:
    trie = acceptance_trie(TABLE)
    value = evaluate(trie, DESIGN.trees)
    for k, tree in enumerate(DESIGN.trees):
        graph = tree_graph(tree, trie)
        assert nx.is_arborescence(graph)
        shares = nx.get_node_attributes(graph, "path_probability")
        assert sum(shares.values()) == pytest.approx(value.expected_tokens[k])
        # What leaves a node leaves it for a child or for good.
        for path, share in shares.items():
            below = sum(shares[child] for child in graph.successors(path))
            assert graph.nodes[path]["exit_probability"] == pytest.approx(share - below)


def test_graphml_is_read_back_the_same() -> None:
    again = nx.read_graphml(io.BytesIO(graphml(DESIGN, acceptance_trie(TABLE))))
    graph = design_graph(DESIGN, acceptance_trie(TABLE))
    assert dict(again.nodes(data=True)) == dict(graph.nodes(data=True))
    assert list(again.edges(data=True)) == list(graph.edges(data=True))
    assert len(graph) == sum(len(tree.nodes) for tree in DESIGN.trees)


def test_show_writes_graphml(monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path) -> None:
    treeopt = Command(monkeypatch, capsys)
    tree, out = tmp_path / "tree.json", tmp_path / "tree.graphml"
    treeopt("search", "--budget", 8, "--latency", "none", "--out", tree)
    assert treeopt("show", tree, "--state", 2, "--out", out).code == 0
    assert set(nx.get_node_attributes(nx.read_graphml(out), "state").values()) == {2}
