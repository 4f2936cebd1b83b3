"""What a report is made from: the records of a store and the folders of runs, as far as they can be read."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rowstead.records.events import Event, read_events
from rowstead.records.run_folder import RunFolder, runs_in
from rowstead.records.store import FILE, Contents, Entry, RunStore, entry_in
from rowstead.spec.errors import RowsteadError
from rowstead.spec.run import RunSpec


@dataclass(frozen=True)
class RunView:
    """One run's folder as a report sees it; what is missing or broken is absent."""

    folder: RunFolder
    entry: Entry | None
    """None where the run has not finished."""

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
        """The decisions about tables, as the run wrote them down."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            plain = json.loads((self.folder.path / "placement.json").read_text())
            return [dict(table) for table in plain["tables"] if isinstance(table["name"], str)]
        return []

    def of_kind(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["kind"] == kind]


@dataclass(frozen=True, kw_only=True)
class Material:
    """Everything that was asked for."""

    runs: tuple[RunView, ...]
    """The newest first."""
    contents: Contents
    places: tuple[str, ...]
    """Where it came from."""

    @property
    def entries(self) -> tuple[Entry, ...]:
        return self.contents.entries


def gather(paths: Iterable[Path | str], *, root: Path | str = "runs") -> Material:
    """Runs by name or folder, whole stores, and files of records, all together."""
    runs: dict[str, RunView] = {}
    entries: dict[str, Entry] = {}
    unfinished: list[str] = []
    num_bad, places = 0, []
    for path in paths:
        given = Path(path)
        places.append(str(path))
        if given.is_file():
            found, bad = _of_file(given)
            num_bad += bad
            entries |= {one.id: one for one in found}
        elif (given / "spec.yaml").is_file() or not given.is_dir():
            folder = RunFolder(given) if (given / "spec.yaml").is_file() else RunFolder.open(str(path), root)
            view, bad = _of_run(folder)
            num_bad += bad
            runs.setdefault(str(folder.path.resolve()), view)
            if view.entry is not None:
                entries.setdefault(view.entry.id, view.entry)
        else:
            contents = RunStore(given).read()
            num_bad += contents.num_bad_lines
            unfinished += contents.unfinished
            entries |= {one.id: one for one in contents.entries}
            of_folder = {one.folder: one for one in contents.entries if one.source == "run"}
            for folder in runs_in(given):
                runs.setdefault(str(folder.path.resolve()), RunView(folder, of_folder.get(str(folder.path))))
    if not runs and not entries:
        where = ", ".join(places) or "nowhere"
        raise RowsteadError(f"there is nothing to report in {where}: `rowstead train` and `rowstead sweep` make records")
    newest_first = sorted(runs.values(), key=lambda run: run.entry.record.date if run.entry else "9999", reverse=True)
    contents = Contents(entries=tuple(entries.values()), num_bad_lines=num_bad, unfinished=tuple(unfinished))
    return Material(runs=tuple(newest_first), contents=contents, places=tuple(places))


def _of_run(folder: RunFolder) -> tuple[RunView, int]:
    try:
        line = folder.record_file.read_bytes()
    except OSError:
        return RunView(folder, None), 0
    entry = entry_in(line)
    if entry is None:
        return RunView(folder, None), 1
    return RunView(folder, Entry(record=entry.record, folder=str(folder.path), id=folder.name)), 0


def _of_file(path: Path) -> tuple[list[Entry], int]:
    if path.suffix not in (".jsonl", ".json"):
        raise RowsteadError(f"{path} is no file of records: give {FILE}, a run's folder, or a folder of runs")
    try:
        lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
    except OSError as error:
        raise RowsteadError(f"cannot read {path}: {error.strerror or error}") from None
    found = [entry_in(line) for line in lines]
    return [one for one in found if one is not None], sum(one is None for one in found)
