"""Arrays by address, so that one kernel can read any number of them without compiling for that number.

Whoever passes an address keeps the array alive until the kernel returns.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import carray
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray


def address_of(array: NDArray[Any]) -> int:
    """Address of the first element of a C-contiguous array."""
    assert array.flags.c_contiguous
    return int(array.__array_interface__["data"][0])


@intrinsic
def _pointer(typingctx, address):  # type: ignore[no-untyped-def]
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


@intrinsic
def _pointer_like(typingctx, address, like):  # type: ignore[no-untyped-def]
    """A pointer to elements of the array `like`'s type."""
    pointer = types.CPointer(like.dtype)  # type: ignore[attr-defined]

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.inttoptr(args[0], context.get_value_type(pointer))

    return pointer(types.int64, like), codegen


@intrinsic
def word_at(typingctx, address):  # type: ignore[no-untyped-def]
    """The 8 bytes at an int64 address, which need not be aligned, as uint64."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load(pointer, align=1)

    return types.uint64(types.int64), codegen


@intrinsic
def lowest_bit(typingctx, word):  # type: ignore[no-untyped-def]
    """The place of the lowest bit that is set in a uint64 other than 0, as int64."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.cttz(args[0], ir.IntType(1)(1))

    return types.int64(types.uint64), codegen


@intrinsic
def prefetch(typingctx, address):  # type: ignore[no-untyped-def]
    """Ask for the cache line at an int64 address, which need not be valid, and go on."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        int32 = ir.IntType(32)
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", [cgutils.voidptr_t], ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, int32, int32, int32])
        )
        read, keep, data_cache = int32(0), int32(3), int32(1)
        builder.call(function, [builder.inttoptr(args[0], cgutils.voidptr_t), read, keep, data_cache])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@numba.njit(nogil=True, cache=True, inline="always")
def reals_at(address, count, like):  # type: ignore[no-untyped-def]
    """[count] elements of the type of the array `like` at an int64 address."""
    return carray(_pointer_like(address, like), count)


@numba.njit(nogil=True, cache=True, inline="always")
def floats_at(address, count):  # type: ignore[no-untyped-def]
    """float32 [count] at an int64 address."""
    return carray(_pointer(address), count, np.float32)


@numba.njit(nogil=True, cache=True, inline="always")
def integers_at(address, count):  # type: ignore[no-untyped-def]
    """int64 [count] at an int64 address."""
    return carray(_pointer(address), count, np.int64)
