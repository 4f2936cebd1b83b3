"""The compiled programs behind `distributed/router.py` and `fleet/router.py`: they cut a batch by owners and join their answers.

They release the GIL and run in the calling thread, so several threads of a trainer can run them at once.

Letters: B examples, F features, S servers, nnz ids in the batch, D width. A request to one server has features of its own
(its slots), n ids and U distinct rows of a table.
"""

from __future__ import annotations

import numba
import numpy as np

from rowstead.spec.stores import ROWS_SHARE

_jit = numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")


@_jit
def cut_batch(  # type: ignore[no-untyped-def]
    ids, offsets, weights, num_samples, is_split, shard_offsets, owners, firsts, starts, length_starts, out, lengths, out_weights,
):  # fmt: skip
    """Route each id to the owner of its row, as a row of that owner's piece; returns the number of ids of each owner, [W].

    The pieces of feature f are at shard_offsets[f] to shard_offsets[f + 1] in owners and in firsts, their first rows, ascending.
    Bags of a feature that is_split [F] are split by rows, others go whole to each of its owners. Ids of owner w are written to
    `out` from starts[w] on, the lengths of its bags to `lengths` from length_starts[w] on, feature-major. `out_weights` matches
    `out`; empty if `weights` is.
    """
    cursors, bags = starts.copy(), length_starts.copy()
    has_weights = len(weights) > 0
    for feature in range(len(is_split)):
        begin, end = shard_offsets[feature], shard_offsets[feature + 1]
        first_bag, last_bag = feature * num_samples, (feature + 1) * num_samples
        if not is_split[feature]:
            low, high = offsets[first_bag], offsets[last_bag]
            for home in range(begin, end):
                owner = owners[home]
                cursor = cursors[owner]
                for i in range(high - low):
                    out[cursor + i] = ids[low + i]
                if has_weights:
                    for i in range(high - low):
                        out_weights[cursor + i] = weights[low + i]
                cursors[owner] = cursor + high - low
                bag_cursor = bags[owner]
                for bag in range(num_samples):
                    lengths[bag_cursor + bag] = offsets[first_bag + bag + 1] - offsets[first_bag + bag]
                bags[owner] = bag_cursor + num_samples
            continue
        for bag in range(first_bag, last_bag):
            for home in range(begin, end):
                lengths[bags[owners[home]]] = 0
            for i in range(offsets[bag], offsets[bag + 1]):
                row = np.int64(ids[i])
                home = begin
                while home + 1 < end and row >= firsts[home + 1]:
                    home += 1
                owner = owners[home]
                out[cursors[owner]] = row - firsts[home]
                if has_weights:
                    out_weights[cursors[owner]] = weights[i]
                cursors[owner] += 1
                lengths[bags[owner]] += 1
            for home in range(begin, end):
                bags[owners[home]] += 1
    return cursors - starts


@_jit
def find_distinct(  # type: ignore[no-untyped-def]
    ids, bounds, slots_from, slots, widths, num_samples, id_bytes, weight_bytes, row_bytes, real_bytes, always, indices,
    distinct, counts,
):  # fmt: skip
    """Find the tables for which sending distinct rows takes fewer bytes than pooled vectors; returns the number of those rows.

    ids [n] are those of one server, bounds [F + 1] where each of its slots begins; slots_from [T + 1] and slots give the slots
    that read a table, widths [T]. An element of a row has `row_bytes`, one of its gradient `real_bytes`. With `always` the rows of
    all tables are sent, whatever they take. counts [T] becomes -1 for tables that the server pools, else the number of distinct rows, which are written to `distinct` table by table;
    `indices` [n] is then the index of each id among its table's distinct rows.
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
        most = num_ids if always else np.int64(ROWS_SHARE * pooled) // each
        counts[table] = 0 if always else -1
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
                indices[i] = found[slot]
            if not fits:
                break
        if fits:
            counts[table] = count
            used += count
    return used


@_jit
def bounds_of(lengths, num_slots, num_samples, bounds):  # type: ignore[no-untyped-def]
    """Write where the ids of each slot begin into bounds [slots + 1]; returns the shortest and the longest bag length."""
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
    """Write vectors [B, width] of some features to their columns of pooled [B, sum of widths], or add them where is_filled.

    columns, targets and widths [slots]: first column in the block, first column in `pooled`, number of columns.
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
    rows, row_starts, slots, targets, widths, is_filled, bounds, lengths, num_samples, indices, shares, pooled
):
    """Sum distinct rows into the columns of the slots that read them.

    rows is flat; row_starts [slots] is where those of the slot's table begin in it; indices [n] the row that each id names.
    """
    for at in range(len(slots)):
        slot, width = slots[at], widths[at]
        at_id = bounds[slot]
        for sample in range(num_samples):
            target = pooled[sample, targets[at] : targets[at] + width]
            length, is_empty = lengths[slot * num_samples + sample], not is_filled[at]
            for _ in range(length):
                first = row_starts[at] + np.int64(indices[at_id]) * width
                row = rows[first : first + width]
                if len(shares) > 0 and is_empty:
                    _multiply(shares[at_id], row, target)
                elif len(shares) > 0:
                    _add_times(shares[at_id], row, target)
                elif is_empty:
                    _copy(row, target)
                else:
                    _add(row, target)
                is_empty = False
                at_id += 1
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
    """Write the factor that clips each pooled vector's gradient to norm `most` into factors [F*B]."""
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
    """The factor of one bag's gradient before it is sent."""
    bag = feature * num_samples + sample
    factor = factors[bag] if len(factors) > 0 else 1.0
    if divides:
        factor /= max(1, offsets[bag + 1] - offsets[bag])
    return factor


@_jit
def pack_gradients(grad, offsets, factors, features, divides, columns, sources, widths, block):  # type: ignore[no-untyped-def]
    """Pack the gradients of some features' vectors into block [B, width]; divides [slots] marks means that are divided here."""
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
    grad, offsets, factors, features, divides, row_starts, tables, slots, sources, widths, bounds, lengths, indices, shares,
    seen, sums,
):  # fmt: skip
    """Sum the gradients of some slots' bags by the distinct rows that they name, in `sums`, flat like the rows.

    `sums` need not be initialised; seen [T] is zero. Distinct rows are numbered in the order of first use, so the row with the
    next number of its table is new.
    """
    num_samples = len(grad)
    for at in range(len(slots)):
        slot, width = slots[at], widths[at]
        at_id = bounds[slot]
        for sample in range(num_samples):
            source = grad[sample, sources[at] : sources[at] + width]
            factor = grad.dtype.type(_factor(factors, offsets, features[at], sample, num_samples, divides[at]))
            for _ in range(lengths[slot * num_samples + sample]):
                share = factor * shares[at_id] if len(shares) > 0 else factor
                first = row_starts[at] + np.int64(indices[at_id]) * width
                if indices[at_id] == seen[tables[at]]:
                    seen[tables[at]] += 1
                    _multiply(share, source, sums[first : first + width])
                else:
                    _add_times(share, source, sums[first : first + width])
                at_id += 1
