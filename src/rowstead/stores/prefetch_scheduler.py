"""When the rows of a cache may move: coordinates the training thread with the threads that fetch rows ahead of it.

The training thread prefetches batches, enters them one after the other, and leaves each when it is trained on. Two threads work
ahead of it: one plans sets of batches in order, the other moves the rows of the previous set. On a GPU moves are only queued, so one
thread does both. The threads end when their cache is garbage-collected.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from rowstead.data.batch import Sparse
from rowstead.spec.caching import SETS_AHEAD

POLL_S = 1.0
"""How often an idle thread checks whether its cache still exists."""


@dataclass
class PendingBatch:
    """A prefetched batch."""

    sparse: Sparse
    """With ids that are rows."""
    number: int
    set_size: int
    """Batches to fetch together if this is the first of a set; fixed when the batch was prefetched."""
    ahead: int
    """Sets to fetch while the one before them is trained on; fixed when the batch was prefetched."""
    copied: Any = None
    """CUDA event after which the batch itself is on the device."""
    in_slots: Sparse | None = None
    """With ids that are slots; None until they are planned."""
    is_fetched: bool = False
    fetched: Any = None
    """CUDA event after which its rows are in their slots."""
    error: BaseException | None = None


class Cache(Protocol):
    """What the scheduler needs of a cache."""

    def plan_rows(self, batches: Sequence[PendingBatch], oldest: int, left: Any) -> Callable[[], None]:
        """See `CachedStore.plan_rows`."""

    def resize(self) -> None:
        """Move to larger memory; nothing is planned, moved or trained on meanwhile."""


class PrefetchScheduler:
    """Schedules the fetches of one cache."""

    def __init__(self, cache: Cache, *, moves_block: bool = True) -> None:
        """`moves_block`: moving rows blocks the thread that does it."""
        self._cache = weakref.ref(cache)
        self._moves_block = moves_block
        self._changed = threading.Condition()
        """Guards everything below."""
        self.set_size, self.ahead = 1, SETS_AHEAD
        """For batches that are prefetched from now on."""
        self.current: PendingBatch | None = None
        """The batch that is trained on."""
        self._pending: deque[PendingBatch] = deque()
        """Prefetched and not entered yet."""
        self._unplanned: deque[PendingBatch] = deque()
        """Those of `_pending` that no thread has started to plan."""
        self._num_prefetched = 0
        self._num_left = 0
        self._left: deque[tuple[int, Any]] = deque()
        """The batches that were left last, each with the CUDA event after it."""
        self._num_moving = 0
        """Sets of batches that are being planned or fetched."""
        self._is_paused = False
        """The training thread keeps rows from moving."""
        self._wanted: PendingBatch | None = None
        """The batch that the training thread waits for."""
        self._needs_growth = False
        """Slots have run out: the training thread resizes the cache at its next call."""
        self._failed: BaseException | None = None
        """The error that interrupted a move: since then the contents of slots are undefined."""
        self._thread: threading.Thread | None = None

    @property
    def batches_ahead(self) -> int:
        """How many batches ahead of its look-up a batch should be prefetched."""
        return self.ahead * self.set_size + self.set_size - 1

    # Called by the training thread

    def prefetch(self, sparse: Sparse, copied: Any) -> None:
        """Add a batch that comes after those prefetched before."""
        batch = self._number(sparse, copied)
        with self._changed:
            if self._thread is None:
                arguments = weakref.ref(self), self._changed
                self._thread = threading.Thread(target=_work_ahead, args=arguments, name="plan-rows", daemon=True)
                self._thread.start()
            self._pending.append(batch)
            self._unplanned.append(batch)
            self._wake_planner()

    def drop(self, left: Any) -> None:
        """Forget the batches that were prefetched and not entered."""
        with self._changed:
            self._unplanned.clear()
        with self.pause(even_failed=True), self._changed:
            was_interrupted = self.current is None and self._num_left < self._num_prefetched  # while it waited in `enter`
            if self._pending or was_interrupted:
                self._pending.clear()
                self.current = None
                self._num_left = self._num_prefetched
                self._left.append((self._num_left - 1, left))

    def enter(self, sparse: Sparse, copied: Callable[[], Any]) -> PendingBatch:
        """The next batch, with its rows in slots; one that was not prefetched is fetched now, after the event `copied()`."""
        if self._pending:
            batch = self._pending.popleft()
            assert batch.sparse.ids is sparse.ids, "batches are trained on in the order in which they were prefetched"
            if self._needs_growth or not batch.is_fetched:
                self._wanted = batch
                self._wait_until(lambda: batch.is_fetched)
                self._wanted = None
            if batch.error is not None:
                self._num_left = batch.number + 1
                raise batch.error
        else:
            batch = self._number(sparse, copied())
            with self.pause():
                try:
                    self._plan([batch])()
                except BaseException as error:
                    self.fail(error)
                    raise
        self.current = batch
        return batch

    def leave(self, left: Any) -> None:
        """End training on the current batch; on a GPU it ends with the event `left`."""
        self.current = None
        with self._changed:
            self._num_left += 1
            self._left.append((self._num_left - 1, left))
            while len(self._left) > 2 * self.batches_ahead + 2:
                self._left.popleft()
            self._wake_planner()

    @contextlib.contextmanager
    def pause(self, *, even_failed: bool = False) -> Iterator[Any]:
        """Keep the other threads from moving rows; yields the event of the batch that was left last."""
        try:
            with self._changed:
                self._is_paused = True
                self._wait_until(lambda: not self._num_moving)
            if self._failed is not None and not even_failed:
                raise self._failed
            yield self._left[-1][1] if self._left else None
        finally:
            with self._changed:
                self._is_paused = False
                self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Mark the cache as failed: the contents of slots are undefined, and every later call raises this error."""
        self._failed = self._failed or error

    def grow(self) -> None:
        """Have the training thread resize the cache, since nothing may be trained on meanwhile; returns when it has."""
        cache = self._cache()
        assert cache is not None
        if threading.current_thread() is not self._thread:
            cache.resize()
            return
        with self._changed:
            self._changed.wait_for(lambda: self._num_moving == 1)  # this one
            self._needs_growth = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._needs_growth)

    def _wake_planner(self) -> None:
        """Wake the thread only if it has work: waking it for nothing would delay training twice per step."""
        if self.can_plan():
            self._changed.notify_all()

    def _number(self, sparse: Sparse, copied: Any) -> PendingBatch:
        self._num_prefetched += 1
        return PendingBatch(sparse, self._num_prefetched - 1, self.set_size, self.ahead, copied)

    def _wait_until(self, happened: Callable[[], bool]) -> None:
        """Wait, and resize the cache meanwhile if another thread needs that."""
        with self._changed:
            self._changed.notify_all()
            while True:
                self._changed.wait_for(lambda: happened() or self._needs_growth)
                if not self._needs_growth:
                    break
                cache = self._cache()
                assert cache is not None
                cache.resize()
                self._needs_growth = False
                self._changed.notify_all()

    # Called by the threads

    def can_plan(self) -> bool:
        """Whether a set is ready to be planned."""
        if not self._unplanned or self._is_paused or self._num_moving == SETS_AHEAD:
            return False
        first = self._unplanned[0]
        if self._num_left < first.number - first.ahead * first.set_size:
            return False
        # Wait for a whole set unless no more batches come: the contents of slots must not depend on the timing of threads.
        is_last = self._wanted is not None and self._wanted.number >= first.number
        return len(self._unplanned) >= first.set_size or is_last

    def next_set(self) -> list[PendingBatch]:
        """Take the batches to plan now."""
        self._num_moving += 1
        return [self._unplanned.popleft() for _ in range(min(self._unplanned[0].set_size, len(self._unplanned)))]

    def plan_next(self, batches: Sequence[PendingBatch], mover: ThreadPoolExecutor) -> None:
        """Plan a set of batches, and move its rows, in the other thread if that blocks."""
        try:
            move = self._plan(batches)
        except BaseException as error:  # noqa: BLE001, RUF100 - the training thread raises it
            self._note_fetched(batches, error)
            return
        if self._moves_block:
            mover.submit(self._move, move, batches)
        else:
            self._move(move, batches)

    def _plan(self, batches: Sequence[PendingBatch]) -> Callable[[], None]:
        cache = self._cache()
        assert cache is not None
        with self._changed:
            if self._failed is not None:
                raise self._failed
            # Batches up to `oldest` have left. Later ones may have left meanwhile, but the contents of slots must not depend on the
            # timing of threads, and rows should move while a GPU works on those later batches. Batches that have not left stay.
            oldest = max(0, min(batches[0].number - batches[0].ahead * batches[0].set_size, self._num_left))
            left = next((event for number, event in self._left if number >= oldest - 1), None)
        return cache.plan_rows(batches, oldest, left)

    def _move(self, move: Callable[[], None], batches: Sequence[PendingBatch]) -> None:
        error = self._failed
        try:
            if error is None:
                move()
        except BaseException as raised:  # noqa: BLE001, RUF100 - the training thread raises it
            error = raised
        self._note_fetched(batches, error)

    def _note_fetched(self, batches: Sequence[PendingBatch], error: BaseException | None) -> None:
        with self._changed:
            self._failed = self._failed or error
            for batch in batches:
                batch.error, batch.is_fetched = error, True
            self._num_moving -= 1
            self._changed.notify_all()


def _work_ahead(reference: weakref.ref[PrefetchScheduler], changed: threading.Condition) -> None:
    """Plan sets of batches until the scheduler is gone."""
    with ThreadPoolExecutor(1, thread_name_prefix="move-rows") as mover:
        while True:
            with changed:
                while (scheduler := reference()) is not None and not scheduler.can_plan():
                    del scheduler
                    changed.wait(POLL_S)
                if scheduler is None:
                    return
                batches = scheduler.next_set()
            scheduler.plan_next(batches, mover)
            del scheduler, batches
