"""Work that several of the CPU's threads share.

On the main thread these are the threads of torch's own operations, which OpenMP keeps. Between two operations they spin for a
while: threads of ours would have to take the cores away from them, and torch's next operation would have to wake them again,
which together took a fifth of a training step on two cores. Other threads of a program, such as readers, and processes that were
forked, in which OpenMP's threads are gone, share their work with threads from a pool of Python's.
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

BYTES_A_THREAD = 1 << 20
"""To be moved, below which another thread is not worth waking."""

_Entry = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_under_way: dict[int, Callable[[], None]] = {}
"""What OpenMP's threads are to do, by the numbers that they are given."""
_numbers = itertools.count(1)
_is_forked = False


def together(work: Callable[[], Result], threads: int) -> list[Result]:
    """`work` on this thread and on up to `threads` - 1 others, all of which take from it what the rest has left."""
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
        except BaseException as error:  # which would get lost in OpenMP
            failures.append(error)

    number = next(_numbers)
    facts = np.array([0, threads, ctypes.cast(_entry, ctypes.c_void_p).value, number], np.int64)
    _under_way[number] = take_part
    try:
        # OpenMP ends threads that a team does not need, and torch's next operation would have to begin them anew.
        parallel(_gate.address, facts.ctypes.data, max(threads, torch.get_num_threads()), 0)
    finally:
        del _under_way[number]
    if len(came) < min(threads, facts[0]):  # a signal came right before `take_part`, where what its handler raised is lost
        take_part()
        signal.raise_signal(signal.SIGINT)
    if failures:
        try:
            raise next((error for error in failures if not isinstance(error, Exception)), failures[0])
        finally:
            failures.clear()
    return results


def by_parts(work: Callable[[int, int], object], borders: Sequence[int]) -> None:
    """`work` on each part between two borders, each by the thread that is free first."""
    left = [(a, b) for a, b in pairwise(borders) if a < b][::-1]

    def take_some() -> None:
        while True:
            try:
                part = left.pop()
            except IndexError:
                return
            work(*part)

    if left:
        together(take_some, len(left))


def over_parts(work: Callable[[int, int], object], count: int, *, num_bytes: int) -> None:
    """`work(start, stop)` over all of 0 to `count`, in as many parts as there are threads for so many bytes.

    The parts must not write to the same memory, and hold no GIL for long.
    """
    parts = max(1, min(torch.get_num_threads(), num_bytes // BYTES_A_THREAD, count))
    by_parts(work, [count * number // parts for number in range(parts + 1)])


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
    """What each thread of a team runs, without the GIL: `facts` are how many came, how many may enter, `_entry`, and its number."""
    given = carray(facts, 4, np.int64)
    if take(given) < given[1]:
        _call(given[2], given[3])


@lru_cache(maxsize=1)
def _openmp() -> Any:
    """GNU OpenMP's way to run a function on a team of threads, as torch itself finds it; none where torch has another."""
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
    """A forked child has none of the threads that the pools it inherits think they have."""
    global _is_forked
    _is_forked = True
    _pool_of.cache_clear()


os.register_at_fork(after_in_child=_after_fork)
