"""Arrow columns to numbers and ids: which types may be which, and what nulls, timestamps and booleans become.

As numbers: null is NaN, a boolean 0 or 1, a date or timestamp the days since 1970 with their fraction.
As ids: null is no id, a boolean 0 or 1, a date the days and a timestamp the whole seconds since 1970, a whole floating-point number itself.
A timestamp with a time zone counts in that zone, as a clock on its wall shows.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowstead.data.hashing import hash_texts
from rowstead.spec.errors import DataError
from rowstead.spec.features import TimePart

Bags = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Ids [nnz] and offsets [R + 1] of one sparse column."""
Column: TypeAlias = "pa.Array | pa.ChunkedArray"

DAY_S = 86_400
_PER_S = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_EXACT_BELOW = {pa.float16(): 2**11, pa.float32(): 2**24, pa.float64(): 2**53}
"""Whole numbers up to here are exact in these types; larger ones may be other ids that were rounded."""


class ColumnError(DataError):
    """Values of a column that cannot be what a recipe makes of them; who reads a file adds its name."""


class _NoIdError(ValueError):
    """A number that is no id; its text says which and why."""


def is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_time(kind: pa.DataType) -> bool:
    """Whether values are dates or timestamps."""
    return bool(pa.types.is_date(kind) or pa.types.is_timestamp(kind))


def is_quantity(kind: pa.DataType) -> bool:
    """Whether values are numbers, booleans, dates or timestamps."""
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    return bool(is_number or pa.types.is_boolean(kind) or pa.types.is_null(kind) or is_time(kind))


def id_type(kind: pa.DataType) -> pa.DataType:
    """The type of the ids inside lists and dictionaries."""
    value = kind.value_type if is_list(kind) else kind
    return value.value_type if pa.types.is_dictionary(value) else value


def check_dense(name: str, kind: pa.DataType, part: TimePart | None = None, *, element: bool = False) -> None:
    """Raise a DataError unless a column of this type can be numbers; an `element` of it, or this part of its times."""
    if part is not None:
        _check_part(name, kind, part)
    elif element:
        if not (is_list(kind) and is_quantity(kind.value_type)):
            raise DataError(
                f"column `{name}` has type {kind}, but `length` and `element` are for lists of numbers; remove them"
            )
    elif is_list(kind) and is_quantity(kind.value_type):
        raise DataError(
            f"column `{name}` has type {kind}; if each row has as many numbers, set the dense feature's `length` to how many, and "
            "if they are ids, list it under features.sparse"
        )
    elif not is_quantity(kind):
        fix = (
            "Convert the column, or list it under features.sparse if it contains ids"
            if is_text(id_type(kind))
            else "Convert it"
        )
        raise DataError(
            f"column `{name}` has type {kind}, but a dense feature, label or weight must be a number, a boolean, a date or a "
            f"timestamp. {fix}"
        )


def check_sparse(name: str, kind: pa.DataType, part: TimePart | None = None) -> None:
    """Raise a DataError unless a column of this type can be ids."""
    value = id_type(kind)
    if part is not None:
        _check_part(name, kind, part)
    elif not (is_quantity(value) or is_text(value)):
        raise DataError(
            f"column `{name}` has type {kind}, but a sparse feature must be integers, text, booleans, dates, timestamps, or lists "
            "of these. Convert the column"
        )


def _check_part(name: str, kind: pa.DataType, part: TimePart) -> None:
    if not (is_time(kind) or is_text(kind) or pa.types.is_null(kind)):
        raise DataError(
            f"column `{name}` has type {kind}, but `part: {part}` needs timestamps or dates; convert it to timestamps"
        )
    if pa.types.is_date(kind) and part == "hour":
        raise DataError(f"column `{name}` has dates, which have no hour; use `part: weekday` or `part: day`")


def to_floats(column: Column, name: str, part: TimePart | None = None) -> NDArray[np.float32]:
    """A column of numbers as float32 [R], null as NaN."""
    check_dense(name, column.type, part)
    if isinstance(column, pa.ChunkedArray):
        if column.num_chunks != 1:
            return np.concatenate([np.empty(0, np.float32), *(to_floats(chunk, name, part) for chunk in column.chunks)])
        column = column.chunk(0)
    column.validate()
    if part is not None:
        column = _take_part(column, part, name)
    return _floats(column)


def _floats(array: pa.Array) -> NDArray[np.float32]:
    if is_time(array.type):
        return (_seconds(array, np.float64) / DAY_S).astype(np.float32)
    if array.type != pa.float32():
        if pa.types.is_boolean(array.type):
            array = array.cast(pa.int8())
        elif pa.types.is_decimal(array.type):
            array = array.cast(pa.float64())
        array = array.cast(pa.float32(), safe=False)
    if array.null_count:
        return np.asarray(array.to_numpy(zero_copy_only=False), np.float32)
    return _view(array.buffers()[1], np.dtype(np.float32), array.offset, len(array))


def to_vectors(column: Column, name: str, length: int) -> NDArray[np.float32]:
    """A column of lists of `length` numbers each as float32 [R, N]; a null list is NaNs."""
    check_dense(name, column.type, element=True)
    if isinstance(column, pa.ChunkedArray):
        parts = [to_vectors(chunk, name, length) for chunk in column.chunks]
        return np.concatenate([np.empty((0, length), np.float32), *parts])
    column.validate()
    lengths = np.asarray(pc.fill_null(pc.list_value_length(column), -1), np.int64)
    wrong = np.flatnonzero((lengths != length) & (lengths >= 0))
    if len(wrong):
        raise ColumnError(
            f"column `{name}` has a list of {lengths[wrong[0]]:,} numbers where `length` says {length:,}; correct either"
        )
    vectors = np.full((len(column), length), np.nan, np.float32)
    vectors[lengths >= 0] = _floats(column.flatten()).reshape(-1, length)
    return vectors


def to_bags(column: Column, name: str, part: TimePart | None = None) -> Bags:
    """A column of ids as raw 64-bit ids [nnz] and offsets [R + 1], the first 0."""
    check_sparse(name, column.type, part)
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    try:
        bags = [_bags(chunk if part is None else _take_part(chunk, part, name)) for chunk in chunks]
    except _NoIdError as error:
        raise ColumnError(
            f"column `{name}` contains {error}. Ids are integers or text: convert it, or list it under features.dense if it is a quantity"
        ) from None
    return bags[0] if len(bags) == 1 else _concatenate(bags)


def _take_part(array: pa.Array, part: TimePart, name: str) -> pa.Array:
    """A part of timestamps, dates or their text, as int64."""
    if is_text(array.type):
        array = _parse_times(array, name)
    valid = None if not array.null_count else np.asarray(array.is_valid().to_numpy(zero_copy_only=False))
    seconds = _seconds(array, np.int64) if not pa.types.is_null(array.type) else np.zeros(len(array), np.int64)
    days = seconds // DAY_S
    values = {"hour": (seconds - days * DAY_S) // 3600, "weekday": (days + 3) % 7, "day": days}[part]
    return pa.array(values, mask=None if valid is None else ~valid)


def _parse_times(array: pa.Array, name: str) -> pa.Array:
    for kind in (pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.timestamp("ns"), pa.timestamp("ns", "UTC")):
        try:
            return array.cast(kind)
        except pa.ArrowInvalid as error:
            reason = str(error).splitlines()[0]
    raise ColumnError(f"column `{name}` is text that is not all timestamps such as 2026-11-01 12:00:00: {reason}")


def _seconds(array: pa.Array, dtype: Any) -> NDArray[Any]:
    """Dates or timestamps as seconds since 1970 on the clock of their zone [R]: floored as integers; as floats NaN where null."""
    kind = array.type
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        array = array.view(pa.timestamp(kind.unit)) if kind.tz == "UTC" else pc.local_timestamp(array)
    if pa.types.is_date(kind):
        array, unit = array.cast(pa.timestamp("ms")).cast(pa.int64()), "ms"
    else:
        array, unit = array.view(pa.int64()), kind.unit
    counts = np.asarray(pc.fill_null(array, 0), np.int64)
    if dtype == np.int64:
        return counts // _PER_S[unit]
    seconds = counts / _PER_S[unit]
    if array.null_count:
        seconds[np.asarray(array.is_null())] = np.nan
    return seconds


def _bags(array: pa.Array) -> Bags:
    """As `_bags_unchecked`; an array read from a damaged file, which may refer to memory out of range, is an ArrowInvalid."""
    array.validate()
    ids, offsets = _bags_unchecked(array)
    if offsets[0] != 0 or offsets[-1] > len(ids) or (offsets[1:] < offsets[:-1]).any():
        raise pa.ArrowInvalid("overlapping lists")
    return ids, offsets


def _bags_unchecked(array: pa.Array) -> Bags:
    kind = array.type
    if not is_list(kind):
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
    if not pa.types.is_integer(kind):
        return _whole_ids(array, valid)
    values = _view(array.buffers()[1], np.dtype(kind.to_pandas_dtype()), array.offset, len(array))
    return values.view(np.int64) if values.itemsize == 8 else values.astype(np.int64), valid


def _whole_ids(array: pa.Array, valid: NDArray[np.bool_] | None) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
    """As `_ids`, for booleans, dates, timestamps and whole numbers of other types; NaN is null."""
    kind = array.type
    if is_time(kind):
        return _seconds(array, np.int64) // (DAY_S if pa.types.is_date(kind) else 1), valid
    if pa.types.is_decimal(kind):
        try:
            return np.asarray(pc.fill_null(array.cast(pa.int64()), 0), np.int64), valid
        except pa.ArrowInvalid:
            raise _NoIdError("a decimal that is not a whole number of 64 bits") from None
    if pa.types.is_boolean(kind):
        return np.asarray(pc.fill_null(array.cast(pa.int64()), 0), np.int64), valid
    values = np.asarray(array.to_numpy(zero_copy_only=False))
    present = ~np.isnan(values)
    values = np.where(present, values, 0)
    limit = _EXACT_BELOW[kind]
    wrong = np.flatnonzero((np.floor(values) != values) | (np.abs(values) > limit))
    if len(wrong):
        value = values[wrong[0]]
        why = f"which is beyond {limit:,}, where {kind} is not exact" if np.abs(value) > limit else "which is not whole"
        raise _NoIdError(f"{value}, {why}")
    return values.astype(np.int64), None if present.all() else present


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
