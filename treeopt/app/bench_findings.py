"""Which input is off when a benchmark does not keep what was promised.

A predicted speedup is tokens per step over time per step, so a miss comes from the acceptance table, from the latency
curve, or from both. They are told apart by comparing each with its own measurement: achieved tau with expected tau, and
the time of a step with what the curve says of the states that were really visited, relative to plain decoding in the
same run. A machine that is evenly slower than when it was profiled keeps its speedups, and is said apart.
"""

import math
from collections.abc import Sequence

from treeopt.app.bench_results import BudgetResult
from treeopt.types import LatencyProfile

__all__ = ["findings"]

TAU_OFF = 0.05
"""Relative difference of tau below which nothing is said."""

SHAPE_OFF = 0.07
"""The same of a step's time relative to a plain step's."""

LEVEL_OFF = 0.15
"""The same of a plain step's time: the clock frequency of most machines wanders by several per cent."""


def findings(
    results: Sequence[BudgetResult], plain_step_s: float | None, latency: LatencyProfile | None
) -> tuple[str, ...]:
    """Say which inputs do not describe what was measured.

    Parameters
    ----------
    results : sequence of BudgetResult
        Predicted and measured.
    plain_step_s : float or None
        Measured time of a plain step, seconds.
    latency : LatencyProfile or None
        The curve that was used.

    Returns
    -------
    tuple of str
        One line per input that is off; empty when predictions are kept.
    """
    found = [_stale_table(results)]
    if latency is not None and plain_step_s is not None:
        found += [_wrong_level(plain_step_s, latency), _wrong_shape(results, plain_step_s, latency)]
    return tuple(line for line in found if line is not None)


def _stale_table(results: Sequence[BudgetResult]) -> str | None:
    off = [result for result in results if _tau_is_off(result)]
    if not off:
        return None
    worst = max(off, key=_tau_miss)
    expected = worst.prediction.acceptance_length if worst.prediction is not None else 0.0
    return (
        f"acceptance table: is off at budget {_listed(off)}: {worst.acceptance_length.value:.3f} tokens per step were "
        f"achieved at budget {worst.budget}, {expected:.3f} expected; it was measured on other text, or for other "
        "guesses: measure these prompts with treeopt measure"
    )


def _tau_miss(result: BudgetResult) -> float:
    if result.prediction is None:
        return 0.0
    return abs(result.acceptance_length.value / result.prediction.acceptance_length - 1)


def _tau_is_off(result: BudgetResult) -> bool:
    """Whether achieved and expected tau differ by more than a little and by more than chance."""
    known, achieved = result.prediction, result.acceptance_length
    if known is None or _tau_miss(result) <= TAU_OFF:
        return False
    low = known.acceptance_length if known.tau_low is None else known.tau_low
    high = known.acceptance_length if known.tau_high is None else known.tau_high
    # A few prompts may agree by chance, and then their bootstrap interval is too narrow. A step writes 1 to m + 1
    # tokens, which bounds its variance by (m + 1 - tau) (tau - 1) (Bhatia and Davis, 2000): chance of few steps, which
    # rounds only repeat.
    tau, most = achieved.value, result.design.num_distances + 1
    chance = 1.96 * math.sqrt(max(0.0, (most - tau) * (tau - 1)) * result.rounds / result.num_steps)
    achieved_low = min(tau - chance, tau if achieved.low is None else achieved.low)
    achieved_high = max(tau + chance, tau if achieved.high is None else achieved.high)
    # The last step of a text is cut where the text ends, on average by half of what it has beyond the root.
    num_texts = result.num_tokens - tau * result.num_steps
    achieved_high += num_texts * (known.acceptance_length - 1) / 2 / result.num_steps
    return achieved_low > high or achieved_high < low


def _wrong_level(plain_step_s: float, latency: LatencyProfile) -> str | None:
    level = plain_step_s / latency.median_s(1)
    if abs(level - 1) <= LEVEL_OFF:
        return None
    return (
        f"latency curve: a plain step took {1e3 * plain_step_s:.1f} ms, the curve says "
        f"{1e3 * latency.median_s(1):.1f} ms: the machine was busier, or set up otherwise, at one of the two times; "
        "speedups hold only if every size changed alike, so measure again with --latency fresh"
    )


def _wrong_shape(results: Sequence[BudgetResult], plain_step_s: float, latency: LatencyProfile) -> str | None:
    misses = [(_shape_miss(result, plain_step_s, latency), result) for result in results]
    off = [(miss, result) for miss, result in misses if miss is not None and abs(miss) > SHAPE_OFF]
    if not off:
        return None
    miss, worst = max(off, key=lambda entry: abs(entry[0]))
    return (
        f"latency curve: is off at budget {_listed([result for _, result in off])}: relative to plain, a step at "
        f"budget {worst.budget} took {abs(miss):.0%} {'more' if miss > 0 else 'less'} than the curve says (context "
        f"{latency.context_len}, {latency.kernels or 'unknown'} kernels); measure it again with --latency fresh"
    )


def _shape_miss(result: BudgetResult, plain_step_s: float, latency: LatencyProfile) -> float | None:
    """Return by how much a step exceeds the curve, both relative to a plain step; None for sizes not measured."""
    measured = {point.num_tokens: point.median_s for point in latency.points}
    used = [(share, n) for share, n in zip(result.occupancy, result.design.pass_tokens, strict=False) if share > 0]
    if any(n not in measured for _, n in used):
        return None
    expected_s = sum(share * measured[n] for share, n in used)
    return (result.split.step_s / plain_step_s) / (expected_s / measured[1]) - 1


def _listed(results: Sequence[BudgetResult]) -> str:
    return ", ".join(str(result.budget) for result in results)
