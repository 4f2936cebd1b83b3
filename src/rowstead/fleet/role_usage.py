"""Usage samples of one role in its file, one JSON line each: CPU, memory, network, queues."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from rowstead.kernels.cpu.traffic import kernel_traffic_bytes
from rowstead.records.files import append_lines, is_figure, json_line, open_private
from rowstead.records.plain_files import parse_json
from rowstead.records.usage import perf_traffic_bytes

_log = logging.getLogger("rowstead.fleet")
Facts = Callable[[], Mapping[str, Any]]
"""Current figures of a role, totals since its start: `num_samples`, `waiting_s`, `queue_depth`, `num_bytes_sent` …"""


class RoleSampler:
    """Appends a sample to a role's usage file every `interval_s`, inside a `with`, and a last one at its end."""

    def __init__(self, path: Path, facts: Facts, *, incarnation: int = 0, interval_s: float = 1.0) -> None:
        self._path, self._facts, self._incarnation, self._interval_s = path, facts, incarnation, interval_s
        self._process = psutil.Process()
        self._closed = threading.Event()
        self._problem = ""
        self._thread = threading.Thread(target=self._run, name="rowstead-role-usage", daemon=True)

    def __enter__(self) -> RoleSampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closed.wait(self._interval_s)
            try:
                line = json_line(self._sample())
                with open(self._path, "a+b", buffering=0, opener=open_private) as file:
                    append_lines(file.fileno(), line.encode())  # on its own, also after a line that a full disk has cut
            except Exception as error:  # noqa: BLE001, RUF100 - skip one sample, as on a full disk
                with contextlib.suppress(OSError):
                    os.utime(self._path)  # a role without a sign of life would be taken to be gone
                if repr(error) != self._problem:  # once, or the log would keep growing
                    self._problem = repr(error)
                    _log.exception("cannot append to %s", self._path)

    def _sample(self) -> dict[str, Any]:
        times, memory = self._process.cpu_times(), self._process.memory_info()
        own = {
            "time_s": round(time.time(), 6),
            "incarnation": self._incarnation,
            "cpu_s": round(times.user + times.system, 3),
            "rss_bytes": memory.rss,
            "num_threads": self._process.num_threads(),
            "memory_traffic_bytes": kernel_traffic_bytes() if (counted := perf_traffic_bytes()) is None else counted,
        }
        return {**self._facts(), **own}


class UsageReader:
    def __init__(self, path: Path, *, from_now: bool = False) -> None:
        """`from_now` skips what is in the file already."""
        self._path = path
        self._offset = path.stat().st_size if from_now and path.exists() else 0
        self.last: dict[str, Any] = {}
        """The newest sample; empty before the first."""
        self.previous: dict[str, Any] = {}
        """The sample before it, of the same incarnation."""
        self._last_by_incarnation: dict[str, dict[str, Any]] = {}
        self._maxima: dict[str, float] = {}

    def read(self) -> None:
        """Read the lines that were added since the last call."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                added = file.read()
        except FileNotFoundError:
            return
        complete = added[: added.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.splitlines():
            try:
                sample = parse_json(line)
            except ValueError:  # cut off when its process was killed
                continue
            if not isinstance(sample, dict) or not is_figure(sample.get("time_s")):
                continue
            is_same = sample.get("incarnation") == self.last.get("incarnation")
            self.previous = self.last if is_same else {}
            self.last = sample
            self._last_by_incarnation[str(sample.get("incarnation"))] = sample
            for name, value in sample.items():
                if isinstance(value, (int, float)):
                    self._maxima[name] = max(value, self._maxima.get(name, value))

    def rate(self, name: str) -> float | None:
        """Return the growth of a total per second between the last two samples; None if not measured."""
        if not is_figure(self.last.get(name)) or not is_figure(self.previous.get(name)):
            return None
        elapsed_s = self.last["time_s"] - self.previous["time_s"]
        return (self.last[name] - self.previous[name]) / elapsed_s if elapsed_s > 0 else None

    def total(self, name: str) -> float | None:
        """Return a total over all incarnations of the role; None if not measured."""
        found = [sample[name] for sample in self._last_by_incarnation.values() if isinstance(sample.get(name), (int, float))]
        return sum(found) if found else None

    def total_of_earlier(self, name: str) -> float:
        """Return the sum of the last values of a figure in all incarnations but the current one."""
        return (self.total(name) or 0) - self.last.get(name, 0)

    def maximum(self, name: str) -> float | None:
        return self._maxima.get(name)
