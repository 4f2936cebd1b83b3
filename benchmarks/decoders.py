"""Is our own Parquet decoder worth its code: the same row groups decoded by it and by pyarrow.

Both make the same `RawBlock`s. Two logs: one with M1's features (800 dense float32 columns, 30 lists of about 28 ids) and one like
Criteo's (13 dense, 26 columns of one id), each stored uncompressed, with Snappy and with Zstandard, ids by dictionary. The unit is CPU
time per row, which other work on the machine changes least; with two threads also elapsed time. A ratio above 1 means that our
decoder is faster. Pages have checksums, which all verify; ours also decodes the log without them.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import arguments, publish
from rowstead.data.block import RawBlock
from rowstead.data.buffer_pool import BufferPool
from rowstead.data.columns import ColumnReader
from rowstead.data.rowgroup import find_leaves, plan_group, read_row_group
from rowstead.spec.features import DenseFeatureSpec, FeaturesSpec, SparseFeatureSpec

SHAPES = {"M1": (800, 30, 28, 8_192), "Criteo": (13, 26, 1, 131_072)}
"""Dense columns, sparse columns, mean ids per list, rows per row group."""
CODECS = ("none", "snappy", "zstd")
NUM_GROUPS = 4
UNCHECKED = "ours, no checksums"
Decode = Callable[[int], RawBlock | None]


def write_log(path: Path, shape: str, codec: str, scale: int, *, has_checksums: bool) -> FeaturesSpec:
    """Four row groups; ids are skewed as a log's are."""
    num_dense, num_sparse, mean_ids, group_rows = SHAPES[shape]
    num_rows, rng = group_rows // scale, np.random.default_rng(1)
    kind = pa.list_(pa.int64()) if mean_ids > 1 else pa.int64()
    fields = [(f"d{i}", pa.float32()) for i in range(num_dense)] + [(f"s{i}", kind) for i in range(num_sparse)]
    schema = pa.schema([*fields, ("label", pa.float32())])
    ids_columns = [f"s{i}.list.element" if mean_ids > 1 else f"s{i}" for i in range(num_sparse)]
    options = {"compression": codec, "use_dictionary": ids_columns, "write_page_checksum": has_checksums}
    with pq.ParquetWriter(path, schema, **options) as writer:
        for _ in range(NUM_GROUPS):
            columns: list[Any] = [pa.array(c) for c in rng.standard_normal((num_dense, num_rows), dtype=np.float32)]
            for _ in range(num_sparse):
                counts = rng.poisson(mean_ids, num_rows) if mean_ids > 1 else np.ones(num_rows, np.int64)
                offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
                ids = pa.array(np.exp(rng.random(offsets[-1]) * np.log(5_700_000)).astype(np.int64))
                columns.append(pa.ListArray.from_arrays(pa.array(offsets), ids) if mean_ids > 1 else ids)
            columns.append(pa.array((rng.random(num_rows) < 0.3).astype(np.float32)))
            writer.write_table(pa.table(columns, schema=schema), row_group_size=num_rows)
    return FeaturesSpec(
        dense=tuple(DenseFeatureSpec(name=f"d{i}") for i in range(num_dense)),
        sparse=tuple(SparseFeatureSpec(name=f"s{i}", num_rows=1000) for i in range(num_sparse)),
    )


def decoders(path: Path, features: FeaturesSpec) -> dict[str, Decode]:
    """Each decodes one row group of the file, from the file's bytes in the page cache."""
    columns, metadata, pool = ColumnReader(features, label="label"), pq.read_metadata(path), BufferPool()
    leaves = find_leaves(columns, metadata.schema)
    plans = [plan_group(columns, metadata, group, leaves) for group in range(metadata.num_row_groups)]

    def ours(group: int) -> RawBlock | None:
        plan = plans[group]
        assert plan is not None
        return read_row_group(str(path), plan, columns, lambda: metadata, max_bytes=1 << 40, buffers=pool)

    def by_pyarrow(group: int) -> RawBlock:
        with pq.ParquetFile(path, metadata=metadata, pre_buffer=False, page_checksum_verification=True) as parquet:
            table = parquet.read_row_group(group, columns=list(columns.names), use_threads=False)
        (batch,) = table.combine_chunks().to_batches()
        return columns.block(batch)

    def by_pyarrow_mapped(group: int) -> RawBlock:
        options = {"memory_map": True, "pre_buffer": False, "page_checksum_verification": True}
        with pq.ParquetFile(path, metadata=metadata, **options) as parquet:
            table = parquet.read_row_group(group, columns=list(columns.names), use_threads=False)
        (batch,) = table.combine_chunks().to_batches()
        return columns.block(batch)

    found: dict[str, Decode] = {"ours": ours, "pyarrow": by_pyarrow, "pyarrow, memory-mapped": by_pyarrow_mapped}
    expected = by_pyarrow(0)
    for decode in found.values():
        block = decode(0)
        assert block is not None
        assert np.array_equal(block.dense, expected.dense)
        assert all(np.array_equal(a, b) for a, b in zip(block.ids, expected.ids, strict=True))
    return found


def measure(decode: Decode, threads: int) -> tuple[float, float]:
    """CPU and elapsed seconds of decoding all row groups once."""
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(len, [()] * threads))  # start the threads
        cpu_s, start_s = time.process_time(), time.perf_counter()
        for _ in pool.map(decode, range(NUM_GROUPS)):
            pass
        return time.process_time() - cpu_s, time.perf_counter() - start_s


def main() -> None:
    options = arguments(__doc__).parse_args()
    scale, repeats = (8, 3) if options.quick else (1, 5)
    pa.set_cpu_count(1)
    rows: list[dict[str, Any]] = []
    summary: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        path, unchecked = Path(folder) / "log.parquet", Path(folder) / "unchecked.parquet"
        for shape in SHAPES:
            for codec in CODECS:
                contenders = decoders(path, write_log(path, shape, codec, scale, has_checksums=True))
                without = decoders(unchecked, write_log(unchecked, shape, codec, scale, has_checksums=False))
                contenders[UNCHECKED] = without["ours"]
                num_rows = pq.read_metadata(path).num_rows
                seconds: dict[tuple[str, int], list[tuple[float, float]]] = {}
                for turn in range(repeats + 1):
                    for threads in (1, 2):
                        for name, decode in contenders.items():
                            found = measure(decode, threads)
                            if turn:
                                seconds.setdefault((name, threads), []).append(found)
                medians: dict[tuple[str, int], tuple[float, float]] = {}
                for (name, threads), values in seconds.items():
                    cpu = sorted(cpu for cpu, _ in values)
                    medians[name, threads] = statistics.median(cpu), statistics.median(wall for _, wall in values)
                    row = {"log": shape, "codec": codec, "decoder": name, "threads": threads}
                    row |= {
                        "cpu_us_per_row": 1e6 * medians[name, threads][0] / num_rows,
                        "elapsed_us_per_row": 1e6 * medians[name, threads][1] / num_rows,
                    }
                    rows.append(row | {"cpu_us_min": 1e6 * cpu[0] / num_rows, "cpu_us_max": 1e6 * cpu[-1] / num_rows})
                for threads in (1, 2):
                    peer = min(v[0] for (name, t), v in medians.items() if t == threads and "pyarrow" in name)
                    summary[f"{shape}_{codec}_{threads}_threads_cpu_vs_pyarrow"] = peer / medians["ours", threads][0]
                    cost = medians["ours", threads][0] / medians[UNCHECKED, threads][0]
                    summary[f"{shape}_{codec}_{threads}_threads_cpu_with_checksums"] = cost
    publish("decoders", rows, summary, options, packages=("pyarrow",))


if __name__ == "__main__":
    main()
