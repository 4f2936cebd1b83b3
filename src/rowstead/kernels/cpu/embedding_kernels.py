"""The compiled Numba functions behind `kernels/cpu/embedding.py`, which calls them.

A row is processed in blocks of 64, 32 and 16 lanes and a last one of fewer, each of which stays in registers from the first
to the last id of a bag or of a run of equal ids. The types of three scalars say how elements are stored: `rows` those of tables
(`vectors.py`), `real` the accumulation dtype, `id_type` the ids. Tables and arrays that are read once per id are int64 addresses.

Letters: B examples, F features, T tables, D width, nnz ids in the batch. Common arguments:

    addresses, first, second         [T] addresses of tables and of their optimizer's first and second state tensors
    first_bytes, second_bytes        [T] bytes per row of those; 0 where there is none
    num_rows, widths                 [T]
    table_of, is_mean                [F]
    columns                          [F + 1] first column of each feature's pooled vector, and the total width
    ids [nnz], offsets [F*B + 1], weights [nnz] or None, grad [B, columns[-1]]
"""

from __future__ import annotations

import numba
import numpy as np

from rowstead.kernels.cpu.memory import AHEAD, LINE, item, prefetch, prefetch_all, take
from rowstead.kernels.cpu.row_optimizers import apply_row, scalars_tuple, squares
from rowstead.kernels.cpu.vectors import broadcast, bytes_of, cast, load, num_lanes, store, zeros

NEAR_BYTES = 1 << 17
"""Bytes of gradients that fit into the L2 cache besides prefetched rows."""
_DIGIT_BITS = 11
"""Most bits per pass of the radix sort: the counts stay in the L1 cache."""
NUM_DIGITS = 1 << _DIGIT_BITS

_jit = numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
_inlined = numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy", forceinline=True)


@_inlined
def _prefetch_block(shape, address, like):  # type: ignore[no-untyped-def]
    """Prefetch the cache lines of a block."""
    for line in range(0, num_lanes(shape) * bytes_of(like), LINE):
        prefetch(address + line)


# Look-up


@_jit
def pool_bags(  # type: ignore[no-untyped-def]
    counter, bags_per_turn, num_samples, addresses, num_rows, widths, table_of, columns, is_mean, rows, ids, id_type, offsets,
    weights, out, real,
):  # fmt: skip
    """Pool bags into [B, sum of widths] at `out`, `bags_per_turn` at a time, until none are left.

    Returns the lowest index of an id out of range that was found, or -1.
    """
    num_bags = len(offsets) - 1
    failed = -1
    while True:
        first = take(counter) * bags_per_turn
        if first >= num_bags:
            return failed
        last = min(first + bags_per_turn, num_bags)
        index = _pool_some(
            first, last, num_samples, addresses, num_rows, widths, table_of, columns, is_mean, rows, ids, id_type, offsets,
            weights, out, real,
        )  # fmt: skip
        if index >= 0 and (failed < 0 or index < failed):
            failed = index


@_jit
def _pool_some(  # type: ignore[no-untyped-def]
    bag, last, num_samples, addresses, num_rows, widths, table_of, columns, is_mean, rows, ids, id_type, offsets, weights, out,
    real,
):  # fmt: skip
    """Pool bags `bag` to `last` - 1; returns the index of the first id out of range, or -1."""
    out_bytes = columns[-1] * bytes_of(real)
    while bag < last:
        feature = bag // num_samples
        table = table_of[feature]
        width, mean = widths[table], is_mean[feature]
        after = min(last, (feature + 1) * num_samples)
        index = _first_out_of_range(ids, id_type, offsets[bag], offsets[after], num_rows[table])
        if index >= 0:
            return index
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
def _first_out_of_range(ids, id_type, begin, end, num_rows):  # type: ignore[no-untyped-def]
    """The first index from `begin` to `end` - 1 whose id is out of range, or -1."""
    largest = np.uint64(0)
    for index in range(begin, end):
        largest = max(largest, np.uint64(np.int64(item(ids, index, id_type))))  # a negative id becomes a huge one
    if largest >= np.uint64(num_rows):
        for index in range(begin, end):
            if np.uint64(np.int64(item(ids, index, id_type))) >= np.uint64(num_rows):
                return index
    return -1


@_inlined
def _pool_block(  # type: ignore[no-untyped-def]
    summed, count, d, begin, end, known, address, row_bytes, rows, ids, id_type, weights, share, target, real
):
    """Sum one block of a bag's rows, from element `d`, and store it; ids up to `known` are of the same table."""
    source = address + d * bytes_of(rows)
    for index in range(begin, end):
        if index + AHEAD < known:
            _prefetch_block(summed, source + np.int64(item(ids, index + AHEAD, id_type)) * row_bytes, rows)
        values = load(source + np.int64(item(ids, index, id_type)) * row_bytes, rows, summed, count)
        if weights is not None:
            values = broadcast(item(weights, index, real), summed) * values
        summed = summed + values
    if share != 1:
        summed = summed * broadcast(share, summed)
    store(summed, target + d * bytes_of(real), real, count)


# Update


@_jit
def split_into_tasks(offsets, num_samples, table_of, num_tables, wanted):  # type: ignore[no-untyped-def]
    """Tasks of an update [tasks, 4], larger before smaller by powers of two: table, remainder, log2 of parts, ids of the table.

    No task has more than about one part in `wanted` of all ids; a single thread wants 1. Also returns the ids per table [T].
    """
    counts, part_bits = np.zeros(num_tables, np.int64), np.zeros(num_tables, np.int64)
    for feature in range(len(table_of)):
        counts[table_of[feature]] += offsets[(feature + 1) * num_samples] - offsets[feature * num_samples]
    most, num_tasks, bits = max(1, offsets[-1] // wanted), 0, 0
    for table in range(num_tables):
        while wanted > 1 and counts[table] >> part_bits[table] > most:
            part_bits[table] += 1
        num_tasks += (1 << part_bits[table]) * (counts[table] > 0)
    while offsets[-1] >> bits > 1:
        bits += 1
    tasks, end = np.empty((num_tasks, 4), np.int64), 0
    for low in range(bits, -1, -1):
        for table in range(num_tables):
            if counts[table] >> part_bits[table] >> low == 1:
                for remainder in range(1 << part_bits[table]):
                    tasks[end, 0], tasks[end, 1] = table, remainder
                    tasks[end, 2], tasks[end, 3] = part_bits[table], counts[table]
                    end += 1
    return tasks, counts


@_jit
def update_tables(  # type: ignore[no-untyped-def]
    counter, tasks, capacity, widest, num_samples, addresses, first, second, first_bytes, second_bytes, num_rows, widths, columns, is_mean,
    features_from, features, rows, ids, id_type, offsets, weights, grad, real, clip, kind, scalars, step, scaled,
):  # fmt: skip
    """Update the rows of one task (table, remainder, log2 of parts, ids) after another until none are left.

    A task has the rows of its table with that remainder modulo the number of parts. Tasks share no row, and each sums the
    gradients of a row in the order of the batch. `scaled` tells whether gradients have scales: of weights, clipping or means.

    `capacity` is more than the ids of any task, `widest` the largest width. Scratch memory is allocated here: threads that do so in Python wait for each other, and
    of arrays that come from outside the compiler does not know that they do not overlap.
    """
    words, spare = np.empty(capacity, np.uint64), np.empty(capacity, np.uint64)
    sources, scales = np.empty(capacity, np.int64), np.empty(capacity, scalars.dtype)
    summed, counts = np.empty(widest, scalars.dtype), np.empty(NUM_DIGITS, np.int64)
    while True:
        turn = take(counter)
        if turn >= len(tasks):
            return
        table, remainder, part_bits = tasks[turn, 0], tasks[turn, 1], tasks[turn, 2]
        begin, end = features_from[table], features_from[table + 1]
        count = _gather(
            features, begin, end, num_samples, widths[table], columns, is_mean, remainder, part_bits, ids, id_type, offsets, weights, grad,
            real, clip, scaled, words, sources, scales,
        )  # fmt: skip
        if count > 0:
            in_order = _sort(words, spare, count, (num_rows[table] - 1) >> part_bits, counts)
            _apply_runs(
                in_order.ctypes.data, count, table, remainder, part_bits, addresses[table], first[table], second[table],
                first_bytes[table], second_bytes[table], widths[table], rows, sources.ctypes.data, scales.ctypes.data, scaled, real, summed.ctypes.data,
                (end - begin) * num_samples * widths[table] * bytes_of(real) > NEAR_BYTES, kind, scalars_tuple(scalars), step,
            )  # fmt: skip


@_jit
def _gather(  # type: ignore[no-untyped-def]
    features, first, last, num_samples, width, columns, is_mean, remainder, part_bits, ids, id_type, offsets, weights, grad, real,
    clip, scaled, words, sources, scales,
):  # fmt: skip
    """Write a word for each id of one task, in the order of the batch: its row >> part_bits, then its number among them.

    The task's table is read by features[first : last]. Also, under that number, the address of its gradient and its scale. Returns how many there are.
    """
    mask = (1 << part_bits) - 1
    count = np.int64(0)
    for at in range(first, last):
        feature = features[at]
        source = grad + columns[feature] * bytes_of(real)
        for bag in range(feature * num_samples, (feature + 1) * num_samples):
            begin, end = offsets[bag], offsets[bag + 1]
            scale = cast(1, real)
            if scaled:
                scale = _bag_scale(source, width, end - begin, is_mean[feature], clip, real)
            for index in range(begin, end):
                row = np.int64(item(ids, index, id_type))
                # Ids of other tasks are written too and then overwritten: faster than a branch that cannot be predicted.
                words[count] = np.uint64(row >> part_bits) << np.uint64(32) | np.uint64(count)
                sources[count] = source
                if scaled:
                    share = scale
                    if weights is not None:
                        share *= item(weights, index, real)
                    scales[count] = share
                count += np.int64(row & mask == remainder)
            source += columns[-1] * bytes_of(real)
    return count


@_inlined
def _bag_scale(source, width, length, mean, clip, real):  # type: ignore[no-untyped-def]
    """The scale of one bag's gradient: clipping, and 1 / length for a mean."""
    scale = cast(1, real)
    if clip > 0:
        norm = np.sqrt(squares(source, width, real))
        if norm > clip:
            scale = cast(clip, real) / norm
    if mean and length > 1:
        scale /= cast(length, real)
    return scale


@_jit
def _sort(words, spare, count, highest, counts):  # type: ignore[no-untyped-def]
    """Radix sort, stable: the first `count` words by their high halves, at most `highest`. Returns the array that holds the result."""
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
        for digit in range(1 << width):
            counts[digit] = 0
        for i in range(count):
            counts[words[i] >> shift & mask] += 1
        before = 0
        for digit in range(1 << width):
            here = counts[digit]
            counts[digit] = before
            before += here
        for i in range(count):
            digit = words[i] >> shift & mask
            spare[counts[digit]] = words[i]
            counts[digit] += 1
        words, spare = spare, words
    return words


@_jit
def _apply_runs(  # type: ignore[no-untyped-def]
    words, count, table, remainder, part_bits, address, first, second, first_bytes, second_bytes, width, rows, sources, scales,
    scaled, real, summed, is_far, kind, scalars, step,
):  # fmt: skip
    """Sum the gradients of each run of words with equal rows, and apply the optimizer to the row; `is_far` prefetches gradients."""
    row_bytes = width * bytes_of(rows)
    index = 0
    while index < count:
        high = _high(words, index)
        end = index
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
        run = (words, index, end, sources, scales, scaled, real, summed)
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
        index = end


@_inlined
def _high(words, index):  # type: ignore[no-untyped-def]
    return np.int64(item(words, index, np.uint64(0)) >> np.uint64(32))


@_inlined
def _low(words, index):  # type: ignore[no-untyped-def]
    return np.int64(item(words, index, np.uint64(0)) & np.uint64(0xFFFFFFFF))


@_inlined
def _sum_block(block, count, d, words, begin, end, sources, scales, scaled, real, summed):  # type: ignore[no-untyped-def]
    """Sum one block of the gradients of a run, from element `d`, into `summed`."""
    for index in range(begin, end):
        number = _low(words, index)
        values = load(item(sources, number, np.int64(0)) + d * bytes_of(real), real, block, count)
        if scaled:
            values = broadcast(item(scales, number, real), block) * values
        block = block + values
    store(block, summed + d * bytes_of(real), real, count)


# Distinct rows: ids [U], of which those from bounds[t] to bounds[t + 1] - 1 are of table t


@_jit
def copy_distinct(addresses, widths, ids, bounds, out, word):  # type: ignore[no-untyped-def]
    """Copy the rows `ids` to `out`, word by word; the type of `word` has as many bytes as an element."""
    target = 0
    for table in range(len(addresses)):
        width, row_bytes = widths[table], widths[table] * bytes_of(word)
        for index in range(bounds[table], bounds[table + 1]):
            if index + AHEAD < bounds[table + 1]:
                prefetch_all(addresses[table] + np.int64(ids[index + AHEAD]) * row_bytes, row_bytes)
            source = addresses[table] + np.int64(ids[index]) * row_bytes
            for d in range(width):
                out[target + d] = item(source, d, word)
            target += width


@_jit
def update_distinct(  # type: ignore[no-untyped-def]
    addresses, first, second, first_bytes, second_bytes, widths, ids, bounds, grad, rows, real, kind, scalars, step
):
    """Apply the optimizer to each of the rows `ids` with its gradient; they follow each other from the address `grad` on."""
    plain = scalars_tuple(scalars)
    for table in range(len(addresses)):
        width, row_bytes = widths[table], widths[table] * bytes_of(rows)
        for index in range(bounds[table], bounds[table + 1]):
            if index + AHEAD < bounds[table + 1]:
                prefetch_all(addresses[table] + np.int64(ids[index + AHEAD]) * row_bytes, row_bytes)
            apply_row(
                table, np.int64(ids[index]), addresses[table], first[table], second[table], first_bytes[table],
                second_bytes[table], grad, width, rows, real, kind, plain, step,
            )  # fmt: skip
            grad += width * bytes_of(real)
