"""What becomes of a role whose process has ended: a pure decision, so that it is tested without processes."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from rowstead.spec.fleet import FleetSpec, RoleKind

MISTAKE = 2
"""Exit code of a user's mistake, which another start would only repeat."""
STOPPED = 128 + signal.SIGTERM
"""Exit code of a trainer that was asked to end before everything was trained on; the head, who may ask it, does not look at it then."""
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A role whose process has ended while the fleet trains."""

    kind: RoleKind
    number: int
    code: int
    """As the system gives it: negative for the signal that killed it."""
    was_ready: bool
    """Whether it had got as far as to do its work."""
    ran_s: float
    num_restarts: int
    """Starts again that count against it so far."""
    num_other_trainers: int
    """Trainers that are at work or were begun, this one not counted."""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.number}"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do about it, and what to tell the user."""

    action: Literal["done", "restart", "go on without", "give up"]
    why: str
    delay_s: float = 0.0
    """How long to wait before a restart."""
    num_restarts: int = 0
    """What counts against the role from now on."""


def decide(ended: Ended, spec: FleetSpec) -> Decision:
    """Start a role again, unless it has finished, a start would fail the same way, or it has failed too often.

    A fleet goes on without a trainer, as long as there is another; without a server or a reader it cannot.
    """
    if ended.code == 0 and ended.kind == "trainer":
        return Decision(action="done", why=f"{ended.name} has no more to train on")
    how = ended_how(ended)
    if ended.code == MISTAKE:
        return Decision(action="give up", why=how)
    if not ended.was_ready and ended.code >= 0 and ended.code != STOPPED:
        return Decision(action="give up", why=how)
    if ended.kind == "trainer" and spec.tables == "local":
        return Decision(action="give up", why=f"{how}, and its tables with it: go on from the last checkpoint with --resume")
    before = 0 if ended.was_ready and ended.ran_s >= spec.healthy_s else ended.num_restarts
    if before < spec.max_restarts:
        delay_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2**before) if before else 0.0
        why = f"{how}: starting it again ({before + 1} of {spec.max_restarts})"
        return Decision(action="restart", why=why, delay_s=delay_s, num_restarts=before + 1)
    times = f"{how}, after {before} restarts" if before else how
    if ended.kind == "trainer" and ended.num_other_trainers > 0:
        return Decision(action="go on without", why=f"{times}: the other trainers go on", num_restarts=before)
    return Decision(action="give up", why=times, num_restarts=before)


def ended_how(ended: Ended) -> str:
    """How a role's process came to its end, as a clause."""
    when = "" if ended.was_ready else " before it was ready"
    if ended.code < 0:
        return f"{ended.name} was killed by {_signal_name(-ended.code)}{when}"
    if ended.code == 0:
        return f"{ended.name} ended by itself{when}"
    if ended.code == STOPPED:
        return f"{ended.name} was asked to end by somebody else{when}"
    return f"{ended.name} failed{when} (exit code {ended.code})"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
