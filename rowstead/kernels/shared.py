"""Work that is shared among the CPU's threads by parts, where there is enough of it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rowstead.kernels.cpu import _shared

BYTES_A_THREAD = 1 << 20
"""To be moved, below which another thread is not worth waking."""


def over_parts(work: Callable[[int, int], object], count: int, *, num_bytes: int) -> None:
    """`work(start, stop)` over all of 0 to `count`, in as many parts as there are threads for so many bytes.

    The parts must not write to the same memory, and hold no GIL for long.
    """
    parts = max(1, min(torch.get_num_threads(), num_bytes // BYTES_A_THREAD, count))
    if parts == 1:
        work(0, count)
        return

    def part(start: int, stop: int) -> int:
        work(start, stop)
        return 0

    _shared(part, [count * number // parts for number in range(parts + 1)])
