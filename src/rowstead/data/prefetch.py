"""Work done ahead in threads: one iterator in the background, several one after the other, or a function of many items."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

from rowstead.records.cost import Cost, counted

T = TypeVar("T")
U = TypeVar("U")


class Prefetch(Generic[T]):
    """Runs an iterator in one background thread, at most `depth` items ahead.

    An error in the thread is raised again where the consumer would have had the next item. `close` stops the thread and
    closes the iterator, if that can be closed; it waits for the item that is being made.
    """

    def __init__(self, items: Iterable[T], depth: int = 2) -> None:
        assert depth >= 1
        self.waited_s = 0.0
        """Seconds that the consumer has waited for items so far."""
        self._queue: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue()
        self._room = threading.Semaphore(depth)
        self._closed = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, args=(iter(items),), name="prefetch", daemon=True)
        self._thread.start()

    def _run(self, items: Iterator[T]) -> None:
        error: BaseException = StopIteration()
        try:
            while True:
                self._room.acquire()
                if self._closed.is_set():
                    break
                self._queue.put((next(items), None))
        except BaseException as raised:  # noqa: BLE001, RUF100 - whatever it is, the consumer has to see it
            error = raised
        try:
            if isinstance(items, Generator):
                items.close()
        except BaseException as raised:  # noqa: BLE001, RUF100
            error = raised
        self._queue.put((None, error))

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        start = time.perf_counter()
        item, error = self._queue.get()
        self.waited_s += time.perf_counter() - start
        if error is not None:
            self._ended = True
            raise error
        self._room.release()
        return item  # type: ignore[return-value]

    def close(self) -> None:
        """Stop the thread; further items are lost. Safe to call twice."""
        self._ended = True
        self._closed.set()
        self._room.release()
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
    """The items of `streams`, one stream after the other, made ahead by `threads` threads, each busy with one stream.

    About `max_size` in all is held ahead, measured by `size`; beyond it only the stream whose turn it is goes on, one item at
    a time. Order and items do not depend on threads. Closing the generator ends the threads. What the items cost the processor is
    added to `cost`, each counted by its size.
    """
    cost = cost or Cost()
    state: _Ahead[T] = _Ahead(len(streams), max_size)

    def work() -> None:
        while (turn := state.next_stream()) is not None:
            items = None
            try:
                items = counted(streams[turn](), cost, size)
                while state.wait_for_room(turn):
                    item = next(items)
                    state.put(turn, item, size(item))
            except StopIteration:
                state.finish(turn, None)
            except BaseException as error:  # noqa: BLE001, RUF100 - whatever it is, the consumer has to see it
                state.finish(turn, error)
            finally:
                if isinstance(items, Generator):
                    items.close()

    workers = [threading.Thread(target=work, name=f"decode-{i}", daemon=True) for i in range(min(threads, len(streams)))]
    for worker in workers:
        worker.start()
    try:
        for turn in range(len(streams)):
            while (got := state.take(turn)) is not None:
                yield got[0]
    finally:
        state.close()
        for worker in workers:
            worker.join()


def map_ahead(
    function: Callable[[T], U], items: Iterator[T], *, threads: int, size: Callable[[U], int], cost: Cost | None = None
) -> Generator[U, None, None]:
    """`function` of each item, in order, by `threads` threads with an item each; by the caller's own thread where that is one.

    An error comes where its item would have come. What other threads' work costs the processor is added to `cost`, each result
    counted by its size. Closing the generator ends the threads.
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

    under_way: deque[Future[U]] = deque()
    error: Exception | None = None
    pool = ThreadPoolExecutor(threads, thread_name_prefix="make")
    try:
        while error is None:
            try:
                # No name for the item: it would keep alive what it refers to while the next is made.
                under_way.append(pool.submit(work, next(items)))
            except StopIteration:
                break
            except Exception as raised:  # noqa: BLE001, RUF100 - whatever it is, the items before it come first
                error = raised
            if len(under_way) == threads:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
        if error is not None:
            raise error
    finally:
        pool.shutdown(cancel_futures=True)
        if isinstance(items, Generator):
            items.close()


class _Ahead(Generic[T]):
    """What the threads of `chain_ahead` share; every method locks.

    Streams are begun in order, so that the one whose turn it is always has a thread, and that thread may always go on when
    nothing of its stream is held: hence no deadlock, however small `max_size`. Threads are woken only when one of them may go on, since
    each that wakes in vain takes Python's lock from those that work.
    """

    def __init__(self, num_streams: int, max_size: int) -> None:
        self._lock = threading.Lock()
        self._has_room = threading.Condition(self._lock)
        """What threads wait for."""
        self._has_come = threading.Condition(self._lock)
        """What the consumer waits for."""
        self._held: list[deque[tuple[T, int]]] = [deque() for _ in range(num_streams)]
        self._end: dict[int, BaseException | None] = {}
        self._begun, self._turn = 0, 0
        self._size, self._max_size = 0, max_size
        self._closed = False

    def next_stream(self) -> int | None:
        with self._lock:
            if self._closed or self._begun == len(self._held):
                return None
            self._begun += 1
            return self._begun - 1

    def wait_for_room(self, stream: int) -> bool:
        """Wait until this stream may make one more item; false when nobody wants it any more."""
        with self._lock:
            self._has_room.wait_for(
                lambda: self._closed or self._size < self._max_size or (stream == self._turn and not self._held[stream])
            )
            return not self._closed

    def put(self, stream: int, item: T, size: int) -> None:
        with self._lock:
            self._held[stream].append((item, size))
            self._size += size
            if stream == self._turn:
                self._has_come.notify()

    def finish(self, stream: int, error: BaseException | None) -> None:
        with self._lock:
            self._end[stream] = error
            if stream == self._turn:
                self._has_come.notify()

    def take(self, stream: int) -> tuple[T] | None:
        """The next item of a stream, None at its end."""
        with self._lock:
            if self._turn != stream:
                self._turn = stream
                if not self._held[stream]:
                    self._has_room.notify_all()
            self._has_come.wait_for(lambda: self._held[stream] or stream in self._end)
            if self._held[stream]:
                item, size = self._held[stream].popleft()
                self._size -= size
                if self._size < self._max_size or not (self._held[stream] or stream in self._end):
                    self._has_room.notify_all()
                return (item,)
            error = self._end[stream]
            if error is not None:
                raise error
            return None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._held = [deque() for _ in self._held]
            self._has_room.notify_all()
