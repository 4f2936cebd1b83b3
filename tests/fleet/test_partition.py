"""Every row is on exactly one server, and servers are even in bytes and in look-ups."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowstead.distributed.sharding import table_costs
from rowstead.fleet.partition import Partition, ServerPiece, partition_tables
from rowstead.spec.errors import RowsteadError
from rowstead.spec.features import Table


def table(name: str, num_rows: int, width: int = 16, num_features: int = 1) -> Table:
    return Table(name=name, num_rows=num_rows, width=width, features=tuple(range(num_features)))


@st.composite
def some_tables(draw: st.DrawFn) -> tuple[list[Table], dict[str, float]]:
    sizes = draw(st.lists(st.one_of(st.integers(1, 20), st.integers(100, 10**7)), min_size=1, max_size=12))
    tables = [table(f"t{i}", rows, draw(st.sampled_from([1, 8, 64])), draw(st.integers(1, 3))) for i, rows in enumerate(sizes)]
    return tables, {each.name: draw(st.floats(0, 100)) for each in tables}


@settings(max_examples=200, deadline=None)
@given(given=some_tables(), num_servers=st.integers(1, 9), optimizer=st.sampled_from(["sgd", "rowwise_adagrad", "adam"]))
def test_every_row_has_exactly_one_server_whatever_the_tables(
    given: tuple[list[Table], dict[str, float]], num_servers: int, optimizer: str
) -> None:
    tables, lookups = given
    partition = partition_tables(tables, num_servers, lookups=lookups, optimizer=optimizer)
    partition.check(tables)
    assert partition.num_servers == num_servers
    for each in tables:
        pieces = [piece for pieces in partition.servers for piece in pieces if piece.table == each.name]
        for row in (0, each.num_rows // 2, each.num_rows - 1):
            assert sum(piece.first_row <= row < piece.first_row + piece.num_rows for piece in pieces) == 1
        assert sum(piece.num_rows for piece in pieces) == each.num_rows
    assert Partition.from_json(json.loads(json.dumps(partition.to_json()))) == partition


@settings(max_examples=200, deadline=None)
@given(data=st.data(), num_servers=st.integers(2, 8))
def test_no_server_has_more_than_a_tenth_above_its_share_of_bytes_or_look_ups(data: st.DataObject, num_servers: int) -> None:
    sizes = data.draw(st.lists(st.integers(1000, 10**7), min_size=1, max_size=20))
    tables = [table(f"t{i}", rows, data.draw(st.sampled_from([4, 64]))) for i, rows in enumerate(sizes)]
    lookups = {each.name: data.draw(st.floats(0.1, 100)) for each in tables}
    partition = partition_tables(tables, num_servers, lookups=lookups)
    costs = dict(zip([each.name for each in tables], table_costs(tables, lookups=lookups), strict=True))
    num_rows = {each.name: each.num_rows for each in tables}
    for pieces in partition.servers:
        for share in (0, 1):  # of bytes, of look-ups
            load = sum(costs[piece.table][share] * piece.num_rows / num_rows[piece.table] for piece in pieces)
            assert load <= 1.11 / num_servers  # and what rounding to whole rows adds


def test_one_huge_table_is_cut_by_rows_and_small_ones_stay_whole() -> None:
    tables = [table("huge", 10**8), *(table(f"small{i}", 1000) for i in range(6))]
    partition = partition_tables(tables, 3, lookups={each.name: 1.0 for each in tables[1:]} | {"huge": 3.0})
    counts = {name: sum(piece.table == name for pieces in partition.servers for piece in pieces) for name in ("huge", "small0")}
    assert counts == {"huge": 3, "small0": 1}
    assert max(piece.num_rows for pieces in partition.servers for piece in pieces) == 33_333_334


def test_a_small_table_that_everybody_reads_is_cut_for_its_look_ups() -> None:
    tables = [table("hot", 1000), table("cold", 1000)]
    partition = partition_tables(tables, 2, lookups={"hot": 99.0, "cold": 1.0})
    assert [piece.num_rows for pieces in partition.servers for piece in pieces if piece.table == "hot"] == [500, 500]


def test_equal_tables_go_whole_to_servers_in_equal_numbers() -> None:
    tables = [table(f"t{i}", 100_000) for i in range(30)]
    partition = partition_tables(tables, 2)
    assert [len(pieces) for pieces in partition.servers] == [15, 15]
    assert all(piece.num_rows == 100_000 for pieces in partition.servers for piece in pieces)


def test_tables_of_one_row_each_leave_some_servers_without_any() -> None:
    partition = partition_tables([table("one", 1)], 3)
    partition.check([table("one", 1)])
    assert sorted(len(pieces) for pieces in partition.servers) == [0, 0, 1]


def test_a_partition_of_other_tables_is_refused() -> None:
    partition = partition_tables([table("t", 100)], 2)
    for other in ([table("t", 101)], [table("u", 100)], []):
        with pytest.raises(RowsteadError, match="create it again"):
            partition.check(other)
    twice = Partition(
        servers=((ServerPiece(table="t", first_row=0, num_rows=60),), (ServerPiece(table="t", first_row=50, num_rows=50),))
    )
    with pytest.raises(RowsteadError, match="on no server, or on two"):
        twice.check([table("t", 100)])
    with pytest.raises(RowsteadError, match="not a partition"):
        Partition.from_json({"servers": [[["t", 0]]]})
    with pytest.raises(RowsteadError, match="at least 1"):
        partition_tables([table("t", 1)], 0)
