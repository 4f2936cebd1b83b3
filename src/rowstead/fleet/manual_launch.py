"""Roles that people start themselves, on this machine or on others that share the run's folder: asked for in words, known by files.

A role that was started by hand samples what it uses into its file; when that stops growing, the role is gone. The head writes a file
of its own anew all the time; when that stays the same, the head is gone, and roles end. A role looks for a file that asks it to end,
and leaves one with its exit code. Nobody compares the clocks of two machines.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from rowstead.fleet.local_process import HEAD, LOOK_EVERY_S
from rowstead.fleet.roster import ROLES_FOLDER, RoleFiles, told
from rowstead.records.files import write_atomic
from rowstead.spec.fleet import RoleKind

GONE_AFTER_S = 15.0
"""Without a new sample for so long a role is taken for gone; it samples twice a second."""
GONE = -9
LOOK_AT_FILES_EVERY_S = 0.5
BEAT_EVERY_S = 5.0
HEAD_GONE_AFTER_S = 120.0
"""Without a new word of the head for so long a role that was started by hand ends; file systems may be slow to show what is new."""
HEAD_FILE = "head.alive"
"""Under `roles/`: what the head writes anew."""


class ManualRole:
    """One role as its files show it."""

    def __init__(self, files: RoleFiles, incarnation: int) -> None:
        self._files, self._incarnation = files, incarnation
        self._is_dropped = False
        self._heard = _Heard(files.told, files.usage)

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
        if self._heard.silent_s() <= GONE_AFTER_S:
            return None
        self.ask_to_stop()  # should it only have been held up, it must not come back beside the next one
        return GONE

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


class ManualLauncher:
    """Says what to type for each role, and waits for it, inside a `with`; when that ends, those that run are asked to end."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder, self._say = folder, say
        self._all: list[ManualRole] = []
        self._ended = threading.Event()
        (folder / ROLES_FOLDER).mkdir(exist_ok=True)

    def start(self, kind: RoleKind, number: int, incarnation: int = 0) -> ManualRole:
        """Ask for a role, which may be there already; it is ready once it has told so (`roster.told`)."""
        files = RoleFiles(self._folder, kind, number)
        again = f" --incarnation {incarnation}" if incarnation else ""
        self._say(f"waiting for: rowstead role {kind} {self._folder} {number}{again}")
        role = ManualRole(files, incarnation)
        self._all.append(role)
        return role

    def __enter__(self) -> ManualLauncher:
        self._thread = threading.Thread(target=self._beat, name="head is alive", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        for role in self._all:
            role.ask_to_stop()

    def _beat(self) -> None:
        count = 0
        while True:
            count += 1
            with contextlib.suppress(OSError):  # a full disk will be told of by others
                write_atomic(self._folder / ROLES_FOLDER / HEAD_FILE, f"process {os.getpid()}, {count}\n")
            if self._ended.wait(BEAT_EVERY_S):
                return


def ask_former(folder: Path, roles: Iterable[tuple[RoleKind, int]]) -> None:
    """Ask roles that an earlier head has left behind to end."""
    for kind, number in roles:
        if (found := told(folder, kind, number)) is not None:
            ManualRole(RoleFiles(folder, kind, number), found.incarnation).ask_to_stop()


# In a role


def is_manual() -> bool:
    """Whether nobody but the user has started this role."""
    return HEAD not in os.environ


class StopRequested:
    """Whether the head wants a role to end, or is gone itself."""

    def __init__(self, folder: Path, kind: RoleKind, number: int, incarnation: int) -> None:
        self._stop_file, self._wanted = _stop_file(RoleFiles(folder, kind, number)), str(incarnation)
        self._heard = _Heard(folder / ROLES_FOLDER / HEAD_FILE)
        self._looked_s, self._is_so = -math.inf, False
        self._lock = threading.Lock()

    def is_so(self) -> bool:
        """As it was when somebody looked last, which need not be more often than some times a second."""
        with self._lock:
            now_s = time.monotonic()
            if not self._is_so and now_s >= self._looked_s + LOOK_AT_FILES_EVERY_S:
                self._looked_s = now_s
                self._is_so = self._is_asked() or self._heard.silent_s() > HEAD_GONE_AFTER_S
            return self._is_so

    def _is_asked(self) -> bool:
        try:
            return self._stop_file.read_text().strip() == self._wanted
        except OSError:
            return False


class _Heard:
    """How long files have stayed as they are, by the clock of who looks."""

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._found: list[tuple[int, int] | None] = []
        self._changed_s = self._looked_s = time.monotonic()

    def silent_s(self) -> float:
        """Seconds since one of them changed, or since the first look."""
        now_s = time.monotonic()
        if not self._found or now_s >= self._looked_s + LOOK_AT_FILES_EVERY_S:
            self._looked_s, found = now_s, [_state_of(path) for path in self._paths]
            if found != self._found:
                self._found, self._changed_s = found, now_s
        return now_s - self._changed_s


def _state_of(path: Path) -> tuple[int, int] | None:
    """What changes when a file is added to or replaced; none where there is no file."""
    try:
        with open(path, "rb") as file:  # on shared folders only who opens a file is sure to see it as it is
            found = os.fstat(file.fileno())
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def leave_code(folder: Path, kind: RoleKind, number: int, incarnation: int, code: int) -> None:
    """Tell the head how this role has ended."""
    write_atomic(_ended_file(RoleFiles(folder, kind, number)), json.dumps({"incarnation": incarnation, "code": code}) + "\n")


def _stop_file(files: RoleFiles) -> Path:
    return files.told.with_suffix(".stop")


def _ended_file(files: RoleFiles) -> Path:
    return files.told.with_suffix(".ended")
