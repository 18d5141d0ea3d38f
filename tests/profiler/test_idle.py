"""Idle is a conjunction, and unknown is not idle."""

from dataclasses import replace
from datetime import datetime

import pytest

from profiler.idle import Dwell, Hours, IdlePolicy, Observation, blockers
from treeopt.errors import ProfileError

NOON = datetime(2026, 1, 1, 12, 0)
QUIET = Observation(foreign_cpu=0.02, free_bytes=2**33, on_mains=True, foreign_gpu_processes=0, gpu_utilisation=0.0)


def test_a_quiet_machine_is_idle() -> None:
    assert blockers(QUIET, IdlePolicy(), NOON) == ()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"foreign_cpu": 0.26}, "26 % of the processors"),
        ({"free_bytes": 2**20}, "only 1 MiB"),
        ({"on_mains": False}, "on battery"),
        ({"foreign_gpu_processes": 2}, "2 other process"),
        ({"gpu_utilisation": 0.06}, "GPU is 6 % busy"),
        ({"foreign_cpu": None}, "by others is unknown"),
        ({"free_bytes": None}, "free memory is unknown"),
        ({"on_mains": None}, "power source is unknown"),
        ({"foreign_gpu_processes": None}, "GPU is unknown"),
        ({"gpu_utilisation": None}, "utilisation is unknown"),
    ],
)
def test_each_condition_alone_blocks(change: dict[str, object], said: str) -> None:
    (reason,) = blockers(replace(QUIET, **change), IdlePolicy(), NOON)
    assert said in reason


def test_unknown_may_be_accepted_but_known_busy_not() -> None:
    policy = IdlePolicy(allow_unknown=True)
    unknown = Observation(None, None, None, None, None)
    assert blockers(unknown, policy, NOON) == ()
    assert len(blockers(replace(unknown, gpu_utilisation=0.9), policy, NOON)) == 1


def test_battery_may_be_allowed() -> None:
    assert blockers(replace(QUIET, on_mains=False), IdlePolicy(need_mains=False), NOON) == ()


@pytest.mark.parametrize(
    ("window", "hour", "inside"),
    [
        ("09:00-17:00", 9, True),
        ("09:00-17:00", 17, False),
        ("22:00-06:00", 23, True),
        ("22:00-06:00", 0, True),
        ("22:00-06:00", 6, False),
        ("22:00-06:00", 12, False),
    ],
)
def test_hours_may_span_midnight(window: str, hour: int, inside: bool) -> None:
    policy = IdlePolicy(hours=Hours.parse(window))
    assert (blockers(QUIET, policy, NOON.replace(hour=hour)) == ()) is inside


@pytest.mark.parametrize("text", ["", "22-06", "25:00-06:00", "22:00-06:60", "22:00-22:00", "22:00", "x"])
def test_malformed_hours_are_refused(text: str) -> None:
    with pytest.raises(ProfileError, match="--window"):
        Hours.parse(text)


def test_a_break_starts_the_dwell_time_again() -> None:
    policy = IdlePolicy(dwell_s=60)
    state = Dwell()
    history = [(0, True), (30, True), (59, True), (61, True), (62, False), (63, True), (122, True), (123, True)]
    idle = []
    for now_s, quiet in history:
        state = state.after(quiet, now_s)
        idle.append(state.idle(now_s, policy))
    assert idle == [False, False, False, True, False, False, False, True]
