"""Dot products of pairs of vectors on the CPU, in Numba: one example at a time, whose vectors and products stay in the CPU caches.

Only products below the diagonal are computed, and the backward pass reads the gradients of all of them in place: no [B, V, V] tensor
is written. Threads share the examples, so the result does not depend on their number, bit for bit.

The compiled functions take arrays, and scratch memory, by address: NumPy's functions would take longer to compile than all else.

Letters: B examples, K dense vectors, V vectors in all, D width, P pairs. Vectors from `low` to below `high` are multiplied with every
sparse vector after them (`partner_range`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowstead.kernels.cpu.memory import address_of, item
from rowstead.kernels.cpu.thread_team import parallel_ranges
from rowstead.kernels.cpu.tiles import ALIGN, PART_BYTES, ROWS, aligned_zeros, copy, put, sum_of_products, transpose
from rowstead.spec.interactions import Pairs, count_pairs, partner_range

_PART = 4_000_000
"""Multiplications that justify another thread."""

_jit = numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")


def forward(dense: Tensor | None, pooled: Tensor, width: int, pairs: Pairs, dtype: torch.dtype) -> Tensor:
    """The dense vectors and the products [B, K * D + P], in `dtype`; dense [B, K * D] or None, pooled [B, (V - K) * D]."""
    first, others = _inputs(dense, pooled)
    num_dense, num_vectors = first.shape[1] // width, (first.shape[1] + others.shape[1]) // width
    out = torch.empty(len(others), first.shape[1] + count_pairs(pairs, num_dense, num_vectors))
    given = address_of(first), address_of(others), out.data_ptr()
    sizes = num_dense, num_vectors, width, _padded(num_vectors), _padded(width), out.shape[1]
    low, high = partner_range(pairs, num_dense, num_vectors)

    def multiply(begin: int, end: int) -> None:
        height = _padded(num_vectors)
        vectors, turned, tile = (
            aligned_zeros(*one) for one in ((height, _padded(width)), (_padded(width), height), (ROWS, height))
        )
        rows, columns, parts = np.arange(ROWS), np.arange(width) * height, np.empty(5, np.int64)
        scratch = (address_of(one) for one in (vectors, turned, tile, rows, columns, parts))
        _multiply(*given, *sizes, low, high, begin, end, *scratch)

    _share(len(others), num_vectors, width, multiply)
    return out.to(dtype)


def backward(dense: Tensor | None, pooled: Tensor, width: int, pairs: Pairs, grad: Tensor) -> tuple[Tensor | None, Tensor]:
    """The gradients of `dense` and `pooled`, given that of the output of `forward`."""
    first, others = _inputs(dense, pooled)
    num_dense, num_vectors = first.shape[1] // width, (first.shape[1] + others.shape[1]) // width
    every = _of_all_pairs(_array(grad), num_dense, num_vectors, width, pairs)
    of_first, of_others = torch.empty(first.shape), torch.empty(others.shape)
    given = address_of(first), address_of(others), address_of(every), of_first.data_ptr(), of_others.data_ptr()
    sizes = num_dense, num_vectors, width, _padded(num_vectors), _padded(width), every.shape[1]
    # Start of each row of the triangle. A last, partial block of rows repeats the last row and discards the result.
    triangle = np.minimum(np.arange(_padded(num_vectors)), num_vectors - 1)
    triangle = triangle * (triangle - 1) // 2

    def spread(begin: int, end: int) -> None:
        vectors, tile = aligned_zeros(_padded(num_vectors), _padded(width)), aligned_zeros(ROWS, _padded(width))
        corner, corner_rows = np.zeros((ROWS, ROWS), np.float32), np.arange(ROWS) * ROWS
        ones, parts = np.arange(_padded(num_vectors)), np.empty(15, np.int64)
        scratch = (address_of(one) for one in (vectors, tile, corner, corner_rows, triangle, ones, parts))
        _spread(*given, *sizes, begin, end, *scratch)

    _share(len(others), num_vectors, width, spread)
    return None if dense is None else of_first.to(dense.dtype), of_others.to(pooled.dtype)


def _of_all_pairs(grad: NDArray[np.float32], num_dense: int, num_vectors: int, width: int, pairs: Pairs) -> NDArray[np.float32]:
    """The gradients [B, K * D + V (V - 1) / 2] of the dense vectors and of all products, with zeros for those that were left out."""
    if num_dense <= 1 and pairs == "both":
        return grad
    low, high = partner_range(pairs, num_dense, num_vectors)
    row, column = np.tril_indices(num_vectors, -1)
    chosen = np.flatnonzero((row >= num_dense) & (column >= low) & (column < high))
    every = np.zeros((len(grad), num_dense * width + len(row)), np.float32)
    every[:, : num_dense * width] = grad[:, : num_dense * width]
    every[:, num_dense * width + chosen] = grad[:, num_dense * width :]
    return every


def _inputs(dense: Tensor | None, pooled: Tensor) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    return _array(pooled[:, :0] if dense is None else dense), _array(pooled)


def _array(values: Tensor) -> NDArray[np.float32]:
    return np.asarray(values.detach().float().contiguous().numpy())


def _share(num_samples: int, num_vectors: int, width: int, work: Callable[[int, int], Any]) -> None:
    parts = min(torch.get_num_threads(), num_samples * num_vectors * num_vectors * width // _PART)
    parts = max(1, parts)
    parallel_ranges(work, [num_samples * part // parts for part in range(parts + 1)])


def _padded(count: int) -> int:
    return -(-count // ALIGN) * ALIGN


# Compiled. Addresses of float32 arrays: dense [B, K * D], pooled [B, (V - K) * D], vectors [height, padded], where `height` and `padded`
# are V and D padded. Of int64 arrays: `parts`, and offsets of rows and columns for `sum_of_products`.


@_jit
def _gather(dense, pooled, num_dense, num_vectors, width, padded, example, vectors):  # type: ignore[no-untyped-def]
    """Copy the vectors of one example, dense ones first, into the first rows of `vectors`."""
    num_sparse = num_vectors - num_dense
    first, source = dense + 4 * example * num_dense * width, pooled + 4 * example * num_sparse * width
    if padded == width:
        copy(vectors, first, num_dense * width)
        copy(vectors + 4 * num_dense * width, source, num_sparse * width)
    else:
        for index in range(num_dense):
            copy(vectors + 4 * index * padded, first + 4 * index * width, width)
        for index in range(num_sparse):
            copy(vectors + 4 * (num_dense + index) * padded, source + 4 * index * width, width)


@_jit
def _set_part(part, a, row_offsets, offsets, b, depth):  # type: ignore[no-untyped-def]
    """Set the pair of matrices at the address `part`, for `sum_of_products`."""
    put(part, 0, a)
    put(part, 1, row_offsets)
    put(part, 2, offsets)
    put(part, 3, b)
    put(part, 4, depth)


@_jit
def _multiply(  # type: ignore[no-untyped-def]
    dense, pooled, out, num_dense, num_vectors, width, height, padded, step, low, high, begin, end, vectors, turned, tile, rows,
    columns, parts,
):  # fmt: skip
    """Fill out [B, step = K * D + P] for the examples from `begin` to `end` - 1.

    Scratch: turned [padded, height], tile [ROWS, height].
    """
    for example in range(begin, end):
        _gather(dense, pooled, num_dense, num_vectors, width, padded, example, vectors)
        transpose(vectors, turned, height, padded)
        target = out + 4 * example * step
        copy(target, dense + 4 * example * num_dense * width, num_dense * width)
        target += 4 * num_dense * width
        for row in range(0, num_vectors, ROWS):
            last = row + ROWS if row + ROWS < num_vectors else num_vectors
            _set_part(parts, turned + 4 * row, rows, columns, turned, width)
            sum_of_products(tile, height, parts, np.int64(1), height, last - 1 if last - 1 < high else high)
            for index in range(row if row > num_dense else num_dense, last):
                count = (index if index < high else high) - low
                copy(target, tile + 4 * ((index - row) * height + low), count)
                target += 4 * count


@_jit
def _spread(  # type: ignore[no-untyped-def]
    dense, pooled, grad, of_dense, of_pooled, num_dense, num_vectors, width, height, padded, step, begin, end, vectors, tile, corner,
    corner_rows, triangle, ones, parts,
):  # fmt: skip
    """Fill the gradients of_dense [B, K * D] and of_pooled for the examples from `begin` to `end` - 1.

    grad [B, step = K * D + V (V - 1) / 2]: of the dense vectors, and of the products of all pairs.
    The gradient of vector i is the sum of g[i, k] x[k] over k below i, and of g[k, i] x[k] over k above i.

    Scratch: tile [ROWS, padded], corner [ROWS, ROWS] of zeros on its diagonal.
    """
    own_dense, own_sparse = num_dense * width, (num_vectors - num_dense) * width
    for example in range(begin, end):
        _gather(dense, pooled, num_dense, num_vectors, width, padded, example, vectors)
        passed = grad + 4 * example * step
        given = passed + 4 * own_dense
        for row in range(0, num_vectors, ROWS):
            last = row + ROWS if row + ROWS < num_vectors else num_vectors
            for i in range(ROWS):
                for k in range(i):
                    value = np.float32(0)
                    if row + i < last:
                        value = item(given, item(triangle, row + i, np.int64(0)) + row + k, np.float32(0))
                    put(corner, ROWS * i + k, value)
                    put(corner, ROWS * k + i, value)
            own, below = vectors + 4 * padded * row, vectors + 4 * padded * last
            _set_part(parts, given, triangle + 8 * row, ones, vectors, row)
            _set_part(parts + PART_BYTES, corner, corner_rows, ones, own, last - row)
            _set_part(parts + 2 * PART_BYTES, given + 4 * row, ones, triangle + 8 * last, below, num_vectors - last)
            sum_of_products(tile, padded, parts, np.int64(3), padded, width)
            for index in range(row, last):
                found = tile + 4 * (index - row) * padded
                if index < num_dense:
                    at = index * width
                    for d in range(width):
                        value = item(found, d, np.float32(0)) + item(passed, at + d, np.float32(0))
                        put(of_dense + 4 * example * own_dense, at + d, value)
                else:
                    copy(of_pooled + 4 * (example * own_sparse + (index - num_dense) * width), found, width)
