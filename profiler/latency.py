"""Measure the latency of decoding steps: shuffled, in rounds, until the median is known.

What makes a latency curve wrong is seldom the clock. A cache that grows while it is timed, a first call that compiles,
a machine that warms up while n goes from 1 to 64, and a mean over steps that met another process all give smooth,
plausible, false curves. So: the context is restored before every step, outside the timed region; every visit to a
point starts with steps that are not recorded; the points are visited in a new random order in every round; every raw
time is kept; and a point is settled when the confidence interval of its *median* is narrow.

Wall-clock time around a synchronised step is measured, also on a GPU, because that is what decoding pays: CUDA events
leave out the host's work before the first kernel, which is most of a small model's step.
"""

import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from profiler.flags import DRIFTED, Conditions, drift_of, visit_flags
from profiler.summary import interquartile_range, median, median_interval
from treeopt.errors import ProfileError
from treeopt.types import LatencyPoint

__all__ = [
    "Clock",
    "Drift",
    "Measured",
    "Step",
    "StepFactory",
    "Stopped",
    "StoppingRule",
    "Visit",
    "latency_point",
    "measure",
    "time_step",
]

Clock = Callable[[], float]
"""Seconds from any fixed start, never going back."""

MIN_ROUNDS = 3
"""Every point is met at least this often, far apart in time, before it can be settled."""


class Step(Protocol):
    """One decoding step at fixed input length, context and batch."""

    def restore(self) -> None:
        """Bring the KV cache back to the context; not timed."""

    def run(self) -> None:
        """Execute the step once; timed. It may return before the device is done."""


class StepFactory(Protocol):
    """Builds the step to be timed; called once per point."""

    def __call__(self, num_tokens: int, context_len: int, batch_size: int) -> Step:
        """Return the step of ``num_tokens`` tokens on a cache of ``context_len``, for ``batch_size`` rows."""


@dataclass(frozen=True, slots=True)
class StoppingRule:
    """When a point has been timed enough.

    Parameters
    ----------
    halfwidth : float
        Settled once half the 95 % interval of the median is within this share of the median ...
    min_samples : int
        ... and at least so many steps were timed ...
    min_s : float
        ... which took at least so long, seconds.
    max_s : float
        Settled in any case after so many timed seconds (and three steps).
    max_samples : int
        Settled in any case after so many steps.

    Examples
    --------
    >>> StoppingRule().settled([0.1] * 9)
    True
    >>> StoppingRule().settled([0.1, 0.2] * 5)
    False
    """

    halfwidth: float = 0.03
    min_samples: int = 9
    min_s: float = 0.0
    max_s: float = 3.0
    max_samples: int = 60

    def __post_init__(self) -> None:
        if not 0 < self.halfwidth < 1:
            raise ProfileError(f"halfwidth: must be between 0 and 1, not {self.halfwidth}")
        if not 1 <= self.min_samples <= self.max_samples:
            raise ProfileError(
                f"min_samples: must be from 1 to max_samples ({self.max_samples}), not {self.min_samples}"
            )
        if not 0 <= self.min_s <= self.max_s:
            raise ProfileError(f"min_s: must be from 0 to max_s ({self.max_s} s), not {self.min_s}")

    def settled(self, samples_s: Sequence[float]) -> bool:
        """Tell whether these step times, seconds, are enough."""
        spent_s = math.fsum(samples_s)
        if len(samples_s) >= self.max_samples or (spent_s >= self.max_s and len(samples_s) >= 3):
            return True
        if len(samples_s) < self.min_samples or spent_s < self.min_s:
            return False
        interval_s = median_interval(samples_s)
        if interval_s is None:
            return False
        return (interval_s[1] - interval_s[0]) / 2 <= self.halfwidth * median(samples_s)


@dataclass(frozen=True, slots=True)
class Visit:
    """A point was timed: everything known about it so far.

    Parameters
    ----------
    num_tokens : int
        Input length of the point.
    samples_s : tuple of float
        Every step time so far, seconds, in the order taken, those of earlier visits included.
    settled : bool
        The stopping rule is satisfied.
    flags : frozenset of str
        What was odd during *this* visit: contended, throttled.
    kept : bool
        False when this visit's times were thrown away because another program was running.
    """

    num_tokens: int
    samples_s: tuple[float, ...]
    settled: bool
    flags: frozenset[str] = frozenset()
    kept: bool = True


@dataclass(frozen=True, slots=True)
class Drift:
    """L(1) at the end against L(1) of the curve, seconds; the last event of a finished measurement."""

    curve_s: float
    end_s: float

    @property
    def flags(self) -> frozenset[str]:
        """``{"drifted"}`` when the two differ by more than the limit, else empty."""
        return frozenset({DRIFTED}) if drift_of(self.curve_s, self.end_s) else frozenset()


@dataclass(frozen=True, slots=True)
class Stopped:
    """The measurement was asked to yield; what was visited is valid and can be taken up again."""

    reason: str


Measured = Visit | Drift | Stopped
"""What `measure` yields."""


def latency_point(num_tokens: int, samples_s: Sequence[float]) -> LatencyPoint:
    """Summarise raw step times, seconds, as a point with median and interquartile range.

    Raises
    ------
    InvalidValueError
        When a time is not finite or not above 0.
    """
    return LatencyPoint(
        num_tokens=num_tokens,
        median_s=median(samples_s),
        iqr_s=interquartile_range(samples_s),
        num_samples=len(samples_s),
        samples_s=tuple(samples_s),
    )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector out of timed steps, as timeit does."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def time_step(step: Step, clock: Clock, synchronise: Callable[[], None]) -> float:
    """Return the wall-clock time of one synchronised step, seconds.

    Raises
    ------
    ProfileError
        When the clock gives a time that is not finite and above 0.
    """
    step.restore()
    synchronise()
    start_s = clock()
    step.run()
    synchronise()
    elapsed_s = clock() - start_s
    if not math.isfinite(elapsed_s) or elapsed_s <= 0:
        raise ProfileError(
            f"clock: gave {elapsed_s!r} s for one step; times must be finite and above 0, so nothing was stored: "
            "use a monotonic clock with a finer resolution"
        )
    return elapsed_s


@dataclass(frozen=True, slots=True)
class _Bench:
    """What every visit of one measurement shares."""

    step_of: Callable[[int], Step]
    clock: Clock
    synchronise: Callable[[], None]

    def times(self, num_tokens: int, warmup: int, count: int, enough: Callable[[list[float]], bool]) -> list[float]:
        """Time up to ``count`` steps after ``warmup`` that are not recorded."""
        try:
            step = self.step_of(num_tokens)
            with _no_collection():
                for _ in range(warmup):
                    step.restore()
                    step.run()
                taken: list[float] = []
                while len(taken) < count and not (taken and enough(taken)):
                    taken.append(time_step(step, self.clock, self.synchronise))
                return taken
        except RuntimeError as error:  # what torch raises when memory runs out or a device is lost
            first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ProfileError(
                f"step of {num_tokens} tokens: the device failed ({first_line}); points measured before are kept, "
                "run the same command again to go on"
            ) from error


def measure(
    factory: StepFactory,
    tokens: Sequence[int],
    *,
    context_len: int,
    batch_size: int = 1,
    rule: StoppingRule | None = None,
    held: Mapping[int, Sequence[float]] | None = None,
    seed: int = 0,
    warmup: int = 2,
    block: int = 3,
    clock: Clock = time.perf_counter,
    synchronise: Callable[[], None] = lambda: None,
    conditions: Callable[[], Conditions] = Conditions,
    stop: Callable[[], str | None] = lambda: None,
    keep_contended: bool = True,
) -> Iterator[Measured]:
    """Time the steps of ``tokens`` input lengths; yield after every visit to a point.

    Parameters
    ----------
    factory : StepFactory
        Builds the step of one input length.
    tokens : sequence of int
        Input lengths to measure. Length 1 is visited in every round, so that ratios to it span the same time.
    context_len, batch_size : int
        Tokens in the KV cache before the step; rows decoded together.
    rule : StoppingRule, optional
        When a point is settled.
    held : mapping of int to sequence of float, optional
        Step times of an earlier, interrupted measurement, seconds; they count.
    seed : int
        Of the visiting order.
    warmup, block : int
        Steps not recorded when a point is first met (one at later visits); steps timed per visit.
    clock, synchronise : callable
        Seconds; waits for the device.
    conditions : callable
        Returns what the machine did since its last call.
    stop : callable
        Asked before every visit; a reason ends the measurement there.
    keep_contended : bool
        False throws the times of a visit away, and stops, when other programs disturbed it.

    Yields
    ------
    Visit, then Drift
        In case of ``stop``, a Stopped instead of the Drift.

    Raises
    ------
    ProfileError
        When a time is impossible or the device fails.
    """
    rule = rule or StoppingRule()
    samples: dict[int, list[float]] = {n: list((held or {}).get(n, ())) for n in sorted(set(tokens))}
    steps: dict[int, Step] = {}

    def step_of(num_tokens: int) -> Step:
        if num_tokens not in steps:
            steps[num_tokens] = factory(num_tokens, context_len, batch_size)
        return steps[num_tokens]

    bench = _Bench(step_of, clock, synchronise)
    order = random.Random(seed)
    rounds = 0
    # Invariant: `open_points` holds the points whose samples do not satisfy the rule; every yielded Visit carries all
    # samples of its point, so a reader that stores each one can stop anywhere and resume with `held`.
    open_points = {n for n, taken in samples.items() if not rule.settled(taken)}
    while open_points:
        visits = sorted(open_points | ({1} & samples.keys()))
        order.shuffle(visits)
        rounds += 1
        for n in visits:
            reason = stop()
            if reason is not None:
                yield Stopped(reason)
                return
            conditions()
            taken = bench.times(n, warmup if n not in steps else 1, block, _over(rule, samples[n]))
            flags = visit_flags(conditions())
            if flags & {"contended"} and not keep_contended:
                yield Visit(n, tuple(samples[n]), settled=False, flags=flags, kept=False)
                yield Stopped("other programs started to use the device")
                return
            samples[n] += taken
            late = rounds >= MIN_ROUNDS or len(samples[n]) >= MIN_ROUNDS * block or math.fsum(samples[n]) >= rule.max_s
            if late and rule.settled(samples[n]):
                open_points.discard(n)
            yield Visit(n, tuple(samples[n]), settled=n not in open_points, flags=flags)
    if 1 in samples:
        reason = stop()
        if reason is not None:
            yield Stopped(reason)
            return
        again = bench.times(1, warmup, max(rule.min_samples, 3), _over(rule, []))
        yield Drift(median(samples[1]), median(again))


def _over(rule: StoppingRule, before: Sequence[float]) -> Callable[[list[float]], bool]:
    """Return a test that ends a visit early when the point's time limit is reached."""
    spent_s = math.fsum(before)
    return lambda taken: spent_s + math.fsum(taken) >= rule.max_s and len(before) + len(taken) >= 3
