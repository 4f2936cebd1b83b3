"""Signs of life: a process that lives changes a file again and again; another one that reads it sees when that stops.

Clocks of two machines are never compared. Time in which the reading process itself did not run, because it or the whole machine
was suspended, does not count: nobody else ran in it either.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

SILENT_AFTER_S = 15.0
"""A role without a new usage sample for this long is taken to be gone or frozen; it samples twice a second."""
FILE_POLL_INTERVAL_S = 0.5
MAX_COUNTED_S = 5.0
"""Of the time between two looks at a file or a clock, at most this much counts."""


class AwakeClock:
    """Seconds in which this process ran: a suspension counts as at most `MAX_COUNTED_S`. Read it often."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._read_s, self._awake_s = clock, clock(), 0.0

    def __call__(self) -> float:
        now_s = self._clock()
        self._awake_s += min(now_s - self._read_s, MAX_COUNTED_S)
        self._read_s = now_s
        return self._awake_s


class FileActivity:
    """How long files have been unchanged, by the clock of this process."""

    def __init__(self, *paths: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._paths, self._awake_s = paths, AwakeClock(clock)
        self._states: list[tuple[int, int] | None] = []
        self._polled_s = self._changed_s = self._awake_s()

    def idle_s(self) -> float:
        """Return the seconds for which no file has changed, as far as this process could see; call it often."""
        now_s = self._awake_s()
        if not self._states or now_s >= self._polled_s + FILE_POLL_INTERVAL_S:
            self._polled_s, states = now_s, [_file_state(path) for path in self._paths]
            if states != self._states:
                self._states, self._changed_s = states, now_s
        return self._polled_s - self._changed_s


def _file_state(path: Path) -> tuple[int, int] | None:
    """Return what changes when a file is appended to, touched or replaced; None without a file."""
    try:
        with open(path, "rb") as file:  # on network file systems only opening a file is sure to show its current state
            status = os.fstat(file.fileno())
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns
