"""Reads the footers of Parquet files, and notices files that change.

The footer and what stands before it are read together, so a digest of the end of each file costs nothing. It tells another file under the
same name from one that was only touched or copied.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from rowstead.data.files import LogFile, open_regular
from rowstead.data.footer_checks import find_footer_problem
from rowstead.spec.errors import DataError

Range = tuple[int, int]
"""Start and stop of bytes in a file."""

FOOTER_BYTES = 64 << 10
"""Read of the end of a file to find its footer; a larger footer takes a second request."""
NUM_SHOWN = 3
"""Changed files that a message names."""


@dataclass(frozen=True)
class Fingerprint:
    """What identifies the content of a file without reading all of it."""

    size: int
    """Bytes."""
    end: str
    """Digest of its last bytes: the footer, or FOOTER_BYTES if those are more."""
    etag: str | None = None
    """The bucket's own digest of a remote file, where it has one."""

    def difference(self, now: Fingerprint) -> str | None:
        """What another fingerprint of the file has that this one has not; None if both are of the same content."""
        if self.size != now.size:
            return f"it had {self.size:,} bytes and now has {now.size:,}"
        if self.end != now.end:
            return "its footer or last rows differ"
        return "its ETag differs" if None not in (self.etag, now.etag) and self.etag != now.etag else None


def describe_changes(before: Mapping[str, Fingerprint], now: Mapping[str, Fingerprint]) -> str | None:
    """Which files of a log have changed, and how, in a few words; None if none has."""
    changes = [f"`{path}` is new" for path in now if path not in before]
    changes += [f"`{path}` is missing" for path in before if path not in now]
    for path in (path for path in before if path in now):
        difference = before[path].difference(now[path])
        if difference is not None:
            changes.append(f"`{path}`: {difference}")
    more = [f"{len(changes) - NUM_SHOWN:,} more"] if len(changes) > NUM_SHOWN else []
    return "; ".join([*changes[:NUM_SHOWN], *more]) or None


class Footers:
    """The footers of a log's files, and a fingerprint of each file as it was when it was first read. Thread-safe.

    Those of remote files are fetched once and then kept in a temporary file, since those of a large log are large.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranges: dict[str, Range] = {}
        self._end = 0
        self._modified_ns: dict[str, int] = {}
        self.fingerprints: dict[str, Fingerprint] = {}

    @cached_property
    def _kept(self) -> BinaryIO:
        return tempfile.TemporaryFile()

    def read_metadata(self, file: LogFile) -> pq.FileMetaData:
        """The footer of a file as pyarrow reads it."""
        try:
            footer = self._read_local(file) if file.is_local else self._read_remote(file)
            metadata = pq.read_metadata(pa.BufferReader(footer))
            problem = find_footer_problem(footer, metadata)
        except (pa.ArrowInvalid, UnicodeDecodeError) as error:
            raise DataError(f"`{file.path}` is not a Parquet file: {first_line(error)}") from None
        except (pa.ArrowException, OSError, MemoryError) as error:
            raise DataError(f"`{file.path}` cannot be opened: {first_line(error)}") from None
        if problem is not None:
            raise DataError(f"`{file.path}` has a damaged footer: {problem}. Copy the file again, or write it anew")
        return metadata

    def check_unchanged(self, file: LogFile) -> None:
        """Raise a DataError if a local file is not what it was when its footer was read. A touched file is no other file."""
        if not file.is_local:
            return
        try:
            stat = os.stat(file.path)
        except OSError as error:
            raise DataError(f"`{file.path}` cannot be opened: {error.strerror}. It was there when reading began") from None
        if (stat.st_size, stat.st_mtime_ns) != (self.fingerprints[file.path].size, self._modified_ns[file.path]):
            self._read_local(file)

    def _read_local(self, file: LogFile) -> bytes:
        with open_regular(file.path) as opened:
            stat = os.fstat(opened.fileno())

            def read(start: int, stop: int) -> bytes:
                return os.pread(opened.fileno(), stop - start, start)

            footer, end = _read_footer(stat.st_size, read)
        self._note(file, Fingerprint(stat.st_size, end))
        self._modified_ns[file.path] = stat.st_mtime_ns
        return footer

    def _read_remote(self, file: LogFile) -> bytes:
        if file.path in self._ranges:
            start, stop = self._ranges[file.path]
            return os.pread(self._kept.fileno(), stop - start, start)
        footer, end = _read_footer(file.size, file.read)
        self._note(file, Fingerprint(file.size, end, file.etag))
        with self._lock:
            os.pwrite(self._kept.fileno(), footer, self._end)
            self._ranges[file.path] = (self._end, self._end + len(footer))
            self._end += len(footer)
        return footer

    def _note(self, file: LogFile, now: Fingerprint) -> None:
        """Keep the fingerprint of a file, or raise a DataError if it had another one."""
        difference = self.fingerprints.setdefault(file.path, now).difference(now)
        if difference is not None:
            raise DataError(
                f"`{file.path}` changed while it was being read: {difference}. Restore it and start again; write another log to "
                "other files"
            )


def _read_footer(size: int, read: Callable[[int, int], bytes]) -> tuple[bytes, str]:
    """The end of a Parquet file, from its footer on, and a digest of at least FOOTER_BYTES of it."""
    end = read(max(size - FOOTER_BYTES, 0), size)
    footer_bytes = 8 + int.from_bytes(end[-8:-4], "little")
    if footer_bytes > size or end[-4:] != b"PAR1":
        return end, ""  # not a Parquet file, as pyarrow will say
    if footer_bytes > len(end):
        end = read(size - footer_bytes, size - len(end)) + end
    return end[-footer_bytes:], hashlib.blake2b(end, digest_size=16).hexdigest()


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return (str(error).splitlines() or [type(error).__name__])[0]
