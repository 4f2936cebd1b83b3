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

_REQUEST_TIMEOUT_S = 5.0
"""After so long without an answer a request is given up and asked anew: the reader may be another by then."""
_LEAVE_TIMEOUT_S = 2.0
_MAX_REFUSALS = 3
"""In a row, after which there is no use in asking."""
_FINAL_STATES = ("ended", "stopped")
_CHECK_EVERY_S = 0.1
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
                feed.acknowledge(ticket)

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
        self._closed = self._is_idle = False
        quota = math.ceil(max(1, batches_ahead) / len(connect))
        self._readers = [_ReaderQueue(number, self._lock, quota) for number in range(len(connect))]
        self._threads = [
            threading.Thread(target=self._run, args=(reader, make), name=f"feed-{reader.number}", daemon=True)
            for reader, make in zip(self._readers, connect, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def more(self) -> bool:
        """Wait for a batch; false once all batches of all readers are done, whoever trained on them, or nobody should wait."""
        with self._lock:
            self._wait_for(lambda: all(reader.is_over for reader in self._readers))
            return bool(self._queue)

    def __iter__(self) -> Iterator[tuple[Batch, Ticket]]:
        return self

    def __next__(self) -> tuple[Batch, Ticket]:
        """The next batch; ends when no reader has anything to hand out at present."""
        with self._lock:
            found = bool(self._queue)
            if not found:
                self._wait_for(lambda: all(reader.is_idle for reader in self._readers))
                if not self._queue:
                    raise StopIteration
            batch, ticket = self._queue.popleft()
            self._num_asks += 1
            self._num_found += found
            self.num_batches += 1
            self.num_samples += ticket.num_samples
            self._readers[ticket.reader].start_batch(ticket.number)
            return batch, ticket

    def acknowledge(self, ticket: Ticket) -> None:
        """Say that a batch was trained on, so that nobody need do it again."""
        with self._lock:
            self._readers[ticket.reader].acknowledge(ticket.number)

    def close(self, *, is_idle: bool = False) -> None:
        """Tell the readers what is done, and give back what is not; harmless when closed.

        `is_idle`: no batch is being trained on, so that those taken and not done were not trained on either.
        """
        with self._lock:
            self._closed, self._is_idle = True, is_idle
            self._arrived.notify_all()
            for reader in self._readers:
                reader.wake.notify()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> RemoteBatches:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def is_over(self) -> bool:
        """Whether all batches of all readers are done, whoever trained on them; else somebody was asked to stop."""
        return all(reader.is_over for reader in self._readers)

    @property
    def nonempty_share(self) -> float | None:
        """Share of the batches that were there when they were asked for; absent before the first."""
        return self._num_found / self._num_asks if self._num_asks else None

    @property
    def num_epochs_done(self) -> int:
        """Epochs of which every batch is done, of all readers and by all trainers, as far as is known here."""
        return min(reader.num_epochs_done for reader in self._readers)

    def figures(self) -> dict[str, float]:
        """What it has come to so far, for the records of a role."""
        figures: dict[str, float] = {
            "num_batches": self.num_batches,
            "num_samples": self.num_samples,
            "queue_depth": len(self._queue),
            "waiting_s": self.waited_s,
            "num_bytes_received": sum(reader.num_bytes_received for reader in self._readers),
            "num_resent": sum(reader.num_resent for reader in self._readers),
            "num_readers_lost": sum(reader.num_lost for reader in self._readers),
        }
        return figures if self.nonempty_share is None else {**figures, "nonempty_share": self.nonempty_share}

    def _wait_for(self, nothing_comes: Callable[[], bool]) -> None:
        """Wait until there is a batch, or nothing comes; raises the error that came instead."""
        start_s = time.perf_counter()
        while not (self._queue or self._error is not None or self._closed or nothing_comes() or self._until()):
            self._arrived.wait(_CHECK_EVERY_S)  # not for ever: what `until` looks at wakes nobody here
        self.waited_s += time.perf_counter() - start_s
        if self._error is not None and not self._queue:
            raise self._error

    def _run(self, reader: _ReaderQueue, connect: Callable[[], Client]) -> None:
        """Ask one reader for batches until it has no more."""
        try:
            with connect() as client:
                self._request_batches(reader, client)
        except Exception as error:  # noqa: BLE001, RUF100 - whatever it is, the trainer has to see it
            with self._lock:
                self._error = self._error or error
                self._arrived.notify_all()
                for other in self._readers:
                    other.wake.notify()

    def _request_batches(self, reader: _ReaderQueue, client: Client) -> None:
        num_refusals = 0
        while True:
            with self._lock:
                reader.wake.wait_for(lambda: self._closed or self._error is not None or reader.should_request)
                if self._error is not None:  # after what is here comes the error
                    return
                facts, acknowledged = reader.request(is_leaving=self._closed, is_idle=self._is_idle)
            facts |= {"name": self.name, "incarnation": self._incarnation}
            try:
                answer = client.call(
                    "request_batches", facts, deadline_s=_LEAVE_TIMEOUT_S if facts["is_leaving"] else _REQUEST_TIMEOUT_S
                )
            except (ServerUnavailable, RefusedError) as error:
                num_refusals = num_refusals + 1 if isinstance(error, RefusedError) else 0
                reader.num_lost += isinstance(error, ServerUnavailable)
                if facts["is_leaving"]:
                    return
                if num_refusals == _MAX_REFUSALS:
                    raise
                continue
            num_refusals = 0
            reader.num_bytes_received, reader.num_resent = client.num_bytes_received, client.num_resent
            batches = self._batches(reader, answer)
            with self._lock:
                reader.receive(answer, acknowledged, batches)
                self._queue.extend(batches)
                self._arrived.notify_all()
                if facts["is_leaving"] or reader.state == "ended":
                    return

    def _batches(self, reader: _ReaderQueue, answer: Message) -> list[tuple[Batch, Ticket]]:
        """What an answer brings; raises what the reader has to say where it brings nothing more."""
        facts = answer.facts
        if facts["state"] == "failed":
            raise DataError(f"reader {reader.number}: {facts.get('error', 'it has failed')}")
        if facts["state"] == "replaced":
            raise RowsteadError(f"`{self.name}` was started again since: the one before it gets no more batches")
        tensors = deque(answer.tensors)
        batches: list[tuple[Batch, Ticket]] = []
        for packed in facts.get("batches", ()):
            if len(tensors) < packed["tensors"]:
                raise WireError(f"reader {reader.number} has sent {len(facts['batches'])} batches with too few tensors")
            own = [tensors.popleft() for _ in range(packed["tensors"])]
            batch = unpack(packed, own, layout=self._layout, ids=self._ids)
            step = packed["number"] * len(self._readers) + reader.number
            ticket = Ticket(reader.number, packed["number"], packed["epoch"], batch.num_samples, step)
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
        self.num_bytes_received = self.num_resent = 0
        self._quota = quota
        self._queued: set[int] = set()
        """Numbers of batches that came and were not given out yet."""
        self._in_training: set[int] = set()
        self._acknowledged: list[int] = []
        """That the reader may not have heard of."""
        self._sequence = 0

    @property
    def is_over(self) -> bool:
        """Whether nothing will come any more."""
        return self.state in _FINAL_STATES

    @property
    def is_idle(self) -> bool:
        """Whether nothing will come for now."""
        return self.is_over or self.state == "drained"

    @property
    def should_request(self) -> bool:
        """Half of the places are free; at the end of the log, something is done that can be told, or nothing is left to do."""
        if self.state == "stopped":
            return False
        if self.state == "drained":
            return bool(self._acknowledged) or not (self._queued or self._in_training)
        return 2 * len(self._queued) <= self._quota

    def start_batch(self, number: int) -> None:
        self._queued.discard(number)
        self._in_training.add(number)
        self._wake()

    def acknowledge(self, number: int) -> None:
        if number in self._in_training:  # once is enough
            self._in_training.remove(number)
            self._acknowledged.append(number)
            self._wake()

    def _wake(self) -> None:
        if self.should_request:
            self.wake.notify()

    def request(self, *, is_leaving: bool, is_idle: bool = False) -> tuple[dict[str, Any], list[int]]:
        """The facts of the next request, and what it says is done."""
        self._sequence += 1
        acknowledged = list(self._acknowledged)
        # Who leaves gives back what nobody has trained on: what it says that it has goes out again as perhaps repeated.
        held = (set() if is_idle else self._in_training) if is_leaving else self._in_training | self._queued
        num_wanted = 0 if is_leaving else max(0, self._quota - len(self._queued))
        facts = {
            "sequence": self._sequence,
            "num_wanted": num_wanted,
            "held": sorted(held),
            "done": acknowledged,
            "last_state": self.state,
            "is_leaving": is_leaving,
        }
        return facts, acknowledged

    def receive(self, answer: Message, acknowledged: list[int], batches: Sequence[tuple[Batch, Ticket]]) -> None:
        """The reader has heard what was told, and sent these batches."""
        del self._acknowledged[: len(acknowledged)]
        self.state = str(answer.facts["state"])
        self.num_epochs_done = int(answer.facts.get("num_epochs_done", self.num_epochs_done))
        self._queued.update(ticket.number for _, ticket in batches)
