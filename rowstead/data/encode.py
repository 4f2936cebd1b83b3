"""Raw rows to a `Batch`: gather, truncate, hash to rows of tables, transform.

Letters: B examples of the batch, F sparse features, Fd dense features, K blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from rowstead.contracts.batch import Batch, Sparse, Whole
from rowstead.data.block import RawBlock
from rowstead.data.hashing import HASH_CODES, hash_in_place, id_outside_table
from rowstead.data.transforms import DenseTransforms
from rowstead.kernels.memory import address_of, floats_at, integers_at, prefetch
from rowstead.spec.errors import DataError
from rowstead.spec.features import FeaturesSpec, Table


class Rows:
    """Blocks laid end to end without copying: row i of the whole is found by block and place. At least one block."""

    def __init__(self, blocks: Sequence[RawBlock]) -> None:
        self.blocks = tuple(blocks)
        self.starts = np.zeros(len(self.blocks) + 1, np.int64)
        """[K + 1]: block k holds the rows from starts[k] to starts[k+1]."""
        np.cumsum([block.num_rows for block in self.blocks], out=self.starts[1:])
        self._addresses = np.array([_addresses(block) for block in self.blocks], np.int64)
        """[K, 1 + 2F]: where each block's dense values, ids and offsets are."""

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def addresses(self) -> NDArray[np.int64]:
        return self._addresses

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        """Several as one."""
        whole = cls.__new__(cls)
        whole.blocks = tuple(block for part in parts for block in part.blocks)
        whole.starts = np.zeros(len(whole.blocks) + 1, np.int64)
        np.cumsum(np.concatenate([np.diff(part.starts) for part in parts]), out=whole.starts[1:])
        whole._addresses = np.concatenate([part.addresses for part in parts])
        return whole


def _addresses(block: RawBlock) -> list[int]:
    assert block.dense.dtype == np.float32
    assert all(a.dtype == np.int64 for a in (*block.ids, *block.offsets))
    return [address_of(block.dense), *map(address_of, block.ids), *map(address_of, block.offsets)]


class Encoder:
    """Turns raw rows into batches for one model. Holds nothing that changes, so threads may share it."""

    def __init__(self, features: FeaturesSpec, tables: Sequence[Table], transforms: DenseTransforms) -> None:
        self.features = features
        self.transforms = transforms
        specs = features.expanded_sparse()
        self._names = tuple(s.name for s in specs)
        self._num_dense = len(features.expanded_dense())
        rows = {place: table.num_rows for table in tables for place in table.features}
        assert sorted(rows) == list(range(len(specs))), "every sparse feature reads exactly one table"
        self._num_rows = np.array([rows[i] for i in range(len(specs))], np.int64)
        self._hash = np.array([HASH_CODES[s.hash] for s in specs], np.int64)
        self._max_ids = np.array([np.iinfo(np.int64).max if s.max_ids is None else s.max_ids for s in specs], np.int64)

    def encode(self, rows: RawBlock | Rows, order: NDArray[np.int64] | None = None) -> Batch:
        """A batch of the rows that `order` [B] names, in that order; of all rows when left out."""
        if isinstance(rows, RawBlock):
            rows = Rows([rows])
        for block in rows.blocks:
            if block.dense.shape[1] != self._num_dense or len(block.ids) != len(self._names):
                raise DataError(
                    f"rows have {block.dense.shape[1]} dense and {len(block.ids)} sparse features, "
                    f"the model reads {self._num_dense} and {len(self._names)}"
                )
        order = np.arange(len(rows), dtype=np.int64) if order is None else np.ascontiguousarray(order, np.int64)
        assert not len(order) or (order.min() >= 0 and order.max() < len(rows)), "order names a row that is not there"
        block_of, place_of = _places(rows, order)

        num_samples, num_features = len(order), len(self._names)
        dense = np.empty((num_samples, self._num_dense), np.float32)
        offsets = np.zeros(num_features * num_samples + 1, np.int64)
        _gather_dense(rows.addresses, block_of, place_of, dense)
        _count_ids(rows.addresses, block_of, place_of, self._max_ids, offsets)
        ids = np.empty(int(offsets[-1]), np.int64)
        outside = _gather_ids(rows.addresses, block_of, place_of, self._hash, self._num_rows, offsets, ids)
        if outside >= 0:
            feature = int(np.searchsorted(offsets, outside, side="right") - 1) // num_samples
            raise id_outside_table(self._names[feature], int(ids[outside]), int(self._num_rows[feature]))

        def gathered(name: str) -> torch.Tensor | None:
            return _gathered(name, rows, block_of, place_of)

        return Batch(
            dense=torch.from_numpy(self.transforms.apply(dense)),
            sparse=Sparse(ids=torch.from_numpy(ids), offsets=torch.from_numpy(offsets), num_features=num_features),
            labels=gathered("labels"),
            weights=gathered("weights"),
            true_p=gathered("true_p"),
        )


def whole_of(rows: Rows, order: NDArray[np.int64]) -> Whole | None:
    """What is known of a batch of the rows that `order` [B] names, without encoding it; none where there are no labels."""
    block_of, place_of = _places(rows, order)
    labels, weights = (_gathered(name, rows, block_of, place_of) for name in ("labels", "weights"))
    return None if labels is None else Whole.of(labels, weights)


def _places(rows: Rows, order: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The block of each row that `order` [B] names, and its place in it."""
    block_of = np.searchsorted(rows.starts, order, side="right") - 1
    return block_of, order - rows.starts[block_of]


def _gathered(name: str, rows: Rows, block_of: NDArray[np.int64], place_of: NDArray[np.int64]) -> torch.Tensor | None:
    """One of the blocks' columns of scalars, for each example; none where a block has none."""
    parts = [getattr(block, name) for block in rows.blocks]
    if any(part is None for part in parts):
        return None
    return torch.from_numpy(_gather_scalar(np.array([address_of(part) for part in parts]), block_of, place_of))


_kernel = numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
_AHEAD = 8  # Bags: about what one core can have under way to main memory.
_AHEAD_BYTES = 512  # Of a long bag the hardware's own prefetcher brings the rest.
# In the kernels below: addresses [K, 1 + 2F], block_of [B] and place_of [B] say where each example's row is.


@_kernel
def _gather_dense(addresses, block_of, place_of, dense):  # type: ignore[no-untyped-def]
    """Copy the dense values of each example into dense [B, Fd]."""
    num_samples, num_columns = dense.shape
    for b in range(num_samples):
        start = place_of[b] * num_columns
        row = floats_at(addresses[block_of[b], 0] + 4 * start, num_columns)
        for c in range(num_columns):
            dense[b, c] = row[c]


@_kernel
def _gather_scalar(addresses, block_of, place_of):  # type: ignore[no-untyped-def]
    """One float32 an example, from the blocks' columns at addresses [K]."""
    out = np.empty(len(block_of), np.float32)
    for b in range(len(block_of)):
        out[b] = floats_at(addresses[block_of[b]], place_of[b] + 1)[place_of[b]]
    return out


@_kernel
def _count_ids(addresses, block_of, place_of, max_ids, offsets):  # type: ignore[no-untyped-def]
    """Fill offsets [F*B + 1] from the truncated lengths; max_ids [F]."""
    num_samples, num_features = len(block_of), len(max_ids)
    total = 0
    for f in range(num_features):
        for b in range(num_samples):
            place = place_of[b]
            bounds = integers_at(addresses[block_of[b], 1 + num_features + f] + 8 * place, 2)
            total += min(bounds[1] - bounds[0], max_ids[f])
            offsets[f * num_samples + b + 1] = total


@_kernel
def _gather_ids(addresses, block_of, place_of, hash_of, num_rows, offsets, ids):  # type: ignore[no-untyped-def]
    """Copy each example's ids into ids [nnz] and hash them there; hash_of and num_rows [F].

    Returns -1, or the place in `ids` of an id that is no row of its table, which is left there unhashed.
    """
    num_samples, num_features = len(block_of), len(hash_of)
    if num_samples == 0:
        return -1
    for f in range(num_features):
        for b in range(num_samples):
            # Rows of a shuffled window are far apart: without asking ahead, each bag waits for main memory.
            ahead = b + _AHEAD
            if ahead < num_samples:
                later = f * num_samples + ahead
                address = _bag_address(addresses, block_of[ahead], place_of[ahead], f, num_features)
                for byte in range(0, min(8 * (offsets[later + 1] - offsets[later]), _AHEAD_BYTES), 64):
                    prefetch(address + byte)
            start, stop = offsets[f * num_samples + b], offsets[f * num_samples + b + 1]
            raw = integers_at(_bag_address(addresses, block_of[b], place_of[b], f, num_features), stop - start)
            bag = ids[start:stop]
            for i in range(stop - start):
                bag[i] = raw[i]
        start, stop = offsets[f * num_samples], offsets[(f + 1) * num_samples]
        outside = hash_in_place(ids[start:stop], hash_of[f], num_rows[f])
        if outside >= 0:
            return start + outside
    return -1


@numba.njit(nogil=True, cache=True, inline="always")
def _bag_address(addresses, k, place, f, num_features):  # type: ignore[no-untyped-def]
    """Address of the first id of feature f in row `place` of block k."""
    first = integers_at(addresses[k, 1 + num_features + f] + 8 * place, 1)[0]
    return addresses[k, 1 + f] + 8 * first
