"""Measures the peak memory of a training run in a process of its own: `python -m rowstead.study.calibration.footprint`."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from rowstead.records.temporary import temporary_folder
from rowstead.spec.errors import RowsteadError
from rowstead.spec.parse import parse, to_plain
from rowstead.spec.run import RunSpec

LIMIT_S = 600.0
SMALLEST = {
    "name": "smallest",
    "data": {"synth": {"num_dense": 4, "num_sparse": 2, "num_ids": 100, "num_train_samples": 512, "num_eval_samples": 64}},
    "features": {
        "dense": [{"name": "dense_{i}", "repeat": 4}],
        "sparse": [{"name": "sparse_{i}", "repeat": 2, "num_rows": 100}],
    },
    "model": {"width": 16, "bottom": [16], "top": [16]},
    "train": {"batch_size": 64},
    "device": "cpu",
}
"""A run with almost no data: its memory is that of the program."""


def measure_peak_bytes(spec: RunSpec) -> float:
    """Return the peak memory of a process that trains this run."""
    command = [sys.executable, "-m", "rowstead.study.calibration.footprint"]
    text = json.dumps(to_plain(spec))
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise RowsteadError(f"the run that measures memory took longer than {LIMIT_S:.0f} s") from None
    if done.returncode:
        raise RowsteadError(f"the run that measures memory failed: {(done.stderr.splitlines() or ['no message'])[-1]}")
    return float(json.loads(done.stdout.splitlines()[-1]))


def measure_base_bytes(threads: int) -> float:
    """Return the memory of a training process without tables, parameters, activations and batches."""
    plain: dict[str, Any] = {**SMALLEST, "threads": threads}
    return measure_peak_bytes(parse(RunSpec, plain))


def main() -> None:
    """Train the run read from stdin in a temporary folder and print its peak memory in bytes."""
    from rowstead.run import train

    spec = parse(RunSpec, json.loads(sys.stdin.read()))
    with temporary_folder() as folder:
        result = train(spec, out=folder / "run", progress=False)
    assert result.record is not None
    print(json.dumps(result.record.figures["peak_memory_bytes"]))


if __name__ == "__main__":
    main()
