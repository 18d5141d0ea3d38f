"""One curve into the database: complete, interrupted, taken up again, refined, disturbed."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine

from db.profiles import list_profiles
from db.schema import open_database
from profiler.flags import Conditions
from profiler.latency import StoppingRule
from profiler.refine import coarse_tokens
from tests.db.examples import conditions
from tests.profiler.fakes import FakeMachine
from treeopt.app.profile import ProfileRequest, search_choice
from treeopt.app.profile_measure import Hooks, measure_profile
from treeopt.errors import ProfileError
from treeopt.types import LatencyProfile

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
STAIRS = {1: 0.082, 2: 0.099, 3: 0.111, 4: 0.099, 7: 0.148, 8: 0.125}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    opened = open_database(f"sqlite:///{tmp_path / 'x.db'}", create=True)
    assert opened is not None
    yield opened
    opened.dispose()


def hooks(machine: FakeMachine, **changes: object) -> Hooks:
    known = {
        "clock": machine.clock,
        "now": lambda: START + timedelta(seconds=machine.clock.now_s),
        "synchronise": machine.synchronise,
    }
    return Hooks(**{**known, **changes})


def stairs() -> FakeMachine:
    return FakeMachine(lambda n, count, now: STAIRS[n])


REQUEST = ProfileRequest("toy", tokens=tuple(STAIRS), contexts=(64,))


def test_a_curve_is_stored_complete_with_raw_samples_and_the_bare_forward(engine: Engine) -> None:
    machine, bare = stairs(), FakeMachine(lambda n, count, now: STAIRS[n] / 2)
    bare.clock = machine.clock
    outcome = measure_profile(engine, conditions(), REQUEST, machine, bare, hooks=hooks(machine))
    assert outcome.stopped is None
    (stored,) = list_profiles(engine)
    assert stored == outcome.profile
    assert (stored.complete, stored.flags) == (True, ())
    profile = stored.to_profile()
    assert {p.num_tokens: p.median_s for p in profile.points} == pytest.approx(STAIRS)
    assert all(p.samples_s is not None and len(p.samples_s) == p.num_samples >= 9 for p in profile.points)
    assert {n: p.point.median_s for n, p in stored.forwards.items()} == pytest.approx(
        {n: STAIRS[n] / 2 for n in (1, 2, 4, 8)}
    )


def test_what_was_measured_is_stored_at_every_visit_and_taken_up_again(engine: Engine) -> None:
    machine = stairs()
    visits = iter(range(10))
    outcome = measure_profile(
        engine, conditions(), REQUEST, machine, hooks=hooks(machine, stop=lambda: "busy" if next(visits) == 7 else None)
    )
    assert outcome.stopped == "busy"
    assert not outcome.profile.complete
    before = {n: p.point.samples_s for n, p in outcome.profile.steps.items()}
    assert len(before) == 6
    assert sum(len(samples or ()) for samples in before.values()) == 7 * 3

    again = measure_profile(engine, conditions(), REQUEST, machine, hooks=hooks(machine))
    assert again.profile.id == outcome.profile.id
    assert again.profile.complete
    after = {n: p.point.samples_s for n, p in again.profile.steps.items()}
    assert all((after[n] or ())[: len(before[n] or ())] == before[n] for n in before), "no sample is lost"
    assert all(len(samples or ()) == 9 for n, samples in after.items() if n != 1), "and none is taken twice"


def test_fresh_starts_over(engine: Engine) -> None:
    machine = stairs()
    first = measure_profile(
        engine, conditions(), REQUEST, machine, hooks=hooks(machine, stop=iter([None, "x"]).__next__)
    )
    request = ProfileRequest("toy", tokens=tuple(STAIRS), contexts=(64,), fresh=True)
    second = measure_profile(engine, conditions(), request, machine, hooks=hooks(machine))
    assert second.profile.id != first.profile.id


def test_what_a_stricter_rule_left_open_is_settled_by_a_milder_one(engine: Engine) -> None:
    machine = stairs()
    visits = iter(range(100))
    strict = StoppingRule(halfwidth=1e-9, min_samples=60)
    stop = lambda: "busy" if next(visits) == 30 else None  # noqa: E731 - every point has some samples by then
    first = measure_profile(engine, conditions(), REQUEST, machine, hooks=hooks(machine, stop=stop), rule=strict)
    assert not any(point.settled for point in first.profile.steps.values())
    second = measure_profile(engine, conditions(), REQUEST, machine, hooks=hooks(machine))
    assert second.profile.id == first.profile.id
    assert second.profile.complete


def test_a_complete_curve_of_the_same_request_is_not_measured_again(engine: Engine) -> None:
    machine = stairs()
    first = measure_profile(engine, conditions(), REQUEST, machine, hooks=hooks(machine))
    again = measure_profile(engine, conditions(), REQUEST, machine, hooks=hooks(machine), done_after=START)
    assert again.profile.id == first.profile.id
    samples = [{n: p.point.samples_s for n, p in each.profile.steps.items()} for each in (first, again)]
    assert samples[0] == samples[1]
    machine.clock.now_s += 2 * 3600
    later = measure_profile(engine, conditions(), REQUEST, machine, hooks=hooks(machine))
    assert later.profile.id != first.profile.id, "too old to be this request's own"


def test_a_curve_that_reaches_less_far_is_not_taken_for_a_longer_one(engine: Engine) -> None:
    machine = FakeMachine(lambda n, count, now: 0.01 * n)
    ends = []
    for longest in (4, 32, 8):
        request = ProfileRequest("toy", max_tokens=longest, seconds=0.0)
        outcome = measure_profile(engine, conditions(), request, machine, hooks=hooks(machine))
        assert outcome.profile.complete
        ends.append(outcome.profile.to_profile().points[-1].num_tokens)
    assert ends == [4, 32, 8]


def test_an_unfinished_curve_is_taken_up_hours_later(engine: Engine) -> None:
    machine = FakeMachine(lambda n, count, now: 0.01 * n)
    request = ProfileRequest("toy", max_tokens=16, seconds=0.0)
    visits = iter(range(100))
    stop = lambda: "busy" if next(visits) == 7 else None  # noqa: E731
    first = measure_profile(engine, conditions(), request, machine, hooks=hooks(machine, stop=stop))
    machine.clock.now_s += 3 * 3600
    second = measure_profile(engine, conditions(), request, machine, hooks=hooks(machine))
    assert second.profile.id == first.profile.id
    assert second.profile.complete


def test_a_disturbed_refinement_leaves_a_finished_curve_clean(engine: Engine) -> None:
    machine = FakeMachine(lambda n, count, now: 0.01 * -(-n // 8))

    def busy() -> Conditions:
        complete = any(stored.complete for stored in list_profiles(engine))
        return Conditions(foreign_cpu=0.8 if complete else 0.0)

    request = ProfileRequest("toy", max_tokens=32, seconds=1e9)
    outcome = measure_profile(
        engine, conditions(), request, machine, hooks=hooks(machine, conditions=busy, keep_contended=False)
    )
    assert outcome.stopped is not None
    assert (outcome.profile.complete, outcome.profile.flags) == (True, ())


def test_coarse_to_fine_is_useful_at_once_and_better_with_time(engine: Engine) -> None:
    machine = FakeMachine(lambda n, count, now: 0.01 * -(-n // 8))  # stairs of 8
    request = ProfileRequest("toy", max_tokens=32, seconds=1e9)
    seen: list[tuple[bool, int]] = []

    def look(profile_id: int, visit: object) -> None:
        (stored,) = list_profiles(engine)
        seen.append(
            (
                stored.complete,
                len(stored.to_profile().points) if stored.steps.get(1, None) and stored.steps[1].settled else 0,
            )
        )

    outcome = measure_profile(engine, conditions(), request, machine, hooks=hooks(machine, on_point=look))
    assert [p.num_tokens for p in outcome.profile.to_profile().points] == list(range(1, 33))
    first_complete = next(i for i, (complete, _) in enumerate(seen) if complete)
    assert all(complete for complete, _ in seen[first_complete:]), "a usable curve stays usable while it is refined"
    assert seen[first_complete][1] == len(coarse_tokens(32))
    counts = [count for _, count in seen[first_complete:]]
    assert counts == sorted(counts)


def test_time_is_spent_where_a_search_would_look(engine: Engine) -> None:
    machine = FakeMachine(lambda n, count, now: 0.01 * n)
    request = ProfileRequest("toy", max_tokens=64, seconds=1.0)
    outcome = measure_profile(engine, conditions(), request, machine, hooks=hooks(machine, chosen=lambda profile: {32}))
    extra = set(outcome.profile.grid) - set(coarse_tokens(64))
    assert {24, 48} <= extra
    assert len(extra) <= 4, "one round, then the time is up"


def test_the_search_is_asked_for_its_sizes() -> None:
    curve = LatencyProfile.from_medians({1: 1.0, 2: 1.01, 4: 1.02, 8: 1.03, 16: 9.0})
    assert set(search_choice("vicuna-7b-m3")(curve)) <= {1, 2, 4, 8}
    assert list(search_choice("vicuna-7b-m3")(LatencyProfile.from_medians({1: 1.0}))) in ([], [1, 1, 1, 1])


def test_giving_way_flags_the_curve_and_a_clean_rest_clears_it(engine: Engine) -> None:
    machine = stairs()
    calls = iter(range(1000))

    def busy() -> Conditions:
        return Conditions(foreign_cpu=0.8 if next(calls) == 9 else 0.0)

    outcome = measure_profile(
        engine, conditions(), REQUEST, machine, hooks=hooks(machine, conditions=busy, keep_contended=False)
    )
    assert outcome.stopped is not None
    assert outcome.profile.flags == ("contended",)
    assert not outcome.profile.complete
    total = sum(len(p.point.samples_s or ()) for p in outcome.profile.steps.values())
    assert total == 4 * 3, "the disturbed fifth visit was thrown away"
    again = measure_profile(engine, conditions(), REQUEST, machine, hooks=hooks(machine))
    assert (again.profile.complete, again.profile.flags) == (True, ())


def test_a_disturbed_measurement_that_goes_on_is_flagged(engine: Engine) -> None:
    machine = stairs()
    outcome = measure_profile(
        engine,
        conditions(),
        REQUEST,
        machine,
        hooks=hooks(machine, conditions=lambda: Conditions(foreign_cpu=0.8, throttled=True)),
    )
    assert outcome.profile.complete
    assert outcome.profile.flags == ("contended", "throttled")
    assert outcome.profile.steps[4].flags == ("contended", "throttled")


def test_noise_and_drift_are_flagged(engine: Engine) -> None:
    machine = FakeMachine(lambda n, count, now: 0.1 if n == 1 and count < 14 else 0.2 if count % 2 else 0.1)
    request = ProfileRequest("toy", tokens=(1, 2, 4), contexts=(64,))
    outcome = measure_profile(
        engine, conditions(), request, machine, hooks=hooks(machine), rule=StoppingRule(max_s=1.5)
    )
    assert "noisy" in outcome.profile.flags
    assert outcome.profile.steps[2].flags == ("noisy",)


def test_a_vanishing_device_keeps_what_was_measured(engine: Engine) -> None:
    def cost(n: int, count: int, now: float) -> float:
        if len(machine.runs) > 30:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return STAIRS[n]

    machine = FakeMachine(cost)
    with pytest.raises(ProfileError, match="the device failed"):
        measure_profile(engine, conditions(), REQUEST, machine, hooks=hooks(machine))
    (stored,) = list_profiles(engine)
    assert not stored.complete
    assert len(stored.steps) == 6
    healed = stairs()
    again = measure_profile(engine, conditions(), REQUEST, healed, hooks=hooks(healed))
    assert again.profile.id == stored.id
    assert again.profile.complete


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": (2, 4)}, "must hold 1"),
        ({"tokens": ()}, "must hold 1"),
        ({"contexts": (0,)}, "--contexts"),
        ({"batch_sizes": ()}, "--batch-sizes"),
        ({"max_tokens": 0}, "--tokens"),
        ({"dtypes": ("float8",)}, "--dtype"),
        ({"caches": ("paged",)}, "--cache"),
        ({"graph_modes": ("fast",)}, "--graph-mode"),
        ({"attentions": ("flash",)}, "--attention"),
    ],
)
def test_requests_that_cannot_be_measured_are_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(ProfileError, match=said):
        ProfileRequest("toy", **change)


def test_a_request_survives_the_queue() -> None:
    request = ProfileRequest("toy", tokens=(1, 2), contexts=(64, 512), caches=("static",), seconds=5.0)
    assert ProfileRequest.from_spec(request.to_spec()) == request
    with pytest.raises(ProfileError, match="queued by another version"):
        ProfileRequest.from_spec({"model": "toy", "colour": "red"})


def test_fixed_shapes_need_the_static_cache() -> None:
    with pytest.raises(ProfileError, match="--graph-mode compiled: needs --cache static"):
        ProfileRequest("toy", graph_modes=("eager", "compiled"), caches=("dynamic", "static"))
    assert ProfileRequest("toy", graph_modes=("eager", "compiled"), caches=("static",)).caches == ("static",)
