"""Studies are tables in ascending order, with one series per machine; populations are distributions."""

from __future__ import annotations

import dataclasses

import pytest

from rowstead.records.store import StoreEntry
from rowstead.report import charts_populations, charts_studies
from tests.report.made_records import entry


def test_machines_that_measured_the_same_sweep_are_kept_apart() -> None:
    def on(cpu: str, speed: float) -> list[StoreEntry]:
        found = [entry(study="g", point=str(x), axes={"x": x}, figures={"samples_per_s": speed * x}) for x in (1, 2)]
        return [
            dataclasses.replace(one, record=dataclasses.replace(one.record, machine={"cpu": cpu, "num_usable_cores": 2}))
            for one in found
        ]

    study = charts_studies.study_of("g", [*on("fast", 10.0), *on("slow", 1.0)])
    assert study is not None
    assert {name: [cell.value for cell in cells] for name, cells in study.series.items()} == {
        "measured on fast, 2 cores": [10.0, 20.0],
        "measured on slow, 2 cores": [1.0, 2.0],
    }
    assert "several machines" in charts_studies.draw_study(study)[0].words
    single = charts_studies.study_of("g", on("fast", 10.0))
    assert single is not None
    assert list(single.series) == [charts_studies.MEASURED]


def test_an_axis_with_null_among_its_values_is_drawn() -> None:
    entries = [entry(study="g", point=str(v), axes={"stop": v}, figures={"samples_per_s": 1.0}) for v in (None, 3)]
    study = charts_studies.study_of("g", entries)
    assert study is not None
    assert charts_studies.draw_study(study)[0].traces[0]["x"] == ["null", "3"]


def grid(measured: bool = True) -> list[StoreEntry]:
    return [
        entry("measured" if measured else "predicted", None if measured else "zion", study="g", point=f"{d}-{s}",
              axes={"dense": d, "sparse": s}, figures={"samples_per_s": float(d * s)})
        for d in (64, 16, 256) for s in (2, 8, 4)
    ]  # fmt: skip


def test_a_study_with_two_axes_is_a_table_in_ascending_order() -> None:
    study = charts_studies.study_of("g", [*grid(), *grid(measured=False)])
    assert study is not None
    assert [one.values for one in study.axes] == [(16, 64, 256), (2, 4, 8)]
    assert study.table(charts_studies.MEASURED) == [[32, 64, 128], [128, 256, 512], [512, 1024, 2048]]
    figures = charts_studies.draw_study(study)
    assert [figure.traces[0]["type"] for figure in figures] == ["heatmap", "heatmap", "surface"]
    assert figures[2].traces[0]["z"][2][2] == 1.0
    ratio = charts_studies.ratio_of(study, "predicted: zion", charts_studies.MEASURED)
    assert ratio is not None
    assert {cell.value for cells in ratio.series.values() for cell in cells} == {1.0}


def test_seeds_are_error_bars_not_an_axis() -> None:
    entries = [
        entry(study="q", axes={"batch": b, "seed": s}, figures={"ne": 0.7 + b / 1e4 + s / 1e3})
        for b in (1, 2)
        for s in (1, 2, 3)
    ]
    study = charts_studies.study_of("q", entries, "ne")
    assert study is not None
    assert [one.name for one in study.axes] == ["batch"]
    first = study.series[charts_studies.MEASURED][0]
    assert (first.num_runs, round(first.low, 4), round(first.value, 4), round(first.high, 4)) == (3, 0.7011, 0.7021, 0.7031)
    (figure,) = charts_studies.draw_study(study)
    assert figure.traces[0]["error_y"]["array"] == pytest.approx([0.001, 0.001])


def test_a_point_that_failed_is_counted_and_not_drawn() -> None:
    entries = [*grid(), entry(study="g", axes={"dense": 1, "sparse": 1}, figures={}, failure="out of memory")]
    study = charts_studies.study_of("g", entries)
    assert study is not None
    assert study.num_failed == 1
    assert 1 not in study.axes[0].values
    assert "1 points failed" in charts_studies.draw_study(study)[0].words


def test_a_categorical_axis_is_drawn_as_bars_and_equal_layers_are_abbreviated() -> None:
    entries = [entry(study="p", axes={"tables in": memory}, figures={"samples_per_s": 5.0}) for memory in ("GPU", "SSD")]
    study = charts_studies.study_of("p", entries)
    assert study is not None
    assert charts_studies.draw_study(study)[0].traces[0]["type"] == "bar"
    assert [charts_studies.words_of(value) for value in ([512] * 3, [512, 256], 1000, 0.5, "x", True)] == [
        "512^3", "512-256", "1,000", "0.5", "x", "true",
    ]  # fmt: skip


def test_a_population_is_drawn_as_distributions_with_servers() -> None:
    entries = [
        entry(
            study="f",
            axes={"a": i, "b": -i},
            figures={"samples_per_s": 1.0 + i, "num_trainers": i % 2 + 1},
        )
        for i in range(8)
    ]
    study = charts_studies.study_of("f", entries)
    assert study is not None
    assert study.is_population
    assert charts_studies.draw_study(study)[0].traces[0]["type"] == "violin"
    (counts,) = charts_populations.server_counts(entries)
    assert counts.counts == {1: 4, 2: 4}
    assert counts.largest_share == 0.5


def use_entries(facts: dict[str, float | str]) -> list[StoreEntry]:
    """Fleets of two sparse servers, each run busier than the one before."""
    figures = {"train_s": 10.0, "num_trainers": 1, "num_sparse_servers": 2, "sparse_rss_max_bytes": 2e9, "sparse_cpu_s": 4.0}
    machine = {"num_usable_cores": 2, "memory_bytes": 8e9, **facts}
    runs = [
        entry(
            figures={
                **figures,
                "trainer_cpu_s": 4.0 * i,
                "trainer_num_bytes_sent": 1e6 * i,
                "sparse_memory_traffic_bytes": 1e9 * i,
            }
        )
        for i in (1, 2, 4)
    ]
    return [dataclasses.replace(run, record=dataclasses.replace(run.record, machine=machine)) for run in runs]


def test_utilization_is_by_resource_and_role_and_of_one_server() -> None:
    facts = {"memory_bytes_per_s": 1e9, "memory_traffic_by": "perf counters"}
    found = {(use.resource.title, use.role): use for use in charts_populations.uses(use_entries(facts))}
    assert found["CPU", "trainers"].shares == pytest.approx((0.2, 0.4, 0.8))
    assert found["CPU", "sparse servers"].shares == pytest.approx((0.1,) * 3)
    assert found["memory capacity", "sparse servers"].shares == (0.25,) * 3
    assert found["memory bandwidth", "sparse servers"].shares == pytest.approx((0.05, 0.1, 0.2))
    assert found["network", "trainers"].amounts == pytest.approx((1e5, 2e5, 4e5))
    assert found["network", "trainers"].shares is None
    assert ("memory bandwidth", "trainers") not in found
    charts = charts_populations.draw_uses("fig5", list(found.values()))
    assert [chart.title for chart in charts] == [f"fig5: {one.title}" for one in charts_populations.RESOURCES]
    assert "Counted by perf counters." in charts[2].words


def test_a_bandwidth_that_is_not_known_is_said_and_drawn_in_bytes() -> None:
    charts = charts_populations.draw_uses("fig5", charts_populations.uses(use_entries({"memory_traffic_by": "kernels"})))
    assert "rowstead calibrate" in charts[2].words
    assert charts[2].layout["yaxis"]["title"]["text"] == "bytes/s"
    assert charts_populations.draw_uses("fig5", charts_populations.uses([entry(figures={"train_s": 1.0, "cpu_s": 1.0})])) == []


def test_what_is_used_has_its_own_unit_where_the_machine_is_not_known() -> None:
    figures = {"train_s": 10.0, "cpu_s": 5.0, "rss_max_bytes": 1e9, "num_bytes_sent": 1e6}
    entries = [entry(figures=figures, study="s", point=str(index)) for index in range(3)]
    charts = charts_populations.draw_uses("s", charts_populations.uses(entries))
    units = {chart.title.removeprefix("s: "): chart.layout["yaxis"]["title"]["text"] for chart in charts}
    assert units == {"CPU": "cores", "memory capacity": "bytes", "network": "bytes/s"}
    tables = [chart.table.rows[0][1] for chart in charts if chart.table is not None]
    assert tables == ["0.5", "1.0 GB", "100.0 KB/s"]
