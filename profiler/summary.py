"""Medians, spreads and confidence intervals of raw step times.

Medians and order statistics, not means: a step that met a page fault or another process is late by any amount, never
early, so a mean follows the outliers and a median does not.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

__all__ = ["interquartile_range", "median", "median_interval", "quantile"]


def quantile(samples: Sequence[float], share: float) -> float:
    """Return the ``share`` quantile, linear between order statistics (numpy's default rule).

    Parameters
    ----------
    samples : sequence of float
        At least one value, in any order.
    share : float
        0 for the smallest, 1 for the largest.

    Examples
    --------
    >>> quantile([4.0, 1.0, 2.0, 3.0], 0.25)
    1.75
    """
    ordered = sorted(samples)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median(samples: Sequence[float]) -> float:
    """Return the middle value, or the mean of the two middle ones."""
    return quantile(samples, 0.5)


def interquartile_range(samples: Sequence[float]) -> float:
    """Return the distance between the 75 % and the 25 % quantile; 0 for a single sample."""
    return quantile(samples, 0.75) - quantile(samples, 0.25)


@lru_cache(maxsize=4096)
def _interval_rank(count: int, confidence: float) -> int | None:
    """Return the largest k (from 1) with P(Binomial(count, 1/2) < k) <= (1 - confidence) / 2, or None."""
    tail = 0.0
    allowed = (1 - confidence) / 2
    scale = 0.5**count if count < 1000 else 0.0
    rank = None
    for k in range(count // 2):
        tail += math.comb(count, k) * scale if scale else math.comb(count, k) / 2**count
        if tail > allowed:
            break
        rank = k + 1
    return rank


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Return a distribution-free confidence interval of the median.

    The number of samples below the true median is Binomial(n, 1/2), so two order statistics enclose it with at least
    the wanted probability whatever the distribution of the step times (Conover, "Practical Nonparametric Statistics",
    section 3.2).

    Parameters
    ----------
    samples : sequence of float
        Step times, seconds.
    confidence : float
        Least coverage of the interval.

    Returns
    -------
    tuple of (float, float) or None
        Low and high end, seconds; None when there are too few samples for that confidence (under 6 at 95 %).

    Examples
    --------
    >>> median_interval([1.0, 2.0, 3.0, 4.0, 5.0]) is None
    True
    >>> median_interval([9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    (2.0, 8.0)
    """
    rank = _interval_rank(len(samples), confidence)
    if rank is None:
        return None
    ordered = sorted(samples)
    return ordered[rank - 1], ordered[-rank]
