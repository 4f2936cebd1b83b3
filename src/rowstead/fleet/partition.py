"""Which sparse server keeps which rows: a plan that is made once, written down as JSON, and read by everybody.

A server keeps whole tables where it can, since a bag of a whole table is pooled in one place. A table is cut by rows, into even
pieces, only where whole tables would leave one server with clearly more than its share, of bytes or of look-ups.

Letters: T tables, S servers.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rowstead.distributed import sharding
from rowstead.kernels.layout import Layout
from rowstead.kernels.row_optimizer import state_columns
from rowstead.spec.errors import RowsteadError
from rowstead.spec.features import Table

TOLERANCE = 0.1
"""By how much of an even share one server may have more before a table is cut for it."""


@dataclass(frozen=True, kw_only=True)
class ServerPiece:
    """Some rows of one table, kept by one server."""

    table: str
    first_row: int
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Who keeps what. A server has at most one piece of a table, and may have none at all."""

    servers: tuple[tuple[ServerPiece, ...], ...]
    """Of each server its pieces, in the order of tables."""

    @property
    def num_servers(self) -> int:
        return len(self.servers)

    def pieces_of(self, layout: Layout, server: int) -> list[sharding.ShardPiece]:
        """The pieces of one server, with tables by their places in `layout`."""
        places = {table.name: place for place, table in enumerate(layout.tables)}
        return [
            sharding.ShardPiece(
                table=places[piece.table],
                first_row=piece.first_row,
                num_rows=piece.num_rows,
                first_column=0,
                width=layout.tables[places[piece.table]].width,
            )
            for piece in self.servers[server]
        ]

    def check(self, tables: Sequence[Table]) -> None:
        """Raise a RowsteadError unless every row of `tables`, and nothing else, has exactly one home."""
        found: dict[str, list[tuple[int, int]]] = {table.name: [] for table in tables}
        for pieces in self.servers:
            if len({piece.table for piece in pieces}) < len(pieces):
                raise RowsteadError("a server has two pieces of one table in this partition: make it anew")
            for piece in pieces:
                if piece.table not in found:
                    raise RowsteadError(f"the partition has a table `{piece.table}` that the model has not: make it anew")
                found[piece.table].append((piece.first_row, piece.first_row + piece.num_rows))
        for table in tables:
            next_row = 0
            for start, stop in sorted(found[table.name]):
                if start != next_row or stop <= start:
                    raise RowsteadError(f"row {min(start, next_row)} of table `{table.name}` has no home, or two: make it anew")
                next_row = stop
            if next_row != table.num_rows:
                raise RowsteadError(
                    f"{next_row} rows of table `{table.name}` have a home, and the model has {table.num_rows}: make it anew"
                )

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        return {"servers": [[[p.table, p.first_row, p.num_rows] for p in pieces] for pieces in self.servers]}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any] | str) -> Partition:
        """What `to_json` gave, also as text."""
        try:
            given = json.loads(plain) if isinstance(plain, str) else plain
            return cls(
                servers=tuple(
                    tuple(
                        ServerPiece(table=str(name), first_row=int(first), num_rows=int(count)) for name, first, count in pieces
                    )
                    for pieces in given["servers"]
                )
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RowsteadError(f"this is no partition of tables: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one server has of all, as shares from 0 to 1."""

    byte_share: float
    lookup_share: float

    @property
    def most(self) -> float:
        return max(self.byte_share, self.lookup_share)


def partition_tables(
    tables: Sequence[Table],
    num_servers: int,
    *,
    lookups: Mapping[str, float] | None = None,
    optimizer: str = "sgd",
    element_bytes: int = 4,
    tolerance: float = TOLERANCE,
) -> Partition:
    """A partition in which no server has more than `1 + tolerance` times its share of bytes, nor of expected look-ups.

    `lookups` are those of each table, in any unit, such as ids a sample; by default the number of features that read it. Bytes
    count what the optimizer remembers as well. Look-ups of a table are taken to be even over its rows, as hashed ids are. Only
    tables of too few rows to be cut finely enough can leave the shares less even.
    """
    if num_servers < 1:
        raise RowsteadError(f"tables need at least 1 sparse server, got {num_servers}")
    costs = _costs(tables, lookups, optimizer, element_bytes)
    is_cut = [False] * len(tables)
    while True:
        homes, loads = _assigned(tables, costs, is_cut, num_servers)
        worst = max(range(num_servers), key=lambda server: loads[server].most)
        can_cut = [
            place
            for place, where in enumerate(homes)
            if not is_cut[place] and worst in where and tables[place].num_rows > 1 and max(costs[place]) > 0
        ]
        if loads[worst].most <= (1 + tolerance) / num_servers or num_servers == 1 or not can_cut:
            break
        is_cut[max(can_cut, key=lambda place: max(costs[place]))] = True
    servers: list[list[ServerPiece]] = [[] for _ in range(num_servers)]
    for table, where in zip(tables, homes, strict=True):
        for share, server in enumerate(where):
            first, last = table.num_rows * share // len(where), table.num_rows * (share + 1) // len(where)
            servers[server].append(ServerPiece(table=table.name, first_row=first, num_rows=last - first))
    return Partition(servers=tuple(tuple(pieces) for pieces in servers))


def loads_of(
    partition: Partition,
    tables: Sequence[Table],
    *,
    lookups: Mapping[str, float] | None = None,
    optimizer: str = "sgd",
    element_bytes: int = 4,
) -> list[Load]:
    """What each server of a partition has."""
    costs = dict(zip((table.name for table in tables), _costs(tables, lookups, optimizer, element_bytes), strict=True))
    num_rows = {table.name: table.num_rows for table in tables}
    loads = []
    for pieces in partition.servers:
        shares = [(piece.num_rows / num_rows[piece.table], *costs[piece.table]) for piece in pieces]
        loads.append(
            Load(
                byte_share=sum(share * own for share, own, _ in shares),
                lookup_share=sum(share * own for share, _, own in shares),
            )
        )
    return loads


def _costs(
    tables: Sequence[Table], lookups: Mapping[str, float] | None, optimizer: str, element_bytes: int
) -> list[tuple[float, float]]:
    """Of each table its share of all bytes and of all look-ups."""
    given = lookups or {}
    sizes = [
        table.num_rows * (table.width * element_bytes + 4 * sum(state_columns(optimizer, table.width).values()))
        for table in tables
    ]
    reads = [max(0.0, float(given.get(table.name, len(table.features)))) for table in tables]
    all_bytes, all_reads = max(1, sum(sizes)), sum(reads) or 1.0
    return [(size / all_bytes, read / all_reads) for size, read in zip(sizes, reads, strict=True)]


def _assigned(
    tables: Sequence[Table], costs: Sequence[tuple[float, float]], is_cut: Sequence[bool], num_servers: int
) -> tuple[list[list[int]], list[Load]]:
    """For each table its servers, and what each server then has."""
    loads = [[0.0, 0.0] for _ in range(num_servers)]
    homes: list[list[int]] = [[] for _ in tables]

    def place_on(place: int, servers: Sequence[int], sign: float = 1.0) -> None:
        for server in servers:
            for kind in (0, 1):
                loads[server][kind] += sign * costs[place][kind] / len(servers)

    # First those that are cut, which go to nearly everybody; then the whole ones, largest first, each where it adds the least.
    for place in sorted(range(len(tables)), key=lambda place: (not is_cut[place], -max(costs[place]))):
        count = min(num_servers, tables[place].num_rows) if is_cut[place] else 1
        added = costs[place][0] / count, costs[place][1] / count
        cost_on = [max(load[0] + added[0], load[1] + added[1]) for load in loads]
        homes[place] = sorted(heapq.nsmallest(count, range(num_servers), key=lambda server: (cost_on[server], loads[server])))
        place_on(place, homes[place])
    whole = [place for place in range(len(tables)) if not is_cut[place]]
    while num_servers > 1:
        worst = max(range(num_servers), key=lambda server: max(loads[server]))
        if not _relieve(worst, whole, homes, costs, loads, place_on):
            break
    return homes, [Load(byte_share=load[0], lookup_share=load[1]) for load in loads]


def _relieve(worst: int, whole: Sequence[int], homes: list[list[int]], costs: Any, loads: Any, place_on: Any) -> bool:
    """Move a table off the server that has most, or swap it for another one, where that lowers the higher of the two."""
    limit = max(loads[worst]) * (1 - 1e-9)
    best: tuple[float, int, int | None, int] | None = None
    for mine in (place for place in whole if homes[place] == [worst]):
        left = [loads[worst][kind] - costs[mine][kind] for kind in (0, 1)]
        for server in range(len(loads)):
            if server == worst:
                continue
            theirs: list[int | None] = [None, *(place for place in whole if homes[place] == [server])]
            for other in theirs:
                back = (0.0, 0.0) if other is None else costs[other]
                after = max(
                    *(left[kind] + back[kind] for kind in (0, 1)),
                    *(loads[server][kind] + costs[mine][kind] - back[kind] for kind in (0, 1)),
                )
                if after < limit and (best is None or after < best[0]):
                    best = after, mine, other, server
    if best is None:
        return False
    _, mine, other, server = best
    place_on(mine, [worst], -1.0)
    place_on(mine, [server])
    homes[mine] = [server]
    if other is not None:
        place_on(other, [server], -1.0)
        place_on(other, [worst])
        homes[other] = [worst]
    return True
