"""The store of profiles keeps its promises on every database."""

from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from sqlalchemy import Engine, text

from db import jobs
from db.check import problems
from db.profiles import (
    add_profile,
    find_profile,
    finish_profile,
    forget_profile,
    list_profiles,
    open_profile,
    record_point,
    set_flags,
)
from db.values import Lease, latency_document
from tests.db.examples import DEVICE, conditions, point
from treeopt.artifact import digest, from_document
from treeopt.errors import DatabaseError, TreeOptError
from treeopt.types import LatencyPoint, LatencyProfile


def test_a_profile_is_read_back_as_it_was_measured(engine: Engine, now: datetime) -> None:
    started = open_profile(engine, conditions(), [1, 4], now)
    assert (started.grid, started.complete, started.digest) == ((1, 4), False, None)
    # Binary fractions and their neighbours: a database that rounds would be seen.
    odd = LatencyPoint(4, 0.1 + 2**-56, iqr_s=1e-300, num_samples=2, samples_s=(0.1, 0.1 + 2**-55))
    record_point(engine, started.id, point(1), now, flags=["noisy"])
    record_point(engine, started.id, odd, now)
    finished = finish_profile(engine, started.id, ["drifted"], now)
    (stored,) = list_profiles(engine)
    assert stored == finished
    assert stored.steps[1].flags == ("noisy",)
    profile = stored.to_profile()
    assert profile.points == (point(1), odd)
    assert profile.flags == ("drifted",)
    assert profile.complete
    assert dict(profile.device) == DEVICE
    assert stored.digest == digest(profile)
    assert find_profile(engine, str(stored.digest)[:6]) == stored


def test_an_unfinished_profile_never_looks_complete(engine: Engine, now: datetime) -> None:
    started = open_profile(engine, conditions(), [1, 2, 4], now)
    record_point(engine, started.id, point(1), now)
    record_point(engine, started.id, point(2), now, settled=False)
    with pytest.raises(DatabaseError, match=r"points \[2, 4\] are not measured"):
        finish_profile(engine, started.id, [], now)
    (stored,) = list_profiles(engine)
    assert not stored.complete
    assert not stored.to_profile().complete
    assert [p.num_tokens for p in stored.to_profile().points] == [1]


def test_an_interrupted_profile_is_taken_up_again_with_its_samples(engine: Engine, now: datetime) -> None:
    started = open_profile(engine, conditions(), [1, 2], now)
    record_point(engine, started.id, point(2), now, settled=False)
    again = open_profile(engine, conditions(), [1, 2], now + timedelta(hours=1))
    assert again.id == started.id
    assert again.steps[2].point == point(2)
    assert not again.steps[2].settled


@pytest.mark.parametrize(
    "change",
    [
        {"versions": {"torch": "2.14.0"}},
        {"fingerprint": "weights-2"},
        {"device": {**DEVICE, "instance_digest": "e" * 64}},
        {"context_len": 512},
        {"kernels": "swapped"},
        {"cache": "dynamic"},
        {"graph_mode": "compiled"},
    ],
)
def test_another_condition_is_another_profile(engine: Engine, now: datetime, change: dict[str, object]) -> None:
    first = open_profile(engine, conditions(), [1], now)
    assert open_profile(engine, conditions(**change), [1], now).id != first.id


def test_a_stale_unfinished_profile_is_left_alone(engine: Engine, now: datetime) -> None:
    first = open_profile(engine, conditions(), [1], now)
    late = now + timedelta(days=2)
    assert open_profile(engine, conditions(), [1], late, fresh_after=late - timedelta(days=1)).id != first.id


def test_a_complete_curve_stays_complete_while_it_is_refined(engine: Engine, now: datetime) -> None:
    started = open_profile(engine, conditions(), [1, 4], now)
    record_point(engine, started.id, point(1), now)
    record_point(engine, started.id, point(4), now)
    coarse = finish_profile(engine, started.id, [], now)
    assert open_profile(engine, conditions(), [1, 4], now, done_after=now).id == started.id
    for other in ([1, 2], [1, 4, 8], [1, 2, 4]):  # reaches less far, farther, or has other lengths
        assert open_profile(engine, conditions(), other, now, done_after=now).id != started.id
    assert open_profile(engine, conditions(), [1, 4], now, done_after=now + timedelta(seconds=1)).id != started.id
    anew = open_profile(engine, conditions(), [1, 4], now)
    assert anew.id != started.id, "measured anew by default"
    forget_profile(engine, anew.id)
    record_point(engine, started.id, point(2), now, settled=False)
    half = find_profile(engine, str(coarse.digest))
    assert half.complete
    assert half.to_profile() == coarse.to_profile()
    record_point(engine, started.id, point(2), now)
    fine = next(p for p in list_profiles(engine) if p.id == started.id)
    assert fine.complete
    assert fine.grid == (1, 2, 4)
    assert [p.num_tokens for p in fine.to_profile().points] == [1, 2, 4]
    assert fine.digest != coarse.digest
    record_point(engine, started.id, point(2), now, settled=False)
    assert not next(p for p in list_profiles(engine) if p.id == started.id).complete


def test_the_bare_forward_stands_beside_the_step(engine: Engine, now: datetime) -> None:
    started = open_profile(engine, conditions(), [1], now)
    record_point(engine, started.id, point(1, 0.25), now)
    record_point(engine, started.id, point(1, 0.125), now, part="forward")
    stored = finish_profile(engine, started.id, [], now)
    assert stored.steps[1].point.median_s == 0.25
    assert stored.forwards[1].point.median_s == 0.125
    assert [p.median_s for p in stored.to_profile().points] == [0.25]


def test_import_is_idempotent_and_export_is_what_was_imported(engine: Engine, now: datetime) -> None:
    profile = replace(LatencyProfile.from_medians({1: 0.1, 8: 0.2}), cache="static", versions={"torch": "2"})
    first = add_profile(engine, profile, now)
    second = add_profile(engine, profile, now + timedelta(days=1))
    assert first.id == second.id
    assert first.origin == "imported"
    document = latency_document(first.to_profile())
    assert from_document(document, "export") == profile
    assert document["sha256"] == digest(profile)


@pytest.mark.parametrize("median", ["0", "-1", "'NaN'", "'Infinity'", "1e9"])
def test_the_database_itself_refuses_impossible_times(engine: Engine, now: datetime, median: str) -> None:
    started = open_profile(engine, conditions(), [1], now)
    record_point(engine, started.id, point(1), now)
    if engine.dialect.name == "sqlite":
        median = {"'NaN'": "NULL", "'Infinity'": "9e999"}.get(median, median)  # SQLite stores NaN as NULL
    with pytest.raises(Exception, match="constraint"), engine.begin() as connection:
        connection.execute(text(f"UPDATE points SET median_s = {median}"))  # noqa: S608
    assert list_profiles(engine)[0].steps[1].point == point(1)


def test_a_failing_write_leaves_nothing_behind(engine: Engine, now: datetime) -> None:
    started = open_profile(engine, conditions(), [1], now)
    with pytest.raises(DatabaseError, match="constraint"):
        record_point(engine, started.id, point(1), now, part="sideways")
    assert list_profiles(engine)[0].steps == {}
    with pytest.raises(DatabaseError, match="is gone; start the measurement again"):
        record_point(engine, 999, point(1), now)


def test_a_worker_that_lost_its_lease_cannot_write(engine: Engine, now: datetime) -> None:
    started = open_profile(engine, conditions(), [1], now)
    jobs.enqueue(engine, {"model": "toy"}, "d" * 64, now)
    slow = jobs.claim(engine, "d" * 64, "slow", 10, now)
    assert slow is not None
    lease = Lease(slow.id, "slow")
    record_point(engine, started.id, point(1), now, lease=lease)
    assert jobs.claim(engine, "d" * 64, "other", 10, now + timedelta(seconds=11)) is not None
    for write in (
        lambda: record_point(engine, started.id, point(1, 9.0), now, lease=lease),
        lambda: set_flags(engine, started.id, ["noisy"], now, lease=lease),
        lambda: finish_profile(engine, started.id, [], now, lease=lease),
    ):
        with pytest.raises(DatabaseError, match="lease lost"):
            write()
    (stored,) = list_profiles(engine)
    assert stored.steps[1].point == point(1)
    assert (stored.complete, stored.flags) == (False, ())


def test_forgetting_takes_the_points_along(engine: Engine, now: datetime) -> None:
    started = open_profile(engine, conditions(), [1], now)
    record_point(engine, started.id, point(1), now)
    forget_profile(engine, started.id)
    assert list_profiles(engine) == ()
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM points")).scalar() == 0
    assert problems(engine, now) == ()


def test_lists_are_filtered_and_newest_first(engine: Engine, now: datetime) -> None:
    old = open_profile(engine, conditions(), [1], now)
    new = open_profile(engine, conditions(context_len=512), [1], now + timedelta(hours=1))
    open_profile(engine, conditions(model="other"), [1], now)
    assert [p.id for p in list_profiles(engine, model="toy")] == [new.id, old.id]
    assert len(list_profiles(engine, instance_digest="d" * 64)) == 3
    assert list_profiles(engine, instance_digest="e" * 64) == ()


@pytest.mark.parametrize(
    ("reference", "said"), [("abc", "at least 4 digits"), ("zzzz", "at least 4 digits"), ("abcd", "is not in this")]
)
def test_a_wrong_reference_is_explained(engine: Engine, reference: str, said: str) -> None:
    with pytest.raises(TreeOptError, match=said):
        find_profile(engine, reference)


def test_check_finds_a_curve_that_lies(engine: Engine, now: datetime) -> None:
    started = open_profile(engine, conditions(), [1, 2], now)
    record_point(engine, started.id, point(1), now)
    assert problems(engine, now) == ()
    with engine.begin() as connection:
        connection.execute(text("UPDATE profiles SET complete = :yes"), {"yes": True})
    assert problems(engine, now) == (f"profile {started.id}: says it is complete but lacks the points [2]; forget it",)
