"""The Triton programs behind `kernels/gpu.py`, which launches them and says what their arguments are.

Letters: B examples, F features, T tables, N rows, D width (a power of two; WIDTH the real one, 0 where tables differ), nnz ids,
R places a tile, L ids and BAGS bags at a time. Capital arguments are known when a program is compiled.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Look-up


@triton.jit
def _rows_at(address, like, ALIGNED: tl.constexpr):
    """An address as a pointer to elements of the type that `like` points to."""
    pointer = address.to(tl.pointer_type(like.dtype.element_ty))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, [16, 16] if len(pointer.shape) == 2 else 16)
    return pointer


@triton.jit
def pool_ids(
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
def pool_bags(
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
def name_rows(
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
def apply_tiles(
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
def join_tiles(
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
