"""Pooled look-up and exact fused update on the CPU, in Numba: all tables in one call, no locks, no GIL.

Threads share a look-up by bags. An update sorts the ids of each table (a thread a table), which puts equal ids side by side;
threads then share the runs of equal ids, and a run is summed and applied by one thread in the order of the batch. So the
result does not depend on the number of threads, bit for bit.

Letters: B examples, F features, T tables, N rows, D width, nnz ids in the batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowstead.kernels.layout import Layout
from rowstead.kernels.memory import prefetch, reals_at
from rowstead.kernels.optimizer import KINDS, RowState, numbers_of, state_addresses
from rowstead.spec.errors import DataError
from rowstead.spec.train import SparseOptimizerSpec

AHEAD = 8
"""Ids by which rows are asked for before they are used."""
_DIGIT_BITS = 11

_jit = numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")


def lookup(tables: Sequence[Tensor], layout: Layout, ids: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Pooled rows of every feature, side by side: [B, sum of widths].

    tables: T tensors [N, D] of one dtype; ids int32 or int64 [nnz]; offsets int64 [F*B + 1]; weights [nnz] or none.
    """
    facts = _facts(layout)
    num_samples = (offsets.numel() - 1) // layout.num_features
    pooled = torch.empty(num_samples, layout.total_width, dtype=tables[0].dtype)
    out, places, bounds = pooled.numpy(), ids.numpy(), offsets.numpy()
    scales = _weights(weights, pooled.dtype)
    addresses = np.array([table.data_ptr() for table in tables], np.int64)

    def pool(first: int, last: int) -> int:
        return int(_pool(addresses, *facts, places, bounds, scales, weights is not None, num_samples, first, last, out))

    failed = [place for place in _shared(pool, _even_bags(bounds)) if place >= 0]
    if failed:
        raise _outside(min(failed), layout, places, bounds, num_samples)
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
    facts = _facts(layout)
    num_samples = (offsets.numel() - 1) // layout.num_features
    gradient, places, bounds = grad.contiguous().numpy(), ids.numpy(), offsets.numpy()
    scales = _weights(weights, grad.dtype)
    bag_scales = _bag_scales(gradient, bounds, layout, optimizer.clip)
    keys, order, bags, starts = _sorted_ids(layout, places, bounds, num_samples)

    rows = np.array([table.data_ptr() for table in tables], np.int64)
    memory = np.array([state_addresses(state) for state in states], np.int64)
    first, second = np.ascontiguousarray(memory[:, 0]), np.ascontiguousarray(memory[:, 1])
    numbers = np.array(numbers_of(optimizer, lr=lr, step=step), gradient.dtype)

    def apply(begin: int, end: int) -> int:
        _apply_runs(
            rows, first, second, *facts, starts, keys, order, bags, scales, weights is not None, bag_scales, gradient,
            num_samples, KINDS[optimizer.kind], numbers, begin, end,
        )  # fmt: skip
        return 0

    _shared(apply, _even_runs(keys, starts))


@lru_cache(maxsize=64)
def _facts(layout: Layout) -> tuple[NDArray[Any], ...]:
    """For each table rows and width, for each feature table, first column and pooling, as arrays."""
    return (
        np.array([table.num_rows for table in layout.tables], np.int64),
        np.array([table.width for table in layout.tables], np.int64),
        np.array(layout.table_of, np.int64),
        np.array(layout.columns, np.int64),
        np.array(layout.is_mean, np.bool_),
    )


def _weights(weights: Tensor | None, dtype: torch.dtype) -> NDArray[Any]:
    """Per-id weights [nnz] as the kernels take them: of the rows' type, and empty for none."""
    given = torch.empty(0, dtype=dtype) if weights is None else weights.to(dtype)
    return np.asarray(given.numpy())


def _outside(place: int, layout: Layout, ids: NDArray[Any], offsets: NDArray[np.int64], num_samples: int) -> DataError:
    bag = int(np.searchsorted(offsets, place, side="right") - 1)
    table = layout.tables[layout.table_of[bag // num_samples]]
    return DataError(
        f"id {int(ids[place])} of example {bag % num_samples} is outside table `{table.name}`, whose rows are 0 to "
        f"{table.num_rows - 1}: hash ids to rows first"
    )


# Sharing among threads


@lru_cache(maxsize=1)
def _pool_of(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="kernel")


# A forked child has none of the threads that the pool it inherits thinks it has.
os.register_at_fork(after_in_child=_pool_of.cache_clear)


def _shared(work: Callable[[int, int], int], borders: Sequence[int]) -> list[int]:
    """`work` on each part between two borders, the first on this thread and the others on the pool's."""
    parts = [(a, b) for a, b in pairwise(borders) if a < b]
    if not parts:
        return []
    others = [_pool_of(torch.get_num_threads()).submit(work, *part) for part in parts[1:]]
    return [work(*parts[0]), *(other.result() for other in others)]


def _num_parts(num_ids: int) -> int:
    """Threads worth waking for so many ids."""
    return max(1, min(torch.get_num_threads(), num_ids // 512))


def _even_bags(offsets: NDArray[np.int64]) -> list[int]:
    """Bags split so that each part has about as many ids; empty bags count a little."""
    num_bags, num_ids = len(offsets) - 1, int(offsets[-1])
    parts = _num_parts(num_ids + num_bags // 4)
    wanted = [num_ids * part // parts for part in range(1, parts)]
    inner = np.searchsorted(offsets, np.array(wanted, np.int64), side="right").clip(0, num_bags)
    return [0, *inner.tolist(), num_bags]


def _even_runs(keys: NDArray[np.int64], starts: NDArray[np.int64]) -> list[int]:
    """Sorted ids split where one run ends and the next begins."""
    parts = _num_parts(len(keys))
    return [0, *(int(_run_border(keys, starts, len(keys) * part // parts)) for part in range(1, parts)), len(keys)]


@_jit
def _run_border(keys, starts, place):  # type: ignore[no-untyped-def]
    """The first place at or after `place` where a run of equal ids of one table begins."""
    table = np.searchsorted(starts, place, side="right") - 1
    while starts[table] < place < starts[table + 1] and keys[place] == keys[place - 1]:
        place += 1
    return place


# Look-up


@_jit
def _pool(  # type: ignore[no-untyped-def]
    addresses, num_rows, widths, table_of, columns, is_mean, ids, offsets, weights, weighted, num_samples, first, last, out
):
    """Pool bags `first` to `last` - 1 into out [B, sum of widths]; returns the place of an id out of range, or -1."""
    size = out.itemsize
    stop = offsets[last]
    for bag in range(first, last):
        feature = bag // num_samples
        table = table_of[feature]
        width, address, limit = widths[table], addresses[table], num_rows[table]
        row_bytes = width * size
        target = out[bag - feature * num_samples, columns[feature] : columns[feature] + width]
        target[:] = 0
        begin, end = offsets[bag], offsets[bag + 1]
        for place in range(begin, end):
            row = np.int64(ids[place])
            if row < 0 or row >= limit:
                return place
            ahead = place + AHEAD
            if ahead < stop:
                # Past the end of this feature the guess may name another table: harmless, since nothing is read.
                start = address + np.int64(ids[ahead]) * row_bytes
                for line in range(0, row_bytes, 64):
                    prefetch(start + line)
            source = reals_at(address + row * row_bytes, width, out)
            if weighted:
                weight = weights[place]
                for d in range(width):
                    target[d] += weight * source[d]
            else:
                for d in range(width):
                    target[d] += source[d]
        if is_mean[feature] and end - begin > 1:
            share = out.dtype.type(1) / out.dtype.type(end - begin)
            for d in range(width):
                target[d] *= share
    return -1


# Update


def _bag_scales(grad: NDArray[Any], offsets: NDArray[np.int64], layout: Layout, clip: float | None) -> NDArray[Any]:
    """What the gradient of each bag is multiplied by [F*B]: its mean's share and its clipping; empty when all are 1."""
    if clip is None and not any(layout.is_mean):
        return np.empty(0, grad.dtype)
    scales = np.empty(len(offsets) - 1, grad.dtype)
    _scale_bags(grad, offsets, _facts(layout)[3], _facts(layout)[4], -1.0 if clip is None else clip, scales)
    return scales


@_jit
def _scale_bags(grad, offsets, columns, is_mean, clip, scales):  # type: ignore[no-untyped-def]
    num_samples = grad.shape[0]
    for bag in range(len(scales)):
        feature = bag // num_samples
        scale = 1.0
        length = offsets[bag + 1] - offsets[bag]
        if clip > 0:
            square = 0.0
            for d in range(columns[feature], columns[feature + 1]):
                square += grad[bag - feature * num_samples, d] ** 2
            norm = np.sqrt(square)
            if norm > clip:
                scale = clip / norm
        if is_mean[feature] and length > 1:
            scale /= length
        scales[bag] = scale


def _sorted_ids(
    layout: Layout, ids: NDArray[Any], offsets: NDArray[np.int64], num_samples: int
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
    """The ids of each table in rising order, stable.

    Returns keys [nnz]; for each its place in `ids` [nnz]; the bag of each place [nnz]; where each table starts [T + 1].
    """
    lengths = offsets[num_samples::num_samples] - offsets[:-1:num_samples]
    counts = [int(sum(lengths[feature] for feature in table.features)) for table in layout.tables]
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    total = int(starts[-1])
    keys, order, bags = np.empty(total, np.int64), np.empty(total, np.int32), np.empty(len(ids), np.int32)
    features = [np.array(table.features, np.int64) for table in layout.tables]

    def sort(tables: Sequence[int]) -> None:
        for table in tables:
            part = slice(starts[table], starts[table + 1])
            _sort_table(
                ids, offsets, num_samples, features[table], layout.tables[table].num_rows, keys[part], order[part], bags
            )

    parts = _num_parts(total)
    shares: list[list[int]] = [[] for _ in range(parts)]
    loads = [0] * parts
    for table in sorted(range(len(counts)), key=lambda t: -counts[t]):
        lightest = loads.index(min(loads))
        shares[lightest].append(table)
        loads[lightest] += counts[table]
    others = [_pool_of(torch.get_num_threads()).submit(sort, share) for share in shares[1:] if share]
    sort(shares[0])
    for other in others:
        other.result()
    return keys, order, bags, starts


@_jit
def _sort_table(ids, offsets, num_samples, features, num_rows, keys, order, bags):  # type: ignore[no-untyped-def]
    """Gather the ids of one table and sort them by digits; `bags` gets the bag of each place."""
    count = 0
    for feature in features:
        for bag in range(feature * num_samples, (feature + 1) * num_samples):
            for place in range(offsets[bag], offsets[bag + 1]):
                keys[count] = ids[place]
                order[count] = place
                bags[place] = bag
                count += 1
    other_keys, other_order = np.empty_like(keys), np.empty_like(order)
    tally = np.empty((1 << _DIGIT_BITS) + 1, np.int64)
    mask = (1 << _DIGIT_BITS) - 1
    shift, passes = 0, 0
    while (num_rows - 1) >> shift > 0:
        tally[:] = 0
        for i in range(count):
            tally[((keys[i] >> shift) & mask) + 1] += 1
        for digit in range(mask):
            tally[digit + 1] += tally[digit]
        for i in range(count):
            digit = (keys[i] >> shift) & mask
            place = tally[digit]
            tally[digit] = place + 1
            other_keys[place] = keys[i]
            other_order[place] = order[i]
        keys, other_keys = other_keys, keys
        order, other_order = other_order, order
        shift += _DIGIT_BITS
        passes += 1
    if passes % 2:
        other_keys[:] = keys
        other_order[:] = order


@_jit
def _apply_runs(  # type: ignore[no-untyped-def]
    rows, first, second, num_rows, widths, table_of, columns, is_mean, starts, keys, order, bags, weights, weighted,
    bag_scales, grad, num_samples, kind, numbers, begin, end,
):  # fmt: skip
    """Sum the gradients of each run of equal ids between places `begin` and `end`, and apply the optimizer to its row."""
    size = grad.itemsize
    total = np.empty(widths.max(), grad.dtype)
    scaled = len(bag_scales) > 0
    table = np.searchsorted(starts, begin, side="right") - 1
    place = begin
    while place < end:
        while place >= starts[table + 1]:
            table += 1
        width, stop = widths[table], min(end, starts[table + 1])
        row_bytes = width * size
        state_bytes = size if kind == 2 else row_bytes
        while place < stop:
            key = keys[place]
            total[:width] = 0
            while place < stop and keys[place] == key:
                ahead = place + AHEAD
                if ahead < stop:
                    start = rows[table] + keys[ahead] * row_bytes
                    for line in range(0, row_bytes, 64):
                        prefetch(start + line)
                    if kind != 0:
                        prefetch(first[table] + keys[ahead] * state_bytes)
                at = order[place]
                bag = bags[at]
                feature = bag // num_samples
                source = grad[bag - feature * num_samples, columns[feature] : columns[feature] + width]
                if weighted or scaled:
                    scale = grad.dtype.type(1)
                    if weighted:
                        scale *= weights[at]
                    if scaled:
                        scale *= bag_scales[bag]
                    for d in range(width):
                        total[d] += scale * source[d]
                else:
                    for d in range(width):
                        total[d] += source[d]
                place += 1
            row = reals_at(rows[table] + key * row_bytes, width, grad)
            one = reals_at(first[table] + key * state_bytes, width, grad)
            two = reals_at(second[table] + key * row_bytes, width, grad)
            _apply_row(row, one, two, total, width, kind, numbers)


@numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy", inline="always")
def _apply_row(row, one, two, grad, width, kind, numbers):  # type: ignore[no-untyped-def]
    """The optimizer's rule for one row [D] with its summed gradient [D] and state `one`, `two` [D] (row-wise: one[0])."""
    lr, eps, beta1, beta2, correction = numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]
    if kind == 0:
        for d in range(width):
            row[d] -= lr * grad[d]
    elif kind == 1:
        for d in range(width):
            one[d] += grad[d] * grad[d]
            row[d] -= lr * grad[d] / (np.sqrt(one[d]) + eps)
    elif kind == 2:
        square = numbers.dtype.type(0)
        for d in range(width):
            square += grad[d] * grad[d]
        one[0] += square / numbers.dtype.type(width)
        factor = lr / (np.sqrt(one[0]) + eps)
        for d in range(width):
            row[d] -= factor * grad[d]
    else:
        for d in range(width):
            one[d] = grad[d] + beta1 * (one[d] - grad[d])
            two[d] = grad[d] * grad[d] + beta2 * (two[d] - grad[d] * grad[d])
            row[d] -= lr * correction * one[d] / (np.sqrt(two[d]) + eps)
