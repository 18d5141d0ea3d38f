"""What the inputs promise of a design: tokens per step, speed, and how sure that is.

The speedup that is promised is ``tau / sum_k pi_k L(pass tokens of k) * L(1)``. With a record of ranks, tau and pi come
from replaying it, which assumes nothing about how guesses depend on each other; without one, from the acceptance model
that the design was searched under. An interval carries both sampling errors: whole recorded sequences and the raw step
times of every latency point are resampled together. Neither torch nor a database is loaded here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from treeopt.acceptance import acceptance_trie
from treeopt.artifact import digest
from treeopt.markov import evaluate_design
from treeopt.types import AcceptanceTable, LatencyProfile, RankRecord, TreeDesign
from treeopt.uncertainty import Behaviour, draw_latency, draw_sequences, speedups

__all__ = ["Prediction", "pad_design", "predict"]

INTERVAL = (0.025, 0.975)
"""Quantiles of a 95 % interval."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is promised of a design.

    Parameters
    ----------
    basis : {"replay", "joint", "independent"}
        Where tau and occupancy come from.
    acceptance_length : float
        tau, tokens per step.
    tau_low, tau_high : float or None
        95 % interval of tau over recorded sequences; None without a record.
    occupancy : tuple of float, length m + 1
        Share of steps in each state.
    seconds_per_step, tokens_per_second, speedup : float or None
        None without a latency profile, or when a pass has a size that was not measured.
    low, high : float or None
        95 % interval of the speedup; None where a sampling error is unknown.
    tau_by_model : mapping of str to float
        tau by every model that the data allow: independent, joint, replay.
    """

    basis: str
    acceptance_length: float
    occupancy: tuple[float, ...]
    tau_low: float | None = None
    tau_high: float | None = None
    seconds_per_step: float | None = None
    tokens_per_second: float | None = None
    speedup: float | None = None
    low: float | None = None
    high: float | None = None
    tau_by_model: dict[str, float] = field(default_factory=dict, hash=False)


def pad_design(design: TreeDesign, latency: LatencyProfile | None) -> TreeDesign:
    """Pad every state of a design to the cheapest measured size that holds it within the budget.

    A design that was searched with a profile has its sizes already and comes back as it is; so does every state that no
    measured size within the budget can hold.

    Examples
    --------
    >>> from treeopt import AcceptanceTable, search
    >>> design = search(AcceptanceTable.from_marginals([[0.6, 0.2], [0.5, 0.1]]), 8)
    >>> profile = LatencyProfile.from_medians({1: 1.0, 4: 1.5, 7: 2.0, 8: 1.8})
    >>> design.pass_tokens, pad_design(design, profile).pass_tokens
    ((3, 8, 8), (4, 8, 8))
    """
    if latency is None or design.latency_digest is not None:
        return design
    last = latency.points[-1].num_tokens
    cap = last if design.budget is None else min(design.budget, last)
    points = [latency.cheapest(size, cap) for size in design.sizes()]
    passes = tuple(
        size if point is None else point.num_tokens for size, point in zip(design.sizes(), points, strict=True)
    )
    return replace(design, pass_tokens=passes, latency_digest=digest(latency))


def predict(
    design: TreeDesign,
    table: AcceptanceTable | None,
    latency: LatencyProfile | None = None,
    record: RankRecord | None = None,
    *,
    seed: int = 0,
) -> Prediction | None:
    """Predict what a design will do on text like the recorded one, on the machine of the latency profile.

    Parameters
    ----------
    design : TreeDesign
        The design; its pass tokens are what will be run.
    table : AcceptanceTable or None
        How often the guesses are right.
    latency : LatencyProfile, optional
        Adds speed and speedup.
    record : RankRecord, optional
        Adds replay, and with it the intervals.
    seed : int
        Of the bootstrap.

    Returns
    -------
    Prediction or None
        None when neither a table nor a record is given.

    Raises
    ------
    InvalidValueError
        When design and data do not belong together.
    """
    taus: dict[str, float] = {}
    occupancy: tuple[float, ...] = ()
    basis = ""
    if table is not None:
        for model in ("independent", "joint") if table.ranks is not None else ("independent",):
            evaluation = evaluate_design(acceptance_trie(table, model), design)
            taus[model] = evaluation.acceptance_length
            if model == (design.acceptance_model or "independent"):
                basis, occupancy = model, evaluation.occupancy
    low = high = tau_low = tau_high = None
    if record is not None:
        draws = draw_sequences((design,), record, seed=seed)
        (behaviour,) = draws.behaviours
        taus["replay"] = behaviour.tokens
        basis, occupancy = "replay", tuple(behaviour.occupancy.tolist())
        if draws.unit is not None:
            tau_low, tau_high = np.quantile(behaviour.drawn_tokens, INTERVAL).tolist()
            low, high = _speedup_interval(design, behaviour, latency, seed)
    if not basis:
        return None
    seconds = _seconds_per_step(design, occupancy, latency)
    tau = taus[basis]
    return Prediction(
        basis=basis,
        acceptance_length=tau,
        occupancy=occupancy,
        tau_low=tau_low,
        tau_high=tau_high,
        seconds_per_step=seconds,
        tokens_per_second=None if seconds is None else tau / seconds,
        speedup=None if seconds is None or latency is None else tau / seconds * latency.median_s(1),
        low=low,
        high=high,
        tau_by_model=taus,
    )


def _seconds_per_step(design: TreeDesign, occupancy: Sequence[float], latency: LatencyProfile | None) -> float | None:
    if latency is None:
        return None
    measured = {point.num_tokens: point.median_s for point in latency.points}
    used = [(share, tokens) for share, tokens in zip(occupancy, design.pass_tokens, strict=True) if share > 0]
    if any(tokens not in measured for _, tokens in used):
        return None  # sizes between measured ones are not guessed
    return sum(share * measured[tokens] for share, tokens in used)


def _speedup_interval(
    design: TreeDesign, behaviour: Behaviour, latency: LatencyProfile | None, seed: int
) -> tuple[float | None, float | None]:
    """Return the 95 % interval over sequences and step times together.

    None when a pass that is used was not measured, or a point says nothing about its error.
    """
    used = {1} | {size for size, share in zip(design.pass_tokens, behaviour.occupancy, strict=True) if share > 0}
    if latency is None or not used <= {point.num_tokens for point in latency.points}:
        return None, None
    drawn, fewest = draw_latency(latency, used, seed=seed)
    if fewest is None:
        return None, None
    *_, both = speedups(behaviour, design.pass_tokens, latency, drawn)
    low, high = np.quantile(both, INTERVAL).tolist()
    return low, high
