"""A counting handler, and waiting for other threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rowstead.fleet.deduplication import Caller
from rowstead.fleet.wire import Message


def eventually(is_met: Callable[[], bool], within_s: float = 10.0) -> None:
    """Wait for a condition; fails after `within_s` seconds."""
    until_s = time.monotonic() + within_s
    while not is_met():
        assert time.monotonic() < until_s, "it did not happen in time"
        time.sleep(0.001)


class Counter:
    """A handler that must run once for each request."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, message: Message, caller: Caller) -> Message:
        self.gate.wait(timeout=30)
        self.seen.append(message.facts["n"])
        return Message("counted", {"n": message.facts["n"], "num_seen": len(self.seen)})
