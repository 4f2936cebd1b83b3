"""The runs that are training now, followed through their event files: only what was added is read."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rowstead.records.events import RESUMED
from rowstead.records.files import is_figure
from rowstead.records.plain_files import is_count, open_plain
from rowstead.records.run_folder import RunFolder, runs_in

MAX_RUNS = 8
"""Most runs that are followed: the newest."""
MAX_POINTS = 400
"""Most points of a curve; of more, every second one is dropped."""
MAX_READ_BYTES = 16 << 20
"""Most bytes that one request reads of one file; the next one goes on from there."""
ROLES = "roles"
"""The folder of a fleet's usage files in its run, one file per role."""
MAX_ROLES = 64
MAX_TAIL_BYTES = 16 << 10
"""Bytes at the end of a usage file that are read."""
SILENT_S = 15.0
"""A role without a sample for this long is shown as silent."""
FIGURES = ("loss", "ne", "samples_per_s", "waiting_share", "num_samples")


@dataclass
class _Followed:
    """What was read of one event file so far."""

    identity: tuple[int, int]
    offset: int = 0
    points: list[dict[str, float]] = field(default_factory=list)
    """`train` events: their step and figures."""
    evaluation: dict[str, float] | None = None
    """Step and NE of the last evaluation."""


class LiveRuns:
    """Follows the runs under one folder. Thread-safe."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._followed: dict[Path, _Followed] = {}

    def listing(self) -> list[dict[str, Any]]:
        """The runs that are training now, the newest first, with their curves."""
        runs = [run for run in reversed(runs_in(self._root)) if run.is_training][:MAX_RUNS]
        with self._lock:
            self._followed = {run.path: self._followed[run.path] for run in runs if run.path in self._followed}
            return [self._facts(run) for run in runs]

    def _facts(self, run: RunFolder) -> dict[str, Any]:
        with contextlib.suppress(OSError):
            self._read(run)
        followed, roles = self._followed.get(run.path), roles_of(run)
        facts: dict[str, Any] = {"name": run.name, "points": []}
        if followed is not None:
            facts |= {"points": followed.points, "evaluation": followed.evaluation}
        return facts | {"roles": roles} if roles else facts

    def _read(self, run: RunFolder) -> None:
        """Take in the whole lines that were added to a run's event file."""
        with run.events_file.open("rb") as file:
            facts = file.seek(0, 2), run.events_file.stat()
            identity = facts[1].st_dev, facts[1].st_ino
            followed = self._followed.get(run.path)
            if followed is None or followed.identity != identity or followed.offset > facts[0]:
                followed = self._followed[run.path] = _Followed(identity)
            file.seek(followed.offset)
            data = file.read(MAX_READ_BYTES)
        end = data.rfind(b"\n") + 1
        followed.offset += end or (len(data) if len(data) == MAX_READ_BYTES else 0)  # a line that never ends is passed over
        for line in data[:end].splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                _take(followed, json.loads(line))


def roles_of(run: RunFolder, now_s: float | None = None) -> list[dict[str, Any]]:
    """What each role of a fleet's run does now, from the last two samples in its usage file; empty for other runs."""
    found = []
    now_s = time.time() if now_s is None else now_s
    for file in sorted((run.path / ROLES).glob("*.jsonl"), key=lambda file: _role_order(file.stem))[:MAX_ROLES]:
        samples = _last_samples(file)
        if not samples:
            continue
        last = samples[-1]
        role: dict[str, Any] = {"name": file.stem, "is_silent": now_s - last["time_s"] > SILENT_S}
        if is_figure(last.get("rss_bytes")):
            role["rss_bytes"] = last["rss_bytes"]
        if len(samples) == 2 and samples[0].get("incarnation") == last.get("incarnation"):
            elapsed_s = last["time_s"] - samples[0]["time_s"]
            for name, total in (("cores", "cpu_s"), ("samples_per_s", "num_samples")):
                if elapsed_s > 0 and is_figure(last.get(total)) and is_figure(samples[0].get(total)):
                    role[name] = max(0.0, (last[total] - samples[0][total]) / elapsed_s)
        found.append(role)
    return found


def _role_order(name: str) -> tuple[str, int]:
    kind, _, number = name.rpartition("-")
    return kind, int(number) if number.isascii() and number.isdigit() else 0


def _last_samples(file: Path) -> list[dict[str, Any]]:
    """The last two samples of a role; fewer where there are fewer, or the file cannot be read."""
    samples = []
    with contextlib.suppress(OSError), os.fdopen(open_plain(file), "rb") as opened:
        opened.seek(max(0, opened.seek(0, 2) - MAX_TAIL_BYTES))
        for line in opened.read(MAX_TAIL_BYTES).splitlines()[-3:]:
            with contextlib.suppress(ValueError, RecursionError):
                sample = json.loads(line)
                if isinstance(sample, dict) and is_figure(sample.get("time_s")):
                    samples.append(sample)
    return samples[-2:]


def _take(followed: _Followed, event: Any) -> None:
    if not isinstance(event, dict) or not is_count(event.get("step")):
        return
    kind, step = event.get("kind"), event["step"]
    if kind == RESUMED:
        followed.points = [point for point in followed.points if point["step"] <= step]
    elif kind == "train":
        followed.points.append({"step": step, **{name: event[name] for name in FIGURES if is_figure(event.get(name))}})
        if len(followed.points) > MAX_POINTS:
            followed.points = followed.points[:-1:2] + followed.points[-1:]
    elif kind == "evaluation" and is_figure(event.get("ne")):
        followed.evaluation = {"step": step, "ne": event["ne"]}
