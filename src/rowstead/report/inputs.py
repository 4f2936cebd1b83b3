"""The inputs of a report: records of stores and run folders, without unreadable ones."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rowstead.plan.traffic import mean_ids
from rowstead.records.events import Event, read_events
from rowstead.records.files import is_figure
from rowstead.records.run_folder import RunFolder, runs_in
from rowstead.records.store import FILE, Contents, RunStore, StoreEntry, entries_of, read_entries
from rowstead.report.terminal import count
from rowstead.spec.errors import RowsteadError
from rowstead.spec.parse import digest
from rowstead.spec.run import RunSpec


@dataclass(frozen=True)
class RunView:
    """A read-only view of a run folder; missing or broken parts are empty."""

    folder: RunFolder
    entry: StoreEntry | None
    """None if the run has not finished."""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def figures(self) -> Mapping[str, float]:
        return self.entry.record.figures if self.entry is not None else {}

    @functools.cached_property
    def spec(self) -> RunSpec | None:
        with contextlib.suppress(RowsteadError, OSError):
            return self.folder.read_spec()
        return None

    @functools.cached_property
    def events(self) -> list[Event]:
        with contextlib.suppress(RowsteadError, OSError):
            return read_events(self.folder.events_file)
        return []

    @functools.cached_property
    def placement(self) -> list[dict[str, Any]]:
        """The placement of tables that the run saved."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            plain = json.loads((self.folder.path / "placement.json").read_text())
            return [dict(table) for table in plain["tables"] if isinstance(table["name"], str)]
        return []

    @property
    def log(self) -> str:
        """Identifies the log that it trained on; empty if unknown."""
        return digest(self.spec.data.log) if self.spec is not None else ""

    @property
    def log_name(self) -> str:
        """The log for people: where its training files are."""
        if self.spec is None:
            return "unknown log"
        paths = getattr(self.spec.data.log, "train", None)
        return str(paths[0]) if paths else "synthetic log"

    @property
    def ne(self) -> float | None:
        return self.figures.get("ne")

    @property
    def status(self) -> str:
        """How it ended, or that it has not."""
        if self.entry is None:
            return "training" if self.folder.is_training else "unfinished"
        if self.entry.failure is None:
            return "finished"
        return f"failed after {count(int(self.figures.get('num_steps', 0)), 'step')}: {self.entry.failure}"

    @property
    def has_begun(self) -> bool:
        """Whether it left a result or events."""
        with contextlib.suppress(OSError):
            if self.folder.events_file.stat().st_size > 0:
                return True
        return self.entry is not None and self.entry.failure is None

    @property
    def mean_ids(self) -> tuple[float, ...] | None:
        """Mean ids per example of each sparse feature, as measured, or as drawn for a synthetic log; None if unknown."""
        if self.spec is None:
            return None
        found = next((event.get("mean_ids") for event in reversed(self.of_kind("features"))), None)
        if isinstance(found, list) and len(found) == len(self.spec.features.expanded_sparse()) and all(map(is_figure, found)):
            return tuple(map(float, found))
        return mean_ids(self.spec) if self.spec.data.files is None else None

    def of_kind(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["kind"] == kind]


@dataclass(frozen=True, kw_only=True)
class ReportInputs:
    """The inputs of a report."""

    runs: tuple[RunView, ...]
    """Newest first."""
    contents: Contents
    paths: tuple[str, ...]
    """The paths that were read."""

    @property
    def entries(self) -> tuple[StoreEntry, ...]:
        return self.contents.entries


def gather(paths: Iterable[Path | str], *, root: Path | str = "runs") -> ReportInputs:
    """Collect runs (by name or folder), whole stores and record files."""
    runs: dict[str, RunView] = {}
    entries: dict[tuple[str, str], StoreEntry] = {}
    unfinished: list[str] = []
    num_bad, read = 0, []
    for path in paths:
        given = Path(path)
        read.append(str(path))
        if given.is_file():
            if given.suffix not in (".jsonl", ".json"):
                raise RowsteadError(f"{given} is not a record file: pass {FILE}, a run folder, or a folder of runs")
            found, bad = read_entries(given)
            num_bad += bad
            entries |= {_entry_key(one): one for one in found}
        elif (given / "spec.yaml").is_file() or not given.is_dir():
            folder = RunFolder(given) if (given / "spec.yaml").is_file() else RunFolder.open(str(path), root)
            found, bad = entries_of(folder)
            num_bad += bad
            runs.setdefault(str(folder.path.resolve()), RunView(folder, next((one for one in found if one.is_measured), None)))
            entries = {_entry_key(one): one for one in found} | entries
        else:
            contents = RunStore(given).read()
            num_bad += contents.num_bad_lines
            unfinished += contents.unfinished
            entries |= {_entry_key(one): one for one in contents.entries}
            of_folder = {one.folder: one for one in contents.entries if one.source == "run" and one.is_measured}
            for folder in runs_in(given):
                runs.setdefault(str(folder.path.resolve()), RunView(folder, of_folder.get(str(folder.path))))
    if not runs and not entries:
        where = ", ".join(read) or "no path"
        raise RowsteadError(f"no records in {where}: `rowstead train` and `rowstead sweep` write them")
    newest_first = sorted(runs.values(), key=lambda run: run.entry.record.date if run.entry else "9999", reverse=True)
    contents = Contents(entries=tuple(entries.values()), num_bad_lines=num_bad, unfinished=tuple(unfinished))
    return ReportInputs(runs=tuple(newest_first), contents=contents, paths=tuple(read))


def name_logs(runs: Iterable[RunView]) -> dict[str, str]:
    """A distinct name for each log of these runs."""
    names: dict[str, str] = {}
    for run in runs:
        if run.log not in names:
            number = 1 + sum(name.startswith(run.log_name) for name in names.values())
            names[run.log] = run.log_name if number == 1 else f"{run.log_name} ({number})"
    return names


def _entry_key(entry: StoreEntry) -> tuple[str, str]:
    """Key of an entry, distinct for runs of the same name under different roots; equal lines are one entry."""
    return ("" if entry.folder is None else os.path.abspath(entry.folder), entry.id)
