"""A spec refuses values outside the bounds that the types of its fields state, and names the field."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from rowstead.spec.bounds import AboveZero, AtLeastOne, BelowOne, Origin, PlainName, Share, Spec
from rowstead.spec.errors import SpecError


@dataclass(frozen=True, kw_only=True)
class Bounded(Spec):
    name: PlainName = "fine"
    count: AtLeastOne | None = None
    rate: AboveZero = 1.0
    share: Share = 1.0
    decay: BelowOne = 0.0
    source: Origin = "a test"


@dataclass(frozen=True, kw_only=True)
class Derived(Bounded):
    also: AtLeastOne = 1


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("name", "", "name: use letters"),
        ("name", "-x", "name: use letters"),
        ("name", "näme", "name: use letters"),
        ("name", "a/b", "name: use letters.*got `a/b`"),
        ("count", 0, "count: must be at least 1, got 0"),
        ("rate", 0.0, "rate: must be above 0 and finite, got 0.0"),
        ("rate", math.inf, "rate: must be above 0 and finite"),
        ("share", 1.5, "share: must be above 0 and at most 1"),
        ("decay", 1.0, "decay: must be at least 0 and below 1"),
        ("source", "  ", "source: say where these numbers come from"),
        ("also", -1, "also: must be at least 1, got -1"),
    ],
)
def test_a_value_outside_its_bound_is_refused(field: str, value: object, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        Derived(**{field: value})  # type: ignore[arg-type]


def test_values_inside_and_absent_ones_are_taken() -> None:
    assert Derived(name="m1-gpu_2.x", count=1, rate=1e-9, share=0.5, decay=0.999).count == 1
    assert Bounded().count is None
