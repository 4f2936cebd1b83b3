"""Background threads: prefetch one iterator, chain several, or map a function over items."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Generic, TypeVar

from rowstead.records.cost import Cost, counted

T = TypeVar("T")
U = TypeVar("U")


class Prefetch(Generic[T]):
    """Runs an iterator in one background thread, at most `depth` items ahead.

    An error in the thread is raised where the consumer would have received the next item. `close` waits for the current item,
    stops the thread and closes the iterator if it is a generator.
    """

    def __init__(self, items: Iterable[T], depth: int = 2) -> None:
        self.waited_s = 0.0
        """Seconds that the consumer has waited for items so far."""
        self._queue: _StreamQueues[T] = _StreamQueues(1, depth, lambda _: 1)
        self._ended = False
        work = partial(_fill, self._queue, [lambda: iter(items)], None)
        self._thread = threading.Thread(target=work, name="prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        start = time.perf_counter()
        self._ended = True  # unless there is an item
        found = self._queue.take(0)
        self.waited_s += time.perf_counter() - start
        if found is None:
            raise StopIteration
        self._ended = False
        return found[0]

    def close(self) -> None:
        """Stop the thread and drop further items. Safe to call twice."""
        self._ended = True
        self._queue.close()
        self._thread.join()

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def chain_ahead(
    streams: Sequence[Callable[[], Iterator[T]]],
    *,
    threads: int,
    size: Callable[[T], int],
    max_size: int,
    cost: Cost | None = None,
) -> Generator[T, None, None]:
    """The items of `streams`, one stream after the other, produced ahead by `threads` threads, each working on one stream.

    About `max_size` in total is held ahead, measured by `size`; beyond it only the current stream continues, one item at a time. Order
    and items do not depend on threads. Closing the generator stops the threads. The CPU time of items is added to `cost`, weighted by
    their size.
    """
    queues: _StreamQueues[T] = _StreamQueues(len(streams), max_size, size)
    work = partial(_fill, queues, streams, cost)
    workers = [threading.Thread(target=work, name=f"decode-{i}", daemon=True) for i in range(min(threads, len(streams)))]
    for worker in workers:
        worker.start()
    try:
        for stream in range(len(streams)):
            while (got := queues.take(stream)) is not None:
                yield got[0]
    finally:
        queues.close()
        for worker in workers:
            worker.join()


def _fill(queues: _StreamQueues[T], streams: Sequence[Callable[[], Iterator[T]]], cost: Cost | None) -> None:
    """Produce the items of one stream after the other, until none is left or the queues are closed."""
    while (stream := queues.next_stream()) is not None:
        error: BaseException | None = None
        try:
            items = streams[stream]() if cost is None else counted(streams[stream](), cost, queues.item_size)
            try:
                while queues.wait_for_capacity(stream):
                    queues.put(stream, next(items))  # no variable for the item: it would stay alive while the next is made
            finally:
                if isinstance(items, Generator):
                    items.close()
        except StopIteration:
            pass
        except BaseException as raised:  # noqa: BLE001, RUF100 - raise it in the consumer
            error = raised
        queues.finish(stream, error)


def map_ahead(
    function: Callable[[T], U], items: Iterator[T], *, threads: int, size: Callable[[U], int], cost: Cost | None = None
) -> Generator[U, None, None]:
    """`function` of each item, in order, computed ahead by `threads` threads; with one thread, by the caller's.

    An error is raised where its result would have come. The other threads' CPU time is added to `cost`, weighted by the results'
    size. Closing the generator stops the threads.
    """
    if threads == 1:
        yield from map(function, items)
        return
    cost = cost or Cost()

    def work(item: T) -> U:
        start_s = time.thread_time()
        result = function(item)
        cost.add(time.thread_time() - start_s, size(result))
        return result

    pending: deque[Future[U]] = deque()
    error: Exception | None = None
    pool = ThreadPoolExecutor(threads, thread_name_prefix="make")
    try:
        while error is None:
            try:
                # no variable for the item: it would keep the item alive while the next is made
                pending.append(pool.submit(work, next(items)))
            except StopIteration:
                break
            except Exception as raised:  # noqa: BLE001, RUF100 - yield the items before it first
                error = raised
            if len(pending) == threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
        if error is not None:
            raise error
    finally:
        pool.shutdown(cancel_futures=True)
        if isinstance(items, Generator):
            items.close()


class _StreamQueues(Generic[T]):
    """Items that threads produce and one consumer takes, per stream; every method locks.

    Streams are started in order, so the current stream always has a thread, which may always continue when no item of its stream is
    held: no deadlock, however small `max_size`. Threads are woken only when one of them may continue, since a spurious wake-up takes
    the GIL from threads that work.
    """

    def __init__(self, num_streams: int, max_size: int, size: Callable[[T], int]) -> None:
        self.item_size = size
        self._lock = threading.Lock()
        self._has_capacity = threading.Condition(self._lock)
        """Worker threads wait for this."""
        self._has_item = threading.Condition(self._lock)
        """The consumer waits for this."""
        self._held: list[deque[T]] = [deque() for _ in range(num_streams)]
        self._end: dict[int, BaseException | None] = {}
        self._num_started, self._current = 0, 0
        self._size, self._max_size = 0, max_size
        self._closed = False

    def next_stream(self) -> int | None:
        with self._lock:
            if self._closed or self._num_started == len(self._held):
                return None
            self._num_started += 1
            return self._num_started - 1

    def wait_for_capacity(self, stream: int) -> bool:
        """Wait until this stream may produce one more item; false once closed."""
        with self._lock:
            self._has_capacity.wait_for(
                lambda: self._closed or self._size < self._max_size or (stream == self._current and not self._held[stream])
            )
            return not self._closed

    def put(self, stream: int, item: T) -> None:
        with self._lock:
            self._held[stream].append(item)
            self._size += self.item_size(item)
            if stream == self._current:
                self._has_item.notify()

    def finish(self, stream: int, error: BaseException | None) -> None:
        with self._lock:
            self._end[stream] = error
            if stream == self._current:
                self._has_item.notify()

    def take(self, stream: int) -> tuple[T] | None:
        """The next item of a stream, None at its end."""
        with self._lock:
            if self._current != stream:
                self._current = stream
                if not self._held[stream]:
                    self._has_capacity.notify_all()
            self._has_item.wait_for(lambda: self._held[stream] or stream in self._end)
            if self._held[stream]:
                item = self._held[stream].popleft()
                self._size -= self.item_size(item)
                if self._size < self._max_size or not (self._held[stream] or stream in self._end):
                    self._has_capacity.notify_all()
                return (item,)
            error = self._end[stream]
            if error is not None:
                raise error
            return None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._held = [deque() for _ in self._held]
            self._has_capacity.notify_all()
