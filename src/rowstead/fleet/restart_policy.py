"""Decides what to do about a role whose process has exited: a pure function, tested without processes."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from rowstead.distributed.launch import USER_ERROR, signal_name
from rowstead.spec.fleet import FleetSpec, RoleKind

STOPPED = 128 + signal.SIGTERM
"""Exit code of a trainer that was asked to stop before the log was finished; the coordinator ignores it where it asked itself."""
FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0


@dataclass(frozen=True, kw_only=True)
class ExitedRole:
    """A role whose process has exited while the fleet trains."""

    kind: RoleKind
    number: int
    code: int
    """Exit code; negative for the signal that killed it."""
    was_ready: bool
    """Whether it had finished starting up."""
    ran_s: float
    num_restarts: int
    """Restarts counted against it so far."""
    num_other_trainers: int
    """Other trainers that are running or starting."""
    was_silent: bool = False
    """Whether the supervisor killed it because it gave no sign of life."""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.number}"


@dataclass(frozen=True, kw_only=True)
class RoleDecision:
    """What to do about it, and the message for the user."""

    action: Literal["done", "restart", "continue without", "give up"]
    reason: str
    delay_s: float = 0.0
    """Delay before the restart."""
    num_restarts: int = 0
    """Restarts counted against the role from now on."""


def decide(role: ExitedRole, spec: FleetSpec) -> RoleDecision:
    """Restart a role, unless it has finished, a restart would fail the same way, or it has failed too often.

    A fleet can continue without a trainer as long as there is another, but not without a server or a reader.
    """
    if role.code == 0 and role.kind == "trainer":
        return RoleDecision(action="done", reason=f"{role.name} has finished training")
    how = describe_exit(role)
    if role.code == USER_ERROR:
        return RoleDecision(action="give up", reason=how)
    if not role.was_ready and role.code >= 0 and role.code != STOPPED:
        return RoleDecision(action="give up", reason=how)
    if role.kind == "trainer" and spec.tables == "local":
        return RoleDecision(
            action="give up", reason=f"{how} and lost its tables: continue from the last checkpoint with --resume"
        )
    before = 0 if role.was_ready and role.ran_s >= spec.healthy_s else role.num_restarts
    if before < spec.max_restarts:
        delay_s = min(MAX_DELAY_S, FIRST_DELAY_S * 2**before) if before else 0.0
        reason = f"{how}: restarting it ({before + 1} of {spec.max_restarts})"
        return RoleDecision(action="restart", reason=reason, delay_s=delay_s, num_restarts=before + 1)
    how = f"{how} after {before} {'restart' if before == 1 else 'restarts'}" if before else how
    if role.kind == "trainer" and role.num_other_trainers > 0:
        return RoleDecision(action="continue without", reason=f"{how}: continuing with the other trainers", num_restarts=before)
    return RoleDecision(action="give up", reason=how, num_restarts=before)


def describe_exit(role: ExitedRole) -> str:
    when = "" if role.was_ready else " before it was ready"
    if role.was_silent and role.code < 0:
        return f"{role.name} was silent and has been killed"
    if role.code < 0:
        return f"{role.name} was killed by {signal_name(-role.code)}{when}"
    if role.code == 0:
        return f"{role.name} exited unexpectedly{when}"
    if role.code == STOPPED:
        return f"{role.name} was stopped from outside{when}"
    return f"{role.name} failed{when} (exit code {role.code})"
