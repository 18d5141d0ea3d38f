"""Medusa's published choices against the exact tree of as many nodes, on the accuracies of Medusa's own heads.

Choices are restricted to the ranks whose accuracies are published. Both files are Medusa's: the CSV of its training
runs, and a JSON object of lists of choices (other entries are left out).

    python benchmarks/medusa_choices.py accuracies.csv choices.json
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from treeopt.acceptance import acceptance_trie
from treeopt.exact import free_guess_trees
from treeopt.formats.medusa_accuracies import tables_from_csv
from treeopt.markov import expected_tokens
from treeopt.types import AcceptanceTable, SparseTree

Ranks = tuple[int, ...]


def restricted(paths: Iterable[list[int]], table: AcceptanceTable) -> SparseTree:
    """Keep the paths that the table knows; parents come with them, ranks being cut from below."""
    known: set[Ranks] = {
        tuple(path)
        for path in paths
        if len(path) <= table.num_distances and all(rank < table.num_ranks for rank in path)
    }
    return SparseTree.from_prompt_tokens(dict.fromkeys({(), *known}, table.num_distances))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("accuracies", type=Path)
    parser.add_argument("choices", type=Path)
    arguments = parser.parse_args()
    choices = json.loads(arguments.choices.read_text(encoding="utf-8"))
    print(f"{'heads':<8} {'choices':<20} {'nodes':>5} {'published':>10} {'exact':>10} {'ratio':>8}")
    for heads, table in tables_from_csv(arguments.accuracies.read_text(encoding="utf-8")).items():
        trie = acceptance_trie(table)
        for name, paths in choices.items():
            if not isinstance(paths, list):
                continue
            tree = restricted(paths, table)
            nodes = len(tree.nodes)
            published = expected_tokens(trie, tree)
            exact = float(free_guess_trees(trie, nodes, table.num_distances)[0][-1])
            print(f"{heads:<8} {name:<20} {nodes:>5} {published:>10.6f} {exact:>10.6f} {exact / published:>8.5f}")


if __name__ == "__main__":
    main()
