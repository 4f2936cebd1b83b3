"""How roles find each other: a file of addresses that the head writes, and one of each role with what it tells the head.

In a run's folder, `fleet.json` says who is where and is replaced as a whole. Each role has under `roles/` its own
`<kind>-<number>.json` (address, process, incarnation: how often it was started before), `.jsonl` (what it used, sampled) and `.log`
(what it printed).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rowstead.records.files import write_atomic
from rowstead.spec.errors import RowsteadError
from rowstead.spec.fleet import RoleKind

ROSTER_FILE = "fleet.json"
ROLES_FOLDER = "roles"


@dataclass(frozen=True, kw_only=True)
class RoleAddress:
    """One role, where it answers."""

    kind: RoleKind
    number: int
    address: str
    """`tcp://…`; empty for a trainer, which nobody asks."""
    incarnation: int
    pid: int


@dataclass(frozen=True)
class RoleFiles:
    """The files of one role."""

    folder: Path
    """Of the run."""
    kind: RoleKind
    number: int

    @property
    def told(self) -> Path:
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
    def log_bytes(self) -> int:
        """How much it has printed so far, in all its starts."""
        return self.log.stat().st_size if self.log.exists() else 0

    def last_lines(self, num_lines: int = 15, *, since_bytes: int = 0) -> str:
        """The end of what it printed, after so many bytes."""
        try:
            with open(self.log, "rb") as file:
                file.seek(max(since_bytes, self.log_bytes - 20_000))
                text = file.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.rstrip().splitlines()[-num_lines:])

    def _file(self, suffix: str) -> Path:
        return self.folder / ROLES_FOLDER / f"{self.kind}-{self.number}.{suffix}"


def tell(folder: Path, kind: RoleKind, number: int, address: str, incarnation: int) -> None:
    """As a role: say that it is ready, and where."""
    told = RoleAddress(kind=kind, number=number, address=address, incarnation=incarnation, pid=os.getpid())
    write_atomic(RoleFiles(folder, kind, number).told, json.dumps(asdict(told)) + "\n")


def told(folder: Path, kind: RoleKind, number: int) -> RoleAddress | None:
    """What a role has said of itself last; none before its first word."""
    try:
        return RoleAddress(**json.loads(RoleFiles(folder, kind, number).told.read_bytes()))
    except FileNotFoundError:
        return None


class Roster:
    """The addresses of a fleet, and the facts that all its roles share; the head writes, everybody reads."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / ROSTER_FILE
        self._read_at: tuple[int, int] | None = None
        self._plain: dict[str, Any] = {}

    def write(self, roles: Iterable[RoleAddress], facts: Mapping[str, Any]) -> None:
        """Replace the file."""
        plain = {"facts": dict(facts), "roles": [asdict(role) for role in roles]}
        write_atomic(self.path, json.dumps(plain) + "\n")

    @property
    def facts(self) -> dict[str, Any]:
        """What is the same for all roles, such as the partition of the tables."""
        facts: dict[str, Any] = self._current()["facts"]
        return facts

    def find(self, kind: RoleKind, number: int) -> RoleAddress:
        """A role as the file has it now."""
        for role in self._current()["roles"]:
            if (role["kind"], role["number"]) == (kind, number):
                return RoleAddress(**role)
        raise RowsteadError(f"{self.path} has no {kind} {number}: is this the folder of the fleet that it belongs to?")

    def address(self, kind: RoleKind, number: int) -> Callable[[], str]:
        """Where a role is, asked anew at each call: it moves when it is started again."""
        return lambda: self.find(kind, number).address

    def _current(self) -> dict[str, Any]:
        try:
            found = self.path.stat()
            if (stamp := (found.st_mtime_ns, found.st_ino)) != self._read_at:
                self._plain, self._read_at = json.loads(self.path.read_bytes()), stamp
        except FileNotFoundError:
            raise RowsteadError(
                f"{self.path} is missing: a role belongs to a fleet whose head is running (`rowstead train --fleet …`)"
            ) from None
        return self._plain
