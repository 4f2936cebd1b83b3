"""Requests to stop a process: Ctrl-C, SIGTERM, and the SIGHUP of a terminal or an SSH connection that is gone. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
import threading
from collections.abc import Iterator


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask this process to stop. SIGHUP is not one where it is ignored, as under `nohup`."""
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, *hangup)


def exit_code_of(number: int | None) -> int:
    """The exit code of a process that a signal stopped, as shells report it; of Ctrl-C where the signal went to another process."""
    return 128 + (number or signal.SIGINT)


class StopRequest(threading.Event):
    """Is set once this process was asked to stop."""

    signal: int | None = None
    """The first signal that asked for it; None if another process of the job was asked."""


@contextlib.contextmanager
def stop_on_signal(*, ignored_afterwards: bool = False) -> Iterator[StopRequest]:
    """A StopRequest that the first Ctrl-C, SIGTERM or SIGHUP sets; a second Ctrl-C interrupts at once.

    With `ignored_afterwards` later ones are ignored: for a process that has only its report left to write.
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: object) -> None:
        stop.signal = stop.signal or number
        stop.set()
        signal.signal(signal.SIGINT, before[signal.SIGINT])
        if number == signal.SIGHUP:
            leave_terminal()

    before = {number: signal.signal(number, handle) for number in stop_signals()}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if ignored_afterwards else handler)


def leave_terminal() -> None:
    """Send further output nowhere where it went to a terminal: that is gone, and writing to it fails."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if stat.S_ISCHR(os.fstat(descriptor := stream.fileno()).st_mode):  # `isatty` is false of a terminal that is gone
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, descriptor)
                os.close(null)
