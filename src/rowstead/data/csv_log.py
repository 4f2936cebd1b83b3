"""`CsvLog`: one split of a log in CSV, TSV and the like, parsed to raw rows by threads, in bounded memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from rowstead.data.block import LogPiece
from rowstead.data.column_values import ColumnError
from rowstead.data.csv_cells import ARROW, CsvFormat, guess_type, read_rows
from rowstead.data.csv_index import GROUP_ROWS, CsvIndex, find_groups, open_index, read_beginning, split_row
from rowstead.data.file_log import FileLog, Streams
from rowstead.data.files import LogFile
from rowstead.data.footers import Fingerprint, first_line
from rowstead.data.row_order import Span
from rowstead.spec.bounds import MAX_FEATURES
from rowstead.spec.data import CsvSpec
from rowstead.spec.errors import DataError, did_you_mean

SEPARATORS = ",\t;|"
SAMPLE_ROWS = 10_000
"""The first rows of a log, from which types are guessed; fewer if they have more than SAMPLE_BYTES."""
SAMPLE_BYTES = 4 << 20


class CsvLog(FileLog):
    """One split of a log in text files, as raw rows. A row group is `GROUP_ROWS` consecutive rows."""

    spec: CsvSpec

    @classmethod
    def read_file_schema(cls, spec: CsvSpec, file: LogFile) -> pa.Schema:
        sample = _Sample(spec, file)
        types = sample.types(as_ids=None)
        return pa.schema([(name, _settle(types[name], is_id=True)) for name in sample.form.names])

    def _open_files(self) -> None:
        sample = _Sample(self.spec, self.files[0], may_lack=self.split == "all")
        self._separator = sample.form.separator
        ids = frozenset(self.columns.sparse) - {*self.columns.dense, *self.columns.scalars.values()}
        self._types = {name: _settle(kind, name in ids) for name, kind in sample.types(as_ids=ids).items()}
        was_text = [
            name for name, kind in self.columns.expected_kinds.items() if kind == "text" and name not in self.spec.types
        ]
        self._types |= {name: pa.string() for name in was_text if name in self._types}
        """The type of each column of the first file; other files have the same."""
        self._indexes: list[CsvIndex | None] = [None] * len(self.files)
        self._forms: list[CsvFormat | None] = [None] * len(self.files)

    @property
    def fingerprints(self) -> dict[str, Fingerprint]:
        return {file.path: self._index(number).fingerprint for number, file in enumerate(self.files)}

    def _index(self, file: int) -> CsvIndex:
        index = self._indexes[file]
        assert index is not None
        return index

    def _inspect_file(self, file: int) -> tuple[list[int], pa.Schema]:
        index = self._indexes[file] = open_index(self.files[file], self.spec, self._separator)
        form = self._forms[file] = make_format(self.spec, self.files[file], index.header, self._separator)
        return index.num_rows, pa.schema([(name, self._types.get(name, pa.string())) for name in form.names])

    def _streams(self, spans: Sequence[Span], check: bool) -> tuple[Streams, Callable[[], None]]:
        return [partial(self._decode, span, check) for span in spans], lambda: None

    def _decode(self, span: Span, check: bool) -> Iterator[LogPiece]:
        first_row = sum(self._group_rows[span.file][: span.group])
        chosen, span = self._rows_of(span), self._covering(span)
        constants = self.constants(span.file)
        names = [name for name in self.columns.names if name not in constants]
        table, problems = self._read(span.file, span.group, names)
        for name, value in constants.items():
            table = table.append_column(name, pa.repeat(value, table.num_rows))
        try:
            block = self.columns.block(table.slice(span.start, span.num_rows).combine_chunks())
        except ColumnError as error:
            raise DataError(f"`{self.files[span.file].path}`: {error}") from None
        problems = {row - span.start: problem for row, problem in problems.items() if span.start <= row < span.stop}
        yield self._piece(block, self.files[span.file], first_row, span.start, chosen, check, problems)

    def _read(self, file: int, group: int, names: Sequence[str]) -> tuple[pa.Table, dict[int, str]]:
        """Columns of a row group, and what is wrong with rows of it."""
        form, schema = self._forms[file], self.schemas[file]
        assert form is not None
        text, num_rows = self._index(file).read(group), self._index(file).num_rows[group]
        types = {name: schema.field(name).type for name in names}
        try:
            with self.cpu_slots:
                return read_rows(text, form, types or {form.names[0]: pa.string()}, num_rows=num_rows)
        except (pa.ArrowException, MemoryError) as error:
            raise DataError(f"`{self.files[file].path}`: row group {group} cannot be read: {first_line(error)}") from None

    def _read_file_column(self, file: int, group: int, name: str) -> pa.Array:
        column = self._read(file, group, [name])[0].column(name)
        return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)

    def _file_tables(self, span: Span, names: Sequence[str]) -> Iterator[tuple[int, pa.Table]]:
        table, _ = self._read(span.file, span.group, names)
        yield span.start, table.slice(span.start, span.num_rows)

    def _rows_per_piece(self, span: Span) -> int:
        return GROUP_ROWS


def _settle(kind: pa.DataType, is_id: bool) -> pa.DataType:
    """A type for a column whose first rows are all null."""
    return kind if not pa.types.is_null(kind) else pa.string() if is_id else pa.float64()


def make_format(spec: CsvSpec, file: LogFile, header: bytes, separator: str) -> CsvFormat:
    """How to read a file with this header."""
    try:
        names = spec.columns or tuple(split_row(header, separator, quotes=spec.quotes))
    except (UnicodeDecodeError, ValueError) as error:
        raise DataError(f"`{file.path}`: its first line cannot be read: {error}; write it as UTF-8") from None
    if not names:
        raise DataError(f"`{file.path}` is empty")
    if len(names) > MAX_FEATURES:
        raise DataError(f"`{file.path}` has {len(names):,} columns, and at most {MAX_FEATURES:,} are allowed")
    return CsvFormat(names=names, separator=separator, quotes=spec.quotes, list_separator=spec.list_separator)


class _Sample:
    """The first rows of a text file.

    A file that a model is applied to `may_lack` columns that are in `types` for training, such as the label.
    """

    def __init__(self, spec: CsvSpec, file: LogFile, *, may_lack: bool = False) -> None:
        self._spec, self._file = spec, file
        beginning, is_beginning = read_beginning(file, SAMPLE_BYTES)
        first = re.split(rb"[\r\n]", beginning.lstrip(b"\r\n"), maxsplit=1)[0]
        separator = spec.separator or max(SEPARATORS, key=lambda one: first.count(one.encode()))
        groups = list(
            find_groups(
                file.path,
                [beginning],
                separator=separator,
                quotes=spec.quotes,
                has_header=not spec.columns,
                keep=True,
                is_beginning=is_beginning,
            )
        )
        if not groups and is_beginning and not spec.columns:
            raise DataError(f"`{file.path}`: there is no header in its first {SAMPLE_BYTES:,} bytes; is it a log in text?")
        header = groups.pop(0).text if groups and not spec.columns else b""
        self.form = make_format(spec, file, header, separator)
        names = self.form.names
        for name in spec.types:
            if name not in names and not may_lack:
                raise DataError(f"data.csv.types: `{file.path}` has no column `{name}`: {did_you_mean(name, names)}")
        self._columns: Mapping[str, Sequence[str]] = dict.fromkeys(names, ())
        if groups and len(set(names)) == len(names):
            table, _ = read_rows(groups[0].text, self.form, dict.fromkeys(names, pa.string()), num_rows=groups[0].num_rows)
            self._columns = {name: self._texts(table.column(name)) for name in names}

    @staticmethod
    def _texts(column: pa.ChunkedArray) -> list[str]:
        texts = column.slice(0, SAMPLE_ROWS).cast(pa.binary()).to_pylist()
        return [text.decode("utf-8", "replace") for text in texts if text is not None]

    def types(self, *, as_ids: frozenset[str] | None) -> dict[str, pa.DataType]:
        """The type of each column, null if it is empty. `as_ids` are those whose values are ids; None if that is not known."""
        found: dict[str, Any] = {}
        for name, cells in self._columns.items():
            given = self._spec.types.get(name)
            among = ARROW[given] if given is not None else None
            found[name] = guess_type(cells, as_id=as_ids is None or name in as_ids, among=among)
        return found
