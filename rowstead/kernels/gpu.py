"""Pooled look-up and exact fused update on a CUDA GPU, in Triton: all tables in one launch.

An update sorts (table, id) keys, which puts equal ids side by side, and walks the sorted places in tiles. Inside a tile a
segmented scan sums the gradients of each run of equal ids. A run that ends where it began, inside one tile, is applied at
once; one that crosses a border leaves a partial sum a tile, and a second, small launch adds those up in order. So every sum
has one order, and the result is the same bit for bit each time.

Letters: B examples, F features, T tables, N rows, D width, nnz ids, R places a tile, P tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from rowstead.kernels.layout import Layout
from rowstead.kernels.optimizer import KINDS, RowState, numbers_of, state_addresses
from rowstead.spec.train import SparseOptimizerSpec

SHORT_BAG = 4
"""Mean ids a bag up to which a program pools several bags rather than several ids of one."""


def lookup(tables: Sequence[Tensor], layout: Layout, ids: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Pooled rows of every feature, side by side: [B, sum of widths].

    tables: T tensors [N, D] of one dtype; ids int32 or int64 [nnz], in range; offsets int64 [F*B + 1]; weights [nnz] or none.
    """
    facts = _facts(layout, ids.device)
    num_bags = offsets.numel() - 1
    num_samples = num_bags // layout.num_features
    pooled = torch.empty(num_samples, layout.total_width, dtype=tables[0].dtype, device=ids.device)
    if not num_samples:
        return pooled
    rows = _addresses(tuple(table.data_ptr() for table in tables), ids.device)
    mean = ids.numel() / num_bags
    shape = _Shape.of(layout, tables)
    common = (ids, offsets, ids if weights is None else weights, pooled, rows, *facts.pooling, num_samples, num_bags)
    options = {"WEIGHTED": weights is not None, **shape}
    if mean <= SHORT_BAG:
        bags = max(1, 1024 // shape["D"])
        _pool_bags[(triton.cdiv(num_bags, bags),)](*common, layout.total_width, **options, BAGS=bags, num_warps=4)
    else:
        step = min(32, triton.next_power_of_2(int(mean)))
        _pool_ids[(num_bags,)](*common, layout.total_width, **options, L=step, num_warps=1)
    return pooled


def update(
    tables: Sequence[Tensor],
    states: Sequence[RowState],
    layout: Layout,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    grad: Tensor,
    *,
    optimizer: SparseOptimizerSpec,
    lr: float,
    step: int,
) -> None:
    """One exact optimizer step on every row that `ids` name, in place; grad [B, sum of widths]. Ids must be in range."""
    num_ids = ids.numel()
    if not num_ids:
        return
    device, grad = ids.device, grad.contiguous()
    facts = _facts(layout, device)
    num_bags = offsets.numel() - 1
    num_samples = num_bags // layout.num_features
    keys = torch.empty(num_ids, dtype=facts.key_dtype, device=device)
    bags = torch.empty(num_ids, dtype=torch.int32, device=device)
    wide = min(32, triton.next_power_of_2(max(1, num_ids // num_bags)))
    tall = max(1, 256 // wide)
    _name_rows[(triton.cdiv(num_bags, tall),)](
        ids, offsets, keys, bags, facts.row_base, num_samples, num_bags, BAGS=tall, L=wide, num_warps=4
    )
    keys, order = torch.sort(keys, stable=True)

    shape = _Shape.of(layout, tables)
    tile = max(4, min(32, 1024 // shape["D"]))
    num_tiles = triton.cdiv(num_ids, tile)
    head = torch.empty(num_tiles, shape["D"], dtype=grad.dtype, device=device)
    tail = torch.empty_like(head)
    scales = _bag_scales(grad, offsets, layout, optimizer.clip)
    firsts, seconds = zip(*(state_addresses(state) for state in states), strict=True)
    memory = (
        _addresses(tuple(table.data_ptr() for table in tables), device),
        _addresses(firsts, device),
        _addresses(seconds, device),
    )
    numbers = torch.tensor(numbers_of(optimizer, lr=lr, step=step), dtype=grad.dtype, device=device)
    options = {**shape, "KIND": KINDS[optimizer.kind], "R": tile}
    _apply_tiles[(num_tiles,)](
        keys, order, bags, grad, ids if weights is None else weights, keys if scales is None else scales, head, tail,
        *memory, *facts.update, num_samples, num_ids, layout.total_width, numbers,
        WEIGHTED=weights is not None, SCALED=scales is not None, **options, num_warps=1,
    )  # fmt: skip
    _join_tiles[(triton.cdiv(num_tiles, 32),)](
        keys, order, bags, head, tail, *memory, *facts.update, num_samples, num_ids, num_tiles, numbers,
        **options, TILES=32, num_warps=1,
    )  # fmt: skip


class _Shape:
    """What the compiler should know about widths: the block, the one width if there is one, and whether rows are aligned."""

    @staticmethod
    @lru_cache(maxsize=64)
    def _of(widths: tuple[int, ...], itemsize: int, aligned: bool) -> dict[str, int]:
        same = len(set(widths)) == 1
        quad = all(width * itemsize % 16 == 0 for width in widths) and aligned
        return {"D": triton.next_power_of_2(max(widths)), "WIDTH": widths[0] if same else 0, "ALIGNED": quad}

    @classmethod
    def of(cls, layout: Layout, tables: Sequence[Tensor]) -> dict[str, int]:
        aligned = all(table.data_ptr() % 16 == 0 for table in tables)
        return cls._of(tuple(table.width for table in layout.tables), tables[0].element_size(), aligned)


class _Facts:
    """A layout as tensors on the device."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        def numbers(values: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(list(values), dtype=dtype, device=device)

        table_of = numbers(layout.table_of)
        widths = numbers([table.width for table in layout.tables])
        bases = [0]
        for table in layout.tables:
            bases.append(bases[-1] + table.num_rows)
        self.key_dtype = torch.int32 if bases[-1] < 2**31 else torch.int64
        self.row_base = numbers([bases[table] for table in layout.table_of], torch.int64)
        """For each feature the key of row 0 of its table."""
        columns = numbers(layout.columns)
        self.pooling = (table_of, widths, columns, numbers([int(mean) for mean in layout.is_mean]))
        self.update = (table_of, widths, columns, self.row_base)


@lru_cache(maxsize=64)
def _facts(layout: Layout, device: torch.device) -> _Facts:
    return _Facts(layout, device)


@lru_cache(maxsize=256)
def _addresses(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(addresses, dtype=torch.int64, device=device)


def _bag_scales(grad: Tensor, offsets: Tensor, layout: Layout, clip: float | None) -> Tensor | None:
    """What the gradient of each bag is multiplied by [F*B]: its mean's share and its clipping; none when all are 1."""
    if clip is None and not any(layout.is_mean):
        return None
    lengths = offsets.diff().view(layout.num_features, -1).clamp(min=1).to(grad.dtype)
    scales = torch.ones_like(lengths)
    for feature in range(layout.num_features):
        if layout.is_mean[feature]:
            scales[feature] /= lengths[feature]
        if clip is not None:
            norm = grad[:, layout.columns[feature] : layout.columns[feature + 1]].norm(dim=1)
            scales[feature] *= clip / norm.clamp(min=clip)
    return scales.view(-1)


# Look-up


@triton.jit
def _rows_at(address, like, ALIGNED: tl.constexpr):
    """An address as a pointer to elements of the type that `like` points to."""
    pointer = address.to(tl.pointer_type(like.dtype.element_ty))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, [16, 16] if len(pointer.shape) == 2 else 16)
    return pointer


@triton.jit
def _pool_ids(
    ids, offsets, weights, out, tables, table_of, widths, columns, means, num_samples, num_bags, total_width,
    WEIGHTED: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ALIGNED: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """One program a bag, L ids at a time."""
    bag = tl.program_id(0)
    feature = bag // num_samples
    begin = tl.load(offsets + bag)
    end = tl.load(offsets + bag + 1)
    table = tl.load(table_of + feature)
    column = tl.load(columns + feature)
    rows = _rows_at(tl.load(tables + table), out, ALIGNED)
    d = tl.arange(0, D)
    if WIDTH > 0:
        width = WIDTH
        inside = d < WIDTH
    else:
        width = tl.load(widths + table)
        inside = d < width
    total = tl.zeros([D], out.dtype.element_ty)
    for start in range(begin, end, L):
        place = start + tl.arange(0, L)
        live = place < end
        row = tl.load(ids + place, mask=live, other=0).to(tl.int64)
        values = tl.load(rows + row[:, None] * width + d[None, :], mask=live[:, None] & inside[None, :], other=0.0)
        if WEIGHTED:
            values *= tl.load(weights + place, mask=live, other=0.0).to(values.dtype)[:, None]
        total += tl.sum(values, axis=0)
    if tl.load(means + feature) != 0:
        total = total / tl.maximum(end - begin, 1).to(total.dtype)
    example = (bag - feature * num_samples).to(tl.int64)
    tl.store(out + example * total_width + column + d, total, mask=inside)


@triton.jit
def _pool_bags(
    ids, offsets, weights, out, tables, table_of, widths, columns, means, num_samples, num_bags, total_width,
    WEIGHTED: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ALIGNED: tl.constexpr, BAGS: tl.constexpr,
):  # fmt: skip
    """Several bags a program, one id of each at a time.

    What belongs to a bag is [BAGS, 1] from the start: Triton 3.6 fails to lay out masks of vectors that are widened later.
    """
    bag = tl.program_id(0) * BAGS + tl.arange(0, BAGS)[:, None]
    live = bag < num_bags
    feature = tl.where(live, bag // num_samples, 0)
    begin = tl.load(offsets + bag, mask=live, other=0)
    end = tl.load(offsets + bag + 1, mask=live, other=0)
    table = tl.load(table_of + feature)
    column = tl.load(columns + feature)
    rows = _rows_at(tl.load(tables + table), out, ALIGNED)
    d = tl.arange(0, D)[None, :]
    if WIDTH > 0:
        width = tl.full([BAGS, 1], WIDTH, tl.int32)
    else:
        width = tl.load(widths + table)
    inside = live & (d < width)
    total = tl.zeros([BAGS, D], out.dtype.element_ty)
    longest = tl.max(tl.max(end - begin, axis=1), axis=0)
    for at in range(longest):
        place = begin + at
        on = live & (place < end)
        row = tl.load(ids + place, mask=on, other=0).to(tl.int64)
        values = tl.load(rows + row * width + d, mask=on & inside, other=0.0)
        if WEIGHTED:
            values *= tl.load(weights + place, mask=on, other=0.0).to(values.dtype)
        total += values
    share = tl.where(tl.load(means + feature) != 0, tl.maximum(end - begin, 1), 1).to(total.dtype)
    example = (bag - feature * num_samples).to(tl.int64)
    tl.store(out + example * total_width + column + d, total / share, mask=inside)


# Update


@triton.jit
def _name_rows(
    ids, offsets, keys, bags, row_base, num_samples, num_bags, BAGS: tl.constexpr, L: tl.constexpr
):  # fmt: skip
    """For each id its key, which is its row counted over all tables, and its bag."""
    bag = tl.program_id(0) * BAGS + tl.arange(0, BAGS)
    live = bag < num_bags
    feature = tl.where(live, bag // num_samples, 0)
    begin = tl.load(offsets + bag, mask=live, other=0)
    end = tl.load(offsets + bag + 1, mask=live, other=0)
    base = tl.load(row_base + feature)
    longest = tl.max(end - begin, axis=0)
    for start in range(0, longest, L):
        place = begin[:, None] + start + tl.arange(0, L)[None, :]
        on = place < end[:, None]
        row = tl.load(ids + place, mask=on, other=0).to(tl.int64)
        tl.store(keys + place, (base[:, None] + row).to(keys.dtype.element_ty), mask=on)
        tl.store(bags + place, tl.broadcast_to(bag[:, None], [BAGS, L]), mask=on)


@triton.jit
def _segmented(flag_a, sum_a, flag_b, sum_b):
    """Joins two stretches of a segmented sum: a flag says that a new segment begins."""
    return flag_a | flag_b, tl.where(flag_b != 0, sum_b, sum_a + sum_b)


@triton.jit
def _apply(
    grad, row_at, key_row, first_at, second_at, width, d, on, numbers, KIND: tl.constexpr
):  # fmt: skip
    """The optimizer's rule for rows whose summed gradients are grad [R, D], where `on` [R, D].

    numbers: learning rate, eps, beta1, beta2 and Adam's correction.
    """
    lr, eps = tl.load(numbers), tl.load(numbers + 1)
    at = key_row[:, None] * width[:, None] + d[None, :]
    rows = tl.load(row_at[:, None] + at, mask=on, other=0.0)
    if KIND == 0:
        change = lr * grad
    elif KIND == 1:
        total = tl.load(first_at[:, None] + at, mask=on, other=0.0) + grad * grad
        tl.store(first_at[:, None] + at, total, mask=on)
        change = lr * grad / (tl.sqrt(total) + eps)
    elif KIND == 2:
        live = tl.max(on.to(tl.int32), axis=1) != 0
        square = tl.sum(tl.where(on, grad * grad, 0.0), axis=1) / width.to(grad.dtype)
        total = tl.load(first_at + key_row, mask=live, other=0.0) + square
        tl.store(first_at + key_row, total, mask=live)
        change = grad * (lr / (tl.sqrt(total) + eps))[:, None]
    else:
        one = tl.load(first_at[:, None] + at, mask=on, other=0.0)
        two = tl.load(second_at[:, None] + at, mask=on, other=0.0)
        beta1, beta2, correction = tl.load(numbers + 2), tl.load(numbers + 3), tl.load(numbers + 4)
        one = grad + beta1 * (one - grad)
        two = grad * grad + beta2 * (two - grad * grad)
        tl.store(first_at[:, None] + at, one, mask=on)
        tl.store(second_at[:, None] + at, two, mask=on)
        change = (lr * correction) * one / (tl.sqrt(two) + eps)
    tl.store(row_at[:, None] + at, (rows - change).to(rows.dtype), mask=on)


@triton.jit
def _apply_tiles(
    keys, order, bags, grad, weights, scales, head, tail, tables, firsts, seconds, table_of, widths, columns, row_base,
    num_samples, num_ids, total_width, numbers,
    WEIGHTED: tl.constexpr, SCALED: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ALIGNED: tl.constexpr,
    KIND: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """One program a tile: sum each run of equal keys in it, apply the whole runs, leave partial sums of the others."""
    tile = tl.program_id(0).to(tl.int64)
    place = tile * R + tl.arange(0, R)
    live = place < num_ids
    key = tl.load(keys + place, mask=live, other=-1)
    after = tl.load(keys + place + 1, mask=place + 1 < num_ids, other=-1)
    before = tl.load(keys + place - 1, mask=live & (place > 0), other=-1)
    border = tl.load(keys + tile * R - 1, mask=tile > 0, other=-1)
    source = tl.load(order + place, mask=live, other=0)
    bag = tl.load(bags + source, mask=live, other=0)
    feature = bag // num_samples
    table = tl.load(table_of + feature)
    column = tl.load(columns + feature)
    d = tl.arange(0, D)
    if WIDTH > 0:
        width = tl.full([R], WIDTH, tl.int32)
        inside = live[:, None] & (d < WIDTH)[None, :]
    else:
        width = tl.load(widths + table)
        inside = live[:, None] & (d[None, :] < width[:, None])
    example = (bag - feature * num_samples).to(tl.int64)
    values = tl.load(grad + (example * total_width + column)[:, None] + d[None, :], mask=inside, other=0.0)
    if WEIGHTED:
        values *= tl.load(weights + source, mask=live, other=0.0).to(values.dtype)[:, None]
    if SCALED:
        values *= tl.load(scales + bag, mask=live, other=0.0)[:, None]
    begins = tl.broadcast_to((key != before).to(tl.int32)[:, None], [R, D])
    _, summed = tl.associative_scan((begins, values), 0, _segmented)

    is_head = (key == border) & live
    ends = (key != after) & live
    is_last = (tl.arange(0, R) == R - 1) & live
    leaves_head = is_head & (ends | is_last)
    leaves_tail = is_last & ~ends & ~is_head
    partial = tile * D + d[None, :] + tl.zeros([R, 1], tl.int64)
    tl.store(head + partial, summed, mask=leaves_head[:, None] & inside)
    tl.store(tail + partial, summed, mask=leaves_tail[:, None] & inside)
    row = key.to(tl.int64) - tl.load(row_base + feature)
    on = (ends & ~is_head)[:, None] & inside
    _apply(
        summed, _rows_at(tl.load(tables + table), grad, ALIGNED), row, _rows_at(tl.load(firsts + table), grad, False),
        _rows_at(tl.load(seconds + table), grad, False), width, d, on, numbers, KIND,
    )  # fmt: skip


@triton.jit
def _join_tiles(
    keys, order, bags, head, tail, tables, firsts, seconds, table_of, widths, columns, row_base,
    num_samples, num_ids, num_tiles, numbers,
    WIDTH: tl.constexpr, D: tl.constexpr, ALIGNED: tl.constexpr, KIND: tl.constexpr, R: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Runs that cross borders: the tail of the tile where a run begins, and the heads of the tiles that it runs through."""
    d = tl.arange(0, D)
    for number in range(TILES):
        tile = tl.program_id(0).to(tl.int64) * TILES + number
        last = (tile + 1) * R - 1
        follows = tile < num_tiles - 1
        key = tl.load(keys + last, mask=follows, other=-1)
        after = tl.load(keys + last + 1, mask=follows, other=-2)
        border = tl.load(keys + tile * R - 1, mask=follows & (tile > 0), other=-1)
        if (after == key) & (border != key):
            total = tl.load(tail + tile * D + d)
            at = tile + 1
            while at < num_tiles:
                tiles = at + tl.arange(0, 16)
                same = tl.load(keys + tiles * R, mask=tiles < num_tiles, other=-1) == key
                total += tl.sum(tl.load(head + tiles[:, None] * D + d[None, :], mask=same[:, None], other=0.0), axis=0)
                at = tl.where(tl.sum(same.to(tl.int32), axis=0) == 16, at + 16, num_tiles)
            feature = tl.load(bags + tl.load(order + last)) // num_samples
            table = tl.load(table_of + feature) + tl.zeros([1], tl.int32)
            if WIDTH > 0:
                width = tl.full([1], WIDTH, tl.int32)
            else:
                width = tl.load(widths + table)
            row = key.to(tl.int64) - tl.load(row_base + feature) + tl.zeros([1], tl.int64)
            on = d[None, :] < width[:, None]
            _apply(
                total[None, :], _rows_at(tl.load(tables + table), head, ALIGNED), row,
                _rows_at(tl.load(firsts + table), head, False), _rows_at(tl.load(seconds + table), head, False),
                width, d, on, numbers, KIND,
            )  # fmt: skip
