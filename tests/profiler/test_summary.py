"""Medians, quartiles and intervals against numpy and a direct count of coverage."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler.summary import interquartile_range, median, median_interval, quantile

samples = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=40)


@given(samples, st.floats(0, 1))
def test_quantiles_are_numpys(values: list[float], share: float) -> None:
    assert quantile(values, share) == pytest.approx(float(np.quantile(values, share)), rel=1e-12)


@given(samples)
def test_median_and_range_are_numpys(values: list[float]) -> None:
    assert median(values) == pytest.approx(float(np.median(values)), rel=1e-12)
    low, high = np.quantile(values, [0.25, 0.75])
    assert interquartile_range(values) == pytest.approx(float(high - low), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("count", [*range(1, 60), 200, 1001])
def test_the_interval_is_the_narrowest_with_95_percent(count: int) -> None:
    interval = median_interval([float(i) for i in range(1, count + 1)])

    def covers(rank: int) -> float:
        """P(rank-th smallest < median < rank-th largest), from the exact binomial count."""
        return 1 - 2 * sum(math.comb(count, k) for k in range(rank)) / 2**count

    if interval is None:
        assert covers(1) < 0.95
        return
    rank = int(interval[0])
    assert interval[1] == count + 1 - rank
    assert covers(rank) >= 0.95
    assert rank + 1 > count + 1 - (rank + 1) or covers(rank + 1) < 0.95
