"""Files that are written once, from their first byte to their last."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from types import TracebackType

import numpy as np

from rowstead.stores.scratch import BLOCK, allocate_aligned

BUFFER_BYTES = 8 << 20


class NewFile:
    """A file that is written from its start to its end, synced when it is closed, and whose digest is then known.

    Large files bypass the page cache where the file system allows it: copying to it takes more processor time than the digest, and it
    would evict the log that is trained on.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._memory = allocate_aligned(BUFFER_BYTES)
        self._filled = 0
        self._plain = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._direct: int | None = None
        """Descriptor for direct I/O, opened for the first full buffer; that of the file where there is none."""
        self._digest = hashlib.sha256()
        self.num_bytes = 0

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                self._flush(self._plain)  # the rest may be no whole number of blocks
                os.fsync(self._plain)
        finally:
            for descriptor in {self._plain, self._plain if self._direct is None else self._direct}:
                os.close(descriptor)

    @property
    def sha256(self) -> str:
        """The digest of a closed file."""
        return self._digest.hexdigest()

    def write(self, content: bytes | memoryview) -> None:
        """Append bytes."""
        given = np.frombuffer(content, np.uint8)
        while len(given):
            some = given[: BUFFER_BYTES - self._filled]
            self._memory[self._filled : self._filled + len(some)] = some
            self._filled += len(some)
            given = given[len(some) :]
            if self._filled == BUFFER_BYTES:
                if self._direct is None:
                    self._direct = self._open_direct()
                self._flush(self._direct)

    def _open_direct(self) -> int:
        try:
            return os.open(self._path, os.O_WRONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
        except OSError:
            return self._plain

    def _flush(self, descriptor: int) -> None:
        content = self._memory.data[: self._filled]
        self._digest.update(content)
        done = 0
        while done < self._filled:
            if done % BLOCK:
                descriptor = self._plain  # after a short write
            try:
                done += os.pwrite(descriptor, content[done:], self.num_bytes + done)
            except OSError as error:
                if error.errno != errno.EINVAL or descriptor == self._plain:
                    raise
                descriptor = self._plain  # the file system has direct I/O, but not for these blocks
        self.num_bytes += self._filled
        self._filled = 0
