"""Acceptance models as tries."""

import itertools
import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from treeopt.acceptance import acceptance_trie
from treeopt.types import AcceptanceTable


def joint_table(seed: int, num_distances: int, num_ranks: int, num_samples: int) -> AcceptanceTable:
    rng = random.Random(seed)
    paths = [tuple(rng.randint(0, num_ranks) for _ in range(num_distances)) for _ in range(num_samples)]
    shares = [Counter(path[j] for path in paths) for j in range(num_distances)]
    return AcceptanceTable(
        "toy",
        "made up",
        "greedy",
        0.0,
        num_samples,
        tuple(tuple(share[r] / num_samples for r in range(num_ranks)) for share in shares),
        tuple((*path, count) for path, count in Counter(paths).items()),
    )


@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 3), st.integers(1, 40))
def test_every_recorded_path_has_its_share(seed: int, num_distances: int, num_ranks: int, num_samples: int) -> None:
    table = joint_table(seed, num_distances, num_ranks, num_samples)
    trie = acceptance_trie(table, "joint")
    assert table.ranks is not None
    for path in itertools.product(range(num_ranks), repeat=num_distances):
        node, probability = 0, 1.0
        for depth, rank in enumerate(path):
            assert node < 0 or trie.depths[node] == depth
            share, node = trie.step(node, rank)
            probability *= share
        count = sum(row[-1] for row in table.ranks if row[:-1] == path)
        assert abs(probability - count / num_samples) < 1e-12


def test_nodes_that_look_alike_are_kept_once() -> None:
    # After rank 0 or 1 ranks 0 and 1 are right half the time each; after rank 2 only rank 0 is.
    ranks = ((0, 0, 5), (0, 1, 5), (1, 0, 1), (1, 1, 1), (2, 0, 8))
    table = AcceptanceTable("toy", "made up", "greedy", 0.0, 20, ((0.5, 0.1, 0.4), (0.7, 0.3, 0.0)), ranks)
    trie = acceptance_trie(table, "joint")
    assert trie.depths == (0, 1, 1)
    assert [trie.step(0, rank)[1] for rank in range(3)] in ([1, 1, 2], [2, 2, 1])
