"""What benchmarks of kernels and steps share: how long a call takes, and what this machine could do at best."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from typing import Any

import torch

QUEUE_CYCLES = 30_000_000
"""For which the GPU waits before a call whose device time is taken: some 15 ms, in which the host queues all of its launches."""

CACHE_BYTES = 1 << 27
"""More than the caches of the CPUs we know hold."""

SETTLE_S = 0.02
"""Longer than OpenMP's threads spin."""

Call = Callable[[], Any]


def seconds_as_called(call: Call, device: str) -> float:
    """What a user waits for one call, the host's time to launch it included; a GPU is idle before it."""
    if device == "cpu":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    return _between_events(call, pause_cycles=0)


def seconds_on_gpu(call: Call) -> float:
    """What the GPU alone needs for one call: its launches were queued while the GPU waited."""
    return _between_events(call, pause_cycles=QUEUE_CYCLES)


def _between_events(call: Call, *, pause_cycles: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    if pause_cycles:
        torch.cuda._sleep(pause_cycles)
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e-3


def settle_cpu() -> None:
    """Let the next call start from the same state for everybody: caches hold no rows that another has just read, and the
    worker threads of another, which spin for some milliseconds after their work, sleep."""
    torch.ones(CACHE_BYTES // 4).sum()
    time.sleep(SETTLE_S)


def give_back_gpu_memory() -> None:
    """Free what nobody holds any more, so that the next contenders find room."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def copy_bytes_per_s(device: str) -> float:
    """Bytes read and written each second by a copy of 1 GB, the best of several; on a CPU with a thread a core."""
    source = torch.ones((1 << 30) // 4, device=device)
    target = torch.empty_like(source)
    return 2 * 4 * source.numel() / _best(lambda: target.copy_(source), device)


def operations_per_s(device: str, dtype: torch.dtype = torch.float32) -> float:
    """Multiplications and additions each second in a product of large square matrices, the best of several.

    FP32 on a GPU is what torch.set_float32_matmul_precision allows at this moment.
    """
    size = 8192 if device == "cuda" else 2048
    left, right = (torch.rand(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _best(lambda: torch.mm(left, right), device)


def _best(call: Call, device: str, repeats: int = 10) -> float:
    """Seconds of the quickest of some calls."""
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or threads)
    try:
        return min(seconds_on_gpu(call) if device == "cuda" else seconds_as_called(call, device) for _ in range(repeats))
    finally:
        torch.set_num_threads(threads)
