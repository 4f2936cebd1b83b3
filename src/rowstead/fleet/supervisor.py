"""Keeps the roles of a fleet running: starts them, records their addresses, restarts those that fail or freeze, tells servers which trainers
are alive.

`restart_policy.py` decides what to do about a role that has exited; a `Launcher` starts the processes.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from rowstead.distributed.launch import USER_ERROR
from rowstead.fleet.keys import Keys
from rowstead.fleet.liveness import SILENT_AFTER_S, AwakeClock, FileActivity
from rowstead.fleet.local_process import POLL_INTERVAL_S, Role, stop_roles
from rowstead.fleet.restart_policy import ExitedRole, RoleDecision, decide
from rowstead.fleet.roster import RoleAddress, RoleFiles, Roster, read_address
from rowstead.fleet.rpc_client import Client, ServerUnavailable
from rowstead.fleet.wire import Message
from rowstead.spec.errors import RowsteadError
from rowstead.spec.fleet import FleetSpec, RoleKind

CALL_TIMEOUT_S = 2.0
"""Timeout of a call to a server; a membership update that times out is retried later."""

FULL_BYTES = 1 << 16
"""A disk with less free space is full: a role could not even write its log."""

TRAINERS_MAY_START = "trainers_may_start"
"""Fact of the roster that trainers wait for, however they were started."""

State = Literal["starting", "ready", "restarting", "done", "given up"]


class Launcher(Protocol):
    """Starts roles somewhere; `ForkServer` does so on this machine."""

    def start(self, kind: RoleKind, number: int, incarnation: int = 0) -> Role:
        """Start a role; it reports through its address file when it is ready (`roster.report_ready`)."""
        ...


class RoleError(RowsteadError):
    """A role failed without which the fleet cannot continue. `is_user_error`: it reported itself that its input is wrong."""

    def __init__(self, text: str, handle: RoleHandle, *, is_user_error: bool) -> None:
        super().__init__(text)
        self.handle, self.is_user_error = handle, is_user_error


@dataclass
class RoleHandle:
    """One role of the fleet, over all its incarnations."""

    kind: RoleKind
    number: int
    role: Role
    incarnation: int = 0
    state: State = "starting"
    started_s: float = 0.0
    """By the supervisor's `AwakeClock`."""
    num_counted_restarts: int = 0
    """Restarts counted against it: see `restart_policy.py`."""
    restart_at_s: float = 0.0
    """When to restart it, in the state `restarting`."""
    log_start_bytes: int = 0
    """Size of the log before this incarnation: messages of earlier ones are not repeated."""
    address: RoleAddress | None = None
    activity: FileActivity | None = None
    """Its signs of life, once it is ready."""
    is_silent: bool = False
    """Whether it was killed because it gave none."""

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.number}"

    @property
    def is_running(self) -> bool:
        return self.state in ("starting", "ready")

    @property
    def is_active(self) -> bool:
        """Whether it runs, or will run again."""
        return self.is_running or self.state == "restarting"


class Supervisor:
    """All roles of one fleet, in the coordinator. Called by one thread."""

    def __init__(
        self,
        folder: Path,
        spec: FleetSpec,
        launcher: Launcher,
        facts: Mapping[str, Any],
        *,
        on_message: Callable[[str], None],
        keys: Keys | None = None,
    ) -> None:
        self.folder, self.spec, self.facts = folder, spec, dict(facts)
        self._launcher, self._on_message, self._keys = launcher, on_message, keys
        self.roster = Roster(folder)
        self.handles: list[RoleHandle] = []
        self._awake_s = AwakeClock()
        self.num_restarts: dict[str, int] = {}
        """By kind of role, over the whole run."""
        self._outdated: set[str] = set()
        """Servers that do not know the current trainers yet."""
        self._clients: dict[str, Client] = {}
        self.on_event: Callable[[str, RoleHandle, str], None] = lambda event, handle, reason: None
        """Called for restarts and for roles that were given up."""
        self._write_roster()

    def start(self, *kinds: RoleKind) -> None:
        """Start all roles of these kinds; start trainers once the servers are ready and hold the initial model."""
        if "trainer" in kinds:
            self.facts[TRAINERS_MAY_START] = True
            self._write_roster()
        for kind, number in self.spec.roles():
            if kind in kinds:
                log_start_bytes = RoleFiles(self.folder, kind, number).log_size_bytes
                role = self._launcher.start(kind, number)
                self.handles.append(RoleHandle(kind, number, role, started_s=self._awake_s(), log_start_bytes=log_start_bytes))

    def wait_ready(self, until: Callable[[], bool] = lambda: False) -> None:
        """Wait until all started roles are ready or have exited, or `until` holds; raise a RoleError if one cannot start."""
        while any(handle.state in ("starting", "restarting") for handle in self.handles) and not until():
            self.poll()
            time.sleep(POLL_INTERVAL_S)

    def poll(self) -> None:
        """Check all roles once, and restart those that are due; raise a RoleError if the fleet cannot continue."""
        self._awake_s()
        for handle in self.handles:
            if handle.state == "restarting" and time.monotonic() >= handle.restart_at_s:
                self._restart(handle)
            elif handle.is_running:
                code = handle.role.exit_code()
                if code is not None:
                    self._handle_exit(handle, code)
                elif handle.state == "starting":
                    self._check_ready(handle)
                else:
                    self._check_alive(handle)
        self._send_members()

    @property
    def is_training(self) -> bool:
        """Whether a trainer runs, or will run again."""
        return any(handle.is_active for handle in self.of_kind("trainer"))

    def of_kind(self, *kinds: RoleKind) -> list[RoleHandle]:
        return [handle for handle in self.handles if handle.kind in kinds]

    def stop(self, *kinds: RoleKind, grace_s: float = 10.0) -> None:
        """Stop all roles of these kinds while supervising the others, and kill those that still run after `grace_s`."""
        handles = [handle for handle in self.of_kind(*kinds) if handle.is_active]
        running = [handle.role for handle in handles if handle.is_running]
        for handle in handles:
            handle.state = "done"
        for role in running:
            role.request_stop()
        deadline = time.monotonic() + grace_s
        while any(role.exit_code() is None for role in running) and time.monotonic() < deadline:
            self.poll()
            time.sleep(POLL_INTERVAL_S)
        stop_roles(running, 0.0)

    def call(
        self, handle: RoleHandle, kind: str, facts: Mapping[str, Any] | None = None, *, deadline_s: float = CALL_TIMEOUT_S
    ) -> Message:
        """Call a server."""
        client = self._clients.get(handle.name)
        if client is None:
            address = self.roster.address(handle.kind, handle.number)
            client = self._clients[handle.name] = Client(address, name=f"coordinator-{handle.name}", keys=self._keys)
        return client.call(kind, dict(facts or {}), deadline_s=deadline_s)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    # State changes of a role

    def _check_ready(self, handle: RoleHandle) -> None:
        found = read_address(self.folder, handle.kind, handle.number)
        if found is not None and found.incarnation == handle.incarnation:
            handle.state, handle.address = "ready", found
            files = RoleFiles(self.folder, handle.kind, handle.number)
            handle.activity = FileActivity(files.address, files.usage)
            self._write_roster()
            self._mark_members_changed()
        elif self.spec.start != "manual" and self._awake_s() - handle.started_s > self.spec.start_s:
            handle.role.kill()
            self._fail(
                handle,
                f"{handle.kind} {handle.number} was not ready after {self.spec.start_s:g} s: raise `fleet.start_s` if it is only slow",
            )

    def _check_alive(self, handle: RoleHandle) -> None:
        """Kill a role that gives no sign of life, such as a frozen one; it is restarted once its process has exited."""
        assert handle.activity is not None
        if handle.activity.idle_s() > SILENT_AFTER_S and not handle.is_silent:
            handle.is_silent = True
            self._on_message(f"{handle.kind} {handle.number} has given no sign of life for {SILENT_AFTER_S:g} s: killing it")
            handle.role.kill()

    def _handle_exit(self, handle: RoleHandle, code: int) -> None:
        others = [other for other in self.of_kind("trainer") if other is not handle]
        exited = ExitedRole(
            kind=handle.kind,
            number=handle.number,
            code=code,
            was_ready=handle.state == "ready",
            was_silent=handle.is_silent,
            ran_s=self._awake_s() - handle.started_s,
            num_restarts=handle.num_counted_restarts,
            num_other_trainers=sum(other.is_active for other in others),
        )
        self._apply(handle, decide(exited, self.spec), is_user_error=code == USER_ERROR)

    def _apply(self, handle: RoleHandle, decision: RoleDecision, *, is_user_error: bool) -> None:
        if decision.action == "give up":
            self._fail(handle, decision.reason, is_user_error=is_user_error)
        if decision.action == "done":
            handle.state = "done"
        elif decision.action == "continue without":
            handle.state = "given up"
            self._on_message(decision.reason)
            self.on_event("given up", handle, decision.reason)
        else:
            handle.state, handle.restart_at_s = "restarting", time.monotonic() + decision.delay_s
            handle.num_counted_restarts = decision.num_restarts
            self.num_restarts[handle.kind] = self.num_restarts.get(handle.kind, 0) + 1
            self._on_message(decision.reason)
            self.on_event("restart", handle, decision.reason)
        self._mark_members_changed()

    def _restart(self, handle: RoleHandle) -> None:
        handle.incarnation += 1
        handle.log_start_bytes = RoleFiles(self.folder, handle.kind, handle.number).log_size_bytes
        handle.role = self._launcher.start(handle.kind, handle.number, handle.incarnation)
        handle.state, handle.started_s, handle.is_silent = "starting", self._awake_s(), False

    def _fail(self, handle: RoleHandle, reason: str, *, is_user_error: bool = False) -> None:
        handle.state = "given up"
        files = RoleFiles(self.folder, handle.kind, handle.number)
        printed = files.last_lines(since_bytes=handle.log_start_bytes)
        error = printed.rfind("error: ") if is_user_error else -1
        if error >= 0:
            raise RoleError(f"{handle.kind} {handle.number}: {printed[error + len('error: ') :]}", handle, is_user_error=True)
        is_full = shutil.disk_usage(self.folder).free < FULL_BYTES
        nothing = "(it printed nothing: the disk is full)" if is_full else "(it printed nothing)"
        text = f"{reason}. The end of {files.log}:\n{printed or nothing}"
        raise RoleError(text, handle, is_user_error=is_user_error)

    # Addresses and membership

    def _write_roster(self) -> None:
        self.roster.write([handle.address for handle in self.handles if handle.address is not None], self.facts)

    def _mark_members_changed(self) -> None:
        self._outdated = {handle.name for handle in self.of_kind("reader", "dense")}

    def _send_members(self) -> None:
        """Send the names of the running trainers to the servers that do not know them yet."""
        alive = [handle.name for handle in self.of_kind("trainer") if handle.is_running]
        if not alive:
            return
        for handle in self.handles:
            if handle.name in self._outdated and handle.state == "ready":
                try:
                    self.call(handle, "members", {"names": alive})
                except ServerUnavailable:
                    continue  # it has exited and will be restarted, or is slow: retry in the next poll
                self._outdated.discard(handle.name)
