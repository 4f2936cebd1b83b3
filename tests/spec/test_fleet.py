"""Fleets as they are given: in a recipe, by --set and by --fleet."""

from __future__ import annotations

import pytest

from rowstead.spec.errors import RowsteadError, SpecError
from rowstead.spec.fleet import FleetSpec, parse_fleet
from tests.small_runs import small_spec


@pytest.mark.parametrize("words", ["trainers=1,sparse=0", "tables=local,readers=2", "tables=local,sparse=0"])
def test_local_tables_can_be_set_in_either_way(words: str) -> None:
    spec = small_spec("fleet.tables=local")
    assert spec.fleet is not None
    fleet = parse_fleet(words, spec.fleet)
    assert (fleet.tables, fleet.num_sparse) == ("local", 0)
    assert parse_fleet("tables=local").num_sparse == 0


def test_sparse_servers_without_tables_are_refused() -> None:
    with pytest.raises(SpecError, match="must be 0 with `tables: local`"):
        FleetSpec(tables="local", num_sparse=2)
    with pytest.raises(RowsteadError, match="must be 0 with `tables: local`"):
        parse_fleet("tables=local,sparse=3")
