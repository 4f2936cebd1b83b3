"""Finds the files of a log by path, glob or URL, and reads remote ones by ranges."""

from __future__ import annotations

import glob
import io
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import fsspec

from rowstead.spec.errors import DataError


@dataclass(frozen=True)
class LogFile:
    """One file, local or on a filesystem of fsspec's."""

    path: str
    """Path or URL, as messages show it."""
    filesystem: Any = None
    """The fsspec filesystem; None for a local file."""
    remote_path: str = ""

    @property
    def is_local(self) -> bool:
        return self.filesystem is None

    def ranges(self) -> RangeFile:
        """The remote file as an object that pyarrow can read, with a position of its own."""
        return RangeFile(self.filesystem, self.remote_path)


def find_files(patterns: Iterable[str]) -> list[LogFile]:
    """The files that paths, globs and URLs name, in that order; those of one glob are sorted."""
    return [file for pattern in patterns for file in (_remote(pattern) if "://" in pattern else _local(pattern))]


def _local(pattern: str) -> list[LogFile]:
    path = os.path.expanduser(pattern)
    if os.path.isdir(path):
        raise DataError(f"`{pattern}` is a folder; list its files, such as `{pattern.rstrip('/')}/*.parquet`")
    if os.path.exists(path):
        return [LogFile(path)]
    if not glob.has_magic(path):
        raise DataError(f"no file `{pattern}` (looked in {os.path.dirname(os.path.abspath(path))})")
    found = sorted(p for p in glob.glob(path, recursive=True) if os.path.isfile(p))
    if not found:
        raise DataError(f"no file matches `{pattern}`")
    return [LogFile(p) for p in found]


def _remote(url: str) -> list[LogFile]:
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
        paths = sorted(filesystem.glob(path)) if glob.has_magic(path) else [path] if filesystem.exists(path) else []
    except (ImportError, ValueError) as error:
        raise DataError(f"cannot open `{url}`: {error}") from None
    except OSError as error:
        raise DataError(f"cannot reach `{url}`: {error}") from None
    if not paths:
        raise DataError(f"no file {'matches ' if glob.has_magic(path) else ''}`{url}`")
    return [LogFile(filesystem.unstrip_protocol(p), filesystem, p) for p in paths]


class RangeFile(io.RawIOBase):
    """A remote file read by ranges, with a position of its own, so that threads do not interfere."""

    def __init__(self, filesystem: Any, path: str) -> None:
        self._filesystem, self._path = filesystem, path
        self._size = int(filesystem.size(path))
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        stop = self._size if size is None or size < 0 else min(self._position + size, self._size)
        if stop <= self._position:
            return b""
        data: bytes = self._filesystem.cat_file(self._path, start=self._position, end=stop)
        self._position += len(data)
        return data
