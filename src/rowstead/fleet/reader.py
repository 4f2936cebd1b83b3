"""`Reader`: reads one share of a log ahead of the trainers, and hands out its batches so that each is trained on.

Batches that were handed out are not kept: the book (`handouts.py`) knows where each begins, and one that is needed again is read
again. No sockets here: `reader_server.py` puts a reader behind one.
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
from rowstead.fleet.log_share import EpochEnd, LogPosition, LogShare, NewBatch
from rowstead.fleet.packing import PackedBatch
from rowstead.fleet.wire import Message, WireError
from rowstead.spec.errors import RowsteadError

State = Literal["reading", "drained", "ended", "failed", "stopped", "replaced"]
"""How a reader stands: more is to come; all is handed out, but not all of it done; all is done; an error came where the next
batch would have come; it was told to stop; and, to a trainer that was started again since, that it is no longer served."""

READ_AHEAD_BYTES = 64 << 20
WAIT_S = 0.25
"""How long a request waits for news before it is answered with nothing, so that its sender can tell what is done meanwhile."""
_REPLY_BYTES = 8 << 20
"""Past it no further batch goes into an answer."""
_REPLY_BATCHES = 16
_log = logging.getLogger("rowstead.fleet")


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """What a trainer asks and tells at once."""

    holder: Holder
    sequence: int
    """Counts the requests of one life of a trainer."""
    num_wanted: int
    """Batches that it has room for."""
    held: tuple[int, ...]
    """Numbers of batches that it has and is not done with."""
    done: tuple[int, ...]
    last_state: str
    """The state that it was told last: it waits for another, or for a batch."""
    is_leaving: bool = False
    """It asks for no more."""

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> BatchRequest:
        """From the facts of a message."""
        try:
            numbers = {key: tuple(map(int, facts.get(key, ()))) for key in ("held", "done")}
            holder = Holder(str(facts["name"]), int(facts["incarnation"]))
            sequence, num_wanted, last_state = (
                int(facts["sequence"]),
                int(facts["num_wanted"]),
                str(facts.get("last_state", "reading")),
            )
            return cls(
                holder=holder,
                sequence=sequence,
                num_wanted=num_wanted,
                last_state=last_state,
                is_leaving=bool(facts.get("is_leaving")),
                **numbers,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"this is no request for batches: {error!r}") from None


Reply = Callable[[Message], None]


class Reader:
    """Reads a share of a log in its order, and answers requests for batches.

    One thread reads, another answers requests that had to wait; any thread may call the methods. Batches of at most about
    `read_ahead_bytes` are ready, as many again to be repeated, beside what the source itself holds.
    """

    def __init__(self, share: LogShare, progress: Path, *, read_ahead_bytes: int = READ_AHEAD_BYTES) -> None:
        """`progress` is the file of its book: where there is one, reading goes on from it."""
        self._share, self._read_ahead_bytes = share, read_ahead_bytes
        self._log_file = AssignmentLog(progress, share.identity)
        self._assignments = self._log_file.assignments
        self._lock = threading.RLock()
        self._space = threading.Condition(self._lock)
        """Told when something was handed out, or is to be read again."""
        self._wake_waiting = threading.Condition(self._lock)
        """Told when requests that wait may be answered."""
        self._ready: deque[NewBatch | EpochEnd] = deque()
        self._ready_bytes = 0
        self._reread: dict[int, PackedBatch] = {}
        """Batches that are to be handed out again, read again."""
        self._waiting: deque[tuple[BatchRequest, Reply, float]] = deque()
        self._read_all = False
        self._skipped_here = 0
        self._error: str | None = None
        self._stopped = self._closed = self._is_broken = False
        self.waited_for_space_s = 0.0
        """Seconds that reading has waited for room."""
        work = (("read", self._read), ("answer", self._answer_waiting))
        self._threads = [threading.Thread(target=target, name=f"reader-{name}", daemon=True) for name, target in work]
        for thread in self._threads:
            thread.start()

    def request_batches(self, request: BatchRequest, reply: Reply) -> Message | None:
        """The answer to a trainer; none where it comes later, through `reply`."""
        with self._lock:
            if self._assignments.is_replaced(request.holder):
                return _build_reply("replaced")
            if not self._assignments.acknowledge(request.holder, request.sequence, request.held, request.done):
                return self._reply_with([], [])
            if request.is_leaving:
                self._assignments.leave(request.holder)
            # Its sender has given up an earlier request that still waits: no batch must go there.
            given_up = [item for item in self._waiting if item[0].holder.name == request.holder.name]
            for item in given_up:
                self._waiting.remove(item)
                item[1](self._reply_with([], []))
            answer = self._try_reply(request)
            if answer is None:
                self._waiting.append((request, reply, time.monotonic() + WAIT_S))
            self._flush()
            self._notify()
            return answer

    def set_alive(self, names: list[str]) -> None:
        """The trainers that live; what others hold goes to whoever asks next."""
        with self._lock:
            self._assignments.set_alive(names)
            self._flush()
            self._notify()

    def stop(self) -> None:
        """Hand out no more, and say so to all."""
        with self._lock:
            self._stopped = True
            self._notify()

    def close(self) -> None:
        """End the threads; harmless when closed."""
        with self._lock:
            self._closed = True
            self._space.notify_all()
            self._wake_waiting.notify_all()
        for thread in self._threads:
            thread.join()
        self._log_file.close()

    @property
    def state(self) -> State:
        with self._lock:
            return self._state()

    def status(self) -> dict[str, Any]:
        """Where it stands; all counts go on through restarts."""
        with self._lock:
            assignments = self._assignments
            facts: dict[str, Any] = {
                "state": self._state(),
                "epoch": assignments.next_epoch,
                "num_epochs_done": assignments.num_epochs_done,
                "num_batches": assignments.next_number,
                "num_samples": assignments.num_samples,
                "num_done": assignments.num_done,
                "num_held": assignments.num_held,
                "held_by": assignments.held_by,
                "num_to_repeat": len(assignments.to_reassign),
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

    # Under the lock

    def _notify(self) -> None:
        """Wake whoever may have something to do now."""
        self._space.notify_all()
        if self._waiting:
            self._wake_waiting.notify_all()

    def _flush(self) -> None:
        """Keep what was handed out, before anybody gets it."""
        try:
            self._log_file.flush()
        except RowsteadError as error:
            self._error, self._is_broken = str(error), True
            raise

    @property
    def _reread_bytes(self) -> int:
        return sum(packed.num_bytes for packed in self._reread.values())

    def _state(self) -> State:
        if self._stopped:
            return "stopped"
        self._end_epochs()
        if self._error is not None and (self._is_broken or not self._ready):
            return "failed"
        if self._ready:
            return "reading"
        if not self._read_all or self._assignments.to_reassign:
            return "reading"
        return "ended" if self._assignments.is_complete else "drained"

    def _try_reply(self, request: BatchRequest, *, now: bool = False) -> Message | None:
        """Batches, or a state that the trainer does not know yet; none where there is neither, unless it has to be `now`."""
        numbers: list[tuple[int, int]] = []
        packed: list[PackedBatch] = []
        num_bytes = 0
        while len(packed) < min(request.num_wanted, _REPLY_BATCHES) and num_bytes < _REPLY_BYTES:
            taken = None if self._stopped or self._is_broken else self._assign_one(request.holder)
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
        """Hand out one batch: what is wanted again comes first."""
        to_reassign = self._assignments.to_reassign
        for number in [number for number in self._reread if number not in to_reassign]:  # done after all
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
        """Put the ends of epochs that are due into the book."""
        while self._ready and isinstance(self._ready[0], EpochEnd):
            end = self._ready.popleft()
            assert isinstance(end, EpochEnd)
            self._assignments.end_epoch(end.num_rows)
            self._skipped_here = 0

    def _reply_with(self, numbers: list[tuple[int, int]], packed: list[PackedBatch]) -> Message:
        batches = [{"number": n, "epoch": e, **p.facts} for (n, e), p in zip(numbers, packed, strict=True)]
        # An error comes where the next batch would have come.
        state = "reading" if packed and self._state() == "failed" else self._state()
        return _build_reply(
            state,
            error=self._error,
            num_epochs_done=self._assignments.num_epochs_done,
            batches=batches,
            tensors=[tensor for one in packed for tensor in one.tensors],
        )

    # The two threads

    def _answer_waiting(self) -> None:
        """Answer requests that wait, as soon as there is something to answer."""
        with self._lock:
            while not self._closed:
                now_s = time.monotonic()
                answers: list[tuple[Reply, Message]] = []
                still: deque[tuple[BatchRequest, Reply, float]] = deque()
                for request, reply, until_s in self._waiting:
                    answer = self._try_reply(request, now=now_s >= until_s)
                    if answer is None:
                        still.append((request, reply, until_s))
                    else:
                        answers.append((reply, answer))
                self._waiting = still
                try:
                    self._flush()
                except RowsteadError as error:
                    answers = [(reply, _build_reply("failed", error=str(error))) for reply, _ in answers]
                for reply, answer in answers:
                    reply(answer)
                if answers:
                    self._space.notify_all()
                self._wake_waiting.wait(min(until_s for _, _, until_s in still) - now_s if still else None)

    def _read(self) -> None:
        try:
            with contextlib.closing(self._share.read_from(self._position())) as items:
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
        except Exception as error:  # noqa: BLE001, RUF100 - whatever it is, the trainers and the head have to hear of it
            if not isinstance(error, RowsteadError):
                _log.exception("reading failed")
            with self._lock:
                self._error = str(error) if isinstance(error, RowsteadError) else f"{type(error).__name__}: {error}"
                self._notify()

    def _wait_for_space(self, *, at_end: bool = False) -> bool:
        """Wait until one more batch may be ready; reads meanwhile what is to be handed out again. False when closed."""
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
        """What is to be read again, where there is room for it."""
        if self._reread_bytes >= self._read_ahead_bytes:
            return {}
        return {number: entry for number, entry in self._assignments.to_reassign.items() if number not in self._reread}

    def _reread_batches(self, wanted: dict[int, AssignedBatch]) -> None:
        """Read batches again, as many as there is room for."""
        with contextlib.closing(self._share.reread(wanted)) as batches:
            for number, packed in batches:
                with self._lock:
                    if number in self._assignments.to_reassign:
                        self._reread[number] = packed
                        self._notify()
                    if self._closed or self._reread_bytes >= self._read_ahead_bytes:
                        return

    def _position(self) -> LogPosition:
        """Where the batch begins that was never handed out and comes next."""
        with self._lock:
            return LogPosition(
                number=self._assignments.next_number, epoch=self._assignments.next_epoch, cursor=self._assignments.next_cursor
            )


def _build_reply(state: State, *, error: str | None = None, tensors: list[Any] | None = None, **facts: Any) -> Message:
    told = {"state": state, **facts}
    return Message("batches", told if error is None else {**told, "error": error}, tensors or [])
