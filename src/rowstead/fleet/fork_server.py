"""Roles as processes of this machine that begin in no time: one process imports all that they need, and is forked for each.

The head speaks to it through its standard input and output, one JSON object a line: `{"kind": "sparse", "number": 0, "incarnation": 0}`
asks for a role, `{"started": pid}` answers, and `{"ended": pid, "code": -9}` tells of an end. It runs no thread of its own, so a fork is
safe; when the head is gone its input ends, and it ends all roles and itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rowstead.fleet.local_process import ASK, GRACE_S, HEAD, LOOK_EVERY_S, environment
from rowstead.fleet.roster import ROLES_FOLDER, RoleFiles
from rowstead.spec.errors import RowsteadError
from rowstead.spec.fleet import RoleKind

ORPHANED_S = 2.0
"""How long roles may take to end once the head is gone: nobody is there any more for whom they could save anything."""

BeRole = Callable[[RoleKind, Path, int, int], int]
"""Is a role, of a kind, for a run's folder, with its number and how often it was started before; returns its exit code."""


class ForkedRole:
    """One role that the nursery has started."""

    def __init__(self, nursery: ForkServer, files: RoleFiles, pid: int) -> None:
        self._nursery, self.files, self.pid = nursery, files, pid

    def code(self) -> int | None:
        """The exit code, negative for a signal; none while it runs."""
        self._nursery.listen()
        return self._nursery.codes.get(self.pid)

    def ask_to_stop(self) -> None:
        """Let it finish what it does and end."""
        self._send(ASK)

    def kill(self) -> None:
        """End it at once."""
        self._send(signal.SIGKILL)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """The exit code once it has ended; none if it has not in time."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while (code := self.code()) is None and (until is None or time.monotonic() < until):
            time.sleep(LOOK_EVERY_S)
        return code

    def _send(self, number: int) -> None:
        if self.code() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class ForkServer:
    """Starts roles on this machine, inside a `with`; when that ends, so do all of them.

    `module` is what is run for the process that is forked: it imports what roles need, and calls `serve_forks`.
    """

    def __init__(self, folder: Path, module: str, *, environ: Mapping[str, str] | None = None) -> None:
        self._folder, self._module = folder, module
        self._environ = environment(1) if environ is None else environ
        self._process: subprocess.Popen[bytes] | None = None
        self._heard = b""
        self._replies: list[dict[str, Any]] = []
        self._running: dict[int, ForkedRole] = {}
        self.codes: dict[int, int] = {}
        """Of roles that have ended, by process."""
        (folder / ROLES_FOLDER).mkdir(exist_ok=True)

    def start(self, kind: RoleKind, number: int, incarnation: int = 0) -> ForkedRole:
        """Begin a role; it is ready once it has told so (`roster.told`)."""
        files = RoleFiles(self._folder, kind, number)
        files.told.unlink(missing_ok=True)
        process = self._open()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({"kind": kind, "number": number, "incarnation": incarnation}).encode() + b"\n")
            process.stdin.flush()
            while not self._replies:
                self.listen(timeout_s=1.0)
                if self._process is None:
                    raise BrokenPipeError
        except BrokenPipeError:
            said = (self._folder / ROLES_FOLDER / "nursery.log").read_text()[-2000:]
            raise RowsteadError(f"roles cannot be started here, as the process that starts them has ended:\n{said}") from None
        role = ForkedRole(self, files, int(self._replies.pop(0)["started"]))
        self._running[role.pid] = role
        self.codes.pop(role.pid, None)
        return role

    def listen(self, timeout_s: float = 0.0) -> None:
        """Take in what the process has said since."""
        if self._process is None or self._process.stdout is None:
            return
        pipe = self._process.stdout.fileno()
        while select.select([pipe], [], [], timeout_s)[0]:
            more = os.read(pipe, 1 << 16)
            if not more:
                self._has_ended()
                return
            *lines, self._heard = (self._heard + more).split(b"\n")
            for said in map(json.loads, lines):
                if "ended" in said:
                    self._running.pop(said["ended"], None)
                    self.codes[said["ended"]] = said["code"]
                else:
                    self._replies.append(said)
            timeout_s = 0.0

    def __enter__(self) -> ForkServer:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        for role in list(self._running.values()):
            role.kill()
        process = self._process
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.wait()

    def _open(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            with open(self._folder / ROLES_FOLDER / "nursery.log", "ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", self._module, str(self._folder)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=dict(self._environ),
                    start_new_session=True,  # Ctrl-C reaches the head alone, which asks the roles in the right order
                )
        return self._process

    def _has_ended(self) -> None:
        """The process was killed, and its roles end with it; the next start makes another."""
        assert self._process is not None
        self._process.wait()
        self._process, self._heard = None, b""
        for role in list(self._running.values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(role.pid, signal.SIGKILL)
            self.codes[role.pid] = -signal.SIGKILL
        self._running.clear()


# In the process that is forked


def serve_forks(folder: Path, be_role: BeRole) -> None:
    """Start roles as they are asked for, and tell of their ends, until nobody can ask any more."""
    running: set[int] = set()
    asked = b""
    for number in (signal.SIGINT, signal.SIGTERM):  # the head is who listens to them
        signal.signal(number, signal.SIG_IGN)
    while True:
        if select.select([0], [], [], LOOK_EVERY_S)[0]:
            more = os.read(0, 1 << 16)
            if not more:
                break
            *lines, asked = (asked + more).split(b"\n")
            for wanted in map(json.loads, lines):
                pid = _forked(folder, be_role, wanted)
                running.add(pid)
                _say({"started": pid})
        _tell_ended(running)
    _end(running)


def _forked(folder: Path, be_role: BeRole, wanted: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        files = RoleFiles(folder, wanted["kind"], wanted["number"])
        log, nothing = os.open(files.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), os.open(os.devnull, os.O_RDONLY)
        for descriptor, place in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(descriptor, place)
        os.environ[HEAD] = str(os.getppid())
        code = be_role(wanted["kind"], folder, wanted["number"], wanted["incarnation"])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _tell_ended(running: set[int]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        running.discard(pid)
        with contextlib.suppress(BrokenPipeError):
            _say({"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def _end(running: set[int]) -> None:
    """Ask all roles to end, and kill those that do not soon."""
    for number, within_s in ((ASK, ORPHANED_S), (signal.SIGKILL, GRACE_S)):
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        until = time.monotonic() + within_s
        while running and time.monotonic() < until:
            _tell_ended(running)
            time.sleep(LOOK_EVERY_S)


def _say(fact: dict[str, Any]) -> None:
    os.write(1, json.dumps(fact).encode() + b"\n")
