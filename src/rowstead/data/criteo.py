"""Converts Criteo's Kaggle and Terabyte click logs (tab-separated text, plain or gzipped) to Parquet, in bounded memory.

Columns: `label` (int8), `I1` to `I13` (float32, null where empty) and `C1` to `C26` (int64, the hexadecimal id as a number,
null where empty). Lines stay in their order, which is that of time.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal, cast

import numpy as np
import pyarrow as pa

from rowstead.data.criteo_parse import NUM_FIELDS, NUM_IDS, NUM_INTEGERS, Parsed, explain, parse_lines
from rowstead.data.files import check_regular
from rowstead.data.lines import CHUNK_BYTES, BadLines, Chunk, LineReader, check_eval_fraction, select_by_hash
from rowstead.data.write import DEFAULT_ROWS_PER_FILE, DEFAULT_ROWS_PER_GROUP, OnBadRow, Progress, SplitWriter, Summary
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
    sizes = {path: path.stat().st_size for path in (*train, *held_out)}
    total_bytes = sum(sizes[path] for path in (*train, *(train if by_time else []), *held_out))
    reader, bad = LineReader(total_bytes, chunk_bytes, progress), BadLines(on_bad_row)
    with SplitWriter(
        out_folder,
        SCHEMA,
        rows_per_file=rows_per_file,
        rows_per_group=rows_per_group,
        overwrite=overwrite,
        dictionary_columns=[name for name in SCHEMA.names if name[0] in "IC"],
    ) as writer:
        quiet = BadLines("skip")  # the second pass reports them
        num_lines = sum(chunk.num_lines for path in train for chunk in _read(path, reader, quiet)) if by_time else 0
        cut = num_lines - round(num_lines * fraction)
        line = 0
        for number, path in enumerate(train):
            for chunk, parsed in _parse_file(path, reader, bad):
                if by_time:
                    held = line + parsed.lines >= cut
                else:
                    file = np.full(parsed.lines.size, number, np.int64)
                    held = select_by_hash(file, chunk.first_line + parsed.lines, fraction)
                line += chunk.num_lines
                writer.write_by_mask(_table(parsed), held)
        for path in held_out:
            for _, parsed in _parse_file(path, reader, bad):
                writer.write("eval", _table(parsed))
        if not any(writer.num_rows().values()):
            raise DataError(f"no line of {', '.join(map(str, train))} could be parsed; the first: {bad.first[0]}")
        writer.check_not_empty(eval_wanted=bool(fraction or held_out))
    return writer.summary(num_bytes_read=sum(sizes.values()), skipped=bad.counts, first_skipped=bad.first)


def _check_inputs(train: Sequence[Path], held_out: Sequence[Path]) -> None:
    """Raise a DataError for inputs that are missing, empty, folders or duplicates."""
    if not train:
        raise DataError("give at least one file to convert")
    seen: set[Path] = set()
    for path in (*train, *held_out):
        if path.is_dir():
            raise DataError(f"{path} is a folder; list the files in it")
        if not path.exists():
            raise DataError(f"{path} does not exist")
        check_regular(path)
        if path.stat().st_size == 0:
            raise DataError(f"{path} is empty")
        if (real := path.resolve()) in seen:
            raise DataError(f"{path} is listed twice")
        seen.add(real)


def _read(path: Path, reader: LineReader, bad: BadLines) -> Iterator[Chunk]:
    """The lines of a file, plain or gzipped; errors of the disk and of the compression become DataErrors."""
    try:
        with open(path, "rb") as raw:
            zipped = raw.peek(2)[:2] == b"\x1f\x8b"
            stream = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if zipped else raw
            yield from reader.read(str(path), stream, bad, raw.tell)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error or 'unexpected end of file'}") from error


def _parse_file(path: Path, reader: LineReader, bad: BadLines) -> Iterator[tuple[Chunk, Parsed]]:
    """The chunks of one file, raw and parsed; malformed lines go to `bad`."""
    for chunk in _read(path, reader, bad):
        if chunk.first_line == 1 and chunk.data[257:262] == b"ustar":
            raise DataError(f"{path} is a tar archive; unpack it (`tar xf`) and give the .txt files in it")
        parsed = parse_lines(chunk.data, chunk.num_lines)
        for line, start, stop in parsed.bad.tolist():
            text = chunk.data[start:stop]
            if chunk.first_line + line == 1 and text.count(b"\t") == NUM_FIELDS - 2:
                raise DataError(
                    f"{path} has {NUM_FIELDS - 1} fields per line and no label, like Kaggle's test.txt. "
                    "Convert train.txt; part of it becomes the evaluation split"
                )
            bad.add(str(path), chunk.first_line + line, *explain(text))
        yield chunk, parsed


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
