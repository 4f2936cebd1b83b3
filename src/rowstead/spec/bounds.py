"""Bounds checks for specs: a SpecError names the field."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from rowstead.spec.errors import require


def require_above_zero(spec: Any, *names: str) -> None:
    """Require fields above 0 and finite."""
    for name in names:
        value = getattr(spec, name)
        require(0 < value < math.inf, name, f"must be above 0 and finite, got {value:g}")


def require_not_negative(spec: Any, *names: str) -> None:
    """Require fields of 0 or more, and finite."""
    for name in names:
        value = getattr(spec, name)
        require(0 <= value < math.inf, name, f"must be finite and not negative, got {value}")


def require_source(spec: Any) -> None:
    """Require a source for a block of numbers."""
    assert any(field.name == "source" for field in dataclasses.fields(spec))
    require(bool(spec.source.strip()), "source", "say where these numbers come from")
