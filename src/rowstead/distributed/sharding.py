"""How tables are cut into pieces for processes or servers: a plan that every process computes for itself, with the same result.

docs/distributed.md says what a process keeps and sends under each `shard`; `auto` is what the balancer decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import get_args

from rowstead.kernels.layout import Layout
from rowstead.plan.balance import Assignment, Item, balance
from rowstead.spec.errors import RowsteadError, did_you_mean
from rowstead.spec.features import Table
from rowstead.spec.placement import PlacedShard, Shard
from rowstead.spec.row_optimizers import ROW_OPTIMIZERS, RowOptimizerName

SHARDS: tuple[Shard, ...] = get_args(Shard)

ALIGNED = 4
"""Columns to which slices are rounded where there are enough: kernels read rows in words of 16 bytes."""
REPLICATED_BYTES = 1 << 20
"""Tables larger than this are not replicated by default, however often they are read."""
TOLERANCE = 0.1
"""Load above an even share that one process or server may have before a table is split."""


@dataclass(frozen=True, kw_only=True)
class ShardPiece:
    """Some rows and columns of one table, kept by one process."""

    table: int
    """Index of the table in the layout."""
    first_row: int
    num_rows: int
    first_column: int
    width: int


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardPlan:
    """Which process keeps which rows and columns."""

    layout: Layout
    """All tables."""
    shards: tuple[PlacedShard, ...]
    """How each table is cut; `auto` has become `table` or `row`."""
    pieces: tuple[tuple[ShardPiece, ...], ...]
    """The pieces of each process, in the order of tables, without replicated tables."""
    copies: tuple[ShardPiece, ...]
    """The replicated tables, of which every process has a copy."""

    def pieces_of(self, shards: Sequence[Shard]) -> tuple[tuple[ShardPiece, ...], ...]:
        """The pieces of each process that belong to tables cut in one of these ways."""
        return tuple(tuple(piece for piece in own if self.shards[piece.table] in shards) for own in self.pieces)


def plan_shards(
    layout: Layout, shards: Mapping[str, Shard], world_size: int, *, lookups: Mapping[str, float] | None = None
) -> ShardPlan:
    """The pieces of `world_size` processes; a table that `shards` does not name goes whole to one of them.

    Whole tables, and those that are `auto`, are balanced by bytes and by `lookups` (see `balance_tables`). A table with fewer
    columns than there are processes is not cut by columns, but goes whole to one.
    """
    names = [table.name for table in layout.tables]
    for name, shard in shards.items():
        if name not in names:
            raise RowsteadError(f"unknown table `{name}` to shard: {did_you_mean(name, names)}")
        if shard not in SHARDS:
            raise RowsteadError(f"table `{name}`: unknown shard `{shard}`: {did_you_mean(shard, SHARDS)}")
    wanted: list[Shard] = [shards.get(name, "table") for name in names]
    for index, table in enumerate(layout.tables):
        if wanted[index] == "column" and table.width < world_size:
            wanted[index] = "table"
    balanced = [table for table, shard in zip(layout.tables, wanted, strict=True) if shard in ("table", "auto")]
    whole = [table.name for table, shard in zip(layout.tables, wanted, strict=True) if shard == "table"]
    assignment = balance_tables(balanced, world_size, lookups=lookups, whole=whole) if balanced else None
    placed: list[PlacedShard] = []
    pieces: list[list[ShardPiece]] = [[] for _ in range(world_size)]
    copies: list[ShardPiece] = []
    for index, (table, shard) in enumerate(zip(layout.tables, wanted, strict=True)):
        rows, columns = (0, table.num_rows), (0, table.width)
        if shard == "table" or shard == "auto":
            assert assignment is not None
            cuts = [(owner, (start, stop), columns) for owner, start, stop in assignment.rows_of(table.name, table.num_rows)]
            shard = "table" if len(cuts) == 1 else "row"
        elif shard == "row":
            cuts = [
                (owner, own, columns) for owner, own in enumerate(row_ranges(table.num_rows, world_size)) if own[0] < own[1]
            ]
        elif shard == "column":
            cuts = [(owner, rows, own) for owner, own in enumerate(column_ranges(table.width, world_size))]
        else:
            cuts = [(-1, rows, columns)]
        placed.append(shard)
        for owner, (first_row, last_row), (first_column, last_column) in cuts:
            piece = ShardPiece(
                table=index,
                first_row=first_row,
                num_rows=last_row - first_row,
                first_column=first_column,
                width=last_column - first_column,
            )
            (copies if shard == "replicate" else pieces[owner]).append(piece)
    return ShardPlan(layout=layout, shards=tuple(placed), pieces=tuple(map(tuple, pieces)), copies=tuple(copies))


def balance_tables(
    tables: Sequence[Table],
    num_owners: int,
    *,
    lookups: Mapping[str, float] | None = None,
    whole: Sequence[str] = (),
    optimizer: RowOptimizerName = "sgd",
    element_bytes: int = 4,
) -> Assignment:
    """Assign tables to processes or servers so that none has more than `1 + TOLERANCE` times its share of bytes or of look-ups.

    `lookups` are those of each table in any unit, such as ids per sample; the default is the number of features that read it.
    Bytes include the optimizer's state. Look-ups are taken to be even over a table's rows, as hashed ids are. Tables named in
    `whole` are not split; these, and tables of few rows, can leave the shares less even.
    """
    costs = table_costs(tables, lookups=lookups, optimizer=optimizer, element_bytes=element_bytes)
    items = [
        Item(name=table.name, costs=cost, num_rows=1 if table.name in whole else table.num_rows)
        for table, cost in zip(tables, costs, strict=True)
    ]
    return balance(items, num_owners, split_overhead=0.0, tolerance=TOLERANCE)


def table_costs(
    tables: Sequence[Table],
    *,
    lookups: Mapping[str, float] | None = None,
    optimizer: RowOptimizerName = "sgd",
    element_bytes: int = 4,
) -> list[tuple[float, float]]:
    """Each table's share of all bytes and of all look-ups."""
    given = lookups or {}
    sizes = [
        table.num_rows * (table.width * element_bytes + ROW_OPTIMIZERS[optimizer].state_bytes(table.width)) for table in tables
    ]
    reads = [max(0.0, float(given.get(table.name, len(table.features)))) for table in tables]
    all_bytes, all_reads = max(1, sum(sizes)), sum(reads) or 1.0
    return [(size / all_bytes, read / all_reads) for size, read in zip(sizes, reads, strict=True)]


def auto_shards(layout: Layout, world_size: int, *, batch_size: int, row_bytes: int = 4) -> dict[str, Shard]:
    """The default shard of every table: a copy where that sends less than exchanging its vectors, else what the balancer decides.

    A copy costs a sum over all its rows in each step, an exchange a vector and its gradient for each example and feature.
    """
    shards: dict[str, Shard] = {}
    for table in layout.tables:
        vectors = len(table.features) * batch_size / world_size
        is_small = table.num_rows <= vectors and table.num_elements * row_bytes <= REPLICATED_BYTES
        shards[table.name] = "replicate" if is_small else "auto"
    return shards


def row_ranges(num_rows: int, world_size: int) -> list[tuple[int, int]]:
    """First and last row of each process's share; the last shares of a small table may be empty."""
    each = -(-num_rows // world_size)
    return [(min(rank * each, num_rows), min((rank + 1) * each, num_rows)) for rank in range(world_size)]


def column_ranges(width: int, world_size: int) -> list[tuple[int, int]]:
    """First and last column of each process's slice."""
    unit = ALIGNED if width >= ALIGNED * world_size else 1
    bounds = [rank * (width // unit) // world_size * unit for rank in range(world_size)]
    return list(pairwise([*bounds, width]))


def piece_layout(layout: Layout, pieces: Sequence[ShardPiece]) -> Layout:
    """The layout of a store of one process's pieces: the features that read them, over smaller tables.

    Where a table is cut by rows its features are summed, whatever their pooling: the reader of the partial sums divides them.
    """
    by_table = {piece.table: piece for piece in pieces}
    features = features_of(layout, pieces)
    indices = {table: index for index, table in enumerate(by_table)}
    tables = []
    for table, piece in by_table.items():
        whole = layout.tables[table]
        tables.append(
            Table(
                name=whole.name,
                num_rows=piece.num_rows,
                width=piece.width,
                features=tuple(index for index, feature in enumerate(features) if layout.table_of[feature] == table),
                first_row=whole.first_row + piece.first_row,
                first_column=whole.first_column + piece.first_column,
                whole=whole.whole_shape,
            )
        )
    columns = [0]
    for feature in features:
        columns.append(columns[-1] + by_table[layout.table_of[feature]].width)
    return Layout(
        tables=tuple(tables),
        table_of=tuple(indices[layout.table_of[feature]] for feature in features),
        columns=tuple(columns),
        is_mean=tuple(
            layout.is_mean[feature] and not is_cut_by_rows(layout, by_table[layout.table_of[feature]]) for feature in features
        ),
    )


def features_of(layout: Layout, pieces: Sequence[ShardPiece]) -> list[int]:
    """The features that read these pieces, in the order of the batch."""
    tables = {piece.table for piece in pieces}
    return [feature for feature, table in enumerate(layout.table_of) if table in tables]


def is_cut_by_rows(layout: Layout, piece: ShardPiece) -> bool:
    """Whether other processes keep other rows of the table."""
    return piece.num_rows < layout.tables[piece.table].num_rows
