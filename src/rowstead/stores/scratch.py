"""The scratch file of one run: opened, checked, locked, and removed at the end.

The first block describes its contents. A file that is kept ends with the data that its owner needs to open it again.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rowstead.spec.errors import RowsteadError
from rowstead.spec.sizes import format_bytes

BLOCK = 4096
"""Alignment of memory, offsets and sizes in bytes; every file system we know accepts it for direct I/O."""
MAGIC = b"rowstead rows\n"

Facts = dict[str, Any]
"""Contents of a file's header, as JSON."""


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
    Offsets and sizes of reads must be multiples of `sector`. Bytes that were never written take no disk space, unless `reserve`
    allocates all of them at once.
    """

    def __init__(
        self, path: str | Path, num_bytes: int, facts: Facts, *, create: bool, keep: bool, direct: bool, reserve: bool
    ) -> None:
        self.path, self.num_bytes, self.keep = Path(path), num_bytes, keep
        self._facts = facts
        self._plain = self._new() if create else self._existing()
        """Descriptor without direct I/O; holds the lock."""
        try:
            self.extra = b"" if create else self._read_extra()
            try:
                self._write_header(whole=False)
                os.ftruncate(self._plain, BLOCK + num_bytes)
                if reserve:
                    os.posix_fallocate(self._plain, 0, BLOCK + num_bytes)
            except OSError as error:
                raise self.failed(error, "creating") from None
            self.fd, self.direct, self.sector = self._open_direct() if direct else (os.dup(self._plain), False, 1)
        except BaseException:
            _discard(self.path, (self._plain,), keep and not create, os.getpid())
            raise
        self._finalizer = weakref.finalize(self, _discard, self.path, (self.fd, self._plain), keep, os.getpid())

    def _new(self) -> int:
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
            if BLOCK + self.num_bytes > free_bytes(folder):
                self.path.unlink()
                raise self.full(BLOCK + self.num_bytes)
        except BaseException:
            os.close(plain)
            raise
        return plain

    def _existing(self) -> int:
        try:
            plain = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise RowsteadError(
                f"the row file `{self.path}` does not exist. It is the scratch file of one run and is removed when the run ends: "
                "1. start again, or from a checkpoint; 2. name the file that you kept"
            ) from None
        except OSError as error:
            raise RowsteadError(f"cannot open the row file `{self.path}`: {error.strerror}") from None
        try:
            self._lock(plain)
            header = os.pread(plain, BLOCK, 0)
            if not header.startswith(MAGIC):
                raise RowsteadError(f"`{self.path}` is not a row file")
            found = json.loads(header[len(MAGIC) :])
            for key, value in self._facts.items():
                if (other := found["facts"].get(key)) != value:
                    raise RowsteadError(
                        f"the row file `{self.path}` was created with {key} {other}, not {value}: it belongs to another model, "
                        "optimizer or version of rowstead"
                    )
            if not found["whole"]:
                raise RowsteadError(
                    f"the row file `{self.path}` was not closed, so its newest rows are unknown: continue from a checkpoint"
                )
            size, expected = os.fstat(plain).st_size, BLOCK + self.num_bytes + found["extra_bytes"]
            if size != expected:
                raise RowsteadError(f"the row file `{self.path}` is truncated: it has {size} of {expected} bytes")
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
            f"{format_bytes(free_bytes(self.path.parent))} are free there. 1. free some, or raise the system's file size limit; 2. "
            "choose a folder on a larger disk; 3. make the model smaller: fewer rows, narrower rows, or an optimizer with less state"
        )

    def truncated(self) -> RowsteadError:
        """The error to raise when the file is shorter than it should be."""
        return RowsteadError(f"the row file `{self.path}` was truncated while in use; start from a checkpoint")

    def changed(self) -> RowsteadError:
        """The error to raise when a record is not the one that was written."""
        return RowsteadError(
            f"the row file `{self.path}` was changed while in use, or the disk is faulty; start from a checkpoint"
        )

    def _write_header(self, *, whole: bool, extra_bytes: int = 0) -> None:
        header = MAGIC + json.dumps({"whole": whole, "extra_bytes": extra_bytes, "facts": self._facts}).encode()
        assert len(header) < BLOCK
        os.pwrite(self._plain, header.ljust(BLOCK), 0)

    def _read_extra(self) -> bytes:
        with os.fdopen(os.dup(self._plain), "rb") as file:
            file.seek(BLOCK + self.num_bytes)
            return file.read()

    def close(self, extra: bytes | None = None) -> None:
        """Remove the file, or keep it with `extra` at its end; without `extra` a kept file cannot be opened again."""
        if self._finalizer.alive and self.keep and extra is not None:
            try:
                with os.fdopen(os.dup(self._plain), "r+b") as file:
                    file.seek(BLOCK + self.num_bytes)
                    file.write(extra)
                os.fsync(self.fd)
                self._write_header(whole=True, extra_bytes=len(extra))
                os.fsync(self._plain)
            except OSError as error:
                raise self.failed(error, "closing") from None
        self._finalizer()


def _discard(path: Path, descriptors: tuple[int, ...], keep: bool, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child must not remove its parent's file
    if not keep:
        path.unlink(missing_ok=True)
    for fd in descriptors:
        os.close(fd)


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk of a folder, for this user."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize
