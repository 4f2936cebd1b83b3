"""Compact batches for the wire: fewer bytes, the same content.

Ids are int32 where they fit. Offsets are replaced by the lengths of the bags, in as few bytes as the longest needs, or by one
number if all are equal. The rest is sent as it is.

Letters: B examples, F sparse features, nnz ids in the whole batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rowstead.data.batch import Batch, Sparse
from rowstead.fleet.wire import DEFAULT_LIMITS, WireError
from rowstead.kernels.layout import Layout

LENGTH_DTYPES = (torch.uint8, torch.int16, torch.int32)
_MAX_CACHED_BAGS = 1 << 16
"""Batches with at most this many bags of one length have their offsets cached."""
_MAX_BAGS = DEFAULT_LIMITS.frame_bytes // 8
"""Of one batch: its offsets are not larger than the largest tensor that can be received."""
_OPTIONAL = ("labels", "weights", "true_p")


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """One batch, ready to send."""

    facts: dict[str, Any]
    tensors: list[Tensor]
    num_samples: int

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def pack(batch: Batch, *, narrow: bool | None = None) -> PackedBatch:
    """Pack a batch; `narrow` sends ids as int32, None does so where they fit."""
    assert batch.global_totals is None, "a reader assigns whole batches"
    sparse = batch.sparse
    facts: dict[str, Any] = {"features": sparse.num_features, "has": [n for n in _OPTIONAL if getattr(batch, n) is not None]}
    tensors = [batch.dense, *(getattr(batch, name) for name in facts["has"])]
    if sparse.num_features:
        ids = sparse.ids
        tensors.append(ids.to(torch.int32) if (_fits(ids) if narrow is None else narrow) else ids)
        lengths = sparse.offsets.diff()
        low, high = (int(bound) for bound in lengths.aminmax()) if lengths.numel() else (0, 0)
        if low == high:
            facts["length"] = low
        else:
            tensors.append(lengths.to(next(dtype for dtype in LENGTH_DTYPES if high <= torch.iinfo(dtype).max)))
        if sparse.weights is not None:
            facts["id_weights"] = True
            tensors.append(sparse.weights)
    if sparse.checked_for is not None:
        facts["checked"] = True
    facts["tensors"] = len(tensors)
    return PackedBatch(facts=facts, tensors=tensors, num_samples=batch.num_samples)


def unpack(
    facts: dict[str, Any], tensors: Sequence[Tensor], *, layout: Layout | None = None, ids: torch.dtype | None = None
) -> Batch:
    """Restore a packed batch; all its tensors but the offsets share memory with `tensors`.

    With a `layout`, a batch that the reader has checked is marked as checked for it. `ids` is the dtype to convert ids to.
    """
    given = iter(tensors)
    try:
        dense = next(given)
        num_samples, num_features = int(dense.shape[0]), _read_count(facts["features"])
        optional: dict[str, Any] = {name: next(given) for name in facts["has"] if name in _OPTIONAL}
        sparse = Sparse(ids=torch.zeros(0, dtype=torch.int64), offsets=torch.zeros(1, dtype=torch.int64), num_features=0)
        if num_features:
            rows = next(given)
            num_bags = num_features * num_samples
            if num_bags > _MAX_BAGS:
                raise WireError(f"a batch has {num_bags:,} bags; the limit is {_MAX_BAGS:,}")
            lengths = _read_count(facts["length"]) if "length" in facts else next(given)
            if isinstance(lengths, Tensor) and (
                lengths.dim() != 1
                or lengths.dtype not in LENGTH_DTYPES
                or (lengths.numel() and lengths.dtype != torch.uint8 and int(lengths.amin()) < 0)
            ):
                raise WireError("invalid lengths of bags")
            offsets = offsets_of(lengths, num_bags)
            weights = next(given) if facts.get("id_weights") else None
            if offsets.numel() != num_bags + 1 or int(offsets[-1]) != rows.numel():
                raise WireError(f"got {offsets.numel() - 1} lengths for {num_bags} bags of {rows.numel()} ids")
            rows = rows if ids is None else rows.to(ids)
            sparse = Sparse(ids=rows, offsets=offsets, num_features=num_features, weights=weights)
    except (KeyError, TypeError, ValueError, IndexError, StopIteration):
        raise WireError(f"a batch is incomplete: {str(facts)[:200]}") from None
    if layout is not None and facts.get("checked") and num_features == layout.num_features:
        sparse = dataclasses.replace(sparse, checked_for=layout)
    return Batch(dense=dense, sparse=sparse, **optional)


def _read_count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**31:
        raise ValueError
    return value


def fits_int32(layout: Layout) -> bool:
    """Return whether the row numbers of all tables fit in 32 bits."""
    return all(table.num_rows <= 2**31 for table in layout.tables)


def _fits(ids: Tensor) -> bool:
    if ids.dtype == torch.int32 or not ids.numel():
        return True
    low, high = ids.aminmax()
    return int(low) >= -(2**31) and int(high) < 2**31


def offsets_of(lengths: Tensor | int, num_bags: int) -> Tensor:
    """Return int64 [num_bags + 1] from the lengths of the bags, or from one length for all; it must not be modified."""
    if isinstance(lengths, int):
        return (_equal_offsets if num_bags <= _MAX_CACHED_BAGS else _equal_offsets.__wrapped__)(lengths, num_bags)
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, dtype=torch.int64, out=offsets[1:])
    return offsets


@lru_cache(maxsize=32)
def _equal_offsets(length: int, num_bags: int) -> Tensor:
    return torch.arange(num_bags + 1, dtype=torch.int64).mul_(length)
