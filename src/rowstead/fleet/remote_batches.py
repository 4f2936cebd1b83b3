"""`RemoteBatches`: the batches of one trainer, from all readers, asked for ahead of time."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from rowstead.data.batch import Batch
from rowstead.fleet.packing import unpack
from rowstead.fleet.rpc_client import Client, RefusedError, ServerUnavailable
from rowstead.fleet.wire import Message, WireError
from rowstead.kernels.layout import Layout
from rowstead.spec.errors import DataError, RowsteadError

_ASK_S = 5.0
"""After so long without an answer a request is given up and asked anew: the reader may be another by then."""
_LEAVE_S = 2.0
_REFUSALS = 3
"""In a row, after which there is no use in asking."""
_OVER = ("ended", "stopped")
_LOOK_EVERY_S = 0.1
"""How often who waits for a batch looks whether it should still wait."""


@dataclass(frozen=True)
class Ticket:
    """Which batch it is: to be given back as done once it was trained on."""

    reader: int
    number: int
    """Among the batches of its reader, through all epochs."""
    epoch: int
    num_samples: int
    step: int
    """The place of the batch in the run, from 0, where the readers take turns."""


class RemoteBatches:
    """Batches for all threads of one trainer, about `batches_ahead` of them asked for ahead. Any thread may call any method.

    A thread for each reader asks for batches, with a client of its own, and tells what is done. The batches of one reader come in
    its order; those of several as they come in. With one reader and one trainer that is the order of a run in one process.

        while feed.more():
            for batch, ticket in feed:
                ...
                feed.done(ticket)

    The inner loop ends when the readers have nothing to hand out. The outer one goes on, should a trainer be lost before it was
    done with what it held, and ends once everything is done everywhere.
    """

    def __init__(
        self,
        connect: Sequence[Callable[[], Client]],
        *,
        name: str,
        batches_ahead: int = 8,
        incarnation: int | None = None,
        layout: Layout | None = None,
        ids: torch.dtype | None = None,
        until: Callable[[], bool] = lambda: False,
    ) -> None:
        """`connect` gives a client for each reader, in the thread that will use it. `name` is the trainer's, its own among all.

        `incarnation` is larger each time that the trainer is started; the time of day when left out. Batches that the reader
        has checked are marked as fitting `layout`. `ids` is the type to widen ids to; as they come when left out. Once `until`
        holds nobody waits for a batch any more.
        """
        assert connect, "a trainer needs a reader"
        self.name = name
        self._until = until
        self._incarnation = time.time_ns() if incarnation is None else incarnation
        self._layout, self._ids = layout, ids
        self.waited_s = 0.0
        """Seconds that threads have waited for batches, all together."""
        self.num_batches = 0
        """Given to the trainer so far."""
        self.num_samples = 0
        self._num_asks = self._num_found = 0
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._queue: deque[tuple[Batch, Ticket]] = deque()
        self._error: Exception | None = None
        self._closed = self._is_at_rest = False
        quota = math.ceil(max(1, batches_ahead) / len(connect))
        self._lines = [_ReaderQueue(number, self._lock, quota) for number in range(len(connect))]
        self._threads = [
            threading.Thread(target=self._run, args=(line, make), name=f"feed-{line.number}", daemon=True)
            for line, make in zip(self._lines, connect, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def more(self) -> bool:
        """Wait for a batch; false once all batches of all readers are done, whoever trained on them, or nobody should wait."""
        with self._lock:
            self._wait_for(lambda: all(line.is_over for line in self._lines))
            return bool(self._queue)

    def __iter__(self) -> Iterator[tuple[Batch, Ticket]]:
        return self

    def __next__(self) -> tuple[Batch, Ticket]:
        """The next batch; ends when no reader has anything to hand out at present."""
        with self._lock:
            found = bool(self._queue)
            if not found:
                self._wait_for(lambda: all(line.is_idle for line in self._lines))
                if not self._queue:
                    raise StopIteration
            batch, ticket = self._queue.popleft()
            self._num_asks += 1
            self._num_found += found
            self.num_batches += 1
            self.num_samples += ticket.num_samples
            self._lines[ticket.reader].give(ticket.number)
            return batch, ticket

    def done(self, ticket: Ticket) -> None:
        """Say that a batch was trained on, so that nobody need do it again."""
        with self._lock:
            self._lines[ticket.reader].finish(ticket.number)

    def close(self, *, is_at_rest: bool = False) -> None:
        """Tell the readers what is done, and give back what is not; harmless when closed.

        `is_at_rest`: no batch is being trained on, so that those taken and not done were not trained on either.
        """
        with self._lock:
            self._closed, self._is_at_rest = True, is_at_rest
            self._arrived.notify_all()
            for line in self._lines:
                line.wake.notify()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> RemoteBatches:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def is_over(self) -> bool:
        """Whether all batches of all readers are done, whoever trained on them; else somebody was asked to stop."""
        return all(line.is_over for line in self._lines)

    @property
    def nonempty_share(self) -> float | None:
        """Share of the batches that were there when they were asked for; absent before the first."""
        return self._num_found / self._num_asks if self._num_asks else None

    @property
    def num_epochs_done(self) -> int:
        """Epochs of which every batch is done, of all readers and by all trainers, as far as is known here."""
        return min(line.num_epochs_done for line in self._lines)

    def figures(self) -> dict[str, float]:
        """What it has come to so far, for the records of a role."""
        figures: dict[str, float] = {
            "num_batches": self.num_batches,
            "num_samples": self.num_samples,
            "queue_depth": len(self._queue),
            "waiting_s": self.waited_s,
            "num_bytes_received": sum(line.num_bytes_received for line in self._lines),
            "num_sent_again": sum(line.num_sent_again for line in self._lines),
            "num_readers_lost": sum(line.num_lost for line in self._lines),
        }
        return figures if self.nonempty_share is None else {**figures, "nonempty_share": self.nonempty_share}

    def _wait_for(self, nothing_comes: Callable[[], bool]) -> None:
        """Wait until there is a batch, or nothing comes; raises the error that came instead."""
        start_s = time.perf_counter()
        while not (self._queue or self._error is not None or self._closed or nothing_comes() or self._until()):
            self._arrived.wait(_LOOK_EVERY_S)  # not for ever: what `until` looks at wakes nobody here
        self.waited_s += time.perf_counter() - start_s
        if self._error is not None and not self._queue:
            raise self._error

    def _run(self, line: _ReaderQueue, connect: Callable[[], Client]) -> None:
        """Ask one reader for batches until it has no more."""
        try:
            with connect() as client:
                self._ask_on(line, client)
        except Exception as error:  # noqa: BLE001, RUF100 - whatever it is, the trainer has to see it
            with self._lock:
                self._error = self._error or error
                self._arrived.notify_all()
                for other in self._lines:
                    other.wake.notify()

    def _ask_on(self, line: _ReaderQueue, client: Client) -> None:
        num_refusals = 0
        while True:
            with self._lock:
                line.wake.wait_for(lambda: self._closed or self._error is not None or line.should_ask)
                if self._error is not None:  # after what is here comes the error
                    return
                facts, told = line.request(leaves=self._closed, is_at_rest=self._is_at_rest)
            facts |= {"name": self.name, "incarnation": self._incarnation}
            try:
                answer = client.call("ask", facts, deadline_s=_LEAVE_S if facts["leaves"] else _ASK_S)
            except (ServerUnavailable, RefusedError) as error:
                num_refusals = num_refusals + 1 if isinstance(error, RefusedError) else 0
                line.num_lost += isinstance(error, ServerUnavailable)
                if facts["leaves"]:
                    return
                if num_refusals == _REFUSALS:
                    raise
                continue
            num_refusals = 0
            line.num_bytes_received, line.num_sent_again = client.num_bytes_received, client.num_sent_again
            batches = self._batches(line, answer)
            with self._lock:
                line.take(answer, told, batches)
                self._queue.extend(batches)
                self._arrived.notify_all()
                if facts["leaves"] or line.state == "ended":
                    return

    def _batches(self, line: _ReaderQueue, answer: Message) -> list[tuple[Batch, Ticket]]:
        """What an answer brings; raises what the reader has to say where it brings nothing more."""
        facts = answer.facts
        if facts["state"] == "failed":
            raise DataError(f"reader {line.number}: {facts.get('error', 'it has failed')}")
        if facts["state"] == "replaced":
            raise RowsteadError(f"`{self.name}` was started again since: the one before it gets no more batches")
        tensors = deque(answer.tensors)
        batches: list[tuple[Batch, Ticket]] = []
        for one in facts.get("batches", ()):
            if len(tensors) < one["tensors"]:
                raise WireError(f"reader {line.number} has sent {len(facts['batches'])} batches with too few tensors")
            own = [tensors.popleft() for _ in range(one["tensors"])]
            batch = unpack(one, own, layout=self._layout, ids=self._ids)
            step = one["number"] * len(self._lines) + line.number
            ticket = Ticket(line.number, one["number"], one["epoch"], batch.num_samples, step)
            batches.append((batch, ticket))
        return batches


class _ReaderQueue:
    """What the feed knows of one reader; under its lock."""

    def __init__(self, number: int, lock: threading.Lock, quota: int) -> None:
        self.number = number
        self.wake = threading.Condition(lock)
        self.state = "reading"
        """As the reader said last."""
        self.num_epochs_done = 0
        self.num_lost = 0
        """Times that it did not answer."""
        self.num_bytes_received = self.num_sent_again = 0
        self._quota = quota
        self._queued: set[int] = set()
        """Numbers of batches that came and were not given out yet."""
        self._given: set[int] = set()
        self._done: list[int] = []
        """That the reader may not have heard of."""
        self._turn = 0

    @property
    def is_over(self) -> bool:
        """Whether nothing will come any more."""
        return self.state in _OVER

    @property
    def is_idle(self) -> bool:
        """Whether nothing will come for now."""
        return self.is_over or self.state == "drained"

    @property
    def should_ask(self) -> bool:
        """Half of the places are free; at the end of the log, something is done that can be told, or nothing is left to do."""
        if self.state == "stopped":
            return False
        if self.state == "drained":
            return bool(self._done) or not (self._queued or self._given)
        return 2 * len(self._queued) <= self._quota

    def give(self, number: int) -> None:
        self._queued.discard(number)
        self._given.add(number)
        self._wake()

    def finish(self, number: int) -> None:
        if number in self._given:  # once is enough
            self._given.remove(number)
            self._done.append(number)
            self._wake()

    def _wake(self) -> None:
        if self.should_ask:
            self.wake.notify()

    def request(self, *, leaves: bool, is_at_rest: bool = False) -> tuple[dict[str, Any], list[int]]:
        """The facts of the next request, and what it says is done."""
        self._turn += 1
        told = list(self._done)
        # Who leaves gives back what nobody has trained on: what it says that it has goes out again as perhaps repeated.
        have = (set() if is_at_rest else self._given) if leaves else self._given | self._queued
        want = 0 if leaves else max(0, self._quota - len(self._queued))
        facts = {"turn": self._turn, "want": want, "have": sorted(have), "done": told, "knows": self.state, "leaves": leaves}
        return facts, told

    def take(self, answer: Message, told: list[int], batches: Sequence[tuple[Batch, Ticket]]) -> None:
        """The reader has heard what was told, and sent these batches."""
        del self._done[: len(told)]
        self.state = str(answer.facts["state"])
        self.num_epochs_done = int(answer.facts.get("num_epochs_done", self.num_epochs_done))
        self._queued.update(ticket.number for _, ticket in batches)
