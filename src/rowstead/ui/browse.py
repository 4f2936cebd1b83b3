"""The runs that the page lists, and their reports; runs are looked up by name only."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from rowstead.records.run_folder import RunFolder, runs_in
from rowstead.records.store import RunStore, entries_of
from rowstead.records.studies import count_kinds, newest
from rowstead.report.page import report_page
from rowstead.spec.errors import RowsteadError

SHOWN = ("samples_per_s", "ne", "auc", "num_samples", "train_s")
"""Figures in the list of runs."""
MAX_LISTED = 500
"""Most runs and studies in the lists: the newest. The page says how many there are."""


class Browser:
    """Reads the runs under one folder. Thread-safe; one report is built at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.Lock()

    def listing(self) -> dict[str, Any]:
        """The runs, the newest first, and the studies."""
        found = list(reversed(runs_in(self.root)))
        runs = [_facts(run) for run in found[:MAX_LISTED]]
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

    def run(self, name: str) -> RunFolder:
        """The run with this name, compared with the names of existing runs and never used as a path."""
        for run in runs_in(self.root):
            if run.name == name:
                return run
        raise RowsteadError("this run no longer exists")

    def report(self, name: str | None) -> str:
        """The page of one run, or of all."""
        with self._lock:
            return report_page([self.run(name).path if name is not None else self.root])


def _facts(run: RunFolder) -> dict[str, Any]:
    entries, num_bad = entries_of(run)
    entry = next((one for one in entries if one.is_measured), None)
    if entry is None:
        facts = {"name": run.name, "finished": bool(num_bad)}
        return facts | ({"error": "its record cannot be read"} if num_bad else {})
    figures = {name: entry.record.figures[name] for name in SHOWN if name in entry.record.figures}
    return {"name": run.name, "finished": True, "date": entry.record.date, "figures": figures}
