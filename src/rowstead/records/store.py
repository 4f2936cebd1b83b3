"""The run store: every run, sweep point, trial and prediction under one root, as Records with their origin.

Under a root such as `runs/` there are the folders of runs, each with its `record.json`, and one file `records.jsonl` to which
sweeps, tuning, quality studies and predictions add a line each. Both are read as one list of entries.

Who may do what: any number of processes may add at once; a line is added whole, under a lock of the file, and never changed. A
reader takes no lock. A process that is killed while it adds leaves at most one torn line, which the next one ends; readers pass
over what they cannot read, and count it.
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

from rowstead.records.files import append_lines, is_figure, is_record, json_line, open_to_append
from rowstead.records.plain_files import read_plain
from rowstead.records.run_folder import DEFAULT_ROOT, RunFolder, runs_in
from rowstead.spec.errors import RowsteadError
from rowstead.spec.parse import to_plain
from rowstead.spec.record import Record

FILE = "records.jsonl"
MAX_LINE_BYTES = 1 << 20
"""Longer lines are skipped as unreadable."""

Source = Literal["run", "sweep", "trial", "quality", "plan"]
"""What made a record: a plain run, a point of a sweep, a trial of a search, a run of a quality study, a prediction by itself."""


@dataclass(frozen=True, kw_only=True)
class StoreEntry:
    """A Record and its origin."""

    record: Record
    source: Source = "run"
    study: str | None = None
    """Name of the sweep, search or quality study; None for a plain run."""
    point: str | None = None
    """Identifies what was run; a measured point and its predictions share it."""
    axes: Mapping[str, Any] = field(default_factory=dict)
    """Its point in the study: axis name to value, as figures show it."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Dotted keys of the recipe and their values, by which it differs from the study's recipe."""
    seed: int | None = None
    failure: str | None = None
    """Why there are no figures; None if the run succeeded."""
    folder: str | None = None
    """Folder of the run, if it was kept."""
    id: str = ""
    """Identifies the entry on the command line; assigned when it is read."""

    @property
    def is_measured(self) -> bool:
        return self.record.kind == "measured"

    @property
    def is_pruned(self) -> bool:
        """Whether it is a pruned trial, which is not a failure."""
        return self.source == "trial" and self.failure is not None and self.failure.startswith("pruned")

    @property
    def has_failed(self) -> bool:
        return self.failure is not None and not self.is_pruned


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a store holds, in the order in which it was added; plain runs come first, by date."""

    entries: tuple[StoreEntry, ...]
    num_bad_lines: int
    """Lines and record files that could not be read, torn ones among them."""
    unfinished: tuple[str, ...] = ()
    """Folders of runs that have neither finished nor failed."""

    def of(self, *, study: str | None = None, source: Source | None = None, kind: str | None = None) -> tuple[StoreEntry, ...]:
        """The entries of a study, a source or a kind of record."""
        return tuple(
            entry
            for entry in (self.entries if study is None else self._of_study.get(study, ()))
            if (source is None or entry.source == source) and (kind is None or entry.record.kind == kind)
        )

    @functools.cached_property
    def _of_study(self) -> dict[str, list[StoreEntry]]:
        """Entries by study, so that a report does not scan all entries for each."""
        found: dict[str, list[StoreEntry]] = {}
        for entry in self.entries:
            if entry.study is not None:
                found.setdefault(entry.study, []).append(entry)
        return found

    @property
    def studies(self) -> dict[str, Source]:
        """Names of the studies and the source of each, in order of first use."""
        found: dict[str, Source] = {}
        for entry in self.entries:
            if entry.study is not None:
                found.setdefault(entry.study, entry.source)
        return found


class RunStore:
    """The records under one root."""

    def __init__(self, root: Path | str = DEFAULT_ROOT) -> None:
        self.root = Path(root)

    @property
    def file(self) -> Path:
        return self.root / FILE

    def study_folder(self, study: str) -> Path:
        """Folder of a study: its lock, runs in progress, its results."""
        return self.root / "studies" / study

    def add(self, *entries: StoreEntry) -> None:
        """Append entries; they have been passed to the operating system once this returns."""
        data = b"".join(line_of(entry).encode() for entry in entries)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            descriptor = open_to_append(self.file)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                append_lines(descriptor, data)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise RowsteadError(f"cannot write records to {self.file}: {error.strerror or error}") from error

    def read(self) -> Contents:
        """All entries that can be read, and how many cannot."""
        runs, unfinished, num_bad = self._runs()
        entries, num_bad_lines = read_entries(self.file) if self.file.exists() else ([], 0)
        return Contents(entries=(*runs, *entries), num_bad_lines=num_bad + num_bad_lines, unfinished=unfinished)

    def _runs(self) -> tuple[list[StoreEntry], tuple[str, ...], int]:
        entries, unfinished, num_bad = [], [], 0
        for run in runs_in(self.root):
            found, bad = entries_of(run)
            num_bad += bad
            entries += found
            if not found and not bad:
                unfinished.append(str(run.path))
        return sorted(entries, key=lambda entry: (entry.record.date, entry.id)), tuple(unfinished), num_bad


def read_entries(path: Path) -> tuple[list[StoreEntry], int]:
    """The entries in a file of records, and the number of lines that cannot be read."""
    try:
        lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
    except OSError as error:
        raise RowsteadError(f"cannot read records from {path}: {error.strerror or error}") from None
    found = [entry_in(line) for line in lines]
    return [one for one in found if one is not None], found.count(None)


def entries_of(run: RunFolder) -> tuple[list[StoreEntry], int]:
    """The result of a run, its prediction, and the number of these files that are unreadable; empty before it has ended."""
    entries: list[StoreEntry] = []
    num_bad = 0
    for file, name in ((run.record_file, run.name), (run.predicted_file, f"predicted:{run.name}")):
        try:
            line = read_plain(file, MAX_LINE_BYTES)
        except OSError:
            if file == run.record_file:
                return _failure_of(run), 0
            continue
        entry = entry_in(line)
        num_bad += entry is None
        if entry is not None:
            entries.append(dataclasses.replace(entry, folder=str(run.path), id=name))
    return entries, num_bad


def _failure_of(run: RunFolder) -> list[StoreEntry]:
    """The entry of a run that failed; none if it did not."""
    failure = run.read_failure()
    if failure is None or run.is_training:
        return []
    record = Record(kind="measured", name=run.name, spec_digest="", date=failure.date, figures={"num_steps": failure.step})
    return [StoreEntry(record=record, failure=failure.why, folder=str(run.path), id=run.name)]


def line_of(entry: StoreEntry) -> str:
    """An entry as one line of JSON: the Record's own keys, and those of its origin."""
    plain = to_plain(entry.record)
    rest = {f.name: getattr(entry, f.name) for f in dataclasses.fields(entry) if f.name not in ("record", "id")}
    plain |= {name: value for name, value in rest.items() if value not in (None, {})}
    line = json_line(plain, whole=("axes", "settings"))  # where null is a valid value
    line = line.encode(errors="replace").decode()  # unpaired surrogates, as in broken file names, are not valid UTF-8
    if len(line.encode()) > MAX_LINE_BYTES:
        raise RowsteadError(
            f"a record of {len(line):,} characters is too large: shorten the names in `{entry.record.name[:40]}`"
        )
    return line


def entry_in(line: bytes) -> StoreEntry | None:
    """The entry on a line, or None if it is not a complete entry."""
    if len(line) > MAX_LINE_BYTES:
        return None
    try:
        plain = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    if not is_record(plain):
        return None
    known = {name: plain.get(name, default) for name, default in _DEFAULTS.items()}
    words = (known["study"], known["point"], known["failure"], known["folder"])
    seed = known["seed"]
    whole = (
        known["source"] in get_args(Source)
        and all(word is None or isinstance(word, str) for word in words)
        and isinstance(known["axes"], dict)
        and isinstance(known["settings"], dict)
        and (seed is None or (isinstance(seed, int) and is_figure(seed)))
    )
    if not whole:
        return None
    record = Record(**{name: plain[name] for name in _RECORD if name in plain})
    return StoreEntry(record=record, id=hashlib.sha256(line.strip()).hexdigest()[:12], **known)


_RECORD = tuple(f.name for f in dataclasses.fields(Record))
_DEFAULTS: dict[str, Any] = {
    f.name: {} if f.default is dataclasses.MISSING else f.default
    for f in dataclasses.fields(StoreEntry)
    if f.name not in ("record", "id")
}


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a valid figure")
