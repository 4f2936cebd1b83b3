"""Answers that are not there yet when a handler returns."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rowstead.fleet.deduplication import Caller
from rowstead.fleet.wire import Message
from rowstead.spec.errors import RowsteadError


class DeferredReply:
    """The answer of a handler that others will complete, such as a round that waits for all trainers. From any thread, once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outcome: Message | Exception | None = None
        self._deliver: Callable[[Message | Exception], None] | None = None

    @property
    def is_done(self) -> bool:
        return self._outcome is not None

    def answer(self, message: Message) -> None:
        """Send the answer."""
        self._complete(message)

    def fail(self, problem: str) -> None:
        """Send a refusal: the client raises `RefusedError` with this text."""
        self._complete(RowsteadError(problem))

    def _complete(self, outcome: Message | Exception) -> None:
        with self._lock:
            assert self._outcome is None, "an answer is given once"
            self._outcome = outcome
            deliver = self._deliver
        if deliver is not None:
            deliver(outcome)

    def send_by(self, deliver: Callable[[Message | Exception], None]) -> None:
        """As the server: how the answer goes to who asked, at once if it is there already."""
        with self._lock:
            self._deliver = deliver
            outcome = self._outcome
        if outcome is not None:
            deliver(outcome)


Handler = Callable[[Message, Caller], Message | DeferredReply]
"""Does what a request asks. A `RowsteadError` that it raises is told to the client; the tensors of its answer must not change later."""
