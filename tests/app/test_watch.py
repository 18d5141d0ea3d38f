"""Workers: idle first, one at a time, give way at once, go on later, never twice."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine

from db import jobs
from db.profiles import list_profiles
from db.schema import open_database
from profiler.device import identify
from profiler.idle import Hours, IdlePolicy, Observation
from profiler.lock import device_lock
from tests.db.examples import conditions
from tests.profiler.fakes import FakeMachine
from treeopt.app.profile_measure import Hooks, Outcome, measure_profile
from treeopt.app.profile_request import ProfileRequest
from treeopt.app.watch import Machine, Watcher, run_daemon, run_once
from treeopt.app.watch_schedule import cancel, fingerprint, model_stamp, schedule
from treeopt.errors import ProfileError, TreeOptError

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
QUIET = Observation(foreign_cpu=0.01, free_bytes=2**34, on_mains=True)
BUSY = replace(QUIET, foreign_cpu=0.9)
REQUEST = ProfileRequest("toy", tokens=(1, 2, 4, 8), contexts=(64,), device="cpu")


@pytest.fixture(autouse=True)
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREEOPT_LOCK_DIR", str(tmp_path / "locks"))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    opened = open_database(f"sqlite:///{tmp_path / 'x.db'}", create=True)
    assert opened is not None
    yield opened
    opened.dispose()


class World:
    """A machine with declared time: what others do on it, and steps that take 0.125 s."""

    def __init__(self, busy: Callable[[float], bool] = lambda seconds: False) -> None:
        self.steps = FakeMachine(lambda n, count, now: 0.125)
        self.busy = busy
        self.slept_s = 0.0
        self.runs = 0
        self.versions = {"torch": "2.13.0", "transformers": "5.24.0"}
        self.fail: str | None = None

    @property
    def seconds(self) -> float:
        return self.steps.clock.now_s - 1000.0

    def now(self) -> datetime:
        return START + timedelta(seconds=self.seconds)

    def sleep(self, seconds: float) -> None:
        self.slept_s += seconds
        self.steps.clock.now_s += seconds

    def observe(self) -> Observation:
        return BUSY if self.busy(self.seconds) else QUIET

    def measure(
        self, engine: Engine, request: ProfileRequest, *, hooks: Hooks, lease, lock, done_after
    ) -> Iterator[Outcome]:
        self.runs += 1
        if self.fail is not None:
            raise ProfileError(self.fail)
        hooks = replace(hooks, clock=self.steps.clock)
        known = conditions(versions=dict(self.versions))
        yield measure_profile(engine, known, request, self.steps, hooks=hooks, lease=lease, done_after=done_after)

    def machine(self) -> Machine:
        return Machine(
            device=identify("cpu"),
            observe=self.observe,
            versions=self.versions,
            measure=self.measure,
            monotonic=lambda: self.seconds,
            now=self.now,
            local=lambda: self.now().replace(tzinfo=None),
        )

    def watcher(self, engine: Engine, said: list[str] | None = None, **policy: object) -> Watcher:
        limits = IdlePolicy(**{"dwell_s": 60.0, **policy})
        return Watcher(engine, self.machine(), limits, say=(said if said is not None else []).append)


def queue(engine: Engine, world: World, **options: object) -> jobs.Job:
    return schedule(engine, REQUEST, now=world.now(), **options)


def test_a_job_waits_for_the_dwell_time_and_is_done_once(engine: Engine) -> None:
    world = World()
    queue(engine, world)
    watcher = world.watcher(engine)
    assert not watcher.tick(), "quiet, but not for long enough"
    world.sleep(59)
    assert not watcher.tick()
    world.sleep(1)
    assert watcher.tick()
    assert not watcher.tick(), "nothing is left"
    (job,) = jobs.list_jobs(engine)
    assert job.state == "done"
    (profile,) = list_profiles(engine)
    assert (profile.complete, profile.flags) == (True, ())


def test_busy_simulation_yields_within_a_visit_and_resumes_after_the_dwell(engine: Engine) -> None:
    """Others work from second 400 to 5000; a visit takes about 200 s of this clock."""
    world = World(busy=lambda seconds: 400 <= seconds < 5000)
    queue(engine, world, max_attempts=1)
    said: list[str] = []
    watcher = world.watcher(engine, said)
    watcher.look()
    world.sleep(60)
    assert watcher.tick()
    stopped_at = world.seconds
    assert 400 <= stopped_at < 400 + 450, "within one visit"
    assert any("gave way, other processes use 90 %" in line for line in said)
    (job,) = jobs.list_jobs(engine)
    assert (job.state, job.attempts, job.owner) == ("queued", 0, None)
    (partial,) = list_profiles(engine)
    assert not partial.complete
    kept = {n: p.point.samples_s for n, p in partial.steps.items()}
    assert kept

    world.steps.clock.now_s = 1000.0 + 5001
    assert not watcher.tick(), "quiet again, the dwell time starts"
    world.sleep(59)
    assert not watcher.tick()
    world.sleep(2)
    assert watcher.tick()
    (job,) = jobs.list_jobs(engine)
    assert job.state == "done"
    (whole,) = list_profiles(engine)
    assert (whole.id, whole.complete) == (partial.id, True)
    assert all((whole.steps[n].point.samples_s or ())[: len(kept[n] or ())] == kept[n] for n in kept)


def test_only_one_measurement_on_a_device(engine: Engine) -> None:
    world = World()
    queue(engine, world)
    said: list[str] = []
    watcher = world.watcher(engine, said, dwell_s=0.0)
    with device_lock(identify("cpu").lock_key):
        thread_saw: list[bool] = []
        other = threading.Thread(target=lambda: thread_saw.append(watcher.tick()))
        other.start()
        other.join()
    assert thread_saw == [False]
    assert "another measurement is running" in said[-1]
    assert jobs.list_jobs(engine)[0].state == "queued"
    assert watcher.tick()


def test_two_daemons_share_a_database_and_each_job_runs_once(tmp_path: Path, engine: Engine) -> None:
    worlds = [World(), World()]
    for number in range(6):
        schedule(engine, replace(REQUEST, contexts=(64 + number,)), now=worlds[0].now())
    engines = [open_database(f"sqlite:///{tmp_path / 'x.db'}") for _ in worlds]

    def daemon(world: World, mine: Engine) -> None:
        watcher = world.watcher(mine, dwell_s=0.0)
        for _ in range(40):
            watcher.tick()
            if all(job.state == "done" for job in jobs.list_jobs(mine)):
                return

    threads = [threading.Thread(target=daemon, args=pair) for pair in zip(worlds, engines, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [job.state for job in jobs.list_jobs(engine)] == ["done"] * 6
    assert sum(world.runs for world in worlds) == 6


def test_a_stale_curve_is_measured_again_once_however_late(engine: Engine) -> None:
    world = World()
    queue(engine, world, max_age_s=86_400.0)
    watcher = world.watcher(engine, dwell_s=0.0)
    assert watcher.tick()
    assert not watcher.tick()
    world.sleep(86_400 * 9)
    assert watcher.tick()
    assert not watcher.tick()
    assert world.runs == 2


def test_a_new_driver_or_library_makes_it_due_at_once(engine: Engine) -> None:
    world = World()
    queue(engine, world, max_age_s=86_400.0)
    assert world.watcher(engine, dwell_s=0.0).tick()
    assert not world.watcher(engine, dwell_s=0.0).tick()
    world.versions = {**world.versions, "torch": "2.14.0"}
    assert world.watcher(engine, dwell_s=0.0).tick()
    assert not world.watcher(engine, dwell_s=0.0).tick(), "once for each change"
    assert {p.conditions.versions["torch"] for p in list_profiles(engine)} == {"2.13.0", "2.14.0"}


def test_the_jobs_own_hours_are_kept(engine: Engine) -> None:
    world = World()  # starts at 03:04
    queue(engine, world, hours="04:00-05:00")
    watcher = world.watcher(engine, dwell_s=0.0)
    assert not watcher.tick()
    world.sleep(3600)
    assert watcher.tick()


def test_the_workers_own_hours_are_kept(engine: Engine) -> None:
    world = World()
    queue(engine, world)
    watcher = world.watcher(engine, dwell_s=0.0, hours=Hours.parse("04:00-05:00"))
    assert not watcher.tick()
    world.sleep(3600)
    assert watcher.tick()


def test_failures_are_told_retried_and_given_up(engine: Engine) -> None:
    world = World()
    world.fail = "model toy: is not there"
    queue(engine, world, max_attempts=2)
    said: list[str] = []
    watcher = world.watcher(engine, said, dwell_s=0.0)
    assert watcher.tick()
    assert not watcher.tick(), "not at once"
    world.sleep(61)
    assert watcher.tick()
    (job,) = jobs.list_jobs(engine)
    assert (job.state, job.last_error) == ("failed", "model toy: is not there")
    assert sum("model toy: is not there" in line for line in said) == 2


def test_a_cancelled_job_stops_at_the_next_write(engine: Engine) -> None:
    world = World()
    job = queue(engine, world)
    inner = world.observe

    def observe() -> Observation:
        if world.seconds > 500:
            cancel(engine, job.id)
        return inner()

    machine = replace(world.machine(), observe=observe)
    said: list[str] = []
    watcher = Watcher(engine, machine, IdlePolicy(dwell_s=0.0), say=said.append)
    assert watcher.tick()
    assert any("lease lost or job cancelled" in line for line in said)
    (found,) = jobs.list_jobs(engine)
    assert found.state == "cancelled"
    (profile,) = list_profiles(engine)
    assert not profile.complete


def test_the_lease_is_renewed_while_a_long_job_runs(engine: Engine) -> None:
    """A lease of 0.3 s, a job of over a second: renewed in the background, not taken by another."""
    world = World()
    queue(engine, world)
    real = datetime.now(UTC)
    taken: list[object] = []

    def measure(engine: Engine, request: ProfileRequest, **options: object) -> Iterator[Outcome]:
        for _ in range(12):
            threading.Event().wait(0.1)
            taken.append(jobs.claim(engine, identify("cpu").lock_key, "greedy", 60, datetime.now(UTC)))
        yield from ()

    machine = replace(world.machine(), measure=measure, now=lambda: datetime.now(UTC))
    watcher = Watcher(engine, machine, IdlePolicy(dwell_s=0.0), lease_s=0.3)
    assert watcher.tick()
    assert set(taken) == {None}
    (job,) = jobs.list_jobs(engine)
    assert job.state == "done"
    assert job.finished_at is not None
    assert (job.finished_at - real).total_seconds() > 1.0


def test_once_works_until_nothing_is_due(engine: Engine) -> None:
    world = World()
    for context_len in (64, 512):
        schedule(engine, replace(REQUEST, contexts=(context_len,)), now=world.now())
    assert run_once(world.watcher(engine), wait_s=120, sleep=world.sleep) == 2
    assert [job.state for job in jobs.list_jobs(engine)] == ["done", "done"]


def test_once_gives_up_when_the_machine_stays_busy(engine: Engine) -> None:
    world = World(busy=lambda seconds: True)
    queue(engine, world)
    said: list[str] = []
    assert run_once(world.watcher(engine, said), wait_s=120, sleep=world.sleep) == 0
    assert said[-1] == "not idle: other processes use 90 % of the processors"
    assert world.slept_s >= 120
    assert jobs.list_jobs(engine)[0].state == "queued"


def test_once_does_not_retry_for_ever_what_always_gives_way(engine: Engine) -> None:
    """The machine is quiet whenever it is looked at before a job, and busy as soon as one runs."""
    world = World()
    queue(engine, world)
    looks = iter(range(10_000))
    watcher = world.watcher(engine, dwell_s=0.0)
    inside = [False]

    def measure(engine: Engine, request: ProfileRequest, **options: object) -> Iterator[Outcome]:
        inside[0] = True
        yield from world.measure(engine, request, **options)
        inside[0] = False

    watcher.machine = replace(
        watcher.machine, measure=measure, observe=lambda: BUSY if inside[0] and next(looks) >= 0 else QUIET
    )
    taken = run_once(watcher, wait_s=1000, sleep=world.sleep)
    assert 1 <= taken < 20
    (job,) = jobs.list_jobs(engine)
    assert job.state == "queued"


def test_a_tolerant_policy_gets_flagged_curves(engine: Engine) -> None:
    world = World()
    queue(engine, world)
    seen: list[bool] = []

    def measure(engine: Engine, request: ProfileRequest, *, hooks: Hooks, lease, lock, done_after) -> Iterator[Outcome]:
        seen.append(hooks.keep_contended)
        yield from ()

    for limit in (0.25, 0.9):
        machine = replace(world.machine(), measure=measure)
        assert Watcher(engine, machine, IdlePolicy(dwell_s=0.0, max_foreign_cpu=limit)).tick()
        schedule(engine, REQUEST, now=world.now())
    assert seen == [False, True]


def test_asked_to_end_it_gives_the_job_back(engine: Engine) -> None:
    world = World()
    queue(engine, world)
    watcher = world.watcher(engine, dwell_s=0.0)
    watcher.machine = replace(
        watcher.machine, observe=lambda: watcher.stopping.set() or QUIET if world.seconds > 300 else QUIET
    )
    assert watcher.tick()
    (job,) = jobs.list_jobs(engine)
    assert (job.state, job.owner) == ("queued", None)


def test_the_daemon_works_on_a_timer_and_ends_when_asked(engine: Engine) -> None:
    world = World()
    queue(engine, world)
    watcher = world.watcher(engine, dwell_s=0.0)
    daemon = threading.Thread(target=run_daemon, args=(watcher,), kwargs={"every_s": 0.05})
    daemon.start()
    try:
        deadline = datetime.now(UTC) + timedelta(seconds=20)
        while jobs.list_jobs(engine)[0].state != "done" and datetime.now(UTC) < deadline:
            threading.Event().wait(0.05)
    finally:
        watcher.stopping.set()
        daemon.join(timeout=20)
    assert not daemon.is_alive()
    assert jobs.list_jobs(engine)[0].state == "done"
    assert world.runs == 1


def test_a_database_outage_does_not_end_the_daemon(engine: Engine, tmp_path: Path) -> None:
    world = World()
    queue(engine, world)
    said: list[str] = []
    watcher = world.watcher(engine, said, dwell_s=0.0)
    inner, failures = watcher.tick, iter([True, True, False])

    def tick() -> bool:
        if next(failures, False):
            raise TreeOptError("server closed the connection unexpectedly")
        return inner()

    watcher.tick = tick
    daemon = threading.Thread(target=run_daemon, args=(watcher,), kwargs={"every_s": 0.05})
    daemon.start()
    deadline = datetime.now(UTC) + timedelta(seconds=20)
    while jobs.list_jobs(engine)[0].state != "done" and datetime.now(UTC) < deadline:
        threading.Event().wait(0.05)
    watcher.stopping.set()
    daemon.join(timeout=20)
    assert jobs.list_jobs(engine)[0].state == "done"
    assert said.count("waiting: server closed the connection unexpectedly") == 2


def test_a_changed_model_file_is_another_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    request = ProfileRequest(str(folder), tokens=(1,))
    versions = {"torch": "2.13.0"}
    before = fingerprint(request, versions)
    assert fingerprint(request, versions) == before
    (folder / "model.safetensors").write_bytes(b"1")
    changed = fingerprint(request, versions)
    assert changed != before
    assert fingerprint(request, {"torch": "2.14.0"}) != changed
    assert fingerprint(request, {"torch": "2.13.0", "os": "another kernel"}) == changed

    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    assert model_stamp("org/name") == ""
    reference = tmp_path / "hf" / "hub" / "models--org--name" / "refs" / "main"
    reference.parent.mkdir(parents=True)
    reference.write_text("0123abc\n")
    assert model_stamp("org/name") == "0123abc"


def test_malformed_hours_are_refused_before_anything_is_queued(engine: Engine) -> None:
    with pytest.raises(ProfileError, match="--window"):
        schedule(engine, REQUEST, hours="at night")
    assert jobs.list_jobs(engine) == ()
