"""`FileLog`: one split of a log in files, decoded to raw rows by threads, in bounded memory.

A file is cut into row groups: those of Parquet, or consecutive rows of a text file. They are the unit of decoding and shuffling.
"""

from __future__ import annotations

import importlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowstead.data.block import LogPiece, RawBlock
from rowstead.data.columns import ColumnReader, IdKinds, check_id_kinds
from rowstead.data.files import LogFile, find_files
from rowstead.data.footers import Fingerprint
from rowstead.data.partitions import read_partitions
from rowstead.data.prefetch import chain_ahead
from rowstead.data.row_order import Span, cut
from rowstead.data.splits import HELD_OUT, GroupRows, choose_rows
from rowstead.data.transforms import RowRule
from rowstead.records.cost import Cost
from rowstead.records.usage import usable_cores
from rowstead.spec.data import FileLogSpec
from rowstead.spec.errors import DataError, did_you_mean
from rowstead.spec.features import FeaturesSpec
from rowstead.spec.heads import TaskSpec

Split = Literal["train", "eval", "test", "all"]

SAMPLED_GROUPS = 64
"""A sample of a long log is spread over this many row groups."""


Streams = Sequence[Callable[[], Iterator[LogPiece]]]
"""For each span, what starts to decode it."""


class FileLog(ABC):
    """One split of a log in files, as raw rows. A kind of file is a subclass that says which rows a file has and decodes them."""

    def __init__(
        self,
        spec: FileLogSpec,
        features: FeaturesSpec,
        *,
        split: Split = "train",
        with_labels: bool = True,
        id_kinds: IdKinds | None = None,
        tasks: Sequence[TaskSpec] = (),
    ) -> None:
        """`all` is every row of `spec.train`. Without labels (for prediction) only feature columns are read.

        `id_kinds` are those of the model's training; files of other kinds are refused. `tasks` name the labels of a model with several.
        """
        self.spec, self.split = spec, split
        self.threads = spec.decode_threads or usable_cores()
        self.cpu_slots = threading.Semaphore(choose_num_busy(spec.decode_threads, usable_cores()))
        """Held by a thread while it decodes or makes a batch. With more busy threads than cores, one would now and then be preempted while
        it holds the GIL, and all others would wait for it."""
        label = [str(task.label) for task in tasks] if tasks else spec.label
        named: dict[str, Any] = {"label": label, "weight": spec.weight, "true_p": spec.true_p} if with_labels else {}
        groups = spec.group_columns if with_labels and split != "train" else ()  # training has no use for them
        self.columns = ColumnReader(features, **named, groups=groups, id_kinds=id_kinds)
        self.id_kinds: dict[str, str] = {}
        """Whether each sparse column holds text or integers."""
        self._rule = RowRule(features, label=spec.label, weight=named.get("weight"), tasks=tasks)
        own_files = {"eval": spec.eval, "test": spec.test}.get(split, ())
        patterns = own_files or spec.train
        self.files: list[LogFile] = find_files(patterns, self.spec.suffixes)
        self.partitions = read_partitions([file.path for file in self.files])
        """For each file, the columns that its path gives."""
        self._open_files()
        self._group_rows, self.schemas = self._inspect()
        check_id_kinds(features, self.id_kinds)
        self._chosen: list[list[GroupRows]] | None = None
        """Which rows of each row group belong to the split; None if all of its spans do."""
        self.spans = self._split("all" if own_files else split)
        """Row groups of the split, in file order, without empty ones."""
        self.num_samples = sum(span.num_rows for span in self.spans)
        if not self.num_samples:
            what = "no rows" if split == "all" else f"no rows for the {split} split"
            raise DataError(f"{what} in {', '.join(f'`{p}`' for p in patterns)}")
        self._piece_rows = self._rows_per_piece(self.spans[0])
        self.value_names: dict[str, dict[int, str]] = {}
        """Columns whose values have been looked up, see `name_values`."""
        self.decoding = Cost()
        """CPU cost per row of the decoding threads; threads of pyarrow's own are not counted."""

    @property
    @abstractmethod
    def fingerprints(self) -> dict[str, Fingerprint]:
        """What identifies the content of each file, as it was opened."""

    @classmethod
    @abstractmethod
    def read_file_schema(cls, spec: Any, file: LogFile) -> pa.Schema:
        """All columns of a file and their types."""

    @abstractmethod
    def _open_files(self) -> None:
        """Called once `files` are known."""

    @abstractmethod
    def _inspect_file(self, file: int) -> tuple[list[int], pa.Schema]:
        """The rows of each row group of a file, and the columns in it; several threads call it."""

    @abstractmethod
    def _streams(self, spans: Sequence[Span], check: bool) -> tuple[Streams, Callable[[], None]]:
        """What decodes each of these spans, and what ends reading ahead for them."""

    @abstractmethod
    def _rows_per_piece(self, span: Span) -> int:
        """Rows of a span's row group that are decoded at a time, about."""

    @abstractmethod
    def _read_file_column(self, file: int, group: int, name: str) -> pa.Array:
        """A column of one row group, which need not be one of the model's."""

    @abstractmethod
    def _file_tables(self, span: Span, names: Sequence[str]) -> Iterator[tuple[int, pa.Table]]:
        """The rows of a span of a row group with these columns of its file as they are; each table with the row that it begins at."""

    def tables(self, names: Sequence[str], max_rows: int | None = None) -> Generator[pa.Table, None, None]:
        """Rows of the split, all or about `max_rows`, with these columns as they are in the log, bad rows included."""
        for span in self._sample(max_rows):
            constants, chosen = self.constants(span.file), self._rows_of(span)
            for at, table in self._file_tables(self._covering(span), [name for name in names if name not in constants]):
                if chosen is not None:
                    table = table.take(chosen[(chosen >= at) & (chosen < at + table.num_rows)] - at)
                columns = {
                    name: pa.repeat(constants[name], table.num_rows) if name in constants else table.column(name)
                    for name in names
                }
                yield pa.table(columns)

    def constants(self, file: int) -> Mapping[str, pa.Scalar]:
        """The columns that the path of a file gives and the file itself does not have, with their value in every row."""
        own = self.schemas[file].names
        return {name: value for name, value in self.partitions[file].items() if name not in own}

    def full_schema(self, file: int) -> pa.Schema:
        """The columns of a file and of its path."""
        schema = self.schemas[file]
        for name, value in self.constants(file).items():
            schema = schema.append(pa.field(name, value.type))
        return schema

    def raw_blocks(self, max_rows: int | None = None) -> Iterator[RawBlock]:
        """Raw rows, bad ones included: all, or about `max_rows` spread evenly over the split."""
        for piece in self.pieces(self._sample(max_rows), rows_ahead=0, check=False):
            yield piece.block

    def _sample(self, max_rows: int | None) -> Sequence[Span]:
        """All spans, or some with about `max_rows` rows, spread evenly over the split."""
        if max_rows is None or max_rows >= self.num_samples:
            return self.spans
        count = min(len(self.spans), SAMPLED_GROUPS, max_rows)
        chosen = np.linspace(0, len(self.spans) - 1, count).round().astype(int)
        return [self.spans[i].slice(0, -(-max_rows // count)) for i in chosen]

    def pieces(self, spans: Sequence[Span], *, rows_ahead: int, check: bool = True) -> Generator[LogPiece, None, None]:
        """The rows of `spans` in order, decoded by threads about `rows_ahead` rows ahead."""
        streams, end_fetching = self._streams(spans, check)
        pieces = chain_ahead(
            streams,
            threads=self.threads,
            size=lambda piece: piece.block.num_rows,
            max_size=max(rows_ahead, self._piece_rows * min(self.threads, len(streams))),
            cost=self.decoding,
        )
        try:
            yield from pieces
        finally:
            end_fetching()
            pieces.close()

    def _piece(
        self,
        block: RawBlock,
        file: LogFile,
        first_row: int,
        at: int,
        chosen: NDArray[np.int64] | None,
        check: bool,
        problems: Mapping[int, str] = MappingProxyType({}),
    ) -> LogPiece:
        """Rows of a row group from its row `at` on; of them only the `chosen` ones. `first_row` is that of the group in its file.

        `problems` are of rows of `block` that could not be read.
        """
        rows = None
        if chosen is not None:
            rows = chosen[np.searchsorted(chosen, at) : np.searchsorted(chosen, at + block.num_rows)] - at
            block = block.take(rows)
            problems = {i: problems[row] for i, row in enumerate(rows.tolist()) if row in problems} if problems else problems
        bad = self._rule.check(block, problems) if check else None
        if bad is None:
            return LogPiece(block, None)
        if self.spec.on_bad_row == "error":
            row = first_row + at + (bad.row if rows is None else int(rows[bad.row]))
            raise DataError(
                f"`{file.path}`, row {row} (from 0): {bad.problem}. "
                f"To skip and count bad rows, set data.{self.spec.kind}.on_bad_row: skip"
            )
        return LogPiece(block, ~bad.mask)

    def _inspect(self) -> tuple[list[list[int]], list[pa.Schema]]:
        """Rows of each row group and columns of each file; checks that every file has the needed columns in supported types."""
        with ThreadPoolExecutor(self.threads) as pool:
            found = list(pool.map(self._inspect_file, range(len(self.files))))
        self.schemas = [schema for _, schema in found]
        for number, file in enumerate(self.files):
            schema = self.full_schema(number)
            try:
                self.columns.check(schema)
            except DataError as error:
                raise DataError(f"`{file.path}`: {error}") from None
            for name, kind in self.columns.id_kinds(schema).items():
                if self.id_kinds.setdefault(name, kind) != kind:
                    raise DataError(
                        f"column `{name}` is {self.id_kinds[name]} in `{self.files[0].path}` but {kind} in `{file.path}`; "
                        "convert one of them, since the same id would get different rows"
                    )
        return [rows for rows, _ in found], self.schemas

    def _split(self, split: Split) -> list[Span]:
        rule, held_out = self.spec.split, {name: self.spec.held_out(name) for name in HELD_OUT}
        counts = self._group_rows
        if split != "all" and rule.by != "order" and (any(held_out.values()) or rule.test_from is not None):
            self._chosen = choose_rows(self.spec, split, counts, self._read_column, threads=self.threads)
            counts = [[group.num_rows for group in groups] for groups in self._chosen]
        spans = [Span(file, group, 0, rows) for file, groups in enumerate(counts) for group, rows in enumerate(groups) if rows]
        if split == "all" or self._chosen is not None:
            return spans
        total = sum(span.num_rows for span in spans)
        sizes = {name: max(round(total * share), 1) if share else 0 for name, share in held_out.items()}
        first_test = max(total - sizes["test"], 0)
        first_eval = max(first_test - sizes["eval"], 0)
        bounds = {"train": (0, first_eval), "eval": (first_eval, first_test), "test": (first_test, total)}
        return cut(spans, *bounds[split])

    def _read_column(self, file: int, group: int, name: str) -> pa.Array:
        """A column of one row group, which need not be one of the model's."""
        constants, schema = self.constants(file), self.full_schema(file)
        if name not in schema.names:
            known = did_you_mean(name, schema.names)
            raise DataError(f"split.column: `{self.files[file].path}` has no column `{name}`: {known}")
        if name in constants:
            return pa.repeat(constants[name], self._group_rows[file][group])
        return self._read_file_column(file, group, name)

    def _covering(self, span: Span) -> Span:
        """The rows of the row group from a span's first to its last."""
        rows = self._rows_of(span)
        return span if rows is None else Span(span.file, span.group, int(rows[0]), int(rows[-1]) + 1)

    def _rows_of(self, span: Span) -> NDArray[np.int64] | None:
        """Indices of a span's rows in its row group; None if they are `start` to `stop`."""
        return None if self._chosen is None else self._chosen[span.file][span.group].locate(span.start, span.stop)


def open_file_log(spec: FileLogSpec, features: FeaturesSpec, **options: Any) -> FileLog:
    """Open a split of a log in files, by the class that its spec names; the options are those of `FileLog`."""
    return _log_class(spec)(spec, features, **options)


def read_schema(spec: FileLogSpec) -> pa.Schema:
    """All columns of the first training file, and of the path of any, and their types."""
    files = find_files(spec.train, spec.suffixes)
    schema = _log_class(spec).read_file_schema(spec, files[0])
    for name, value in read_partitions([file.path for file in files])[0].items():
        if name not in schema.names:
            schema = schema.append(pa.field(name, value.type))
    return schema


def _log_class(spec: FileLogSpec) -> type[FileLog]:
    module, name = spec.log_class.split(":")
    found: type[FileLog] = getattr(importlib.import_module(module), name)
    return found


def choose_num_busy(decode_threads: int | None, num_cores: int) -> int:
    """How many threads may decode or make batches at a time: one per core, unless `decode_threads` is set.

    More threads than cores are set for slow files, and most of them wait for I/O.
    """
    return num_cores if decode_threads is None else max(decode_threads, min(2 * decode_threads, num_cores))
