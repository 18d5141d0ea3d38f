"""What counts as odd, at its limits."""

import pytest

from profiler.flags import Conditions, drift_of, is_noisy, profile_flags, visit_flags


@pytest.mark.parametrize(
    ("conditions", "flags"),
    [
        (Conditions(), set()),  # nothing can be told: nothing is claimed
        (Conditions(foreign_cpu=0.25, foreign_gpu_processes=0, throttled=False), set()),
        (Conditions(foreign_cpu=0.26), {"contended"}),
        (Conditions(foreign_gpu_processes=1), {"contended"}),
        (Conditions(throttled=True), {"throttled"}),
    ],
)
def test_visits(conditions: Conditions, flags: set[str]) -> None:
    assert visit_flags(conditions) == flags


def test_noise_is_the_interquartile_range_over_the_median() -> None:
    assert not is_noisy([1.0, 1.0, 1.0, 5.0, 1.0])  # one outlier is no noise
    assert is_noisy([1.0, 1.2, 1.0, 1.2])
    assert not is_noisy([1.0])


def test_drift_goes_both_ways() -> None:
    assert not drift_of(1.0, 1.0999)
    assert drift_of(1.0, 1.11)
    assert drift_of(1.0, 0.89)


def test_a_profile_is_odd_when_a_tenth_of_its_points_or_its_first_is() -> None:
    sound: dict[int, list[str]] = {n: [] for n in range(1, 21)}
    assert profile_flags(sound) == ()
    assert profile_flags({**sound, 5: ["noisy"], 6: ["noisy"]}) == ()  # 2 of 20
    assert profile_flags({**sound, 5: ["noisy"], 6: ["noisy"], 7: ["noisy"]}) == ("noisy",)
    assert profile_flags({**sound, 1: ["contended"]}) == ("contended",)
    assert profile_flags({**sound, 1: ["throttled"]}, drifted=True) == ("drifted", "throttled")
