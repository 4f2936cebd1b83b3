"""Gathers rows of packed files into one buffer, and checks each as it is copied.

Letters: B examples of the batch, F sparse and Fd dense features, K record batches, S scalars, nnz ids of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowstead.data.batch import Batch, BatchTotals, Sparse
from rowstead.data.encode import locate_rows
from rowstead.data.packed_files import DAMAGED, PackedColumns, PackedReader
from rowstead.kernels.cpu import bag_layout
from rowstead.kernels.cpu.memory import bytes_at, floats_at, integers_at, prefetch_all, words_at
from rowstead.spec.errors import DataError
from rowstead.spec.heads import LABEL_RANGE

ALIGNED_BYTES = 128
Reorder = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
_LIMITS = {"labels": LABEL_RANGE, "weights": (0.0, float(np.finfo(np.float32).max)), "true_p": (0.0, 1.0)}
"""The smallest and the largest value of scalars."""


def _limits_of(columns: PackedColumns) -> NDArray[np.float32]:
    """The smallest and the largest value of each scalar, and 1 where one may be missing: [S, 3]."""
    limits = []
    for scalar in columns.scalars:
        field, _, task = scalar.partition(".")
        is_task = field == "labels" and task != ""
        limits.append((*(columns.label_ranges[int(task)] if is_task else _LIMITS[field]), is_task))
    return np.array(limits, np.float32).reshape(-1, 3)


@dataclass(frozen=True, kw_only=True)
class GatheredBatch:
    """A batch as it was gathered: one buffer in host memory, which a GPU copies at once. A `StagedBatch`.

    On the device, `dense` and the scalars are views of the buffer, and the ids are brought into the order of a `Batch` by a kernel.
    """

    buffer: Tensor
    """uint8: dense float32 [B, Fd], scalars float32 [S, B], starts int64 [B], lengths uint8 or int32 [B, F], ids int32 or int64 [nnz]."""
    shapes: BufferShapes
    groups: Tensor | None = None
    """As in `Batch`; they stay where they are."""
    global_totals: BatchTotals | None = None
    """As in `Batch`."""
    checked_for: object | None = None
    """As in `Sparse`: these ids have been checked as they were gathered."""

    @property
    def num_samples(self) -> int:
        return self.shapes.num_samples

    @cached_property
    def _on_host(self) -> Batch:
        return self.unpack(self.buffer, _reorder_on_cpu)

    @property
    def sparse(self) -> Sparse:
        return self._on_host.sparse

    def first_sparse(self, num_samples: int) -> Sparse:
        shapes, count = self.shapes, min(num_samples, self.num_samples)
        starts, lengths = shapes.starts_of(self.buffer), shapes.lengths_of(self.buffer)
        num_ids = int(starts[count]) if count < self.num_samples else shapes.num_ids
        ids, offsets = _reorder_on_cpu(shapes.ids_of(self.buffer)[:num_ids], lengths[:count], starts[:count])
        return Sparse(ids=ids, offsets=offsets, num_features=shapes.columns.num_features, checked_for=self.checked_for)

    @property
    def totals(self) -> BatchTotals:
        if self.global_totals is not None:
            return self.global_totals
        scalars = self.shapes.scalars_of(self.buffer)
        return BatchTotals.of(scalars["labels"], scalars.get("weights"))

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        device = torch.device(device)
        if device.type != "cuda":
            return self._on_host
        from rowstead.kernels.gpu import bag_layout as gpu_layout

        return self.unpack(self.buffer.to(device, non_blocking=non_blocking), gpu_layout.to_feature_major)

    def unpack(self, buffer: Tensor, reorder: Reorder) -> Batch:
        """The batch of a copy of its buffer, with ids and offsets by `reorder`, which takes ids, lengths and starts."""
        shapes = self.shapes
        ids, offsets = reorder(shapes.ids_of(buffer), shapes.lengths_of(buffer), shapes.starts_of(buffer))
        num_features = shapes.columns.num_features
        sparse = Sparse(ids=ids, offsets=offsets, num_features=num_features, checked_for=self.checked_for)
        scalars = shapes.scalars_of(buffer)
        totals, groups = self.global_totals, self.groups
        return Batch(dense=shapes.dense_of(buffer), sparse=sparse, groups=groups, global_totals=totals, **scalars)


def _reorder_on_cpu(ids: Tensor, lengths: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    found, offsets = bag_layout.to_feature_major(ids.numpy(), lengths.numpy(), starts.numpy())
    return torch.from_numpy(found), torch.from_numpy(offsets)


@dataclass(frozen=True, kw_only=True)
class BufferShapes:
    """Where the parts of a `GatheredBatch` are in its buffer, the ids last."""

    columns: PackedColumns
    num_samples: int
    num_ids: int
    has_long_bags: bool

    @cached_property
    def _starts(self) -> list[int]:
        """Where each part begins, and the end."""
        num_samples, columns = self.num_samples, self.columns
        sizes = [
            4 * num_samples * columns.num_dense,
            4 * num_samples * len(columns.scalars),
            8 * num_samples,
            (4 if self.has_long_bags else 1) * num_samples * columns.num_features,
            self.num_ids * columns.ids_dtype.itemsize,
        ]
        starts = [0]
        for size in sizes:
            starts.append(-(-(starts[-1] + size) // ALIGNED_BYTES) * ALIGNED_BYTES)
        return starts

    @property
    def num_bytes(self) -> int:
        return self._starts[-1]

    def _part(self, buffer: Tensor, number: int, dtype: torch.dtype, *shape: int) -> Tensor:
        start, count = self._starts[number], math.prod(shape)
        if not count:
            return buffer.new_empty(shape, dtype=dtype)
        return buffer[start : start + count * dtype.itemsize].view(dtype).view(shape)

    def dense_of(self, buffer: Tensor) -> Tensor:
        return self._part(buffer, 0, torch.float32, self.num_samples, self.columns.num_dense)

    def scalars_of(self, buffer: Tensor) -> dict[str, Tensor]:
        """Each [B] or [B, T], by its name in a `Batch`."""
        part = self._part(buffer, 1, torch.float32, len(self.columns.scalars), self.num_samples)
        return self.columns.by_field(part)

    def starts_of(self, buffer: Tensor) -> Tensor:
        """Where the ids of each example begin, [B]."""
        return self._part(buffer, 2, torch.int64, self.num_samples)

    def lengths_of(self, buffer: Tensor) -> Tensor:
        dtype = torch.int32 if self.has_long_bags else torch.uint8
        return self._part(buffer, 3, dtype, self.num_samples, self.columns.num_features)

    def ids_of(self, buffer: Tensor) -> Tensor:
        return self._part(buffer, 4, self.columns.ids_dtype, self.num_ids)


def gather(
    reader: PackedReader,
    rows: NDArray[np.int64],
    allocate: Callable[[int], Tensor],
    *,
    global_totals: BatchTotals | None = None,
    checked_for: object | None = None,
) -> GatheredBatch:
    """The rows [B] with these numbers, in that order; `allocate` makes the buffer."""
    columns, num_samples = reader.columns, len(rows)
    block_of, row_of, firsts = np.empty_like(rows), np.empty_like(rows), np.empty_like(rows)
    begins = np.zeros(num_samples + 1, np.int64)
    where = reader.addresses, block_of, row_of
    bad = _measure(reader.starts, rows, columns.num_features, *where, reader.num_values, firsts, begins)
    if bad >= 0:
        raise DataError(f"{reader.name_row(int(rows[bad]))}: its ids are not in the file. {DAMAGED}")
    shapes = BufferShapes(
        columns=columns, num_samples=num_samples, num_ids=int(begins[-1]), has_long_bags=bool(reader.is_long.any())
    )
    buffer = allocate(shapes.num_bytes)
    shapes.starts_of(buffer).numpy()[:] = begins[:-1]
    ids = shapes.ids_of(buffer).numpy().view(np.uint32 if columns.ids_dtype == torch.int32 else np.uint64)
    scalars = shapes._part(buffer, 1, torch.float32, len(columns.scalars), num_samples).numpy()
    limits = _limits_of(columns)
    dense, lengths = shapes.dense_of(buffer).numpy(), shapes.lengths_of(buffer).numpy()
    last_rows = np.array(columns.last_rows, np.uint64)
    bad, reason = _gather(
        *where, reader.is_long, firsts, begins, last_rows, limits, dense, scalars, lengths, ids, ids.view(np.uint32)
    )
    if bad >= 0:
        raise DataError(f"{reader.name_row(int(rows[bad]))}: {_explain(columns, int(reason))}. {DAMAGED}")
    groups = None
    if columns.num_groups:
        groups = torch.empty((num_samples, columns.num_groups), dtype=torch.int64)
        _gather_groups(*where, groups.numpy())
    return GatheredBatch(buffer=buffer, shapes=shapes, groups=groups, global_totals=global_totals, checked_for=checked_for)


def gather_totals(reader: PackedReader, rows: NDArray[np.int64]) -> BatchTotals | None:
    """Totals of a batch of these rows, without its other columns; None if there are no labels."""
    names = reader.columns.scalars
    if not any(name.startswith("labels") for name in names):
        return None
    block_of, row_of = np.empty_like(rows), np.empty_like(rows)
    assert locate_rows(reader.starts, rows, block_of, row_of), "a row is out of range"
    values = np.empty((len(names), len(rows)), np.float32)
    _gather_scalars(reader.addresses, block_of, row_of, values)
    found = reader.columns.by_field(torch.from_numpy(values))
    return BatchTotals.of(found["labels"], found.get("weights"))


def _explain(columns: PackedColumns, reason: int) -> str:
    if reason < 0:
        return "its label, weight or probability is out of range"
    if reason == columns.num_features:
        return "it has not as many ids as its lengths say"
    return f"an id of feature {reason} is outside its table, whose last row is {columns.last_rows[reason]:,}"


_kernel = numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
_AHEAD = 6  # examples to prefetch
_AHEAD_BYTES = 512  # the hardware prefetcher loads the rest of a long example


@_kernel
def _measure(starts, rows, num_features, addresses, block_of, row_of, num_values, firsts, begins):  # type: ignore[no-untyped-def]
    """Fill block_of, row_of and firsts [B], the first id of each example in its record batch, and begins [B + 1], in the buffer.

    Returns -1, or the index of an example whose ids are not in the file.
    """
    if not locate_rows(starts, rows, block_of, row_of):
        return 0
    begins[0] = 0
    if num_features == 0:
        return -1
    for b in range(len(rows)):
        ahead = min(b + 16, len(rows) - 1)
        prefetch_all(addresses[block_of[ahead], 2] + 4 * row_of[ahead], 8)
        k = block_of[b]
        bounds = words_at(addresses[k, 2] + 4 * row_of[b], 2)
        first, last = np.int64(bounds[0]), np.int64(bounds[1])
        if last < first or last > num_values[k]:
            return b
        firsts[b] = first
        begins[b + 1] = begins[b] + last - first
    return -1


@_kernel
def _gather(  # type: ignore[no-untyped-def]
    addresses, block_of, row_of, is_long, firsts, begins, last_rows, limits, dense, scalars, lengths, ids, id_words
):
    """Copy examples to dense [B, Fd], scalars [S, B], lengths [B, F] and ids [nnz], whose memory is `id_words`, and check the copies.

    limits [S, 3] are the smallest and largest value of a scalar, and 1 where one may be NaN.

    Returns -1 and -1, or the index of a bad example, and the feature with an id outside its table, F if lengths do not add up, or -2.
    """
    num_samples, num_dense = dense.shape
    num_features = lengths.shape[1]
    words = len(id_words) // max(1, len(ids))  # of an id
    for b in range(num_samples):
        if b + _AHEAD < num_samples:
            a = b + _AHEAD
            k, row = block_of[a], row_of[a]
            prefetch_all(addresses[k, 0] + 4 * num_dense * row, min(4 * num_dense, _AHEAD_BYTES))
            if num_features > 0:
                count = min(4 * words * (begins[a + 1] - begins[a]), _AHEAD_BYTES)
                prefetch_all(addresses[k, 3] + 4 * words * firsts[a], count)
                size = num_features * (4 if is_long[k] else 1)
                prefetch_all(addresses[k, 1] + size * row, min(size, _AHEAD_BYTES))
        k, row = block_of[b], row_of[b]
        if num_dense > 0:
            source = floats_at(addresses[k, 0] + 4 * num_dense * row, num_dense)
            target = dense[b]
            for c in range(num_dense):
                target[c] = source[c]
        for s in range(len(scalars)):
            value = floats_at(addresses[k, 4 + s] + 4 * row, 1)[0]
            scalars[s, b] = value
            if not (limits[s, 0] <= value <= limits[s, 1]) and not (limits[s, 2] == 1 and value != value):
                return b, -2
        if num_features == 0:
            continue
        own = lengths[b]
        if is_long[k]:
            wide = words_at(addresses[k, 1] + 4 * num_features * row, num_features)
            for f in range(num_features):
                own[f] = wide[f]
        else:
            narrow = bytes_at(addresses[k, 1] + num_features * row, num_features)
            for f in range(num_features):
                own[f] = narrow[f]
        begin, end = begins[b], begins[b + 1]
        source_ids = words_at(addresses[k, 3] + 4 * words * firsts[b], words * (end - begin))
        target_ids = id_words[words * begin : words * end]
        for i in range(len(target_ids)):
            target_ids[i] = source_ids[i]
        at = begin
        for f in range(num_features):
            stop = at + np.int64(own[f])
            if stop < at or stop > end:
                return b, num_features
            largest = ids.dtype.type(0)
            for i in range(at, stop):
                if ids[i] > largest:
                    largest = ids[i]
            if np.uint64(largest) > last_rows[f]:
                return b, f
            at = stop
        if at != end:
            return b, num_features
    return -1, -1


@_kernel
def _gather_scalars(addresses, block_of, row_of, scalars):  # type: ignore[no-untyped-def]
    """Copy the scalars [S, B] of examples."""
    for b in range(len(block_of)):
        for s in range(len(scalars)):
            scalars[s, b] = floats_at(addresses[block_of[b], 4 + s] + 4 * row_of[b], 1)[0]


@_kernel
def _gather_groups(addresses, block_of, row_of, groups):  # type: ignore[no-untyped-def]
    """Copy the groups [B, G] of examples."""
    last, num_groups = addresses.shape[1] - 1, groups.shape[1]
    for b in range(len(block_of)):
        own = integers_at(addresses[block_of[b], last] + 8 * num_groups * row_of[b], num_groups)
        for g in range(num_groups):
            groups[b, g] = own[g]
