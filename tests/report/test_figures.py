"""The numbers behind figures are those of the records; drawings only carry them."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowstead.records.events import EventLog
from rowstead.records.run_folder import RunFolder
from rowstead.records.store import Entry
from rowstead.report import of_forecasts, of_populations, of_runs, of_searches, of_studies, of_tables
from rowstead.report.look import DARK, LIGHT, Figure, label, labels, script_json, short, thinned
from rowstead.report.material import RunView, gather
from rowstead.spec.record import Record
from rowstead.spec.run import load_recipe

DATE = "2026-11-15T12:00:00+00:00"


def entry(kind: str = "measured", machine: str | None = None, **options: Any) -> Entry:
    figures = options.pop("figures", {"samples_per_s": 1000.0})
    record = Record(
        kind=kind,  # type: ignore[arg-type]
        name=options.pop("name", "suite"),
        spec_digest=options.pop("digest", "d"),
        date=DATE,
        machine={} if machine is None else {"name": machine},
        figures=figures,
    )
    return Entry(record=record, id=str(id(record)), **options)


def a_run(root: Path, name: str = "quickstart", *, figures: dict[str, float] | None = None) -> RunView:
    folder = RunFolder.create(root, name)
    folder.write_spec(load_recipe("quickstart"))
    record = Record(
        kind="measured",
        name=name,
        spec_digest="d",
        date=DATE,
        figures={"num_steps": 10, "samples_per_s": 5e4, **(figures or {})},
    )
    folder.write_record(record)
    return next(run for run in gather([folder.path]).runs)


def test_time_is_shared_among_the_phases_of_the_record(tmp_path: Path) -> None:
    run = a_run(
        tmp_path, figures={"forward_s": 2.0, "backward_s": 3.0, "evaluation_s": 5.0, "checkpoint_s": 0.0, "train_s": 9.0}
    )
    (spent,) = of_runs.times_spent([run])
    assert spent.seconds == {"forward_s": 2.0, "backward_s": 3.0, "evaluation_s": 5.0}
    assert spent.step_s == {"forward_s": 0.2, "backward_s": 0.3}
    figure = of_runs.draw_times([spent])
    assert figure is not None
    assert [trace["x"] for trace in figure.traces] == [[20.0], [30.0], [50.0]]
    steps = of_runs.draw_steps([spent])
    assert steps is not None
    assert [trace["base"] for trace in steps.traces] == [[0.0], [200.0]]


def test_curves_of_a_resumed_run_have_no_point_twice(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    with EventLog(run.folder.events_file) as events:
        for step in range(1, 1001):
            events.write("train", step=step, ne=1 / step, samples_per_s=100.0 * step)
        events.resumed(500)
        events.write("evaluation", step=501, ne=0.5, ne_best=0.4)
        events.write("calibration", step=501, predicted=[0.1, 0.5], observed=[0.2, 0.4], weight=[10, 20])
    (curves,) = of_runs.quality_curves([run])
    assert len(curves.training.steps) == of_runs.MAX_POINTS
    assert curves.training.steps[0] == 1
    assert curves.training.steps[-1] == 500
    assert curves.evaluation.values == (0.5,)
    assert curves.best == 0.4
    (calibration,) = of_runs.calibrations([run])
    assert (calibration.predicted, calibration.observed, calibration.weight) == ((0.1, 0.5), (0.2, 0.4), (10.0, 20.0))
    figure = of_runs.draw_calibration([calibration])
    assert figure is not None
    assert figure.traces[1]["y"] == [0.2, 0.4]
    drawn = of_runs.draw_quality([curves])
    assert drawn is not None
    assert drawn.traces[1]["x"] == [501 * 2048]  # samples: the batch is the recipe's
    assert of_runs.draw_speed(of_runs.speed_curves([run])) is not None


@pytest.mark.parametrize(
    "parts",
    [
        {"predicted": [], "observed": [], "weight": []},
        {"predicted": [None], "observed": [0.1], "weight": [1]},
        {"predicted": ["x"], "observed": [0.1], "weight": [1]},
        {"predicted": [0.1], "observed": [0.1, 0.2], "weight": [1]},
        {"predicted": 7, "observed": [0.1], "weight": [1]},
        {"predicted": [10**400], "observed": [0.1], "weight": [1]},
    ],
)
def test_a_calibration_that_is_none_is_not_drawn(tmp_path: Path, parts: dict[str, Any]) -> None:
    run = a_run(tmp_path)
    lines = [{"kind": "calibration", "step": 1, **parts}, {"kind": "train", "step": 1, "ne": 10**400, "samples_per_s": True}]
    run.folder.events_file.write_text("".join(json.dumps(line) + "\n" for line in lines) + "[" * 100_000)
    assert of_runs.calibrations([run]) == []
    assert of_runs.quality_curves([run]) == []
    assert of_runs.draw_calibration([]) is None


def test_a_run_is_paired_with_what_was_predicted_for_it_and_with_no_other(tmp_path: Path) -> None:
    runs = [a_run(tmp_path, figures={"samples_per_s": speed}) for speed in (100.0, 400.0)]
    for run, speed in zip(runs, (150.0, 200.0), strict=True):
        record = Record(
            kind="predicted",
            name="quickstart",
            spec_digest="d",
            date=DATE,
            machine={"name": "box"},
            figures={"samples_per_s": speed},
        )
        run.folder.predicted_file.write_text(json.dumps(vars(record)))
    for asked in ([tmp_path], [run.folder.path for run in runs]):
        found = of_forecasts.pairs(gather(asked).entries)
        assert sorted((pair.measured, pair.predicted) for pair in found) == [(100.0, 150.0), (400.0, 200.0)]


def test_only_the_newest_prediction_of_a_point_counts() -> None:
    entries = [entry(study="s", point="a", figures={"samples_per_s": 100.0})]
    entries += [entry("predicted", "here", study="s", point="a", figures={"samples_per_s": speed}) for speed in (500.0, 110.0)]
    (pair,) = of_forecasts.pairs(entries)
    assert pair.predicted == 110.0


def test_of_many_studies_the_smaller_ones_are_shown_together() -> None:
    many = [of_forecasts.Pair(group=f"g{i}", what="w", measured=1.0, predicted=2.0) for i in range(3000)]
    figure = of_forecasts.draw_pairs([*many, *many[:1]])
    assert figure is not None
    assert len(figure.traces) == 1 + of_forecasts.MAX_GROUPS
    assert figure.traces[1]["name"] == "g0"
    assert figure.traces[-1]["name"] == "2,989 others"
    assert figure.table is not None
    assert sum(int(row[1].replace(",", "")) for row in figure.table.rows) == 3001


def test_machines_that_measured_the_same_sweep_are_kept_apart() -> None:
    def on(cpu: str, speed: float) -> list[Entry]:
        found = [entry(study="g", point=str(x), axes={"x": x}, figures={"samples_per_s": speed * x}) for x in (1, 2)]
        return [
            dataclasses.replace(one, record=dataclasses.replace(one.record, machine={"cpu": cpu, "num_usable_cores": 2}))
            for one in found
        ]

    study = of_studies.study_of("g", [*on("fast", 10.0), *on("slow", 1.0)])
    assert study is not None
    assert {name: [cell.value for cell in cells] for name, cells in study.series.items()} == {
        "measured on fast, 2 cores": [10.0, 20.0],
        "measured on slow, 2 cores": [1.0, 2.0],
    }
    assert "several machines" in of_studies.draw_study(study)[0].words
    alone = of_studies.study_of("g", on("fast", 10.0))
    assert alone is not None
    assert list(alone.series) == [of_studies.MEASURED]


def test_an_axis_with_null_among_its_values_is_drawn() -> None:
    entries = [entry(study="g", point=str(v), axes={"stop": v}, figures={"samples_per_s": 1.0}) for v in (None, 3)]
    study = of_studies.study_of("g", entries)
    assert study is not None
    assert of_studies.draw_study(study)[0].traces[0]["x"] == ["null", "3"]


def test_predictions_are_paired_with_what_was_measured_at_the_same_point() -> None:
    entries = [
        entry(study="s", point="a", figures={"samples_per_s": 100.0}),
        entry("predicted", "here", study="s", point="a", figures={"samples_per_s": 200.0}),
        entry("predicted", "zion", study="s", point="a", figures={"samples_per_s": 999.0}),
        entry("predicted", "here", study="s", point="b", figures={"samples_per_s": 1.0}),
        entry("predicted", "here", study="other", point="a", figures={"samples_per_s": 1.0}),
        entry(study="s", point="c", figures={"samples_per_s": 80.0}),
        entry("predicted", "here", study="s", point="c", figures={"samples_per_s": 40.0}),
    ]
    found = of_forecasts.pairs(entries)
    assert [(pair.measured, pair.predicted) for pair in found] == [(100.0, 200.0), (80.0, 40.0)]
    errors = of_forecasts.errors(found)
    assert errors is not None
    assert errors.geomean == pytest.approx(1.0)
    assert errors.largest == pytest.approx(1.0)
    assert errors.bias == pytest.approx(1.0)
    figure = of_forecasts.draw_pairs(found)
    assert figure is not None
    assert figure.traces[1]["x"] == [100.0, 80.0]


def test_of_many_pairs_the_worst_are_drawn_and_the_selection_is_said() -> None:
    many = [of_forecasts.Pair(group="g", what=str(i), measured=1.0, predicted=1.0 + i / 1e5) for i in range(5000)]
    worst = of_forecasts.Pair(group="g", what="worst", measured=1.0, predicted=50.0)
    shown = of_forecasts.shown_pairs([*many, worst])
    assert len(shown) == of_forecasts.MAX_SHOWN
    assert worst in shown
    figure = of_forecasts.draw_pairs([*many, worst])
    assert figure is not None
    assert "2,000 of 5,001 points" in figure.words


def test_efficiency_prefers_measured_watts_and_leaves_out_what_has_none() -> None:
    entries = [
        entry("predicted", "zion", study="s", figures={"samples_per_s": 100.0, "nameplate_watts": 50.0}),
        entry("measured", "box", study="s", figures={"samples_per_s": 100.0, "watts": 20.0, "nameplate_watts": 50.0}),
        entry("measured", "other", study="s", figures={"samples_per_s": 100.0}),
    ]
    found = {(one.machine, one.kind): one.samples_per_j for one in of_forecasts.efficiencies(entries)}
    assert found == {("zion", "nameplate"): (2.0,), ("box", "measured"): (5.0,)}
    assert of_forecasts.draw_efficiency([]) is None


def grid(measured: bool = True) -> list[Entry]:
    return [
        entry("measured" if measured else "predicted", None if measured else "zion", study="g", point=f"{d}-{s}",
              axes={"dense": d, "sparse": s}, figures={"samples_per_s": float(d * s)})
        for d in (64, 16, 256) for s in (2, 8, 4)
    ]  # fmt: skip


def test_a_study_of_two_axes_is_a_table_in_rising_order() -> None:
    study = of_studies.study_of("g", [*grid(), *grid(measured=False)])
    assert study is not None
    assert [one.values for one in study.axes] == [(16, 64, 256), (2, 4, 8)]
    assert study.table(of_studies.MEASURED) == [[32, 64, 128], [128, 256, 512], [512, 1024, 2048]]
    figures = of_studies.draw_study(study)
    assert [figure.traces[0]["type"] for figure in figures] == ["heatmap", "heatmap", "surface"]
    assert figures[2].traces[0]["z"][2][2] == 1.0
    ratio = of_studies.ratio_of(study, "predicted: zion", of_studies.MEASURED)
    assert ratio is not None
    assert {cell.value for cells in ratio.series.values() for cell in cells} == {1.0}


def test_seeds_are_no_axis_but_a_spread() -> None:
    entries = [
        entry(study="q", axes={"batch": b, "seed": s}, figures={"ne": 0.7 + b / 1e4 + s / 1e3})
        for b in (1, 2)
        for s in (1, 2, 3)
    ]
    study = of_studies.study_of("q", entries, "ne")
    assert study is not None
    assert [one.name for one in study.axes] == ["batch"]
    first = study.series[of_studies.MEASURED][0]
    assert (first.num_runs, round(first.low, 4), round(first.value, 4), round(first.high, 4)) == (3, 0.7011, 0.7021, 0.7031)
    (figure,) = of_studies.draw_study(study)
    assert figure.traces[0]["error_y"]["array"] == pytest.approx([0.001, 0.001])


def test_a_point_that_failed_is_counted_and_not_drawn() -> None:
    entries = [*grid(), entry(study="g", axes={"dense": 1, "sparse": 1}, figures={}, failure="out of memory")]
    study = of_studies.study_of("g", entries)
    assert study is not None
    assert study.num_failed == 1
    assert 1 not in study.axes[0].values
    assert "1 points failed" in of_studies.draw_study(study)[0].words


def test_an_axis_of_words_is_drawn_as_bars_and_layers_are_written_short() -> None:
    entries = [entry(study="p", axes={"tables in": place}, figures={"samples_per_s": 5.0}) for place in ("GPU", "SSD")]
    study = of_studies.study_of("p", entries)
    assert study is not None
    assert of_studies.draw_study(study)[0].traces[0]["type"] == "bar"
    assert [of_studies.words_of(value) for value in ([512] * 3, [512, 256], 1000, 0.5, "x", True)] == [
        "512^3", "512-256", "1,000", "0.5", "x", "true",
    ]  # fmt: skip


def test_a_population_is_drawn_as_a_spread_with_use_and_servers() -> None:
    entries = [
        entry(
            study="f",
            axes={"a": i, "b": -i},
            figures={"samples_per_s": 1.0 + i, "cpu_share_mean": i / 10, "num_trainers": i % 2 + 1},
        )
        for i in range(8)
    ]
    study = of_studies.study_of("f", entries)
    assert study is not None
    assert study.is_population
    assert of_studies.draw_study(study)[0].traces[0]["type"] == "violin"
    (use,) = of_populations.uses(entries)
    assert use.shares == tuple(i / 10 for i in range(8))
    (counts,) = of_populations.server_counts(entries)
    assert counts.counts == {1: 4, 2: 4}
    assert counts.largest_share == 0.5


def trial(number: int, objective: float, speed: float = 10.0, **options: Any) -> Entry:
    figures = {"objective": objective, "trial_number": float(number), "samples_per_s": speed}
    return entry(source="trial", study="t", axes={"lr": number}, figures=figures, **options)


def test_a_search_is_drawn_with_its_best_so_far_and_its_front() -> None:
    trials = [trial(0, 0.9), trial(1, 0.7, 5.0), trial(2, 0.8, 20.0), trial(3, 0.1, failure="pruned at step 10")]
    history, front = of_searches.draw_search("t", trials, [])
    assert history.traces[0]["y"] == [0.9, 0.7, 0.8]
    assert history.traces[1]["y"] == [0.9, 0.7, 0.7]
    assert "not counted: 1" in history.words
    assert (front.traces[0]["x"], front.traces[1]["x"]) == ([10.0], [5.0, 20.0])
    assert of_searches.draw_search("t", trials[3:], []) == []


def test_trials_below_the_speed_that_was_asked_for_are_not_the_best(tmp_path: Path) -> None:
    trials = [trial(0, 0.9), trial(1, 0.7, 5.0), trial(2, 0.8, 20.0)]
    (tmp_path / "studies" / "t").mkdir(parents=True)
    (tmp_path / "studies" / "t" / "tune.yaml").write_text("samples_per_s: 8\n")
    (tmp_path / "records.jsonl").write_text("")
    for place in (tmp_path, tmp_path / "records.jsonl"):
        history = of_searches.draw_search("t", trials, [str(place)])[0]
        assert history.traces[1]["y"] == [0.9, 0.8]
        assert "not counted: 1" in history.words


def test_effects_are_drawn_with_their_interval_beside_the_tolerance() -> None:
    base = {1: 0.7, 2: 0.72, 3: 0.71}
    entries = [
        entry(source="quality", seed=seed, axes={"axis": "baseline", "value": None}, figures={"ne": ne})
        for seed, ne in base.items()
    ]
    for value, factor in ((4096, 1.01), (8192, 1.0)):
        axes = {"axis": "batch size", "value": value}
        entries += [
            entry(source="quality", seed=seed, axes=axes, figures={"ne": ne * factor + seed * 1e-6})
            for seed, ne in base.items()
        ]
    figure = of_searches.draw_effects("q", entries)
    assert figure is not None
    assert figure.traces[0]["x"] == pytest.approx([1.0, 0.0], abs=0.01)
    assert figure.traces[0]["marker"]["color"] == ["@bad", "@good"]
    assert figure.layout["shapes"][0]["x0"] == pytest.approx(0.1)
    assert all(0 < half < 0.01 for half in figure.traces[0]["error_x"]["array"])


def test_importance_is_read_beside_the_store_and_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "studies" / "t").mkdir(parents=True)
    (tmp_path / "studies" / "t" / "importance.json").write_text(json.dumps({"lr": 0.75, "eps": 0.25, "bad": "x"}))
    assert of_searches.importance("t", [str(tmp_path)]) == {"lr": 0.75, "eps": 0.25}
    (tmp_path / "importance.json").write_text(json.dumps({"lr": 1.0}))
    assert of_searches.importance("..", [str(tmp_path)]) == {}
    assert of_searches.importance("../t", [str(tmp_path)]) == {}


def test_tables_are_where_the_run_put_them(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    (run.folder.path / "placement.json").write_text(json.dumps({"tables": [{"name": "sparse_3", "where": "ssd"}]}))
    tables = of_tables.placed_tables(run)
    assert [table.where for table in tables].count("ssd") == 1
    assert tables[3].num_bytes == 500 * (16 * 4 + 4)
    figure = of_tables.draw_placement(run.name, tables)
    assert figure is not None
    trace = figure.traces[0]
    assert len(trace["ids"]) == len(set(trace["ids"])) == 8 + 2
    assert sum(trace["values"]) == sum(table.num_bytes for table in tables)


def test_many_tables_are_joined_and_none_is_lost(tmp_path: Path) -> None:
    tables = [of_tables.PlacedTable(name=f"t{i}", where="device", num_bytes=i + 1.0, read_bytes=1.0) for i in range(1000)]
    figure = of_tables.draw_placement("run", tables)
    assert figure is not None
    assert len(figure.traces[0]["ids"]) == of_tables.MAX_TABLES + 2
    assert sum(figure.traces[0]["values"]) == sum(table.num_bytes for table in tables)


def test_sizes_of_features_are_the_recipes() -> None:
    sizes = of_tables.feature_sizes(load_recipe("m1"))
    assert len(sizes.names) == 30
    assert set(sizes.num_rows) == {5_700_000}
    assert sum(sizes.ids) / 30 == pytest.approx(28, rel=0.05)
    figure = of_tables.draw_lengths([("m1", sizes)])
    assert figure is not None
    assert figure.traces[0]["y"] == sorted(figure.traces[0]["y"], reverse=True)


@given(st.text(max_size=200))
def test_a_label_has_no_markup_and_is_never_a_colour(text: str) -> None:
    made = label(text)
    assert "<" not in made
    assert not made.startswith("@")
    figure = Figure(key="k", title="t", words="w", traces=[{"name": made}], layout={})
    assert figure.plain(LIGHT)["data"][0]["name"] == made


def test_names_that_are_cut_alike_stay_different() -> None:
    made = labels(["x" * 100 + "a", "x" * 100 + "b", "x"])
    assert len(set(made)) == 3


@given(st.text())
def test_json_inside_a_script_can_neither_end_it_nor_its_line(text: str) -> None:
    made = script_json({"x": text})
    assert not set("<>&\u2028\u2029\n") & set(made)
    assert json.loads(made)["x"] == text


def test_numbers_that_are_none_are_null_and_others_short() -> None:
    assert short([math.nan, math.inf, 1 / 3, 5, None, "x", True]) == [None, None, 0.333333, 5, None, "x", True]


def test_day_and_night_name_the_same_colours() -> None:
    assert LIGHT.keys() == DARK.keys()


@given(st.lists(st.integers(), max_size=300), st.integers(2, 50))
def test_thinning_keeps_order_ends_and_bound(items: list[int], most: int) -> None:
    kept = thinned(items, most)
    assert len(kept) == min(len(items), most)
    if items:
        assert (kept[0], kept[-1]) == (items[0], items[-1])
