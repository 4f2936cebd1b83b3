"""The result of a run, as one JSON line."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Record:
    """Figures of one run, with units in their names; a figure that was not measured is absent, never zero."""

    kind: Literal["measured", "predicted"]
    name: str
    spec_digest: str
    date: str
    machine: dict[str, str | int | float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)


def date_now() -> str:
    """The current time, as records store it."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
