"""Measure one curve into the database, with whatever steps and clock are handed in."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from sqlalchemy import Engine

from db.profiles import finish_profile, get_profile, open_profile, record_point, set_flags
from db.values import Conditions, Lease, StoredProfile
from profiler.flags import NOISY, is_noisy, profile_flags
from profiler.flags import Conditions as MachineConditions
from profiler.latency import Drift, StepFactory, Stopped, StoppingRule, Visit, latency_point, measure
from profiler.refine import coarse_tokens, refine_tokens
from treeopt.app.profile_request import ProfileRequest
from treeopt.types import LatencyProfile

__all__ = ["Hooks", "Outcome", "measure_profile"]

BATCH_OF_NEW_POINTS = 4
"""Points that one round of refinement adds."""

TAKE_UP_FOR = timedelta(hours=12)
"""An unfinished curve older than this is measured anew: the machine may not be the same any more."""

REFINE_FOR = timedelta(hours=1)
"""A complete curve younger than this gets further points rather than a second curve beside it."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a measurement asks and tells; every one has a stand-in for tests.

    Parameters
    ----------
    clock : callable
        Monotonic seconds.
    now : callable
        Aware UTC time of day, for records.
    synchronise : callable
        Waits for the device.
    conditions : callable
        What the machine did since the last call.
    stop : callable
        A reason to yield now, or None.
    keep_contended : bool
        False gives way as soon as other programs disturb a visit.
    on_point : callable
        Told of every visit: the profile's id and the visit.
    chosen : callable
        Input lengths that a search would choose on a curve; refinement starts there.
    """

    clock: Callable[[], float] = time.perf_counter
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    synchronise: Callable[[], None] = lambda: None
    conditions: Callable[[], MachineConditions] = MachineConditions
    stop: Callable[[], str | None] = lambda: None
    keep_contended: bool = True
    on_point: Callable[[int, Visit], None] = lambda profile_id, visit: None
    chosen: Callable[[LatencyProfile], Iterable[int]] = lambda profile: ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a curve ended: complete, or stopped for a reason."""

    profile: StoredProfile
    stopped: str | None = None


@dataclass(slots=True)
class _Curve:
    """One curve while it is measured: the samples and flags of its points."""

    engine: Engine
    profile: StoredProfile
    hooks: Hooks
    rule: StoppingRule
    lease: Lease | None
    seed: int
    flags: dict[int, set[str]] = field(default_factory=dict)
    samples: dict[int, tuple[float, ...]] = field(default_factory=dict)
    drifted: bool = False

    def visit(self, factory: StepFactory, tokens: Sequence[int], part: str) -> str | None:
        """Measure some input lengths; return why it stopped, or None when all are settled."""
        known = self.profile.steps if part == "step" else self.profile.forwards
        held = {n: stored.point.samples_s or () for n, stored in known.items()}
        if part == "step":
            held.update(self.samples)
        for n in tokens:
            # Left open under a stricter rule than this one: no visit will say that the point is settled.
            if n in known and not known[n].settled and self.rule.settled(held[n]):
                self._keep(Visit(n, tuple(held[n]), settled=True, flags=frozenset(known[n].flags)), part)
        hooks, conditions = self.hooks, self.profile.conditions
        events = measure(
            factory,
            tokens,
            context_len=conditions.context_len,
            batch_size=conditions.batch_size,
            rule=self.rule,
            held=held,
            seed=self.seed,
            clock=hooks.clock,
            synchronise=hooks.synchronise,
            conditions=hooks.conditions,
            stop=hooks.stop,
            keep_contended=hooks.keep_contended,
        )
        for event in events:
            if isinstance(event, Stopped):
                return event.reason
            if isinstance(event, Drift):
                if part == "step":
                    self.drifted = bool(event.flags)
            elif event.kept:
                self._keep(event, part)
            elif part == "step" and not self.profile.complete:  # a discarded visit leaves a finished curve as it is
                set_flags(self.engine, self.profile.id, sorted(event.flags), hooks.now(), lease=self.lease)
        return None

    def _keep(self, visit: Visit, part: str) -> None:
        flags = self.flags.setdefault(visit.num_tokens, set()) if part == "step" else set()
        flags |= visit.flags
        flags.discard(NOISY)
        if is_noisy(visit.samples_s):
            flags.add(NOISY)
        record_point(
            self.engine,
            self.profile.id,
            latency_point(visit.num_tokens, visit.samples_s),
            self.hooks.now(),
            part=part,
            flags=flags,
            settled=visit.settled,
            lease=self.lease,
        )
        if part == "step":
            self.samples[visit.num_tokens] = visit.samples_s
        self.hooks.on_point(self.profile.id, visit)

    def finish(self) -> StoredProfile:
        flags = profile_flags(self.flags, drifted=self.drifted)
        self.profile = finish_profile(self.engine, self.profile.id, flags, self.hooks.now(), lease=self.lease)
        return self.profile


def measure_profile(
    engine: Engine,
    conditions: Conditions,
    request: ProfileRequest,
    step: StepFactory,
    forward: StepFactory | None = None,
    *,
    hooks: Hooks | None = None,
    rule: StoppingRule | None = None,
    lease: Lease | None = None,
    seed: int = 0,
    done_after: datetime | None = None,
) -> Outcome:
    """Measure one curve into the database, from where it was left.

    Parameters
    ----------
    engine : Engine
        An open database.
    conditions : Conditions
        What is measured.
    request : ProfileRequest
        Input lengths and time.
    step, forward : StepFactory
        The whole step; the bare forward pass beside it.
    hooks : Hooks, optional
        Clock, conditions, reasons to stop.
    rule : StoppingRule, optional
        When a point is settled.
    lease : Lease, optional
        The job this is done for; nothing is written once it is lost.
    seed : int
        Of the visiting order.
    done_after : datetime, optional
        A complete curve made since is this request's own, and is not measured again; the last hour without it.

    Returns
    -------
    Outcome
        The profile as stored; with the reason when the measurement gave way before it was done.
    """
    hooks = hooks or Hooks()
    now = hooks.now()
    never = now + timedelta(seconds=1)
    stored = open_profile(
        engine,
        conditions,
        request.grid,
        now,
        fresh_after=never if request.fresh else now - TAKE_UP_FOR,
        done_after=never if request.fresh else done_after or now - REFINE_FOR,
    )
    curve = _Curve(engine, stored, hooks, rule or StoppingRule(), lease, seed)
    curve.flags = {n: set(point.flags) for n, point in stored.steps.items()}
    curve.samples = {n: point.point.samples_s or () for n, point in stored.steps.items()}
    stopped = curve.visit(step, stored.grid, "step")
    if stopped is None:
        curve.finish()
    if stopped is None and forward is not None:
        coarse = sorted(set(coarse_tokens(max(stored.grid))) & set(stored.grid))
        stopped = curve.visit(forward, coarse, "forward")
    start_s = hooks.clock()
    while stopped is None and request.tokens is None and hooks.clock() - start_s < request.seconds:
        profile = curve.profile.to_profile()
        medians_s = {point.num_tokens: point.median_s for point in profile.points}
        more = refine_tokens(medians_s, BATCH_OF_NEW_POINTS, set(hooks.chosen(profile)))
        if not more:
            break
        stopped = curve.visit(step, (1, *more), "step")
        if stopped is None:
            curve.finish()
    return Outcome(get_profile(engine, stored.id), stopped)
