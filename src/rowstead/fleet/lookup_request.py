"""Requests to a sparse server: parsed from a message and validated before any kernel uses them.

Letters: B examples, F features (slots) of the server, T tables of the server, n ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowstead.data.batch import Sparse
from rowstead.fleet.packing import LENGTH_DTYPES, offsets_of
from rowstead.fleet.wire import DEFAULT_LIMITS, Message
from rowstead.kernels.check import check_sparse
from rowstead.kernels.layout import Layout
from rowstead.spec.errors import DataError
from rowstead.spec.features import Table

MAX_SAMPLES = 1 << 24
"""Per batch."""
MAX_REPLY_BYTES = DEFAULT_LIMITS.frame_bytes
"""A client could not receive more in one tensor; checked before anything of that size is created, since a short request may ask for it."""
_MAX_LAYOUTS = 64
_OFFSET_BYTES = 8


@dataclass(frozen=True, eq=False)
class PooledTables:
    """The tables of a server that one request pools."""

    table_indices: tuple[int, ...]
    """Indices among all tables of the server."""
    layout: Layout
    """Layout of these tables only."""
    slot_tables: NDArray[np.int64]
    """Table index of each slot, among all tables of the server."""


@dataclass(frozen=True, eq=False)
class LookupRequest:
    """This server's part of one client's batch."""

    num_samples: int
    pooled: PooledTables
    sparse: Sparse
    """The bags of the pooled slots, in the order of `pooled.layout`."""
    ids: NDArray[Any]
    """The ids of the bags, then the distinct rows by table."""
    row_bounds: NDArray[np.int64]
    """[T + 1]: where the distinct rows of each table start, relative to the end of the bags' ids."""

    @property
    def distinct(self) -> NDArray[Any]:
        return self.ids[self.sparse.ids.numel() :]

    @property
    def num_bytes(self) -> int:
        weights = self.sparse.weights
        return self.ids.nbytes + self.sparse.offsets.nbytes + (0 if weights is None else weights.nbytes)

    @cached_property
    def segments(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Runs of `ids` that belong to one table: borders [segments + 1] and tables [segments]."""
        num_samples, num_slots = self.num_samples, len(self.pooled.slot_tables)
        bounds = self.sparse.offsets.numpy()[::num_samples] if num_slots and num_samples else np.zeros(1, np.int64)
        behind = self.row_bounds[1:] + self.sparse.ids.numel()
        tables = np.concatenate([self.pooled.slot_tables[: len(bounds) - 1], np.arange(len(behind))])
        return np.concatenate([bounds, behind]), tables


class RequestParser:
    def __init__(self, layout: Layout, dtype: torch.dtype = torch.float32) -> None:
        """`dtype` is that of the vectors and rows in replies."""
        self._layout, self._dtype = layout, dtype
        self._num_rows = np.array([table.num_rows for table in layout.tables], np.int64)
        self._widths = np.array([table.width for table in layout.tables], np.int64)
        self._all_tables = PooledTables(tuple(range(len(layout.tables))), layout, np.array(layout.table_of, np.int64))
        self._subsets: dict[tuple[int, ...], PooledTables] = {}

    def parse(self, message: Message) -> tuple[LookupRequest, list[Tensor]]:
        """Return the batch of a message and the tensors after it; raises a DataError if they do not fit the tables."""
        facts, tensors = message.facts, list(message.tensors)
        num_samples = _read_int(facts.get("samples"), "samples", MAX_SAMPLES)
        pooled, counts = self._parse_counts(facts.get("counts"))
        if not tensors or tensors[0].dim() != 1 or tensors[0].dtype not in (torch.int32, torch.int64):
            raise DataError("ids must be one-dimensional and int32 or int64")
        ids = tensors.pop(0)
        num_bags = pooled.layout.num_features * num_samples
        check_reply_bytes(max(num_samples * pooled.layout.total_width * self._dtype.itemsize, num_bags * _OFFSET_BYTES))
        check_reply_bytes(int(counts @ self._widths) * self._dtype.itemsize)
        lengths: Tensor | int
        if not num_bags:
            lengths = 0
        elif "length" in facts:
            lengths = _read_int(facts["length"], "length", 2**31)
        elif tensors and tensors[0].dtype in LENGTH_DTYPES and tensors[0].shape == (num_bags,):
            lengths = tensors.pop(0)
        else:
            raise DataError(f"expected the lengths of {num_bags} bags")
        num_distinct = int(counts.sum())
        num_pooled = ids.numel() - num_distinct
        weights = None
        if facts.get("weighted"):
            if not tensors or not tensors[0].is_floating_point() or tensors[0].shape != (num_pooled,):
                raise DataError(f"expected the weights of {num_pooled} ids")
            weights = tensors.pop(0)
        if num_pooled < 0:
            raise DataError(f"expected {num_distinct} distinct rows, got {ids.numel()} ids")
        sparse = Sparse(
            ids=ids[:num_pooled],
            offsets=offsets_of(lengths, num_bags),
            num_features=pooled.layout.num_features,
            weights=weights,
            checked_for=pooled.layout,
        )
        if num_bags:
            check_sparse(pooled.layout, sparse.ids, sparse.offsets)
        elif num_pooled:
            raise DataError(f"got {num_pooled} ids without bags")
        request = LookupRequest(num_samples, pooled, sparse, ids.numpy(), np.concatenate([[0], np.cumsum(counts)]))
        self._check_distinct(request.distinct, request.row_bounds)
        return request, tensors

    def _parse_counts(self, given: Any) -> tuple[PooledTables, NDArray[np.int64]]:
        """Return the tables that are pooled, and the number of distinct rows of each table."""
        num_tables = len(self._layout.tables)
        if given is None:
            return self._all_tables, np.zeros(num_tables, np.int64)
        if not isinstance(given, list) or len(given) != num_tables or not all(type(count) is int for count in given):
            raise DataError(f"counts must be {num_tables} integers, one per table")
        if any(count < -1 or count > table.num_rows for count, table in zip(given, self._layout.tables, strict=True)):
            raise DataError("more distinct rows requested than a table has")
        table_indices = tuple(index for index, count in enumerate(given) if count < 0)
        if table_indices not in self._subsets:
            while len(self._subsets) >= _MAX_LAYOUTS:
                del self._subsets[next(iter(self._subsets))]
            self._subsets[table_indices] = _select_tables(self._layout, table_indices)
        return self._subsets[table_indices], np.maximum(np.array(given, np.int64), 0)

    def _check_distinct(self, ids: NDArray[Any], bounds: NDArray[np.int64]) -> None:
        if not len(ids):
            return
        filled = np.flatnonzero(np.diff(bounds))
        highest = np.maximum.reduceat(ids, bounds[filled])
        if ids.min() < 0 or (highest >= self._num_rows[filled]).any():
            raise DataError("row id out of range")


def _select_tables(layout: Layout, table_indices: tuple[int, ...]) -> PooledTables:
    features = [feature for feature, table in enumerate(layout.table_of) if table in table_indices]
    number = {index: new for new, index in enumerate(table_indices)}
    columns = [0]
    for feature in features:
        columns.append(columns[-1] + layout.columns[feature + 1] - layout.columns[feature])
    tables = []
    for index in table_indices:
        whole = layout.tables[index]
        own = tuple(new for new, feature in enumerate(features) if layout.table_of[feature] == index)
        tables.append(Table(name=whole.name, num_rows=whole.num_rows, width=whole.width, features=own))
    some = Layout(
        tables=tuple(tables),
        table_of=tuple(number[layout.table_of[feature]] for feature in features),
        columns=tuple(columns),
        is_mean=tuple(layout.is_mean[feature] for feature in features),
    )
    return PooledTables(table_indices, some, np.array([layout.table_of[feature] for feature in features], np.int64))


def check_reply_bytes(num_bytes: int) -> None:
    """Raise if a reply, or what it is computed from, would be larger than a client can receive."""
    if num_bytes > MAX_REPLY_BYTES:
        raise DataError(
            f"the reply would have {num_bytes:,} bytes; the limit is {MAX_REPLY_BYTES:,}: request fewer samples or rows at a time"
        )


def _read_int(value: Any, name: str, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise DataError(f"{name} must be an integer from 0 to {most}")
    return value
