"""A sparse server in its own process: `python -m tests.fleet.sparse_process FOLDER NUMBER NUM_SERVERS`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from rowstead.fleet.partition import partition_tables
from rowstead.fleet.sparse_server import serve_sparse
from rowstead.records.files import write_atomic
from tests.small_runs import small_spec


def main(folder: Path, number: int, num_servers: int) -> None:
    torch.set_num_threads(1)
    spec = small_spec()
    serve_sparse(
        spec,
        folder,
        number,
        until=lambda: (folder / "end").exists(),
        ready=lambda address: write_atomic(folder / f"address-{number}", address),
        partition=partition_tables(spec.tables, num_servers),
        dtype=torch.float64,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
