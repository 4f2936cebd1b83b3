"""Snapshots of a sparse server: written in the background while it serves, read when it restarts.

A folder has `snapshot.json`, which is replaced atomically, and the files that it names: at most one with all rows, and at most
one with the rows touched since then (or since the start, when all rows had their initial values). A full snapshot is due once
the touched rows are more than half of all. The counts of updates are consistent with the rows.

A file is a magic word followed by blocks: the length of a JSON header, the header, the row numbers of one table (omitted for a
contiguous range), then the rows and their optimizer state. Each block has a checksum; the last one holds the number of rows.
"""

from __future__ import annotations

import json
import logging
import os
import re
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from rowstead.fleet.table_shard import RowCopy, TableShard
from rowstead.records.files import fsync_folder, write_atomic
from rowstead.records.plain_files import is_count, open_plain, parse_json, read_plain, shown
from rowstead.spec.errors import CheckpointError

FULL_SHARE = 0.5
"""When touched rows have more than this share of all bytes, the next snapshot is full."""
FIRST_INTERVAL_S = 2.0
"""Time until the first snapshot."""
MANIFEST = "snapshot.json"

_MAGIC = b"RSTDROW1"
_LENGTH = struct.Struct("<I")
_MAX_HEADER_BYTES = 1 << 16
_log = logging.getLogger("rowstead.fleet")


@dataclass(frozen=True, kw_only=True)
class SnapshotResult:
    is_full: bool
    num_rows: int
    num_bytes: int


class GrowingInterval:
    """Seconds until the next snapshot: as many as have passed so far, up to `longest_s`, so that a fault costs at most half of what was done."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s, self._passed_s = longest_s, 0.0
        self.seconds = min(FIRST_INTERVAL_S, longest_s)

    def grow(self) -> None:
        """Go on to the interval after this one."""
        self._passed_s += self.seconds
        self.seconds = min(self._passed_s, self._longest_s)


class Snapshots:
    """Takes snapshots of `shard` into a folder, on request, and once started after each growing interval of up to `every_s` with changes.

    `get_counts` returns the JSON to save with a snapshot; it is called while nothing changes.
    """

    def __init__(
        self, shard: TableShard, folder: Path, *, every_s: float | None = None, get_counts: Callable[[], dict[str, Any]] = dict
    ) -> None:
        self._shard, self._folder, self._get_counts = shard, folder, get_counts
        self._interval = None if every_s is None else GrowingInterval(every_s)
        self._num_changes_saved = 0
        self._full: str | None = None
        self._number = 0
        self.num_taken = 0
        self.num_failed = 0
        self._ended = threading.Event()
        self._wanted = threading.Condition()
        self._callbacks: list[Callable[[SnapshotResult | Exception], None]] = []
        self._thread: threading.Thread | None = None

    def start(self) -> Snapshots:
        self._thread = threading.Thread(target=self._run, name="rowstead-snapshots", daemon=True)
        self._thread.start()
        return self

    def request(self, done: Callable[[SnapshotResult | Exception], None]) -> None:
        """Request a snapshot from the thread, which calls `done` with the result."""
        with self._wanted:
            self._callbacks.append(done)
            self._wanted.notify_all()

    def close(self) -> None:
        """Stop the thread after the snapshot in progress."""
        with self._wanted:
            self._ended.set()
            self._wanted.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        for done in self._callbacks:
            done(CheckpointError("the server is stopping"))
        self._callbacks.clear()

    def status(self) -> dict[str, Any]:
        return {"num_snapshots": self.num_taken, "num_snapshots_failed": self.num_failed}

    def take(self) -> SnapshotResult:
        """Write a snapshot, full or of the touched rows, and make it the one that a restart reads; one at a time."""
        is_full = self._shard.touched_bytes > FULL_SHARE * self._shard.num_bytes
        self._folder.mkdir(parents=True, exist_ok=True)
        self._number += 1
        name = f"{'full' if is_full else 'touched'}-{self._number:06d}.rows"
        counts: dict[str, Any] = {}
        num_changes = 0

        def on_begin() -> None:
            nonlocal num_changes
            counts.update(self._get_counts())
            num_changes = self._shard.num_changes

        num_rows = self._shard.begin_snapshot(is_full=is_full, on_begin=on_begin)
        is_written = False
        try:
            num_bytes = _write_rows(self._folder / name, self._shard, num_rows)
            manifest = {
                "version": 1,
                "number": self._number,
                "full": name if is_full else self._full,
                "touched": None if is_full else name,
                "of": describe(self._shard),
                "counts": counts,
            }
            write_atomic(self._folder / MANIFEST, json.dumps(manifest) + "\n")
            is_written = True
        finally:
            self._shard.end_snapshot(is_full=is_full, is_written=is_written)
            if not is_written:
                with suppress(OSError):
                    (self._folder / name).unlink(missing_ok=True)
        if is_full:
            self._full = name
        remove_unused(self._folder, {name, self._full})
        self._num_changes_saved = num_changes
        self.num_taken += 1
        return SnapshotResult(is_full=is_full, num_rows=num_rows, num_bytes=num_bytes)

    def restore(self) -> dict[str, Any] | None:
        """Load the last snapshot, before serving; returns the counts saved with it, or None if there is none."""
        manifest = self._read_manifest()
        if manifest is None:
            return None
        for kind in ("full", "touched"):
            if manifest[kind] is not None:
                for copy in read_row_file(self._folder / manifest[kind], self._shard, is_full=kind == "full"):
                    self._shard.restore_rows(copy, is_touched=kind == "touched")
        self._full, self._number = manifest["full"], manifest["number"]
        remove_unused(self._folder, {manifest["full"], manifest["touched"]})
        counts: dict[str, Any] = manifest["counts"]
        return counts

    def _read_manifest(self) -> dict[str, Any] | None:
        file = self._folder / MANIFEST
        try:
            manifest = parse_json(read_plain(file))
        except FileNotFoundError:
            return None
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}. Remove it to start with new rows") from error
        if not isinstance(manifest, dict) or manifest.get("version") != 1 or manifest.get("of") != describe(self._shard):
            raise CheckpointError(
                f"the snapshot in {self._folder} has other tables, shards, dtypes or another optimizer: start with its recipe "
                "and number of servers, or remove it"
            )
        is_valid = {"number": is_count(manifest.get("number")), "counts": isinstance(manifest.get("counts"), dict)}
        for kind in ("full", "touched"):
            name = manifest.get(kind, "")
            is_valid[kind] = name is None or (
                isinstance(name, str) and bool(re.fullmatch(rf"{kind}-[0-9]{{6,18}}\.rows", name))
            )
        for key, holds in is_valid.items():
            if not holds:
                raise CheckpointError(
                    f"{file} is not valid: `{key}` is {shown(manifest.get(key))}. Remove it to start with new rows"
                )
        return manifest

    def _run(self) -> None:
        while True:
            due_s = None if self._interval is None else time.monotonic() + self._interval.seconds
            with self._wanted:
                while not self._ended.is_set() and not self._callbacks and (due_s is None or time.monotonic() < due_s):
                    self._wanted.wait(None if due_s is None else max(0.0, due_s - time.monotonic()))
                if self._ended.is_set():
                    return
                callbacks, self._callbacks = self._callbacks, []
            if not callbacks and self._shard.num_changes == self._num_changes_saved:
                continue  # training has not begun, or is paused
            outcome: SnapshotResult | Exception
            try:
                outcome = self.take()
            except Exception as error:  # noqa: BLE001, RUF100 - reported to the callbacks, and the next one is due
                self.num_failed += 1
                _log.warning("a snapshot into %s failed: %s", self._folder, error, exc_info=not isinstance(error, OSError))
                outcome = error
            for done in callbacks:
                done(outcome)
            if self._interval is not None and not callbacks:
                self._interval.grow()


def describe(shard: TableShard) -> dict[str, Any]:
    """Return what a snapshot must match."""
    return {
        "pieces": [
            [table.name, table.first_row, table.num_rows, table.width, *table.whole_shape] for table in shard.layout.tables
        ],
        "dtype": str(shard.dtype).removeprefix("torch."),
        "optimizer": None if shard.optimizer is None else shard.optimizer.kind,
        "seed": shard.seed,
    }


def remove_unused(folder: Path, names: set[str | None]) -> None:
    for path in folder.glob("*.rows"):
        if path.name not in names:
            with suppress(OSError):
                path.unlink()


def _write_rows(path: Path, shard: TableShard, num_rows: int) -> int:
    """Write the current snapshot; returns its bytes."""
    count = 0
    with open(path, "wb") as file:
        file.write(_MAGIC)
        for copy in shard.copy_rows():
            count += len(copy.rows)
            rows, first = copy.rows, None
            if int(rows[-1]) - int(rows[0]) + 1 == len(rows) and (np.diff(rows) == 1).all():
                first = int(rows[0])
            values = [value.contiguous().view(torch.uint8).numpy().data.cast("B") for value in copy.values]
            buffers = [*([] if first is not None else [rows.data.cast("B")]), *values]
            checksum = 0
            for buffer in buffers:
                checksum = zlib.crc32(buffer, checksum)
            header = {"table": shard.layout.tables[copy.table].name, "count": len(rows), "crc": checksum}
            _write_header(file, header if first is None else {**header, "first": first})
            for buffer in buffers:
                file.write(buffer)
        assert count == num_rows, f"{count} rows were copied for a snapshot of {num_rows}"
        _write_header(file, {"rows": count})
        file.flush()
        os.fsync(file.fileno())
        num_bytes = file.tell()
    fsync_folder(path.parent)
    return num_bytes


def read_row_file(path: Path, shard: TableShard, *, is_full: bool) -> Iterator[RowCopy]:
    """Yield the rows of a file block by block; raises a CheckpointError if it is damaged.

    No row comes twice, and in a full snapshot each comes once.
    """
    count = 0
    seen = [np.zeros(table.num_rows, np.bool_) for table in shard.layout.tables]
    try:
        file = open(open_plain(path), "rb")  # noqa: SIM115 - closed by the `with` below
    except OSError as error:
        raise CheckpointError(f"{path} is missing or not a plain file: {error}") from error
    with file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise CheckpointError(f"{path} is not a row file")
        while True:
            header = _read_header(file, path)
            if "rows" in header:
                if header["rows"] != count:
                    raise CheckpointError(f"{path} is damaged: it has {count} rows, expected {shown(header['rows'])}")
                if is_full and not all(rows.all() for rows in seen):
                    raise CheckpointError(f"{path} is damaged: a full snapshot, but some rows are missing")
                if file.read(1):
                    raise CheckpointError(f"{path} is damaged: it goes on after its last block")
                return
            copy = _read_block(file, path, header, shard)
            own = seen[copy.table]
            is_ascending = bool((np.diff(copy.rows) > 0).all())
            if own[copy.rows].any() or not (is_ascending or len(np.unique(copy.rows)) == len(copy.rows)):
                raise CheckpointError(f"{path} is damaged: a row of `{shard.layout.tables[copy.table].name}` comes twice")
            own[copy.rows] = True
            count += len(copy.rows)
            yield copy


def _read_block(file: BinaryIO, path: Path, header: Mapping[str, Any], shard: TableShard) -> RowCopy:
    name, num, first = header.get("table"), header.get("count", 0), header.get("first")
    if not isinstance(name, str) or name not in shard.table_index:
        raise CheckpointError(f"{path} is damaged: a block of the unknown table {shown(name)}")
    table = shard.table_index[name]
    whole = shard.layout.tables[table]
    if not is_count(num, at_least=1) or num > whole.num_rows:
        raise CheckpointError(f"{path} is damaged: {shown(num)} rows of `{whole.name}` in one block")
    if first is not None and not (is_count(first) and first + num <= whole.num_rows):
        raise CheckpointError(f"{path} is damaged: {num} rows of `{whole.name}` from {shown(first)} on")
    tensors = [torch.empty(num, tensor.shape[1], dtype=tensor.dtype) for tensor in shard.parts(table).values()]
    rows = np.empty(num, np.int64) if first is None else np.arange(first, first + num)
    checksum = 0
    targets = [tensor.view(torch.uint8).numpy() for tensor in tensors]
    for target in [*([rows] if first is None else []), *targets]:
        buffer = target.data.cast("B")
        if file.readinto(buffer) != len(buffer):  # type: ignore[attr-defined]
            raise CheckpointError(f"{path} is damaged: it ends within a block")
        checksum = zlib.crc32(buffer, checksum)
    if checksum != header.get("crc") or rows.min() < 0 or rows.max() >= whole.num_rows:
        raise CheckpointError(f"{path} is damaged: wrong checksum of a block")
    return RowCopy(table, rows, tensors)


def _write_header(file: BinaryIO, header: Mapping[str, Any]) -> None:
    encoded = json.dumps(header).encode()
    file.write(_LENGTH.pack(len(encoded)) + encoded)


def _read_header(file: BinaryIO, path: Path) -> dict[str, Any]:
    start = file.read(_LENGTH.size)
    length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else _MAX_HEADER_BYTES + 1
    encoded = file.read(length) if length <= _MAX_HEADER_BYTES else b""
    try:
        header = parse_json(encoded)
    except ValueError:
        header = None
    if not isinstance(header, dict) or len(encoded) != length:
        raise CheckpointError(f"{path} is damaged or truncated")
    return header
