"""One process a role: whoever is a role holds the lock of its file, and the lock goes when its process goes.

Two readers of one number would spoil each other's book, and two sparse servers each other's snapshots.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from rowstead.fleet.local_process import LOOK_EVERY_S
from rowstead.fleet.roster import RoleFiles
from rowstead.spec.errors import RowsteadError
from rowstead.spec.fleet import RoleKind

WAIT_S = 15.0
"""How long to wait for one that is just ending: a role whose head is gone takes some seconds."""


@contextlib.contextmanager
def sole_holder(folder: Path, kind: RoleKind, number: int, *, wait_s: float = WAIT_S) -> Iterator[None]:
    """Be the only process that is this role; refused while another one is, after a while."""
    descriptor = os.open(RoleFiles(folder, kind, number).lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        ends_s = time.monotonic() + wait_s
        while not _is_locked(descriptor):
            if time.monotonic() >= ends_s:
                holder = os.pread(descriptor, 256, 0).decode(errors="replace").strip() or "another process"
                raise RowsteadError(
                    f"{kind} {number} of {folder} is at work already, as {holder}: one process fills it at a time. Wait until that "
                    "one has ended, or end it"
                )
            time.sleep(LOOK_EVERY_S)
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} of {socket.gethostname()}\n".encode(), 0)  # who, for the message above
        yield
    finally:
        os.close(descriptor)


def _is_locked(descriptor: int) -> bool:
    """Whether the lock is ours now, or nobody can have one here."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
