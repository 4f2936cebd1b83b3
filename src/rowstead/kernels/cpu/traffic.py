"""Bytes of rows and optimizer state that the CPU kernels of this process read and write, for the memory traffic in records.

Every id counts, also where its row is in a cache already: an upper bound of what goes to memory.
"""

from __future__ import annotations

import threading

_lock = threading.Lock()
_num_bytes = 0


def add_bytes(num_bytes: float) -> None:
    """Count bytes; from any thread."""
    global _num_bytes
    with _lock:
        _num_bytes += int(num_bytes)


def kernel_traffic_bytes() -> int:
    """Bytes that were counted so far."""
    return _num_bytes
