"""Keeps the roles of a fleet at work: starts them, notes who is ready where, starts again those that fail, tells servers who is alive.

What to do about a role that has ended is decided in `restart.py`; how a role is started is the business of a `Launcher`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from rowstead.fleet.keys import Keys
from rowstead.fleet.local_process import Role, stopped
from rowstead.fleet.restart_policy import MISTAKE, Decision, Ended, decide
from rowstead.fleet.roster import RoleAddress, RoleFiles, Roster, told
from rowstead.fleet.rpc_client import Client, ServerUnavailable
from rowstead.fleet.wire import Message
from rowstead.spec.errors import RowsteadError
from rowstead.spec.fleet import FleetSpec, RoleKind

LOOK_EVERY_S = 0.02
TELL_S = 2.0
"""How long a server may take to hear who is alive before we try again later."""

TRAINERS_BEGIN = "trainers_begin"
"""Fact of the roster that trainers wait for, whoever has started them."""

State = Literal["starting", "ready", "to be started", "done", "given up"]


class Launcher(Protocol):
    """Starts roles somewhere; `Nursery` does so on this machine."""

    def start(self, kind: RoleKind, number: int, incarnation: int = 0) -> Role:
        """Begin a role; once at work it tells so through its file (`roster.tell`)."""
        ...


class RoleError(RowsteadError):
    """A role without which the fleet cannot go on. `is_mistake`: it said itself that what it was given cannot be right."""

    def __init__(self, text: str, post: RoleHandle, *, is_mistake: bool) -> None:
        super().__init__(text)
        self.post, self.is_mistake = post, is_mistake


@dataclass
class RoleHandle:
    """One role of the fleet, whichever process fills it now."""

    kind: RoleKind
    number: int
    role: Role
    incarnation: int = 0
    state: State = "starting"
    started: float = 0.0
    counted_restarts: int = 0
    """Those that count against it: `restart.py`."""
    start_at: float = 0.0
    """When to start it again, in the state `to be started`."""
    log_bytes: int = 0
    """That earlier starts had printed: what they said is no news."""
    address: RoleAddress | None = None

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.number}"

    @property
    def is_running(self) -> bool:
        return self.state in ("starting", "ready")


class Supervisor:
    """All roles of one fleet, as the head sees them. One thread calls it."""

    def __init__(
        self,
        folder: Path,
        spec: FleetSpec,
        launcher: Launcher,
        facts: Mapping[str, Any],
        *,
        say: Callable[[str], None],
        keys: Keys | None = None,
    ) -> None:
        self.folder, self.spec, self.facts = folder, spec, dict(facts)
        self._launcher, self._say, self._keys = launcher, say, keys
        self.roster = Roster(folder)
        self.posts: list[RoleHandle] = []
        self.num_restarts: dict[str, int] = {}
        """By kind of role, over the whole run."""
        self._untold: set[str] = set()
        """Servers that have not heard yet who is alive."""
        self._clients: dict[str, Client] = {}
        self.on_event: Callable[[str, RoleHandle, str], None] = lambda what, post, why: None
        """Is told of restarts and of roles that were given up."""
        self._write_roster()

    def start(self, *kinds: RoleKind) -> None:
        """Begin all roles of these kinds; trainers once the servers are ready and have what training begins with."""
        if "trainer" in kinds:
            self.facts[TRAINERS_BEGIN] = True
            self._write_roster()
        for kind, number in self.spec.roles():
            if kind in kinds:
                log_bytes = RoleFiles(self.folder, kind, number).log_bytes
                role = self._launcher.start(kind, number)
                self.posts.append(RoleHandle(kind, number, role, started=time.monotonic(), log_bytes=log_bytes))

    def wait_ready(self, until: Callable[[], bool] = lambda: False) -> None:
        """Return once all that were begun are ready or have ended, or `until` holds; a RoleError if one of them cannot be."""
        while any(post.state in ("starting", "to be started") for post in self.posts) and not until():
            self.look()
            time.sleep(LOOK_EVERY_S)

    def look(self) -> None:
        """See to all roles once; a RoleError where the fleet cannot go on."""
        for post in self.posts:
            if post.state == "to be started" and time.monotonic() >= post.start_at:
                self._start_again(post)
            elif post.is_running:
                code = post.role.code()
                if code is not None:
                    self._ended(post, code)
                elif post.state == "starting":
                    self._is_ready_yet(post)
        self._tell_members()

    @property
    def is_training(self) -> bool:
        """Whether a trainer is at work, or will be again."""
        return any(post.state in ("starting", "ready", "to be started") for post in self.of("trainer"))

    def of(self, *kinds: RoleKind) -> list[RoleHandle]:
        return [post for post in self.posts if post.kind in kinds]

    def stop(self, *kinds: RoleKind, grace_s: float = 10.0) -> None:
        """Ask all roles of these kinds to end, wait for it while the others are looked after, and kill those that do not."""
        posts = [post for post in self.of(*kinds) if post.state in ("starting", "ready", "to be started")]
        running = [post.role for post in posts if post.is_running]
        for post in posts:
            post.state = "done"
        for role in running:
            role.ask_to_stop()
        ends_s = time.monotonic() + grace_s
        while any(role.code() is None for role in running) and time.monotonic() < ends_s:
            self.look()
            time.sleep(LOOK_EVERY_S)
        stopped(running, 0.0)

    def call(
        self, post: RoleHandle, kind: str, facts: Mapping[str, Any] | None = None, *, deadline_s: float = TELL_S
    ) -> Message:
        """Ask a server something."""
        client = self._clients.get(post.name)
        if client is None:
            address = self.roster.address(post.kind, post.number)
            client = self._clients[post.name] = Client(address, name=f"head-{post.name}", keys=self._keys)
        return client.call(kind, dict(facts or {}), deadline_s=deadline_s)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    # What happens to a role

    def _is_ready_yet(self, post: RoleHandle) -> None:
        found = told(self.folder, post.kind, post.number)
        if found is not None and found.incarnation == post.incarnation:
            post.state, post.address = "ready", found
            self._write_roster()
            self._members_changed()
        elif self.spec.start != "by_hand" and time.monotonic() - post.started > self.spec.start_s:
            post.role.kill()
            self._fail(
                post,
                f"{post.kind} {post.number} was not ready after {self.spec.start_s:g} s: allow more by `fleet.start_s` if it only is slow",
            )

    def _ended(self, post: RoleHandle, code: int) -> None:
        others = [other for other in self.of("trainer") if other is not post]
        ended = Ended(
            kind=post.kind,
            number=post.number,
            code=code,
            was_ready=post.state == "ready",
            ran_s=time.monotonic() - post.started,
            num_restarts=post.counted_restarts,
            num_other_trainers=sum(other.state not in ("done", "given up") for other in others),
        )
        self._follow(post, decide(ended, self.spec), is_mistake=code == MISTAKE)

    def _follow(self, post: RoleHandle, decision: Decision, *, is_mistake: bool) -> None:
        if decision.action == "give up":
            self._fail(post, decision.why, is_mistake=is_mistake)
        if decision.action == "done":
            post.state = "done"
        elif decision.action == "go on without":
            post.state = "given up"
            self._say(decision.why)
            self.on_event("given up", post, decision.why)
        else:
            post.state, post.start_at = "to be started", time.monotonic() + decision.delay_s
            post.counted_restarts = decision.num_restarts
            self.num_restarts[post.kind] = self.num_restarts.get(post.kind, 0) + 1
            self._say(decision.why)
            self.on_event("restart", post, decision.why)
        self._members_changed()

    def _start_again(self, post: RoleHandle) -> None:
        post.incarnation += 1
        post.log_bytes = RoleFiles(self.folder, post.kind, post.number).log_bytes
        post.role = self._launcher.start(post.kind, post.number, post.incarnation)
        post.state, post.started = "starting", time.monotonic()

    def _fail(self, post: RoleHandle, why: str, *, is_mistake: bool = False) -> None:
        post.state = "given up"
        files = RoleFiles(self.folder, post.kind, post.number)
        said = files.last_lines(since_bytes=post.log_bytes)
        error = said.rfind("error: ") if is_mistake else -1
        if error >= 0:
            raise RoleError(f"{post.kind} {post.number}: {said[error + len('error: ') :]}", post, is_mistake=True)
        raise RoleError(f"{why}. The end of {files.log}:\n{said or '(it printed nothing)'}", post, is_mistake=is_mistake)

    # Who is where, and who is alive

    def _write_roster(self) -> None:
        self.roster.write([post.address for post in self.posts if post.address is not None], self.facts)

    def _members_changed(self) -> None:
        self._untold = {post.name for post in self.of("reader", "dense")}

    def _tell_members(self) -> None:
        alive = [post.name for post in self.of("trainer") if post.is_running]
        if not alive:
            return
        for post in self._ready(self._untold):
            try:
                self.call(post, "members", {"names": alive})
            except ServerUnavailable:
                continue  # it has ended and comes back, or is slow: next time
            self._untold.discard(post.name)

    def _ready(self, names: Iterable[str]) -> list[RoleHandle]:
        wanted = set(names)
        return [post for post in self.posts if post.name in wanted and post.state == "ready"]
