"""The files through which roles find each other, in the run's folder.

`fleet.json` is the roster: the coordinator writes the addresses of all roles there, replacing the file as a whole. Each role has its own
files under `roles/`: `<kind>-<number>.json` (address, process id, incarnation: the number of earlier starts), `.jsonl` (usage samples),
`.log` (what it printed) and `.lock`. Only the user of the fleet can read them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rowstead.fleet.local_process import POLL_INTERVAL_S
from rowstead.records.files import write_atomic
from rowstead.records.plain_files import parse_json, read_plain
from rowstead.spec.errors import RowsteadError
from rowstead.spec.fleet import RoleKind

ROSTER_FILE = "fleet.json"
ROLES_FOLDER = "roles"
PRIVATE = 0o600
"""Mode of the files below: only the user of the fleet reads and writes them."""
SOCKETS = "sockets"
"""A fact in the roster: the folder of the roles' Unix sockets, if all roles are on this machine."""
LOCK_WAIT_S = 15.0
"""Time for an earlier process of the role to exit: a role whose coordinator is gone takes some seconds."""


@dataclass(frozen=True, kw_only=True)
class RoleAddress:
    kind: RoleKind
    number: int
    address: str
    """`ipc://…` or `tcp://…`; empty for a trainer, which is not a server."""
    incarnation: int
    pid: int


@dataclass(frozen=True)
class RoleFiles:
    folder: Path
    """The run's folder."""
    kind: RoleKind
    number: int

    @property
    def address(self) -> Path:
        return self._file("json")

    @property
    def usage(self) -> Path:
        return self._file("jsonl")

    @property
    def log(self) -> Path:
        return self._file("log")

    @property
    def lock(self) -> Path:
        return self._file("lock")

    @property
    def log_size_bytes(self) -> int:
        """Size of the log so far, over all incarnations."""
        return self.log.stat().st_size if self.log.exists() else 0

    def last_lines(self, num_lines: int = 15, *, since_bytes: int = 0) -> str:
        """Read the end of its log, after the first `since_bytes`."""
        try:
            with open(self.log, "rb") as file:
                file.seek(max(since_bytes, self.log_size_bytes - 20_000))
                text = file.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.rstrip().splitlines()[-num_lines:])

    def _file(self, suffix: str) -> Path:
        return self.folder / ROLES_FOLDER / f"{self.kind}-{self.number}.{suffix}"


def create_roles_folder(folder: Path) -> Path:
    """Create `roles/` in the run's folder, if it is missing, and close it to other users: it has the keys and the roles' logs."""
    roles = folder / ROLES_FOLDER
    roles.mkdir(mode=0o700, exist_ok=True)
    if roles.stat().st_mode & 0o077:
        roles.chmod(0o700)
    return roles


def report_ready(folder: Path, kind: RoleKind, number: int, address: str, incarnation: int) -> None:
    """As a role: report that it is ready, and its address."""
    ready = RoleAddress(kind=kind, number=number, address=address, incarnation=incarnation, pid=os.getpid())
    write_atomic(RoleFiles(folder, kind, number).address, json.dumps(asdict(ready)) + "\n", mode=PRIVATE)


def read_address(folder: Path, kind: RoleKind, number: int) -> RoleAddress | None:
    """Read the address file of a role; None before it was first ready."""
    file = RoleFiles(folder, kind, number).address
    try:
        return RoleAddress(**parse_json(read_plain(file)))
    except FileNotFoundError:
        return None
    except (OSError, TypeError, ValueError) as error:
        raise RowsteadError(f"{file} is not the address of a role: {error}. Remove it, and start the role again") from None


@contextlib.contextmanager
def hold_role(folder: Path, kind: RoleKind, number: int, *, wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
    """Hold the lock of a role, so that one process at a time has it; raise after `wait_s` if another process holds it.

    Two readers with one number would corrupt the assignment log, two sparse servers the snapshots. The operating system releases the lock
    when the process exits.
    """
    descriptor = os.open(RoleFiles(folder, kind, number).lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
    try:
        deadline = time.monotonic() + wait_s
        while not _try_lock(descriptor):
            if time.monotonic() >= deadline:
                holder = os.pread(descriptor, 256, 0).decode(errors="replace").strip() or "another process"
                raise RowsteadError(
                    f"{kind} {number} of {folder} is already running as {holder}: a role can have only one process. Stop that "
                    "process, or wait until it exits"
                )
            time.sleep(POLL_INTERVAL_S)
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} of {socket.gethostname()}\n".encode(), 0)  # for the message above
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


class Roster:
    """The addresses of a fleet and the facts that all its roles share; the coordinator writes it, all roles read it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / ROSTER_FILE
        self._read_at: tuple[int, int] | None = None
        self._plain: dict[str, Any] = {}

    def write(self, roles: Iterable[RoleAddress], facts: Mapping[str, Any]) -> None:
        plain = {"facts": dict(facts), "roles": [asdict(role) for role in roles]}
        write_atomic(self.path, json.dumps(plain) + "\n", mode=PRIVATE)

    @property
    def facts(self) -> dict[str, Any]:
        """Facts shared by all roles, such as the partition of the tables."""
        facts: dict[str, Any] = self._current()["facts"]
        return facts

    def find(self, kind: RoleKind, number: int) -> RoleAddress:
        for role in self._current()["roles"]:
            if (role["kind"], role["number"]) == (kind, number):
                return RoleAddress(**role)
        raise RowsteadError(f"{self.path} has no {kind} {number}: check that this is the folder of its fleet")

    def address(self, kind: RoleKind, number: int) -> Callable[[], str]:
        """Return a function that looks up the current address of a role, which changes when the role is restarted."""
        return lambda: self.find(kind, number).address

    def _current(self) -> dict[str, Any]:
        try:
            found = self.path.stat()
            if (stamp := (found.st_mtime_ns, found.st_ino)) != self._read_at:
                self._plain, self._read_at = json.loads(self.path.read_bytes()), stamp
        except FileNotFoundError:
            raise RowsteadError(f"{self.path} is missing: start the fleet first (`rowstead train --fleet …`)") from None
        return self._plain
