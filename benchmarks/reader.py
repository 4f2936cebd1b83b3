"""How fast does Parquet with M1's features become ready batches, and does memory grow with the file?

The file has 800 dense columns, 30 columns of about 28 ids each (Poisson) and a label, and is stored in two ways: as `rowstead
data synth` stores a log (ids by dictionary, nothing compressed), which the summary is about, and by pyarrow's defaults (all by
dictionary, Snappy), whose ratio stands beside it. We read it with FileSource, shuffled; the
peer is pandas.read_parquet and a shuffling torch DataLoader, in the better of two forms: rows collated one by one, or a batch
sampler that takes whole columns. Both end with the same tensors (dense, hashed ids, offsets, labels). Both run on one and the
same core with one thread to a library; the unit is samples per second of CPU time (user and system) of the whole process, from
opening the file to the last batch. Peak memory is that of a fresh process which reads the file once.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import alternate, arguments, publish, spread
from rowstead.spec.data import ParquetSpec
from rowstead.spec.features import DenseFeatureSpec, FeaturesSpec, SparseFeatureSpec, tables_of

NUM_DENSE, NUM_SPARSE, MEAN_IDS, NUM_ROWS = 800, 30, 28, 5_700_000
GROUP_ROWS, QUICK_GROUP_ROWS = 8_192, 2_048
"""Rows of a row group, and rows that are shuffled together. Files have 4 row groups and 16."""
BATCH_SIZE = 1_024

FEATURES = FeaturesSpec(
    dense=(DenseFeatureSpec(name="dense_{i}", repeat=NUM_DENSE),),
    sparse=(SparseFeatureSpec(name="sparse_{i}", repeat=NUM_SPARSE, num_rows=NUM_ROWS),),
)


STORED = {
    "as synth": {"compression": "none", "use_dictionary": [f"sparse_{i}.list.element" for i in range(NUM_SPARSE)]},
    "pyarrow defaults": {},
}
"""How files are stored, by name."""


def write_log(path: Path, num_rows: int, group_rows: int, stored: str = "as synth") -> None:
    """A log with M1's features, written one row group at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(1)
    fields = [(f"dense_{i}", pa.float32()) for i in range(NUM_DENSE)]
    fields += [(f"sparse_{i}", pa.list_(pa.int64())) for i in range(NUM_SPARSE)] + [("label", pa.float32())]
    schema = pa.schema(fields)
    with pq.ParquetWriter(path, schema, **STORED[stored]) as writer:
        for start in range(0, num_rows, group_rows):
            rows = min(group_rows, num_rows - start)
            columns: list[Any] = list(rng.standard_normal((NUM_DENSE, rows), dtype=np.float32))
            for _ in range(NUM_SPARSE):
                offsets = np.concatenate([[0], np.cumsum(rng.poisson(MEAN_IDS, rows))]).astype(np.int32)
                # Skewed ids: the density of id x falls as 1/x.
                ids = np.exp(rng.random(offsets[-1]) * np.log(NUM_ROWS)).astype(np.int64)
                columns.append(pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids)))
            columns.append((rng.random(rows) < 0.3).astype(np.float32))
            writer.write_table(pa.table([pa.array(c) for c in columns], schema=schema), row_group_size=group_rows)


def read_with_rowstead(path: Path, shuffle_rows: int) -> int:
    """One epoch of batches; the number of examples."""
    from rowstead.data.encode import Encoder
    from rowstead.data.file_source import FileSource
    from rowstead.data.parquet import ParquetLog
    from rowstead.data.transforms import DenseTransforms

    spec = ParquetSpec(train=(str(path),), shuffle_rows=shuffle_rows, decode_threads=1)
    encoder = Encoder(FEATURES, tables_of(FEATURES, width=64), DenseTransforms.learn(FEATURES))
    source = FileSource(ParquetLog(spec, FEATURES, split="all"), encoder, seed=1)
    return sum(batch.num_samples for batch, _ in source.batches(BATCH_SIZE))


def read_with_pandas(path: Path, *, by_row: bool) -> int:
    """One epoch of the same batches by pandas and a DataLoader; the number of examples."""
    import pandas as pd  # type: ignore[import-untyped]
    import torch
    from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

    from rowstead.data.hashing import hash_to_rows

    frame = pd.read_parquet(path)
    dense = frame[[f"dense_{i}" for i in range(NUM_DENSE)]].to_numpy(np.float32)
    sparse = [frame[f"sparse_{i}"].to_numpy() for i in range(NUM_SPARSE)]
    labels = frame["label"].to_numpy(np.float32)
    del frame

    def tensors(rows_dense: Any, bags: list[Any], rows_labels: Any) -> tuple[Any, ...]:
        """`bags` holds the id arrays, feature-major."""
        lengths = np.fromiter(map(len, bags), np.int64, len(bags))
        offsets = np.zeros(len(bags) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        ids = hash_to_rows(np.concatenate(bags), NUM_ROWS, "mix")
        return tuple(map(torch.from_numpy, (rows_dense, ids, offsets, rows_labels)))

    class ByRow(Dataset):
        def __len__(self) -> int:
            return len(labels)

        def __getitem__(self, i: int) -> Any:
            return dense[i], [column[i] for column in sparse], labels[i]

    class ByBatch(Dataset):
        def __len__(self) -> int:
            return len(labels)

        def __getitem__(self, rows: list[int]) -> Any:
            picks = np.array(rows)
            return tensors(dense[picks], [bag for column in sparse for bag in column[picks]], labels[picks])

    def collate(rows: list[Any]) -> tuple[Any, ...]:
        rows_dense, rows_bags, rows_labels = zip(*rows, strict=True)
        bags = [bag for column in zip(*rows_bags, strict=True) for bag in column]
        return tensors(np.stack(rows_dense), bags, np.array(rows_labels))

    if by_row:
        loader = DataLoader(ByRow(), batch_size=BATCH_SIZE, shuffle=True, collate_fn=collate)
    else:
        data = ByBatch()
        loader = DataLoader(data, batch_size=None, sampler=BatchSampler(RandomSampler(data), BATCH_SIZE, drop_last=False))
    return sum(len(batch[-1]) for batch in loader)


def compare(path: Path, num_rows: int, repeats: int) -> dict[str, dict[str, float]]:
    """CPU seconds of each contender, on one core; called in a process of its own."""
    import pyarrow as pa
    import torch

    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    pa.set_cpu_count(1)
    torch.set_num_threads(1)

    contenders = {
        "rowstead": lambda: read_with_rowstead(path, shuffle_rows=num_rows // 4),
        "pandas, rows": lambda: read_with_pandas(path, by_row=True),
        "pandas, batches": lambda: read_with_pandas(path, by_row=False),
    }
    assert all(read() == num_rows for read in contenders.values())

    def settle() -> None:
        """Free what the contender before has left, a GB after pandas: else the next pays for memory that the system has to clear."""
        gc.collect()
        pa.default_memory_pool().release_unused()

    seconds = alternate(contenders, repeats=repeats, warmups=0, clock=time.process_time, prepare=settle)
    return {name: spread(values) for name, values in seconds.items()}


def peak_memory(path: Path, shuffle_rows: int) -> dict[str, int]:
    """Bytes resident at most, before and after reading once; called in a process of its own."""
    warm = path.with_name("warm.parquet")  # Compiles kernels and loads libraries, which is no part of reading.
    read_with_rowstead(warm, shuffle_rows)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    read_with_rowstead(path, shuffle_rows)
    return {"before_bytes": before, "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def in_new_process(what: str, path: Path, *numbers: int) -> Any:
    """What `compare` or `peak_memory` returns, from a fresh process."""
    command = [sys.executable, "-m", "benchmarks.reader", "--child", what, str(path), *map(str, numbers)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        what, path, *numbers = sys.argv[2:]
        child = compare if what == "compare" else peak_memory
        print(json.dumps(child(Path(path), *map(int, numbers))))
        return
    options = arguments(__doc__).parse_args()
    group_rows, repeats = (QUICK_GROUP_ROWS, 1) if options.quick else (GROUP_ROWS, 5)
    num_rows = 4 * group_rows
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        small, large, warm = (Path(folder) / name for name in ("small.parquet", "large.parquet", "warm.parquet"))
        write_log(warm, 256, 256)
        ratios = {}
        for stored in STORED:
            write_log(small, num_rows, group_rows, stored)
            seconds = in_new_process("compare", small, num_rows, repeats)
            for name, cpu_s in seconds.items():
                rows.append({"reader": name, "stored": stored, "samples": num_rows, "cpu_s": cpu_s["median"]})
                rows[-1] |= {"cpu_s_min": cpu_s["min"], "cpu_s_max": cpu_s["max"]}
                rows[-1] |= {"samples_per_cpu_s": num_rows / cpu_s["median"]}
            peer = min(seconds["pandas, rows"]["median"], seconds["pandas, batches"]["median"])
            ratios[stored] = peer / seconds["rowstead"]["median"]
        write_log(small, num_rows, group_rows)
        write_log(large, 4 * num_rows, group_rows)
        peaks = {}
        for file, samples in ((small, num_rows), (large, 4 * num_rows)):
            found = [in_new_process("peak", file, group_rows) for _ in range(1 if options.quick else 3)]
            peaks[samples] = statistics.median(f["peak_bytes"] for f in found)
            before = statistics.median(f["before_bytes"] for f in found)
            rows.append({"reader": "rowstead", "samples": samples, "file_bytes": file.stat().st_size})
            rows[-1] |= {"peak_bytes": peaks[samples], "before_bytes": before}
    summary = {
        "samples_per_s_per_core_vs_pandas": ratios["as synth"],
        "samples_per_s_per_core_vs_pandas_on_pyarrow_defaults": ratios["pyarrow defaults"],
        "peak_memory_growth": peaks[4 * num_rows] / peaks[num_rows],
    }
    publish("reader", rows, summary, options, packages=("pyarrow", "pandas"))


if __name__ == "__main__":
    main()
