"""Roles that the user starts manually, on this machine or on others that share the run's folder.

The coordinator and such a role know each other only through files. A role appends usage samples to its file; when that stops growing, the
supervisor takes the role to be gone. The coordinator rewrites a heartbeat file; when that stops changing, the coordinator is gone, and the
roles exit. A stop request and the exit code of a role are files too.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from rowstead.fleet.liveness import FILE_POLL_INTERVAL_S, FileActivity
from rowstead.fleet.local_process import Role
from rowstead.fleet.roster import PRIVATE, ROLES_FOLDER, RoleFiles, create_roles_folder, read_address
from rowstead.records.files import write_atomic
from rowstead.spec.fleet import RoleKind
from rowstead.spec.job import LAUNCHER

GONE = -signal.SIGKILL
"""Exit code of a role that is no longer waited for."""
HEARTBEAT_INTERVAL_S = 5.0
COORDINATOR_GONE_AFTER_S = 120.0
"""A manually started role exits after this long without a heartbeat of the coordinator; shared file systems may show changes late."""
HEARTBEAT_FILE = "coordinator.heartbeat"
"""Under `roles/`: rewritten by the coordinator."""


class ManualRole(Role):
    """One role, as its files show it."""

    def __init__(self, files: RoleFiles, incarnation: int) -> None:
        self._files, self._incarnation = files, incarnation
        self._is_abandoned = False

    def exit_code(self) -> int | None:
        """Return the exit code that it left, or `GONE` after `kill`; None while it runs or has not been started yet."""
        if self._is_abandoned:
            return GONE
        try:
            exit_facts = json.loads(_exit_file(self._files).read_bytes())
            if exit_facts["incarnation"] == self._incarnation:
                return int(exit_facts["code"])
        except (FileNotFoundError, ValueError):
            pass
        return None

    def request_stop(self) -> None:
        write_atomic(_stop_file(self._files), f"{self._incarnation}\n", mode=PRIVATE)

    def kill(self) -> None:
        """Request a stop, and no longer wait for it: a process elsewhere cannot be killed from here."""
        self.request_stop()
        self._is_abandoned = True


class ManualLauncher:
    """Prints the command of each role, and waits for the user to start it, inside a `with`; at its end running roles are asked to stop."""

    def __init__(self, folder: Path, on_message: Callable[[str], None]) -> None:
        self._folder, self._on_message = folder, on_message
        self._roles: list[ManualRole] = []
        self._closed = threading.Event()
        create_roles_folder(folder)

    def start(self, kind: RoleKind, number: int, incarnation: int = 0) -> ManualRole:
        """Ask the user for a role, which may run already; it is ready once its address file says so (`roster.read_address`)."""
        files = RoleFiles(self._folder, kind, number)
        option = f" --incarnation {incarnation}" if incarnation else ""
        self._on_message(f"waiting for: rowstead role {kind} {self._folder} {number}{option}")
        role = ManualRole(files, incarnation)
        self._roles.append(role)
        return role

    def __enter__(self) -> ManualLauncher:
        self._thread = threading.Thread(target=self._write_heartbeats, name="coordinator heartbeat", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        for role in self._roles:
            role.request_stop()

    def _write_heartbeats(self) -> None:
        count = 0
        while True:
            count += 1
            with contextlib.suppress(OSError):  # a full disk is reported elsewhere
                text = f"process {os.getpid()}, {count}\n"
                write_atomic(self._folder / ROLES_FOLDER / HEARTBEAT_FILE, text, mode=PRIVATE)
            if self._closed.wait(HEARTBEAT_INTERVAL_S):
                return


def stop_earlier_roles(folder: Path, roles: Iterable[tuple[RoleKind, int]]) -> None:
    """Ask roles to stop that an earlier coordinator has left running."""
    for kind, number in roles:
        if (found := read_address(folder, kind, number)) is not None:
            ManualRole(RoleFiles(folder, kind, number), found.incarnation).request_stop()


# In a role


def is_manual() -> bool:
    """Whether the user started this role."""
    return LAUNCHER not in os.environ


class StopRequested:
    """Whether the coordinator asks this role to stop, or is gone itself."""

    def __init__(self, folder: Path, kind: RoleKind, number: int, incarnation: int) -> None:
        self._stop_file, self._incarnation = _stop_file(RoleFiles(folder, kind, number)), str(incarnation)
        self._coordinator = FileActivity(folder / ROLES_FOLDER / HEARTBEAT_FILE)
        self._polled_s, self._is_set = -math.inf, False
        self._lock = threading.Lock()

    def is_set(self) -> bool:
        """Poll the files, at most every `FILE_POLL_INTERVAL_S`; true from then on."""
        with self._lock:
            now_s = time.monotonic()
            if not self._is_set and now_s >= self._polled_s + FILE_POLL_INTERVAL_S:
                self._polled_s = now_s
                self._is_set = self.by_coordinator() or self._coordinator.idle_s() > COORDINATOR_GONE_AFTER_S
            return self._is_set

    def by_coordinator(self) -> bool:
        """Whether the coordinator has asked, not only fallen silent."""
        try:
            return self._stop_file.read_text().strip() == self._incarnation
        except OSError:
            return False


def write_exit_code(folder: Path, kind: RoleKind, number: int, incarnation: int, code: int) -> None:
    """Report the exit code of this role to the coordinator."""
    text = json.dumps({"incarnation": incarnation, "code": code}) + "\n"
    write_atomic(_exit_file(RoleFiles(folder, kind, number)), text, mode=PRIVATE)


def _stop_file(files: RoleFiles) -> Path:
    return files.address.with_suffix(".stop")


def _exit_file(files: RoleFiles) -> Path:
    return files.address.with_suffix(".exit")
