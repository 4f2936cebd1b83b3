"""Which sparse server keeps which rows: a plan that is made once, stored as JSON, and read by every role.

A server keeps whole tables where it can, since a bag of a whole table is pooled by one server. A table is cut by rows only where
whole tables would leave one server with clearly more than its share, of bytes or of look-ups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rowstead.distributed import sharding
from rowstead.kernels.layout import Layout
from rowstead.spec.errors import RowsteadError
from rowstead.spec.features import Table


@dataclass(frozen=True, kw_only=True)
class ServerPiece:
    """Some rows of one table, kept by one server."""

    table: str
    first_row: int
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class Partition:
    """The pieces of each server. A server has at most one piece of a table, and may have no piece at all."""

    servers: tuple[tuple[ServerPiece, ...], ...]
    """The pieces of each server, in the order of tables."""

    @property
    def num_servers(self) -> int:
        return len(self.servers)

    def pieces_of(self, layout: Layout, server: int) -> list[sharding.ShardPiece]:
        """The pieces of one server, with tables by their index in `layout`."""
        indices = {table.name: index for index, table in enumerate(layout.tables)}
        return [
            sharding.ShardPiece(
                table=indices[piece.table],
                first_row=piece.first_row,
                num_rows=piece.num_rows,
                first_column=0,
                width=layout.tables[indices[piece.table]].width,
            )
            for piece in self.servers[server]
        ]

    def of_tables(self, tables: Sequence[Table]) -> Partition:
        """The pieces of some of the tables, on the same servers."""
        names = {table.name for table in tables}
        return Partition(servers=tuple(tuple(piece for piece in own if piece.table in names) for own in self.servers))

    def check(self, tables: Sequence[Table]) -> None:
        """Raise a RowsteadError unless every row of `tables`, and nothing else, is on exactly one server."""
        found: dict[str, list[tuple[int, int]]] = {table.name: [] for table in tables}
        for pieces in self.servers:
            if len({piece.table for piece in pieces}) < len(pieces):
                raise RowsteadError("a server has two pieces of one table in this partition: create it again")
            for piece in pieces:
                if piece.table not in found:
                    raise RowsteadError(
                        f"the partition has a table `{piece.table}` that the model does not have: create it again"
                    )
                found[piece.table].append((piece.first_row, piece.first_row + piece.num_rows))
        for table in tables:
            next_row = 0
            for start, stop in sorted(found[table.name]):
                if start != next_row or stop <= start:
                    raise RowsteadError(
                        f"row {min(start, next_row)} of table `{table.name}` is on no server, or on two: create the partition again"
                    )
                next_row = stop
            if next_row != table.num_rows:
                raise RowsteadError(
                    f"the partition has {next_row} rows of table `{table.name}`, and the model has {table.num_rows}: create it again"
                )

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        return {"servers": [[[p.table, p.first_row, p.num_rows] for p in pieces] for pieces in self.servers]}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Partition:
        """Read what `to_json` returned."""

        def pieces_in(server: Sequence[Any]) -> tuple[ServerPiece, ...]:
            return tuple(ServerPiece(table=name, first_row=first, num_rows=count) for name, first, count in server)

        try:
            return cls(servers=tuple(map(pieces_in, plain["servers"])))
        except (KeyError, TypeError, ValueError) as error:
            raise RowsteadError(f"not a partition of tables: {error}") from error


def partition_tables(tables: Sequence[Table], num_servers: int, **costs: Any) -> Partition:
    """A balanced partition; `costs` are those of `sharding.balance_tables`: `lookups`, `optimizer`, `element_bytes`."""
    if num_servers < 1:
        raise RowsteadError(f"tables need at least 1 sparse server, got {num_servers}")
    servers: list[list[ServerPiece]] = [[] for _ in range(num_servers)]
    if tables:
        assignment = sharding.balance_tables(tables, num_servers, **costs)
        for table in tables:
            for server, start, stop in assignment.rows_of(table.name, table.num_rows):
                servers[server].append(ServerPiece(table=table.name, first_row=start, num_rows=stop - start))
    return Partition(servers=tuple(map(tuple, servers)))
