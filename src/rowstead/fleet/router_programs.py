"""The compiled programs behind `fleet/router.py`: a batch cut by pieces, and vectors and gradients put together again.

They hold no GIL and run in the thread that calls them, so that several threads of a trainer can each be in one.

Letters: B examples, F features, S servers, nnz ids in the batch, D width. What one server is asked has features of its own
(its slots), n ids and U distinct rows of a table.
"""

from __future__ import annotations

import numba
import numpy as np

ROWS_SHARE = 0.75
"""Distinct rows are sent where they are at most so much of the bytes of pooled vectors: bags are then pooled, and gradients summed, by the
trainer, which takes longer than a few bytes less would save."""

_jit = numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")


@_jit
def cut_batch(  # type: ignore[no-untyped-def]
    ids, offsets, weights, num_samples, order, homes_from, servers, firsts, starts, length_starts, out, lengths, shares
):
    """Hand each id to the server that keeps its row, as a row of that server's piece; returns how many each got, [S].

    order [F] are the features in the order in which servers have them; the pieces of feature f are at homes_from[f] to
    homes_from[f + 1] in servers and in firsts, which are the pieces' first rows, rising. Ids of server s are written to `out`
    from starts[s] on, the lengths of its bags to `lengths` from length_starts[s] on, feature-major. `shares` are weights like
    `out`, or empty as `weights` is.
    """
    cursors, bags = starts.copy(), length_starts.copy()
    has_weights = len(weights) > 0
    for place in range(len(order)):
        feature = order[place]
        begin, end = homes_from[feature], homes_from[feature + 1]
        first_bag, last_bag = feature * num_samples, (feature + 1) * num_samples
        if end - begin == 1:
            server = servers[begin]
            low, high = offsets[first_bag], offsets[last_bag]
            cursor = cursors[server]
            for i in range(high - low):
                out[cursor + i] = ids[low + i]
            if has_weights:
                for i in range(high - low):
                    shares[cursor + i] = weights[low + i]
            cursors[server] = cursor + high - low
            bag_cursor = bags[server]
            for bag in range(num_samples):
                lengths[bag_cursor + bag] = offsets[first_bag + bag + 1] - offsets[first_bag + bag]
            bags[server] = bag_cursor + num_samples
            continue
        for bag in range(first_bag, last_bag):
            for home in range(begin, end):
                lengths[bags[servers[home]]] = 0
            for i in range(offsets[bag], offsets[bag + 1]):
                row = np.int64(ids[i])
                home = begin
                while home + 1 < end and row >= firsts[home + 1]:
                    home += 1
                server = servers[home]
                out[cursors[server]] = row - firsts[home]
                if has_weights:
                    shares[cursors[server]] = weights[i]
                cursors[server] += 1
                lengths[bags[server]] += 1
            for home in range(begin, end):
                bags[servers[home]] += 1
    return cursors - starts


@_jit
def find_distinct(  # type: ignore[no-untyped-def]
    ids, bounds, slots_from, slots, widths, num_samples, id_bytes, weight_bytes, row_bytes, real_bytes, places, distinct, counts
):
    """Of which tables it takes so much fewer bytes to send distinct rows than pooled vectors; returns how many rows those are in all.

    ids [n] are those of one server, bounds [F + 1] where each of its slots begins; slots_from [T + 1] and slots say which slots
    read a table, widths [T]. A row has `row_bytes` a number and its gradient `real_bytes`. counts [T] becomes -1 for tables
    that are pooled, else the number of distinct rows, which are written to `distinct` one table after another; `places` [n]
    then has for each id which of its table's rows it names.
    """
    used = 0
    keys, found = np.empty(0, np.int64), np.empty(0, np.int32)
    for table in range(len(counts)):
        num_ids, num_bags = 0, 0
        for at in range(slots_from[table], slots_from[table + 1]):
            num_ids += bounds[slots[at] + 1] - bounds[slots[at]]
            num_bags += num_samples
        pooled = num_ids * (id_bytes + weight_bytes) + num_bags * (1 + 2 * widths[table] * real_bytes)
        each = id_bytes + widths[table] * (row_bytes + real_bytes)
        most = np.int64(ROWS_SHARE * pooled) // each
        counts[table] = -1
        if num_bags == 0:
            continue
        size = 16
        while size < 2 * min(most, num_ids):
            size *= 2
        if len(keys) < size:
            keys, found = np.empty(size, np.int64), np.empty(size, np.int32)
        keys[:size] = -1
        mask = np.uint64(size - 1)
        count, fits = 0, True
        for at in range(slots_from[table], slots_from[table + 1]):
            for i in range(bounds[slots[at]], bounds[slots[at] + 1]):
                row = np.int64(ids[i])
                slot = (np.uint64(row) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32) & mask
                while keys[slot] != row and keys[slot] != -1:
                    slot = (slot + np.uint64(1)) & mask
                if keys[slot] == -1:
                    if count == most:
                        fits = False
                        break
                    keys[slot], found[slot] = row, count
                    distinct[used + count] = row
                    count += 1
                places[i] = found[slot]
            if not fits:
                break
        if fits:
            counts[table] = count
            used += count
    return used


@_jit
def bounds_of(lengths, num_slots, num_samples, bounds):  # type: ignore[no-untyped-def]
    """Where the ids of each slot begin, into bounds [slots + 1]; returns the least and the longest of all bags."""
    total, least, most = np.int64(0), np.int64(0x7FFFFFFF), np.int64(0)
    bounds[0] = 0
    for slot in range(num_slots):
        for bag in range(slot * num_samples, (slot + 1) * num_samples):
            length = np.int64(lengths[bag])
            total += length
            least, most = min(least, length), max(most, length)
        bounds[slot + 1] = total
    return least, most


@_jit
def kept_slots(ids, shares, lengths, bounds, slots, num_samples, out, out_shares, out_lengths):  # type: ignore[no-untyped-def]
    """Copy the ids, weights and lengths of some slots, one after another; returns how many ids there are."""
    count, bag = 0, 0
    for slot in slots:
        for i in range(bounds[slot], bounds[slot + 1]):
            out[count] = ids[i]
            if len(shares) > 0:
                out_shares[count] = shares[i]
            count += 1
        for i in range(slot * num_samples, (slot + 1) * num_samples):
            out_lengths[bag] = lengths[i]
            bag += 1
    return count


@_jit
def _copy(source, target):  # type: ignore[no-untyped-def]
    for d in range(len(target)):
        target[d] = source[d]


@_jit
def _add(source, target):  # type: ignore[no-untyped-def]
    for d in range(len(target)):
        target[d] += source[d]


@_jit
def _add_times(factor, source, target):  # type: ignore[no-untyped-def]
    for d in range(len(target)):
        target[d] += factor * source[d]


@_jit
def _multiply(factor, source, target):  # type: ignore[no-untyped-def]
    for d in range(len(target)):
        target[d] = factor * source[d]


@_jit
def join_vectors(block, columns, targets, widths, is_filled, pooled):  # type: ignore[no-untyped-def]
    """Put vectors [B, width] of some features into their columns of pooled [B, sum of widths], or add them where some are.

    columns, targets and widths [slots]: first column in the block, first column in `pooled`, and how many; is_filled says where
    to add.
    """
    for sample in range(len(pooled)):
        for slot in range(len(columns)):
            source = block[sample, columns[slot] : columns[slot] + widths[slot]]
            target = pooled[sample, targets[slot] : targets[slot] + widths[slot]]
            if is_filled[slot]:
                _add(source, target)
            else:
                _copy(source, target)


@_jit
def pool_rows(  # type: ignore[no-untyped-def]
    rows, row_starts, slots, targets, widths, is_filled, bounds, lengths, num_samples, places, shares, pooled
):
    """Sum distinct rows into the columns of the slots that read them.

    rows is flat; row_starts [slots] says where those of the slot's table begin in it; places [n] which row each id names.
    """
    for at in range(len(slots)):
        slot, width = slots[at], widths[at]
        place = bounds[slot]
        for sample in range(num_samples):
            target = pooled[sample, targets[at] : targets[at] + width]
            length, is_empty = lengths[slot * num_samples + sample], not is_filled[at]
            for _ in range(length):
                first = row_starts[at] + np.int64(places[place]) * width
                row = rows[first : first + width]
                if len(shares) > 0 and is_empty:
                    _multiply(shares[place], row, target)
                elif len(shares) > 0:
                    _add_times(shares[place], row, target)
                elif is_empty:
                    _copy(row, target)
                else:
                    _add(row, target)
                is_empty = False
                place += 1
            if is_empty:
                target[:] = 0


@_jit
def divide_means(offsets, features, columns, widths, num_samples, pooled):  # type: ignore[no-untyped-def]
    """Turn the sums of some features into means, by the lengths of their whole bags."""
    for at in range(len(features)):
        for sample in range(num_samples):
            bag = features[at] * num_samples + sample
            length = offsets[bag + 1] - offsets[bag]
            if length > 1:
                target = pooled[sample, columns[at] : columns[at] + widths[at]]
                for d in range(len(target)):
                    target[d] /= length


@_jit
def clip_factors(grad, columns, most, factors):  # type: ignore[no-untyped-def]
    """By what each pooled vector's gradient is multiplied so that its norm is `most` or less, into factors [F*B]."""
    num_samples = len(grad)
    for feature in range(len(columns) - 1):
        for sample in range(num_samples):
            square = grad[sample, 0] * 0
            for d in range(columns[feature], columns[feature + 1]):
                square += grad[sample, d] * grad[sample, d]
            norm = np.sqrt(square)
            factors[feature * num_samples + sample] = most / norm if norm > most else 1.0


@_jit
def _factor(factors, offsets, feature, sample, num_samples, divides):  # type: ignore[no-untyped-def]
    """By what the gradient of one bag is multiplied before it leaves."""
    bag = feature * num_samples + sample
    factor = factors[bag] if len(factors) > 0 else 1.0
    if divides:
        factor /= max(1, offsets[bag + 1] - offsets[bag])
    return factor


@_jit
def pack_gradients(grad, offsets, factors, features, divides, columns, sources, widths, block):  # type: ignore[no-untyped-def]
    """The gradients of some features' vectors side by side in block [B, width]; divides [slots] where a mean is joined here."""
    num_samples = len(grad)
    is_plain = len(factors) == 0 and not divides.any()
    for sample in range(num_samples):
        for slot in range(len(columns)):
            source = grad[sample, sources[slot] : sources[slot] + widths[slot]]
            target = block[sample, columns[slot] : columns[slot] + widths[slot]]
            if is_plain:
                _copy(source, target)
            else:
                factor = _factor(factors, offsets, features[slot], sample, num_samples, divides[slot])
                _multiply(grad.dtype.type(factor), source, target)


@_jit
def sum_gradients(  # type: ignore[no-untyped-def]
    grad,
    offsets,
    factors,
    features,
    divides,
    row_starts,
    tables,
    slots,
    sources,
    widths,
    bounds,
    lengths,
    places,
    shares,
    seen,
    sums,
):
    """Sum the gradients of some slots' bags by the distinct rows that they name, in `sums`, flat like the rows.

    It may hold anything before, and seen [T] is zero. Rows were numbered in the order in which they are met, so the one that
    has the next number of its table is new.
    """
    num_samples = len(grad)
    for at in range(len(slots)):
        slot, width = slots[at], widths[at]
        place = bounds[slot]
        for sample in range(num_samples):
            source = grad[sample, sources[at] : sources[at] + width]
            factor = grad.dtype.type(_factor(factors, offsets, features[at], sample, num_samples, divides[at]))
            for _ in range(lengths[slot * num_samples + sample]):
                share = factor * shares[place] if len(shares) > 0 else factor
                first = row_starts[at] + np.int64(places[place]) * width
                if places[place] == seen[tables[at]]:
                    seen[tables[at]] += 1
                    _multiply(share, source, sums[first : first + width])
                else:
                    _add_times(share, source, sums[first : first + width])
                place += 1
