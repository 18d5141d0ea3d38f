"""Use case: measure queued latency profiles when the machine is idle.

A worker looks at the machine; when it has been idle for the dwell time and holds the device, it claims a due job,
measures, and gives way within one visit to a point when the machine gets busy. What was measured is committed, so the
next idle moment goes on there. `tick` does one such round; the daemon calls it from a timer, ``--once`` calls it until
nothing is due, which suits systemd timers, cron and Kubernetes.
"""

import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Engine

from db import jobs
from db.jobs import Job
from db.values import Lease
from profiler.device import DeviceIdentity, identify
from profiler.environment import environment
from profiler.flags import CONTENDED_CPU
from profiler.idle import Dwell, Hours, IdlePolicy, Observation, blockers
from profiler.lock import device_lock
from profiler.probe import Probe
from treeopt.app.profile import run_profiles
from treeopt.app.profile_measure import Hooks, Outcome
from treeopt.app.profile_request import ProfileRequest
from treeopt.app.watch_schedule import fingerprint
from treeopt.errors import DatabaseError, DeviceError, TreeOptError

__all__ = ["Machine", "Watcher", "run_daemon", "run_once"]

LEASE_S = 180.0
"""How long a job outlives its killed worker. It is renewed three times in that span while the worker lives."""

LOOK_S = 1.0
"""Shortest time between two looks at the machine during a measurement."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a worker sees and uses of its machine; every part has a stand-in for tests.

    Parameters
    ----------
    device : DeviceIdentity
        What it measures.
    observe : callable
        Looks at the machine.
    versions : mapping of str to str
        Driver and libraries.
    measure : callable
        Runs a request: ``measure(engine, request, hooks=.., lease=..)`` yields outcomes. The device is held already.
    monotonic : callable
        Seconds, for dwell times.
    now : callable
        Aware UTC time of day, for the queue.
    local : callable
        Local time of day, for allowed hours.
    """

    device: DeviceIdentity
    observe: Callable[[], Observation]
    versions: dict[str, str]
    measure: Callable[..., Iterator[Outcome]] = run_profiles
    monotonic: Callable[[], float] = time.monotonic
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    local: Callable[[], datetime] = datetime.now

    @classmethod
    def this(cls, device: str = "auto") -> "Machine":
        """Return the machine that this runs on."""
        identity = identify(device)
        return cls(identity, Probe(identity).observe, environment(identity.kind))


class Watcher:
    """One worker: state between looks, and one round of work at a time.

    Parameters
    ----------
    engine : Engine
        The database.
    machine : Machine
        The machine.
    policy : IdlePolicy
        When it counts as idle.
    lease_s : float
        Lease of a claimed job, seconds.
    say : callable
        Told in one line what happens.
    """

    def __init__(
        self,
        engine: Engine,
        machine: Machine,
        policy: IdlePolicy,
        *,
        lease_s: float = LEASE_S,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.engine = engine
        self.machine = machine
        self.policy = policy
        self.lease_s = lease_s
        self.say = say
        self.stopping = threading.Event()
        self.gave_way = False  # whether the last round ended with its job unfinished
        self._dwell = Dwell()
        self._said = ""

    def look(self) -> tuple[str, ...]:
        """Look at the machine; return what keeps it from being idle, the dwell time included."""
        machine = self.machine
        reasons = blockers(machine.observe(), self.policy, machine.local())
        now_s = machine.monotonic()
        self._dwell = self._dwell.after(not reasons, now_s)
        if not reasons and not self._dwell.idle(now_s, self.policy):
            return (f"quiet for less than {self.policy.dwell_s:.0f} s",)
        return reasons

    def tick(self) -> bool:
        """Do one round: look, and measure one job if the machine is idle; return whether a job was taken."""
        self.gave_way = False
        reasons = self.look()
        if reasons:
            self._say_once(f"waiting: {', '.join(reasons)}")
            return False
        try:
            with device_lock(self.machine.device.lock_key):
                return self._work()
        except DeviceError as error:
            self._say_once(f"waiting: {error}")
            return False

    def _say_once(self, line: str) -> None:
        if line != self._said:
            self._said = line
            self.say(line)

    def _due(self, job: Job) -> bool:
        """Tell whether a queued job should run now: due or stale, and inside its hours."""
        if job.hours is not None and not Hours.parse(job.hours).holds(self.machine.local()):
            return False
        if job.not_before <= self.machine.now():
            return True
        if job.max_age_s is None or job.finished_at is None or job.attempts > 0:
            return False
        try:
            return fingerprint(ProfileRequest.from_spec(job.spec), self.machine.versions) != job.fingerprint
        except (TreeOptError, OSError):
            return True  # claimed, it fails under its own number; here it would keep all others waiting

    def _work(self) -> bool:
        machine = self.machine
        owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:12]}"
        job = jobs.claim(self.engine, machine.device.lock_key, owner, self.lease_s, machine.now(), ready=self._due)
        if job is None:
            self._say_once("idle: no job is due")
            return False
        self.say(f"job {job.id}: started (try {job.attempts} of {job.max_attempts})")
        try:
            request = ProfileRequest.from_spec(job.spec)
            mark = fingerprint(request, machine.versions)
            # The device whose lock is held, whatever "auto" would be in this environment.
            request = replace(request, device=machine.device.torch_name)
            with self._renewed(job) as lost:
                stopped = self._measure(job, request, lost)
        except DatabaseError as error:
            self.say(f"job {job.id}: stopped: {error}")  # nothing can be written; the lease runs out by itself
            return True
        except (TreeOptError, OSError, MemoryError, RuntimeError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            failed = jobs.fail(self.engine, job, reason, machine.now())
            self.say(f"job {job.id}: failed, {failed.state}: {reason}")
            return True
        self._close(job, mark, stopped)
        return True

    def _measure(self, job: Job, request: ProfileRequest, lost: threading.Event) -> str | None:
        # A policy that allows more load than a sound measurement bears gets flagged curves; others get no such visits.
        tolerant = self.policy.max_foreign_cpu > CONTENDED_CPU
        hooks = Hooks(now=self.machine.now, stop=self._stop_reason(job, lost), keep_contended=tolerant)
        stopped = None
        for outcome in self.machine.measure(
            self.engine,
            request,
            hooks=hooks,
            lease=Lease(job.id, str(job.owner)),
            lock=_held_already,
            done_after=job.finished_at or job.created_at,
        ):
            stopped = outcome.stopped
            digest = str(outcome.profile.digest)[:12]
            self.say(f"job {job.id}: profile {digest} {'stopped: ' + stopped if stopped else 'complete'}")
        return stopped

    def _close(self, job: Job, mark: str, stopped: str | None) -> None:
        now = self.machine.now()
        try:
            if stopped is None:
                jobs.finish(self.engine, job, mark, now)
                self.say(f"job {job.id}: done")
            else:
                self.gave_way = True
                self._dwell = Dwell()  # the machine has to be quiet for the whole dwell time again
                jobs.release(self.engine, job, now)
                self.say(f"job {job.id}: gave way, {stopped}; goes on when the machine is idle again")
        except DatabaseError as error:
            self.say(f"job {job.id}: {error}")

    def _stop_reason(self, job: Job, lost: threading.Event) -> Callable[[], str | None]:
        """Return what the measurement asks before every visit."""
        last_look_s = self.machine.monotonic()

        def reason() -> str | None:
            nonlocal last_look_s
            if self.stopping.is_set():
                return "the worker was asked to end"
            if lost.is_set():
                return f"job {job.id} was cancelled or taken over"
            if job.hours is not None and not Hours.parse(job.hours).holds(self.machine.local()):
                return f"outside the job's hours {job.hours}"
            if self.machine.monotonic() - last_look_s < LOOK_S:
                return None
            last_look_s = self.machine.monotonic()
            reasons = blockers(self.machine.observe(), _while_measuring(self.policy), self.machine.local())
            return ", ".join(reasons) or None

        return reason

    @contextmanager
    def _renewed(self, job: Job) -> Iterator[threading.Event]:
        """Renew the lease in the background; the event is set once the job is not ours any more."""
        lost, ended = threading.Event(), threading.Event()

        def beat() -> None:
            while not ended.wait(self.lease_s / 3):
                try:
                    if not jobs.renew(self.engine, job, self.lease_s, self.machine.now()):
                        lost.set()
                        return
                except DatabaseError:
                    continue  # perhaps a short outage; if not, the measurement's own writes say so

        thread = threading.Thread(target=beat, name=f"lease of job {job.id}", daemon=True)
        thread.start()
        try:
            yield lost
        finally:
            ended.set()
            thread.join()


def _while_measuring(policy: IdlePolicy) -> IdlePolicy:
    """Return the limits that hold during a measurement, whose own work keeps the GPU and its memory busy."""
    return replace(policy, max_gpu_utilisation=1.0, min_free_bytes=0, allow_unknown=True)


@contextmanager
def _held_already(_key: str, _timeout_s: float) -> Iterator[None]:
    """Stand in for the device lock: the watcher holds it around the whole job."""
    yield


def run_once(watcher: Watcher, *, wait_s: float, sleep: Callable[[float], None] = time.sleep) -> int:
    """Work until nothing is due or the machine stays busy; return how often a job was taken.

    Parameters
    ----------
    watcher : Watcher
        The worker.
    wait_s : float
        How long to wait for the machine to have been idle for the dwell time, seconds; counted from the start, and
        again from every finished job.
    sleep : callable
        Waits.
    """
    taken = 0
    deadline_s = watcher.machine.monotonic() + wait_s
    with _ends_on_signals(watcher):
        while not watcher.stopping.is_set():
            reasons = watcher.look()
            if not reasons:
                if not watcher.tick():
                    break
                taken += 1
                if not watcher.gave_way:
                    deadline_s = watcher.machine.monotonic() + wait_s
                elif watcher.machine.monotonic() >= deadline_s:
                    break
            elif watcher.machine.monotonic() >= deadline_s:
                watcher.say(f"not idle: {', '.join(reasons)}")
                break
            else:
                sleep(min(5.0, max(0.1, watcher.policy.dwell_s / 4)))
    return taken


@contextmanager
def _ends_on_signals(watcher: Watcher) -> Iterator[None]:
    """Let SIGTERM and Ctrl-C end the work at the next visit, with the job given back, not lost."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return

    def end(_number: int, _frame: object) -> None:
        watcher.stopping.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_daemon(watcher: Watcher, *, every_s: float) -> None:
    """Call `Watcher.tick` from a timer until the process is asked to end.

    Parameters
    ----------
    watcher : Watcher
        The worker.
    every_s : float
        Time between looks at the machine, seconds.
    """
    from apscheduler.schedulers.background import BackgroundScheduler

    scheduler = BackgroundScheduler(timezone=UTC)
    # After a sleep of the machine, or a long job, the missed looks count as one; a job is never run twice for them.
    options: dict[str, Any] = {"coalesce": True, "max_instances": 1, "misfire_grace_time": None}
    start = datetime.now(UTC) + timedelta(seconds=0.1)
    scheduler.add_job(_guarded(watcher), "interval", seconds=every_s, next_run_time=start, **options)
    with _ends_on_signals(watcher):
        scheduler.start()
        try:
            while not watcher.stopping.wait(0.5):
                pass
        finally:
            scheduler.shutdown(wait=True)


def _guarded(watcher: Watcher) -> Callable[[], None]:
    """Return a tick that survives an outage of the database: the daemon says so and looks again later."""

    def tick() -> None:
        try:
            while watcher.tick() and not watcher.gave_way and not watcher.stopping.is_set():
                pass
        except TreeOptError as error:
            watcher.say(f"waiting: {error}")

    return tick
