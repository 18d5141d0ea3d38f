"""The measuring loop with a declared machine: exact figures, decisions, order and flags."""

import math

import pytest

from profiler.flags import Conditions
from profiler.latency import Drift, Measured, Stopped, StoppingRule, Visit, latency_point, measure, time_step
from profiler.summary import median
from tests.profiler.fakes import FakeMachine, noisy
from treeopt.errors import InvalidValueError, ProfileError


def run(machine: FakeMachine, tokens: list[int], **options: object) -> list[Measured]:
    events = measure(machine, tokens, context_len=64, clock=machine.clock, synchronise=machine.synchronise, **options)
    return list(events)


def last(events: list[Measured]) -> dict[int, Visit]:
    return {event.num_tokens: event for event in events if isinstance(event, Visit)}


def medians(events: list[Measured]) -> dict[int, float]:
    return {n: median(visit.samples_s) for n, visit in last(events).items()}


def test_constant_steps_are_measured_exactly_and_stop_at_the_minimum() -> None:
    machine = FakeMachine(lambda n, count, now: n / 64)  # binary fractions: sums of them are exact
    events = run(machine, [1, 2, 8])
    assert medians(events) == {1: 1 / 64, 2: 2 / 64, 8: 8 / 64}
    found = last(events)
    assert len(found[2].samples_s) == 9
    assert all(visit.settled for visit in found.values())
    assert latency_point(2, found[2].samples_s).iqr_s == 0
    assert isinstance(events[-1], Drift)
    assert events[-1].flags == frozenset()


def test_a_stair_a_dip_and_an_outlier_come_out_as_they_are() -> None:
    medians_s = {1: 0.082, 2: 0.099, 3: 0.111, 4: 0.099, 7: 0.148, 8: 0.125, 14: 0.209, 16: 0.162}
    machine = FakeMachine(lambda n, count, now: 30.0 if (n, count) == (7, 5) else medians_s[n])
    events = run(machine, list(medians_s))
    assert medians(events) == pytest.approx(medians_s, rel=1e-9)
    assert max(last(events)[7].samples_s) == pytest.approx(30.0), "the outlier is kept, the median ignores it"


def test_warm_up_steps_are_run_but_not_recorded() -> None:
    machine = FakeMachine(lambda n, count, now: 100.0 if count <= 2 else 0.5)
    events = run(machine, [4], warmup=2)
    assert set(last(events)[4].samples_s) == {0.5}
    assert machine.runs[:2] == [4, 4]


def test_restoring_is_not_timed_and_every_timed_step_is_synchronised() -> None:
    machine = FakeMachine(lambda n, count, now: 0.5)
    events = run(machine, [4])
    assert set(last(events)[4].samples_s) == {0.5}
    assert machine.synchronised == 2 * len(last(events)[4].samples_s)


def test_every_round_visits_in_another_order() -> None:
    machine = FakeMachine(lambda n, count, now: 0.125)
    tokens = list(range(1, 17))
    events = run(machine, tokens, rule=StoppingRule(min_samples=12))
    visits = [event.num_tokens for event in events if isinstance(event, Visit)]
    rounds = [visits[i : i + 16] for i in range(0, len(visits), 16)]
    assert len(rounds) == 4
    assert all(sorted(order) == tokens for order in rounds)
    assert len({tuple(order) for order in rounds}) == 4
    assert tokens not in rounds


def test_the_seed_changes_the_order_and_not_the_result() -> None:
    medians_s = {n: 0.1 + 0.01 * n for n in (1, 2, 4, 8, 16)}
    found = [run(FakeMachine(lambda n, count, now: medians_s[n]), list(medians_s), seed=seed) for seed in range(5)]
    orders = {tuple(event.num_tokens for event in events if isinstance(event, Visit)) for events in found}
    assert len(orders) == 5
    assert all(medians(events) == pytest.approx(medians_s) for events in found)


def test_a_machine_that_slows_down_gives_a_level_and_no_slope() -> None:
    """All lengths cost the same and everything gets slower: sorted visits would show a slope of a factor of 2."""
    machine = FakeMachine(lambda n, count, now: 0.1 + (now - 1000.0) * 1e-5)
    events = run(machine, list(range(1, 33)), rule=StoppingRule(min_samples=18, halfwidth=0.5, max_s=1e9))
    found = medians(events)
    growth = max(max(visit.samples_s) for visit in last(events).values()) / 0.1
    assert growth > 1.5, "the machine did slow down"
    level = median(list(found.values()))
    assert all(abs(value / level - 1) < 0.12 for value in found.values())
    tokens = sorted(found)
    low, high = (median([found[n] for n in part]) for part in (tokens[:16], tokens[16:]))
    assert abs(high / low - 1) < 0.05


def test_drift_is_found_when_one_token_is_measured_again() -> None:
    machine = FakeMachine(lambda n, count, now: 0.5 if machine.runs.count(1) <= 13 else 0.6)
    events = run(machine, [1, 2])
    drift = events[-1]
    assert isinstance(drift, Drift)
    assert (drift.curve_s, drift.end_s) == pytest.approx((0.5, 0.6))
    assert drift.flags == {"drifted"}
    assert Drift(0.5, 0.54).flags == frozenset()
    assert Drift(0.5, 0.44).flags == {"drifted"}


def test_noise_is_measured_longer_until_the_interval_is_narrow() -> None:
    quiet = run(FakeMachine(noisy({1: 0.01}, 0.001, seed=1)), [1])
    loud_rule = StoppingRule(halfwidth=0.03, max_samples=500, max_s=1e9)
    loud = run(FakeMachine(noisy({1: 0.01}, 0.3, seed=1)), [1], rule=loud_rule)
    assert len(last(quiet)[1].samples_s) == 9
    assert len(last(loud)[1].samples_s) > 40
    assert last(loud)[1].settled


@pytest.mark.parametrize(
    ("samples_s", "rule", "settled"),
    [
        ([0.1] * 8, StoppingRule(), False),  # under the minimum
        ([0.1] * 9, StoppingRule(), True),
        ([0.1] * 9, StoppingRule(min_s=1.0), False),  # 0.9 s timed
        ([0.1] * 10, StoppingRule(min_s=1.0), True),
        ([1.0, 2.0, 3.0], StoppingRule(max_s=6.0), True),  # time is up, whatever the spread
        ([3.0, 3.5], StoppingRule(max_s=6.0), False),  # but never on fewer than three
        ([1.0, 2.0] * 30, StoppingRule(max_s=1e9), True),  # max_samples
        # 9 samples: the interval is the 2nd to the 8th smallest; half of it against a quarter of the median.
        ([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.5, 9.0], StoppingRule(halfwidth=0.25, max_s=1e9), True),
        ([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.501, 9.0], StoppingRule(halfwidth=0.25, max_s=1e9), False),
    ],
)
def test_when_a_point_is_settled(samples_s: list[float], rule: StoppingRule, settled: bool) -> None:
    assert rule.settled(samples_s) is settled


@pytest.mark.parametrize(
    "options", [{"halfwidth": 0}, {"min_samples": 0}, {"min_samples": 61}, {"min_s": 4.0}, {"min_s": -1.0}]
)
def test_rules_that_cannot_be_kept_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ProfileError, match=next(iter(options))):
        StoppingRule(**options)


def test_a_measurement_goes_on_from_held_samples() -> None:
    machine = FakeMachine(lambda n, count, now: 0.125)
    events = run(machine, [1, 2, 4], held={1: [0.125] * 9, 2: [0.125] * 7})
    found = last(events)
    assert len(found[2].samples_s) == 10
    assert len(found[4].samples_s) == 9
    done = run(FakeMachine(lambda n, count, now: 0.125), [2, 4], held={2: [0.125] * 9, 4: [0.125] * 9})
    assert done == [], "nothing is left to do"


def test_it_gives_way_before_the_next_visit() -> None:
    machine = FakeMachine(lambda n, count, now: 0.5)
    asked = iter([None, None, "a game was started"])
    events = run(machine, [1, 2, 4, 8], stop=lambda: next(asked))
    assert [type(event) for event in events] == [Visit, Visit, Stopped]
    assert events[-1] == Stopped("a game was started")


def test_a_disturbed_visit_is_flagged_or_thrown_away() -> None:
    def busy_during(visit: int):
        calls = iter(range(10_000))
        return lambda: Conditions(foreign_cpu=0.9 if next(calls) == 2 * visit + 1 else 0.01)

    kept = run(FakeMachine(lambda n, count, now: 0.5), [2, 4], conditions=busy_during(1))
    flagged = [event for event in kept if isinstance(event, Visit) and event.flags]
    assert [sorted(event.flags) for event in flagged] == [["contended"]]
    assert flagged[0].kept

    thrown = run(FakeMachine(lambda n, count, now: 0.5), [2, 4], conditions=busy_during(1), keep_contended=False)
    *_, visit, stopped = thrown
    assert isinstance(visit, Visit)
    assert (visit.kept, visit.settled, visit.samples_s) == (False, False, ())
    assert isinstance(stopped, Stopped)


@pytest.mark.parametrize("bad", [0.0, -0.5, math.nan, math.inf])
def test_impossible_times_are_refused(bad: float) -> None:
    machine = FakeMachine(lambda n, count, now: bad if count > 4 else 0.5)
    with pytest.raises(ProfileError, match=r"clock: gave .* nothing was stored"):
        run(machine, [1])
    with pytest.raises(InvalidValueError):
        latency_point(1, [0.5, bad])


def test_a_device_that_vanishes_is_one_clear_line() -> None:
    def cost(n: int, count: int, now: float) -> float:
        if n == 8 and count > 3:
            raise RuntimeError("CUDA error: device-side assert\nCUDA kernel errors might be asynchronous")
        return 0.5

    seen = []
    with pytest.raises(ProfileError, match="step of 8 tokens: the device failed") as caught:
        seen.extend(measure(machine := FakeMachine(cost), [1, 8], context_len=64, clock=machine.clock))
    assert "\n" not in str(caught.value)


def test_the_timed_region_is_run_and_synchronise_only() -> None:
    order = []

    class Step:
        def restore(self) -> None:
            order.append("restore")

        def run(self) -> None:
            order.append("run")

    ticks = iter([10.0, 12.5])

    def clock() -> float:
        order.append("clock")
        return next(ticks)

    assert time_step(Step(), clock, lambda: order.append("synchronise")) == 2.5
    assert order == ["restore", "synchronise", "clock", "run", "synchronise", "clock"]
