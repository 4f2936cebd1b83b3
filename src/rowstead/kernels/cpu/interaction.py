"""Dot products of pairs of vectors on the CPU, in Numba: one example at a time, whose vectors and products stay in the CPU caches.

Only products below the diagonal are computed, and the backward pass reads the gradients of all of them in place: no [B, V, V] tensor
is written. Threads share the examples, so the result does not depend on their number, bit for bit.

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

from rowstead.kernels.cpu.thread_team import parallel_ranges
from rowstead.kernels.cpu.tiles import ALIGN, ROWS, aligned_zeros, copy, sum_of_products, transpose
from rowstead.spec.interactions import Pairs, count_pairs, partner_range

_PART = 4_000_000
"""Multiplications that justify another thread."""

_jit = numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")


def forward(dense: Tensor | None, pooled: Tensor, width: int, pairs: Pairs, dtype: torch.dtype) -> Tensor:
    """The dense vectors and the products [B, K * D + P], in `dtype`; dense [B, K * D] or None, pooled [B, (V - K) * D]."""
    first, others = _inputs(dense, pooled)
    num_dense, num_vectors = first.shape[1] // width, (first.shape[1] + others.shape[1]) // width
    out = torch.empty(len(others), first.shape[1] + count_pairs(pairs, num_dense, num_vectors))
    given = first, others, width, *partner_range(pairs, num_dense, num_vectors), out.numpy()
    _share(len(others), num_vectors, width, lambda begin, end: _multiply(*given, begin, end))
    return out.to(dtype)


def backward(dense: Tensor | None, pooled: Tensor, width: int, pairs: Pairs, grad: Tensor) -> tuple[Tensor | None, Tensor]:
    """The gradients of `dense` and `pooled`, given that of the output of `forward`."""
    first, others = _inputs(dense, pooled)
    num_vectors = (first.shape[1] + others.shape[1]) // width
    given = _of_all_pairs(_array(grad), first.shape[1] // width, num_vectors, width, pairs)
    of_first, of_others = torch.empty(first.shape), torch.empty(others.shape)
    one, two = of_first.numpy(), of_others.numpy()
    _share(len(others), num_vectors, width, lambda begin, end: _spread(first, others, width, given, one, two, begin, end))
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


@_jit
def _padded(count):  # type: ignore[no-untyped-def]
    return -(-count // ALIGN) * ALIGN


@_jit
def _gather(dense, pooled, example, width, vectors):  # type: ignore[no-untyped-def]
    """Copy the vectors of one example, dense ones first, into the first rows of vectors [padded V, padded D]."""
    num_dense, step = dense.shape[1] // width, vectors.shape[1]
    target, source = vectors.ctypes.data, pooled.ctypes.data + 4 * example * pooled.shape[1]
    first = dense.ctypes.data + 4 * example * dense.shape[1]
    if step == width:
        copy(target, first, dense.shape[1])
        copy(target + 4 * dense.shape[1], source, pooled.shape[1])
    else:
        for index in range(num_dense):
            copy(target + 4 * index * step, first + 4 * index * width, width)
        for index in range(pooled.shape[1] // width):
            copy(target + 4 * (num_dense + index) * step, source + 4 * index * width, width)


@_jit
def _multiply(dense, pooled, width, low, high, out, begin, end):  # type: ignore[no-untyped-def]
    """Fill out [B, K * D + P] for the examples from `begin` to `end` - 1."""
    num_dense = dense.shape[1] // width
    num_vectors = num_dense + pooled.shape[1] // width
    height = _padded(num_vectors)
    vectors = aligned_zeros(height, _padded(width))
    turned = aligned_zeros(_padded(width), height)
    tile = aligned_zeros(ROWS, height)
    rows, steps, parts = np.arange(ROWS), np.arange(width) * height, np.empty((1, 5), np.int64)
    for example in range(begin, end):
        _gather(dense, pooled, example, width, vectors)
        transpose(vectors, turned)
        out[example, : dense.shape[1]] = dense[example]
        at = example * out.shape[1] + dense.shape[1]
        for row in range(0, num_vectors, ROWS):
            last = min(row + ROWS, num_vectors)
            start = turned.ctypes.data
            _set_part(parts, 0, start + 4 * row, rows.ctypes.data, steps.ctypes.data, start, width)
            sum_of_products(tile, parts, 1, height, min(last - 1, high))
            for index in range(max(row, num_dense), last):
                count = min(index, high) - low
                copy(out.ctypes.data + 4 * at, tile.ctypes.data + 4 * ((index - row) * height + low), count)
                at += count


@_jit
def _set_part(parts, index, a, row_offsets, offsets, b, depth):  # type: ignore[no-untyped-def]
    """Set one pair of matrices for `sum_of_products`."""
    parts[index, 0], parts[index, 1], parts[index, 2], parts[index, 3], parts[index, 4] = a, row_offsets, offsets, b, depth


@_jit
def _spread(dense, pooled, width, grad, of_dense, of_pooled, begin, end):  # type: ignore[no-untyped-def]
    """Fill the gradients of_dense [B, K * D] and of_pooled for the examples from `begin` to `end` - 1.

    grad [B, K * D + V (V - 1) / 2]: of the dense vectors, and of the products of all pairs.
    The gradient of vector i is the sum of g[i, k] x[k] over k below i, and of g[k, i] x[k] over k above i.
    """
    num_dense = dense.shape[1] // width
    num_vectors = num_dense + pooled.shape[1] // width
    padded = _padded(width)
    vectors = aligned_zeros(_padded(num_vectors), padded)
    tile = aligned_zeros(ROWS, padded)
    corner, corner_rows = np.zeros((ROWS, ROWS), np.float32), np.arange(ROWS) * ROWS
    # Start of each row of the triangle. A last, partial block of rows repeats the last row and discards the result.
    triangle = np.minimum(np.arange(_padded(num_vectors)), num_vectors - 1)
    triangle = triangle * (triangle - 1) // 2
    ones, parts = np.arange(_padded(num_vectors)), np.empty((3, 5), np.int64)
    for example in range(begin, end):
        _gather(dense, pooled, example, width, vectors)
        given = grad[example, dense.shape[1] :]
        for row in range(0, num_vectors, ROWS):
            last = min(row + ROWS, num_vectors)
            corner[:] = 0
            for i in range(last - row):
                for k in range(i):
                    corner[i, k] = corner[k, i] = given[triangle[row + i] + row + k]
            # Addresses are taken here, right before use: Numba frees an array after its last use by name.
            start, one, source, first = vectors.ctypes.data, ones.ctypes.data, given.ctypes.data, triangle.ctypes.data
            own, below = start + 4 * padded * row, start + 4 * padded * last
            _set_part(parts, 0, source, first + 8 * row, one, start, row)
            _set_part(parts, 1, corner.ctypes.data, corner_rows.ctypes.data, one, own, last - row)
            _set_part(parts, 2, source + 4 * row, one, first + 8 * last, below, num_vectors - last)
            sum_of_products(tile, parts, 3, padded, width)
            for index in range(row, last):
                found = tile[index - row]
                if index < num_dense:
                    own_dense, passed = of_dense[example, index * width :], grad[example, index * width :]
                    for d in range(width):
                        own_dense[d] = found[d] + passed[d]
                else:
                    target = of_pooled.ctypes.data + 4 * (example * of_pooled.shape[1] + (index - num_dense) * width)
                    copy(target, found.ctypes.data, width)
