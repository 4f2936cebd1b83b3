"""Text of CSV and the like to typed Arrow columns: which types the first rows suggest, and which rows cannot be read.

pyarrow reads the columns of a row group at once. If it cannot, their cells are converted one column after the other, to find those that
it cannot read; the other rows are the same as if they stood alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
from numpy.typing import NDArray

from rowstead.data.csv_index import count_cells
from rowstead.report.terminal import printable

NULLS = ("", "#N/A", "<NA>", "N/A", "NA", "NULL", "NaN", "None", "\\N", "n/a", "nan", "null")
"""Cells that are null in columns of numbers, booleans and times. In a column of text, and of lists, only the empty cell is null."""
MAX_PROBLEM_TEXT = 40

_TIMES = (pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.timestamp("ns"), pa.timestamp("ns", "UTC"))
ARROW: Mapping[str, tuple[pa.DataType, ...]] = {
    "int64": (pa.int64(),),
    "uint64": (pa.uint64(),),
    "float64": (pa.float64(),),
    "string": (pa.string(),),
    "bool": (pa.bool_(),),
    "date": (pa.date32(),),
    "timestamp": _TIMES,
    "list<int64>": (pa.list_(pa.int64()),),
    "list<string>": (pa.list_(pa.string()),),
    "list<float64>": (pa.list_(pa.float64()),),
}
"""The Arrow types of each type of a recipe; of several, the first that fits the first rows."""
_GUESSED = ("int64", "uint64", "float64", "bool", "date", "timestamp")


@dataclass(frozen=True, kw_only=True)
class CsvFormat:
    """How to read the rows of a file."""

    names: tuple[str, ...]
    """All its columns."""
    separator: str
    quotes: bool
    list_separator: str


def read_rows(
    text: bytes, form: CsvFormat, types: Mapping[str, pa.DataType], *, num_rows: int
) -> tuple[pa.Table, dict[int, str]]:
    """Read the columns of `types` from the text of whole rows; also what is wrong with each row that cannot be read, by its index.

    Such a row has nulls in the columns that cannot be read, or in all.
    """
    left_out: dict[int, str] = {}
    wrong: dict[str, dict[int, str]] = {}
    parsed = {name: kind if _is_parsed(kind) else pa.string() for name, kind in types.items()}
    try:
        table = _parse(text, form, parsed)
    except pa.ArrowInvalid:
        text, left_out = _leave_out(text, form, num_rows)
        table = _parse(text, form, dict.fromkeys(types, pa.string()))
        for index, (name, kind) in enumerate(types.items()):
            if _is_parsed(kind):
                column, wrong[name] = convert_cells(table.column(name), kind)
                table = table.set_column(index, name, column)
    for index, (name, kind) in enumerate(types.items()):
        if not _is_parsed(kind):
            column = _blank_to_null(table.column(name))
            if pa.types.is_list(kind):
                column, wrong[name] = _split_lists(column, kind, form.list_separator)
            table = table.set_column(index, name, column)
    assert table.num_rows + len(left_out) == num_rows, "the index and pyarrow count other rows"
    rows = np.delete(np.arange(num_rows), sorted(left_out))
    problems = dict(left_out)
    for name, cells in wrong.items():
        for row, cell in cells.items():
            problem = f"column `{name}` has {_shown(cell)}, which cannot be read as {type_name(types[name])}"
            problems.setdefault(int(rows[row]), problem)
    return _insert_nulls(table, rows, num_rows), problems


def _insert_nulls(table: pa.Table, rows: NDArray[np.int64], num_rows: int) -> pa.Table:
    """A table whose rows are at `rows` of `num_rows`, with nulls at the others."""
    if len(rows) == num_rows:
        return table
    if not len(rows):
        return pa.table([pa.nulls(num_rows, field.type) for field in table.schema], schema=table.schema)
    indices, mask = np.zeros(num_rows, np.int64), np.ones(num_rows, np.bool_)
    indices[rows], mask[rows] = np.arange(len(rows)), False
    return table.take(pa.array(indices, mask=mask))


def _parse(text: bytes, form: CsvFormat, types: Mapping[str, pa.DataType]) -> pa.Table:
    if not text:
        return pa.table({name: pa.array([], kind) for name, kind in types.items()})
    return pa_csv.read_csv(
        pa.BufferReader(text),
        read_options=pa_csv.ReadOptions(column_names=list(form.names), use_threads=False, block_size=len(text) + 1),
        parse_options=pa_csv.ParseOptions(
            delimiter=form.separator, quote_char='"' if form.quotes else False, newlines_in_values=form.quotes
        ),
        convert_options=pa_csv.ConvertOptions(
            include_columns=list(types), column_types=types, null_values=NULLS, strings_can_be_null=False, check_utf8=False
        ),
    )


def _leave_out(text: bytes, form: CsvFormat, num_rows: int) -> tuple[bytes, dict[int, str]]:
    """The text without the rows that have more or fewer cells than there are columns, and what is wrong with those by index."""
    rows = count_cells(text, separator=form.separator, quotes=form.quotes, num_rows=num_rows)
    wrong = np.flatnonzero(rows[:, 2] != len(form.names)).tolist()
    if not wrong:
        return text, {}
    right = np.delete(rows, wrong, axis=0)
    problems = {row: f"it has {rows[row, 2]:,} cells instead of {len(form.names):,}" for row in wrong}
    return b"\n".join(text[start:stop] for start, stop, _ in right.tolist()), problems


def _is_parsed(kind: pa.DataType) -> bool:
    """Whether pyarrow makes a column of this type from text."""
    return not (pa.types.is_string(kind) or pa.types.is_list(kind))


def convert_cells(column: pa.ChunkedArray, kind: pa.DataType) -> tuple[pa.Array, dict[int, str]]:
    """A column of text as `kind`, with null where it cannot be read; and those cells by row."""
    cells = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    cells = pc.if_else(pc.is_in(cells, pa.array(NULLS)), pa.scalar(None, pa.string()), cells)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        cells = pc.ascii_trim(cells, " \t")
    wrong = _find_wrong(cells, kind)
    if wrong:
        mask = np.zeros(len(cells), np.bool_)
        mask[wrong] = True
        return pc.if_else(pa.array(mask), pa.scalar(None, pa.string()), cells).cast(kind), _texts(cells, wrong)
    return cells.cast(kind), {}


def _texts(cells: pa.Array, rows: Sequence[int]) -> dict[int, str]:
    """Some cells by row, whatever their bytes are."""
    return {row: cells[row].cast(pa.binary()).as_py().decode("utf-8", "replace") for row in rows}


def _find_wrong(cells: pa.Array, kind: pa.DataType, first: int = 0) -> list[int]:
    """Indices of the cells that cannot be cast, by halves."""
    try:
        cells.cast(kind)
    except pa.ArrowInvalid:
        if len(cells) == 1:
            return [first]
        middle = len(cells) // 2
        return _find_wrong(cells.slice(0, middle), kind, first) + _find_wrong(cells.slice(middle), kind, first + middle)
    return []


def _blank_to_null(column: pa.ChunkedArray) -> pa.ChunkedArray:
    is_blank = pc.equal(pc.binary_length(column), 0)
    return pc.if_else(is_blank, pa.scalar(None, pa.string()), column) if pc.any(is_blank).as_py() else column


def _split_lists(column: pa.ChunkedArray, kind: pa.ListType, separator: str) -> tuple[pa.Array, dict[int, str]]:
    """Text such as `1|2|3` as lists, with null where it cannot be read; and those cells by row."""
    cells = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    lists = pc.split_pattern(cells, separator)
    offsets = np.concatenate([[0], np.cumsum(pc.fill_null(pc.list_value_length(lists), 0).to_numpy())]).astype(np.int32)
    values, wrong = lists.flatten(), {}
    if not pa.types.is_string(kind.value_type):
        values, bad = convert_cells(pa.chunked_array([values]), kind.value_type)
        rows = np.searchsorted(offsets, np.array(sorted(bad), np.int64), side="right") - 1
        wrong = _texts(cells, rows.tolist())
    return pa.ListArray.from_arrays(pa.array(offsets), values, mask=cells.is_null()), wrong


def guess_type(cells: Sequence[str], *, as_id: bool, among: Sequence[pa.DataType] | None = None) -> pa.DataType:
    """The first type that all cells of a sample have, or the first of `among`; null if all are null.

    As ids, cells with leading zeros such as `007`, and those with exponents such as `12e4`, are text: as numbers they would be other ids.
    Otherwise a column is of numbers if most cells are; the others cannot be read.
    """
    found = [cell for cell in cells if cell not in NULLS]
    if among is not None and len(among) == 1:
        return among[0]
    if not found:
        return pa.null() if among is None else among[0]
    array = pa.array(found, pa.string())
    is_code = as_id and any(_is_code(cell) for cell in found)
    for kind in [kind for name in _GUESSED for kind in ARROW[name]] if among is None else among:
        if is_code and (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            continue
        numbers = pc.ascii_trim(array, " \t") if pa.types.is_integer(kind) or pa.types.is_floating(kind) else array
        try:
            numbers.cast(kind)
        except pa.ArrowInvalid:
            continue
        return kind
    if among is not None:
        return among[0]
    if not as_id and len(_find_wrong(pc.ascii_trim(array, " \t"), pa.float64())) < len(array) / 2:
        return pa.float64()
    return pa.string()


def _is_code(cell: str) -> bool:
    digits = cell.strip().lstrip("-")
    return (len(digits) > 1 and digits[0] == "0" and digits[1].isalnum()) or "e" in digits.lower()


def type_name(kind: pa.DataType) -> str:
    """The type of a recipe that an Arrow type is."""
    return next((name for name, kinds in ARROW.items() if kind in kinds), str(kind))


def _shown(cell: str) -> str:
    cell = printable(cell)
    return f"`{cell if len(cell) <= MAX_PROBLEM_TEXT else cell[: MAX_PROBLEM_TEXT - 1] + '…'}`"
