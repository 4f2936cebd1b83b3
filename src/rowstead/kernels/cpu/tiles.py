"""Small matrix products in vector registers, as LLVM vectors, for Numba kernels whose matrices stay in the CPU's caches.

Addresses are int64 and point to float32; steps and offsets count elements. The caller keeps the arrays alive.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

_features = binding.get_host_cpu_features()
LANES = 16 if _features.get("avx512f") else 8 if _features.get("avx2") else 4
"""float32 elements of one vector."""
MANY_REGISTERS = LANES != 8
"""Whether there are 32 vector registers, as in AVX-512 and NEON, rather than AVX2's 16."""
ROWS = 8 if MANY_REGISTERS else 4
"""Rows of a tile."""
ALIGN = max(LANES, ROWS)
"""Matrices are padded to a multiple of this."""
PART_BYTES = 40
"""Of a pair of matrices in the table that `sum_of_products` reads."""

_REAL, _INT64 = ir.FloatType(), ir.IntType(64)
_VECTOR = ir.VectorType(_REAL, LANES)
_INDICES = ir.VectorType(ir.IntType(32), LANES)


def _pointer(builder: Any, address: Any, element: Any, kind: ir.Type) -> Any:
    size = 8 if kind is _INT64 else 4
    return builder.inttoptr(builder.add(address, builder.mul(element, _INT64(size))), kind.as_pointer())


def _tile_product(rows: int, vectors: int) -> Any:
    @intrinsic
    def product(typingctx, c, c_step, parts, num_parts, b_step, row, column):  # type: ignore[no-untyped-def]
        """`sum_of_products` for `rows` rows from `row` on, and `vectors` vectors of columns from `column` on."""

        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            c, c_step, parts, num_parts, b_step, first_row, first_column = args
            multiply_add = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fmuladd.v{LANES}f32"
            )
            zero = ir.Constant(_VECTOR, [0.0] * LANES)
            sums = [cgutils.alloca_once_value(builder, zero) for _ in range(rows * vectors)]  # LLVM makes these registers
            nothing = ir.Constant(_VECTOR, ir.Undefined)
            first = ir.Constant(_INDICES, [0] * LANES)

            with cgutils.for_range(builder, num_parts, intp=_INT64) as part:
                facts = builder.mul(part.index, _INT64(5))
                a, row_offsets, offsets, b, depth = (
                    builder.load(_pointer(builder, parts, builder.add(facts, _INT64(fact)), _INT64)) for fact in range(5)
                )
                starts = []
                for row in range(rows):
                    index = builder.add(first_row, _INT64(row))
                    offset = builder.load(_pointer(builder, row_offsets, index, _INT64))
                    starts.append(builder.add(a, builder.mul(offset, _INT64(4))))
                with cgutils.for_range(builder, depth, intp=_INT64) as loop:
                    offset = builder.load(_pointer(builder, offsets, loop.index, _INT64))
                    begin = builder.add(builder.mul(loop.index, b_step), first_column)
                    row_of_b = [
                        builder.load(_pointer(builder, b, builder.add(begin, _INT64(vector * LANES)), _VECTOR), align=4)
                        for vector in range(vectors)
                    ]
                    for row in range(rows):
                        number = builder.load(_pointer(builder, starts[row], offset, _REAL))
                        single = builder.insert_element(nothing, number, ir.IntType(32)(0))
                        repeated = builder.shuffle_vector(single, nothing, first)
                        for vector in range(vectors):
                            total = sums[row * vectors + vector]
                            builder.store(builder.call(multiply_add, [repeated, row_of_b[vector], builder.load(total)]), total)
            for row in range(rows):
                begin = builder.add(builder.mul(c_step, builder.add(first_row, _INT64(row))), first_column)
                for vector in range(vectors):
                    index = _pointer(builder, c, builder.add(begin, _INT64(vector * LANES)), _VECTOR)
                    builder.store(builder.load(sums[row * vectors + vector]), index, align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return product


_by_1, _by_2, _by_3, _half_by_4 = (_tile_product(ROWS, 1), _tile_product(ROWS, 2), _tile_product(ROWS, 3), _tile_product(4, 4))


@numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
def sum_of_products(to, step, table, num_parts, b_step, width):  # type: ignore[no-untyped-def]
    """C = the sum of A B over some pairs of matrices, where C is [ROWS, width] at `to`, written up to the next multiple of LANES.

    `step` elements a row of C. `table` is the address of int64 [num_parts, 5], a row a pair: the address of A; addresses of
    int64 [ROWS] and [depth], so that A[r, k] is at the sum of their r-th and k-th offset; the address of B [depth, width],
    `b_step` elements a row; and the depth.
    """
    column = 0
    while column < width:
        left = width - column
        if MANY_REGISTERS and left > 3 * LANES:
            _half_by_4(to, step, table, num_parts, b_step, 0, column)
            _half_by_4(to, step, table, num_parts, b_step, 4, column)
            column += 4 * LANES
        elif MANY_REGISTERS and left > 2 * LANES:
            _by_3(to, step, table, num_parts, b_step, 0, column)
            column += 3 * LANES
        elif left > LANES:
            _by_2(to, step, table, num_parts, b_step, 0, column)
            column += 2 * LANES
        else:
            _by_1(to, step, table, num_parts, b_step, 0, column)
            column += LANES


@intrinsic
def _transpose_block(typingctx, source, source_step, target, target_step):  # type: ignore[no-untyped-def]
    """A block [LANES, LANES] of one matrix into another, turned."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        source, source_step, target, target_step = args
        half = LANES // 2
        lower = ir.Constant(_INDICES, [lane for i in range(half) for lane in (i, LANES + i)])
        upper = ir.Constant(_INDICES, [lane for i in range(half, LANES) for lane in (i, LANES + i)])
        rows = [
            builder.load(_pointer(builder, source, builder.mul(source_step, _INT64(row)), _VECTOR), align=4)
            for row in range(LANES)
        ]
        # Each round interleaves the first half of the rows with the second: as many rounds as bits in a lane's index.
        for _ in range(LANES.bit_length() - 1):
            rows = [builder.shuffle_vector(rows[i], rows[i + half], part) for i in range(half) for part in (lower, upper)]
        for row, value in enumerate(rows):
            builder.store(value, _pointer(builder, target, builder.mul(target_step, _INT64(row)), _VECTOR), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@intrinsic
def copy(typingctx, target, source, count):  # type: ignore[no-untyped-def]
    """`count` float32 numbers from one address to another."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        target, source = (builder.inttoptr(address, cgutils.voidptr_t) for address in args[:2])
        cgutils.raw_memcpy(builder, target, source, args[2], 4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def put(typingctx, address, index, value):  # type: ignore[no-untyped-def]
    """Write element `index` of an array at an int64 address, whose elements have the type of `value`."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        pointer = builder.inttoptr(args[0], args[2].type.as_pointer())
        builder.store(args[2], builder.gep(pointer, [args[1]]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, value), codegen


@numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
def transpose(source, target, height, width):  # type: ignore[no-untyped-def]
    """Turn a float32 matrix [height, width] into one [width, height]; both numbers are multiples of LANES."""
    for row in range(0, height, LANES):
        for column in range(0, width, LANES):
            _transpose_block(source + 4 * (row * width + column), width, target + 4 * (column * height + row), height)


def aligned_zeros(height: int, width: int) -> NDArray[np.float32]:
    """A float32 matrix of zeros whose first element begins a cache line."""
    memory = np.zeros(height * width + 16, np.float32)
    skipped = (-memory.ctypes.data >> 2) & 15
    return memory[skipped : skipped + height * width].reshape(height, width)
