"""Labels, numbers and palettes of figures."""

from __future__ import annotations

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from rowstead.report.theme import DARK, LIGHT, Chart, label, labels, script_json, short, thinned


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
