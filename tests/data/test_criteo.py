"""Criteo's text to Parquet, against a slow and plain parser."""

from __future__ import annotations

import gzip
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowstead.data.criteo import SCHEMA, convert
from rowstead.data.criteo_parse import explain, parse_lines
from rowstead.data.describe import describe, infer_features
from rowstead.data.lines import chunks
from rowstead.data.parquet import ParquetLog
from rowstead.spec.data import ParquetSpec
from rowstead.spec.errors import DataError

WRONG_FIELDS, BAD_LABEL = "wrong number of fields, expected 40", "label is not 0 or 1"
BAD_INTEGER, BAD_ID = "not an integer", "not a hexadecimal id"
DIGITS, HEX = set(b"0123456789"), set(b"0123456789abcdefABCDEF")


def plain_parse(text: bytes) -> tuple[list[list[Any]], list[tuple[int, str]]]:
    """Rows, and (line from 1, reason) of the bad ones: the format's definition, read slowly."""
    rows, bad = [], []
    lines = text.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    for number, line in enumerate(lines, 1):
        fields = line.removesuffix(b"\r").split(b"\t")
        if len(fields) != 40:
            bad.append((number, WRONG_FIELDS))
            continue
        if fields[0] not in (b"0", b"1"):
            bad.append((number, BAD_LABEL))
            continue
        row: list[Any] = [int(fields[0])]
        reason = ""
        for index, field in enumerate(fields[1:]):
            if field == b"":
                row.append(None)
            elif index < 13:
                digits = field.removeprefix(b"-")
                if not digits or not set(digits) <= DIGITS or len(digits) > 18:
                    reason = BAD_INTEGER
                    break
                row.append(float(np.float32(int(field))))
            else:
                if not set(field) <= HEX or len(field) > 16:
                    reason = BAD_ID
                    break
                row.append(int(np.uint64(int(field, 16)).astype(np.int64)))
        if reason:
            bad.append((number, reason))
        else:
            rows.append(row)
    return rows, bad


def fast_parse(text: bytes, chunk_bytes: int) -> tuple[list[list[Any]], list[tuple[int, str]]]:
    rows, bad = [], []
    for chunk in chunks(io.BytesIO(text), chunk_bytes):
        parsed = parse_lines(chunk.data, chunk.num_lines)
        values = np.concatenate([parsed.integers.astype(object), parsed.ids.astype(object)])
        filled = np.where(parsed.present, values, None)
        rows += [[int(label), *row] for label, row in zip(parsed.labels, filled.T.tolist(), strict=True)]
        bad += [(chunk.first_line + line, explain(chunk.data[i:j])[0]) for line, i, j in parsed.bad.tolist()]
    return rows, bad


integers = st.one_of(st.just(b""), st.integers(-(10**6), 10**18 - 1).map(lambda n: str(n).encode()))
hexes = st.one_of(
    st.just(b""), st.integers(0, 2**32 - 1).map(lambda n: b"%08x" % n), st.integers(0, 2**64 - 1).map(lambda n: b"%X" % n)
)
good_lines = st.tuples(
    st.sampled_from([b"0", b"1"]), st.lists(integers, min_size=13, max_size=13), st.lists(hexes, min_size=26, max_size=26)
).map(lambda parts: [parts[0], *parts[1], *parts[2]])


@st.composite
def any_lines(draw: st.DrawFn) -> bytes:
    """A line that is good, or has a field that may be wrong, or too few or too many fields."""
    fields = draw(good_lines)
    if draw(st.booleans()):
        index = draw(st.integers(0, 39))
        odd = st.one_of(
            st.binary(max_size=20).map(lambda b: b.replace(b"\n", b"")),
            st.sampled_from(
                [b"-", b"--1", b"1.5", b"+1", b" 1", b"2", b"g", b"12g", b"1" * 19, b"f" * 17, b"\r", b"\r5", b"\xff", b"\x00"]
            ),
        )
        fields[index] = draw(odd)
    elif draw(st.booleans()):
        fields = fields[: draw(st.integers(0, 39))] if draw(st.booleans()) else [*fields, b""]
    return b"\t".join(fields)


@settings(max_examples=120, deadline=None)
@given(
    lines=st.lists(any_lines(), max_size=6),
    ends=st.lists(st.sampled_from([b"\n", b"\r\n"]), min_size=6, max_size=6),
    last=st.booleans(),
    chunk_bytes=st.integers(1, 600),
)
def test_parser_agrees_with_the_plain_one_for_any_bytes_and_chunks(
    lines: list[bytes], ends: list[bytes], last: bool, chunk_bytes: int
) -> None:
    text = b"".join(line + end for line, end in zip(lines, ends, strict=False))
    if not last:
        text = text.removesuffix(b"\n")
    assert fast_parse(text, chunk_bytes) == plain_parse(text)


@settings(max_examples=100, deadline=None)
@given(text=st.binary(max_size=300), chunk_bytes=st.integers(1, 64))
def test_any_bytes_at_all_are_survived(text: bytes, chunk_bytes: int) -> None:
    assert fast_parse(text, chunk_bytes) == plain_parse(text)


def line(i: int, label: int | None = None) -> bytes:
    rng = np.random.default_rng(i)
    fields = [str(i % 2 if label is None else label)]
    fields += ["" if rng.random() < 0.2 else str(rng.integers(-2, 1000)) for _ in range(13)]
    fields += ["" if rng.random() < 0.2 else f"{rng.integers(0, 2**32):08x}" for _ in range(26)]
    return "\t".join(fields).encode() + b"\n"


def text_of(num_lines: int) -> bytes:
    return b"".join(line(i) for i in range(num_lines))


def rows_in(folder: Path, split: str) -> list[list[Any]]:
    files = sorted(folder.glob(f"{split}-*.parquet"))
    return [list(row.values()) for path in files for row in pq.read_table(path).to_pylist()]


def test_last_lines_are_held_out_and_nothing_is_lost(tmp_path: Path) -> None:
    text = text_of(101)
    (tmp_path / "a.txt").write_bytes(text[: text.index(b"\n", len(text) // 3) + 1])
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text[text.index(b"\n", len(text) // 3) + 1 :].removesuffix(b"\n")))
    steps: list[tuple[int, int]] = []
    summary = convert(
        [tmp_path / "a.txt", tmp_path / "b.txt.gz"],
        tmp_path / "out",
        eval_fraction=0.2,
        rows_per_file=30,
        progress=lambda *s: steps.append(s),
        chunk_bytes=1000,
    )
    expected, _ = plain_parse(text)
    assert rows_in(tmp_path / "out", "train") == expected[:81]
    assert rows_in(tmp_path / "out", "eval") == expected[81:]
    assert summary.num_rows == {"train": 81, "eval": 20}
    assert len(summary.files["train"]) == 3
    assert summary.num_skipped == 0
    assert steps[-1][0] == steps[-1][1]
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert pq.read_schema(summary.files["train"][0]).equals(SCHEMA)


def test_split_by_hash_does_not_depend_on_chunks_and_takes_about_the_share(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(text_of(500))
    for name, chunk_bytes in (("one", 100), ("two", 1 << 20)):
        convert([tmp_path / "a.txt"], tmp_path / name, split="hash", eval_fraction=0.3, chunk_bytes=chunk_bytes)
    held = rows_in(tmp_path / "one", "eval")
    assert held == rows_in(tmp_path / "two", "eval")
    assert 110 < len(held) < 190
    assert sorted(map(str, held + rows_in(tmp_path / "one", "train"))) == sorted(map(str, plain_parse(text_of(500))[0]))


def test_what_is_written_can_be_read_and_described(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(text_of(300))
    summary = convert([tmp_path / "a.txt"], tmp_path / "out", rows_per_file=100, rows_per_group=40)
    features, _ = infer_features(pq.read_schema(summary.files["train"][0]))
    reader = ParquetLog(ParquetSpec(train=(str(tmp_path / "out" / "train-*.parquet"),)), features, split="all")
    found = describe(reader.raw_blocks(), features)
    rows = plain_parse(text_of(270))[0]
    assert (found.num_rows, found.label_mean) == (270, pytest.approx(np.mean([row[0] for row in rows])))
    assert [one.name for one in found.dense] == [f"I{i}" for i in range(1, 14)]
    for index, one in enumerate(found.sparse):
        values = [row[14 + index] for row in rows]
        assert one.num_distinct == len(set(values) - {None})
        assert one.empty_share == pytest.approx(values.count(None) / 270)
    for index, dense in enumerate(found.dense):
        given = [row[1 + index] for row in rows if row[1 + index] is not None]
        assert dense.mean == pytest.approx(np.mean(given))
        assert dense.missing_share == pytest.approx(1 - len(given) / 270)


def test_named_files_are_the_evaluation_split(tmp_path: Path) -> None:
    for day in range(3):
        (tmp_path / f"day_{day}").write_bytes(b"".join(line(i) for i in range(day * 10, day * 10 + 10)))
    summary = convert([tmp_path / "day_0", tmp_path / "day_1"], tmp_path / "out", eval_files=[tmp_path / "day_2"])
    assert summary.num_rows == {"train": 20, "eval": 10}
    assert rows_in(tmp_path / "out", "eval") == plain_parse(text_of(30))[0][20:]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (b"0\t1\n", r"wrong number of fields, expected 40 \(2 in the line '0\\t1'\)"),
        (b"\n", r"expected 40 \(the line is empty\)"),
        (line(3).replace(b"1\t", b"2\t", 1), r"label is not 0 or 1 \(label is '2'\)"),
        (b"1" + b"\tx" + b"\t" * 38 + b"\n", r"not an integer \(I1 is 'x'\)"),
        (b"1" + b"\t" * 12 + b"\t1.5" + b"\t" * 26 + b"\n", r"not an integer \(I13 is '1.5'\)"),
        (b"1" + b"\t" * 14 + b"zz" + b"\t" * 25 + b"\n", r"not a hexadecimal id \(C1 is 'zz'\)"),
        (b"1" + b"\t" * 39 + b"\xff\n", r"not a hexadecimal id \(C26 is '\\xff'\)"),
        (b"1" + b"\t" * 39 + b"a" * 17 + b"\n", r"C26 is 'a+', over 16 digits"),
        (b"x" * (3 << 20) + b"\n", r"line too long|wrong number of fields"),
    ],
)
def test_a_malformed_line_is_named_or_skipped(tmp_path: Path, bad: bytes, words: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(text_of(7) + bad + text_of(5))
    with pytest.raises(DataError, match=rf"a\.txt:line 8: .*{words}.*; fix it or pass --on-bad-row skip"):
        convert([path], tmp_path / "out", chunk_bytes=1 << 20)
    assert list((tmp_path / "out").iterdir()) == []
    summary = convert([path], tmp_path / "out", on_bad_row="skip", eval_fraction=0, chunk_bytes=1 << 20)
    assert summary.num_skipped == 1
    assert "line 8" in summary.first_skipped[0]
    assert summary.num_rows["train"] == 12


def test_skipped_lines_are_counted_by_reason(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(text_of(5) + b"junk\n" * 100 + b"9" + line(1)[1:] + text_of(5))
    summary = convert([path], tmp_path / "out", on_bad_row="skip", split="hash", eval_fraction=0.5)
    assert dict(summary.skipped) == {"wrong number of fields, expected 40": 100, "label is not 0 or 1": 1}
    assert len(summary.first_skipped) == 5


def test_a_line_longer_than_memory_should_hold_is_skipped_whole() -> None:
    found = list(chunks(io.BytesIO(b"a\n" + b"x" * 100 + b"\nb\nc"), 7, max_line_bytes=20))
    assert [(c.first_line, c.too_long) for c in found if c.too_long] == [(2, True)]
    assert [(c.first_line, c.data) for c in found if not c.too_long] == [(1, b"a\n"), (3, b"b\n"), (4, b"c\n")]


def test_kaggle_test_file_without_labels_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "test.txt").write_bytes(b"".join(line(i)[2:] for i in range(5)))
    with pytest.raises(DataError, match=r"no label, like Kaggle's test\.txt"):
        convert([tmp_path / "test.txt"], tmp_path / "out", on_bad_row="skip")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (gzip.compress(text_of(50), mtime=0)[:-20], "cannot read .*"),
        (gzip.compress(text_of(50), mtime=0)[:40] + b"\x00" * 60, "cannot read .*"),
        (gzip.compress(b"\0" * 257 + b"ustar" + b"\0" * 300, mtime=0), "is a tar archive"),
        (b"junk\n" * 10, "could be parsed"),
    ],
)
def test_files_that_are_no_log_get_a_clear_error(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "a.gz").write_bytes(content)
    with pytest.raises(DataError, match=words):
        convert([tmp_path / "a.gz"], tmp_path / "out", on_bad_row="skip")


def test_inputs_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(text_of(5))
    for inputs, options, words in (
        ([], {}, "at least one file"),
        ([tmp_path / "none"], {}, "does not exist"),
        ([tmp_path], {}, "is a folder"),
        ([path, path], {}, "listed twice"),
        ([path], {"eval_files": [path]}, "listed twice"),
        ([path], {"eval_files": [path], "eval_fraction": 0.1}, "not both"),
        ([path], {"eval_fraction": 1.0}, "below 1"),
        ([path], {"eval_fraction": 0.01}, "the evaluation split has no rows"),
    ):
        with pytest.raises(DataError, match=words):
            convert(inputs, tmp_path / "out", **options)  # type: ignore[arg-type]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    program = (
        "import sys; from rowstead.data.criteo import convert; "
        "convert([sys.argv[1]], sys.argv[2], chunk_bytes=1 << 18, rows_per_group=5000); "
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    peaks = []
    for times in (200, 1200):
        (tmp_path / f"{times}.txt").write_bytes(text_of(200) * times)
        command = [sys.executable, "-c", program, str(tmp_path / f"{times}.txt"), str(tmp_path / str(times))]
        peaks.append(int(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    grown = (tmp_path / "1200.txt").stat().st_size - (tmp_path / "200.txt").stat().st_size
    assert grown > 45 << 20
    assert (peaks[1] - peaks[0]) << 10 < grown / 3
