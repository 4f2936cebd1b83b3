"""Arrow or plain Python columns to a `RawBlock`, by the rules of `column_values`."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numba
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowstead.data.block import RawBlock
from rowstead.data.chunks import TILE
from rowstead.data.column_values import (
    Bags,
    Column,
    check_dense,
    check_sparse,
    id_type,
    is_text,
    to_bags,
    to_floats,
    to_vectors,
)
from rowstead.kernels.cpu.memory import address_of, floats_at
from rowstead.spec.errors import DataError, did_you_mean
from rowstead.spec.features import FeaturesSpec, SparseFeatureSpec

T = TypeVar("T")
IdKinds = Mapping[str, str]
"""For each sparse column `text` or `integers`."""
NO_GROUP = -(2**63)
"""The group of rows without a value."""


class ColumnReader:
    """Reads a model's columns from a log into a `RawBlock`."""

    def __init__(
        self,
        features: FeaturesSpec,
        *,
        label: str | Sequence[str] | None = None,
        weight: str | None = None,
        true_p: str | None = None,
        groups: Sequence[str] = (),
        id_kinds: IdKinds | None = None,
    ) -> None:
        """`label` names the column of the labels, or one per task, and `groups` columns whose values group rows.

        `id_kinds` are those of the model's training; columns of another kind are refused.
        """
        self.expected_kinds = id_kinds or {}
        self.dense_features, self.sparse_features = features.expanded_dense(), features.expanded_sparse()
        self.num_groups = len(groups)
        self.sparse_features += tuple(SparseFeatureSpec(name=name, column=name, num_rows=1) for name in groups)
        self.dense = tuple(str(f.column) for f in self.dense_features)
        self.sparse = tuple(str(f.column) for f in self.sparse_features)
        """Columns of ids; the last are those of the groups."""
        self.lengths = {str(f.column): f.length for f in self.dense_features if f.length is not None}
        """How many numbers each row of a column of lists has."""
        self.num_tasks = 0 if label is None or isinstance(label, str) else len(label)
        """Labels of each row where they are several."""
        labels = {"labels": label} if label is None or isinstance(label, str) else task_scalars(label)
        named = {**labels, "weights": weight, "true_p": true_p}
        self.scalars = {field: column for field, column in named.items() if column is not None}
        """Columns with one number per row, by the field of a `RawBlock` that they become, or of which they become a column."""
        self.names = tuple(dict.fromkeys([*self.dense, *self.sparse, *self.scalars.values()]))
        """Every column to read, once."""

    def check(self, schema: pa.Schema) -> None:
        """Raise a DataError for the first column that is missing from `schema` or has an unsupported type."""
        types = dict(zip(schema.names, schema.types, strict=True))
        for name in self.names:
            if name not in types:
                raise _missing(name, list(types))
        for feature in self.dense_features:
            check_dense(str(feature.column), types[str(feature.column)], feature.part, element=feature.element is not None)
        for name in self.scalars.values():
            check_dense(name, types[name])
        for sparse in self.sparse_features:
            check_sparse(str(sparse.column), types[str(sparse.column)], sparse.part)
        counts = Counter(schema.names)
        twice = next((name for name in self.names if counts[name] > 1), None)
        if twice is not None:
            raise DataError(f"two columns are named `{twice}`; rename one of them")
        self._check_kinds(schema)

    def id_kinds(self, schema: pa.Schema) -> dict[str, str]:
        """Whether each sparse column of `schema` holds text or integers; columns of only nulls are omitted."""
        types = dict(zip(schema.names, schema.types, strict=True))
        kinds = {}
        for feature in self.sparse_features:
            name = str(feature.column)
            value = id_type(types[name])
            if not pa.types.is_null(value) and feature.part is None:
                kinds[name] = "text" if is_text(value) else "integers"
        return kinds

    def _check_kinds(self, schema: pa.Schema) -> None:
        """Text is hashed to 64 bits and integers are not, so the same id in the other kind would get another row."""
        for name, kind in self.id_kinds(schema).items() if self.expected_kinds else ():
            expected = self.expected_kinds.get(name, kind)
            if kind != expected:
                was, now, fix = ("an integer", "text", "integers") if kind == "text" else ("text", "an integer", "text")
                raise DataError(f"`{name}` was {was} in training but is {now} here; convert it to {fix}")

    def block(self, rows: pa.Table | pa.RecordBatch | Mapping[str, Any]) -> RawBlock:
        """The rows as a RawBlock. Integer ids share memory where possible; dense values are copied into one array."""
        if not isinstance(rows, (pa.Table, pa.RecordBatch)):
            rows = self._table(rows)
        index = {name: i for i, name in enumerate(rows.schema.names)}
        for name in self.names:
            if name not in index:
                raise _missing(name, list(index))
        self._check_kinds(rows.schema)
        values = ColumnValues(self, lambda name: rows.column(index[name]))
        dense = np.empty((rows.num_rows, len(self.dense)), np.float32)
        # A few columns at a time, so that they are still in the cache when they are interleaved.
        for first in range(0, len(self.dense) if rows.num_rows else 0, TILE):
            columns = [values.floats(i) for i in range(first, min(first + TILE, len(self.dense)))]
            interleave(columns, dense, np.arange(first, first + len(columns)))
        found = [values.bags(i) for i in range(len(self.sparse))]
        return self.block_of(dense, found, {field: values.floats(len(self.dense) + i) for i, field in enumerate(self.scalars)})

    def block_of(
        self, dense: NDArray[np.float32], bags: Sequence[Bags], scalars: Mapping[str, NDArray[np.float32]]
    ) -> RawBlock:
        """A block of decoded columns, each in the order of this reader's."""
        groups = None
        if self.num_groups:
            bags, columns = bags[: -self.num_groups], bags[-self.num_groups :]
            groups = np.full((len(dense), self.num_groups), NO_GROUP, np.int64)
            for column, (ids, offsets) in enumerate(columns):
                has_value = np.diff(offsets) > 0
                groups[has_value, column] = ids[offsets[:-1][has_value]]
        ids_of, offsets_of = (tuple(bag[part] for bag in bags) for part in (0, 1))
        found = dict(scalars)
        if self.num_tasks:
            labels = np.empty((len(dense), self.num_tasks), np.float32)
            interleave([found.pop(name) for name in task_scalars(range(self.num_tasks))], labels, np.arange(self.num_tasks))
            found["labels"] = labels
        return RawBlock(dense=dense, ids=ids_of, offsets=offsets_of, groups=groups, **found)

    def _table(self, rows: Mapping[str, Any]) -> pa.Table:
        """The needed columns (lists, NumPy arrays, Arrow arrays) as an Arrow table."""
        arrays = {}
        for name in self.names:
            if name not in rows:
                raise _missing(name, list(rows))
            arrays[name] = arrow_column(rows[name], name)
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) > 1:
            short, long = min(lengths, key=lengths.__getitem__), max(lengths, key=lengths.__getitem__)
            raise DataError(f"columns differ in length: `{short}` has {lengths[short]} rows, `{long}` has {lengths[long]}")
        return pa.table(arrays)


def task_scalars(values: Iterable[T]) -> dict[str, T]:
    """The values of several labels by the names that they have among columns with one number per row."""
    return {f"labels.{task}": value for task, value in enumerate(values)}


class ColumnValues:
    """Some rows of the columns that a reader selects, as numbers and ids."""

    def __init__(self, columns: ColumnReader, column: Callable[[str], Column]) -> None:
        """`column` returns a column of these rows by name."""
        self._columns, self._column = columns, column
        self._vectors: dict[str, NDArray[np.float32]] = {}

    def floats(self, index: int) -> NDArray[np.float32]:
        """A dense feature, or after those label, weight and true probability where selected, as float32 [R]."""
        if index >= len(self._columns.dense):
            name = tuple(self._columns.scalars.values())[index - len(self._columns.dense)]
            return to_floats(self._column(name), name)
        feature = self._columns.dense_features[index]
        name = str(feature.column)
        if feature.element is None:
            return to_floats(self._column(name), name, feature.part)
        if name not in self._vectors:
            self._vectors[name] = to_vectors(self._column(name), name, self._columns.lengths[name])
        return np.ascontiguousarray(self._vectors[name][:, feature.element])

    def bags(self, index: int) -> Bags:
        """The ids of a sparse feature."""
        feature = self._columns.sparse_features[index]
        return to_bags(self._column(str(feature.column)), str(feature.column), feature.part)


def check_id_kinds(features: FeaturesSpec, kinds: IdKinds) -> None:
    """Raise a DataError for text ids without a text hash, and for text and integers in one table."""
    readers: dict[str, str] = {}
    for feature in features.expanded_sparse():
        column = str(feature.column)
        kind = kinds.get(column) if feature.part is None else "integers"
        if kind == "text" and feature.hash != "mix":
            raise DataError(f"column `{column}` is text, but `hash: {feature.hash}` needs integers; use `hash: mix`")
        if feature.table is not None and kind is not None and readers.setdefault(feature.table, kind) != kind:
            raise DataError(
                f"features that share table `{feature.table}` must all be text or all integers, but `{column}` has {kind}; "
                "convert one of them, since the same id would get different rows"
            )


def arrow_column(values: Any, name: str) -> pa.Array | pa.ChunkedArray:
    """A list, NumPy array or the like as an Arrow array."""
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return values
    try:
        if isinstance(values, np.ndarray) and values.ndim == 2:
            return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
        return pa.array(values)
    except OverflowError:
        return _unsigned(values, name)
    except (pa.ArrowException, TypeError, ValueError) as error:
        with contextlib.suppress(pa.ArrowException, TypeError, ValueError):
            return pa.array(values, from_pandas=True)  # text with NaN for what is missing
        raise DataError(f"column `{name}` cannot be read: {str(error).splitlines()[0]}") from None


def _unsigned(values: Any, name: str) -> pa.Array:
    """Integers above 2**63 - 1, or lists of them."""
    for kind in (pa.uint64(), pa.list_(pa.uint64())):
        with contextlib.suppress(pa.ArrowException, OverflowError, TypeError, ValueError):
            return pa.array(values, kind)
    raise DataError(f"column `{name}` cannot be read: it contains integers of more than 64 bits")


def _missing(name: str, known: list[str]) -> DataError:
    return DataError(f"the log has no column `{name}`: {did_you_mean(name, known)}")


def interleave(columns: Sequence[NDArray[np.float32]], dense: NDArray[np.float32], targets: NDArray[np.int64]) -> None:
    """Write n columns, each float32 [R], into the columns `targets` [n] of dense [R, Fd]."""
    _interleave(np.array([address_of(column) for column in columns], np.int64), dense, targets)


@numba.njit(nogil=True, cache=True, boundscheck=False)
def _interleave(addresses, dense, targets):  # type: ignore[no-untyped-def]
    """As `interleave`, for columns at `addresses` [n]."""
    num_rows = dense.shape[0]
    for row in range(0, num_rows, TILE):
        stop = min(row + TILE, num_rows)
        for c in range(len(addresses)):
            column = floats_at(addresses[c], num_rows)
            for r in range(row, stop):
                dense[r, targets[c]] = column[r]
