"""`RemoteBatches`: the batches of one trainer, requested ahead of time from all readers."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rowstead.data.batch import Batch
from rowstead.fleet.packing import unpack
from rowstead.fleet.rpc_client import Client, RefusedError, ServerUnavailable
from rowstead.fleet.wire import Message, WireError
from rowstead.kernels.layout import Layout
from rowstead.spec.errors import DataError, RowsteadError

_REQUEST_TIMEOUT_S = 5.0
"""After this long without a reply a request is abandoned and sent again: the reader may have been restarted."""
_LEAVE_TIMEOUT_S = 2.0
_MAX_REFUSALS = 3
"""Consecutive refusals after which the trainer gives up."""
_CHECK_EVERY_S = 0.1
"""How often a waiting thread checks `until`."""


@dataclass(frozen=True)
class Ticket:
    """Identifies a batch; acknowledge it after training on it."""

    reader: int
    number: int
    """Number among the batches of its reader, across epochs."""
    epoch: int
    num_samples: int
    step: int
    """Index of the batch in the run, from 0, taking batches from the readers round-robin."""


class RemoteBatches:
    """Batches for all threads of one trainer, about `batches_ahead` of them prefetched. Thread-safe.

    A thread per reader requests batches, with its own client, and acknowledges those that are done. The batches of one reader
    arrive in its order; those of several as they come. With one reader and one trainer this is the order of a single process.

        while batches.more():
            for batch, ticket in batches:
                ...
                batches.acknowledge(ticket)

    The inner loop ends when no reader has a batch to assign. The outer loop continues if another trainer is lost and its batches
    are reassigned, and ends once all batches are done everywhere.
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
        """`connect` returns a client per reader, in the thread that will use it. `name` is the trainer's and unique.

        `incarnation` increases with each restart of the trainer; by default it is the current time. Batches that the reader has
        checked are marked as checked for `layout`. `ids` is the dtype to convert ids to; None keeps theirs. Once `until()` is
        true, no thread waits for a batch.
        """
        assert connect, "a trainer needs at least one reader"
        self.name = name
        self._until = until
        self._incarnation = time.time_ns() if incarnation is None else incarnation
        self._layout, self._ids = layout, ids
        self.waited_s = 0.0
        """Seconds that threads have waited for batches, in total."""
        self.num_batches = 0
        """Returned to the trainer so far."""
        self.num_samples = 0
        self._num_requested = self._num_found = 0
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._queue: deque[tuple[Batch, Ticket]] = deque()
        self._error: Exception | None = None
        self._closed = self._is_idle = False
        quota = math.ceil(max(1, batches_ahead) / len(connect))
        self._readers = [_ReaderQueue(number, self._lock, quota) for number in range(len(connect))]
        self._threads = [
            threading.Thread(target=self._run, args=(reader, make), name=f"batches-{reader.number}", daemon=True)
            for reader, make in zip(self._readers, connect, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def more(self) -> bool:
        """Wait for a batch; False once all batches of all readers are done, by any trainer, or `until()` is true."""
        with self._lock:
            self._wait_for(lambda: self.is_over)
            return bool(self._queue)

    def __iter__(self) -> Iterator[tuple[Batch, Ticket]]:
        return self

    def __next__(self) -> tuple[Batch, Ticket]:
        """Return the next batch; stops when no reader has a batch to assign at present."""
        with self._lock:
            found = bool(self._queue)
            if not found:
                self._wait_for(lambda: all(reader.is_idle for reader in self._readers))
                if not self._queue:
                    raise StopIteration
            batch, ticket = self._queue.popleft()
            self._num_requested += 1
            self._num_found += found
            self.num_batches += 1
            self.num_samples += ticket.num_samples
            self._readers[ticket.reader].start_batch(ticket.number)
            return batch, ticket

    def acknowledge(self, ticket: Ticket) -> None:
        """Report that a batch was trained on."""
        with self._lock:
            self._readers[ticket.reader].acknowledge(ticket.number)

    def close(self, *, is_idle: bool = False) -> None:
        """Acknowledge what is done, and release the rest; idempotent.

        `is_idle`: no batch is being trained on, so that batches taken but not acknowledged were not trained on either.
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

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_over(self) -> bool:
        """Whether all batches of all readers are done, by any trainer."""
        return all(reader.is_over for reader in self._readers)

    @property
    def nonempty_share(self) -> float | None:
        """Share of the batches that were already there when requested; None before the first."""
        return self._num_found / self._num_requested if self._num_requested else None

    def figures(self) -> dict[str, float]:
        figures: dict[str, float] = {
            "num_batches": self.num_batches,
            "num_samples": self.num_samples,
            "queue_depth": len(self._queue),
            "waiting_s": self.waited_s,
            "num_bytes_received": sum(reader.num_bytes_received for reader in self._readers),
            "num_resent": sum(reader.num_resent for reader in self._readers),
        }
        return figures if self.nonempty_share is None else {**figures, "nonempty_share": self.nonempty_share}

    def _wait_for(self, nothing_comes: Callable[[], bool]) -> None:
        """Wait until there is a batch, or none will come; raises the error of a reader."""
        start_s = time.perf_counter()
        while not (self._queue or self._error is not None or self._closed or nothing_comes() or self._until()):
            self._arrived.wait(_CHECK_EVERY_S)  # with a timeout, as `until` does not notify
        self.waited_s += time.perf_counter() - start_s
        if self._error is not None and not self._queue:
            raise self._error

    def _run(self, reader: _ReaderQueue, connect: Callable[[], Client]) -> None:
        """Request batches from one reader until it has no more."""
        try:
            with connect() as client:
                self._request_batches(reader, client)
        except Exception as error:  # noqa: BLE001, RUF100 - raised in the trainer's thread
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
                if self._error is not None:  # raised after the batches that have arrived
                    return
                facts, acknowledged = reader.request(is_leaving=self._closed, is_idle=self._is_idle)
            facts |= {"name": self.name, "incarnation": self._incarnation}
            try:
                reply = client.call(
                    "request_batches", facts, deadline_s=_LEAVE_TIMEOUT_S if facts["is_leaving"] else _REQUEST_TIMEOUT_S
                )
            except (ServerUnavailable, RefusedError) as error:
                num_refusals = num_refusals + 1 if isinstance(error, RefusedError) else 0
                if facts["is_leaving"]:
                    return
                if num_refusals == _MAX_REFUSALS:
                    raise
                continue
            num_refusals = 0
            reader.num_bytes_received, reader.num_resent = client.num_bytes_received, client.num_resent
            batches = self._batches(reader, reply)
            with self._lock:
                reader.receive(reply, acknowledged, batches)
                self._queue.extend(batches)
                self._arrived.notify_all()
                if facts["is_leaving"] or reader.state == "ended":
                    return

    def _batches(self, reader: _ReaderQueue, reply: Message) -> list[tuple[Batch, Ticket]]:
        """Unpack the batches of a reply; raises the reader's error if it has failed."""
        facts = reply.facts
        if facts["state"] == "failed":
            raise DataError(f"reader {reader.number}: {facts.get('error', 'it has failed')}")
        if facts["state"] == "replaced":
            raise RowsteadError(f"`{self.name}` was restarted; this older process gets no more batches")
        tensors = deque(reply.tensors)
        batches: list[tuple[Batch, Ticket]] = []
        for packed in facts.get("batches", ()):
            if len(tensors) < packed["tensors"]:
                raise WireError(f"reader {reader.number} sent {len(facts['batches'])} batches with too few tensors")
            own = [tensors.popleft() for _ in range(packed["tensors"])]
            batch = unpack(packed, own, layout=self._layout, ids=self._ids)
            step = packed["number"] * len(self._readers) + reader.number
            ticket = Ticket(reader.number, packed["number"], packed["epoch"], batch.num_samples, step)
            batches.append((batch, ticket))
        return batches


class _ReaderQueue:
    """The state of one reader as known here; protected by the lock of `RemoteBatches`."""

    def __init__(self, number: int, lock: threading.Lock, quota: int) -> None:
        self.number = number
        self.wake = threading.Condition(lock)
        self.state = "reading"
        """State in the reader's last reply."""
        self.num_bytes_received = self.num_resent = 0
        self._quota = quota
        self._queued: set[int] = set()
        """Numbers of batches that have arrived and wait for a thread."""
        self._in_training: set[int] = set()
        self._acknowledged: list[int] = []
        """Done, but not yet reported to the reader."""
        self._sequence = 0

    @property
    def is_over(self) -> bool:
        """Whether no batch will come any more."""
        return self.state == "ended"

    @property
    def is_idle(self) -> bool:
        return self.is_over or self.state == "drained"

    @property
    def should_request(self) -> bool:
        """Whether half of the quota is free; at the end of the log, whether there is something to report or nothing left to do."""
        if self.state == "drained":
            return bool(self._acknowledged) or not (self._queued or self._in_training)
        return 2 * len(self._queued) <= self._quota

    def start_batch(self, number: int) -> None:
        self._queued.discard(number)
        self._in_training.add(number)
        self._wake()

    def acknowledge(self, number: int) -> None:
        if number in self._in_training:  # only once
            self._in_training.remove(number)
            self._acknowledged.append(number)
            self._wake()

    def _wake(self) -> None:
        if self.should_request:
            self.wake.notify()

    def request(self, *, is_leaving: bool, is_idle: bool = False) -> tuple[dict[str, Any], list[int]]:
        """Return the facts of the next request, and the batches that it reports as done."""
        self._sequence += 1
        acknowledged = list(self._acknowledged)
        # A leaving trainer releases untrained batches; those it still reports as held may be counted as repeated.
        held = (set() if is_idle else self._in_training) if is_leaving else self._in_training | self._queued
        facts = {
            "sequence": self._sequence,
            "num_wanted": 0 if is_leaving else max(0, self._quota - len(self._queued)),
            "held": sorted(held),
            "done": acknowledged,
            "last_state": self.state,
            "is_leaving": is_leaving,
        }
        return facts, acknowledged

    def receive(self, reply: Message, acknowledged: list[int], batches: Sequence[tuple[Batch, Ticket]]) -> None:
        """Process the reply to a request that reported `acknowledged`, with these batches."""
        del self._acknowledged[: len(acknowledged)]
        self.state = str(reply.facts["state"])
        self._queued.update(ticket.number for _, ticket in batches)
