"""The runs that the page lists, and their reports; a run is found by its name among those that are there."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from rowstead.records.run_folder import RunFolder, runs_in
from rowstead.report.page import report_page
from rowstead.spec.errors import RowsteadError

SHOWN = ("samples_per_s", "ne", "auc", "num_samples", "train_s")
"""Figures in the list of runs."""
MAX_LISTED = 500


class Browser:
    """Reads the runs under one folder. Any thread may ask; one report is drawn at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.Lock()

    def listing(self) -> dict[str, Any]:
        """The runs, the newest first."""
        found = list(reversed(runs_in(self.root)))
        return {"root": str(self.root), "num_runs": len(found), "runs": [_facts(run) for run in found[:MAX_LISTED]]}

    def run(self, name: str) -> RunFolder:
        """The run of a name; what is no name of a run is refused, whatever it looks like."""
        for run in runs_in(self.root):
            if run.name == name:
                return run
        raise RowsteadError("there is no such run any more")

    def report(self, name: str | None) -> str:
        """The page of one run, or of all."""
        with self._lock:
            return report_page([self.run(name).path if name is not None else self.root])


def _facts(run: RunFolder) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": run.name, "finished": run.record_file.is_file()}
    if facts["finished"]:
        try:
            record = run.read_record()
        except RowsteadError as error:
            return facts | {"error": str(error)}
        facts |= {"date": record.date, "figures": {name: record.figures[name] for name in SHOWN if name in record.figures}}
    return facts
