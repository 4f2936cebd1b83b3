"""Dot products of pairs of vectors on a CUDA GPU, in Triton: products are written directly to the triangle, and gradients read from it.

A program computes one tile of one example's products, or the gradients of some of its vectors. No [B, V, V] tensor is
written. Every sum has a fixed order, so results are deterministic bit for bit.

Letters: B examples, K dense vectors, V vectors in all, D width, P pairs. Capital arguments are known when a program is compiled:
TILE vectors and DEPTH numbers of each at a time, both powers of two of 16 or more; FIRST is K; vectors from LOW to below HIGH are
multiplied with every sparse vector after them (`partner_range`).
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from rowstead.spec.interactions import Pairs, count_pairs, partner_range

ALIGNMENT = 8
"""The width of the result is a multiple of this, else the following matrix product is slower."""


def forward(dense: Tensor | None, pooled: Tensor, width: int, pairs: Pairs, dtype: torch.dtype) -> Tensor:
    """The dense vectors and the products, in `dtype`; dense [B, K * D] or None, pooled [B, (V - K) * D].

    Returns [B, K * D + P rounded up to ALIGNMENT], with zeros in the extra columns.
    """
    shape = _shape(0 if dense is None else dense.shape[1], pooled.shape[1], width, pairs)
    num_samples, num_vectors = len(pooled), shape["V"]
    used = shape["FIRST"] * width + shape["P"]
    out = torch.empty(num_samples, triton.cdiv(used, ALIGNMENT) * ALIGNMENT, dtype=dtype, device=pooled.device)
    if num_samples:
        pooled = pooled.contiguous()
        dense = pooled if dense is None else dense.contiguous()
        tiles = triton.cdiv(num_vectors, shape["TILE"])
        depth = min(64, triton.next_power_of_2(max(16, width)))
        _multiply[(num_samples, tiles, tiles)](
            dense, pooled, out, out.shape[1], **shape, DEPTH=depth, PRECISION=_precision(), num_warps=shape["TILE"] // 16,
            num_stages=2,
        )  # fmt: skip
    return out


def backward(dense: Tensor | None, pooled: Tensor, width: int, pairs: Pairs, grad: Tensor) -> tuple[Tensor | None, Tensor]:
    """The gradients of `dense` and `pooled`, given that of the output of `forward`."""
    shape = _shape(0 if dense is None else dense.shape[1], pooled.shape[1], width, pairs)
    pooled, grad = pooled.contiguous(), grad.contiguous()
    given = pooled if dense is None else dense.contiguous()
    of_pooled = torch.empty_like(pooled)
    of_dense = of_pooled if dense is None else torch.empty_like(given)
    if len(pooled):
        depth = min(128, triton.next_power_of_2(max(16, width)))
        grid = (len(pooled), triton.cdiv(shape["V"], shape["TILE"]), triton.cdiv(width, depth))
        _spread[grid](
            given, pooled, grad, of_dense, of_pooled, grad.shape[1], **shape, DEPTH=depth, PRECISION=_precision(),
            num_warps=shape["TILE"] // 16, num_stages=2,
        )  # fmt: skip
    return None if dense is None else of_dense, of_pooled


@lru_cache(maxsize=64)
def _shape(dense_width: int, pooled_width: int, width: int, pairs: Pairs) -> dict[str, int]:
    num_dense, num_vectors = dense_width // width, (dense_width + pooled_width) // width
    tile = min(64, triton.next_power_of_2(max(16, num_vectors)))
    low, high = partner_range(pairs, num_dense, num_vectors)
    chosen = {"FIRST": num_dense, "LOW": low, "HIGH": high, "P": count_pairs(pairs, num_dense, num_vectors)}
    return {"V": num_vectors, "WIDTH": width, "TILE": tile, **chosen}


def _precision() -> str:
    """How FP32 numbers are multiplied: as in torch's own products."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


@triton.jit
def _vectors(  # type: ignore[no-untyped-def]
    dense, pooled, like, example, index, d, V: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr
):  # fmt: skip
    """Load elements `d` [1, DEPTH] of the vectors `index` [TILE, 1] of one example, in the dtype that `like` points to."""
    kind = like.dtype.element_ty
    inside = (index < V) & (d < WIDTH)
    others = pooled + example * ((V - FIRST) * WIDTH)
    values = tl.load(others + (index - FIRST) * WIDTH + d, mask=inside & (index >= FIRST), other=0.0).to(kind)
    if FIRST:
        own = tl.load(dense + example * (FIRST * WIDTH) + index * WIDTH + d, mask=inside & (index < FIRST), other=0.0).to(kind)
        values = tl.where(index < FIRST, own, values)
    return values


@triton.jit
def _product_at(  # type: ignore[no-untyped-def]
    row, column, V: tl.constexpr, FIRST: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr
):  # fmt: skip
    """Index of the products of vectors `row` and `column` among all P, and which there are."""
    is_there = (column < row) & (row < V)
    if FIRST > 1:
        is_there = is_there & (row >= FIRST)
    if LOW > 0:
        is_there = is_there & (column >= LOW)
    if HIGH < V:
        is_there = is_there & (column < HIGH)
        at = (row - FIRST) * FIRST + column
    else:
        own = row - LOW
        at = own * (own - 1) // 2 + column - (LOW + (FIRST - LOW) * (FIRST - LOW - 1) // 2)
    return at, is_there


@triton.jit
def _multiply(  # type: ignore[no-untyped-def]
    dense, pooled, out, out_width, V: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, FIRST: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, P: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per tile of products of one example; those above the diagonal do nothing."""
    example = tl.program_id(0).to(tl.int64)
    row_tile = tl.program_id(1)
    column_tile = tl.program_id(2)
    if column_tile <= row_tile:
        indices = tl.arange(0, TILE)[:, None]
        total = tl.zeros([TILE, TILE], tl.float32)
        for start in range(0, WIDTH, DEPTH):
            d = start + tl.arange(0, DEPTH)[None, :]
            left = _vectors(dense, pooled, out, example, row_tile * TILE + indices, d, V, WIDTH, FIRST)
            right = _vectors(dense, pooled, out, example, column_tile * TILE + indices, d, V, WIDTH, FIRST)
            total += tl.dot(left, tl.trans(right), input_precision=PRECISION)
        row = row_tile * TILE + indices
        column = column_tile * TILE + tl.arange(0, TILE)[None, :]
        result = out + example * out_width
        at, is_there = _product_at(row, column, V, FIRST, LOW, HIGH)
        tl.store(result + FIRST * WIDTH + at, total.to(out.dtype.element_ty), mask=is_there)
        rest = FIRST * WIDTH + P + row_tile * out_width + tl.arange(0, 8)  # by the first tile only
        tl.store(result + rest, tl.zeros([8], out.dtype.element_ty), mask=rest < out_width)
        if FIRST:
            for start in range(0, FIRST * WIDTH, DEPTH):
                d = start + tl.arange(0, DEPTH)
                once = d + row_tile * (FIRST * WIDTH) < FIRST * WIDTH  # by the first tile only
                values = tl.load(dense + example * (FIRST * WIDTH) + d, mask=once, other=0.0)
                tl.store(result + d, values.to(out.dtype.element_ty), mask=once)


@triton.jit
def _spread(  # type: ignore[no-untyped-def]
    dense, pooled, grad, of_dense, of_pooled, grad_width, V: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    FIRST: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, P: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per tile of vectors of one example, for their gradients: g[i, k] x[k] over k below i, g[k, i] x[k] over k above."""
    example = tl.program_id(0).to(tl.int64)
    own_tile = tl.program_id(1)
    d = tl.program_id(2) * DEPTH + tl.arange(0, DEPTH)[None, :]
    tall = tl.arange(0, TILE)[:, None]
    wide = tl.arange(0, TILE)[None, :]
    own = own_tile * TILE + tall
    own_wide = own_tile * TILE + wide
    passed = grad + example * grad_width
    triangle = passed + FIRST * WIDTH

    at, is_there = _product_at(tl.maximum(own, own_wide), tl.minimum(own, own_wide), V, FIRST, LOW, HIGH)
    weights = tl.load(triangle + at, mask=is_there, other=0.0)
    values = _vectors(dense, pooled, grad, example, own, d, V, WIDTH, FIRST)
    total = tl.dot(weights, values, input_precision=PRECISION)
    for tile in range(own_tile):
        at, is_there = _product_at(own, tile * TILE + wide, V, FIRST, LOW, HIGH)
        weights = tl.load(triangle + at, mask=is_there, other=0.0)
        values = _vectors(dense, pooled, grad, example, tile * TILE + tall, d, V, WIDTH, FIRST)
        total += tl.dot(weights, values, input_precision=PRECISION)
    for tile in range(own_tile + 1, (V + TILE - 1) // TILE):
        other = tile * TILE + tall
        # Read along the rows of the triangle, then transposed.
        at, is_there = _product_at(other, own_wide, V, FIRST, LOW, HIGH)
        weights = tl.load(triangle + at, mask=is_there, other=0.0)
        values = _vectors(dense, pooled, grad, example, other, d, V, WIDTH, FIRST)
        total += tl.dot(tl.trans(weights), values, input_precision=PRECISION)

    inside = (own < V) & (d < WIDTH)
    target = of_pooled + example * ((V - FIRST) * WIDTH) + (own - FIRST) * WIDTH + d
    tl.store(target, total.to(of_pooled.dtype.element_ty), mask=inside & (own >= FIRST))
    if FIRST:
        first = inside & (own < FIRST)
        total += tl.load(passed + own * WIDTH + d, mask=first, other=0.0).to(tl.float32)
        tl.store(of_dense + example * (FIRST * WIDTH) + own * WIDTH + d, total.to(of_dense.dtype.element_ty), mask=first)
