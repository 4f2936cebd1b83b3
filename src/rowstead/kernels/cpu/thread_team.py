"""Parallel CPU work on several threads.

On the main thread these are torch's own OpenMP threads. Between two operations they spin for a while: separate threads would have
to take the cores away from them, and torch's next operation would have to wake them again, which took a fifth of a training step
on two cores. Other threads, such as readers, and forked processes, in which OpenMP's threads are gone, use a ThreadPoolExecutor.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeVar

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from rowstead.kernels.cpu.memory import take

Result = TypeVar("Result")

BYTES_PER_THREAD = 1 << 20
"""Memory traffic below which another thread is not worth waking."""

_Entry = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_under_way: dict[int, Callable[[], None]] = {}
"""Functions that OpenMP's threads are to call, by the numbers they are given."""
_numbers = itertools.count(1)
_is_forked = False


def run_on_threads(work: Callable[[], Result], threads: int) -> list[Result]:
    """Call `work` on this thread and on up to `threads` - 1 others; the calls share the work among themselves."""
    if threads == 1 or sys.is_finalizing():
        return [work()]
    if (parallel := _openmp()) is None or _is_forked or threading.current_thread() is not threading.main_thread():
        others = [_pool_of(torch.get_num_threads()).submit(work) for _ in range(threads - 1)]
        return [work(), *(other.result() for other in others if not other.cancel())]
    came: list[int] = []
    results: list[Result] = []
    failures: list[BaseException] = []

    def take_part() -> None:
        try:
            came.append(1)
            results.append(work())
        except BaseException as error:  # it would get lost in OpenMP
            failures.append(error)

    number = next(_numbers)
    facts = np.array([0, threads, ctypes.cast(_entry, ctypes.c_void_p).value, number], np.int64)
    _under_way[number] = take_part
    try:
        # OpenMP ends threads that a team does not need, and torch's next operation would have to start them again.
        parallel(_gate.address, facts.ctypes.data, max(threads, torch.get_num_threads()), 0)
    finally:
        del _under_way[number]
    if len(came) < min(threads, facts[0]):  # a signal arrived right before `take_part`: what its handler raised is lost
        take_part()
        signal.raise_signal(signal.SIGINT)
    if failures:
        try:
            raise next((error for error in failures if not isinstance(error, Exception)), failures[0])
        finally:
            failures.clear()
    return results


def parallel_ranges(work: Callable[[int, int], object], borders: Sequence[int]) -> None:
    """Call `work(start, stop)` on each range between two borders; idle threads take the next range."""
    left = [(a, b) for a, b in pairwise(borders) if a < b][::-1]

    def take_some() -> None:
        while True:
            try:
                part = left.pop()
            except IndexError:
                return
            work(*part)

    if left:
        run_on_threads(take_some, len(left))


def parallel_for(work: Callable[[int, int], object], count: int, *, num_bytes: int) -> None:
    """Call `work(start, stop)` over 0 to `count`, in as many ranges as threads are worth it for `num_bytes` of traffic.

    The calls must not write to the same memory, nor hold the GIL for long.
    """
    parts = max(1, min(torch.get_num_threads(), num_bytes // BYTES_PER_THREAD, count))
    parallel_ranges(work, [count * number // parts for number in range(parts + 1)])


@_Entry
def _entry(number: int) -> None:
    _under_way[number]()


@intrinsic
def _call(typingctx, function, argument):  # type: ignore[no-untyped-def]
    """Call the function at an address with a number."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        anything = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [anything])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [builder.inttoptr(args[1], anything)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@numba.cfunc(types.void(types.voidptr), cache=True)
def _gate(facts):  # type: ignore[no-untyped-def]
    """What each thread of a team runs, without the GIL. facts: how many arrived, how many may enter, `_entry`, and its number."""
    given = carray(facts, 4, np.int64)
    if take(given) < given[1]:
        _call(given[2], given[3])


@lru_cache(maxsize=1)
def _openmp() -> Any:
    """GNU OpenMP's function that runs another on a team of threads, as torch loaded it; None where torch has another OpenMP."""
    if not torch.backends.openmp.is_available() or os.name != "posix":
        return None
    parallel = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if parallel is not None:
        parallel.argtypes, parallel.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return parallel


@lru_cache(maxsize=1)
def _pool_of(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="kernel")


def _after_fork() -> None:
    """A forked child has none of the threads of the pools that it inherits."""
    global _is_forked
    _is_forked = True
    _pool_of.cache_clear()


os.register_at_fork(after_in_child=_after_fork)
