"""Arrays by address, so that one kernel can read any number of them without compiling for that number.

The caller keeps the array alive until the kernel returns.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import carray
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

HUGE_PAGE = 2 << 20
"""Bytes of a huge page."""
LINE = 64
"""Bytes of a cache line."""
AHEAD = 32
"""How many ids ahead rows are prefetched."""


def advise_huge_pages(tensor: Tensor) -> Tensor:
    """Ask the system to back a new tensor, not yet written to, by huge pages (`MADV_HUGEPAGE`); returns it.

    Random reads of rows then have far fewer TLB misses. Nothing changes where the system has no huge pages, or the tensor is
    small or not in system memory.
    """
    if tensor.device.type == "cpu" and tensor.nbytes >= 2 * HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_HUGEPAGE)
    return tensor


def address_of(array: NDArray[Any]) -> int:
    """Address of the first element of a C-contiguous array."""
    assert array.flags.c_contiguous
    return int(array.__array_interface__["data"][0])


@intrinsic
def _pointer(typingctx, address):  # type: ignore[no-untyped-def]
    return types.voidptr(types.int64), lambda context, builder, signature, args: builder.inttoptr(args[0], cgutils.voidptr_t)


@intrinsic
def word_at(typingctx, address):  # type: ignore[no-untyped-def]
    """The 8 bytes at an int64 address, which need not be aligned, as uint64."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load(pointer, align=1)

    return types.uint64(types.int64), codegen


@intrinsic
def lowest_bit(typingctx, word):  # type: ignore[no-untyped-def]
    """The index of the lowest set bit of a uint64 other than 0, as int64."""

    return types.int64(types.uint64), lambda context, builder, signature, args: builder.cttz(args[0], ir.IntType(1)(1))


@intrinsic
def prefetch(typingctx, address):  # type: ignore[no-untyped-def]
    """Prefetch the cache line at an int64 address, which need not be valid, into the L2 cache.

    The L1 cache can wait for few lines at a time, and is close enough to L2.
    """

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        int32 = ir.IntType(32)
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", [cgutils.voidptr_t], ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, int32, int32, int32])
        )
        read, second_cache, data_cache = int32(0), int32(2), int32(1)
        builder.call(function, [builder.inttoptr(args[0], cgutils.voidptr_t), read, second_cache, data_cache])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy", forceinline=True)
def prefetch_all(address, num_bytes):  # type: ignore[no-untyped-def]
    """Prefetch all cache lines of so many bytes."""
    for line in range(0, num_bytes, LINE):
        prefetch(address + line)


@intrinsic
def item(typingctx, address, index, like):  # type: ignore[no-untyped-def]
    """Element `index` of an array at an int64 address, whose elements have the type of `like`."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        pointer = builder.inttoptr(args[0], context.get_value_type(like).as_pointer())
        return builder.load(builder.gep(pointer, [args[1]]))

    return like(types.int64, types.int64, like), codegen


@intrinsic
def take(typingctx, counter):  # type: ignore[no-untyped-def]
    """Atomically increment the first element of an int64 array; returns its old value, a different one for each caller."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        array = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.atomic_rmw("add", array.data, ir.IntType(64)(1), "monotonic")

    return types.int64(counter), codegen


@numba.njit(nogil=True, cache=True, inline="always")
def floats_at(address, count):  # type: ignore[no-untyped-def]
    """float32 [count] at an int64 address."""
    return carray(_pointer(address), count, np.float32)


@numba.njit(nogil=True, cache=True, inline="always")
def integers_at(address, count):  # type: ignore[no-untyped-def]
    """int64 [count] at an int64 address."""
    return carray(_pointer(address), count, np.int64)


@numba.njit(nogil=True, cache=True, inline="always")
def words_at(address, count):  # type: ignore[no-untyped-def]
    """uint32 [count] at an int64 address."""
    return carray(_pointer(address), count, np.uint32)


@numba.njit(nogil=True, cache=True, inline="always")
def bytes_at(address, count):  # type: ignore[no-untyped-def]
    """uint8 [count] at an int64 address."""
    return carray(_pointer(address), count, np.uint8)
