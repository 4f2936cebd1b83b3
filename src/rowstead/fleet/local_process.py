"""What processes of this machine that are roles have in common: when they end, and what they are told."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

HEAD = "ROWSTEAD_HEAD"
"""Environment variable with the process that started a role."""
ASK = signal.SIGUSR1
"""By what whoever started a role asks it to end. Not SIGTERM: a cluster sends that to all processes of a job at once, and then the head has to
end the roles in order, trainers first."""
GRACE_S = 10.0
"""How long a role may take to end once it was asked to."""
LOOK_EVERY_S = 0.02


def environment(num_threads: int, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a role is told: who started it, and how many threads its arithmetic may have unless the user has said."""
    return {"OMP_NUM_THREADS": str(num_threads), **inherited, HEAD: str(os.getpid())}


class Role(Protocol):
    """A role that was started."""

    def code(self) -> int | None:
        """The exit code, negative for a signal; none while it runs."""
        ...

    def ask_to_stop(self) -> None: ...

    def kill(self) -> None: ...

    def wait(self, timeout_s: float | None = None) -> int | None: ...


def stopped(roles: Sequence[Role], grace_s: float) -> list[int | None]:
    """The exit codes of roles that were asked to end, and killed where they did not in time."""
    for role in roles:
        role.ask_to_stop()
    until = time.monotonic() + grace_s
    for role in roles:
        if role.wait(max(0.0, until - time.monotonic())) is None:
            role.kill()
    return [role.wait() for role in roles]


# In the processes that were started


def stop_asked() -> Callable[[], bool]:
    """Whether this process was asked to end: by whoever started it, who alone is listened to.

    That is the user, by SIGTERM or Ctrl-C, where no head has; a second Ctrl-C ends it at once then.
    """
    asked = threading.Event()

    def ask(number: int, frame: object) -> None:
        asked.set()
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN if HEAD in os.environ else ask)
    signal.signal(ASK, ask)
    return asked.is_set


def end_with_coordinator(grace_s: float = GRACE_S) -> None:
    """Ask this process to end should whoever started it be gone, and end it soon after; a role started by hand has no such."""
    head = os.environ.get(HEAD)
    if head is None:
        return

    def watch() -> None:
        while os.getppid() == int(head):
            time.sleep(0.25)
        os.kill(os.getpid(), ASK)
        time.sleep(grace_s)
        os._exit(1)

    threading.Thread(target=watch, name="watch head", daemon=True).start()
