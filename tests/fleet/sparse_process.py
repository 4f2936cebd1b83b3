"""A sparse server in its own process: `python -m tests.fleet.sparse_process FOLDER NUMBER NUM_SERVERS`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from rowstead.fleet.partition import partition_tables
from rowstead.fleet.sparse_server import build_sparse_server
from rowstead.records.files import write_atomic
from tests.small_runs import small_spec


def main(folder: Path, number: int, num_servers: int) -> None:
    torch.set_num_threads(1)
    spec = small_spec()
    partition = partition_tables(spec.tables, num_servers)
    with build_sparse_server(spec, folder, number, partition, dtype=torch.float64) as server:
        write_atomic(folder / f"address-{number}", server.address)
        server.serve(lambda: (folder / "end").exists())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
