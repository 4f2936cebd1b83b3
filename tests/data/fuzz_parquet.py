"""Damages small Parquet files in many ways, and reads them as a run would.

Whatever the bytes, reading must end, with rows or with a RowsteadError. Where pages have checksums and the footer is whole, the rows must
be the right ones. For many cases, in processes of their own, so that a crash is a case number and not the end:

    python -m tests.data.fuzz_parquet --cases 100000
    python -m tests.data.fuzz_parquet --start 4711 --cases 1     # one case again
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rowstead.data.block import RawBlock
from rowstead.data.parquet import ParquetLog
from rowstead.spec.data import ParquetSpec
from rowstead.spec.errors import RowsteadError
from rowstead.spec.features import DenseFeatureSpec, FeaturesSpec, SparseFeatureSpec

CODECS = ("none", "snappy", "zstd", "gzip", "brotli", "lz4")
FEATURES = FeaturesSpec(
    dense=(DenseFeatureSpec(name="x"), DenseFeatureSpec(name="y", missing=0.0)),
    sparse=tuple(SparseFeatureSpec(name=name, num_rows=100) for name in ("one", "many", "full", "city")),
)
PER_PROCESS = 5_000
HANGS_AFTER_S = 60.0
"""A case takes a few milliseconds."""


def build_files() -> list[tuple[bytes, bool]]:
    """Small files of every codec, page version and encoding, each with whether its pages have checksums."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 5, 60)
    table = pa.table(
        {
            "x": rng.standard_normal(60).astype(np.float32),
            "y": pa.array(rng.integers(0, 9, 60).astype(np.float32), mask=rng.random(60) < 0.2),
            "one": pa.array(rng.integers(0, 2**40, 60)),
            "many": pa.array([rng.integers(0, 50, n).tolist() or None for n in lengths], pa.list_(pa.int64())),
            "full": pa.array([rng.integers(0, 2**40, n + 1).tolist() for n in lengths], pa.list_(pa.int64())),
            "city": [f"city {n}" for n in rng.integers(0, 9, 60)],
            "label": rng.integers(0, 2, 60).astype(np.float32),
        }
    )
    files = []
    for codec, version, dictionary, has_crc in itertools.product(CODECS, ("1.0", "2.0"), (True, False), (True, False)):
        sink = pa.BufferOutputStream()
        pq.write_table(
            table,
            sink,
            compression=codec,
            data_page_version=version,
            use_dictionary=dictionary,
            write_page_checksum=has_crc,
            row_group_size=35,
            data_page_size=100,
            write_batch_size=20,
        )
        files.append((sink.getvalue().to_pybytes(), has_crc))
    return files


def damage(whole: bytes, draw: random.Random) -> tuple[bytes, bool]:
    """Other bytes, and whether the footer is still whole."""
    data, footer_at = bytearray(whole), len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    in_footer = draw.random() < 0.25
    low, high = (footer_at, len(whole)) if in_footer else (4, footer_at)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        at, size = draw.randrange(low, high), draw.choice((1, 1, 2, 4, 8, 40))
        size = min(size, high - at)
        kind = draw.randrange(6)
        if kind == 0:
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            data[at : at + size] = draw.choice((b"\xff", b"\x00", b"\x80")) * size
        elif kind == 2:
            data[at : at + size] = draw.randbytes(size)
        elif kind == 3:  # bytes of elsewhere
            start = draw.randrange(len(whole) - size)
            data[at : at + size] = whole[start : start + size]
        elif kind == 4:  # all that follows moves up or down, and the file keeps its length
            inside = data[at:high]
            moved = inside[size:] + inside[:size] if draw.random() < 0.5 else inside[-size:] + inside[:-size]
            data[at:high] = moved
        elif draw.random() < 0.1:
            return bytes(data[:at]), False
        else:
            data[at] = draw.randrange(256)
    return bytes(data), data[footer_at:] == whole[footer_at:]


def read_rows(path: Path) -> list[RawBlock]:
    """All rows of a file, as a run reads them."""
    return list(ParquetLog(ParquetSpec(train=(str(path),), decode_threads=1), FEATURES, split="all").raw_blocks())


def content(blocks: list[RawBlock]) -> list[bytes]:
    """Rows as bytes that can be compared."""
    dense = [np.concatenate([block.dense for block in blocks]), np.concatenate([block.labels for block in blocks])]
    lengths = [np.concatenate([np.diff(block.offsets[f]) for block in blocks]) for f in range(len(blocks[0].ids))]
    ids = [np.concatenate([block.ids[f] for block in blocks]) for f in range(len(blocks[0].ids))]
    return [array.tobytes() for array in (*dense, *lengths, *ids)]


class Fuzzer:
    """Runs cases by number; the same number is the same case everywhere."""

    def __init__(self, folder: Path) -> None:
        self._path, self._files = folder / "case.parquet", build_files()
        self._path.write_bytes(self._files[0][0])
        self._rows = content(read_rows(self._path))
        self.outcomes: Counter[str] = Counter()

    def run(self, case: int) -> None:
        """Raise an AssertionError if a case does not end as it must."""
        draw = random.Random(case)
        whole, has_crc = self._files[case % len(self._files)]
        data, has_footer = damage(whole, draw)
        self._path.write_bytes(data)
        faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
        try:
            rows = content(read_rows(self._path))
        except RowsteadError as error:
            if "case.parquet" not in str(error):
                raise AssertionError(f"case {case}: no file is named") from error
            self.outcomes["refused"] += 1
            return
        except Exception as error:
            raise AssertionError(f"case {case} ended with a traceback") from error
        finally:
            faulthandler.cancel_dump_traceback_later()
        is_right = rows == self._rows
        assert is_right or not (has_crc and has_footer), f"case {case} was read wrongly, although its pages have checksums"
        self.outcomes["right" if is_right else "wrong, unnoticed"] += 1


def run_in_processes(module: str, fuzzer: Callable[[Path], Any], description: str | None) -> int:
    """The command line of a fuzzer: its cases, some thousand in each process, and the exit code."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--here", action="store_true", help="in this process")
    options = parser.parse_args()
    stop, began_s, num_failed = options.start + options.cases, time.monotonic(), 0
    if options.here or options.cases == 1:
        with tempfile.TemporaryDirectory() as folder:
            here = fuzzer(Path(folder))
            for case in range(options.start, stop):
                print(case, file=sys.stderr, flush=True)
                here.run(case)
            print(dict(here.outcomes))
        return 0
    start = options.start
    while start < stop:
        count = min(PER_PROCESS, stop - start)
        command = [sys.executable, "-m", module, "--here", "--start", str(start), "--cases", str(count)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        case, reason = start + count - 1, ""
        if done.returncode:
            started = [line for line in done.stderr.splitlines() if line.isdecimal()]
            case, reason = int(started[-1]), done.stderr[done.stderr.rindex(started[-1]) :]
        print(f"{case + 1 - options.start:,} cases, {time.monotonic() - began_s:.0f} s: {done.stdout.strip()}", flush=True)
        if done.returncode:
            num_failed += 1
            print(f"case {case} failed ({done.returncode}): {reason.strip()[-3000:]}", flush=True)
        start = case + 1
    return int(num_failed > 0)


def main() -> int:
    return run_in_processes("tests.data.fuzz_parquet", Fuzzer, __doc__)


if __name__ == "__main__":
    sys.exit(main())
