"""Labels, numbers and palettes of figures."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowstead.report.theme import (
    DARK,
    LIGHT,
    MAX_TICKS,
    Chart,
    label,
    labels,
    log_axis,
    log_ticks,
    script_json,
    short,
    thinned,
    tick_text,
)


@given(st.text(max_size=200))
def test_a_label_has_no_markup_and_is_never_a_color_token(text: str) -> None:
    made = label(text)
    assert "<" not in made
    assert not made.startswith("@")
    figure = Chart(key="k", title="t", words="w", traces=[{"name": made}], layout={})
    assert figure.plain(LIGHT)["data"][0]["name"] == made


def test_names_that_are_truncated_alike_stay_distinct() -> None:
    made = labels(["x" * 100 + "a", "x" * 100 + "b", "x"])
    assert len(set(made)) == 3


@given(st.text())
def test_json_inside_a_script_can_end_neither_the_script_nor_a_line(text: str) -> None:
    made = script_json({"x": text})
    assert not set("<>&\u2028\u2029\n") & set(made)
    assert json.loads(made)["x"] == text


def test_non_finite_numbers_are_null_and_others_rounded() -> None:
    assert short([math.nan, math.inf, 1 / 3, 5, None, "x", True]) == [None, None, 0.333333, 5, None, "x", True]


def test_light_and_dark_palettes_have_the_same_tokens() -> None:
    assert LIGHT.keys() == DARK.keys()


@given(st.lists(st.integers(), max_size=300), st.integers(2, 50))
def test_thinning_keeps_order_ends_and_bound(items: list[int], most: int) -> None:
    kept = thinned(items, most)
    assert len(kept) == min(len(items), most)
    if items:
        assert (kept[0], kept[-1]) == (items[0], items[-1])


PREFIXES = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def number_on(tick: str) -> float:
    """The number that a tick's text says."""
    return float(tick.rstrip("kMGT")) * PREFIXES.get(tick[-1], 1.0)


@given(st.floats(1e-9, 1e11), st.floats(1.1, 1e6))
def test_a_log_axis_has_few_ticks_that_say_their_values(low: float, factor: float) -> None:
    ticks = log_ticks(low, low * factor)
    assert 2 <= len(ticks) <= MAX_TICKS
    assert ticks == sorted(set(ticks))
    assert all(0.999 * low <= tick <= 1.001 * low * factor for tick in ticks)
    assert [number_on(tick_text(tick)) for tick in ticks] == pytest.approx(ticks)


def test_throughputs_are_marked_as_20k_and_50k() -> None:
    made = log_axis("samples/s", [9_000, 80_000])
    assert made["ticktext"] == ["10k", "20k", "50k"]
    assert made["tickvals"][made["ticktext"].index("20k")] == 20_000
