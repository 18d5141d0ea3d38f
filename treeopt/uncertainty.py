"""How sure a predicted speedup is: acceptance and latencies resampled together, for several designs at once.

Every design is judged on the same draws, so that a difference between two of them is not blurred by what they share.

========================  ============================================================================
what is known             what is resampled
========================  ============================================================================
a record of ranks         whole sequences (neighbouring positions of a text are not independent)
a table with its counts   positions, taken as independent: too narrow, and said so
a bare table              nothing: the interval is unknown
raw step times            the times of each size, then their median
quartiles and a count     the median, as normal with standard error 1.2533 (IQR / 1.349) / sqrt(n)
a bare median             nothing: the interval is unknown
========================  ============================================================================
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from treeopt.acceptance import AcceptanceTrie
from treeopt.markov import evaluate
from treeopt.replay import replay_sequences
from treeopt.types import AcceptanceTable, LatencyProfile, RankRecord, SparseTree, TreeDesign

__all__ = ["Behaviour", "Draws", "draw_acceptance", "draw_latency", "draw_sequences", "speedups"]

Floats = npt.NDArray[np.float64]

NUM_RESAMPLES = 2000
"""Bootstrap resamples behind an interval."""

RESTART = 1e-9
"""Probability of a jump into state m, which keeps the linear system of every drawn chain regular."""


@dataclass(frozen=True, slots=True, eq=False)
class Behaviour:
    """What a design does per step: as estimated, and in every draw.

    Parameters
    ----------
    tokens : float
        Tokens per step.
    occupancy : ndarray, shape (m + 1,)
        Share of steps in each state.
    drawn_tokens : ndarray, shape (draws,)
        Tokens per step in each draw.
    drawn_occupancy : ndarray, shape (draws, m + 1)
        Shares in each draw.
    """

    tokens: float
    occupancy: Floats
    drawn_tokens: Floats
    drawn_occupancy: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """Behaviour of several designs on the same draws of the acceptance data.

    Parameters
    ----------
    behaviours : tuple of Behaviour
        One per design, in their order.
    basis : {"replay", "independent", "joint"}
        Where the estimates come from.
    unit : {"sequences", "positions"} or None
        What was resampled; None when nothing could be.
    num_samples : int or None
        How many of them there are.
    """

    behaviours: tuple[Behaviour, ...]
    basis: str
    unit: str | None
    num_samples: int | None


def draw_acceptance(
    designs: Sequence[TreeDesign],
    trie: AcceptanceTrie,
    table: AcceptanceTable,
    record: RankRecord | None = None,
    *,
    seed: int = 0,
    num_draws: int = NUM_RESAMPLES,
) -> Draws:
    """Resample the acceptance data and say what every design does in each draw.

    Parameters
    ----------
    designs : sequence of TreeDesign
        Designs for the same guesses.
    trie : AcceptanceTrie
        The acceptance model of ``table``.
    table : AcceptanceTable
        How often the guesses are right.
    record : RankRecord, optional
        Replayed in place of the model.
    seed, num_draws : int
        Of the bootstrap.

    Raises
    ------
    InvalidValueError
        When designs and data do not belong together.
    """
    if record is not None:
        return draw_sequences(designs, record, seed=seed, num_draws=num_draws)
    random = np.random.default_rng(seed)
    estimates = [evaluate(trie, design.trees) for design in designs]
    if table.num_samples is None:
        still = [
            Behaviour(
                each.acceptance_length,
                np.array(each.occupancy),
                np.full(num_draws, each.acceptance_length),
                np.tile(each.occupancy, (num_draws, 1)),
            )
            for each in estimates
        ]
        return Draws(tuple(still), trie.name, None, None)
    shares = _DrawnShares(table, trie, random, num_draws)
    drawn = [_drawn_chain(shares, design.trees) for design in designs]
    behaviours = [
        Behaviour(each.acceptance_length, np.array(each.occupancy), tokens, occupancy)
        for each, (tokens, occupancy) in zip(estimates, drawn, strict=True)
    ]
    return Draws(tuple(behaviours), trie.name, "positions", table.num_samples)


def draw_sequences(
    designs: Sequence[TreeDesign], record: RankRecord, *, seed: int = 0, num_draws: int = NUM_RESAMPLES
) -> Draws:
    """Replay a record with every design and resample its sequences.

    Parameters
    ----------
    designs : sequence of TreeDesign
        Designs for the same guesses.
    record : RankRecord
        Ranks in order; at least one sequence holds some.
    seed, num_draws : int
        Of the bootstrap.

    Raises
    ------
    InvalidValueError
        When designs and record do not belong together.
    """
    random = np.random.default_rng(seed)
    count = sum(1 for sequence in record.sequences if sequence)
    weights = random.multinomial(count, np.full(count, 1 / count), size=num_draws).astype(np.float64)
    behaviours = []
    for design in designs:
        runs = [run for run in replay_sequences(design, record) if run.num_tokens]
        steps = np.array([run.steps_per_state for run in runs], dtype=np.float64)
        tokens = np.array([run.num_tokens for run in runs], dtype=np.float64)
        drawn_steps = weights @ steps
        total = drawn_steps.sum(axis=1)
        behaviours.append(
            Behaviour(
                float(tokens.sum() / steps.sum()),
                steps.sum(axis=0) / steps.sum(),
                weights @ tokens / total,
                drawn_steps / total[:, None],
            )
        )
    # One sequence says nothing about others.
    return Draws(tuple(behaviours), "replay", "sequences" if count > 1 else None, count)


class _DrawnShares:
    """Path probabilities in every draw of the recorded positions."""

    def __init__(
        self, table: AcceptanceTable, trie: AcceptanceTrie, random: np.random.Generator, num_draws: int
    ) -> None:
        self.num_draws = num_draws
        self.num_distances = table.num_distances
        self._count = table.num_samples or 1
        self._joint = trie.name == "joint"
        self._ranks = np.array([row[:-1] for row in table.ranks or ()])
        if table.ranks is not None:
            counts = np.array([row[-1] for row in table.ranks])
            self._weights = random.multinomial(self._count, counts / counts.sum(), size=num_draws)
            one_hot = self._ranks[:, :, None] == np.arange(table.num_ranks)  # [rows, m, K]
            self._marginals = np.einsum("br,rjk->bjk", self._weights, one_hot) / self._count
        else:
            rows = []
            for row in table.marginals:
                left = max(0.0, 1 - math.fsum(row))
                shares = np.array([*row, left]) / (math.fsum(row) + left)
                rows.append(random.multinomial(self._count, shares, size=num_draws)[:, :-1] / self._count)
            self._marginals = np.stack(rows, axis=1)

    def path(self, path: tuple[int, ...], parent: Floats) -> Floats:
        """Return ``P(v)`` in every draw, shape (draws,), given the parent's."""
        if self._joint:
            matches = (self._ranks[:, : len(path)] == np.array(path)).all(axis=1)
            shares: Floats = (self._weights @ matches) / self._count
            return shares
        product: Floats = parent * self._marginals[:, len(path) - 1, path[-1]]
        return product


def _drawn_chain(shares: _DrawnShares, trees: Sequence[SparseTree]) -> tuple[Floats, Floats]:
    """Tokens per step, shape (draws,), and occupancy, shape (draws, m + 1), in every draw."""
    m = shares.num_distances
    rows = np.zeros((shares.num_draws, m + 1, m + 1))
    expected = np.zeros((shares.num_draws, m + 1))
    for k, tree in enumerate(trees):
        reach: dict[tuple[int, ...], Floats] = {(): np.ones(shares.num_draws)}
        leave: dict[tuple[int, ...], Floats] = {(): np.ones(shares.num_draws)}
        for node in tree.nodes[1:]:
            reach[node.path] = shares.path(node.path, reach[node.path[:-1]])
            leave[node.path] = reach[node.path].copy()
            leave[node.path[:-1]] -= reach[node.path]
        for node in tree.nodes:
            rows[:, k, node.prompt_tokens] += leave[node.path].clip(min=0.0)
        expected[:, k] = sum(reach.values())
    rows /= rows.sum(axis=2, keepdims=True)
    # Occupancy from state m: pi = (1 - restart) pi P + restart e_m.
    system = np.eye(m + 1) - (1 - RESTART) * rows.transpose(0, 2, 1)
    start = np.zeros((shares.num_draws, m + 1, 1))
    start[:, m] = RESTART
    occupancy = np.linalg.solve(system, start)[..., 0].clip(min=0.0)
    occupancy /= occupancy.sum(axis=1, keepdims=True)
    return (occupancy * expected).sum(axis=1), occupancy


def draw_latency(
    latency: LatencyProfile, sizes: Iterable[int], *, seed: int = 0, num_draws: int = NUM_RESAMPLES
) -> tuple[dict[int, Floats], int | None]:
    """Resample the measured step times.

    Parameters
    ----------
    latency : LatencyProfile
        The profile.
    sizes : iterable of int
        Measured sizes that matter, tokens.
    seed, num_draws : int
        Of the bootstrap.

    Returns
    -------
    dict of int to ndarray, shape (draws,)
        Median step time of each size in every draw, seconds.
    int or None
        Fewest timed steps behind any of the sizes; None when some point says nothing about its error.
    """
    points = {point.num_tokens: point for point in latency.points}
    drawn: dict[int, Floats] = {}
    fewest: int | None = None
    known = True
    for size in sorted(set(sizes)):
        point = points[size]
        random = np.random.default_rng((seed, size))  # a size is drawn alike, whatever it is drawn with
        if point.samples_s is not None and len(point.samples_s) > 1:
            samples = np.array(point.samples_s)
            count = len(samples)
            drawn[size] = np.median(samples[random.integers(count, size=(num_draws, count))], axis=1)
        elif point.iqr_s is not None and point.num_samples is not None:
            count = point.num_samples
            error_s = 1.2533 * point.iqr_s / 1.349 / math.sqrt(count)
            drawn[size] = np.maximum(random.normal(point.median_s, error_s, num_draws), point.median_s / 10)
        else:
            drawn[size], known = np.full(num_draws, point.median_s), False
            continue
        fewest = count if fewest is None else min(fewest, count)
    return drawn, fewest if known else None


def speedups(
    behaviour: Behaviour, passes: Sequence[int], latency: LatencyProfile, drawn: Mapping[int, Floats]
) -> tuple[float, Floats, Floats, Floats]:
    """Return the speedup over plain decoding: as estimated, and in draws of acceptance, of latency, and of both.

    Parameters
    ----------
    behaviour : Behaviour
        What the design does.
    passes : sequence of int, length m + 1
        Pass tokens per state; those of states that occur are measured.
    latency : LatencyProfile
        Medians.
    drawn : mapping of int to ndarray
        From `draw_latency`, for size 1 and the passes that occur.
    """
    # A state that never occurs in the estimate occurs in no draw, but for rounding.
    used = np.flatnonzero(behaviour.occupancy > 0).tolist()
    medians = np.array([latency.median_s(passes[k]) for k in used])
    draws = np.stack([drawn[passes[k]] for k in used], axis=1)  # [draws, used]
    plain_s, plain_drawn = latency.median_s(1), drawn[1]
    shares, drawn_shares = behaviour.occupancy[used], behaviour.drawn_occupancy[:, used]
    return (
        float(behaviour.tokens * plain_s / (shares @ medians)),
        behaviour.drawn_tokens * plain_s / (drawn_shares @ medians),
        behaviour.tokens * plain_drawn / (draws @ shares),
        behaviour.drawn_tokens * plain_drawn / (drawn_shares * draws).sum(axis=1),
    )
