"""`RowEncoder`: raw columns, as Python code has them, to what a trained model reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rowstead.data.batch import Batch
from rowstead.data.columns import ColumnReader, IdKinds
from rowstead.data.encode import Encoder
from rowstead.data.hashing import hash_to_rows
from rowstead.data.transforms import DenseTransforms, RowRule
from rowstead.spec.errors import DataError, did_you_mean
from rowstead.spec.features import FeaturesSpec, Table


class RowEncoder:
    """Encodes raw rows as in training, and refuses bad ones. Rows are a DataFrame, an Arrow table, or names to lists or arrays."""

    def __init__(self, features: FeaturesSpec, tables: Sequence[Table], transforms: DenseTransforms, id_kinds: IdKinds) -> None:
        self._encoder = Encoder(features, tables, transforms)
        self._columns, self._rule = ColumnReader(features, id_kinds=id_kinds), RowRule(features)
        self._sparse, self._id_kinds = features.expanded_sparse(), id_kinds
        self._num_rows = {index: table.num_rows for table in tables for index in table.features}
        self.feature_names = tuple(feature.name for feature in self._sparse)
        """Sparse features, in the order of a batch."""

    def encode(self, rows: Any) -> Batch:
        """All rows as one batch."""
        block = self._columns.block(rows)
        self._rule.refuse(block)
        return self._encoder.encode(block)

    def batches(self, rows: Any, batch_size: int) -> Iterator[Batch]:
        """The rows in order, in batches of up to `batch_size`."""
        block = self._columns.block(rows)
        self._rule.refuse(block)
        for start in range(0, block.num_rows, batch_size):
            yield self._encoder.encode(block, np.arange(start, min(start + batch_size, block.num_rows)))

    def row_of(self, feature: str, ids: Any) -> NDArray[np.int64]:
        """The rows [n] of a sparse feature's table that ids [n] are hashed to; -1 where an id is missing."""
        if feature not in self.feature_names:
            raise DataError(f"no sparse feature `{feature}`: {did_you_mean(feature, self.feature_names)}")
        index = self.feature_names.index(feature)
        spec, num_rows = self._sparse[index], self._num_rows[index]
        alone = dataclasses.replace(spec, table=None, width=None, num_rows=num_rows)
        column = str(spec.column)
        block = ColumnReader(FeaturesSpec(sparse=(alone,)), id_kinds=self._id_kinds).block({column: ids})
        counts = np.diff(block.offsets[0])
        if (counts > 1).any():
            raise DataError(f"ids of `{feature}`: give them one by one, not in lists")
        rows = np.full(block.num_rows, -1, np.int64)
        rows[counts > 0] = hash_to_rows(block.ids[0], num_rows, spec.hash, feature=feature)
        return rows
