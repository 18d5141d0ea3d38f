"""What engines without prompt tokens can be set to, searched: trees, level widths, draft pools, chains.

Each search offers every setting to a `Best`, which keeps the fastest: expected tokens over the time of a step.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from treeopt.acceptance import AcceptanceTrie
from treeopt.exact import free_guess_trees
from treeopt.types import AcceptanceTable, LatencyProfile, SparseTree

__all__ = ["Best", "Clock", "best_chain", "best_pool", "best_tree", "best_widths", "break_even", "level_widths"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Clock:
    """Time of a step at the sizes that may be promised; 1 at every size without a profile.

    Parameters
    ----------
    budget : int
        Largest size, tokens.
    latency : LatencyProfile or None
        Only its sizes are promised: engines run exactly the tokens they are told.
    draft_s : float
        Seconds per level of the draft.
    """

    budget: int
    latency: LatencyProfile | None
    draft_s: float = 0.0

    def sizes(self) -> list[int]:
        """Return the sizes that may be promised, ascending."""
        if self.latency is None:
            return list(range(1, self.budget + 1))
        return [point.num_tokens for point in self.latency.points if point.num_tokens <= self.budget]

    def seconds(self, num_tokens: int, depth: int) -> float:
        """Return the time of a step: drafting ``depth`` levels, then a pass of ``num_tokens``."""
        if self.latency is None:
            return 1.0
        return self.latency.median_s(num_tokens) + depth * self.draft_s

    def no_speculation(self) -> "Best":
        """Return the setting to beat: a step of the root alone."""
        return Best(1.0, self.seconds(1, 0))


@dataclass(frozen=True, slots=True)
class Best:
    """The fastest setting seen: offer small ones first, because a tie does not replace it."""

    tokens: float
    seconds: float
    setting: tuple[int, ...] = ()

    def or_better(self, tokens: float, seconds: float, setting: tuple[int, ...]) -> "Best":
        """Return the faster of this setting and another."""
        # Cross-multiplied, with a margin: equal speeds must compare as equal.
        faster = tokens * self.seconds > self.tokens * seconds * (1 + 1e-12)
        return Best(tokens, seconds, setting) if faster else self


def best_tree(trie: AcceptanceTrie, clock: Clock) -> tuple[Best, SparseTree | None]:
    """Return the fastest static tree; its setting is (depth limit, size)."""
    m = trie.num_distances
    best = clock.no_speculation()
    found: SparseTree | None = None
    # Shallower trees matter only when each level of the draft takes time.
    for depth in range(1, m + 1) if clock.draft_s else [m]:
        expected, tree = free_guess_trees(trie, clock.budget, depth)
        before = best
        for size in clock.sizes():
            best = best.or_better(float(expected[size - 1]), clock.seconds(size, depth), (depth, size))
        if best is not before:
            found = tree(best.setting[1])
    return best, found


def best_widths(table: AcceptanceTable, clock: Clock) -> Best:
    """Return the fastest tree whose nodes of a level all have as many children; its setting is those numbers."""
    m = table.num_distances
    best = clock.no_speculation()
    for depth in range(1, m + 1) if clock.draft_s else [m]:
        widest = level_widths(table.marginals[:depth])
        # Without a clock the largest size holds every tree.
        for size in clock.sizes() if clock.latency else [clock.budget]:
            gain, widths = widest(0, 1, size - 1)
            best = best.or_better(1.0 + gain, clock.seconds(size, depth), widths)
    return best


def level_widths(rows: Sequence[Sequence[float]]) -> Callable[[int, int, int], tuple[float, tuple[int, ...]]]:
    """Return ``widest(level, nodes, left)``: the best tokens below one node of a level, and the levels' widths.

    ``nodes`` nodes of that level share ``left`` tokens evenly: all their subtrees are alike.
    """
    right = [list(accumulate(row)) for row in rows]
    # No subtree is worth more than one of all ranks, nor more than its tokens at the best share of a level.
    most = [0.0]
    for row in reversed(right):
        most.insert(0, row[-1] * (1.0 + most[0]))
    best_share = [max(row) for row in rows] + [0.0]

    @cache
    def widest(level: int, nodes: int, left: int) -> tuple[float, tuple[int, ...]]:
        best: tuple[float, tuple[int, ...]] = (0.0, ())
        if level == len(right):
            return best
        for width in range(1, min(len(right[level]), left // nodes) + 1):
            each = (left - nodes * width) // (nodes * width)
            if right[level][width - 1] * (1.0 + min(most[level + 1], each * best_share[level + 1])) <= best[0]:
                continue
            below, widths = widest(level + 1, nodes * width, left - nodes * width)
            gain = right[level][width - 1] * (1.0 + below)
            if gain > best[0]:
                best = (gain, (width, *widths))
        return best

    return widest


def best_pool(table: AcceptanceTable, clock: Clock, most: Callable[[int, int], int]) -> Best:
    """Return the fastest draft pool; its setting is (steps, topk, tokens of the pass).

    Parameters
    ----------
    table : AcceptanceTable
        The draft's acceptance.
    clock : Clock
        Time of a step.
    most : callable
        ``most(steps, topk)``: candidates the engine verifies at most. A pool of ``topk`` 1 is a chain and is verified
        whole.
    """
    best = clock.no_speculation()
    sizes = clock.sizes()
    for steps, topk, expected in _pools(table):
        least = steps + 1
        last = min(len(expected), most(steps, topk) + 1) if topk > 1 else steps + 1
        for size in sizes:
            if least <= size <= last:
                best = best.or_better(float(expected[size - 1]), clock.seconds(size, steps), (steps, topk, size))
    return best


def _pools(table: AcceptanceTable) -> Iterator[tuple[int, int, Floats]]:
    """Yield steps, topk and ``f`` of verifying the 0, 1, 2, .. best candidates of the pool, small pools first."""
    for topk in range(1, table.num_ranks + 1):
        levels = _drafted(table.marginals, topk)
        for steps in range(1, table.num_distances + 1):
            pool = np.sort(np.concatenate(levels[:steps]))[::-1]
            yield steps, topk, 1.0 + np.concatenate(([0.0], np.cumsum(pool)))


def _drafted(rows: Sequence[Sequence[float]], topk: int) -> list[Floats]:
    """Return path probabilities of each level's candidates when every level keeps its ``topk`` best nodes."""
    kept = np.ones(1)
    levels = []
    for row in rows:
        level = np.sort((kept[:, None] * np.asarray(row[:topk])).ravel())[::-1]
        levels.append(level)
        kept = level[:topk]
    return levels


def best_chain(trie: AcceptanceTrie, clock: Clock) -> Best:
    """Return the fastest chain of best guesses; its setting is (length,)."""
    best = clock.no_speculation()
    sizes = set(clock.sizes())
    tokens, share, node = 1.0, 1.0, 0
    for length in range(1, trie.num_distances + 1):
        conditional, node = trie.step(node, 0)
        share *= conditional
        tokens += share
        if length + 1 in sizes:
            best = best.or_better(tokens, clock.seconds(length + 1, length), (length,))
    return best


def break_even(best: Best, clock: Clock) -> float:
    """Return the probability at which the first draft token costs as much time as it gains, at the speed reached.

    Deeper tokens break even higher, since the ones before must be right too, so no draft that pays is cut short.
    Rounded down to four digits; 0 without a profile of two sizes.
    """
    if clock.latency is None or len(clock.latency.points) < 2:
        return 0.0
    one, more = clock.latency.points[:2]
    token_s = (more.median_s - one.median_s) / (more.num_tokens - 1) + clock.draft_s
    return math.floor(1e4 * min(1.0, max(0.0, token_s * best.tokens / best.seconds))) / 1e4
