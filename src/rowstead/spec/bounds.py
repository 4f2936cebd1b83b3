"""Bounds of fields, as part of their types: a `Spec` with `num_rows: AtLeastOne` refuses 0 and names the field."""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from rowstead.spec.errors import require


@dataclass(frozen=True)
class Bound:
    """What a value must be; `problem` is the message, with `{}` for the value."""

    holds: Callable[[Any], bool]
    problem: str

    def check(self, field: str, value: Any) -> None:
        require(self.holds(value), field, self.problem.format(value))


PLAIN_NAME = Bound(
    lambda name: name.isascii() and name[:1].isalnum() and all(c.isalnum() or c in "-_." for c in name),
    "use letters, digits, `-`, `_` and `.` only, and start with a letter or digit, got `{}`",
)

AtLeastOne = Annotated[int, Bound(lambda value: value >= 1, "must be at least 1, got {}")]
Count = Annotated[int, Bound(lambda value: value >= 0, "must not be negative, got {}")]
AboveZero = Annotated[float, Bound(lambda value: 0 < value < math.inf, "must be above 0 and finite, got {}")]
NotNegative = Annotated[float, Bound(lambda value: 0 <= value < math.inf, "must be finite and not negative, got {}")]
Share = Annotated[float, Bound(lambda value: 0 < value <= 1, "must be above 0 and at most 1, got {}")]
ZeroToOne = Annotated[float, Bound(lambda value: 0 <= value <= 1, "must be between 0 and 1, got {}")]
InsideZeroToOne = Annotated[float, Bound(lambda value: 0 < value < 1, "must be between 0 and 1, got {}")]
BelowOne = Annotated[float, Bound(lambda value: 0 <= value < 1, "must be at least 0 and below 1, got {}")]
OneOrMore = Annotated[float, Bound(lambda value: 1 <= value < math.inf, "must be at least 1 and finite, got {}")]
Seed = Annotated[int, Bound(lambda value: 0 <= value < 2**63, "must be from 0 to 2**63 - 1, got {}")]
NotEmpty = Annotated[str, Bound(bool, "must not be empty")]
Origin = Annotated[str, Bound(lambda value: bool(value.strip()), "say where these numbers come from")]
PlainName = Annotated[str, PLAIN_NAME]


class Spec:
    """Base of dataclasses that check the bounds of their fields; a field that is None is not checked."""

    def __post_init__(self) -> None:
        for name, bound in _bounds_of(type(self)):  # type: ignore[arg-type]
            if (value := getattr(self, name)) is not None:
                bound.check(name, value)


@functools.cache
def _bounds_of(cls: Any) -> list[tuple[str, Bound]]:
    found = []
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        for kind in (hint, *typing.get_args(hint)):  # also within `AtLeastOne | None`
            found += [(name, one) for one in getattr(kind, "__metadata__", ()) if isinstance(one, Bound)]
    return found
