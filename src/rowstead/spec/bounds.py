"""Bounds that many numbers of a description keep: a SpecError names the field that does not."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from rowstead.spec.errors import require


def require_above_zero(spec: Any, *names: str) -> None:
    """Each of these fields is above 0 and finite."""
    for name in names:
        value = getattr(spec, name)
        require(0 < value < math.inf, name, f"must be above 0 and finite, got {value:g}")


def require_not_negative(spec: Any, *names: str) -> None:
    """Each of these fields is 0 or more, and finite."""
    for name in names:
        value = getattr(spec, name)
        require(0 <= value < math.inf, name, f"must be finite and not negative, got {value}")


def require_source(spec: Any) -> None:
    """A block of numbers says where they come from."""
    assert any(field.name == "source" for field in dataclasses.fields(spec))
    require(bool(spec.source.strip()), "source", "say where these numbers come from")
