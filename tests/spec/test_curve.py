"""Curves: what was measured comes back, what lies between is between, and nothing shrinks as sizes grow."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowstead.spec.curve import Curve, CurveAxis
from rowstead.spec.errors import SpecError

SIZES = (1.0, 10.0, 100.0)


def curve_of(*, grows: bool = True) -> Curve:
    """Seconds that are the product of two sizes, and a little more."""
    axes = (CurveAxis(name="rows", sizes=SIZES), CurveAxis(name="width", sizes=(2.0, 8.0), grows=grows))
    return Curve(axes=axes, seconds=tuple(a * b + 1.0 for a, b in itertools.product(SIZES, (2.0, 8.0))))


def test_measured_sizes_have_measured_times() -> None:
    curve = curve_of()
    for a, b in itertools.product(SIZES, (2.0, 8.0)):
        assert curve.at(a, b) == pytest.approx(a * b + 1.0)


@given(st.floats(1, 100), st.floats(2, 8))
def test_times_between_sizes_are_between_times(rows: float, width: float) -> None:
    curve = curve_of()
    assert curve.at(1, 2) * (1 - 1e-9) <= curve.at(rows, width) <= curve.at(100, 8) * (1 + 1e-9)


@given(st.floats(0.1, 1e4), st.floats(0.1, 1e4), st.floats(0.1, 1e3))
def test_more_work_never_takes_less(one: float, other: float, width: float) -> None:
    curve = curve_of()
    low, high = sorted((one, other))
    assert curve.at(low, width) <= curve.at(high, width) * (1 + 1e-9)


def test_beyond_the_largest_time_grows_in_proportion_unless_it_stays() -> None:
    assert curve_of().at(1, 80) == pytest.approx(10 * curve_of().at(1, 8))
    assert curve_of(grows=False).at(1, 80) == pytest.approx(curve_of().at(1, 8))


@pytest.mark.parametrize(
    ("axes", "seconds", "problem"),
    [
        (((2.0, 1.0),), (1.0, 1.0), "ascending"),
        (((),), (), "at least one"),
        (((1.0, 2.0),), (1.0,), "expected 2 times"),
        (((1.0, 2.0),), (1.0, 0.0), "above 0"),
    ],
)
def test_a_curve_that_contradicts_itself_is_refused(
    axes: tuple[tuple[float, ...], ...], seconds: tuple[float, ...], problem: str
) -> None:
    with pytest.raises(SpecError, match=problem):
        Curve(axes=tuple(CurveAxis(name="rows", sizes=sizes) for sizes in axes), seconds=seconds)
