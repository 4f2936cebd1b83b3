"""Sparse servers on real sockets in threads of the test, and their stores."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from rowstead.data.batch import Sparse
from rowstead.distributed.sharding import piece_layout, row_ranges
from rowstead.fleet.partition import Partition, ServerPiece
from rowstead.fleet.remote_store import RemoteStore
from rowstead.fleet.rpc_client import Client
from rowstead.fleet.sparse_server import SparseServer
from rowstead.fleet.table_shard import TableShard
from rowstead.kernels.layout import Layout, layout_of
from rowstead.spec.features import FeaturesSpec, SparseFeatureSpec, tables_of
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.stores.device import DeviceStore

_NUMBERS = itertools.count()
SGD = SparseOptimizerSpec(kind="sgd")
ADAGRAD = SparseOptimizerSpec(kind="adagrad", eps=1e-6)


def plain_layout(*num_rows: int, width: int = 8, pooling: Literal["sum", "mean"] = "sum") -> Layout:
    features = tuple(SparseFeatureSpec(name=f"t{i}", num_rows=rows, pooling=pooling) for i, rows in enumerate(num_rows))
    spec = FeaturesSpec(sparse=features)
    return layout_of(spec, tables_of(spec, width=width))


def cut_by_rows(layout: Layout, num_servers: int) -> Partition:
    """Split every table over all servers, as far as it has rows."""
    servers: list[list[ServerPiece]] = [[] for _ in range(num_servers)]
    for table in layout.tables:
        for server, (first, last) in enumerate(row_ranges(table.num_rows, num_servers)):
            if last > first:
                servers[server].append(ServerPiece(table=table.name, first_row=first, num_rows=last - first))
    return Partition(servers=tuple(map(tuple, servers)))


def whole_tables(layout: Layout, num_servers: int) -> Partition:
    """Assign whole tables to servers round-robin."""
    servers: list[list[ServerPiece]] = [[] for _ in range(num_servers)]
    for index, table in enumerate(layout.tables):
        servers[index % num_servers].append(ServerPiece(table=table.name, first_row=0, num_rows=table.num_rows))
    return Partition(servers=tuple(map(tuple, servers)))


def batch_of(layout: Layout, num_samples: int, seed: int, *, length: int = 3) -> Sparse:
    """Bags of 0 to 2 * length ids."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 2 * length + 1, size=layout.num_features * num_samples)
    rows = np.repeat([layout.tables[table].num_rows for table in layout.table_of], num_samples)
    ids = np.concatenate([rng.integers(0, rows[bag], size=count) for bag, count in enumerate(lengths)])
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    return Sparse(ids=torch.from_numpy(ids), offsets=offsets, num_features=layout.num_features)


def grad_of(layout: Layout, batch: Sparse, seed: int) -> torch.Tensor:
    rng = np.random.default_rng(1000 + seed)
    return torch.from_numpy(rng.normal(size=(batch.num_samples, layout.total_width)))


def assert_same_rows(store: RemoteStore, local: DeviceStore) -> None:
    for name, value in local.state().items():
        torch.testing.assert_close(store.state()[name], value, rtol=1e-12, atol=1e-14)


class Fleet:
    """Running sparse servers, and their stores."""

    def __init__(
        self,
        layout: Layout,
        optimizer: SparseOptimizerSpec | None,
        partition: Partition,
        *,
        dtype: torch.dtype = torch.float64,
        folder: Path | None = None,
        kinds: Sequence[type[SparseServer]] = (),
        **options: Any,
    ) -> None:
        self.layout, self.optimizer, self.partition, self.dtype, self.folder = layout, optimizer, partition, dtype, folder
        self._options = options
        self._kinds = list(kinds) or [SparseServer] * partition.num_servers
        self.servers = [self._started(number) for number in range(partition.num_servers)]
        self.stores: list[RemoteStore] = []

    def _started(self, number: int) -> SparseServer:
        own = piece_layout(self.layout, self.partition.pieces_of(self.layout, number))
        shard = TableShard(own, self.optimizer, dtype=self.dtype)
        snapshots = None if self.folder is None else self.folder / f"sparse-{number}"
        server = self._kinds[number](shard, name=f"sparse-{number}", snapshots=snapshots, **self._options)
        return server.start()

    def restart(self, number: int) -> None:
        """Replace a server by a new one without a clean shutdown."""
        self.servers[number].close()
        self.servers[number] = self._started(number)

    def connect(self, number: int) -> Client:
        return Client(
            lambda: self.servers[number].address, name=f"trainer-{next(_NUMBERS)}", deadline_s=120.0, max_in_flight=32
        )

    def store(self, **options: Any) -> RemoteStore:
        store = RemoteStore(self.layout, self.optimizer, self.partition, self.connect, dtype=self.dtype, **options)
        self.stores.append(store)
        return store

    def close(self) -> None:
        for store in self.stores:
            store.close()
        for server in self.servers:
            server.close()


@contextmanager
def running(*arguments: Any, **options: Any) -> Iterator[Fleet]:
    fleet = Fleet(*arguments, **options)
    try:
        yield fleet
    finally:
        fleet.close()
