"""Random trees for the round trips, and every small tree for brute force."""

import itertools
from collections.abc import Iterator

from hypothesis import strategies as st

Path = tuple[int, ...]


@st.composite
def prefix_closed(draw: st.DrawFn, *, max_rank: int = 9, max_depth: int = 5, gaps: bool = True) -> list[Path]:
    """Candidate paths of a tree: every prefix present, in any order, at least one."""
    known: list[Path] = [()]
    for _ in range(draw(st.integers(1, 24))):
        parent = draw(st.sampled_from([path for path in known if len(path) < max_depth]))
        taken = {path[-1] for path in known if path[:-1] == parent and path}
        free = [rank for rank in range(max_rank + 1) if rank not in taken]
        if free:
            known.append((*parent, draw(st.sampled_from(free)) if gaps else free[0]))
    return draw(st.permutations(known[1:]))


def by_depth(paths: list[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: (len(path), path))


def every_tree(num_ranks: int, depth: int, nodes: int) -> Iterator[list[Path]]:
    """Every prefix-closed set of at most ``nodes`` paths."""
    paths = [path for d in range(1, depth + 1) for path in itertools.product(range(num_ranks), repeat=d)]
    for count in range(nodes + 1):
        for chosen in itertools.combinations(paths, count):
            known = {(), *chosen}
            if all(path[:-1] in known for path in chosen):
                yield list(chosen)


def without_gaps(paths: list[Path]) -> bool:
    known = set(paths)
    return all((*path[:-1], rank) in known for path in paths for rank in range(path[-1]))


def expected_tokens(paths: list[Path], rows: list[list[float]]) -> float:
    """1 plus the probability of every path, distances independent."""
    total = 1.0
    for path in paths:
        share = 1.0
        for row, rank in zip(rows, path, strict=False):
            share *= row[rank]
        total += share
    return total
