"""A file that one run uses as memory: opened, checked, locked, and removed when it is done.

The first bytes say whose it is. A file that was kept ends with what its owner wants to know when it opens the file again.
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

BLOCK = 4096
"""Bytes to which memory, places and sizes are aligned; direct I/O on every file system we know accepts it."""
MAGIC = b"rowstead rows\n"

Facts = dict[str, Any]
"""What the head of a file says, as JSON has it."""


class InUseError(RowsteadError):
    """Another store has the file."""


def aligned(num_bytes: int) -> NDArray[np.uint8]:
    """Zeroed memory at an address that direct I/O accepts, of pages of its own."""
    return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)


def whole_blocks(num_bytes: int) -> int:
    """The next multiple of a block."""
    return -(-num_bytes // BLOCK) * BLOCK


class ScratchFile:
    """A file of `num_bytes` behind a head of one block; reads and writes count from its first byte.

    With `direct`, the system keeps no copy of what is read and written, where the file system allows that: `direct` then says
    whether it does. `sector` is what places and sizes of reads must be multiples of. Bytes that were never written take no room on
    the disk, unless `reserve` asks for all of them at once.
    """

    def __init__(
        self, path: str | Path, num_bytes: int, facts: Facts, *, create: bool, keep: bool, direct: bool, reserve: bool
    ) -> None:
        self.path, self.num_bytes, self.keep = Path(path), num_bytes, keep
        self._facts = facts
        self._plain = self._new() if create else self._existing()
        """Opened as usual; holds the lock."""
        try:
            self.extra = b"" if create else self._read_extra()
            try:
                self._write_head(whole=False)
                os.ftruncate(self._plain, BLOCK + num_bytes)
                if reserve:
                    os.posix_fallocate(self._plain, 0, BLOCK + num_bytes)
            except OSError as error:
                raise self.failed(error, "making") from None
            self.fd, self.direct, self.sector = self._open_direct() if direct else (os.dup(self._plain), False, 1)
        except BaseException:
            _discard(self.path, (self._plain,), keep and not create, os.getpid())
            raise
        self._finalizer = weakref.finalize(self, _discard, self.path, (self.fd, self._plain), keep, os.getpid())

    def _new(self) -> int:
        folder = self.path.parent
        if not folder.is_dir():
            raise RowsteadError(
                f"there is no folder `{folder}` for the file of rows `{self.path.name}`: make it, or name another"
            )
        try:
            plain = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RowsteadError(f"the file of rows `{self.path}` cannot be made: {error.strerror}") from None
        try:
            self._lock(plain)
            if os.pread(plain, len(MAGIC), 0) not in (b"", MAGIC):
                raise RowsteadError(f"`{self.path}` is there already and holds something else than rows: name another file")
            os.ftruncate(plain, 0)  # what an earlier run left is of no use, and its room is ours
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
                f"there is no file of rows `{self.path}`. It is the scratch space of one run and goes when the run ends: "
                "1. start anew, or from a checkpoint; 2. name the file that you kept"
            ) from None
        except OSError as error:
            raise RowsteadError(f"the file of rows `{self.path}` cannot be opened: {error.strerror}") from None
        try:
            self._lock(plain)
            head = os.pread(plain, BLOCK, 0)
            if not head.startswith(MAGIC):
                raise RowsteadError(f"`{self.path}` is not a file of rows")
            found = json.loads(head[len(MAGIC) :])
            for key, value in self._facts.items():
                if (other := found["facts"].get(key)) != value:
                    raise RowsteadError(
                        f"the file of rows `{self.path}` was made with {key} {other}, and not {value}: it is of another model or "
                        "optimizer, or of another version of rowstead"
                    )
            if not found["whole"]:
                raise RowsteadError(
                    f"the file of rows `{self.path}` was not closed, so it does not say which of its rows are the newest: go on "
                    "from a checkpoint"
                )
            size, expected = os.fstat(plain).st_size, BLOCK + self.num_bytes + found["extra_bytes"]
            if size != expected:
                raise RowsteadError(
                    f"the file of rows `{self.path}` has {size} bytes, and should have {expected}: it was cut off"
                )
        except BaseException:
            os.close(plain)
            raise
        return plain

    def _lock(self, plain: int) -> None:
        try:
            fcntl.flock(plain, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUseError(
                f"another process, or another store, is using the file of rows `{self.path}`: name another"
            ) from None
        try:
            is_ours = os.fstat(plain).st_ino == os.stat(self.path).st_ino
        except FileNotFoundError:
            is_ours = False
        if not is_ours:  # whoever had it has removed it since we opened it
            raise InUseError(f"the file of rows `{self.path}` was in use a moment ago: try again, or name another")

    def _open_direct(self) -> tuple[int, bool, int]:
        """A descriptor for direct I/O and the size of its sectors; an ordinary one where the file system has no direct I/O."""
        memory = aligned(BLOCK)
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
        """Fill aligned memory, of whole blocks, from a place of whole blocks."""
        done = 0
        while done < len(memory):
            try:
                count = os.preadv(self.fd, [memory.data[done:]], first_byte + done)
            except OSError as error:
                raise self.failed(error, "reading") from None
            if count == 0:
                raise self.cut_off()
            done += count

    def write(self, memory: NDArray[np.uint8], first_byte: int) -> None:
        """Write aligned memory, of whole blocks, to a place of whole blocks."""
        done = 0
        while done < len(memory):
            try:
                done += os.pwritev(self.fd, [memory.data[done:]], first_byte + done)
            except OSError as error:
                raise self.failed(error, "writing") from None

    def failed(self, error: OSError, doing: str) -> RowsteadError:
        """What to tell a user about an error of the system."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return self.full(max(0, BLOCK + self.num_bytes - os.fstat(self._plain).st_blocks * 512), error)
        return RowsteadError(f"{doing} the file of rows `{self.path}` failed: {error.strerror}; start again from a checkpoint")

    def full(self, needed: int, error: OSError | None = None) -> RowsteadError:
        """A disk without room, with sizes and what can be done."""
        why = f" ({error.strerror})" if error is not None and error.errno != errno.ENOSPC else ""
        return RowsteadError(
            f"no room on disk for the file of rows `{self.path}`{why}: it needs {_shown(needed)} more, and "
            f"{_shown(free_bytes(self.path.parent))} are free there. 1. free some, or let the system allow larger files; 2. name a "
            "folder on a larger disk; 3. make the model smaller: fewer rows, narrower rows, or an optimizer with less state"
        )

    def cut_off(self) -> RowsteadError:
        """Somebody has made the file shorter."""
        return RowsteadError(
            f"the file of rows `{self.path}` ended too early: somebody has cut it off; start from a checkpoint"
        )

    def changed(self) -> RowsteadError:
        """Somebody has written to the file."""
        return RowsteadError(
            f"the file of rows `{self.path}` has another row where one was written: somebody or the disk has changed it; start from "
            "a checkpoint"
        )

    def _write_head(self, *, whole: bool, extra_bytes: int = 0) -> None:
        head = MAGIC + json.dumps({"whole": whole, "extra_bytes": extra_bytes, "facts": self._facts}).encode()
        assert len(head) < BLOCK
        os.pwrite(self._plain, head.ljust(BLOCK), 0)

    def _read_extra(self) -> bytes:
        with os.fdopen(os.dup(self._plain), "rb") as file:
            file.seek(BLOCK + self.num_bytes)
            return file.read()

    def close(self, extra: bytes | None = None) -> None:
        """Remove the file; or keep it, with `extra` at its end for whoever opens it again. Without, nobody can."""
        if self._finalizer.alive and self.keep and extra is not None:
            try:
                with os.fdopen(os.dup(self._plain), "r+b") as file:
                    file.seek(BLOCK + self.num_bytes)
                    file.write(extra)
                os.fsync(self.fd)
                self._write_head(whole=True, extra_bytes=len(extra))
                os.fsync(self._plain)
            except OSError as error:
                raise self.failed(error, "closing") from None
        self._finalizer()


def _discard(path: Path, descriptors: tuple[int, ...], keep: bool, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child must not remove what its parent uses
    if not keep:
        path.unlink(missing_ok=True)
    for fd in descriptors:
        os.close(fd)


def free_bytes(folder: Path) -> int:
    """Bytes that we may still write to the disk of a folder."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def _shown(num_bytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes} bytes"
