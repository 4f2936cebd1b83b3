"""`Reader`: reads one share of a log ahead of the trainers, and assigns its batches so that each is trained on.

Assigned batches are not kept: `BatchAssignments` knows where each begins, and a batch that is needed again is reread. No sockets
here: `reader_server.py` serves a reader over RPC.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rowstead.fleet.batch_assignments import AssignedBatch, AssignmentLog, Holder
from rowstead.fleet.log_share import EpochEnd, LogShare, NewBatch
from rowstead.fleet.packing import PackedBatch
from rowstead.fleet.wire import Message, WireError
from rowstead.records.plain_files import is_count
from rowstead.spec.errors import RowsteadError

State = Literal["reading", "drained", "ended", "failed", "replaced"]
"""State of a reader: batches remain; all are assigned but not all done; all are done; an error occurred in place of the next
batch; and, in replies to a trainer that was restarted since, that only its successor is served."""

READ_AHEAD_BYTES = 64 << 20
WAIT_S = 0.25
"""How long a request without batches waits before an empty reply, so that its sender can acknowledge what is done."""
_REPLY_BYTES = 8 << 20
"""Above it no further batch is added to a reply."""
_REPLY_BATCHES = 16
_log = logging.getLogger("rowstead.fleet")


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """A trainer's request for batches, with what it holds and has done."""

    holder: Holder
    sequence: int
    """Counts the requests of one incarnation of a trainer."""
    num_wanted: int
    """Batches that it has capacity for."""
    held: tuple[int, ...]
    """Numbers of the batches that it has and is not done with."""
    done: tuple[int, ...]
    last_state: str
    """The last state it received: it waits for another state, or for a batch."""
    is_leaving: bool = False
    """Whether it wants no more batches."""

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> BatchRequest:
        """Parse the facts of a message."""
        try:
            name, last_state = facts["name"], facts.get("last_state", "reading")
            if not isinstance(name, str) or not isinstance(last_state, str):
                raise ValueError("a name is not a text")
            return cls(
                holder=Holder(name, _read_count(facts["incarnation"])),
                sequence=_read_count(facts["sequence"]),
                num_wanted=_read_count(facts["num_wanted"]),
                held=tuple(map(_read_count, facts.get("held", ()))),
                done=tuple(map(_read_count, facts.get("done", ()))),
                last_state=last_state,
                is_leaving=bool(facts.get("is_leaving")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"not a request for batches: {error!r}") from None


def _read_count(value: Any) -> int:
    if not is_count(value):
        raise ValueError(f"expected a count, got {str(value)[:40]}")
    return int(value)


SendReply = Callable[[Message], None]


class Reader:
    """Reads a share of a log in order, and answers requests for batches.

    One thread reads, another answers requests that had to wait; methods are thread-safe. At most about `read_ahead_bytes` of
    batches are ready, and as many again to be reassigned, besides what the source itself holds.
    """

    def __init__(self, share: LogShare, progress: Path, *, read_ahead_bytes: int = READ_AHEAD_BYTES) -> None:
        """`progress` is the file of its assignment log; reading resumes from an existing one."""
        self._share, self._read_ahead_bytes = share, read_ahead_bytes
        self._log_file = AssignmentLog(progress, share.identity)
        self._assignments = self._log_file.assignments
        self._lock = threading.RLock()
        self._space = threading.Condition(self._lock)
        """Notified when batches were assigned, or have to be reread."""
        self._may_reply = threading.Condition(self._lock)
        """Notified when waiting requests may be answered."""
        self._ready: deque[NewBatch | EpochEnd] = deque()
        self._ready_bytes = 0
        self._reread: dict[int, PackedBatch] = {}
        """Batches to reassign that have been reread."""
        self._waiting: deque[tuple[BatchRequest, SendReply, float]] = deque()
        self._read_all = False
        self._skipped_here = 0
        self._error: str | None = None
        self._closed = self._is_broken = False
        self.waited_for_space_s = 0.0
        """Seconds that reading was blocked because enough batches were ready."""
        work = (("read", self._read), ("answer", self._answer_waiting))
        self._threads = [threading.Thread(target=target, name=f"reader-{name}", daemon=True) for name, target in work]
        for thread in self._threads:
            thread.start()

    def request_batches(self, request: BatchRequest, send: SendReply) -> Message | None:
        """Return the reply to a trainer; None if it comes later, through `send`."""
        with self._lock:
            if self._assignments.is_replaced(request.holder):
                return _build_reply("replaced")
            if not self._assignments.acknowledge(request.holder, request.sequence, request.held, request.done):
                return self._reply_with([], [])
            if request.is_leaving:
                self._assignments.leave(request.holder)
            # The sender has given up an earlier request that still waits: assign no batch to that one.
            abandoned = [item for item in self._waiting if item[0].holder.name == request.holder.name]
            for item in abandoned:
                self._waiting.remove(item)
                item[1](self._reply_with([], []))
            reply = self._try_reply(request)
            if reply is None:
                self._waiting.append((request, send, time.monotonic() + WAIT_S))
            self._flush()
            self._notify()
            return reply

    def set_alive(self, names: list[str]) -> None:
        """Set the live trainers; batches of others are reassigned."""
        with self._lock:
            self._assignments.set_alive(names)
            self._flush()
            self._notify()

    def close(self) -> None:
        """Stop the threads; idempotent."""
        with self._lock:
            self._closed = True
            self._space.notify_all()
            self._may_reply.notify_all()
        for thread in self._threads:
            thread.join()
        self._log_file.close()

    def status(self) -> dict[str, Any]:
        """Return figures of the reader; counts continue across restarts."""
        with self._lock:
            assignments = self._assignments
            facts: dict[str, Any] = {
                "state": self._state(),
                "epoch": assignments.next_epoch,
                "num_batches": assignments.next_number,
                "num_samples": assignments.num_samples,
                "num_done": assignments.num_done,
                "num_held": assignments.num_held,
                "held_by": assignments.held_by,
                "num_batches_repeated": assignments.num_repeated,
                "num_samples_repeated": assignments.num_samples_repeated,
                "num_batches_resent": assignments.num_resent,
                "queue_depth": len(self._ready) + len(self._reread),
                "queue_bytes": self._ready_bytes + self._reread_bytes,
                "waited_for_space_s": self.waited_for_space_s,
            }
            if self._share.may_skip:
                facts["num_skipped"] = assignments.num_skipped + self._skipped_here
            return facts if self._error is None else {**facts, "error": self._error}

    # With the lock held

    def _notify(self) -> None:
        """Wake the threads that may have something to do."""
        self._space.notify_all()
        if self._waiting:
            self._may_reply.notify_all()

    def _flush(self) -> None:
        """Log assignments before they are sent."""
        try:
            self._log_file.flush()
        except RowsteadError as error:
            self._error, self._is_broken = str(error), True
            raise

    @property
    def _reread_bytes(self) -> int:
        return sum(packed.num_bytes for packed in self._reread.values())

    def _state(self) -> State:
        self._end_epochs()
        if self._error is not None and (self._is_broken or not self._ready):
            return "failed"
        if self._ready:
            return "reading"
        if not self._read_all or self._assignments.to_reassign:
            return "reading"
        return "ended" if self._assignments.is_complete else "drained"

    def _try_reply(self, request: BatchRequest, *, now: bool = False) -> Message | None:
        """Return batches, or a state that is new to the trainer; None if there is neither, unless `now`."""
        numbers: list[tuple[int, int]] = []
        packed: list[PackedBatch] = []
        num_bytes = 0
        while len(packed) < min(request.num_wanted, _REPLY_BATCHES) and num_bytes < _REPLY_BYTES:
            taken = None if self._is_broken else self._assign_one(request.holder)
            if taken is None:
                break
            number, epoch, batch = taken
            numbers.append((number, epoch))
            packed.append(batch)
            num_bytes += batch.num_bytes
        if packed or now or request.is_leaving or request.num_wanted < 1 or self._state() != request.last_state:
            return self._reply_with(numbers, packed)
        return None

    def _assign_one(self, holder: Holder) -> tuple[int, int, PackedBatch] | None:
        """Assign one batch, first one to reassign."""
        to_reassign = self._assignments.to_reassign
        for number in [number for number in self._reread if number not in to_reassign]:  # done meanwhile
            del self._reread[number]
        if self._reread:
            number = min(self._reread)
            packed = self._reread.pop(number)
            self._assignments.reassign(holder, number)
            return number, to_reassign[number].epoch, packed
        if self._assignments.first_lost is not None:
            return None
        self._end_epochs()
        if not self._ready:
            return None
        fresh = self._ready.popleft()
        assert isinstance(fresh, NewBatch)
        self._ready_bytes -= fresh.packed.num_bytes
        self._skipped_here = fresh.num_skipped
        epoch = self._assignments.next_epoch
        number = self._assignments.assign_next(holder, fresh.packed.num_samples, fresh.cursor)
        self._end_epochs()
        return number, epoch, fresh.packed

    def _end_epochs(self) -> None:
        """Record the ends of epochs that are due."""
        while self._ready and isinstance(self._ready[0], EpochEnd):
            end = self._ready.popleft()
            assert isinstance(end, EpochEnd)
            self._assignments.end_epoch(end.num_rows)
            self._skipped_here = 0

    def _reply_with(self, numbers: list[tuple[int, int]], packed: list[PackedBatch]) -> Message:
        batches = [{"number": n, "epoch": e, **p.facts} for (n, e), p in zip(numbers, packed, strict=True)]
        # An error takes the place of the next batch.
        state = "reading" if packed and self._state() == "failed" else self._state()
        return _build_reply(
            state,
            error=self._error,
            batches=batches,
            tensors=[tensor for one in packed for tensor in one.tensors],
        )

    # The two threads

    def _answer_waiting(self) -> None:
        """Answer waiting requests as soon as there is something to send."""
        with self._lock:
            while not self._closed:
                now_s = time.monotonic()
                replies: list[tuple[SendReply, Message]] = []
                still: deque[tuple[BatchRequest, SendReply, float]] = deque()
                for request, send, until_s in self._waiting:
                    reply = self._try_reply(request, now=now_s >= until_s)
                    if reply is None:
                        still.append((request, send, until_s))
                    else:
                        replies.append((send, reply))
                self._waiting = still
                try:
                    self._flush()
                except RowsteadError as error:
                    replies = [(send, _build_reply("failed", error=str(error))) for send, _ in replies]
                for send, reply in replies:
                    send(reply)
                if replies:
                    self._space.notify_all()
                self._may_reply.wait(min(until_s for _, _, until_s in still) - now_s if still else None)

    def _read(self) -> None:
        after = self._assignments  # begins with the batch that was never assigned
        try:
            with contextlib.closing(self._share.read_from(after.next_number, after.next_epoch, after.next_cursor)) as items:
                for item in items:
                    if not self._wait_for_space():
                        return
                    with self._lock:
                        self._ready.append(item)
                        self._ready_bytes += item.packed.num_bytes if isinstance(item, NewBatch) else 0
                        self._notify()
            with self._lock:
                self._read_all = True
                self._notify()
            while self._wait_for_space(at_end=True):
                pass
        except Exception as error:  # noqa: BLE001, RUF100 - reported to the trainers and the coordinator
            if not isinstance(error, RowsteadError):
                _log.exception("reading failed")
            with self._lock:
                self._error = str(error) if isinstance(error, RowsteadError) else f"{type(error).__name__}: {error}"
                self._notify()

    def _wait_for_space(self, *, at_end: bool = False) -> bool:
        """Wait until one more batch may be ready, rereading batches to reassign meanwhile. False when closed."""
        while True:
            with self._lock:
                before_s = time.monotonic()
                self._space.wait_for(lambda: self._closed or self._to_reread() or (not at_end and self._has_space()))
                self.waited_for_space_s += time.monotonic() - before_s
                if self._closed:
                    return False
                wanted = self._to_reread()
                if not wanted:
                    return True
            self._reread_batches(wanted)

    def _has_space(self) -> bool:
        return not self._ready or self._ready_bytes < self._read_ahead_bytes

    def _to_reread(self) -> dict[int, AssignedBatch]:
        """Return the batches to reread, if there is space for them."""
        if self._reread_bytes >= self._read_ahead_bytes:
            return {}
        return {number: entry for number, entry in self._assignments.to_reassign.items() if number not in self._reread}

    def _reread_batches(self, wanted: dict[int, AssignedBatch]) -> None:
        """Reread batches, as many as there is space for."""
        with contextlib.closing(self._share.reread(wanted)) as batches:
            for number, packed in batches:
                with self._lock:
                    if number in self._assignments.to_reassign:
                        self._reread[number] = packed
                        self._notify()
                    if self._closed or self._reread_bytes >= self._read_ahead_bytes:
                        return


def _build_reply(state: State, *, error: str | None = None, tensors: list[Any] | None = None, **facts: Any) -> Message:
    content = {"state": state, **facts}
    return Message("batches", content if error is None else {**content, "error": error}, tensors or [])
