"""CRC-32 as in zlib and Parquet pages, without the GIL and inside other kernels.

Where the processor multiplies without carries (PCLMULQDQ), 64 bytes at a time are folded into 64 bytes of the same remainder; the rest
goes through tables, 8 bytes at a time.
"""

from __future__ import annotations

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic
from numpy.typing import NDArray

from rowstead.data.snappy import store_word
from rowstead.kernels.cpu.memory import word_at

HAS_CARRYLESS_MULTIPLY = "+pclmul" in cpu_target.target_context.codegen().magic_tuple()[2]
"""Whether kernels are compiled for a processor with PCLMULQDQ."""
_FOLD_LOW, _FOLD_HIGH = 0x154442BD4, 0x1C6E41596
"""The remainders of x to the powers 4 * 128 + 32 and 4 * 128 - 32, bits reflected: both move 128 bits by 64 bytes."""
_BLOCK = 64
_BYTE = np.uint64(0xFF)

_kernel = numba.njit(nogil=True, cache=True, boundscheck=False)


def _build_tables() -> NDArray[np.uint32]:
    """[8, 256]: the remainder of each byte with 0 to 7 zero bytes after it."""
    tables = np.zeros((8, 256), np.uint32)
    first = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        first = np.where(first & 1, (first >> 1) ^ np.uint32(0xEDB88320), first >> 1).astype(np.uint32)
    tables[0] = first
    for k in range(1, 8):
        tables[k] = (tables[k - 1] >> 8) ^ first[tables[k - 1] & 0xFF]
    return tables


_TABLES = _build_tables()


@intrinsic
def _fold_blocks(typingctx, state, address, num_blocks):  # type: ignore[no-untyped-def]
    """Fold `num_blocks` blocks of 64 bytes at `address` into the 64 bytes at `state`."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        if not HAS_CARRYLESS_MULTIPLY:  # compiled, but never reached
            return context.get_dummy_value()
        int64, int8 = ir.IntType(64), ir.IntType(8)
        vector = ir.VectorType(int64, 2)
        kind = ir.FunctionType(vector, [vector, vector, int8])
        multiply = builder.module.declare_intrinsic("llvm.x86.pclmulqdq", (), kind)
        factor = ir.Constant(vector, [_FOLD_LOW, _FOLD_HIGH])

        def lane(base, number):  # type: ignore[no-untyped-def]
            return builder.inttoptr(builder.add(base, int64(16 * number)), vector.as_pointer())

        lanes = [builder.load(lane(args[0], k), align=1) for k in range(4)]
        before, body, after = builder.block, builder.append_basic_block("fold"), builder.append_basic_block("folded")
        builder.cbranch(builder.icmp_signed(">", args[2], int64(0)), body, after)
        builder.position_at_end(body)
        number = builder.phi(int64)
        number.add_incoming(int64(0), before)
        found = [builder.phi(vector) for _ in lanes]
        base = builder.add(args[1], builder.mul(number, int64(_BLOCK)))
        folded = []
        for k, value in enumerate(found):
            value.add_incoming(lanes[k], before)
            low = builder.call(multiply, [value, factor, int8(0x00)])
            high = builder.call(multiply, [value, factor, int8(0x11)])
            folded.append(builder.xor(builder.xor(low, high), builder.load(lane(base, k), align=1)))
            value.add_incoming(folded[k], body)
        following = builder.add(number, int64(1))
        number.add_incoming(following, body)
        builder.cbranch(builder.icmp_signed("<", following, args[2]), body, after)
        builder.position_at_end(after)
        for k in range(4):
            result = builder.phi(vector)
            result.add_incoming(lanes[k], before)
            result.add_incoming(folded[k], body)
            lanes[k] = result
        for k in range(4):
            builder.store(lanes[k], lane(args[0], k), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@_kernel
def extend_by_tables(register, data):  # type: ignore[no-untyped-def]
    """The register after the bytes of `data`, 8 at a time by tables."""
    size, base = len(data), np.int64(data.ctypes.data)
    for i in range(0, size & ~7, 8):
        word = word_at(base + i) ^ np.uint64(register)
        one, other = word & np.uint64(0xFFFFFFFF), word >> np.uint64(32)
        register = (
            _TABLES[7, one & _BYTE]
            ^ _TABLES[6, (one >> np.uint64(8)) & _BYTE]
            ^ _TABLES[5, (one >> np.uint64(16)) & _BYTE]
            ^ _TABLES[4, one >> np.uint64(24)]
            ^ _TABLES[3, other & _BYTE]
            ^ _TABLES[2, (other >> np.uint64(8)) & _BYTE]
            ^ _TABLES[1, (other >> np.uint64(16)) & _BYTE]
            ^ _TABLES[0, other >> np.uint64(24)]
        )
    for i in range(size & ~7, size):
        register = (register >> np.uint32(8)) ^ _TABLES[0, (register ^ np.uint32(data[i])) & np.uint32(0xFF)]
    return register


@_kernel
def crc32(data):  # type: ignore[no-untyped-def]
    """The CRC-32 of bytes, from 0 to 2**32 - 1, as int64."""
    register, done = np.uint32(0xFFFFFFFF), 0
    if HAS_CARRYLESS_MULTIPLY and len(data) >= 2 * _BLOCK:
        state = data[:_BLOCK].copy()
        address = np.int64(state.ctypes.data)
        store_word(address, word_at(address) ^ np.uint64(0xFFFFFFFF))
        num_blocks = len(data) // _BLOCK
        _fold_blocks(address, np.int64(data.ctypes.data) + _BLOCK, num_blocks - 1)
        register, done = extend_by_tables(np.uint32(0), state), num_blocks * _BLOCK
    return np.int64(~extend_by_tables(register, data[done:]) & np.uint32(0xFFFFFFFF))
