"""The Numba programs behind `kernels/cpu/embedding.py`, which calls them and says what their arguments are.

A row is worked on in blocks of 64, 32 and 16 lanes and a last one of fewer, each of which stays in registers from the first
to the last id of a bag or of a run. The type of the scalar `rows` says in which format rows are stored (`vectors.py`), that of
`real` in which type numbers are reckoned with, that of `id_type` which type ids have. Tables and whatever is read once an id
are given by address.

Letters: B examples, F features, T tables, D width, nnz ids in the batch.
"""

from __future__ import annotations

import numba
import numpy as np

from rowstead.kernels.cpu.memory import AHEAD, LINE, item, prefetch, prefetch_all, take
from rowstead.kernels.cpu.row_optimizers import apply_row, scalars_tuple, squares
from rowstead.kernels.cpu.vectors import bytes_of, cast, load, num_lanes, spread, store, zeros

NEAR_BYTES = 1 << 17
"""Of gradients, that the second cache holds besides the rows that are asked for."""
_DIGIT_BITS = 11
"""Most bits by which one pass sorts: their counts stay in the nearest cache."""

_jit = numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
_inlined = numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy", forceinline=True)


@_inlined
def _prefetch_block(shape, address, like):  # type: ignore[no-untyped-def]
    """Ask for the cache lines of a block."""
    for line in range(0, num_lanes(shape) * bytes_of(like), LINE):
        prefetch(address + line)


# Look-up


@_jit
def pool_bags(  # type: ignore[no-untyped-def]
    counter, bags_a_turn, num_samples, addresses, num_rows, widths, table_of, columns, is_mean, rows, ids, id_type, offsets,
    weights, out, real,
):  # fmt: skip
    """Pool bags into [B, sum of widths] at `out`, so many at a turn, until none are left.

    Returns the first place of an id out of range that was met, or -1.
    """
    num_bags = len(offsets) - 1
    failed = -1
    while True:
        first = take(counter) * bags_a_turn
        if first >= num_bags:
            return failed
        last = min(first + bags_a_turn, num_bags)
        place = _pool_some(
            first, last, num_samples, addresses, num_rows, widths, table_of, columns, is_mean, rows, ids, id_type, offsets,
            weights, out, real,
        )  # fmt: skip
        if place >= 0 and (failed < 0 or place < failed):
            failed = place


@_jit
def _pool_some(  # type: ignore[no-untyped-def]
    bag, last, num_samples, addresses, num_rows, widths, table_of, columns, is_mean, rows, ids, id_type, offsets, weights, out,
    real,
):  # fmt: skip
    """Pool bags `bag` to `last` - 1; returns the first place of an id out of range, or -1."""
    out_bytes = columns[-1] * bytes_of(real)
    while bag < last:
        feature = bag // num_samples
        table = table_of[feature]
        width, mean = widths[table], is_mean[feature]
        after = min(last, (feature + 1) * num_samples)
        place = _outside(ids, id_type, offsets[bag], offsets[after], num_rows[table])
        if place >= 0:
            return place
        known = offsets[(feature + 1) * num_samples]
        target = out + (bag - feature * num_samples) * out_bytes + columns[feature] * bytes_of(real)
        while bag < after:
            begin, end = offsets[bag], offsets[bag + 1]
            share = cast(1, real) / cast(max(end - begin, 1), real) if mean else cast(1, real)
            pooling = (
                begin, end, known, addresses[table], width * bytes_of(rows), rows, ids, id_type, weights, share, target, real,
            )  # fmt: skip
            d = 0
            while d + 64 <= width:
                _pool_block(zeros(rows, 64), None, d, *pooling)
                d += 64
            if d + 32 <= width:
                _pool_block(zeros(rows, 32), None, d, *pooling)
                d += 32
            if d + 16 <= width:
                _pool_block(zeros(rows, 16), None, d, *pooling)
                d += 16
            if d < width:
                _pool_block(zeros(rows, 16), width - d, d, *pooling)
            target += out_bytes
            bag += 1
    return -1


@_inlined
def _outside(ids, id_type, begin, end, num_rows):  # type: ignore[no-untyped-def]
    """The first place from `begin` to `end` - 1 with an id that names no row, or -1."""
    largest = np.uint64(0)
    for place in range(begin, end):
        largest = max(largest, np.uint64(np.int64(item(ids, place, id_type))))  # a negative id becomes a huge one
    if largest >= np.uint64(num_rows):
        for place in range(begin, end):
            if np.uint64(np.int64(item(ids, place, id_type))) >= np.uint64(num_rows):
                return place
    return -1


@_inlined
def _pool_block(  # type: ignore[no-untyped-def]
    summed, count, d, begin, end, known, address, row_bytes, rows, ids, id_type, weights, share, target, real
):
    """Sum one block of a bag's rows, from element `d`, and store it; ids of this table are known up to `known`."""
    source = address + d * bytes_of(rows)
    for place in range(begin, end):
        if place + AHEAD < known:
            _prefetch_block(summed, source + np.int64(item(ids, place + AHEAD, id_type)) * row_bytes, rows)
        values = load(source + np.int64(item(ids, place, id_type)) * row_bytes, rows, summed, count)
        if weights is not None:
            values = spread(item(weights, place, real), summed) * values
        summed = summed + values
    if share != 1:
        summed = summed * spread(share, summed)
    store(summed, target + d * bytes_of(real), real, count)


# Update


@_jit
def cut_tasks(offsets, num_samples, table_of, num_tables, wanted):  # type: ignore[no-untyped-def]
    """Tasks of an update [tasks, 4], those with the most ids first: table, remainder, log2 of parts, ids of the table.

    No task has more than about one part in `wanted` of all ids; a single one is wanted of whoever works alone.
    """
    counts, part_bits = np.zeros(num_tables, np.int64), np.zeros(num_tables, np.int64)
    for feature in range(len(table_of)):
        counts[table_of[feature]] += offsets[(feature + 1) * num_samples] - offsets[feature * num_samples]
    most = max(1, counts.sum() // wanted)
    num_tasks = 0
    for table in range(num_tables):
        while wanted > 1 and counts[table] >> part_bits[table] > most:
            part_bits[table] += 1
        num_tasks += 1 << part_bits[table]
    tasks = np.empty((num_tasks, 4), np.int64)
    place = 0
    for table in np.argsort(-(counts >> part_bits), kind="mergesort"):
        for remainder in range(1 << part_bits[table]):
            tasks[place, 0], tasks[place, 1] = table, remainder
            tasks[place, 2], tasks[place, 3] = part_bits[table], counts[table]
            place += 1
    return tasks


@_jit
def update_tables(  # type: ignore[no-untyped-def]
    counter, tasks, num_samples, addresses, first, second, first_bytes, second_bytes, num_rows, widths, columns, is_mean,
    features_from, features, rows, ids, id_type, offsets, weights, grad, real, clip, kind, scalars, step,
):  # fmt: skip
    """Update the rows of one task (table, remainder, log2 of parts, ids) after another until none are left.

    A task has those rows of its table whose number, divided by the parts, leaves the remainder. Tasks share no row, and each
    sums the gradients of a row in the order of the batch. grad is the address of [B, sum of widths].
    """
    room = tasks[:, 3].max() + 1
    words, spare, sources = np.empty(room, np.uint64), np.empty(room, np.uint64), np.empty(room, np.int64)
    scales, summed = np.empty(room, scalars.dtype), np.empty(widths.max(), scalars.dtype)
    tally = np.empty(1 << _DIGIT_BITS, np.int64)
    scaled = weights is not None or clip > 0 or is_mean.any()
    while True:
        turn = take(counter)
        if turn >= len(tasks):
            return
        table, remainder, part_bits = tasks[turn, 0], tasks[turn, 1], tasks[turn, 2]
        own = features[features_from[table] : features_from[table + 1]]
        count = _gather(
            own, num_samples, widths[table], columns, is_mean, remainder, part_bits, ids, id_type, offsets, weights, grad,
            real, clip, scaled, words, sources, scales,
        )  # fmt: skip
        if count > 0:
            in_order = _sort(words, spare, count, (num_rows[table] - 1) >> part_bits, tally)
            _apply_runs(
                in_order.ctypes.data, count, table, remainder, part_bits, addresses[table], first[table], second[table],
                first_bytes[table], second_bytes[table], widths[table], rows, sources.ctypes.data, scales.ctypes.data, scaled, real, summed.ctypes.data,
                len(own) * num_samples * widths[table] * bytes_of(real) > NEAR_BYTES, kind, scalars_tuple(scalars), step,
            )  # fmt: skip


@_jit
def _gather(  # type: ignore[no-untyped-def]
    own, num_samples, width, columns, is_mean, remainder, part_bits, ids, id_type, offsets, weights, grad, real, clip, scaled,
    words, sources, scales,
):  # fmt: skip
    """A word for each id of one task, in the order of the batch: its row over 2**part_bits, then its number among them.

    Besides, for that number, the address of the gradient and what it is multiplied by. Returns how many there are.
    """
    mask = (1 << part_bits) - 1
    count = np.int64(0)
    for feature in own:
        source = grad + columns[feature] * bytes_of(real)
        for bag in range(feature * num_samples, (feature + 1) * num_samples):
            begin, end = offsets[bag], offsets[bag + 1]
            scale = cast(1, real)
            if scaled:
                scale = _bag_scale(source, width, end - begin, is_mean[feature], clip, real)
            for place in range(begin, end):
                row = np.int64(item(ids, place, id_type))
                # Written even where it is another task's, and then overwritten: faster than a branch that nothing foretells.
                words[count] = np.uint64(row >> part_bits) << np.uint64(32) | np.uint64(count)
                sources[count] = source
                if scaled:
                    share = scale
                    if weights is not None:
                        share *= item(weights, place, real)
                    scales[count] = share
                count += np.int64(row & mask == remainder)
            source += columns[-1] * bytes_of(real)
    return count


@_inlined
def _bag_scale(source, width, length, mean, clip, real):  # type: ignore[no-untyped-def]
    """What the gradient of one bag is multiplied by: its clipping and its mean's share."""
    scale = cast(1, real)
    if clip > 0:
        norm = np.sqrt(squares(source, width, real))
        if norm > clip:
            scale = cast(clip, real) / norm
    if mean and length > 1:
        scale /= cast(length, real)
    return scale


@_jit
def _sort(words, spare, count, highest, tally):  # type: ignore[no-untyped-def]
    """The first `count` words by their high halves, of which `highest` is the largest, stable; in one array or the other."""
    bits = 0
    while highest >> bits > 0:
        bits += 1
    most = 4
    while most < _DIGIT_BITS and count >> most > 0:
        most += 1
    passes = (bits + most - 1) // most
    for turn in range(passes):
        width = (bits + passes - 1) // passes
        shift, mask = np.uint64(32 + turn * width), np.uint64((1 << width) - 1)
        tally[: 1 << width] = 0
        for i in range(count):
            tally[words[i] >> shift & mask] += 1
        before = 0
        for digit in range(1 << width):
            here = tally[digit]
            tally[digit] = before
            before += here
        for i in range(count):
            digit = words[i] >> shift & mask
            spare[tally[digit]] = words[i]
            tally[digit] += 1
        words, spare = spare, words
    return words


@_jit
def _apply_runs(  # type: ignore[no-untyped-def]
    words, count, table, remainder, part_bits, address, first, second, first_bytes, second_bytes, width, rows, sources, scales,
    scaled, real, summed, is_far, kind, scalars, step,
):  # fmt: skip
    """Sum the gradients of each run of words with equal rows, and apply the optimizer to the row; asked for where they are far."""
    row_bytes = width * bytes_of(rows)
    place = 0
    while place < count:
        high = _high(words, place)
        end = place
        while end < count and _high(words, end) == high:
            if end + AHEAD < count:
                row = _high(words, end + AHEAD) << part_bits | remainder
                prefetch_all(address + row * row_bytes, row_bytes)
                if first_bytes > 0:
                    prefetch_all(first + row * first_bytes, first_bytes)
                if second_bytes > 0:
                    prefetch_all(second + row * second_bytes, second_bytes)
                if is_far:
                    prefetch_all(item(sources, _low(words, end + AHEAD), np.int64(0)), width * bytes_of(real))
            end += 1
        run = (words, place, end, sources, scales, scaled, real, summed)
        d = 0
        while d + 64 <= width:
            _sum_block(zeros(real, 64), None, d, *run)
            d += 64
        if d + 32 <= width:
            _sum_block(zeros(real, 32), None, d, *run)
            d += 32
        if d + 16 <= width:
            _sum_block(zeros(real, 16), None, d, *run)
            d += 16
        if d < width:
            _sum_block(zeros(real, 16), width - d, d, *run)
        row = high << part_bits | remainder
        apply_row(table, row, address, first, second, first_bytes, second_bytes, summed, width, rows, real, kind, scalars, step)
        place = end


@_inlined
def _high(words, place):  # type: ignore[no-untyped-def]
    return np.int64(item(words, place, np.uint64(0)) >> np.uint64(32))


@_inlined
def _low(words, place):  # type: ignore[no-untyped-def]
    return np.int64(item(words, place, np.uint64(0)) & np.uint64(0xFFFFFFFF))


@_inlined
def _sum_block(block, count, d, words, begin, end, sources, scales, scaled, real, summed):  # type: ignore[no-untyped-def]
    """Sum one block of the gradients of a run, from element `d`, into `summed`."""
    for place in range(begin, end):
        number = _low(words, place)
        values = load(item(sources, number, np.int64(0)) + d * bytes_of(real), real, block, count)
        if scaled:
            values = spread(item(scales, number, real), block) * values
        block = block + values
    store(block, summed + d * bytes_of(real), real, count)


@_jit
def update_at_once(  # type: ignore[no-untyped-def]
    num_samples, addresses, first, second, first_bytes, second_bytes, widths, table_of, columns, is_mean, rows, ids, id_type,
    offsets, weights, grad, real, clip, kind, scalars, step,
):  # fmt: skip
    """Apply the optimizer to the row of each id with the gradient of its bag, one after another in the order of the batch."""
    scaled = np.empty(widths.max(), scalars.dtype)
    plain = scalars_tuple(scalars)
    for feature in range(len(table_of)):
        table = table_of[feature]
        width = widths[table]
        row_bytes = width * bytes_of(rows)
        known = offsets[(feature + 1) * num_samples]
        source = grad + columns[feature] * bytes_of(real)
        for bag in range(feature * num_samples, (feature + 1) * num_samples):
            begin, end = offsets[bag], offsets[bag + 1]
            scale = _bag_scale(source, width, end - begin, is_mean[feature], clip, real)
            for place in range(begin, end):
                if place + AHEAD < known:
                    prefetch_all(addresses[table] + np.int64(item(ids, place + AHEAD, id_type)) * row_bytes, row_bytes)
                share = scale
                if weights is not None:
                    share *= item(weights, place, real)
                for d in range(width):
                    scaled[d] = share * item(source, d, real)
                row = np.int64(item(ids, place, id_type))
                apply_row(
                    table, row, addresses[table], first[table], second[table], first_bytes[table], second_bytes[table],
                    scaled.ctypes.data, width, rows, real, kind, plain, step,
                )  # fmt: skip
            source += columns[-1] * bytes_of(real)
