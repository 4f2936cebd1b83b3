"""Bounds of fields, as part of their types: a `Spec` with `num_rows: AtLeastOne` refuses 0 and names the field."""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from rowstead.spec.errors import SpecError, shorten


@dataclass(frozen=True)
class Bound:
    """What a value must be; `problem` is the message, with `{}` for the value."""

    holds: Callable[[Any], bool]
    problem: str

    def check(self, field: str, value: Any) -> None:
        if not self.holds(value):
            raise SpecError(field, self.problem.format(shorten(value) if isinstance(value, str) else value))


def up_to(most: int) -> Bound:
    """Numbers of at most `most`."""
    return Bound(lambda value: value <= most, f"must be at most {most:,}, got {{:,}}")


def each_between(least: int, most: int) -> Bound:
    """One number from `least` to `most`, or a list of them."""

    def holds(value: Any) -> bool:
        return all(least <= one <= most for one in (value if isinstance(value, tuple) else (value,)))

    return Bound(holds, f"must be from {least:,} to {most:,}")


def between(least: float, most: float) -> Bound:
    """Numbers from `least` to `most`."""
    return Bound(lambda value: least <= value <= most, f"must be from {least:g} to {most:g}, got {{}}")


def at_most(length: int) -> Bound:
    """Text of so many characters, or a list of so many items."""
    return Bound(lambda value: len(value) <= length, f"must not be longer than {length:,}")


MAX_FEATURES = 50_000
"""Of one model; each is written out."""
MAX_ENTRIES = 8_000
"""Features and tables that a recipe spells out: the file of a run has all their fields, and must be readable (`spec/yaml_text.py`)."""
MAX_ROWS = 10**12
MAX_WIDTH = 1 << 16
MAX_LAYER = 1 << 20
MAX_LAYERS = 1000
MAX_PROCESSES = 4096
"""Servers, trainers, processes, threads or accelerators of one kind."""
MAX_POINTS = 100_000
"""Runs of one study."""
MAX_NAME = 200


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
NotEmpty = Annotated[str, Bound(bool, "must not be empty"), at_most(MAX_NAME)]
FolderPath = Annotated[str, Bound(bool, "must not be empty"), at_most(4096)]
Origin = Annotated[str, Bound(lambda value: bool(value.strip()), "say where these numbers come from")]
PlainName = Annotated[str, PLAIN_NAME, at_most(MAX_NAME)]
Rows = Annotated[AtLeastOne, up_to(MAX_ROWS)]
Width = Annotated[AtLeastOne, up_to(MAX_WIDTH)]
Layers = Annotated[tuple[int, ...], each_between(1, MAX_LAYER), at_most(MAX_LAYERS)]
Processes = Annotated[AtLeastOne, up_to(MAX_PROCESSES)]
AnyProcesses = Annotated[Count, up_to(MAX_PROCESSES)]


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
