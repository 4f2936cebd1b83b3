"""Unix sockets for roles of one machine, in a folder that only their user can enter.

They need no keys: the kernel lets no other user connect. On one machine they are faster than TCP, and encryption costs more than a tenth of an
exchange (`python -m benchmarks.exchange`).
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rowstead.records.temporary import temporary_folder
from rowstead.spec.errors import RowsteadError

UNIX_SOCKET = "ipc://"
MAX_PATH_BYTES = 103
"""The shortest limit of an operating system: 104 bytes with a zero at the end on macOS, 108 on Linux."""
_MAX_PARENT_BYTES = MAX_PATH_BYTES - 48
"""Leaves enough for the folder's own name and that of a role."""


@contextlib.contextmanager
def open_socket_folder() -> Iterator[Path]:
    """Create a private folder for sockets, with a path that is short enough for them; removed at the end."""
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) > _MAX_PARENT_BYTES:
        parent = "/tmp"
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(temporary_folder(parent))
        except OSError as error:
            raise RowsteadError(
                f"cannot create a folder for sockets in {parent} ({error.strerror}): set TMPDIR to a folder that you can write to, "
                f"with a path of at most {_MAX_PARENT_BYTES} bytes"
            ) from None
        yield folder


def socket_address(folder: Path | str, name: str) -> str:
    return f"{UNIX_SOCKET}{folder}/{name}"


def check_socket_path(address: str) -> None:
    """Raise unless a socket's path is absolute and short, and its folder closed to other users.

    A missing folder is no error here: its fleet has ended, so that nobody can be reached there.
    """
    path = Path(address.removeprefix(UNIX_SOCKET))
    if not path.is_absolute() or len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise RowsteadError(
            f"invalid address {address!r}: write {UNIX_SOCKET}/FOLDER/NAME, with a path of at most {MAX_PATH_BYTES} bytes"
        )
    try:
        found = os.stat(path.parent)
    except FileNotFoundError:
        return
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise RowsteadError(
            f"{address}: other users can enter {path.parent}; put the socket into a folder of your own with mode 0700"
        )
