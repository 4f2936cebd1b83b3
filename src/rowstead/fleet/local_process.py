"""What all launchers of roles share: the handle of a started role, stop requests, and the environment of a role."""

from __future__ import annotations

import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from rowstead.distributed.stop import stop_signals
from rowstead.spec.job import LAUNCHER

STOP_SIGNAL = signal.SIGUSR1
"""Signal that asks a role to stop. Not SIGTERM: clusters send that to all processes of a job at once, and the coordinator has to stop
the roles in order, trainers first."""
GRACE_S = 10.0
"""Time for a role to exit after a stop request."""
POLL_INTERVAL_S = 0.02


class Role(ABC):
    """A role that was started, on this machine or elsewhere."""

    @abstractmethod
    def exit_code(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""

    @abstractmethod
    def request_stop(self) -> None:
        """Ask it to finish its current work and exit."""

    @abstractmethod
    def kill(self) -> None:
        """Kill it at once."""

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for its exit and return the exit code; None after `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (code := self.exit_code()) is None and (deadline is None or time.monotonic() < deadline):
            time.sleep(POLL_INTERVAL_S)
        return code


def stop_roles(roles: Sequence[Role], grace_s: float) -> list[int | None]:
    """Ask roles to stop, kill those that are still running after `grace_s`, and return the exit codes."""
    for role in roles:
        role.request_stop()
    deadline = time.monotonic() + grace_s
    for role in roles:
        if role.wait(max(0.0, deadline - time.monotonic())) is None:
            role.kill()
    return [role.wait() for role in roles]


def role_environment(num_threads: int, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Build the environment of a role: its launcher, and the number of threads unless the user has set it."""
    return {"OMP_NUM_THREADS": str(num_threads), **inherited, LAUNCHER: str(os.getpid())}


def install_stop_handlers() -> Callable[[], bool]:
    """In a role: install signal handlers, and return a function that says whether the role was asked to stop.

    A launched role obeys only its launcher's `STOP_SIGNAL`. One that the user started also obeys SIGTERM, SIGHUP and Ctrl-C; the second
    Ctrl-C ends it at once.
    """
    stop_requested = threading.Event()

    def handle(number: int, frame: object) -> None:
        stop_requested.set()
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN if LAUNCHER in os.environ else handle)
    signal.signal(STOP_SIGNAL, handle)
    return stop_requested.is_set
