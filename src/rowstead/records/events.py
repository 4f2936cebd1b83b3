"""The event file of a run: one JSON object per line, append-only."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from rowstead.records.files import append_lines, json_line, open_to_append
from rowstead.records.plain_files import is_count, read_plain
from rowstead.spec.errors import RowsteadError

MAX_EVENTS_BYTES = 1 << 30
RESUMED = "resumed"
Event = dict[str, Any]
"""`time_s` (Unix time), `kind`, `step`, and figures with units in their names."""


class EventLog:
    """Appends events to a file; each is passed to the operating system before `write` returns.

    Nothing is ever removed: after a resume the events beyond the resumed step stay in the file, and `read_events`
    passes over them.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = open_to_append(self.path)
        except OSError as error:
            raise RowsteadError(f"cannot write events to {self.path}: {error.strerror or error}") from error

    def write(self, kind: str, step: int, **figures: Any) -> None:
        """Add one event; a figure that is None, NaN or infinite is left out."""
        line = json_line({"time_s": round(time.time(), 3), "kind": kind, "step": step, **figures})
        try:
            append_lines(self._descriptor, line.encode())
        except OSError as error:
            raise RowsteadError(f"cannot write events to {self.path}: {error.strerror or error}") from error

    def resumed(self, step: int) -> None:
        """Mark that the run resumes after `step`: earlier events beyond it no longer count."""
        self.write(RESUMED, step)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def read_events(path: Path | str) -> list[Event]:
    """The valid history of a run, without torn lines and events that a resume superseded."""
    history: list[Event] = []
    try:
        lines = read_plain(Path(path), MAX_EVENTS_BYTES).split(b"\n")
    except OSError as error:
        raise RowsteadError(f"cannot read events from {path}: {error.strerror or error}") from None
    for line in lines:
        event = _parsed(line)
        if event is None:
            continue
        if event["kind"] == RESUMED:
            history = [earlier for earlier in history if earlier["step"] <= event["step"]]
        history.append(event)
    return history


def _parsed(line: bytes) -> Event | None:
    """The event on a line, or None where a process was killed while writing it."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(event, dict) and isinstance(event.get("kind"), str) and is_count(event.get("step"))
    return event if whole else None
