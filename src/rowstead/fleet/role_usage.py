"""What one role uses, sampled into its file a line at a time: CPU, memory, network, queues."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from rowstead.records.files import json_line

_log = logging.getLogger("rowstead.fleet")
Facts = Callable[[], Mapping[str, Any]]
"""Figures of a role at this moment, totals since its start: `num_samples`, `waiting_s`, `queue_depth`, `bytes_in`, `bytes_out` …"""


def memory_traffic_bytes(monitors: Path = Path("/sys/fs/resctrl/mon_data")) -> int | None:
    """Bytes that the whole machine has moved to and from memory, where it counts them (Linux's resctrl); else none."""
    try:
        return sum(int(file.read_text()) for file in monitors.glob("mon_L3_*/mbm_total_bytes")) or None
    except (OSError, ValueError):
        return None


class RoleSampler:
    """Adds a line to a role's usage file every so often, inside a `with`; the last one when it ends."""

    def __init__(self, path: Path, facts: Facts, *, incarnation: int = 0, interval_s: float = 1.0) -> None:
        self._path, self._facts, self._incarnation, self._interval_s = path, facts, incarnation, interval_s
        self._process = psutil.Process()
        self._ended = threading.Event()
        self._problem = ""
        self._thread = threading.Thread(target=self._run, name="rowstead-role-usage", daemon=True)

    def __enter__(self) -> RoleSampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._ended.wait(self._interval_s)
            try:
                line = json_line(self._sample())
                with open(self._path, "ab", buffering=0) as file:
                    file.write(line.encode())
            except Exception as error:  # noqa: BLE001, RUF100 - a sample less; a role that samples no more would be taken for gone
                if repr(error) != self._problem:  # once, or the log would grow for as long as it lasts
                    self._problem = repr(error)
                    _log.exception("nothing could be added to %s", self._path)

    def _sample(self) -> dict[str, Any]:
        times, memory = self._process.cpu_times(), self._process.memory_info()
        own = {
            "time_s": round(time.time(), 6),
            "incarnation": self._incarnation,
            "cpu_s": round(times.user + times.system, 3),
            "rss_bytes": memory.rss,
            "num_threads": self._process.num_threads(),
            "machine_memory_traffic_bytes": memory_traffic_bytes(),
        }
        return {**self._facts(), **own}


class UsageReader:
    """Follows the usage file of a role: each time what was added since."""

    def __init__(self, path: Path, *, from_now: bool = False) -> None:
        """`from_now` leaves out what is in the file already."""
        self._path = path
        self._offset = path.stat().st_size if from_now and path.exists() else 0
        self.last: dict[str, Any] = {}
        """The newest line; empty before the first."""
        self.before: dict[str, Any] = {}
        """The one before it, of the same incarnation."""
        self._kept: dict[str, dict[str, Any]] = {}
        self._largest: dict[str, float] = {}

    def read(self) -> None:
        """Take in the lines that were added."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                added = file.read()
        except FileNotFoundError:
            return
        whole = added[: added.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            try:
                sample = json.loads(line)
            except ValueError:  # torn when its process was killed
                continue
            is_same = sample.get("incarnation") == self.last.get("incarnation")
            self.before = self.last if is_same else {}
            self.last = sample
            self._kept[str(sample.get("incarnation"))] = sample
            for name, value in sample.items():
                if isinstance(value, (int, float)):
                    self._largest[name] = max(value, self._largest.get(name, value))

    def rate(self, name: str) -> float | None:
        """By how much a total grew a second between the last two lines; none where nobody has measured it."""
        if name not in self.last or name not in self.before:
            return None
        passed_s = self.last["time_s"] - self.before["time_s"]
        return (self.last[name] - self.before[name]) / passed_s if passed_s > 0 else None

    def total(self, name: str) -> float | None:
        """A total over all starts of the role; none where nobody has measured it."""
        found = [sample[name] for sample in self._kept.values() if isinstance(sample.get(name), (int, float))]
        return sum(found) if found else None

    def largest(self, name: str) -> float | None:
        """The largest value of a figure; none where nobody has measured it."""
        return self._largest.get(name)
