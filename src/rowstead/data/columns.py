"""Arrow or plain Python columns to a `RawBlock`: the types that a log may have, and how nulls are read.

Dense columns are numbers or booleans; null is read as NaN. Sparse columns are integers, text, or lists of either; a null value or
list is an empty bag, and a null inside a list is dropped.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numba
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowstead.data.block import RawBlock
from rowstead.data.chunks import TILE
from rowstead.data.hashing import hash_texts
from rowstead.kernels.cpu.memory import address_of, floats_at
from rowstead.spec.errors import DataError, did_you_mean
from rowstead.spec.features import FeaturesSpec

IdKinds = Mapping[str, str]
"""For each sparse column `text` or `integers`."""
Bags = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Ids [nnz] and offsets [R + 1] of one sparse column."""


class ColumnReader:
    """Reads a model's columns from a log into a `RawBlock`."""

    def __init__(
        self,
        features: FeaturesSpec,
        *,
        label: str | None = None,
        weight: str | None = None,
        true_p: str | None = None,
        group: str | None = None,
        id_kinds: IdKinds | None = None,
    ) -> None:
        """`group` names a column whose values group rows. `id_kinds` are those of the model's training; columns of another kind are refused."""
        self._expected = id_kinds or {}
        self.dense = tuple(str(f.column) for f in features.expanded_dense())
        self.sparse = tuple(str(f.column) for f in features.expanded_sparse()) + (() if group is None else (group,))
        """Columns of ids; the last is that of the groups, if there is one."""
        self.has_groups = group is not None
        named = {"labels": label, "weights": weight, "true_p": true_p}
        self.scalars = {field: column for field, column in named.items() if column is not None}
        """Columns with one number per row, by the field of a `RawBlock` that they become."""
        self.names = tuple(dict.fromkeys([*self.dense, *self.sparse, *self.scalars.values()]))
        """Every column to read, once."""

    def check(self, schema: pa.Schema) -> None:
        """Raise a DataError for the first column that is missing from `schema` or has an unsupported type."""
        types = dict(zip(schema.names, schema.types, strict=True))
        for name in self.names:
            if name not in types:
                raise _missing(name, list(types))
        for name in (*self.dense, *self.scalars.values()):
            _check_dense(name, types[name])
        for name in self.sparse:
            _check_sparse(name, types[name])
        counts = Counter(schema.names)
        twice = next((name for name in self.names if counts[name] > 1), None)
        if twice is not None:
            raise DataError(f"two columns are named `{twice}`; rename one of them")
        self._check_kinds(schema)

    def id_kinds(self, schema: pa.Schema) -> dict[str, str]:
        """Whether each sparse column of `schema` holds text or integers; columns of only nulls are omitted."""
        types = dict(zip(schema.names, schema.types, strict=True))
        kinds = {}
        for name in self.sparse:
            value = id_type(types[name])
            if not pa.types.is_null(value):
                kinds[name] = "text" if is_text(value) else "integers"
        return kinds

    def _check_kinds(self, schema: pa.Schema) -> None:
        """Text is hashed to 64 bits and integers are not, so the same id in the other kind would get another row."""
        for name, kind in self.id_kinds(schema).items() if self._expected else ():
            expected = self._expected.get(name, kind)
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

        def floats(name: str) -> NDArray[np.float32]:
            return to_floats(rows.column(index[name]), name)

        dense = np.empty((rows.num_rows, len(self.dense)), np.float32)
        # A few columns at a time, so that they are still in the cache when they are interleaved.
        for first in range(0, len(self.dense) if rows.num_rows else 0, TILE):
            columns = [floats(name) for name in self.dense[first : first + TILE]]
            interleave(columns, dense, np.arange(first, first + len(columns)))
        found = [to_bags(rows.column(index[name]), name) for name in self.sparse]
        return self.block_of(dense, found, {field: floats(column) for field, column in self.scalars.items()})

    def block_of(
        self, dense: NDArray[np.float32], bags: Sequence[Bags], scalars: Mapping[str, NDArray[np.float32]]
    ) -> RawBlock:
        """A block of decoded columns, each in the order of this reader's."""
        groups = None
        if self.has_groups:
            *bags, (ids, offsets) = bags
            groups = np.zeros(len(dense), np.int64)  # rows without a value are one group
            has_value = np.diff(offsets) > 0
            groups[has_value] = ids[offsets[:-1][has_value]]
        ids_of, offsets_of = (tuple(bag[part] for bag in bags) for part in (0, 1))
        return RawBlock(dense=dense, ids=ids_of, offsets=offsets_of, groups=groups, **scalars)

    def _table(self, rows: Mapping[str, Any]) -> pa.Table:
        """The needed columns (lists, NumPy arrays, Arrow arrays) as an Arrow table."""
        arrays = {}
        for name in self.names:
            if name not in rows:
                raise _missing(name, list(rows))
            arrays[name] = _arrow(rows[name], name)
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) > 1:
            short, long = min(lengths, key=lengths.__getitem__), max(lengths, key=lengths.__getitem__)
            raise DataError(f"columns differ in length: `{short}` has {lengths[short]} rows, `{long}` has {lengths[long]}")
        return pa.table(arrays)


def check_id_kinds(features: FeaturesSpec, kinds: IdKinds) -> None:
    """Raise a DataError for text ids without a text hash, and for text and integers in one table."""
    readers: dict[str, str] = {}
    for feature in features.expanded_sparse():
        column = str(feature.column)
        kind = kinds.get(column)
        if kind == "text" and feature.hash != "mix":
            raise DataError(f"column `{column}` is text, but `hash: {feature.hash}` needs integers; use `hash: mix`")
        if feature.table is not None and kind is not None and readers.setdefault(feature.table, kind) != kind:
            raise DataError(
                f"features that share table `{feature.table}` must all be text or all integers, but `{column}` has {kind}; "
                "convert one of them, since the same id would get different rows"
            )


def to_floats(column: pa.Array | pa.ChunkedArray, name: str) -> NDArray[np.float32]:
    """A numeric or boolean column as float32 [R], null as NaN."""
    _check_dense(name, column.type)
    if isinstance(column, pa.ChunkedArray):
        if column.num_chunks != 1:
            return np.concatenate([np.empty(0, np.float32), *(to_floats(chunk, name) for chunk in column.chunks)])
        column = column.chunk(0)
    column.validate()
    if column.type != pa.float32():
        if pa.types.is_boolean(column.type):
            column = column.cast(pa.int8())
        elif pa.types.is_decimal(column.type):
            column = column.cast(pa.float64())
        column = column.cast(pa.float32(), safe=False)
    if column.null_count:
        return np.asarray(column.to_numpy(zero_copy_only=False), np.float32)
    return _view(column.buffers()[1], np.dtype(np.float32), column.offset, len(column))


def to_bags(column: pa.Array | pa.ChunkedArray, name: str) -> Bags:
    """A column of ids as raw 64-bit ids [nnz] and offsets [R + 1], the first 0."""
    _check_sparse(name, column.type)
    if isinstance(column, pa.ChunkedArray):
        if column.num_chunks != 1:
            return _concatenate([_bags(chunk) for chunk in column.chunks])
        column = column.chunk(0)
    return _bags(column)


def _bags(array: pa.Array) -> Bags:
    """As `_bags_unchecked`; an array read from a damaged file, which may refer to memory out of range, is an ArrowInvalid."""
    array.validate()
    ids, offsets = _bags_unchecked(array)
    if offsets[0] != 0 or offsets[-1] > len(ids) or (offsets[1:] < offsets[:-1]).any():
        raise pa.ArrowInvalid("overlapping lists")
    return ids, offsets


def _bags_unchecked(array: pa.Array) -> Bags:
    kind = array.type
    if not _is_list(kind):
        ids, valid = _ids(array)
        if valid is None:
            return ids, np.arange(len(array) + 1)
        return ids[valid], _offsets(valid)
    if array.null_count or pa.types.is_fixed_size_list(kind):
        # A null list may still cover values, which flatten() drops.
        offsets = _offsets(pc.fill_null(pc.list_value_length(array), 0).to_numpy())
        values = array.flatten()
    else:
        dtype = np.dtype(np.int64 if pa.types.is_large_list(kind) else np.int32)
        bounds = _view(array.buffers()[1], dtype, array.offset, len(array) + 1) if len(array) else np.zeros(1, dtype)
        offsets = bounds.astype(np.int64) - np.int64(bounds[0])
        values = array.values.slice(int(bounds[0]), int(offsets[-1]))
    ids, valid = _ids(values)
    if valid is None:
        return ids, offsets
    return ids[valid], _offsets(valid)[offsets]


def _ids(array: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
    """The 64-bit id of each value [n], and which values are not null (None if none is null)."""
    valid = np.asarray(array.is_valid().to_numpy(zero_copy_only=False)) if array.null_count else None
    kind = array.type
    if pa.types.is_null(kind):
        return np.zeros(len(array), np.int64), np.zeros(len(array), np.bool_)
    if pa.types.is_dictionary(kind):
        return _dictionary_ids(array, valid)
    if is_text(kind):
        dtype = np.dtype(np.int64 if pa.types.is_large_string(kind) else np.int32)
        _, bounds, data = array.buffers()
        if not len(array):
            return np.empty(0, np.int64), valid
        text = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
        return hash_texts(_view(bounds, dtype, array.offset, len(array) + 1), text), valid
    if not len(array):
        return np.empty(0, np.int64), valid
    values = _view(array.buffers()[1], np.dtype(kind.to_pandas_dtype()), array.offset, len(array))
    return values.view(np.int64) if values.itemsize == 8 else values.astype(np.int64), valid


def _dictionary_ids(
    array: pa.DictionaryArray, valid: NDArray[np.bool_] | None
) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
    words, words_valid = _ids(array.dictionary)
    indices = pc.fill_null(array.indices, 0).to_numpy() if array.null_count else array.indices.to_numpy()
    if not len(words):
        return np.zeros(len(indices), np.int64), np.zeros(len(indices), np.bool_)
    if words_valid is not None:
        valid = words_valid[indices] if valid is None else valid & words_valid[indices]
    return words[indices], valid


def _concatenate(parts: list[Bags]) -> Bags:
    ids = np.concatenate([np.empty(0, np.int64), *(ids for ids, _ in parts)])
    lengths = np.concatenate([np.empty(0, np.int64), *(np.diff(offsets) for _, offsets in parts)])
    return ids, _offsets(lengths)


def _offsets(lengths: NDArray[Any]) -> NDArray[np.int64]:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _view(buffer: pa.Buffer, dtype: np.dtype[Any], start: int, count: int) -> NDArray[Any]:
    """`count` values of an Arrow buffer from index `start` on, without a copy."""
    if not count:
        return np.empty(0, dtype)
    return np.frombuffer(buffer, dtype, count, start * dtype.itemsize)


def _arrow(values: Any, name: str) -> pa.Array | pa.ChunkedArray:
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


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def id_type(kind: pa.DataType) -> pa.DataType:
    """The type of the ids inside lists and dictionaries."""
    value = kind.value_type if _is_list(kind) else kind
    return value.value_type if pa.types.is_dictionary(value) else value


def _check_dense(name: str, kind: pa.DataType) -> None:
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    if not (is_number or pa.types.is_boolean(kind) or pa.types.is_null(kind)):
        raise DataError(
            f"column `{name}` has type {kind}, but a dense feature, label or weight must be a number or a boolean. "
            "Convert the column, or list it under features.sparse if it contains ids"
        )


def _check_sparse(name: str, kind: pa.DataType) -> None:
    value = id_type(kind)
    if not (pa.types.is_integer(value) or is_text(value) or pa.types.is_null(value)):
        raise DataError(
            f"column `{name}` has type {kind}, but a sparse feature must be integers, text, or lists of either. "
            "Convert the column, or list it under features.dense if it is a quantity"
        )


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
