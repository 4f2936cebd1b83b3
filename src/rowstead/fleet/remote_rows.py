"""Rows of sparse servers by number, over the wire, for checkpoints and tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from rowstead.fleet.partition import Partition, ServerPiece
from rowstead.fleet.rpc_client import Client
from rowstead.kernels.row_state import compute_dtype
from rowstead.spec.errors import DataError
from rowstead.spec.features import Table
from rowstead.spec.row_optimizers import ROW_OPTIMIZERS, RowOptimizerName
from rowstead.stores.state import PIECE_BYTES, StatePart


@dataclass(frozen=True, eq=False)
class RemoteRows:
    """Reads and writes all rows of a partition and their optimizer state, a few megabytes at a time."""

    tables: Sequence[Table]
    partition: Partition
    optimizer: RowOptimizerName
    """Its kind."""
    dtype: torch.dtype
    """Of the rows."""
    client: Callable[[int], Client]
    """Returns the client of a server."""
    quiesce: Callable[[], AbstractContextManager[None]]
    """Context in which no other thread uses the clients and every update is answered."""

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """Return rows of one table, [len(ids), width]."""
        table = next(table for table in self.tables if table.name == name)
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= table.num_rows):
            requested = f"{int(ids.min())} to {int(ids.max())}"
            raise DataError(f"table `{name}` has rows 0 to {table.num_rows - 1}; rows {requested} were requested")
        found = torch.empty(ids.numel(), table.width, dtype=self.dtype)
        for server, shard in self._shards(name):
            is_here = (ids >= shard.first_row) & (ids < shard.first_row + shard.num_rows)
            if is_here.any():
                found[is_here] = self._gather(server, shard, "rows", table.width, ids[is_here] - shard.first_row)
        return found

    def parts(self) -> list[StatePart]:
        parts = []
        for table in self.tables:
            for part, width in {"rows": table.width, **ROW_OPTIMIZERS[self.optimizer].state_columns(table.width)}.items():
                shape = table.num_rows, width
                parts += [self._part(server, shard, part, shape) for server, shard in self._shards(table.name)]
        return parts

    def _shards(self, table: str) -> list[tuple[int, ServerPiece]]:
        found = [(server, shard) for server, own in enumerate(self.partition.servers) for shard in own if shard.table == table]
        return sorted(found, key=lambda item: item[1].first_row)

    def _gather(self, server: int, shard: ServerPiece, part: str, width: int, rows: Tensor) -> Tensor:
        """Read rows [n] of a shard by number."""
        facts, chunks = {"table": shard.table, "part": part}, rows.cpu().contiguous().split(self._rows_per_call(part, width))
        with self.quiesce():
            parts = [self.client(server).call("read_rows", facts, [numbers]).tensors[0] for numbers in chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _part(self, server: int, shard: ServerPiece, part: str, shape: tuple[int, int]) -> StatePart:
        facts = {"table": shard.table, "part": part}
        dtype, rows_per_call = self._dtype_of(part), self._rows_per_call(part, shape[1])

        def read(start: int, stop: int) -> Tensor:
            whole = torch.empty(stop - start, shape[1], dtype=dtype)
            with self.quiesce():
                for first in range(start, stop, rows_per_call):
                    last = min(first + rows_per_call, stop)
                    reply = self.client(server).call("read_rows", {**facts, "start": first, "stop": last})
                    whole[first - start : last - start] = reply.tensors[0]
            return whole

        def write(start: int, values: Tensor) -> None:
            with self.quiesce():
                for first in range(0, len(values), rows_per_call):
                    chunks = values[first : first + rows_per_call].detach().to(device="cpu", dtype=dtype).contiguous()
                    self.client(server).call("write_rows", {**facts, "start": start + first}, [chunks])

        return StatePart(
            name=f"{shard.table}.{part}",
            shape=shape,
            dtype=dtype,
            num_rows=shard.num_rows,
            num_columns=shape[1],
            read=read,
            write=write,
            first_row=shard.first_row,
            take=lambda rows: self._gather(server, shard, part, shape[1], rows),
        )

    def _dtype_of(self, part: str) -> torch.dtype:
        return self.dtype if part == "rows" else compute_dtype(self.dtype)

    def _rows_per_call(self, part: str, width: int) -> int:
        return max(1, PIECE_BYTES // max(1, width * self._dtype_of(part).itemsize))
