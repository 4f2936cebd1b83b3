"""The scratch file of one run: created, locked, and removed at the end."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import weakref
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rowstead.spec.errors import RowsteadError
from rowstead.spec.sizes import format_bytes

BLOCK = 4096
"""Alignment of memory, offsets and sizes in bytes; every file system we know accepts it for direct I/O."""
MAGIC = b"rowstead rows\n"
"""The first block begins with this: other files are not overwritten."""


class InUseError(RowsteadError):
    """Another store uses the file."""


def allocate_aligned(num_bytes: int) -> NDArray[np.uint8]:
    """Allocate zeroed memory aligned for direct I/O."""
    return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)


def round_up_to_block(num_bytes: int) -> int:
    """The next multiple of BLOCK."""
    return -(-num_bytes // BLOCK) * BLOCK


class ScratchFile:
    """A file of `num_bytes` after a header of one block; offsets count from the first byte of the file.

    With `direct`, reads and writes bypass the page cache where the file system allows it; the attribute `direct` says whether it does.
    Offsets and sizes of reads must be multiples of `sector`. Bytes that were never written take no disk space.
    """

    def __init__(self, path: str | Path, num_bytes: int, *, direct: bool) -> None:
        self.path, self.num_bytes = Path(path), num_bytes
        self._plain = self._create()
        """Descriptor without direct I/O; holds the lock."""
        try:
            try:
                os.pwrite(self._plain, MAGIC.ljust(BLOCK), 0)
                os.ftruncate(self._plain, BLOCK + num_bytes)
            except OSError as error:
                raise self.failed(error, "creating") from None
            self.fd, self.direct, self.sector = self._open_direct() if direct else (os.dup(self._plain), False, 1)
        except BaseException:
            _discard(self.path, (self._plain,), os.getpid())
            raise
        self.close = weakref.finalize(self, _discard, self.path, (self.fd, self._plain), os.getpid())
        """Removes the file, as does a regular exit of the process."""

    def _create(self) -> int:
        folder = self.path.parent
        if not folder.is_dir():
            raise RowsteadError(
                f"folder `{folder}` for the row file `{self.path.name}` does not exist: create it, or choose another"
            )
        try:
            plain = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RowsteadError(f"cannot create the row file `{self.path}`: {error.strerror}") from None
        try:
            self._lock(plain)
            if os.pread(plain, len(MAGIC), 0) not in (b"", MAGIC):
                raise RowsteadError(f"`{self.path}` exists and is not a row file: choose another name")
            os.ftruncate(plain, 0)  # an earlier run's rows are useless
            if BLOCK + self.num_bytes > shutil.disk_usage(folder).free:
                self.path.unlink()
                raise self.full(BLOCK + self.num_bytes)
        except BaseException:
            os.close(plain)
            raise
        return plain

    def _lock(self, plain: int) -> None:
        try:
            fcntl.flock(plain, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUseError(f"the row file `{self.path}` is in use by another process or store: choose another") from None
        try:
            is_ours = os.fstat(plain).st_ino == os.stat(self.path).st_ino
        except FileNotFoundError:
            is_ours = False
        if not is_ours:  # its owner has removed it since we opened it
            raise InUseError(f"the row file `{self.path}` was in use a moment ago: try again, or choose another")

    def _open_direct(self) -> tuple[int, bool, int]:
        """A descriptor for direct I/O, True and the sector size; an ordinary descriptor where the file system has no direct I/O."""
        memory = allocate_aligned(BLOCK)
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
        except OSError:
            return os.dup(self._plain), False, 1
        for sector in (512, BLOCK):
            try:
                if hasattr(os, "O_DIRECT") and os.preadv(fd, [memory.data[:sector]], sector % BLOCK) >= 0:
                    return fd, True, sector
            except OSError:
                continue
        os.close(fd)
        return os.dup(self._plain), False, 1

    def read(self, memory: NDArray[np.uint8], first_byte: int) -> None:
        """Fill aligned memory of whole blocks from an offset of whole blocks."""
        done = 0
        while done < len(memory):
            try:
                count = os.preadv(self.fd, [memory.data[done:]], first_byte + done)
            except OSError as error:
                raise self.failed(error, "reading") from None
            if count == 0:
                raise self.truncated()
            done += count

    def write(self, memory: NDArray[np.uint8], first_byte: int) -> None:
        """Write aligned memory of whole blocks to an offset of whole blocks."""
        done = 0
        while done < len(memory):
            try:
                done += os.pwritev(self.fd, [memory.data[done:]], first_byte + done)
            except OSError as error:
                raise self.failed(error, "writing") from None

    def failed(self, error: OSError, doing: str) -> RowsteadError:
        """The error to raise for a system error."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return self.full(max(0, BLOCK + self.num_bytes - os.fstat(self._plain).st_blocks * 512), error)
        return RowsteadError(f"{doing} the row file `{self.path}` failed: {error.strerror}; start again from a checkpoint")

    def full(self, needed: int, error: OSError | None = None) -> RowsteadError:
        """The error to raise when the disk is full, with sizes and remedies."""
        why = f" ({error.strerror})" if error is not None and error.errno != errno.ENOSPC else ""
        return RowsteadError(
            f"not enough disk space for the row file `{self.path}`{why}: it needs {format_bytes(needed)} more, and "
            f"{format_bytes(shutil.disk_usage(self.path.parent).free)} are free there. 1. free some, or raise the system's file size "
            "limit; 2. choose a folder on a larger disk; 3. make the model smaller: fewer rows, narrower rows, or an optimizer with "
            "less state"
        )

    def truncated(self) -> RowsteadError:
        """The error to raise when the file is shorter than it should be."""
        return RowsteadError(f"the row file `{self.path}` was truncated while in use; start from a checkpoint")

    def changed(self) -> RowsteadError:
        """The error to raise when a record is not the one that was written."""
        return RowsteadError(
            f"the row file `{self.path}` was changed while in use, or the disk is faulty; start from a checkpoint"
        )


def _discard(path: Path, descriptors: tuple[int, ...], pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child must not remove its parent's file
    path.unlink(missing_ok=True)
    for fd in descriptors:
        os.close(fd)
