"""How tables are cut into pieces for the processes of a job: a plan that every process makes for itself, all the same.

| shard | what a process keeps of the table | what it sends for it |
|---|---|---|
| `table` | all of it, or nothing | ids one way, pooled vectors the other, their gradients back |
| `row` | an even share of its rows | ids to the rows' owners, partial sums back, gradients to every owner of a row that was read |
| `column` | an even share of its columns | ids to everybody, a slice of each vector back, a slice of each gradient |
| `replicate` | a copy | no ids; the sum of the rows' gradients |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from rowstead.kernels.layout import Layout
from rowstead.spec.errors import RowsteadError, did_you_mean
from rowstead.spec.features import Table

Shard = Literal["table", "row", "column", "replicate"]
"""What `auto` in a recipe has become."""
SHARDS: tuple[Shard, ...] = get_args(Shard)

ALIGNED = 4
"""Columns to which slices are rounded where there are enough: kernels read rows in words of 16 bytes."""
REPLICATED_BYTES = 1 << 20
"""A table above this is not copied by `auto`, however much it is read."""


@dataclass(frozen=True, kw_only=True)
class ShardPiece:
    """Some rows and columns of one table, kept by one process."""

    table: int
    """Place of the table among all."""
    first_row: int
    num_rows: int
    first_column: int
    width: int


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardPlan:
    """Who keeps what."""

    layout: Layout
    """Of the whole."""
    shards: tuple[Shard, ...]
    """Of each table."""
    pieces: tuple[tuple[ShardPiece, ...], ...]
    """Of each process, in the order of tables; copies are not among them."""

    @property
    def replicated(self) -> tuple[int, ...]:
        """Tables that every process has a copy of."""
        return tuple(place for place, shard in enumerate(self.shards) if shard == "replicate")

    def pieces_of(self, shards: Sequence[Shard]) -> tuple[tuple[ShardPiece, ...], ...]:
        """Of each process, the pieces of tables that are cut in one of these ways."""
        return tuple(tuple(piece for piece in own if self.shards[piece.table] in shards) for own in self.pieces)


def plan_shards(
    layout: Layout, shards: Mapping[str, Shard], world_size: int, *, reads: Mapping[str, float] | None = None
) -> ShardPlan:
    """The pieces of `world_size` processes; a table that `shards` does not name goes whole to one of them.

    Whole tables are handed out largest first, each to the process with the least so far, by bytes times `reads`: how often a table
    is read, by default the number of features that read it. A table with fewer columns than there are processes is not cut by
    columns, but goes whole to one.
    """
    names = [table.name for table in layout.tables]
    for name, shard in shards.items():
        if name not in names:
            raise RowsteadError(f"no table `{name}` to shard: {did_you_mean(name, names)}")
        if shard not in SHARDS:
            raise RowsteadError(f"table `{name}`: no shard `{shard}`: {did_you_mean(shard, SHARDS)}")
    chosen = [shards.get(name, "table") for name in names]
    for place, table in enumerate(layout.tables):
        if chosen[place] == "column" and table.width < world_size:
            chosen[place] = "table"
    pieces: list[list[ShardPiece]] = [[] for _ in range(world_size)]
    loads = [0.0] * world_size
    costs = [table.num_elements * (reads or {}).get(table.name, len(table.features)) for table in layout.tables]
    for place in sorted(range(len(names)), key=lambda place: -costs[place]):
        table, shard = layout.tables[place], chosen[place]
        if shard == "table":
            owner = loads.index(min(loads))
            loads[owner] += costs[place]
            pieces[owner].append(_piece(place, (0, table.num_rows), (0, table.width)))
        elif shard == "row":
            for owner, rows in enumerate(row_ranges(table.num_rows, world_size)):
                if rows[0] < rows[1]:
                    pieces[owner].append(_piece(place, rows, (0, table.width)))
        elif shard == "column":
            for owner, columns in enumerate(column_ranges(table.width, world_size)):
                pieces[owner].append(_piece(place, (0, table.num_rows), columns))
    in_order = tuple(tuple(sorted(own, key=lambda piece: piece.table)) for own in pieces)
    return ShardPlan(layout=layout, shards=tuple(chosen), pieces=in_order)


def auto_shards(layout: Layout, world_size: int, *, batch_size: int, row_bytes: int = 4) -> dict[str, Shard]:
    """A shard for every table: a copy where that sends less than exchanging its vectors, by rows where one process would have too much.

    A copy costs a sum over all its rows each step, an exchange a vector and its gradient for each example and feature.
    """
    shards: dict[str, Shard] = {}
    all_bytes = sum(table.num_elements for table in layout.tables) * row_bytes
    for table in layout.tables:
        own_bytes = table.num_elements * row_bytes
        vectors = len(table.features) * batch_size / world_size
        if table.num_rows <= vectors and own_bytes <= REPLICATED_BYTES:
            shards[table.name] = "replicate"
        elif own_bytes * world_size > all_bytes:
            shards[table.name] = "row"
        else:
            shards[table.name] = "table"
    return shards


def row_ranges(num_rows: int, world_size: int) -> list[tuple[int, int]]:
    """First and last row of each process's share; the last shares of a small table may be empty."""
    each = rows_each(num_rows, world_size)
    return [(min(rank * each, num_rows), min((rank + 1) * each, num_rows)) for rank in range(world_size)]


def rows_each(num_rows: int, world_size: int) -> int:
    """Rows of all shares but the last, so that row r is with process r // rows_each."""
    return -(-num_rows // world_size)


def column_ranges(width: int, world_size: int) -> list[tuple[int, int]]:
    """First and last column of each process's slice."""
    unit = ALIGNED if width >= ALIGNED * world_size else 1
    bounds = [rank * (width // unit) // world_size * unit for rank in range(world_size)]
    return list(pairwise([*bounds, width]))


def piece_layout(layout: Layout, pieces: Sequence[ShardPiece]) -> Layout:
    """What a store of one process's pieces is made from: the features that read them over smaller tables.

    Where a table is cut by rows its features are summed, whatever their pooling: whoever joins the partial sums divides them.
    """
    by_table = {piece.table: piece for piece in pieces}
    features = features_of(layout, pieces)
    places = {table: place for place, table in enumerate(by_table)}
    tables = []
    for table, piece in by_table.items():
        whole = layout.tables[table]
        tables.append(
            Table(
                name=whole.name,
                num_rows=piece.num_rows,
                width=piece.width,
                features=tuple(place for place, feature in enumerate(features) if layout.table_of[feature] == table),
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
        table_of=tuple(places[layout.table_of[feature]] for feature in features),
        columns=tuple(columns),
        is_mean=tuple(
            layout.is_mean[feature] and not is_cut_by_rows(layout, by_table[layout.table_of[feature]]) for feature in features
        ),
    )


def features_of(layout: Layout, pieces: Sequence[ShardPiece]) -> list[int]:
    """The features that read these pieces: first those of tables that are cut by rows, each in the order of the batch."""
    by_table = {piece.table: piece for piece in pieces}
    features = [feature for feature, table in enumerate(layout.table_of) if table in by_table]
    return sorted(features, key=lambda feature: not is_cut_by_rows(layout, by_table[layout.table_of[feature]]))


def is_cut_by_rows(layout: Layout, piece: ShardPiece) -> bool:
    """Whether other rows of the table are elsewhere."""
    return piece.num_rows < layout.tables[piece.table].num_rows


def _piece(table: int, rows: tuple[int, int], columns: tuple[int, int]) -> ShardPiece:
    return ShardPiece(
        table=table, first_row=rows[0], num_rows=rows[1] - rows[0], first_column=columns[0], width=columns[1] - columns[0]
    )
