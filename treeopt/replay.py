"""Replay: walk recorded ranks with a design and count steps, tokens and states exactly (beyond the paper).

A table is measured at every position of a text, but decoding lingers where the text is hard, so shares of positions
predict steps badly. Replay needs no assumption about dependence: at position i in state k accept along ``T_k`` as far
as the recorded ranks lead, move on by the accepted tokens and one, and go to the state that the exit node's prompt
tokens give. On the recorded text that is what a lossless decoder does.
"""

from dataclasses import dataclass

import numpy as np

from treeopt.errors import InvalidValueError
from treeopt.markov import design_passes
from treeopt.types import LatencyProfile, RankRecord, TreeDesign

__all__ = ["Replay", "SequenceReplay", "replay", "replay_sequences"]

NUM_RESAMPLES = 2000
"""Bootstrap resamples behind an interval."""


@dataclass(frozen=True, slots=True)
class SequenceReplay:
    """What one recorded sequence takes: steps per state, and tokens, the last step counted in full."""

    steps_per_state: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Replay:
    """Totals of a replay over all sequences.

    Parameters
    ----------
    num_steps, num_tokens : int
        Totals; every sequence's last step counts in full.
    steps_per_state : tuple of int, length m + 1
        Steps spent in each state.
    acceptance_length : float
        Tokens per step.
    low, high : float
        95 % bootstrap interval of the acceptance length over sequences.
    tokens_per_second, speedup : float or None
        With a latency profile.
    """

    num_steps: int
    num_tokens: int
    steps_per_state: tuple[int, ...]
    acceptance_length: float
    low: float
    high: float
    tokens_per_second: float | None = None
    speedup: float | None = None

    @property
    def occupancy(self) -> tuple[float, ...]:
        """Share of steps spent in each state."""
        return tuple(steps / self.num_steps for steps in self.steps_per_state)


def replay_sequences(design: TreeDesign, record: RankRecord) -> tuple[SequenceReplay, ...]:
    """Replay every recorded sequence with a design.

    Parameters
    ----------
    design : TreeDesign
        Trees for states 0..m.
    record : RankRecord
        Ranks for the same m.

    Returns
    -------
    tuple of SequenceReplay

    Raises
    ------
    InvalidValueError
        When design and record have another m, or the design uses ranks that were not recorded.
    """
    m = design.num_distances
    if record.num_distances != m:
        raise InvalidValueError(
            "sequences", f"record {record.num_distances} distances, the design needs {m}; record with the same m"
        )
    highest = max((rank for tree in design.trees for node in tree.nodes for rank in node.path), default=0)
    if highest >= record.max_rank:
        raise InvalidValueError(
            "max_rank",
            f"is {record.max_rank}, but the design uses rank {highest}; record more ranks or use a smaller tree",
        )
    held = [{node.path: node.prompt_tokens for node in tree.nodes} for tree in design.trees]
    return tuple(_walk(held, sequence, m) for sequence in record.sequences)


def _walk(held: list[dict[tuple[int, ...], int]], sequence: tuple[tuple[int, ...], ...], start: int) -> SequenceReplay:
    steps = [0] * len(held)
    position, state = 0, start
    while position < len(sequence):
        steps[state] += 1
        tree, path = held[state], sequence[position]
        depth = 0
        while depth < len(path) and path[: depth + 1] in tree:
            depth += 1
        position, state = position + depth + 1, tree[path[:depth]]
    return SequenceReplay(tuple(steps), position)


def replay(design: TreeDesign, record: RankRecord, latency: LatencyProfile | None = None, *, seed: int = 0) -> Replay:
    """Replay all sequences and give totals, with an interval over sequences.

    Parameters
    ----------
    design : TreeDesign
        Trees for states 0..m.
    record : RankRecord
        Ranks for the same m.
    latency : LatencyProfile, optional
        Adds speed and speedup: total tokens over the summed latencies of the passes.
    seed : int
        Seed of the bootstrap, which resamples whole sequences.

    Returns
    -------
    Replay

    Raises
    ------
    InvalidValueError
        As `replay_sequences`; or when a pass has no measured latency.

    Examples
    --------
    >>> from treeopt import AcceptanceTable, search
    >>> design = search(AcceptanceTable.from_marginals([[0.6, 0.2], [0.5, 0.1]]), 12)
    >>> record = RankRecord("toy", "docs", "greedy", 0.0, 2, (((0, 0), (0, 2), (2, 2), (1, 2)),))
    >>> replayed = replay(design, record)
    >>> replayed.num_tokens, replayed.num_steps
    (5, 2)
    """
    runs = replay_sequences(design, record)
    steps = np.array([run.steps_per_state for run in runs])
    tokens = np.array([run.num_tokens for run in runs])
    num_steps, num_tokens = int(steps.sum()), int(tokens.sum())
    drawn = np.random.default_rng(seed).integers(len(runs), size=(NUM_RESAMPLES, len(runs)))
    counts = steps.sum(axis=1)[drawn].sum(axis=1)
    ratios = tokens[drawn].sum(axis=1)[counts > 0] / counts[counts > 0]
    low, high = np.quantile(ratios, [0.025, 0.975])
    speed = None if latency is None else num_tokens / _seconds(design, steps.sum(axis=0).tolist(), latency)
    return Replay(
        num_steps=num_steps,
        num_tokens=num_tokens,
        steps_per_state=tuple(steps.sum(axis=0).tolist()),
        acceptance_length=num_tokens / num_steps,
        low=float(low),
        high=float(high),
        tokens_per_second=speed,
        speedup=None if latency is None or speed is None else speed * latency.median_s(1),
    )


def _seconds(design: TreeDesign, steps_per_state: list[int], latency: LatencyProfile) -> float:
    passes = zip(steps_per_state, design_passes(design, latency), strict=True)
    return sum(steps * latency.median_s(tokens) for steps, tokens in passes if steps)
