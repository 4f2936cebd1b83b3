"""Snappy decompression without the GIL; Snappy is the default codec of Parquet files."""

from __future__ import annotations

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from rowstead.data.page_headers import little_endian, varint
from rowstead.kernels.cpu.memory import word_at

_kernel = numba.njit(nogil=True, cache=True, boundscheck=False)


@intrinsic
def store_word(typingctx, address, word):  # type: ignore[no-untyped-def]
    """Write a uint64 to an int64 address, which need not be aligned."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        builder.store(args[1], pointer, align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.uint64), codegen


@intrinsic
def copy_bytes(typingctx, target, source, size):  # type: ignore[no-untyped-def]
    """Copy `size` bytes between int64 addresses that do not overlap, as the C library does it."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        to, of = (builder.inttoptr(address, cgutils.voidptr_t) for address in args[:2])
        cgutils.raw_memcpy(builder, to, of, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@_kernel
def unpack_snappy(packed, out):  # type: ignore[no-untyped-def]
    """Decompress `packed` into out [n], both bytes; false if it is damaged or has another length."""
    stop, count = len(packed), len(out)
    length, at = varint(packed, 0, stop)
    if at < 0 or length != count:
        return False
    source, target = np.int64(packed.ctypes.data), np.int64(out.ctypes.data)
    done = np.int64(0)
    while at < stop:
        tag = np.int64(packed[at])
        at += 1
        kind = tag & 3
        # Away from the ends, always copy 16 bytes: most pieces are shorter, and a branch on their length is unpredictable.
        is_inside = stop - at >= 32 and count - done >= 96
        if kind == 0:
            size = (tag >> 2) + 1
            if is_inside and size <= 16:
                _copy_16(source + at, target + done)
            else:
                if size > 60:
                    size_bytes = size - 60
                    if size_bytes > stop - at:
                        return False
                    size = np.int64(little_endian(packed, at, at + size_bytes)) + 1
                    at += size_bytes
                if size > stop - at or size > count - done:
                    return False
                copy_bytes(target + done, source + at, size)
            at += size
            done += size
            continue
        size = 1 + (tag >> 2)
        if is_inside:
            width = np.uint64(4) << np.uint64(kind)
            back = np.int64(word_at(source + at) & ((np.uint64(1) << width) - np.uint64(1)))
            num_bytes = np.int64(width >> np.uint64(3))
        else:
            num_bytes = np.int64(1) if kind == 1 else np.int64(2 if kind == 2 else 4)
            if num_bytes > stop - at:
                return False
            back = np.int64(little_endian(packed, at, at + num_bytes))
        if kind == 1:
            size, back = 4 + ((tag >> 2) & 7), back | (tag >> 5) << 8
        at += num_bytes
        if back == 0 or back > done or size > count - done:
            return False
        if is_inside and back >= 8:
            _copy_16(target + done - back, target + done)
            for i in range(16, size, 8):
                store_word(target + done + i, word_at(target + done - back + i))
        else:  # source and target may overlap: the pattern repeats
            for i in range(size):
                out[done + i] = out[done - back + i]
        done += size
    return done == count


@_kernel
def _copy_16(source, target):  # type: ignore[no-untyped-def]
    """Copy 16 bytes between addresses at least 8 apart, in two steps."""
    store_word(target, word_at(source))
    store_word(target + 8, word_at(source + 8))
