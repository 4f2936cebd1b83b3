"""Rows of sparse servers by their numbers, over the wire: what checkpoints and tests read and write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from rowstead.fleet.partition import Partition, ServerPiece
from rowstead.fleet.rpc_client import Client
from rowstead.kernels.row_optimizer import compute_dtype, state_columns
from rowstead.spec.errors import DataError
from rowstead.spec.features import Table
from rowstead.stores.base import StatePart
from rowstead.stores.state import PIECE_BYTES


@dataclass(frozen=True, eq=False)
class RemoteRows:
    """All rows of a partition and what an optimizer remembers of them, a few megabytes at a time."""

    tables: Sequence[Table]
    partition: Partition
    optimizer: str
    """Its kind."""
    dtype: torch.dtype
    """Of the rows."""
    client: Callable[[int], Client]
    """Of a server."""
    settled: Callable[[], AbstractContextManager[None]]
    """Inside of it nobody else uses the clients, and every update is in."""

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """Rows of one table, [len(ids), width]."""
        table = next(table for table in self.tables if table.name == name)
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= table.num_rows):
            asked = f"{int(ids.min())} to {int(ids.max())}"
            raise DataError(f"table `{name}` has rows 0 to {table.num_rows - 1}, and rows {asked} are asked for")
        found = torch.empty(ids.numel(), table.width, dtype=self.dtype)
        for server, piece in self._pieces(name):
            is_here = (ids >= piece.first_row) & (ids < piece.first_row + piece.num_rows)
            if is_here.any():
                found[is_here] = self._take(server, piece, "rows", table.width, ids[is_here] - piece.first_row)
        return found

    def parts(self) -> list[StatePart]:
        """Every part of every piece."""
        parts = []
        for table in self.tables:
            for what, width in {"rows": table.width, **state_columns(self.optimizer, table.width)}.items():
                shape = table.num_rows, width
                parts += [self._part(server, piece, what, shape) for server, piece in self._pieces(table.name)]
        return parts

    def _pieces(self, table: str) -> list[tuple[int, ServerPiece]]:
        found = [(server, piece) for server, own in enumerate(self.partition.servers) for piece in own if piece.table == table]
        return sorted(found, key=lambda item: item[1].first_row)

    def _take(self, server: int, piece: ServerPiece, what: str, width: int, rows: Tensor) -> Tensor:
        """Rows [n] of a piece by their numbers in it."""
        facts, some = {"table": piece.table, "part": what}, rows.cpu().contiguous().split(self._rows_each(what, width))
        with self.settled():
            parts = [self.client(server).call("read_rows", facts, [numbers]).tensors[0] for numbers in some]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _part(self, server: int, piece: ServerPiece, what: str, shape: tuple[int, int]) -> StatePart:
        facts = {"table": piece.table, "part": what}
        dtype, rows_each = self._type(what), self._rows_each(what, shape[1])

        def read(start: int, stop: int) -> Tensor:
            whole = torch.empty(stop - start, shape[1], dtype=dtype)
            with self.settled():
                for first in range(start, stop, rows_each):
                    last = min(first + rows_each, stop)
                    answer = self.client(server).call("read_rows", {**facts, "start": first, "stop": last})
                    whole[first - start : last - start] = answer.tensors[0]
            return whole

        def write(start: int, values: Tensor) -> None:
            with self.settled():
                for first in range(0, len(values), rows_each):
                    some = values[first : first + rows_each].detach().to(device="cpu", dtype=dtype).contiguous()
                    self.client(server).call("write_rows", {**facts, "start": start + first}, [some])

        return StatePart(
            name=f"{piece.table}.{what}",
            shape=shape,
            dtype=dtype,
            num_rows=piece.num_rows,
            num_columns=shape[1],
            read=read,
            write=write,
            first_row=piece.first_row,
            take=lambda rows: self._take(server, piece, what, shape[1], rows),
        )

    def _type(self, what: str) -> torch.dtype:
        return self.dtype if what == "rows" else compute_dtype(self.dtype)

    def _rows_each(self, what: str, width: int) -> int:
        return max(1, PIECE_BYTES // max(1, width * self._type(what).itemsize))
