"""Converts Criteo's Kaggle and Terabyte click logs (tab-separated text, plain or gzipped) to Parquet, in bounded memory.

Columns: `label` (int8), `I1` to `I13` (float32, null where empty) and `C1` to `C26` (int64, the hexadecimal id as a number,
null where empty). Lines stay in their order, which is that of time.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowstead.data.criteo_parse import (
    MAX_HEX_DIGITS,
    NUM_FIELDS,
    NUM_IDS,
    NUM_INTEGERS,
    REASONS,
    WRONG_FIELDS,
    Parsed,
    parse_lines,
)
from rowstead.data.lines import (
    CHUNK_BYTES,
    MAX_LINE_BYTES,
    NUM_SHOWN,
    BadLines,
    Chunk,
    check_eval_fraction,
    chunks,
    format_bytes,
    select_by_hash,
)
from rowstead.data.write import (
    DEFAULT_ROWS_PER_FILE,
    DEFAULT_ROWS_PER_GROUP,
    OnBadRow,
    Progress,
    SplitWriter,
    Summary,
    check_splits_not_empty,
)
from rowstead.spec.errors import DataError

SCHEMA = pa.schema(
    [
        pa.field("label", pa.int8(), nullable=False),
        *(pa.field(f"I{i + 1}", pa.float32()) for i in range(NUM_INTEGERS)),
        *(pa.field(f"C{i + 1}", pa.int64()) for i in range(NUM_IDS)),
    ]
)
DEFAULT_EVAL_FRACTION = 0.1


def convert(
    inputs: Sequence[str | os.PathLike[str]],
    out_folder: str | os.PathLike[str],
    *,
    split: Literal["time", "hash"] = "time",
    eval_fraction: float | None = None,
    eval_files: Sequence[str | os.PathLike[str]] = (),
    on_bad_row: OnBadRow = "error",
    rows_per_file: int = DEFAULT_ROWS_PER_FILE,
    rows_per_group: int = DEFAULT_ROWS_PER_GROUP,
    overwrite: bool = False,
    progress: Progress | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Summary:
    """Convert `inputs`, in this order, to Parquet files in `out_folder`.

    The evaluation split is `eval_files` if given (such as the Terabyte log's last day), else a share `eval_fraction` of the lines of
    `inputs` (default 0.1, 0 for none): the last ones (`time`), or lines chosen by a hash of file and line number (`hash`). With `time`
    the files are read twice, to count their lines first.
    """
    if eval_files and eval_fraction is not None:
        raise DataError("give either --eval-file or --eval-fraction, not both")
    fraction = 0.0 if eval_files else DEFAULT_EVAL_FRACTION if eval_fraction is None else eval_fraction
    check_eval_fraction(fraction)
    train, held_out = [Path(path) for path in inputs], [Path(path) for path in eval_files]
    _check_inputs(train, held_out)
    by_time = split == "time" and fraction > 0
    report = _Reading([*train, *(train if by_time else []), *held_out], progress)
    bad = BadLines(on_bad_row)
    with SplitWriter(
        out_folder,
        SCHEMA,
        rows_per_file=rows_per_file,
        rows_per_group=rows_per_group,
        overwrite=overwrite,
        dictionary_columns=_WITH_DICTIONARY,
    ) as writer:
        num_lines = sum(_count_lines(path, report) for path in train) if by_time else 0
        cut = num_lines - round(num_lines * fraction) if by_time else None
        line = 0
        for number, path in enumerate(train):
            for chunk, parsed in _parse_file(path, report, bad, chunk_bytes):
                if cut is not None:
                    held = line + parsed.lines >= cut
                elif fraction:
                    held = select_by_hash(
                        np.full(parsed.lines.size, number, np.int64), chunk.first_line + parsed.lines, fraction
                    )
                else:
                    held = np.zeros(parsed.lines.size, np.bool_)
                line += chunk.num_lines
                _write(writer, _table(parsed), held)
        for path in held_out:
            for _, parsed in _parse_file(path, report, bad, chunk_bytes):
                writer.write("eval", _table(parsed))
        if not any(writer.num_rows().values()):
            raise DataError(f"no line of {', '.join(map(str, train))} could be parsed; the first: {bad.first[0]}")
        check_splits_not_empty(writer.num_rows(), eval_wanted=bool(fraction or held_out))
    return writer.summary(
        num_bytes_read=sum(path.stat().st_size for path in (*train, *held_out)), skipped=bad.counts, first_skipped=bad.first
    )


_WITH_DICTIONARY = [name for name in SCHEMA.names if name[0] in "IC"]


def _check_inputs(train: Sequence[Path], held_out: Sequence[Path]) -> None:
    """Raise a DataError for inputs that are missing, empty, folders or duplicates."""
    if not train:
        raise DataError("give at least one file to convert")
    seen: set[Path] = set()
    for path in (*train, *held_out):
        if path.is_dir():
            raise DataError(f"{path} is a folder; list the files in it")
        if not path.is_file():
            raise DataError(f"{path} does not exist")
        if path.stat().st_size == 0:
            raise DataError(f"{path} is empty")
        if (real := path.resolve()) in seen:
            raise DataError(f"{path} is listed twice")
        seen.add(real)


class _Reading:
    """Opens inputs and reports progress."""

    def __init__(self, paths: Sequence[Path], progress: Progress | None) -> None:
        self._progress = progress
        self._total = sum(path.stat().st_size for path in paths)
        self._before = 0
        self._raw: BinaryIO | None = None

    @contextmanager
    def open(self, path: Path) -> Iterator[BinaryIO]:
        """The decompressed bytes of a file; errors of the disk and of the compression become DataErrors."""
        try:
            with open(path, "rb") as raw:
                self._raw = raw
                zipped = raw.peek(2)[:2] == b"\x1f\x8b"
                yield cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if zipped else raw
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"cannot read {path}: {error or 'unexpected end of file'}") from error
        finally:
            self._raw = None
        self._before += path.stat().st_size

    def advance(self) -> None:
        """Report the bytes read so far."""
        if self._progress and self._raw is not None:
            self._progress(self._before + self._raw.tell(), self._total)


def _count_lines(path: Path, report: _Reading) -> int:
    num_lines, last = 0, b"\n"
    with report.open(path) as stream:
        while data := stream.read(CHUNK_BYTES):
            num_lines += data.count(b"\n")
            last = data[-1:]
            report.advance()
    return num_lines + (last != b"\n")


def _parse_file(path: Path, report: _Reading, bad: BadLines, chunk_bytes: int) -> Iterator[tuple[Chunk, Parsed]]:
    """The chunks of one file, raw and parsed; malformed lines go to `bad`."""
    with report.open(path) as stream:
        for chunk in chunks(stream, chunk_bytes):
            if chunk.first_line == 1 and chunk.data[257:262] == b"ustar":
                raise DataError(f"{path} is a tar archive; unpack it (`tar xf`) and give the .txt files in it")
            if chunk.too_long:
                bad.add(
                    str(path),
                    chunk.first_line,
                    "line too long",
                    f"over {MAX_LINE_BYTES} bytes, begins {format_bytes(chunk.data)}",
                )
                yield chunk, parse_lines(b"", 0)
                continue
            parsed = parse_lines(chunk.data, chunk.num_lines)
            if len(parsed.bad):
                _report_bad(path, chunk, parsed.bad, bad)
            yield chunk, parsed
            report.advance()


def _report_bad(path: Path, chunk: Chunk, found: NDArray[np.int64], bad: BadLines) -> None:
    line, reason, number = (int(value) for value in found[0, :3])
    if chunk.first_line + line == 1 and reason == WRONG_FIELDS and number == NUM_FIELDS - 1:
        raise DataError(
            f"{path} has {NUM_FIELDS - 1} fields per line and no label, like Kaggle's test.txt. "
            "Convert train.txt; part of it becomes the evaluation split"
        )
    for line, reason, number, start, stop in found[:NUM_SHOWN].tolist():
        bad.add(str(path), chunk.first_line + line, REASONS[reason], _detail(reason, number, chunk.data[start:stop]))
    for reason, count in enumerate(np.bincount(found[NUM_SHOWN:, 1]).tolist()):
        if count:
            bad.count(REASONS[reason], count)


def _detail(reason: int, number: int, field: bytes) -> str:
    """The bad field or line, for a message."""
    if reason == WRONG_FIELDS:
        return f"{number} in the line {format_bytes(field)}" if field else "the line is empty"
    name = "label" if number == 0 else f"I{number}" if number <= NUM_INTEGERS else f"C{number - NUM_INTEGERS}"
    hint = f", over {MAX_HEX_DIGITS} digits" if name[0] == "C" and len(field) > MAX_HEX_DIGITS else ""
    return f"{name} is {format_bytes(field)}{hint}"


def _table(parsed: Parsed) -> pa.Table:
    """Parsed rows as Arrow columns, sharing their memory."""
    num_rows = parsed.labels.size
    bits = np.packbits(parsed.present, axis=1, bitorder="little")
    missing = num_rows - parsed.present.sum(axis=1)
    columns = [pa.array(parsed.labels)]
    for i, values in enumerate((*parsed.integers, *parsed.ids)):
        kind = pa.float32() if i < NUM_INTEGERS else pa.int64()
        valid = pa.py_buffer(bits[i]) if missing[i] else None
        columns.append(pa.Array.from_buffers(kind, num_rows, [valid, pa.py_buffer(values)], int(missing[i])))
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def _write(writer: SplitWriter, table: pa.Table, held: NDArray[np.bool_]) -> None:
    """Write held-out rows to the evaluation split and the others to the training split."""
    for split, mask in (("train", ~held), ("eval", held)):
        if mask.all():
            writer.write(split, table)
        elif mask.any():
            writer.write(split, table.filter(pa.array(mask)))
