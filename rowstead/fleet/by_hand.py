"""Roles that people start themselves, on this machine or on others that share the run's folder: asked for in words, known by files.

A role that was started by hand samples what it uses into its file; when that stops growing, the role is gone. It looks for a file that
asks it to end, and leaves one with its exit code.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from rowstead.fleet.local import GRACE_S, HEAD, LOOK_EVERY_S, stopped
from rowstead.fleet.roster import ROLES_FOLDER, RoleFiles, told
from rowstead.records.files import write_atomic
from rowstead.spec.fleet import RoleKind

GONE_AFTER_S = 15.0
"""Without a new sample for so long a role is taken for gone; it samples twice a second."""
GONE = -9


class HandRole:
    """One role as its files show it."""

    def __init__(self, files: RoleFiles, incarnation: int) -> None:
        self._files, self._incarnation = files, incarnation
        self._is_dropped = False

    def code(self) -> int | None:
        """The exit code that it left, or that of a killed one where it is gone without; none while it runs, or is to come."""
        if self._is_dropped:
            return GONE
        try:
            left = json.loads(_ended_file(self._files).read_bytes())
            if left["incarnation"] == self._incarnation:
                return int(left["code"])
        except (FileNotFoundError, ValueError):
            pass
        found = told(self._files.folder, self._files.kind, self._files.number)
        if found is None or found.incarnation != self._incarnation:
            return None
        newest = max(path.stat().st_mtime for path in (self._files.told, self._files.usage) if path.exists())
        return GONE if time.time() - newest > GONE_AFTER_S else None

    def ask_to_stop(self) -> None:
        """Let it finish what it does and end."""
        write_atomic(_stop_file(self._files), f"{self._incarnation}\n")

    def kill(self) -> None:
        """Nobody here can: it is asked to end, and waited for no longer."""
        self.ask_to_stop()
        self._is_dropped = True

    def wait(self, timeout_s: float | None = None) -> int | None:
        """The exit code once it has ended; none if it has not in time."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while (code := self.code()) is None and (until is None or time.monotonic() < until):
            time.sleep(LOOK_EVERY_S)
        return code


class ByHand:
    """Says what to type for each role, and waits for it, inside a `with`; when that ends, those that run are asked to end."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder, self._say = folder, say
        self._all: list[HandRole] = []
        (folder / ROLES_FOLDER).mkdir(exist_ok=True)

    def start(self, kind: RoleKind, number: int, incarnation: int = 0) -> HandRole:
        """Ask for a role, which may be there already; it is ready once it has told so (`roster.told`)."""
        files = RoleFiles(self._folder, kind, number)
        again = f" --incarnation {incarnation}" if incarnation else ""
        self._say(f"waiting for: rowstead role {kind} {self._folder} {number}{again}")
        role = HandRole(files, incarnation)
        self._all.append(role)
        return role

    def stop(self, roles: list[HandRole], grace_s: float = GRACE_S) -> list[int | None]:
        """Ask some of them to end, and give up on those that do not in time; returns their exit codes."""
        return stopped(roles, grace_s)

    def __enter__(self) -> ByHand:
        return self

    def __exit__(self, *_: object) -> None:
        for role in self._all:
            role.ask_to_stop()


# In a role


def is_by_hand() -> bool:
    """Whether nobody but the user has started this role."""
    return HEAD not in os.environ


def asked_by_file(folder: Path, kind: RoleKind, number: int, incarnation: int) -> bool:
    """Whether the head wants this role to end."""
    try:
        return _stop_file(RoleFiles(folder, kind, number)).read_text().strip() == str(incarnation)
    except FileNotFoundError:
        return False


def leave_code(folder: Path, kind: RoleKind, number: int, incarnation: int, code: int) -> None:
    """Tell the head how this role has ended."""
    write_atomic(_ended_file(RoleFiles(folder, kind, number)), json.dumps({"incarnation": incarnation, "code": code}) + "\n")


def _stop_file(files: RoleFiles) -> Path:
    return files.told.with_suffix(".stop")


def _ended_file(files: RoleFiles) -> Path:
    return files.told.with_suffix(".ended")
