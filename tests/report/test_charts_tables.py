"""Tables are drawn by the placement of a run, with the sizes of its recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rowstead.report import charts_tables
from rowstead.spec.run import load_recipe
from tests.report.made_records import a_run


def test_tables_are_drawn_by_the_placement_of_the_run(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    (run.folder.path / "placement.json").write_text(json.dumps({"tables": [{"name": "sparse_3", "where": "ssd"}]}))
    tables = charts_tables.placed_tables(run)
    assert [table.where for table in tables].count("ssd") == 1
    assert tables[3].num_bytes == 500 * (16 * 4 + 4)
    figure = charts_tables.draw_placement(run.name, tables)
    assert figure is not None
    trace = figure.traces[0]
    assert len(trace["ids"]) == len(set(trace["ids"])) == 8 + 2
    assert sum(trace["values"]) == sum(table.num_bytes for table in tables)


def test_small_tables_are_merged_and_none_is_lost(tmp_path: Path) -> None:
    tables = [charts_tables.PlacedTable(name=f"t{i}", where="device", num_bytes=i + 1.0, read_bytes=1.0) for i in range(1000)]
    figure = charts_tables.draw_placement("run", tables)
    assert figure is not None
    assert len(figure.traces[0]["ids"]) == charts_tables.MAX_TABLES + 2
    assert sum(figure.traces[0]["values"]) == sum(table.num_bytes for table in tables)


def test_feature_sizes_are_those_of_the_recipe() -> None:
    sizes = charts_tables.feature_sizes(load_recipe("m1"))
    assert len(sizes.names) == 30
    assert sum(sizes.num_rows) / 30 == 5_700_000
    assert sum(sizes.ids) / 30 == pytest.approx(28, rel=0.05)
    figure = charts_tables.draw_lengths([("m1", sizes)])
    assert figure is not None
    assert figure.traces[0]["y"] == sorted(figure.traces[0]["y"], reverse=True)


def test_tables_of_a_run_on_a_cpu_are_in_system_memory(tmp_path: Path) -> None:
    run = a_run(tmp_path, machine={"cpu": "Some CPU"})
    assert {table.where for table in charts_tables.placed_tables(run)} == {"host"}
    run = a_run(tmp_path, machine={"cpu": "Some CPU", "gpu": "Some GPU"})
    assert {table.where for table in charts_tables.placed_tables(run)} == {"device"}
