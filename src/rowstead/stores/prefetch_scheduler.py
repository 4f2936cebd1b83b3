"""Who may move rows of a cache, and when: whoever trains, or the threads that bring rows in ahead of it.

Whoever trains is one thread. It announces batches, enters one after the other, and leaves each when it is trained on. Two more
threads work ahead of it: one plans sets of batches in order, the other moves the rows of the set before. Where moves are queued for a
GPU, one thread does both: more would only wait for each other. They belong to a cache and end with it.
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

AHEAD = 2
"""Batches, or sets of small ones, that are brought in while the one before them is trained on, at most."""
IS_GONE_S = 1.0
"""After so many seconds at most the threads see that nobody has their cache any more."""


@dataclass
class PendingBatch:
    """A batch that was announced."""

    sparse: Sparse
    """With ids that are rows."""
    number: int
    set_size: int
    """Batches that are brought in at once if it is the first of them, as was decided when it was announced."""
    ahead: int
    """Such sets that are brought in while the one before them is trained on; decided then, too."""
    copied: Any = None
    """CUDA's event after which the batch itself is there."""
    here: Sparse | None = None
    """With ids that are places; none until its rows are in them."""
    is_in: bool = False
    arrived: Any = None
    """CUDA's event after which its rows are in."""
    error: BaseException | None = None


class Cache(Protocol):
    """What is asked of a cache."""

    def plan_rows(self, some: Sequence[PendingBatch], oldest: int, left: Any) -> Callable[[], None]:
        """Give the rows of some batches places; what is returned moves them there.

        Rows that batches from `oldest` on use stay; those before have left, a GPU by the event `left`.
        """
        ...

    def resize(self) -> None:
        """Move to larger memory, while nothing is planned, moved or trained on."""
        ...


class PrefetchScheduler:
    """The turns of one cache."""

    def __init__(self, cache: Cache, *, moves_wait: bool = True) -> None:
        """`moves_wait`: moving rows takes the time of the thread that does it."""
        self._cache = weakref.ref(cache)
        self._moves_wait = moves_wait
        self._changed = threading.Condition()
        """Guards all below."""
        self.set_size, self.ahead = 1, AHEAD
        """Of batches that are announced from now on."""
        self.current: PendingBatch | None = None
        """The batch that whoever trains is in."""
        self._coming: deque[PendingBatch] = deque()
        """Announced and not entered yet."""
        self._waiting: deque[PendingBatch] = deque()
        """Of these, those that nobody has begun to plan."""
        self._num_announced = 0
        self._num_left = 0
        self._left: deque[tuple[int, Any]] = deque()
        """The batches that were left last, each with CUDA's event after it."""
        self._num_moving = 0
        """Sets of batches that are being planned or brought in."""
        self._is_held = False
        """Whoever trains keeps rows from moving."""
        self._wanted: PendingBatch | None = None
        """The batch that whoever trains waits for."""
        self._needs_room = False
        """Places have run out: whoever trains moves the cache to larger memory when it comes by."""
        self._failed: BaseException | None = None
        """What went wrong while rows moved; which are where is not known since."""
        self._thread: threading.Thread | None = None

    @property
    def batches_ahead(self) -> int:
        """How many batches before they come they should be announced."""
        return self.ahead * self.set_size + self.set_size - 1

    # Whoever trains

    def announce(self, sparse: Sparse, copied: Any) -> None:
        """A batch comes, after all those announced before."""
        coming = self._numbered(sparse, copied)
        with self._changed:
            if self._thread is None:
                arguments = weakref.ref(self), self._changed
                self._thread = threading.Thread(target=_work_ahead, args=arguments, name="plan-rows", daemon=True)
                self._thread.start()
            self._coming.append(coming)
            self._waiting.append(coming)
            self._wake_planner()

    def drop(self, left: Any) -> None:
        """Batches that were announced and not entered are not coming after all."""
        with self._changed:
            self._waiting.clear()
        with self.hold(even_broken=True), self._changed:
            was_cut_off = self.current is None and self._num_left < self._num_announced  # in its wait, or not entered
            if self._coming or was_cut_off:
                self._coming.clear()
                self.current = None
                self._num_left = self._num_announced
                self._left.append((self._num_left - 1, left))

    def enter(self, sparse: Sparse, copied: Callable[[], Any]) -> PendingBatch:
        """The next batch, its rows in place; one that was not announced, and is there after the event `copied()`, is brought in now."""
        if self._coming:
            coming = self._coming.popleft()
            assert coming.sparse.ids is sparse.ids, "batches are trained on in the order in which they were announced"
            if self._needs_room or not coming.is_in:
                self._wanted = coming
                self._wait_until(lambda: coming.is_in)
                self._wanted = None
            if coming.error is not None:
                self._num_left = coming.number + 1
                raise coming.error
        else:
            coming = self._numbered(sparse, copied())
            with self.hold():
                try:
                    self._plan([coming])()
                except BaseException as error:
                    self.fail(error)
                    raise
        self.current = coming
        return coming

    def leave(self, left: Any) -> None:
        """Training on the current batch has ended, or a GPU ends it with the event `left`."""
        self.current = None
        with self._changed:
            self._num_left += 1
            self._left.append((self._num_left - 1, left))
            while len(self._left) > 2 * self.batches_ahead + 2:
                self._left.popleft()
            self._wake_planner()

    @contextlib.contextmanager
    def hold(self, *, even_broken: bool = False) -> Iterator[Any]:
        """No rows move meanwhile but those that whoever trains moves itself; gives the event of the last batch that was left."""
        try:
            with self._changed:
                self._is_held = True
                self._wait_until(lambda: not self._num_moving)
            if self._failed is not None and not even_broken:
                raise self._failed
            yield self._left[-1][1] if self._left else None
        finally:
            with self._changed:
                self._is_held = False
                self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Rows may not be where they are thought to be: whatever is asked for from now on raises this."""
        self._failed = self._failed or error

    def make_room(self) -> None:
        """See that the cache is moved to larger memory, by whoever trains: nothing is trained on meanwhile."""
        cache = self._cache()
        assert cache is not None
        if threading.current_thread() is not self._thread:
            cache.resize()
            return
        with self._changed:
            self._changed.wait_for(lambda: self._num_moving == 1)  # this one
            self._needs_room = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._needs_room)

    def _wake_planner(self) -> None:
        """If it has something to do: a thread that wakes up for nothing holds up whoever trains, twice in each step."""
        if self.may_go_on():
            self._changed.notify_all()

    def _numbered(self, sparse: Sparse, copied: Any) -> PendingBatch:
        self._num_announced += 1
        return PendingBatch(sparse, self._num_announced - 1, self.set_size, self.ahead, copied)

    def _wait_until(self, happened: Callable[[], bool]) -> None:
        """Wait, and make room meanwhile if that is what the other threads wait for."""
        with self._changed:
            self._changed.notify_all()
            while True:
                self._changed.wait_for(lambda: happened() or self._needs_room)
                if not self._needs_room:
                    break
                cache = self._cache()
                assert cache is not None
                cache.resize()
                self._needs_room = False
                self._changed.notify_all()

    # The threads

    def may_go_on(self) -> bool:
        """Whether there is a set to plan, all conditions counted."""
        if not self._waiting or self._is_held or self._num_moving == AHEAD:
            return False
        first = self._waiting[0]
        if self._num_left < first.number - first.ahead * first.set_size:
            return False
        # A set is whole unless no more batches are coming: what is where shall not depend on which thread is quicker.
        is_last = self._wanted is not None and self._wanted.number >= first.number
        return len(self._waiting) >= first.set_size or is_last

    def next_set(self) -> list[PendingBatch]:
        """Batches to plan now."""
        self._num_moving += 1
        return [self._waiting.popleft() for _ in range(min(self._waiting[0].set_size, len(self._waiting)))]

    def plan_next(self, some: Sequence[PendingBatch], mover: ThreadPoolExecutor) -> None:
        """Plan a set of batches, and leave the rest to the other thread, if it takes long."""
        try:
            move = self._plan(some)
        except BaseException as error:  # noqa: BLE001, RUF100 - whatever it is, whoever trains has to see it
            self._note_in(some, error)
            return
        if self._moves_wait:
            mover.submit(self._move, move, some)
        else:
            self._move(move, some)

    def _plan(self, some: Sequence[PendingBatch]) -> Callable[[], None]:
        cache = self._cache()
        assert cache is not None
        with self._changed:
            if self._failed is not None:
                raise self._failed
            # All before it have left. Others may have meanwhile, but what is where shall not depend on which thread is quicker,
            # and rows move while a GPU is busy with those others.
            # What has not left stays in any case.
            oldest = max(0, min(some[0].number - some[0].ahead * some[0].set_size, self._num_left))
            left = next((event for number, event in self._left if number >= oldest - 1), None)
        return cache.plan_rows(some, oldest, left)

    def _move(self, move: Callable[[], None], some: Sequence[PendingBatch]) -> None:
        error = self._failed
        try:
            if error is None:
                move()
        except BaseException as raised:  # noqa: BLE001, RUF100
            error = raised
        self._note_in(some, error)

    def _note_in(self, some: Sequence[PendingBatch], error: BaseException | None) -> None:
        with self._changed:
            self._failed = self._failed or error
            for coming in some:
                coming.error, coming.is_in = error, True
            self._num_moving -= 1
            self._changed.notify_all()


def _work_ahead(of: weakref.ref[PrefetchScheduler], changed: threading.Condition) -> None:
    """What the first thread does until the turns are gone."""
    with ThreadPoolExecutor(1, thread_name_prefix="move-rows") as mover:
        while True:
            with changed:
                while (turns := of()) is not None and not turns.may_go_on():
                    del turns
                    changed.wait(IS_GONE_S)
                if turns is None:
                    return
                some = turns.next_set()
            turns.plan_next(some, mover)
            del turns, some
