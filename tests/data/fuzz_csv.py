"""Damages small CSV and TSV files in many ways, plain and compressed, and reads them as a run and as `rowstead init` would.

Whatever the bytes, reading must end soon, with rows or with a RowsteadError of one printable line that names the file. The same text must
give the same rows, or be refused, whether it is compressed or not and however it is cut into row groups; a recipe that `init` writes must be
a recipe. For many cases, in processes of their own, so that a crash is a case number and not the end:

    python -m tests.data.fuzz_csv --cases 100000
    python -m tests.data.fuzz_csv --start 4711 --cases 1     # one case again
"""

from __future__ import annotations

import csv
import faulthandler
import gzip
import io
import random
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np
import psutil
import pyarrow as pa

from rowstead.data import csv_index
from rowstead.data.describe import describe, infer_features
from rowstead.data.file_log import open_file_log, read_schema
from rowstead.data.first_recipe import write_recipe
from rowstead.data.survey import refine, survey
from rowstead.spec.data import CsvSpec
from rowstead.spec.errors import RowsteadError
from rowstead.spec.features import DenseFeatureSpec, FeaturesSpec, SparseFeatureSpec
from rowstead.spec.parse import parse
from rowstead.spec.run import RunSpec
from rowstead.spec.yaml_text import read_text
from tests.data.fuzz_parquet import content, run_in_processes

FEATURES = FeaturesSpec(
    dense=(DenseFeatureSpec(name="price", missing=0.0), DenseFeatureSpec(name="day", column="when", part="day")),
    sparse=tuple(SparseFeatureSpec(name=name, num_rows=100) for name in ("user", "city", "likes")),
)
TYPES = {"price": "float64", "when": "timestamp", "user": "int64", "city": "string", "likes": "list<int64>", "label": "float64"}
HANGS_AFTER_S = 60.0
"""A case takes some milliseconds."""
MAX_GROWTH_BYTES = 512 << 20
PIECES = (
    *(b'"', b'""', b",", b"\t", b";", b"|", b"\n", b"\r", b"\r\n", b"\0", b"\\", b"\\N", b"'", b" ", b"=", b"\x1b[2J"),
    *(b"\xff\xfe", b"\xef\xbb\xbf", b"\xe9", b"\xc3", b"\xed\xa0\x80", "\u202e\u2028".encode(), "é".encode()),
    *(
        b"nan",
        b"NULL",
        b"inf",
        b"-1e400",
        b"1e308",
        b"9" * 400,
        b"-9223372036854775809",
        b"18446744073709551616",
        b"0x10",
        b"1_0",
    ),
    *(b"9999-99-99", b"-292277-01-01", b"2026-11-01T99:00:00", b"label", b"price", b"city", b",,,,,,", b'"' * 50, b"1|" * 500),
    *(b"# ", b": ", b"{i}", b"{a: &b *b}", b"!!python/object", b"a" * 5000),
)


def build_texts() -> list[tuple[bytes, bool]]:
    """Small texts with other separators and line ends, each with whether its cells may be quoted."""
    rng = np.random.default_rng(0)
    cities = ['say "hi"', "Łódź", "two\nlines", "a, b", "x", ""]
    texts = []
    for separator, end, quotes in ((",", "\n", True), ("\t", "\r\n", False), (";", "\n", True), ("|", "\r", True)):
        out = io.StringIO(newline="")
        quoting = csv.QUOTE_ALL if end == "\r" else csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE
        writer = csv.writer(out, delimiter=separator, lineterminator=end, quoting=quoting)
        writer.writerow(TYPES)
        for row in range(40):
            likes = "/".join(map(str, rng.integers(0, 50, rng.integers(0, 4))))
            city = cities[rng.integers(0, 6)] if quotes else f"city {rng.integers(0, 6)}"
            price = "" if rng.random() < 0.2 else f"{rng.normal():.4f}"
            writer.writerow([price, f"2026-11-{row % 28 + 1:02} 10:00:00", rng.integers(0, 2**40), city, likes, row % 3 % 2])
        texts.append((out.getvalue().encode(), quotes))
    return texts


def damage(whole: bytes, draw: random.Random, *, is_text: bool) -> bytes:
    """Other bytes: flipped, cut out, repeated, moved, or replaced by those that mean something to a reader."""
    data = bytearray(whole)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        at, size = draw.randrange(len(data) + 1), draw.choice((0, 1, 2, 8, 40))
        kind = draw.randrange(6)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            data[at : at + size] = draw.randbytes(draw.choice((1, 4, 30)))
        elif kind == 2:
            del data[at : at + size]
        elif kind == 3:
            start = draw.randrange(len(whole))
            data[at:at] = whole[start : start + size] * draw.choice((1, 1, 2, 100))
        elif kind == 4 and draw.random() < 0.1:
            del data[at:]
        elif is_text:
            data[at : at + size] = draw.choice(PIECES) * draw.choice((1, 1, 1, 3, 200))
        else:
            data[at : at + size] = b"\xff" * size
    return bytes(data)


class Fuzzer:
    """Runs cases by number; the same number is the same case everywhere."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._texts = folder, build_texts()
        self.outcomes: Counter[str] = Counter()
        for text, quotes in self._texts:  # also compiles and imports all that is used
            assert not isinstance(self._read(self._write("whole.csv", text), quotes, "error"), str)
        self._rss_bytes = psutil.Process().memory_info().rss

    def run(self, case: int) -> None:
        """Raise an AssertionError if a case does not end as it must."""
        draw = random.Random(case)
        text, quotes = self._texts[case % len(self._texts)]
        quotes = quotes if draw.random() < 0.8 else not quotes
        faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
        try:
            if draw.random() < 0.3:
                packed = damage(compress(text, draw.choice(("gzip", "zstd"))), draw, is_text=False)
                outcome = self._read(self._write("case.csv", packed), quotes, "skip")
                self.outcomes["compressed: " + name_of(outcome)] += 1
            else:
                self._text(case, damage(text, draw, is_text=True), quotes, draw)
        except Exception as error:
            raise AssertionError(f"case {case} ended with {type(error).__name__}") from error
        finally:
            faulthandler.cancel_dump_traceback_later()
        grown = psutil.Process().memory_info().rss - self._rss_bytes
        assert grown < MAX_GROWTH_BYTES, f"{grown:,} bytes more after case {case}"

    def _text(self, case: int, text: bytes, quotes: bool, draw: random.Random) -> None:
        path, how = self._write("case.csv", text), draw.choice(("error", "skip", "skip"))
        outcome = self._read(path, quotes, how)
        self.outcomes["text: " + name_of(outcome)] += 1
        if draw.random() < 0.3:
            with mock.patch.object(csv_index, "GROUP_ROWS", 7):
                in_groups = self._read(path, quotes, how)
            assert name_of(in_groups) == name_of(outcome), f"case {case} is {in_groups} in small row groups, not {outcome}"
            assert isinstance(outcome, str) or in_groups == outcome, f"case {case} has other rows in small row groups"
        if draw.random() < 0.3 and not starts_like_compressed(text):
            packed = self._read(self._write("case.csv.gz", compress(text, draw.choice(("gzip", "zstd")))), quotes, how)
            assert name_of(packed) == name_of(outcome), f"case {case} is {packed} if it is compressed, not {outcome}"
            assert isinstance(outcome, str) or packed == outcome, f"case {case} has other rows if it is compressed"
        if draw.random() < 0.3:
            self._init(path, quotes)

    def _init(self, path: Path, quotes: bool) -> None:
        """Look at a file as `rowstead init` and `rowstead data describe` do."""
        spec = CsvSpec(train=(str(path),), label="label", quotes=quotes, list_separator="/", decode_threads=1)
        try:
            features, _ = infer_features(read_schema(spec), label="label")
            describe(open_file_log(spec, features, split="all").raw_blocks(), features)
            found = survey(spec)
            statistics = describe(open_file_log(spec, found.features, split="all").raw_blocks(), found.features)
            recipe = write_recipe(spec, refine(found, statistics), statistics)
        except RowsteadError as error:
            check_sentence(error)
            self.outcomes["init: refused"] += 1
            return
        assert parse(RunSpec, read_text(recipe, what="the recipe")).features == refine(found, statistics).features, recipe
        self.outcomes["init: a recipe"] += 1

    def _write(self, name: str, data: bytes) -> Path:
        path = self._folder / name
        path.write_bytes(data)
        return path

    def _read(self, path: Path, quotes: bool, how: str) -> list[bytes] | str:
        """The rows of a file, or why it is refused."""
        spec = CsvSpec(
            train=(str(path),),
            types=TYPES,
            quotes=quotes,
            list_separator="/",
            on_bad_row=how,
            decode_threads=1,  # type: ignore[arg-type]
        )
        try:
            log = open_file_log(spec, FEATURES, split="all")
            blocks = [
                piece.block if piece.good is None else piece.block.take(np.flatnonzero(piece.good))
                for piece in log.pieces(log.spans, rows_ahead=0)
            ]
        except RowsteadError as error:
            refused = error
        else:
            return content(blocks)
        check_sentence(refused)
        assert path.name in str(refused), "no file is named"
        return f"refused: {refused}"


def compress(text: bytes, codec: str) -> bytes:
    half = len(text) // 2
    if codec == "gzip":
        return gzip.compress(text[:half], mtime=0) + gzip.compress(text[half:], mtime=0)
    return b"".join(pa.compress(part, codec="zstd", asbytes=True) for part in (text[:half], text[half:]) if part)


def starts_like_compressed(text: bytes) -> bool:
    """Whether the text begins as a file of another kind does, which only a plain one is taken for."""
    return text.startswith((*csv_index._MAGIC, *csv_index._REFUSED))


def name_of(outcome: list[bytes] | str) -> str:
    return "refused" if isinstance(outcome, str) else "read"


def check_sentence(error: RowsteadError) -> None:
    text = str(error)
    assert 0 < len(text) < 5000, f"an error of {len(text)} characters"


def main() -> int:
    return run_in_processes("tests.data.fuzz_csv", Fuzzer, __doc__)


if __name__ == "__main__":
    sys.exit(main())
