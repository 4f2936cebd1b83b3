"""Memory for decoded rows that is used again: what the system hands out anew has to be cleared first, page by page."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

SMALL_BYTES = 1 << 20
"""Arrays below this come from the allocator, which uses memory of this size again by itself."""
ALIGNED_BYTES = 64
"""Arrays begin at a cache line."""


class BufferPool:
    """Arrays whose memory goes to others once nobody has them any more. Any thread may ask for one or let go of one.

    Memory that is free is given to the system before more is asked for, so that all of it is at most what was in use at one time, and
    a sixteenth.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._returned: deque[NDArray[np.uint8]] = deque()
        """What was let go of: by whichever thread, at any moment, also by one that holds the lock."""
        self._free: deque[NDArray[np.uint8]] = deque()

    def empty(self, shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
        """An array whose numbers are whatever was there before."""
        num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        if num_bytes < SMALL_BYTES:
            return np.empty(shape, dtype)
        found = np.asarray(_Loan(self._returned, self._take(_rounded(num_bytes))))
        return found[:num_bytes].view(dtype).reshape(shape)

    def _take(self, num_bytes: int) -> NDArray[np.uint8]:
        with self._lock:
            while self._returned:
                self._free.append(self._returned.popleft())
            for place, memory in enumerate(self._free):
                if len(memory) == num_bytes:
                    del self._free[place]
                    return memory
            given_back = 0
            while self._free and given_back < num_bytes:
                given_back += len(self._free.popleft())
        memory = np.empty(num_bytes + ALIGNED_BYTES, np.uint8)
        start = -memory.ctypes.data % ALIGNED_BYTES
        return memory[start : start + num_bytes]


class _Loan:
    """What an array refers to as the owner of its memory, which goes back when the last such array is gone."""

    def __init__(self, returned: deque[NDArray[np.uint8]], memory: NDArray[np.uint8]) -> None:
        self._returned, self._memory = returned, memory
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._returned.append(self._memory)


def _rounded(num_bytes: int) -> int:
    """The next sixteenth of a power of two, so that arrays of about the same size have the same."""
    unit = max(1, 1 << (num_bytes.bit_length() - 5))
    return -(-num_bytes // unit) * unit
