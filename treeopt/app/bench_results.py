"""What a benchmark found: timings added up, ratios with intervals, and which input a disappointment comes from.

Everything here is arithmetic on recorded timings; no model and no clock is touched.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from treeopt.app.predict import Prediction
from treeopt.errors import DecodeError
from treeopt.types import DecodeRun, LatencyProfile, TreeDesign

__all__ = [
    "BaselineResult",
    "BenchReport",
    "BudgetResult",
    "Estimate",
    "StepSplit",
    "Timing",
    "count_identical",
    "ratio_of_totals",
    "step_split",
    "tokens_per_step",
]

NUM_RESAMPLES = 2000
"""Bootstrap resamples behind an interval."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One prompt decoded once by one contender.

    Parameters
    ----------
    contender : str
        Who decoded.
    prompt : int
        Index of the prompt.
    token_ids : tuple of int
        All tokens written.
    num_tokens : int
        Tokens written after the first pass, which is prefill's.
    seconds : float
        Wall-clock time after the first pass.
    run : DecodeRun
        The record to keep; its ``decode_s`` is ``seconds``.
    """

    contender: str
    prompt: int
    token_ids: tuple[int, ...]
    num_tokens: int
    seconds: float
    run: DecodeRun


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its 95 % interval; None for both ends when one prompt says nothing about others."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class StepSplit:
    """Mean time of a step and of its parts, seconds; ``other_s`` is what lies between the parts."""

    step_s: float
    forward_s: float
    propose_s: float
    verify_s: float
    commit_s: float
    other_s: float


@dataclass(frozen=True, slots=True)
class BudgetResult:
    """Predicted and measured, of the design under one budget.

    Parameters
    ----------
    budget : int
        Cap on the tokens of a pass.
    design : TreeDesign
        What decoded.
    prediction : Prediction or None
        What was promised; None when the guesses were never measured.
    acceptance_length : Estimate
        Achieved tau, tokens per step.
    speedup : Estimate
        Over plain decoding of the same runtime.
    over : mapping of str to Estimate
        Ratio to every baseline.
    tokens_per_second : float
        After prefill.
    identical, num_prompts : int
        Prompts whose text equals plain decoding's; all.
    num_tokens, num_steps : int
        Tokens written, the first ones included; passes after prefill.
    rounds : int
        Times every prompt was decoded; greedy rounds repeat the same steps.
    occupancy : tuple of float
        Share of steps in each state.
    split : StepSplit
        Where a step's time goes.
    """

    budget: int
    design: TreeDesign
    prediction: Prediction | None
    acceptance_length: Estimate
    speedup: Estimate
    over: Mapping[str, Estimate] = field(hash=False)
    tokens_per_second: float
    identical: int
    num_prompts: int
    num_tokens: int
    num_steps: int
    rounds: int
    occupancy: tuple[float, ...]
    split: StepSplit


@dataclass(frozen=True, slots=True)
class BaselineResult:
    """A way to decode without our trees; ``pass_tokens`` where it is our own plain decoding."""

    name: str
    tokens_per_second: float
    acceptance_length: float
    speedup: Estimate
    identical: int
    num_prompts: int
    num_tokens: int
    pass_tokens: int | None = None
    step_s: float | None = None


@dataclass(frozen=True, slots=True)
class BenchReport:
    """A whole benchmark.

    Parameters
    ----------
    model, guesses, device, dtype, kernels, cache, graph_mode : str
        What ran, on what.
    context_len : int
        Mean tokens in the cache while decoding.
    budgets : tuple of BudgetResult
        In increasing order.
    baselines : tuple of BaselineResult
        Plain decoding, ``none``, first: its speedup is 1.
    findings : tuple of str
        Which input is off, if any, in words.
    latency : LatencyProfile or None
        The curve that predictions used.
    """

    model: str
    guesses: str
    device: str
    dtype: str
    kernels: str
    cache: str
    graph_mode: str
    context_len: int
    budgets: tuple[BudgetResult, ...]
    baselines: tuple[BaselineResult, ...]
    findings: tuple[str, ...]
    latency: LatencyProfile | None = None


def _per_prompt(timings: Sequence[Timing]) -> dict[int, tuple[int, float, int]]:
    """Return tokens, seconds and steps of each prompt, rounds added up."""
    totals: dict[int, tuple[int, float, int]] = {}
    for timing in timings:
        tokens, seconds, steps = totals.get(timing.prompt, (0, 0.0, 0))
        totals[timing.prompt] = (
            tokens + timing.num_tokens, seconds + timing.seconds, steps + timing.run.num_steps,
        )  # fmt: skip
    return totals


def ratio_of_totals(ours: Sequence[Timing], theirs: Sequence[Timing], *, seed: int = 0) -> Estimate:
    """Return how many times as fast: total tokens over total time of ours, over the same of theirs.

    Parameters
    ----------
    ours, theirs : sequence of Timing
        Of the same prompts.
    seed : int
        Of the bootstrap, which resamples prompts and keeps both sides of a prompt together.

    Raises
    ------
    DecodeError
        When no token was written after the first pass.
    """
    one, two = _per_prompt(ours), _per_prompt(theirs)
    if one.keys() != two.keys():
        raise DecodeError("prompts: the two sides of a ratio decoded different ones; decode the same prompts")
    columns = np.array([(*one[prompt][:2], *two[prompt][:2]) for prompt in sorted(one)], dtype=np.float64)
    if not (columns.sum(axis=0) > 0).all():
        raise DecodeError(
            "prompts: every text ended with its first token, so there is nothing to time; raise --max-new-tokens"
        )

    def ratio(totals: Any) -> Any:
        return (totals[..., 0] / totals[..., 2]) * (totals[..., 3] / totals[..., 1])

    return _bootstrap(columns, ratio, seed)


def tokens_per_step(timings: Sequence[Timing], *, seed: int = 0) -> Estimate:
    """Return the achieved acceptance length: total tokens over total steps, with an interval over prompts."""
    columns = np.array([(tokens, steps) for tokens, _, steps in _per_prompt(timings).values()], dtype=np.float64)
    if not columns[:, 1].sum() > 0:
        raise DecodeError(
            "prompts: every text ended with its first token, so there is nothing to time; raise --max-new-tokens"
        )
    return _bootstrap(columns, lambda totals: totals[..., 0] / totals[..., 1], seed)


def _bootstrap(columns: Any, figure: Any, seed: int) -> Estimate:
    """Return a figure of column totals, and its interval when rows are drawn with replacement."""
    value = float(figure(columns.sum(axis=0)))
    num_rows = len(columns)
    if num_rows < 2:
        return Estimate(value)
    weights = np.random.default_rng(seed).multinomial(num_rows, np.full(num_rows, 1 / num_rows), size=NUM_RESAMPLES)
    totals = weights @ columns
    totals = totals[(totals > 0).all(axis=1)]  # a draw of nothing but texts that ended at once has no ratio
    low, high = np.quantile(figure(totals), [0.025, 0.975])
    return Estimate(value, float(low), float(high))


def count_identical(ours: Sequence[Timing], reference: Sequence[Timing]) -> int:
    """Return the number of prompts whose tokens equal the reference's in every round."""
    wanted = {timing.prompt: timing.token_ids for timing in reference}
    differing = {timing.prompt for timing in ours if timing.token_ids != wanted[timing.prompt]}
    return len(wanted.keys() - differing)


def step_split(timings: Sequence[Timing]) -> StepSplit:
    """Return the mean time of a step and its parts."""
    num_steps = sum(timing.run.num_steps for timing in timings)
    step_s = sum(timing.seconds for timing in timings) / num_steps
    names = ("forward_s", "propose_s", "verify_s", "commit_s")
    parts = {name: sum(getattr(timing.run, name) or 0.0 for timing in timings) / num_steps for name in names}
    return StepSplit(step_s=step_s, other_s=max(0.0, step_s - sum(parts.values())), **parts)
