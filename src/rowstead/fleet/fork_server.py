"""Starts roles as processes of this machine without import time: one process imports everything, and is forked for each role.

The coordinator talks to it through its standard input and output, one JSON object per line: `{"kind": "sparse", "number": 0, "incarnation": 0}`
requests a role, `{"started": pid}` is the reply, and `{"exited": pid, "code": -9}` reports an exit. The fork server has no threads, so forking
is safe; when the coordinator is gone its input ends, and it stops all roles and exits. A fork server that is killed or frozen is replaced; its
roles count as killed.
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

from rowstead.distributed.launch import signal_name
from rowstead.fleet.liveness import FILE_POLL_INTERVAL_S, SILENT_AFTER_S, FileActivity
from rowstead.fleet.local_process import GRACE_S, POLL_INTERVAL_S, STOP_SIGNAL, Role, role_environment
from rowstead.fleet.roster import PRIVATE, ROLES_FOLDER, RoleFiles, create_roles_folder
from rowstead.records.files import open_private
from rowstead.spec.errors import RowsteadError
from rowstead.spec.fleet import RoleKind
from rowstead.spec.job import LAUNCHER

ORPHANED_S = 2.0
"""Time for roles to exit once the coordinator is gone: nothing they could save is of use any more."""
LOG_FILE = "fork_server.log"
"""Under `roles/`: what the fork server itself prints; touched as a sign of life."""
START_TIMEOUT_S = 120.0
"""Default time for the fork server to import everything."""
MAX_STARTS = 4
"""How often a role is requested, if the fork server is killed meanwhile."""

RunRole = Callable[[RoleKind, Path, int, int], int]
"""Runs a role, given its kind, the run's folder, its number and its incarnation; returns the exit code."""


class ForkedRole(Role):
    """One role that the fork server has started."""

    def __init__(self, server: ForkServer, files: RoleFiles, pid: int) -> None:
        self._server, self.files, self.pid = server, files, pid

    def exit_code(self) -> int | None:
        self._server.read_messages()
        return self._server.exit_codes.get(self.pid)

    def request_stop(self) -> None:
        self._send(STOP_SIGNAL)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self.exit_code() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class ForkServer:
    """Starts roles on this machine, inside a `with`; at its end all of them are killed.

    `module` is the module that the forked process runs: it imports what roles need, and calls `serve_forks`.
    """

    def __init__(
        self,
        folder: Path,
        module: str,
        *,
        environ: Mapping[str, str] | None = None,
        on_message: Callable[[str], None] = lambda text: None,
        start_s: float = START_TIMEOUT_S,
    ) -> None:
        self._folder, self._module, self._on_message, self._start_s = folder, module, on_message, start_s
        self._log = folder / ROLES_FOLDER / LOG_FILE
        self._environ = role_environment(1) if environ is None else environ
        self._process: subprocess.Popen[bytes] | None = None
        self._activity = FileActivity(self._log)
        self._is_ready = self._is_silent = False
        """Whether it has imported everything and gives signs of life; whether it was killed because it gave none."""
        self._failure, self._would_fail_again = "", False
        """Why it exited last, and whether it was not killed by somebody else."""
        self._partial_line = b""
        self._replies: list[dict[str, Any]] = []
        self._running: dict[int, ForkedRole] = {}
        self.exit_codes: dict[int, int] = {}
        """Exit codes by process id."""
        create_roles_folder(folder)

    def start(self, kind: RoleKind, number: int, incarnation: int = 0) -> ForkedRole:
        """Start a role; it is ready once its address file says so (`roster.read_address`)."""
        files = RoleFiles(self._folder, kind, number)
        files.address.unlink(missing_ok=True)
        request = json.dumps({"kind": kind, "number": number, "incarnation": incarnation}).encode() + b"\n"
        self._would_fail_again = False
        if not any(self._has_reply(request) for _ in range(MAX_STARTS) if not self._would_fail_again):
            printed = self._log.read_text(errors="replace")[-2000:]
            raise RowsteadError(
                f"roles cannot be started: the fork server {self._failure}. The end of {self._log}:\n{printed or '(it printed nothing)'}"
            )
        role = ForkedRole(self, files, int(self._replies.pop(0)["started"]))
        self._running[role.pid] = role
        self.exit_codes.pop(role.pid, None)
        return role

    def _has_reply(self, request: bytes) -> bool:
        """Send a request and wait for the reply; False if the fork server exits meanwhile."""
        process = self._start_server()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(request)
            process.stdin.flush()
        while not self._replies:
            self.read_messages(timeout_s=1.0)
            if self._process is None:
                return False
        return True

    def read_messages(self, timeout_s: float = 0.0) -> None:
        """Read what the fork server has reported since the last call."""
        if self._process is None or self._process.stdout is None:
            return
        self._check_alive()
        pipe = self._process.stdout.fileno()
        while select.select([pipe], [], [], timeout_s)[0]:
            more = os.read(pipe, 1 << 16)
            if not more:
                self._handle_server_exit()
                return
            *lines, self._partial_line = (self._partial_line + more).split(b"\n")
            for message in map(json.loads, lines):
                if "exited" in message:
                    self._running.pop(message["exited"], None)
                    self.exit_codes[message["exited"]] = message["code"]
                elif "ready" in message:
                    self._is_ready = True
                else:
                    self._replies.append(message)
            timeout_s = 0.0

    def __enter__(self) -> ForkServer:
        self._start_server()
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
        try:
            process.wait(ORPHANED_S + GRACE_S)
        except subprocess.TimeoutExpired:  # it is frozen
            process.kill()
            process.wait()

    def _start_server(self) -> subprocess.Popen[bytes]:
        """Start the fork server unless it runs already."""
        if self._process is None:
            with open(self._log, "ab", opener=open_private) as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", self._module, str(self._folder)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=dict(self._environ),
                    start_new_session=True,  # Ctrl-C reaches only the coordinator, which stops the roles in order
                )
            self._activity, self._is_ready, self._is_silent = FileActivity(self._log), False, False
        return self._process

    def _check_alive(self) -> None:
        """Kill a fork server that gives no sign of life; that its output ends is seen next."""
        assert self._process is not None
        if self._activity.idle_s() > (SILENT_AFTER_S if self._is_ready else self._start_s):
            self._is_silent = True
            self._process.kill()

    def _handle_server_exit(self) -> None:
        """The fork server was killed: kill its roles; the next start launches another server."""
        process, self._process, self._partial_line = self._process, None, b""
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        code = process.wait()
        self._replies.clear()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
        if self._is_silent:
            how = "gave no sign of life and has been killed"
            if not self._is_ready:
                how = f"was not ready after {self._start_s:g} s and has been killed: raise `fleet.start_s` if the machine is only slow"
        self._failure, self._would_fail_again = how, code >= 0 or (self._is_silent and not self._is_ready)
        if self._running:
            self._on_message(f"the fork server {how}, and all roles with it: restarting them")
        for role in list(self._running.values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(role.pid, signal.SIGKILL)
            self.exit_codes[role.pid] = -signal.SIGKILL
        self._running.clear()


# In the fork server's process


def serve_forks(folder: Path, run_role: RunRole) -> None:
    """Start requested roles and report their exits until the input ends."""
    running: set[int] = set()
    partial_line = b""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the coordinator handles them
        signal.signal(number, signal.SIG_IGN)
    _send({"ready": os.getpid()})
    touched_s = 0.0
    while True:
        if time.monotonic() >= touched_s + FILE_POLL_INTERVAL_S:
            touched_s = time.monotonic()
            with contextlib.suppress(OSError):
                os.utime(folder / ROLES_FOLDER / LOG_FILE)
        if select.select([0], [], [], POLL_INTERVAL_S)[0]:
            more = os.read(0, 1 << 16)
            if not more:
                break
            *lines, partial_line = (partial_line + more).split(b"\n")
            for request in map(json.loads, lines):
                pid = _fork_role(folder, run_role, request)
                running.add(pid)
                _send({"started": pid})
        _report_exits(running)
    _stop_all(running)


def _fork_role(folder: Path, run_role: RunRole, request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        files = RoleFiles(folder, request["kind"], request["number"])
        log, null = os.open(files.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE), os.open(os.devnull, os.O_RDONLY)
        for descriptor, standard in ((null, 0), (log, 1), (log, 2)):
            os.dup2(descriptor, standard)
        os.environ[LAUNCHER] = str(os.getppid())
        code = run_role(request["kind"], folder, request["number"], request["incarnation"])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _report_exits(running: set[int]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        running.discard(pid)
        with contextlib.suppress(BrokenPipeError):
            _send({"exited": pid, "code": os.waitstatus_to_exitcode(status)})


def _stop_all(running: set[int]) -> None:
    """Ask all roles to stop, and kill those that do not exit in time."""
    for number, timeout_s in ((STOP_SIGNAL, ORPHANED_S), (signal.SIGKILL, GRACE_S)):
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + timeout_s
        while running and time.monotonic() < deadline:
            _report_exits(running)
            time.sleep(POLL_INTERVAL_S)


def _send(message: dict[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")
