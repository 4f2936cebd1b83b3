"""Temporary folders that only their user can enter, and that do not stay behind when their process is killed.

Their owner holds a lock on the folder while it lives. Each new one, and each run that starts, first removes those whose lock nobody holds any more. The lock also keeps
`systemd-tmpfiles` away from the folder of a long run.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "rowstead-"
MARKER = ".rowstead-temporary"
"""A file in each of these folders: a folder without it is somebody's own, whatever its name."""


@contextlib.contextmanager
def temporary_folder(parent: Path | str | None = None, *, prefix: str = PREFIX) -> Iterator[Path]:
    """Create a folder with mode 0700, and remove it at the end; `parent` is the system's temporary folder by default."""
    remove_abandoned(parent, prefix=prefix)
    folder = Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: then nobody removes it but us
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (folder / MARKER).touch(mode=0o600)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_abandoned(parent: Path | str | None = None, *, prefix: str = PREFIX) -> None:
    """Remove the folders of `temporary_folder` in `parent` that this user's killed processes have left."""
    parent = Path(tempfile.gettempdir() if parent is None else parent)
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in list(entries):
            if entry.name.startswith(prefix):
                with contextlib.suppress(OSError):  # another user's, in use, or already removed
                    _remove_if_abandoned(parent / entry.name)


def _remove_if_abandoned(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != 0o700:
            return
        os.stat(MARKER, dir_fd=descriptor, follow_symlinks=False)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)  # unlinks symbolic links, and follows none
    finally:
        os.close(descriptor)
