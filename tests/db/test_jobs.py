"""The queue: each due job runs once, and a job whose worker vanished is taken up again."""

from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta

import pytest
from sqlalchemy import Engine, text

from db import jobs
from db.check import problems
from db.schema import open_database
from treeopt.errors import DatabaseError

DEVICE = "d" * 64
SPEC = {"model": "toy", "tokens": [1, 2, 4]}


def after(now: datetime, seconds: float) -> datetime:
    return now + timedelta(seconds=seconds)


def test_a_job_is_claimed_once_and_finished(engine: Engine, now: datetime) -> None:
    queued = jobs.enqueue(engine, SPEC, DEVICE, now)
    job = jobs.claim(engine, DEVICE, "first", 60, now)
    assert job is not None
    assert (job.id, job.state, job.owner, job.attempts) == (queued.id, "running", "first", 1)
    assert job.lease_until == after(now, 60)
    assert jobs.claim(engine, DEVICE, "second", 60, after(now, 59)) is None
    jobs.finish(engine, job, "torch-1", after(now, 30))
    (done,) = jobs.list_jobs(engine)
    assert (done.state, done.owner, done.fingerprint, done.finished_at) == ("done", None, "torch-1", after(now, 30))
    assert jobs.claim(engine, DEVICE, "second", 60, after(now, 1e6)) is None


def test_priority_comes_first_then_waiting_time(engine: Engine, now: datetime) -> None:
    for number, priority in enumerate((0, 5, 5, -1)):
        jobs.enqueue(engine, {"number": number}, DEVICE, after(now, -number), priority=priority)
    order = []
    while (job := jobs.claim(engine, DEVICE, f"w{len(order)}", 60, now)) is not None:
        order.append(job.spec["number"])
    assert order == [2, 1, 0, 3]


def test_other_devices_jobs_are_left_alone(engine: Engine, now: datetime) -> None:
    jobs.enqueue(engine, SPEC, "e" * 64, now)
    assert jobs.claim(engine, DEVICE, "me", 60, now) is None


def test_queueing_the_same_work_twice_queues_it_once(engine: Engine, now: datetime) -> None:
    first = jobs.enqueue(engine, SPEC, DEVICE, now)
    second = jobs.enqueue(engine, SPEC, DEVICE, now, priority=7, hours="22:00-06:00")
    assert second.id == first.id
    assert (second.priority, second.hours) == (7, "22:00-06:00")
    job = jobs.claim(engine, DEVICE, "me", 60, now)
    assert job is not None
    jobs.finish(engine, job, "f", now)
    assert jobs.enqueue(engine, SPEC, DEVICE, now).id != first.id, "what is done may be asked for again"


def test_a_vanished_workers_job_is_taken_up_again_and_at_last_given_up(engine: Engine, now: datetime) -> None:
    jobs.enqueue(engine, SPEC, DEVICE, now, max_attempts=2)
    assert jobs.claim(engine, DEVICE, "killed", 60, now) is not None
    assert any("its worker is gone" in line for line in problems(engine, after(now, 60)))
    again = jobs.claim(engine, DEVICE, "next", 60, after(now, 60))
    assert again is not None
    assert (again.owner, again.attempts) == ("next", 2)
    assert jobs.claim(engine, DEVICE, "third", 60, after(now, 300)) is None
    (job,) = jobs.list_jobs(engine)
    assert job.state == "failed"
    assert job.last_error == "its worker vanished; 2 of 2 tries are used"
    assert problems(engine, after(now, 400)) == ()


def test_a_job_longer_than_its_lease_is_not_doubled(engine: Engine, now: datetime) -> None:
    jobs.enqueue(engine, SPEC, DEVICE, now)
    job = jobs.claim(engine, DEVICE, "long", 60, now)
    assert job is not None
    for minute in range(1, 30):
        assert jobs.renew(engine, job, 60, after(now, 50 * minute))
        assert jobs.claim(engine, DEVICE, "greedy", 60, after(now, 50 * minute + 49)) is None
    jobs.finish(engine, job, "f", after(now, 1500))
    assert [j.state for j in jobs.list_jobs(engine)] == ["done"]


def test_a_lost_lease_cannot_be_renewed_finished_or_failed(engine: Engine, now: datetime) -> None:
    jobs.enqueue(engine, SPEC, DEVICE, now)
    stopped = jobs.claim(engine, DEVICE, "stopped", 60, now)
    other = jobs.claim(engine, DEVICE, "other", 60, after(now, 61))
    assert stopped is not None
    assert other is not None
    assert not jobs.renew(engine, stopped, 60, after(now, 62))
    for change in (
        lambda: jobs.finish(engine, stopped, "f", now),
        lambda: jobs.fail(engine, stopped, "e", now),
        lambda: jobs.release(engine, stopped, now),
    ):
        with pytest.raises(DatabaseError, match="is not this worker's any more"):
            change()
    assert jobs.list_jobs(engine)[0].owner == "other"


def test_yielding_costs_no_try(engine: Engine, now: datetime) -> None:
    jobs.enqueue(engine, SPEC, DEVICE, now, max_attempts=1)
    for round_number in range(5):
        job = jobs.claim(engine, DEVICE, f"w{round_number}", 60, after(now, 100 * round_number))
        assert job is not None
        assert job.attempts == 1
        jobs.release(engine, job, after(now, 100 * round_number + 90))
        assert jobs.claim(engine, DEVICE, "early", 60, after(now, 100 * round_number + 89)) is None


def test_failures_are_retried_ever_later_within_limits(engine: Engine, now: datetime) -> None:
    jobs.enqueue(engine, SPEC, DEVICE, now, max_attempts=3)
    waits = []
    due = now
    while (job := jobs.claim(engine, DEVICE, "w", 60, due)) is not None:
        failed = jobs.fail(engine, job, "no memory", due)
        waits.append((failed.not_before - due).total_seconds())
        due = failed.not_before
        if failed.state == "failed":
            break
    assert waits[:2] == [60, 120]
    (job,) = jobs.list_jobs(engine)
    assert (job.state, job.attempts, job.last_error) == ("failed", 3, "no memory")


def test_a_recurring_job_that_wakes_late_runs_once(engine: Engine, now: datetime) -> None:
    jobs.enqueue(engine, SPEC, DEVICE, now, max_age_s=86_400)
    job = jobs.claim(engine, DEVICE, "w", 60, now)
    assert job is not None
    jobs.finish(engine, job, "f", now)
    assert jobs.claim(engine, DEVICE, "w", 60, after(now, 86_399)) is None
    late = after(now, 10 * 86_400)
    job = jobs.claim(engine, DEVICE, "w", 60, late)
    assert job is not None
    jobs.finish(engine, job, "f", late)
    assert jobs.claim(engine, DEVICE, "w", 60, late) is None
    assert jobs.list_jobs(engine)[0].not_before == after(late, 86_400)


def test_a_cancelled_job_stops_its_worker(engine: Engine, now: datetime) -> None:
    jobs.enqueue(engine, SPEC, DEVICE, now)
    job = jobs.claim(engine, DEVICE, "w", 60, now)
    assert job is not None
    jobs.cancel(engine, job.id, now)
    assert not jobs.renew(engine, job, 60, now)
    assert jobs.claim(engine, DEVICE, "w2", 60, after(now, 100)) is None
    with pytest.raises(DatabaseError, match="job 99: is not in this database"):
        jobs.cancel(engine, 99, now)


def test_what_is_ready_is_the_callers_decision(engine: Engine, now: datetime) -> None:
    jobs.enqueue(engine, SPEC, DEVICE, after(now, 1000))
    assert jobs.claim(engine, DEVICE, "w", 60, now) is None
    job = jobs.claim(engine, DEVICE, "w", 60, now, ready=lambda job: job.fingerprint != "new torch")
    assert job is not None


def test_many_workers_share_a_queue_without_doubles(engine: Engine, url: str, now: datetime) -> None:
    for number in range(20):
        jobs.enqueue(engine, {"number": number}, DEVICE, now)

    def work(name: str) -> list[int]:
        mine = open_database(url)
        assert mine is not None
        taken = []
        idle = 0
        while idle < 3:
            job = jobs.claim(mine, DEVICE, f"{name}-{len(taken)}", 60, now)
            if job is None:
                idle += 1
                continue
            taken.append(job.spec["number"])
            jobs.finish(mine, job, "f", now)
        mine.dispose()
        return taken

    with ThreadPoolExecutor(4) as pool:
        taken = [number for part in pool.map(work, "abcd") for number in part]
    assert sorted(taken) == list(range(20))


def test_a_running_job_always_has_an_owner(engine: Engine, now: datetime) -> None:
    jobs.enqueue(engine, SPEC, DEVICE, now)
    with pytest.raises(Exception, match="constraint"), engine.begin() as connection:
        connection.execute(text("UPDATE jobs SET state = 'running'"))
