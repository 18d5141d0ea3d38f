"""Brute force and the random cases it is run on: every design of a small problem, valued without treeopt's own code."""

import itertools
from collections.abc import Callable, Iterator

import numpy as np

Path = tuple[int, ...]
Nodes = dict[Path, int]


def all_trees(depth: int, num_ranks: int, held: tuple[int, ...], cost: int, budget: int) -> Iterator[Nodes]:
    """Every tree of at most ``budget`` tokens: each node carries one of ``held`` prompt tokens of ``cost`` tokens."""

    def below(path: Path, left: int) -> Iterator[tuple[Nodes, int]]:
        for own in held:
            if 1 + cost * own > left:
                continue
            partial: list[tuple[Nodes, int]] = [({path: own}, left - 1 - cost * own)]
            if len(path) < depth:
                for rank in range(num_ranks):
                    grown = [
                        ({**nodes, **subtree}, rest)
                        for nodes, room in partial
                        for subtree, rest in below((*path, rank), room)
                    ]
                    partial = partial + grown
            yield from partial

    for nodes, _ in below((), budget):
        yield nodes


def tree_value(
    nodes: Nodes, conditional: Callable[[Path], float], num_states: int, cost: int
) -> tuple[float, np.ndarray, int]:
    """Expected tokens, transition row and size, straight from the definitions."""
    probability = {path: float(np.prod([conditional(path[: i + 1]) for i in range(len(path))])) for path in nodes}
    row = np.zeros(num_states)
    for path, own in nodes.items():
        children = [p for p in nodes if len(p) == len(path) + 1 and p[: len(path)] == path]
        row[own] += probability[path] * max(0.0, 1.0 - sum(conditional(p) for p in children))
    return sum(probability.values()), row / row.sum(), sum(1 + cost * own for own in nodes.values())


def long_run(transitions: np.ndarray) -> np.ndarray:
    """Occupancy from the last state, for a stack of chains: the lazy chain has the same one and is aperiodic."""
    lazy = 0.5 * (transitions + np.eye(transitions.shape[-1]))
    for _ in range(40):
        lazy = lazy @ lazy
        lazy /= lazy.sum(axis=-1, keepdims=True)
    return lazy[..., -1, :]


def best_by_enumeration(
    conditional: Callable[[Path], float],
    num_distances: int,
    num_ranks: int,
    cost: int,
    budget: int,
    latency_s: dict[int, float] | None,
) -> float:
    """Best tau, or tokens per second, over every design: every tree in every state."""
    m = num_distances
    held = tuple(range(m + 1)) if cost else (m,)
    choices = []
    for state in range(m + 1):
        best: dict[tuple[float, ...], float] = {}
        for nodes in all_trees(state, num_ranks, held, cost, budget):
            reward, row, size = tree_value(nodes, conditional, m + 1, cost)
            seconds = 1.0
            if latency_s is not None:
                fits = [s for n, s in latency_s.items() if size <= n <= budget]
                if not fits:
                    continue
                seconds = min(fits)
            key = (*np.round(row, 14), seconds)
            best[key] = max(best.get(key, 0.0), reward)  # same chain, same time: only the best reward can matter
        choices.append([(reward, np.array(key[:-1]), key[-1]) for key, reward in best.items()])
    top = 0.0
    products = itertools.product(*choices)
    while batch := list(itertools.islice(products, 50_000)):
        rewards = np.array([[action[0] for action in design] for design in batch])
        chains = np.array([[action[1] for action in design] for design in batch])
        seconds = np.array([[action[2] for action in design] for design in batch])
        share = long_run(chains)
        top = max(top, float(((share * rewards).sum(axis=1) / (share * seconds).sum(axis=1)).max()))
    return top


def random_rows(rng: np.random.Generator, num_distances: int, num_ranks: int) -> list[list[float]]:
    """Rows of marginals: loose, full (they sum to 1), with zeros, or with ties."""
    rows = []
    for _ in range(num_distances):
        row = rng.dirichlet(np.ones(num_ranks + 1))
        kind = rng.integers(4)
        if kind == 0:
            row = row[:num_ranks] / row[:num_ranks].sum()
        elif kind == 1:
            row[rng.integers(num_ranks)] = 0.0
        elif kind == 2:
            row = np.full(num_ranks, 0.9 / num_ranks)
        rows.append([float(share) for share in row[:num_ranks]])
    return rows
