"""`CsvIndex`: where the row groups of a text file are, found in one pass, so that any of them can be read on its own.

A compressed file is unpacked in that pass into a temporary file, whose parts are compressed one by one. Memory is bounded by a row group.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import hashlib
import os
import tempfile
import threading
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numba
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowstead.data.files import LogFile, check_regular, open_regular
from rowstead.data.footers import FOOTER_BYTES, Fingerprint, first_line
from rowstead.spec.data import CsvSpec
from rowstead.spec.errors import DataError

GROUP_ROWS = 65_536
"""Rows of a row group, as many as the converters write to Parquet; fewer if they have more than GROUP_BYTES."""
GROUP_BYTES = 64 << 20
MAX_ROW_BYTES = 16 << 20
MAX_EXPANSION = 1000
"""A compressed file that becomes more than this many times larger is refused; real logs become 3 to 50 times larger."""
READ_BYTES = 4 << 20
_SMALL_BYTES = 64 << 20
"""Of any compressed file, so much may be unpacked."""

_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_REFUSED = {
    b"PK\x03\x04": "a zip archive; unpack it",
    b"BZh": "compressed by bzip2; compress it by gzip or Zstandard instead",
    b"\xfd7zXZ": "compressed by xz; compress it by gzip or Zstandard instead",
    b"PAR1": "a Parquet file; name it under data.parquet",
    b"\xff\xfe": "UTF-16 text; convert it to UTF-8",
    b"\xfe\xff": "UTF-16 text; convert it to UTF-8",
}
_BOM = b"\xef\xbb\xbf"
_NOT_CLOSED = "a quote is not closed. Set data.csv.quotes: false if quotes have no meaning"
_START, _PLAIN, _QUOTED, _AFTER_QUOTE = range(4)
"""Where in a cell the scanner is."""
_MORE, _FULL, _TOO_LONG = range(3)


@dataclass(frozen=True)
class TextGroup:
    """Consecutive rows of a text file, or its header."""

    start: int
    """First byte in the text."""
    num_bytes: int
    num_rows: int
    text: bytes = b""
    """The rows themselves, where they are kept."""


def find_groups(
    path: str,
    blocks: Iterable[bytes],
    *,
    separator: str,
    quotes: bool,
    has_header: bool,
    keep: bool = False,
    is_beginning: bool = False,
) -> Iterator[TextGroup]:
    """The header of a text, if it has one, and its row groups. `blocks` are consecutive; the text may end in a row if it is a beginning.

    With `keep` each has its text; the header always has.
    """
    codes = ord(separator), ord('"') if quotes else -1
    state = np.zeros(4, np.int64)  # where in a cell, bytes of the row, rows and bytes of the group
    start, total_rows, is_header = 0, 0, has_header
    parts: list[bytes] = []
    for block in blocks:
        data, at = np.frombuffer(block, np.uint8), 0
        if start == 0 and state[3] == 0 and block.startswith(_BOM):
            at = start = len(_BOM)
        while at < len(data):
            wanted = 1 if is_header else GROUP_ROWS
            stop, found = _scan_rows(data, at, *codes, wanted, GROUP_BYTES, MAX_ROW_BYTES, state)
            if found == _TOO_LONG:
                raise DataError(
                    f"`{path}`: row {total_rows + int(state[2])} (from 0) has more than {MAX_ROW_BYTES:,} bytes"
                    + (f"; {_NOT_CLOSED}" if state[0] == _QUOTED else "")
                )
            if keep or is_header:
                parts.append(block[at:stop])
            at = stop
            if found == _FULL:
                yield TextGroup(start, int(state[3]), int(state[2]), b"".join(parts))
                start, total_rows, is_header = start + int(state[3]), total_rows + (0 if is_header else int(state[2])), False
                parts.clear()
                state[2:] = 0
    if is_beginning:
        state[3] -= state[1]
        parts = [b"".join(parts)[: int(state[3])]]
    elif state[0] == _QUOTED:
        raise DataError(f"`{path}`: in the last row {_NOT_CLOSED}")
    elif state[1]:  # the last row has no line break
        state[2] += 1
    if state[2]:
        yield TextGroup(start, int(state[3]), int(state[2]), b"".join(parts))


class CsvIndex:
    """The row groups of one text file."""

    def __init__(self, file: LogFile, *, separator: str, quotes: bool, has_header: bool) -> None:
        self._file = file
        self._modified_ns = 0
        self.fingerprint = self._identify()
        codec = _find_codec(file)
        self._unpacked = None if codec is None else tempfile.TemporaryFile(prefix="rowstead-")  # noqa: SIM115
        self._groups: list[TextGroup] = []
        self._spans: list[tuple[int, int]] = []
        """Where in the temporary file each group of a compressed file is: offset and bytes."""
        self.header = b""
        """The first row, if it is a header."""
        blocks = _read_text(file, codec, self.fingerprint.size)
        groups = find_groups(
            file.path, blocks, separator=separator, quotes=quotes, has_header=has_header, keep=codec is not None
        )
        try:
            for group in groups:
                if has_header and not self.header:
                    self.header = group.text
                else:
                    self._add(group)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"`{file.path}` cannot be read: {first_line(error)}. Copy the file again") from None

    @property
    def num_rows(self) -> list[int]:
        """Rows of each row group."""
        return [group.num_rows for group in self._groups]

    def _add(self, group: TextGroup) -> None:
        self._groups.append(dataclasses.replace(group, text=b""))
        if self._unpacked is not None:
            packed = pa.Codec("zstd", compression_level=1).compress(group.text, asbytes=True)
            self._spans.append((self._unpacked.seek(0, os.SEEK_END), len(packed)))
            self._unpacked.write(packed)
            self._unpacked.flush()

    def read(self, number: int) -> bytes:
        """The text of a row group; a DataError if the file has changed since the index was made."""
        group = self._groups[number]
        if self._unpacked is not None:
            offset, size = self._spans[number]
            packed = os.pread(self._unpacked.fileno(), size, offset)
            unpacked: bytes = pa.decompress(packed, group.num_bytes, codec="zstd", asbytes=True)
            return unpacked
        self.check_unchanged()
        if not self._file.is_local:
            return self._file.read(group.start, group.start + group.num_bytes)
        with open_regular(self._file.path) as opened:
            text = os.pread(opened.fileno(), group.num_bytes, group.start)
        self.check_unchanged()
        if len(text) != group.num_bytes:
            raise DataError(f"`{self._file.path}` ended before its row group {number}; restore it and start again")
        return text

    def check_unchanged(self) -> None:
        """Raise a DataError if a local file is not what it was. A touched file is no other file."""
        if not self._file.is_local:
            return
        try:
            stat = os.stat(self._file.path)
        except OSError as error:
            raise DataError(
                f"`{self._file.path}` cannot be opened: {error.strerror}. It was there when reading began"
            ) from None
        if (stat.st_size, stat.st_mtime_ns) == (self.fingerprint.size, self._modified_ns):
            return
        difference = self.fingerprint.difference(self._identify())
        if difference is not None:
            raise DataError(f"`{self._file.path}` changed while it was being read: {difference}. Restore it and start again")

    def _identify(self) -> Fingerprint:
        file = self._file
        if not file.is_local:
            end = file.read(max(file.size - FOOTER_BYTES, 0), file.size)
            return Fingerprint(file.size, hashlib.blake2b(end, digest_size=16).hexdigest(), file.etag)
        with open_regular(file.path) as opened:
            stat = os.fstat(opened.fileno())
            end = os.pread(opened.fileno(), FOOTER_BYTES, max(stat.st_size - FOOTER_BYTES, 0))
        self._modified_ns = stat.st_mtime_ns
        return Fingerprint(stat.st_size, hashlib.blake2b(end, digest_size=16).hexdigest())


def _open_raw(file: LogFile) -> pa.NativeFile:
    if file.is_local:
        check_regular(file.path)
        # Files of the kernel have no size, and reading them may block.
        return pa.OSFile(file.path, "rb") if os.path.getsize(file.path) else pa.BufferReader(b"")
    return pa.PythonFile(file.ranges(), "r")


def _find_codec(file: LogFile) -> str | None:
    """How a file is compressed, by its first bytes; None if it is not."""
    with _open_raw(file) as raw:
        begin = raw.read(6)
    refused = next((what for magic, what in _REFUSED.items() if begin.startswith(magic)), None)
    if refused is not None:
        raise DataError(f"`{file.path}` is {refused}")
    return next((codec for magic, codec in _MAGIC.items() if begin.startswith(magic)), None)


def _read_text(file: LogFile, codec: str | None, size: int) -> Generator[bytes, None, None]:
    """The text of a file of `size` bytes, some at a time."""
    with _open_raw(file) as raw:
        if codec is None:
            while block := raw.read(READ_BYTES):
                yield block
            return
        limit, total = max(MAX_EXPANSION * size, _SMALL_BYTES), 0
        with pa.CompressedInputStream(raw, codec) as unpacked:
            while block := unpacked.read(READ_BYTES):
                total += len(block)
                if total > limit:
                    raise DataError(
                        f"`{file.path}` becomes more than {MAX_EXPANSION:,} times larger when it is unpacked, as no log does; "
                        "unpack it yourself if you trust it"
                    )
                yield block


def read_beginning(file: LogFile, num_bytes: int) -> tuple[bytes, bool]:
    """The first `num_bytes` or more of a file's text, and whether there is more."""
    found = b""
    try:
        with contextlib.closing(_read_text(file, _find_codec(file), 1 << 62)) as blocks:
            for block in blocks:
                found += block
                if len(found) > num_bytes:
                    return found[:num_bytes], True
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"`{file.path}` cannot be read: {first_line(error)}. Copy the file again") from None
    return found, False


_lock = threading.Lock()
_building: dict[tuple[Any, ...], threading.Lock] = {}
_indexes: WeakValueDictionary[tuple[Any, ...], CsvIndex] = WeakValueDictionary()


def open_index(file: LogFile, spec: CsvSpec, separator: str) -> CsvIndex:
    """The index of a file, shared by all that read it at the same time: the splits of a log are in the same files."""
    has_header = not spec.columns
    if not file.is_local:
        return CsvIndex(file, separator=separator, quotes=spec.quotes, has_header=has_header)
    with open_regular(file.path) as opened:
        stat = os.fstat(opened.fileno())
    key = (os.path.realpath(file.path), stat.st_size, stat.st_mtime_ns, separator, spec.quotes, has_header)
    with _lock:
        own = _building.setdefault(key, threading.Lock())
    with own:
        found = _indexes.get(key)
        if found is None:
            found = _indexes[key] = CsvIndex(file, separator=separator, quotes=spec.quotes, has_header=has_header)
    with _lock:
        _building.pop(key, None)
    return found


def split_row(row: bytes, separator: str, *, quotes: bool) -> list[str]:
    """The cells of one row."""
    text = row.decode("utf-8").strip("\r\n")
    reader = csv.reader([text], delimiter=separator) if quotes else iter([text.split(separator)])
    try:
        return next(reader, [])
    except csv.Error as error:  # a cell that is very long, for example
        raise ValueError(str(error)) from None


@numba.njit(nogil=True, cache=True, boundscheck=False)
def _scan_rows(  # type: ignore[no-untyped-def]
    data: NDArray[np.uint8], at, separator, quote, group_rows, group_bytes, row_bytes, state
):
    """Read `data` from `at` on until a row group is full or the data ends; returns where, and which.

    Quotes mean what they mean to pyarrow: only at the start of a cell, and doubled inside. Empty lines are no rows.
    """
    mode, row, rows, size = state[0], state[1], state[2], state[3]
    stop, found = len(data), _MORE
    for i in range(at, len(data)):
        c = data[i]
        size += 1
        if mode == _QUOTED:
            row += 1
            if c == quote:
                mode = _AFTER_QUOTE
        elif c == 10 or c == 13:
            if row > 0:
                rows += 1
                row = 0
            mode = _START
            if rows >= group_rows or size >= group_bytes:
                stop, found = i + 1, _FULL
                break
        else:
            row += 1
            mode = _QUOTED if c == quote and mode != _PLAIN else _START if c == separator else _PLAIN
        if row > row_bytes:
            stop, found = i + 1, _TOO_LONG
            break
    state[0], state[1], state[2], state[3] = mode, row, rows, size
    return stop, found


def count_cells(text: bytes, *, separator: str, quotes: bool, num_rows: int) -> NDArray[np.int64]:
    """For each row of a text [R, 3]: its first byte, its end without the line break, and its cells."""
    rows = np.zeros((num_rows, 3), np.int64)
    found = _count_cells(np.frombuffer(text, np.uint8), ord(separator), ord('"') if quotes else -1, rows)
    assert found == num_rows, f"{found} rows, but the index says {num_rows}"
    return rows


@numba.njit(nogil=True, cache=True, boundscheck=False)
def _count_cells(data, separator, quote, rows):  # type: ignore[no-untyped-def]
    """Fill rows [R, 3] as `count_cells`; returns the number of rows. Quotes are as in `_scan_rows`."""
    mode, start, cells, found = _START, -1, 1, 0
    for i in range(len(data)):
        c = data[i]
        if mode == _QUOTED:
            if c == quote:
                mode = _AFTER_QUOTE
            continue
        if c == 10 or c == 13:
            if start >= 0:
                if found < len(rows):
                    rows[found, 0], rows[found, 1], rows[found, 2] = start, i, cells
                found += 1
            mode, start, cells = _START, -1, 1
            continue
        if start < 0:
            start = i
        if c == separator:
            cells += 1
        mode = _QUOTED if c == quote and mode != _PLAIN else _START if c == separator else _PLAIN
    if start >= 0:
        if found < len(rows):
            rows[found, 0], rows[found, 1], rows[found, 2] = start, len(data), cells
        found += 1
    return found
