"""Files of a log by path, glob or URL, and bytes of them from any thread."""

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
    """One file, on this machine or wherever fsspec reaches."""

    path: str
    """As a person would name it."""
    filesystem: Any = None
    """fsspec's, None for a local file."""
    remote_path: str = ""

    @property
    def is_local(self) -> bool:
        return self.filesystem is None

    def ranges(self) -> RangeFile:
        """A remote file as pyarrow can open it, independent of any other that is open."""
        return RangeFile(self.filesystem, self.remote_path)


def find_files(patterns: Iterable[str]) -> list[LogFile]:
    """The files that paths, globs and URLs name, in that order; those of one glob are sorted."""
    return [file for pattern in patterns for file in (_remote(pattern) if "://" in pattern else _local(pattern))]


def _local(pattern: str) -> list[LogFile]:
    path = os.path.expanduser(pattern)
    if os.path.isdir(path):
        raise DataError(f"`{pattern}` is a folder: name its files, such as `{pattern.rstrip('/')}/*.parquet`")
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
    """A remote file read by ranges, with a position of its own, so that threads do not meet."""

    def __init__(self, filesystem: Any, path: str) -> None:
        self._filesystem, self._path = filesystem, path
        self._size = int(filesystem.size(path))
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        stop = self._size if size is None or size < 0 else min(self._at + size, self._size)
        if stop <= self._at:
            return b""
        data: bytes = self._filesystem.cat_file(self._path, start=self._at, end=stop)
        self._at += len(data)
        return data
