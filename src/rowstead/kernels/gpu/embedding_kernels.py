"""The Triton kernels behind `kernels/gpu/embedding.py`, which launches them.

A block of rows is [R, S, D]: S streams side by side, each with R rows of width D that one group of lanes holds in its own
registers, so that lanes exchange nothing but the sum over one row. A stream is a bag in a look-up, and a tile of sorted keys in
an update. Values per key or per stream are [R, S, 1] or [1, S, 1] from the start: Triton 3.6 fails to lay out masks of vectors
that are expanded later.

Letters: D width (a power of two; WIDTH the real one, 0 where tables differ), nnz ids. Arguments in capitals are compile-time
constants. Pooled rows and gradients may be BF16; sums are FP32 then. FIRST and SECOND are the shapes of the optimizer's state tensors: 0 none, 1 [N, 1], 2 [N, D].
"""

from __future__ import annotations

import triton
import triton.language as tl

from rowstead.kernels.gpu.launch import quick_launch
from rowstead.kernels.gpu.row_optimizers import row_change
from rowstead.kernels.row_state import NUM_SCALARS

# A plan is what `apply_tiles` must know of a sorted key: the offset of its gradient, the width, and these flags.
_L2, _DECAY, _STEP = tl.constexpr(NUM_SCALARS - 2), tl.constexpr(NUM_SCALARS - 1), tl.constexpr(NUM_SCALARS)
_ELEMENT = tl.constexpr((1 << 40) - 1)
_WIDTH_BIT = tl.constexpr(40)
_WIDTH_MASK = tl.constexpr(0xFFF)
_BEGINS = tl.constexpr(52)
"""A run of equal keys begins here."""
_ADDS = tl.constexpr(53)
"""The gradient is summed with its own tile; the next flag: with the tile before, whose last run it ends."""
_APPLIES = tl.constexpr(55)
"""A run ends here whose sum is complete in its own tile; the next flag: in the tile before."""
_HEAD = tl.constexpr(57)
"""The sum up to here is the tile's part of a split run that began before it."""
_TAIL = tl.constexpr(58)
"""The sum up to here is the tile's part of a split run that begins in it."""
_SPLIT = tl.constexpr(59)
"""The key belongs to a split run that began before its tile."""


@triton.jit
def _rows_at(address, like, ALIGNED: tl.constexpr):
    """Addresses [R, S, 1] as pointers to elements of the type that `like` points to."""
    pointer = address.to(tl.pointer_type(like.dtype.element_ty))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, [16, 16, 16])
    return pointer


@quick_launch
@triton.jit
def pool(
    ids, offsets, weights, out, like, tables, table_of, widths, columns, means, limits, num_samples, num_bags, total_width,
    WEIGHTED: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ALIGNED: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """S bags per program, R ids of each at a time; ids out of range are skipped."""
    bag = tl.program_id(0) * S + tl.arange(0, S)[None, :, None]
    live = bag < num_bags
    feature = tl.where(live, bag // num_samples, 0)
    begin = tl.load(offsets + bag, mask=live, other=0)
    end = tl.load(offsets + bag + 1, mask=live, other=0)
    table = tl.load(table_of + feature)
    column = tl.load(columns + feature)
    limit = tl.load(limits + feature)
    rows = _rows_at(tl.load(tables + table), like, ALIGNED)
    d = tl.arange(0, D)[None, None, :]
    if WIDTH > 0:
        width = tl.full([1, S, 1], WIDTH, tl.int32)
        inside = live & (d < WIDTH)
    else:
        width = tl.load(widths + table)
        inside = live & (d < width)
    dtype: tl.constexpr = tl.float32 if out.dtype.element_ty == tl.bfloat16 else out.dtype.element_ty
    total = tl.zeros([1, S, D], dtype)
    longest = tl.max(tl.max(tl.max(end - begin, axis=2), axis=1), axis=0)
    for start in range(0, longest, R):
        index = begin + start + tl.arange(0, R)[:, None, None]
        on = index < end
        row = tl.load(ids + index, mask=on, other=-1).to(tl.int64)
        on = (row >= 0) & (row < limit)
        values = tl.load(rows + row * width + d, mask=on & inside, other=0.0).to(dtype)
        if WEIGHTED:
            values *= tl.load(weights + index, mask=on, other=0.0).to(values.dtype)
        total += tl.sum(values, axis=0, keep_dims=True)
    share = tl.where(tl.load(means + feature) != 0, tl.maximum(end - begin, 1), 1).to(total.dtype)
    example = (bag - feature * num_samples).to(tl.int64)
    tl.store(out + example * total_width + column + d, total / share, mask=inside)


@quick_launch
@triton.jit
def compute_keys(
    ids, offsets, keys, bags, row_base, limits, num_samples, num_bags,
    NONE: tl.constexpr, BAGS: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """For each id its bag and its key: its row numbered over all tables, or NONE for an id out of range."""
    bag = tl.program_id(0) * BAGS + tl.arange(0, BAGS)[:, None]
    live = bag < num_bags
    feature = tl.where(live, bag // num_samples, 0)
    begin = tl.load(offsets + bag, mask=live, other=0)
    end = tl.load(offsets + bag + 1, mask=live, other=0)
    base = tl.load(row_base + feature)
    limit = tl.load(limits + feature)
    longest = tl.max(tl.max(end - begin, axis=1), axis=0)
    for start in range(0, longest, L):
        index = begin + start + tl.arange(0, L)[None, :]
        on = index < end
        row = tl.load(ids + index, mask=on, other=0).to(tl.int64)
        key = tl.where((row >= 0) & (row < limit), base + row, NONE)
        tl.store(keys + index, key.to(keys.dtype.element_ty), mask=on)
        tl.store(bags + index, tl.broadcast_to(bag, [BAGS, L]), mask=on)


@quick_launch
@triton.jit
def scale_ids(
    offsets, weights, scales, factors, num_bags, WEIGHTED: tl.constexpr, SCALED: tl.constexpr, BAGS: tl.constexpr, L: tl.constexpr
):  # fmt: skip
    """For each id the scale of its gradient: its weight times the scale of its bag."""
    bag = tl.program_id(0) * BAGS + tl.arange(0, BAGS)[:, None]
    live = bag < num_bags
    begin = tl.load(offsets + bag, mask=live, other=0)
    end = tl.load(offsets + bag + 1, mask=live, other=0)
    longest = tl.max(tl.max(end - begin, axis=1), axis=0)
    for start in range(0, longest, L):
        index = begin + start + tl.arange(0, L)[None, :]
        on = index < end
        factor = tl.full([BAGS, L], 1.0, factors.dtype.element_ty)
        if WEIGHTED:
            factor *= tl.load(weights + index, mask=on, other=0.0).to(factor.dtype)
        if SCALED:
            factor *= tl.load(scales + bag, mask=live, other=0.0)
        tl.store(factors + index, factor, mask=on)


@triton.jit
def _segmented(flag_a, sum_a, flag_b, sum_b):
    """Combine two parts of a segmented sum; a flag says that a new segment begins."""
    return flag_a | flag_b, tl.where(flag_b != 0, sum_b, sum_a + sum_b)


@triton.jit
def _mixed(x):
    """A hash of a uint32, as uint32."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _rounded(values, base, d, like):
    """FP32 values [R, S, D] in the row's dtype, rounded stochastically as in kernels/rounding.py."""
    noise = _mixed(base + d.to(tl.uint32) * 0xC2B2AE35) & 0xFFFF
    bits = values.to(tl.uint32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    if like.dtype.element_ty == tl.bfloat16:
        up = ((bits + noise) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        result = tl.where(finite, up, values.to(tl.bfloat16))
    else:
        normal = ((bits + (noise >> 3)) & 0xFFFFE000).to(tl.float32, bitcast=True)
        normal = tl.minimum(tl.maximum(normal, -65504.0), 65504.0)
        scaled = values * 16777216.0
        below = tl.floor(scaled)
        goes_up = scaled - below + noise.to(tl.float32) * (1.0 / 65536.0) >= 1.0
        small = (below + goes_up.to(tl.float32)) * (1.0 / 16777216.0)
        up = tl.where(tl.abs(values) < 0.00006103515625, small, normal)
        result = tl.where(finite, up, values).to(tl.float16)
    return result


@triton.jit
def _is_split(keys, border, key, num_ids, TILE: tl.constexpr, EXTRA: tl.constexpr):
    """Whether the run of `key`, which crosses `border`, continues for more than EXTRA keys or began before the last tile."""
    goes_on = tl.load(keys + border + EXTRA, mask=border + EXTRA < num_ids, other=-1) == key
    began = tl.load(keys + border - TILE - 1, mask=(border > TILE) & (border - TILE - 1 < num_ids), other=-1) == key
    return goes_on | began


@quick_launch
@triton.jit
def plan_keys(
    keys, order, bags, plans, rows_at, firsts_at, seconds_at, noises, tables, firsts, seconds, widths, bases, table_of, columns,
    offsets, num_samples, num_bags, total_width, scalars, row_size,
    FIRST: tl.constexpr, SECOND: tl.constexpr, ROUNDS: tl.constexpr, CONTIGUOUS: tl.constexpr, TILE: tl.constexpr,
    EXTRA: tl.constexpr, BLOCK: tl.constexpr, NONE: tl.constexpr,
):  # fmt: skip
    """For each sorted key its plan and, unless rows are contiguous, the addresses of its row and of its optimizer state."""
    num_ids = tl.load(offsets + num_bags).to(tl.int32)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_id = index < num_ids
    key = tl.load(keys + index, mask=is_id, other=NONE)
    live = key != NONE
    before = tl.load(keys + index - 1, mask=live & (index > 0), other=-1)
    after = tl.load(keys + index + 1, mask=index + 1 < num_ids, other=-1)
    bag = tl.load(bags + tl.load(order + index, mask=live, other=0), mask=live, other=0)
    feature = bag // num_samples
    table = tl.load(table_of + feature)
    width = tl.load(widths + table)
    row = key.to(tl.int64) - tl.load(bases + table)

    start = index // TILE * TILE
    stop = start + TILE
    is_head = live & (start > 0) & (tl.load(keys + start - 1, mask=live & (start > 0), other=-1) == key)
    is_split = is_head & _is_split(keys, start, key, num_ids, TILE, EXTRA)
    ends = live & (key != after)
    is_last = live & (index == stop - 1)
    leaves_tail = is_last & ~ends & ~is_head & _is_split(keys, stop, key, num_ids, TILE, EXTRA)
    walked_on = is_head & ~is_split
    plan = (bag - feature * num_samples).to(tl.int64) * total_width + tl.load(columns + feature)
    plan |= width.to(tl.int64) << _WIDTH_BIT
    plan |= (live & (key != before)).to(tl.int64) << _BEGINS
    plan |= (live & ~walked_on).to(tl.int64) << _ADDS
    plan |= walked_on.to(tl.int64) << (_ADDS + 1)
    plan |= (ends & ~is_head).to(tl.int64) << _APPLIES
    plan |= (ends & walked_on).to(tl.int64) << (_APPLIES + 1)
    plan |= (is_split & (ends | is_last)).to(tl.int64) << _HEAD
    plan |= leaves_tail.to(tl.int64) << _TAIL
    plan |= is_split.to(tl.int64) << _SPLIT
    tl.store(plans + index, tl.where(live, plan, 0), mask=is_id)
    if not CONTIGUOUS:
        tl.store(rows_at + index, tl.load(tables + table) + row * width * row_size, mask=live)
        size: tl.constexpr = scalars.dtype.element_ty.primitive_bitwidth // 8
        if FIRST > 0:
            tl.store(firsts_at + index, tl.load(firsts + table) + (row if FIRST == 1 else row * width) * size, mask=live)
        if SECOND > 0:
            tl.store(seconds_at + index, tl.load(seconds + table) + (row if SECOND == 1 else row * width) * size, mask=live)
    if ROUNDS:
        step = tl.load(scalars + _STEP).to(tl.int32, bitcast=True)
        base = _mixed(row.to(tl.uint32) + step.to(tl.uint32) * 0x9E3779B9 + table.to(tl.uint32) * 0x85EBCA6B)
        tl.store(noises + index, base.to(tl.int32, bitcast=True), mask=live)


@triton.jit
def _apply(
    grad, index, width, d, live, on, like, rows_at, firsts_at, seconds_at, noises, scalars,
    WIDTH: tl.constexpr, ALIGNED: tl.constexpr, KIND: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    ROUNDS: tl.constexpr, CONTIGUOUS: tl.constexpr, DECAYS: tl.constexpr,
):  # fmt: skip
    """Apply the optimizer's rule to the rows of sorted keys, with summed gradients grad [R, S, D].

    Rows `live` [R, S, 1], elements `on` [R, S, D]. scalars: what `device_scalars` gives. Where rows are
    CONTIGUOUS, `rows_at` are the keys, `like` is the first row, and `firsts_at` and `seconds_at` are the first row's state.
    """
    if CONTIGUOUS:
        row = tl.load(rows_at + index, mask=live, other=0).to(tl.int64)
        row_at = like + row * WIDTH + d
        first_at = firsts_at + (row if FIRST == 1 else row * WIDTH)
        second_at = seconds_at + (row if SECOND == 1 else row * WIDTH)
    else:
        row_at = _rows_at(tl.load(rows_at + index, mask=live, other=0), like, ALIGNED) + d
        first_at = row_at
        second_at = row_at
        if FIRST > 0:
            first_at = _rows_at(tl.load(firsts_at + index, mask=live, other=0), scalars, False)
        if SECOND > 0:
            second_at = _rows_at(tl.load(seconds_at + index, mask=live, other=0), scalars, False)
    stored = tl.load(row_at, mask=on, other=0.0)
    if DECAYS:
        grad += tl.load(scalars + _L2) * tl.where(on, stored.to(grad.dtype), 0.0)
    change = row_change(grad, first_at, second_at, width, d, live, on, scalars, KIND)
    if DECAYS:
        change += tl.load(scalars + _DECAY) * stored.to(grad.dtype)
    new = stored.to(grad.dtype) - change
    if ROUNDS:
        base = tl.load(noises + index, mask=live, other=0).to(tl.uint32, bitcast=True)
        tl.store(row_at, _rounded(new, base, d, like), mask=on)
    else:
        tl.store(row_at, new, mask=on)


@triton.jit
def _num_ids(offsets, num_bags, guard):
    """The number of ids in the batch, or 0 where the number at `guard` is not finite."""
    loss = tl.load(guard)
    return tl.where(loss - loss == 0.0, tl.load(offsets + num_bags), 0).to(tl.int32)


@triton.jit
def _has(plan, FLAG: tl.constexpr):
    return ((plan >> FLAG) & 1) != 0


@quick_launch
@triton.jit
def apply_tiles(
    plans, order, factors, grad, head, tail, like, rows_at, firsts_at, seconds_at, noises, offsets, num_bags, scalars, guard,
    FACTORS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ALIGNED: tl.constexpr, KIND: tl.constexpr, FIRST: tl.constexpr,
    SECOND: tl.constexpr, ROUNDS: tl.constexpr, CONTIGUOUS: tl.constexpr, DECAYS: tl.constexpr, TILE: tl.constexpr, EXTRA: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """S tiles per program, R keys of each at a time: sum each run of equal keys and apply its sum to its row.

    A run that crosses its tile's border is followed for EXTRA keys. A longer one is split: each of its tiles leaves a partial sum,
    the tile where it begins in `tail` and the others in `head`.
    """
    num_ids = _num_ids(offsets, num_bags, guard)
    tile = tl.program_id(0) * S + tl.arange(0, S)[None, :, None]
    within = tl.arange(0, R)[:, None, None]
    d = tl.arange(0, D)[None, None, :]
    first = tl.load(plans + tile * TILE, mask=tile * TILE < num_ids, other=0)
    last = tl.load(plans + tile * TILE + TILE - 1, mask=tile * TILE + TILE - 1 < num_ids, other=0)
    splits = (_has(first, _SPLIT) | _has(last, _TAIL)).to(tl.int32)
    has_splits = tl.max(tl.max(tl.max(splits, axis=2), axis=1), axis=0) != 0
    partial = tile.to(tl.int64) * D + d + tl.zeros([R, 1, 1], tl.int64)
    dtype: tl.constexpr = tl.float32 if grad.dtype.element_ty == tl.bfloat16 else grad.dtype.element_ty
    carried = tl.zeros([1, S, D], dtype)
    for start in range(0, TILE + EXTRA, R):
        on_the_next = start // TILE
        index = tile * TILE + start + within
        plan = tl.load(plans + index, mask=index < num_ids, other=0)
        adds = ((plan >> (_ADDS + on_the_next)) & 1) != 0
        applies = ((plan >> (_APPLIES + on_the_next)) & 1) != 0
        element = plan & _ELEMENT
        if ALIGNED:
            element = tl.multiple_of(element, [4, 4, 4])
        if WIDTH > 0:
            width = tl.full([1, 1, 1], WIDTH, tl.int32)
        else:
            width = tl.maximum((plan >> _WIDTH_BIT) & _WIDTH_MASK, 1).to(tl.int32)
        inside = d < width
        values = tl.load(grad + element + d, mask=adds & inside, other=0.0).to(dtype)
        if FACTORS:
            values *= tl.load(factors + tl.load(order + index, mask=adds, other=0), mask=adds, other=0.0)
        begins = tl.broadcast_to(_has(plan, _BEGINS).to(tl.int32), [R, S, D])
        begun, summed = tl.associative_scan((begins, values), 0, _segmented)
        summed = tl.where(begun != 0, summed, summed + carried)
        carried = tl.sum(tl.where(within == R - 1, summed, 0.0), axis=0, keep_dims=True)
        if has_splits & (on_the_next == 0):
            tl.store(head + partial, summed, mask=_has(plan, _HEAD) & inside)
            tl.store(tail + partial, summed, mask=_has(plan, _TAIL) & inside)
        _apply(
            summed, index, width, d, applies, applies & inside, like, rows_at, firsts_at, seconds_at, noises, scalars,
            WIDTH, ALIGNED, KIND, FIRST, SECOND, ROUNDS, CONTIGUOUS, DECAYS,
        )  # fmt: skip


@quick_launch
@triton.jit(do_not_specialize=["num_tiles", "num_groups"])  # both follow the capacity for ids, of which there are many sizes
def sum_heads(
    keys, parts, offsets, num_bags, guard, num_tiles, num_groups,
    D: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, S: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """S groups of GROUP tiles per program: where one run fills a group, the sum of its heads, stored behind all heads in `parts`.

    Otherwise a row that most ids of a batch name would be summed by one program, a few tiles at a time.
    """
    num_ids = _num_ids(offsets, num_bags, guard)
    group = tl.program_id(0) * S + tl.arange(0, S)[None, :, None]
    begin, end = group * (GROUP * TILE), (group * GROUP + GROUP - 1) * TILE
    is_one = (group < num_groups) & (end < num_ids)
    is_one = is_one & (tl.load(keys + begin, mask=is_one, other=-1) == tl.load(keys + end, mask=is_one, other=-2))
    d = tl.arange(0, D)[None, None, :]
    if tl.max(tl.max(tl.max(is_one.to(tl.int32), axis=2), axis=1), axis=0) != 0:
        total = tl.zeros([1, S, D], parts.dtype.element_ty)
        for start in range(0, GROUP, HEADS):
            tile = group * GROUP + start + tl.arange(0, HEADS)[:, None, None]
            total += tl.sum(tl.load(parts + tile.to(tl.int64) * D + d, mask=is_one, other=0.0), axis=0, keep_dims=True)
        tl.store(parts + (num_tiles + group).to(tl.int64) * D + d, total, mask=is_one)


@quick_launch
@triton.jit(do_not_specialize=["num_tiles", "num_groups"])
def join_tiles(
    keys, plans, parts, tail, like, rows_at, firsts_at, seconds_at, noises, offsets, num_bags, scalars, guard,
    num_tiles, num_groups,
    WIDTH: tl.constexpr, D: tl.constexpr, ALIGNED: tl.constexpr, KIND: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    ROUNDS: tl.constexpr, CONTIGUOUS: tl.constexpr, DECAYS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, S: tl.constexpr,
    GROUP: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Finish split runs: sum the tail of the tile where a run begins and the heads of the tiles that follow, and apply it.

    A program searches TILES tiles for them and joins S at a time: head by head up to the next group of tiles, then group by
    group, then head by head to the end.
    """
    num_ids = _num_ids(offsets, num_bags, guard)
    candidate = tl.program_id(0) * TILES + tl.arange(0, TILES)[None, None, :]
    last = candidate * TILE + TILE - 1
    splits = _has(tl.load(plans + last, mask=last < num_ids, other=0), _TAIL).to(tl.int32)
    found = tl.sum(tl.sum(tl.sum(splits, axis=2), axis=1), axis=0)
    rank = tl.cumsum(splits, axis=2) - 1
    d = tl.arange(0, D)[None, None, :]
    ahead = tl.arange(0, HEADS)[:, None, None]
    for first in range(0, found, S):
        wanted = first + tl.arange(0, S)[None, :, None]
        live = wanted < found
        tile = tl.sum(tl.where((rank == wanted) & (splits != 0), candidate, 0), axis=2, keep_dims=True)
        index = tile * TILE + TILE - 1
        key = tl.load(keys + index, mask=live, other=-1)
        if WIDTH > 0:
            width = tl.full([1, 1, 1], WIDTH, tl.int32)
        else:
            plan = tl.load(plans + index, mask=live, other=0)
            width = tl.maximum((plan >> _WIDTH_BIT) & _WIDTH_MASK, 1).to(tl.int32)
        on = live & (d < width)
        total = tl.load(tail + tile.to(tl.int64) * D + d, mask=on, other=0.0)
        at = tile + 1
        leg = tl.where(live, 0, 3)  # up to a group, groups, the rest, done
        busy = 1
        while busy != 0:
            leg = tl.where((leg == 0) & (at % GROUP == 0), 1, leg)
            in_groups = leg == 1
            step = tl.where(in_groups, GROUP, 1)
            begin = at + ahead * step
            border = tl.where(leg == 0, (at // GROUP + 1) * GROUP, num_tiles)
            end = begin + step - 1
            can = (leg < 3) & (begin < border) & (end * TILE < num_ids) & ((leg != 1) | (begin // GROUP < num_groups))
            part = tl.where(in_groups, num_tiles + begin // GROUP, begin)
            values = tl.load(parts + part.to(tl.int64) * D + d, mask=can & on, other=0.0)
            same = can & (tl.load(keys + end * TILE, mask=can, other=-1) == key)  # as are all before it: keys are sorted
            total += tl.sum(tl.where(same, values, 0.0), axis=0, keep_dims=True)
            count = tl.sum(same.to(tl.int32), axis=0, keep_dims=True)
            at += count * step
            is_whole = (count == HEADS) | ((leg == 0) & (at == border))
            leg = tl.where(is_whole, leg, tl.where(in_groups, 2, 3))
            busy = tl.max(tl.max(tl.max((leg < 3).to(tl.int32), axis=2), axis=1), axis=0)
        _apply(
            total, index, width, d, live, on, like, rows_at, firsts_at, seconds_at, noises, scalars,
            WIDTH, ALIGNED, KIND, FIRST, SECOND, ROUNDS, CONTIGUOUS, DECAYS,
        )  # fmt: skip
