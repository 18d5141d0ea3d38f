"""Coarse to fine: nothing is skipped for ever, bends and choices come first."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler.refine import coarse_tokens, refine_tokens
from treeopt.errors import ProfileError


@given(st.integers(1, 600))
def test_the_coarse_grid_holds_one_the_largest_and_powers_of_two(largest: int) -> None:
    grid = coarse_tokens(largest)
    assert grid[0] == 1
    assert grid[-1] == largest
    assert all(n == largest or n & (n - 1) == 0 for n in grid)
    assert all(b <= 2 * a for a, b in pairwise(grid))


def test_no_length_is_refused() -> None:
    with pytest.raises(ProfileError, match="at least 1"):
        coarse_tokens(0)


@given(st.integers(2, 80), st.integers(1, 7), st.randoms(use_true_random=False))
def test_with_time_every_length_is_measured(largest: int, count: int, source) -> None:
    curve = {n: 1 + source.random() for n in coarse_tokens(largest)}
    while more := refine_tokens(curve, count):
        assert len(more) <= count
        assert not set(more) & curve.keys()
        curve |= {n: 1 + source.random() for n in more}
    assert sorted(curve) == list(range(1, largest + 1))


def test_a_straight_curve_is_refined_in_its_widest_gap() -> None:
    assert refine_tokens({n: 1.0 + n / 8 for n in (1, 2, 4, 8, 16, 32)}, 1) == (24,)


def test_beside_what_a_search_would_choose_comes_first() -> None:
    curve = {1: 1.0, 2: 1.0, 4: 1.0, 8: 3.0, 16: 3.0, 32: 3.0}
    assert refine_tokens(curve, 2, chosen={32}) == (6, 24)
    assert refine_tokens(curve, 1, chosen={32}) == (24,)


def test_a_falling_stair_bends_too() -> None:
    assert refine_tokens({1: 1.0, 4: 1.3, 8: 1.6, 12: 1.9, 16: 1.2, 20: 2.5}, 2) == (14, 18)
