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

from rowstead.fleet.assignment_log import AssignmentLog
from rowstead.fleet.batch_assignments import AssignedBatch, Holder
from rowstead.fleet.log_share import EpochEnd, Fresh, LogShare, Place
from rowstead.fleet.packing import Packed
from rowstead.fleet.wire import Message, WireError
from rowstead.spec.errors import RowsteadError

State = Literal["reading", "drained", "ended", "failed", "stopped", "replaced"]
"""How a reader stands: more is to come; all is handed out, but not all of it done; all is done; an error came where the next
batch would have come; it was told to stop; and, to a trainer that was started again since, that it is no longer served."""

READ_AHEAD_BYTES = 64 << 20
PARK_S = 0.25
"""How long a request waits for news before it is answered with nothing, so that its sender can tell what is done meanwhile."""
_ANSWER_BYTES = 8 << 20
"""Past it no further batch goes into an answer."""
_ANSWER_BATCHES = 16
_log = logging.getLogger("rowstead.fleet")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a trainer asks and tells at once."""

    holder: Holder
    turn: int
    """Counts the requests of one life of a trainer."""
    want: int
    """Batches that it has room for."""
    have: tuple[int, ...]
    """Numbers of batches that it has and is not done with."""
    done: tuple[int, ...]
    knows: str
    """The state that it was told last: it waits for another, or for a batch."""
    leaves: bool = False
    """It asks for no more."""

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Request:
        """From the facts of a message."""
        try:
            numbers = {key: tuple(map(int, facts.get(key, ()))) for key in ("have", "done")}
            holder = Holder(str(facts["name"]), int(facts["incarnation"]))
            turn, want, knows = int(facts["turn"]), int(facts["want"]), str(facts.get("knows", "reading"))
            return cls(holder=holder, turn=turn, want=want, knows=knows, leaves=bool(facts.get("leaves")), **numbers)
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
        self._progress = AssignmentLog(progress, share.identity)
        self._book = self._progress.book
        self._lock = threading.RLock()
        self._room = threading.Condition(self._lock)
        """Told when something was handed out, or is to be read again."""
        self._news = threading.Condition(self._lock)
        """Told when requests that wait may be answered."""
        self._ready: deque[Fresh | EpochEnd] = deque()
        self._ready_bytes = 0
        self._loaded: dict[int, Packed] = {}
        """Batches that are to be handed out again, read again."""
        self._parked: deque[tuple[Request, Reply, float]] = deque()
        self._read_all = False
        self._skipped_here = 0
        self._error: str | None = None
        self._stopped = self._closed = self._is_broken = False
        self.waited_for_room_s = 0.0
        """Seconds that reading has waited for room."""
        work = (("read", self._read), ("answer", self._answer_parked))
        self._threads = [threading.Thread(target=target, name=f"reader-{name}", daemon=True) for name, target in work]
        for thread in self._threads:
            thread.start()

    def ask(self, request: Request, reply: Reply) -> Message | None:
        """The answer to a trainer; none where it comes later, through `reply`."""
        with self._lock:
            if self._book.is_replaced(request.holder):
                return _told("replaced")
            if not self._book.settle(request.holder, request.turn, request.have, request.done):
                return self._answered([], [])
            if request.leaves:
                self._book.leave(request.holder)
            # Its sender has given up an earlier request that still waits: no batch must go there.
            given_up = [item for item in self._parked if item[0].holder.name == request.holder.name]
            for item in given_up:
                self._parked.remove(item)
                item[1](self._answered([], []))
            answer = self._answer(request)
            if answer is None:
                self._parked.append((request, reply, time.monotonic() + PARK_S))
            self._flush()
            self._tell()
            return answer

    def keep_only(self, names: list[str]) -> None:
        """The trainers that live; what others hold goes to whoever asks next."""
        with self._lock:
            self._book.keep_only(names)
            self._flush()
            self._tell()

    def stop(self) -> None:
        """Hand out no more, and say so to all."""
        with self._lock:
            self._stopped = True
            self._tell()

    def close(self) -> None:
        """End the threads; harmless when closed."""
        with self._lock:
            self._closed = True
            self._room.notify_all()
            self._news.notify_all()
        for thread in self._threads:
            thread.join()
        self._progress.close()

    @property
    def state(self) -> State:
        with self._lock:
            return self._state()

    def status(self) -> dict[str, Any]:
        """Where it stands; all counts go on through restarts."""
        with self._lock:
            book = self._book
            facts: dict[str, Any] = {
                "state": self._state(),
                "epoch": book.next_epoch,
                "num_epochs_done": book.num_epochs_done,
                "num_batches": book.next_number,
                "num_samples": book.num_samples,
                "num_done": book.num_done,
                "num_held": book.num_held,
                "held_by": book.held_by,
                "num_to_repeat": len(book.again),
                "num_batches_repeated": book.num_repeated,
                "num_samples_repeated": book.num_samples_repeated,
                "num_batches_resent": book.num_resent,
                "queue_depth": len(self._ready) + len(self._loaded),
                "queue_bytes": self._ready_bytes + self._loaded_bytes,
                "waited_for_room_s": self.waited_for_room_s,
            }
            if self._share.may_skip:
                facts["num_skipped"] = book.num_skipped + self._skipped_here
            return facts if self._error is None else {**facts, "error": self._error}

    # Under the lock

    def _tell(self) -> None:
        """Wake whoever may have something to do now."""
        self._room.notify_all()
        if self._parked:
            self._news.notify_all()

    def _flush(self) -> None:
        """Keep what was handed out, before anybody gets it."""
        try:
            self._progress.flush()
        except RowsteadError as error:
            self._error, self._is_broken = str(error), True
            raise

    @property
    def _loaded_bytes(self) -> int:
        return sum(packed.num_bytes for packed in self._loaded.values())

    def _state(self) -> State:
        if self._stopped:
            return "stopped"
        self._end_epochs()
        if self._error is not None and (self._is_broken or not self._ready):
            return "failed"
        if self._ready:
            return "reading"
        if not self._read_all or self._book.again:
            return "reading"
        return "ended" if self._book.is_settled else "drained"

    def _answer(self, request: Request, *, now: bool = False) -> Message | None:
        """Batches, or a state that the trainer does not know yet; none where there is neither, unless it has to be `now`."""
        numbers: list[tuple[int, int]] = []
        packed: list[Packed] = []
        num_bytes = 0
        while len(packed) < min(request.want, _ANSWER_BATCHES) and num_bytes < _ANSWER_BYTES:
            taken = None if self._stopped or self._is_broken else self._take(request.holder)
            if taken is None:
                break
            number, epoch, batch = taken
            numbers.append((number, epoch))
            packed.append(batch)
            num_bytes += batch.num_bytes
        if packed or now or request.leaves or request.want < 1 or self._state() != request.knows:
            return self._answered(numbers, packed)
        return None

    def _take(self, holder: Holder) -> tuple[int, int, Packed] | None:
        """Hand out one batch: what is wanted again comes first."""
        again = self._book.again
        for number in [number for number in self._loaded if number not in again]:  # done after all
            del self._loaded[number]
        if self._loaded:
            number = min(self._loaded)
            packed = self._loaded.pop(number)
            self._book.hand_again(holder, number)
            return number, again[number].epoch, packed
        if self._book.first_lost is not None:
            return None
        self._end_epochs()
        if not self._ready:
            return None
        fresh = self._ready.popleft()
        assert isinstance(fresh, Fresh)
        self._ready_bytes -= fresh.packed.num_bytes
        self._skipped_here = fresh.num_skipped
        epoch = self._book.next_epoch
        number = self._book.hand_new(holder, fresh.packed.num_samples, fresh.cursor)
        self._end_epochs()
        return number, epoch, fresh.packed

    def _end_epochs(self) -> None:
        """Put the ends of epochs that are due into the book."""
        while self._ready and isinstance(self._ready[0], EpochEnd):
            end = self._ready.popleft()
            assert isinstance(end, EpochEnd)
            self._book.end_epoch(end.num_rows)
            self._skipped_here = 0

    def _answered(self, numbers: list[tuple[int, int]], packed: list[Packed]) -> Message:
        batches = [{"number": n, "epoch": e, **p.facts} for (n, e), p in zip(numbers, packed, strict=True)]
        # An error comes where the next batch would have come.
        state = "reading" if packed and self._state() == "failed" else self._state()
        return _told(
            state,
            error=self._error,
            num_epochs_done=self._book.num_epochs_done,
            batches=batches,
            tensors=[tensor for one in packed for tensor in one.tensors],
        )

    # The two threads

    def _answer_parked(self) -> None:
        """Answer requests that wait, as soon as there is something to answer."""
        with self._lock:
            while not self._closed:
                now_s = time.monotonic()
                answers: list[tuple[Reply, Message]] = []
                still: deque[tuple[Request, Reply, float]] = deque()
                for request, reply, until_s in self._parked:
                    answer = self._answer(request, now=now_s >= until_s)
                    if answer is None:
                        still.append((request, reply, until_s))
                    else:
                        answers.append((reply, answer))
                self._parked = still
                try:
                    self._flush()
                except RowsteadError as error:
                    answers = [(reply, _told("failed", error=str(error))) for reply, _ in answers]
                for reply, answer in answers:
                    reply(answer)
                if answers:
                    self._room.notify_all()
                self._news.wait(min(until_s for _, _, until_s in still) - now_s if still else None)

    def _read(self) -> None:
        try:
            with contextlib.closing(self._share.fresh(self._place())) as items:
                for item in items:
                    if not self._has_room():
                        return
                    with self._lock:
                        self._ready.append(item)
                        self._ready_bytes += item.packed.num_bytes if isinstance(item, Fresh) else 0
                        self._tell()
            with self._lock:
                self._read_all = True
                self._tell()
            while self._has_room(at_end=True):
                pass
        except Exception as error:  # noqa: BLE001, RUF100 - whatever it is, the trainers and the head have to hear of it
            if not isinstance(error, RowsteadError):
                _log.exception("reading failed")
            with self._lock:
                self._error = str(error) if isinstance(error, RowsteadError) else f"{type(error).__name__}: {error}"
                self._tell()

    def _has_room(self, *, at_end: bool = False) -> bool:
        """Wait until one more batch may be ready; reads meanwhile what is to be handed out again. False when closed."""
        while True:
            with self._lock:
                before_s = time.monotonic()
                self._room.wait_for(lambda: self._closed or self._wanted() or (not at_end and self._may_add()))
                self.waited_for_room_s += time.monotonic() - before_s
                if self._closed:
                    return False
                wanted = self._wanted()
                if not wanted:
                    return True
            self._load(wanted)

    def _may_add(self) -> bool:
        return not self._ready or self._ready_bytes < self._read_ahead_bytes

    def _wanted(self) -> dict[int, AssignedBatch]:
        """What is to be read again, where there is room for it."""
        if self._loaded_bytes >= self._read_ahead_bytes:
            return {}
        return {number: entry for number, entry in self._book.again.items() if number not in self._loaded}

    def _load(self, wanted: dict[int, AssignedBatch]) -> None:
        """Read batches again, as many as there is room for."""
        with contextlib.closing(self._share.again(wanted)) as batches:
            for number, packed in batches:
                with self._lock:
                    if number in self._book.again:
                        self._loaded[number] = packed
                        self._tell()
                    if self._closed or self._loaded_bytes >= self._read_ahead_bytes:
                        return

    def _place(self) -> Place:
        """Where the batch begins that was never handed out and comes next."""
        with self._lock:
            return Place(number=self._book.next_number, epoch=self._book.next_epoch, cursor=self._book.next_cursor)


def _told(state: State, *, error: str | None = None, tensors: list[Any] | None = None, **facts: Any) -> Message:
    told = {"state": state, **facts}
    return Message("batches", told if error is None else {**told, "error": error}, tensors or [])
