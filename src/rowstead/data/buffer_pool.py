"""`BufferPool`: reuses the memory of decoded rows, since the kernel has to clear every page of newly allocated memory."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

SMALL_BYTES = 1 << 20
"""Smaller arrays come from the allocator, which reuses memory of this size itself."""
ALIGNED_BYTES = 64
"""Arrays are aligned to cache lines."""


class BufferPool:
    """Allocates arrays whose memory returns to the pool with their last reference. Thread-safe.

    Free memory is returned to the system before more is allocated, so the total is at most the peak use plus a sixteenth.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._returned: deque[NDArray[np.uint8]] = deque()
        """Released memory: added by any thread at any moment, even by one that holds the lock."""
        self._free: deque[NDArray[np.uint8]] = deque()

    def empty(self, shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
        """An uninitialized array."""
        num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        if num_bytes < SMALL_BYTES:
            return np.empty(shape, dtype)
        found = np.asarray(_PooledBuffer(self._returned, self._take(_round_up(num_bytes))))
        return found[:num_bytes].view(dtype).reshape(shape)

    def _take(self, num_bytes: int) -> NDArray[np.uint8]:
        with self._lock:
            while self._returned:
                self._free.append(self._returned.popleft())
            for i, memory in enumerate(self._free):
                if len(memory) == num_bytes:
                    del self._free[i]
                    return memory
            released = 0
            while self._free and released < num_bytes:
                released += len(self._free.popleft())
        memory = np.empty(num_bytes + ALIGNED_BYTES, np.uint8)
        start = -memory.ctypes.data % ALIGNED_BYTES
        return memory[start : start + num_bytes]


class _PooledBuffer:
    """Owner of an array's memory, which it returns to the pool when the last reference is gone."""

    def __init__(self, returned: deque[NDArray[np.uint8]], memory: NDArray[np.uint8]) -> None:
        self._returned, self._memory = returned, memory
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._returned.append(self._memory)


def _round_up(num_bytes: int) -> int:
    """Round up to a sixteenth of a power of two, so that arrays of similar size can share memory."""
    unit = max(1, 1 << (num_bytes.bit_length() - 5))
    return -(-num_bytes // unit) * unit
