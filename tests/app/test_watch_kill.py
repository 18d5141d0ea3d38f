"""kill -9 at any moment: what was committed is there, nothing partial looks complete, the work goes on.

``TREEOPT_KILLS=50 pytest tests/app/test_watch_kill.py`` tries more moments than an ordinary run.
"""

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from db import jobs
from db.check import problems
from db.profiles import list_profiles
from db.schema import open_database
from profiler.device import identify
from profiler.idle import IdlePolicy, Observation
from profiler.latency import StoppingRule
from profiler.lock import device_lock
from tests.db.examples import conditions
from treeopt.app.profile_measure import Outcome, measure_profile
from treeopt.app.profile_request import ProfileRequest
from treeopt.app.watch import Machine, Watcher
from treeopt.app.watch_schedule import schedule

KILLS = int(os.environ.get("TREEOPT_KILLS", "10"))
TOKENS = tuple(range(1, 13))
CONTEXTS = 4
LEASE_S = 0.3


class Step:
    """A step of about 2 ms of real time."""

    def restore(self) -> None:
        pass

    def run(self) -> None:
        time.sleep(0.002)


def work(url: str, report: int) -> None:
    """Be a worker until killed; report every point that is committed."""
    engine = open_database(url)
    assert engine is not None

    def measure(engine, request, *, hooks, lease, lock, done_after) -> Iterator[Outcome]:
        def committed(profile_id: int, visit) -> None:
            os.write(report, f"{profile_id} {visit.num_tokens} {len(visit.samples_s)}\n".encode())

        yield measure_profile(
            engine,
            conditions(context_len=request.contexts[0]),
            request,
            lambda num_tokens, context_len, batch_size: Step(),
            hooks=replace(hooks, on_point=committed),
            rule=StoppingRule(halfwidth=0.9),
            lease=lease,
        )

    machine = Machine(identify("cpu"), lambda: Observation(0.0, 2**40, True), {"torch": "2"}, measure=measure)
    watcher = Watcher(engine, machine, IdlePolicy(dwell_s=0.0), lease_s=LEASE_S)
    while True:
        if not watcher.tick():
            time.sleep(0.02)


def test_killed_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREEOPT_LOCK_DIR", str(tmp_path / "locks"))
    url = f"sqlite:///{tmp_path / 'x.db'}"
    engine = open_database(url, create=True)
    assert engine is not None
    for context_len in range(1, CONTEXTS + 1):
        request = ProfileRequest("toy", tokens=TOKENS, contexts=(context_len,), device="cpu")
        schedule(engine, request, max_attempts=10_000)
    engine.dispose()
    moments = random.Random(7)
    seen: dict[tuple[int, int], int] = {}
    kills = 0
    while kills < KILLS or any(job.state != "done" for job in jobs.list_jobs(engine)):
        reader, writer = os.pipe()
        engine.dispose()  # a connection must not cross a fork
        worker = multiprocessing.get_context("fork").Process(target=work, args=(url, writer))
        worker.start()
        os.close(writer)
        if kills < KILLS:
            time.sleep(moments.uniform(0.0, 0.8))
        else:
            deadline = time.monotonic() + 60
            while any(job.state != "done" for job in jobs.list_jobs(engine)) and time.monotonic() < deadline:
                time.sleep(0.1)
        os.kill(worker.pid or 0, signal.SIGKILL)
        worker.join()
        kills += 1
        with os.fdopen(reader) as pipe:
            for line in pipe.read().splitlines():
                profile_id, num_tokens, count = map(int, line.split())
                seen[profile_id, num_tokens] = max(count, seen.get((profile_id, num_tokens), 0))
        with device_lock(identify("cpu").lock_key, timeout_s=1.0):
            pass  # the dead worker holds nothing
        stored = {profile.id: profile for profile in list_profiles(engine)}
        for (profile_id, num_tokens), count in seen.items():
            point = stored[profile_id].steps[num_tokens].point
            assert len(point.samples_s or ()) >= count, "what was committed is lost"
        for profile in stored.values():
            settled = {n for n, point in profile.steps.items() if point.settled}
            assert not profile.complete or settled == set(TOKENS)
        damage = [line for line in problems(engine, datetime.now(UTC)) if "its worker is gone" not in line]
        assert damage == []
        queue = jobs.list_jobs(engine)
        assert all(job.state in ("queued", "running", "done") for job in queue)
        if kills < KILLS and all(job.state == "done" for job in queue):
            first = len(queue) + 1
            for context_len in range(first, first + CONTEXTS):
                request = ProfileRequest("toy", tokens=TOKENS, contexts=(context_len,), device="cpu")
                schedule(engine, request, max_attempts=10_000)
    profiles = list_profiles(engine)
    assert len(profiles) == len(jobs.list_jobs(engine)), "each job made one profile, whatever happened to its workers"
    assert all(profile.complete for profile in profiles)
    assert seen
