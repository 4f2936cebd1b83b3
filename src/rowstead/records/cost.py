"""CPU cost per item of some work, over all threads that do it."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

MAX_PIECES = 1_000
"""Recent pieces of work that the cost is computed from."""

T = TypeVar("T")


class Cost:
    """Seconds for each item of some work, by the median over its pieces. Any thread may add a piece.

    A median, because the first pieces compile kernels and load libraries, which says nothing about the rest.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pieces: deque[float] = deque(maxlen=MAX_PIECES)

    def add(self, spent_s: float, num_items: int) -> None:
        """Count a piece of work that made `num_items` items."""
        if num_items > 0:
            with self._lock:
                self._pieces.append(spent_s / num_items)

    @property
    def s_per_item(self) -> float | None:
        """None before the first piece."""
        with self._lock:
            return statistics.median_low(self._pieces) if self._pieces else None


def counted(items: Iterator[T], cost: Cost, size: Callable[[T], int]) -> Generator[T, None, None]:
    """Yield the same items and add the CPU time that each takes in the consuming thread to `cost`.

    Time spent waiting costs nothing, nor does what other threads do meanwhile.
    """
    try:
        while True:
            start_s = time.thread_time()
            try:
                item = next(items)
            except StopIteration:
                return
            cost.add(time.thread_time() - start_s, size(item))
            yield item
    finally:
        if isinstance(items, Generator):
            items.close()
