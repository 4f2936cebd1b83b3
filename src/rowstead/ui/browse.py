"""The runs that the page lists, and their reports; runs are looked up by name only."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rowstead.records.events import read_events
from rowstead.records.files import is_figure
from rowstead.records.run_folder import RunFolder, runs_in
from rowstead.records.store import RunStore, entries_of
from rowstead.records.studies import count_kinds, newest
from rowstead.report.theme import thinned
from rowstead.spec.errors import RowsteadError
from rowstead.ui.worker import Workers

SHOWN = ("samples_per_s", "ne", "auc", "num_samples", "train_s")
"""Figures in the list of runs."""
MAX_KEPT_BYTES = 64 << 20
"""Reports that are kept in memory, the most recently read first."""
MAX_CURVES, MAX_POINTS = 60, 40
"""Most runs with a curve in the list, the newest, and most points of each."""
MAX_EVENTS_BYTES = 16 << 20
"""The curve of a longer event file is in the run's report only."""
MAX_COMPARED = 6
MAX_LISTED = 500
"""Most runs and studies in the lists: the newest. The page says how many there are."""


class Reports:
    """Draws reports in worker processes, and keeps them until a file that they depend on changes.

    Requests for one report that come together wait for one drawing. Thread-safe.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._lock = threading.Lock()
        self._locks: dict[Path, threading.Lock] = {}
        self._kept: OrderedDict[Path, _Report] = OrderedDict()

    def page(self, path: Path) -> bytes:
        """The report of a run's folder, or of a folder of runs."""
        asked_s = time.monotonic()
        with self._lock:
            lock = self._locks.setdefault(path, threading.Lock())
        with lock:
            kept = self._kept.get(path)
            if kept is not None and kept.checked_s >= asked_s:
                return kept.page  # checked or drawn while this request waited
            checked_s, state = time.monotonic(), files_state(path)
            if kept is None or kept.state != state:
                (text,) = self._workers.run("report", path=str(path))
                kept = _Report(text.encode(), state, checked_s)
            kept.checked_s = checked_s
            self._keep(path, kept)
            return kept.page

    def _keep(self, path: Path, report: _Report) -> None:
        with self._lock:
            self._kept[path] = report
            self._kept.move_to_end(path)
            while len(self._kept) > 1 and sum(len(one.page) for one in self._kept.values()) > MAX_KEPT_BYTES:
                self._kept.popitem(last=False)


@dataclass
class _Report:
    page: bytes
    state: str
    """State of the files that it was drawn from."""
    checked_s: float
    """When that was last seen to be the state of the files."""


def files_state(path: Path) -> str:
    """A fingerprint of names, sizes and times of the files that a report may read: all but checkpoints and other folders of folders."""
    found = hashlib.sha256()
    folders = [path, *(Path(one.path) for one in _scan(path) if one.is_dir())]
    for folder in folders:
        for entry in _scan(folder):
            with contextlib.suppress(OSError):
                if entry.is_file():
                    facts = entry.stat()
                    found.update(
                        f"{entry.path}\0{facts.st_size}\0{facts.st_mtime_ns}\0{facts.st_ino}\0".encode(errors="replace")
                    )
    return found.hexdigest()


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return []


class Browser:
    """Reads the runs under one folder. Thread-safe."""

    def __init__(self, root: Path, workers: Workers) -> None:
        self.root = root
        self._reports = Reports(workers)
        self._curves: dict[Path, tuple[tuple[int, int, int], list[tuple[int, float]]]] = {}

    def listing(self) -> dict[str, Any]:
        """The runs, the newest first, and the studies."""
        found = list(reversed(runs_in(self.root)))
        runs = [_facts(run) for run in found[:MAX_LISTED]]
        for run, facts in zip(found[:MAX_CURVES], runs, strict=False):
            facts["curve"] = self._curve(run)
        return {"root": str(self.root), "num_runs": len(found), "runs": runs, "studies": self._studies()}

    def names(self) -> list[str]:
        """The names of the runs, the newest first."""
        return [run.name for run in reversed(runs_in(self.root))]

    def _studies(self) -> list[dict[str, Any]]:
        contents = RunStore(self.root).read()
        listed = []
        for name, source in list(contents.studies.items())[-MAX_LISTED:]:
            measured, predicted, failed = count_kinds(newest(contents.of(study=name)))
            counts = {"num_measured": measured, "num_predicted": predicted, "num_failed": failed}
            listed.append({"name": name, "kind": source, **counts})
        return listed[::-1]

    def _curve(self, run: RunFolder) -> list[tuple[int, float]]:
        """NE by step, a few points of it, read again only when the run's event file has changed."""
        try:
            facts = run.events_file.stat()
        except OSError:
            return []
        state = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
        kept = self._curves.get(run.path)
        if kept is None or kept[0] != state:
            events = []
            if facts.st_size <= MAX_EVENTS_BYTES:
                with contextlib.suppress(RowsteadError, OSError):
                    events = read_events(run.events_file)
            points = [
                (event["step"], event["ne"]) for event in events if event["kind"] == "train" and is_figure(event.get("ne"))
            ]
            kept = self._curves[run.path] = (state, thinned(points, MAX_POINTS))
        return kept[1]

    def num_training(self) -> int:
        """How many runs are training now."""
        return sum(run.is_training for run in runs_in(self.root))

    def chosen(self, names: Any) -> list[RunFolder]:
        """The runs of these names, to compare them."""
        if (
            not isinstance(names, list)
            or not 2 <= len(names) <= MAX_COMPARED
            or not all(isinstance(name, str) for name in names)
        ):
            raise RowsteadError(f"give the names of 2 to {MAX_COMPARED} runs")
        return [self.run(name) for name in names]

    def run(self, name: str) -> RunFolder:
        """The run with this name, compared with the names of existing runs and never used as a path."""
        for run in runs_in(self.root):
            if run.name == name:
                return run
        raise RowsteadError("this run no longer exists")

    def report(self, name: str | None) -> bytes:
        """The page of one run, or of all."""
        return self._reports.page(self.run(name).path if name is not None else self.root)


def _facts(run: RunFolder) -> dict[str, Any]:
    """A run in the list; `status` is finished, failed, training or unfinished."""
    entries, num_bad = entries_of(run)
    entry = next((one for one in entries if one.is_measured), None)
    if entry is None:
        if num_bad:
            return {"name": run.name, "status": "finished", "error": "its record cannot be read"}
        return {"name": run.name, "status": "training" if run.is_training else "unfinished"}
    figures = {name: entry.record.figures[name] for name in SHOWN if name in entry.record.figures}
    facts = {"name": run.name, "status": "finished", "date": entry.record.date, "figures": figures}
    return facts if entry.failure is None else facts | {"status": "failed", "why": entry.failure}
