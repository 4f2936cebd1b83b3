"""`Encoder`: raw rows to a `Batch`. Gathers, truncates, hashes ids to table rows, transforms dense values.

Letters: B examples of the batch, F sparse features, Fd dense features, K blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from rowstead.data.batch import Batch, BatchTotals, Sparse
from rowstead.data.block import RawBlock
from rowstead.data.hashing import HASH_CODES, hash_in_place, id_outside_table
from rowstead.data.transforms import DenseTransforms
from rowstead.kernels.cpu.memory import address_of, floats_at, integers_at, prefetch
from rowstead.spec.errors import DataError
from rowstead.spec.features import FeaturesSpec, Table

Allocate = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""Returns an uninitialized tensor."""


def empty_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialized tensor, allocated by NumPy, which asks for huge pages."""
    return torch.from_numpy(np.empty(shape, np.float32 if dtype == torch.float32 else np.int64))


def empty_pinned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in pinned memory; torch caches and reuses it."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)


RunParts = Callable[[int, Callable[[int], int]], list[int]]
"""Calls a function with 0 … count - 1, possibly in parallel; returns the results in order."""


def run_sequentially(count: int, work: Callable[[int], int]) -> list[int]:
    """A `RunParts` without parallelism."""
    return [work(number) for number in range(count)]


SCALARS = ("labels", "weights", "true_p")
"""Columns with one number per example, or with one per task; a batch has them by the same names."""


class RawRows:
    """Blocks concatenated without copying: a row is found by block and index in it. At least one block."""

    def __init__(self, blocks: Sequence[RawBlock], addresses: NDArray[np.int64] | None = None) -> None:
        self.blocks = tuple(blocks)
        self.starts = np.zeros(len(self.blocks) + 1, np.int64)
        """[K + 1]: block k holds the rows from starts[k] to starts[k+1]."""
        np.cumsum([block.num_rows for block in self.blocks], out=self.starts[1:])
        self.addresses = np.array([_addresses(block) for block in self.blocks], np.int64) if addresses is None else addresses
        """[K, 1 + 2F]: addresses of each block's dense values, ids and offsets."""

    def __len__(self) -> int:
        return int(self.starts[-1])

    @classmethod
    def concatenate(cls, parts: Sequence[RawRows]) -> RawRows:
        return cls([block for part in parts for block in part.blocks], np.concatenate([part.addresses for part in parts]))


def _addresses(block: RawBlock) -> list[int]:
    assert block.dense.dtype == np.float32
    assert all(a.dtype == np.int64 for a in (*block.ids, *block.offsets))
    return [address_of(block.dense), *map(address_of, block.ids), *map(address_of, block.offsets)]


class Encoder:
    """Turns raw rows into batches for one model. Immutable, so threads may share it."""

    def __init__(self, features: FeaturesSpec, tables: Sequence[Table], transforms: DenseTransforms) -> None:
        self.features, self.tables = features, tuple(tables)
        self.transforms = transforms
        specs = features.expanded_sparse()
        self._names = tuple(s.name for s in specs)
        self._num_dense = len(features.expanded_dense())
        rows = {feature: table.num_rows for table in tables for feature in table.features}
        assert sorted(rows) == list(range(len(specs))), "every sparse feature reads exactly one table"
        self._num_rows = np.array([rows[i] for i in range(len(specs))], np.int64)
        self._hash = np.array([HASH_CODES[s.hash] for s in specs], np.int64)
        self._max_ids = np.array([np.iinfo(np.int64).max if s.max_ids is None else s.max_ids for s in specs], np.int64)
        self._keeps_last = np.array([s.is_history for s in specs], np.bool_)

    def encode(
        self,
        rows: RawBlock | RawRows,
        order: NDArray[np.int64] | None = None,
        *,
        allocate: Allocate = empty_tensor,
        run_parts: RunParts = run_sequentially,
        num_parts: int = 1,
    ) -> Batch:
        """Encode the rows with indices `order` [B], in that order; all rows by default.

        Most of the work is split into `num_parts` parts, which `run_parts` may run in parallel; the batch is the same.
        """
        if isinstance(rows, RawBlock):
            rows = RawRows([rows])
        for block in rows.blocks:
            if block.dense.shape[1] != self._num_dense or len(block.ids) != len(self._names):
                raise DataError(
                    f"rows have {block.dense.shape[1]} dense and {len(block.ids)} sparse features, "
                    f"but the model has {self._num_dense} and {len(self._names)}"
                )
        order = np.arange(len(rows), dtype=np.int64) if order is None else np.ascontiguousarray(order, np.int64)
        num_samples, num_features, addresses = len(order), len(self._names), rows.addresses
        block_of, row_of = np.empty_like(order), np.empty_like(order)
        all_offsets = allocate((num_features * num_samples + 1,), torch.int64)
        offsets = all_offsets.numpy()
        (num_ids,) = run_parts(1, lambda _: _measure(rows.starts, order, addresses, self._max_ids, block_of, row_of, offsets))
        assert num_ids >= 0, "order has a row index out of range"
        dense, all_ids = allocate((num_samples, self._num_dense), torch.float32), allocate((num_ids,), torch.int64)
        ids, values = all_ids.numpy(), dense.numpy()
        raw = values if self.transforms.is_identity else np.empty_like(values)
        names = [name for name in SCALARS if all(getattr(block, name) is not None for block in rows.blocks)]
        shapes = {name: getattr(rows.blocks[0], name).shape[1:] for name in names}
        scalars = {name: allocate((num_samples, *shapes[name]), torch.float32) for name in names}
        widths = np.array([math.prod(shapes[name]) for name in names], np.int64)
        columns = np.array([_column_addresses(rows, name) for name in names], np.int64).reshape(len(names), len(rows.blocks))
        targets = np.array([scalar.data_ptr() for scalar in scalars.values()], np.int64)
        num_parts = max(1, min(num_parts, num_samples))

        def gather(part: int) -> int:
            where = (part, num_parts, addresses, block_of, row_of)
            rules = (self._hash, self._num_rows, self._keeps_last)
            outside = _gather_part(*where, *rules, offsets, ids, raw, columns, widths, targets)
            if raw is not values:
                start, stop = num_samples * part // num_parts, num_samples * (part + 1) // num_parts
                self.transforms.apply(raw[start:stop], out=values[start:stop])
            return int(outside)

        outside = min((index for index in run_parts(num_parts, gather) if index >= 0), default=None)
        if outside is not None:
            feature = int(np.searchsorted(offsets, outside, side="right") - 1) // num_samples
            raise id_outside_table(self._names[feature], int(ids[outside]), int(self._num_rows[feature]))
        labels, weights, true_p = (scalars.get(name) for name in SCALARS)
        sparse = Sparse(ids=all_ids, offsets=all_offsets, num_features=num_features)
        found = [block.groups for block in rows.blocks if block.groups is not None]
        groups = torch.from_numpy(np.concatenate(found)[order]) if len(found) == len(rows.blocks) else None
        return Batch(dense=dense, sparse=sparse, labels=labels, weights=weights, true_p=true_p, groups=groups)


def compute_totals(rows: RawRows, order: NDArray[np.int64]) -> BatchTotals | None:
    """Totals of a batch of the rows at `order` [B], without encoding it; None if there are no labels."""
    block_of, row_of = np.empty_like(order), np.empty_like(order)
    assert locate_rows(rows.starts, order, block_of, row_of), "order has a row index out of range"

    def gather(name: str) -> torch.Tensor | None:
        if any(getattr(block, name) is None for block in rows.blocks):
            return None
        shape = getattr(rows.blocks[0], name).shape[1:]
        values = np.empty((len(order), math.prod(shape)), np.float32)
        _gather_scalar(np.array(_column_addresses(rows, name), np.int64), block_of, row_of, values)
        return torch.from_numpy(values).view(len(order), *shape)

    labels, weights = gather("labels"), gather("weights")
    return None if labels is None else BatchTotals.of(labels, weights)


def _column_addresses(rows: RawRows, name: str) -> list[int]:
    """Addresses of one scalar column in each block."""
    return [address_of(getattr(block, name)) for block in rows.blocks]


_kernel = numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
_AHEAD = 8  # bags to prefetch: about as many as one core can have in flight to main memory
_AHEAD_BYTES = 512  # the hardware prefetcher loads the rest of a long bag
# In the kernels below: addresses [K, 1 + 2F]; block_of [B] and row_of [B] are each example's block and row in it.


@_kernel
def locate_rows(starts, order, block_of, row_of):  # type: ignore[no-untyped-def]
    """Fill block_of [B] and row_of [B] for the row indices order [B], given block starts [K + 1]; false if one is out of range."""
    num_blocks = len(starts) - 1
    for b in range(len(order)):
        row = order[b]
        if row < 0 or row >= starts[num_blocks]:
            return False
        low, high = 0, num_blocks  # the block is in [low, high)
        while high - low > 1:
            middle = (low + high) >> 1
            if starts[middle] <= row:
                low = middle
            else:
                high = middle
        block_of[b] = low
        row_of[b] = row - starts[low]
    return True


@_kernel
def _gather_dense(addresses, block_of, row_of, dense):  # type: ignore[no-untyped-def]
    """Copy the dense values of each example into dense [B, Fd]."""
    num_samples, num_columns = dense.shape
    for b in range(num_samples):
        start = row_of[b] * num_columns
        row = floats_at(addresses[block_of[b], 0] + 4 * start, num_columns)
        for c in range(num_columns):
            dense[b, c] = row[c]


@_kernel
def _gather_scalar(addresses, block_of, row_of, out):  # type: ignore[no-untyped-def]
    """Gather N float32 per example into out [B, N], from the blocks' values [R, N] at addresses [K]."""
    num = out.shape[1]
    for b in range(len(block_of)):
        values = floats_at(addresses[block_of[b]] + 4 * num * row_of[b], num)
        for i in range(num):
            out[b, i] = values[i]


@_kernel
def _count_ids(addresses, block_of, row_of, max_ids, offsets):  # type: ignore[no-untyped-def]
    """Fill offsets [F*B + 1] from the truncated lengths; max_ids [F]."""
    num_samples, num_features = len(block_of), len(max_ids)
    total = offsets[0] = 0
    for f in range(num_features):
        for b in range(num_samples):
            bounds = integers_at(addresses[block_of[b], 1 + num_features + f] + 8 * row_of[b], 2)
            total += min(bounds[1] - bounds[0], max_ids[f])
            offsets[f * num_samples + b + 1] = total


@_kernel
def _gather_ids(addresses, block_of, row_of, hash_of, num_rows, keeps_last, offsets, ids, first, last):  # type: ignore[no-untyped-def]
    """Copy the ids of bags `first` to `last` of F * B into ids [nnz] and hash them there; hash_of, num_rows and keeps_last [F].

    Returns -1, or the index in `ids` of an id outside its table, which is left there unhashed.
    """
    num_samples, num_features = len(block_of), len(hash_of)
    while first < last:
        f = first // num_samples
        stop_bag = min(last, (f + 1) * num_samples)
        for b in range(first - f * num_samples, stop_bag - f * num_samples):
            # Rows of a shuffled window are far apart: without prefetching, each bag waits for main memory.
            ahead = b + _AHEAD
            if ahead < num_samples:
                later = f * num_samples + ahead
                num_ids = offsets[later + 1] - offsets[later]
                address = _bag_address(addresses, block_of[ahead], row_of[ahead], f, num_features, num_ids, keeps_last[f])
                for byte in range(0, min(8 * num_ids, _AHEAD_BYTES), 64):
                    prefetch(address + byte)
            start, stop = offsets[f * num_samples + b], offsets[f * num_samples + b + 1]
            address = _bag_address(addresses, block_of[b], row_of[b], f, num_features, stop - start, keeps_last[f])
            raw = integers_at(address, stop - start)
            bag = ids[start:stop]
            for i in range(stop - start):
                bag[i] = raw[i]
        start, stop = offsets[first], offsets[stop_bag]
        outside = hash_in_place(ids[start:stop], hash_of[f], num_rows[f])
        if outside >= 0:
            return start + outside
        first = stop_bag
    return -1


@_kernel
def _measure(starts, order, addresses, max_ids, block_of, row_of, offsets):  # type: ignore[no-untyped-def]
    """Fill block_of [B], row_of [B] and offsets [F*B + 1]; returns the number of ids, or -1 if order [B] is out of range."""
    if not locate_rows(starts, order, block_of, row_of):
        return -1
    _count_ids(addresses, block_of, row_of, max_ids, offsets)
    return offsets[-1]


@_kernel
def _gather_part(  # type: ignore[no-untyped-def]
    part, num_parts, addresses, block_of, row_of, hash_of, num_rows, keeps_last, offsets, ids, dense, columns, widths, targets
):
    """Gather one part of a batch: dense values and scalars of some examples, and some of the bags.

    columns [S, K] are the addresses of each scalar in each block, widths [S] how many numbers of it an example has, targets [S] where to
    write them. Returns as `_gather_ids`.
    """
    num_samples, num_bags = len(block_of), len(block_of) * len(hash_of)
    start, stop = num_samples * part // num_parts, num_samples * (part + 1) // num_parts
    blocks, rows = block_of[start:stop], row_of[start:stop]
    _gather_dense(addresses, blocks, rows, dense[start:stop])
    for scalar in range(len(targets)):
        target = floats_at(targets[scalar], num_samples * widths[scalar]).reshape(num_samples, widths[scalar])
        _gather_scalar(columns[scalar], blocks, rows, target[start:stop])
    first, last = num_bags * part // num_parts, num_bags * (part + 1) // num_parts
    return _gather_ids(addresses, block_of, row_of, hash_of, num_rows, keeps_last, offsets, ids, first, last)


@numba.njit(nogil=True, cache=True, inline="always")
def _bag_address(addresses, k, row, f, num_features, num_ids, keeps_last):  # type: ignore[no-untyped-def]
    """Address of the `num_ids` ids that are used of feature f in row `row` of block k: the first, or the last ones."""
    bounds = integers_at(addresses[k, 1 + num_features + f] + 8 * row, 2)
    first = bounds[1] - num_ids if keeps_last else bounds[0]
    return addresses[k, 1 + f] + 8 * first
