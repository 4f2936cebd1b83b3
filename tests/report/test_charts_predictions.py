"""Measurements are paired only with predictions for the same point."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rowstead.report import charts_predictions
from rowstead.report.inputs import gather
from rowstead.spec.record import Record
from tests.report.made_records import DATE, a_run, entry


def test_a_run_is_paired_only_with_its_own_prediction(tmp_path: Path) -> None:
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
        found = charts_predictions.pairs(gather(asked).entries)
        assert sorted((pair.measured, pair.predicted) for pair in found) == [(100.0, 150.0), (400.0, 200.0)]


def test_only_the_newest_prediction_of_a_point_counts() -> None:
    entries = [entry(study="s", point="a", figures={"samples_per_s": 100.0})]
    entries += [entry("predicted", "here", study="s", point="a", figures={"samples_per_s": speed}) for speed in (500.0, 110.0)]
    (pair,) = charts_predictions.pairs(entries)
    assert pair.predicted == 110.0


def test_the_smallest_of_many_studies_are_merged() -> None:
    many = [charts_predictions.Pair(group=f"g{i}", what="w", measured=1.0, predicted=2.0) for i in range(3000)]
    figure = charts_predictions.draw_pairs([*many, *many[:1]])
    assert figure is not None
    assert len(figure.traces) == 1 + charts_predictions.MAX_GROUPS
    assert figure.traces[1]["name"] == "g0"
    assert figure.traces[-1]["name"] == "2,989 others"
    assert figure.table is not None
    assert sum(int(row[1].replace(",", "")) for row in figure.table.rows) == 3001


def test_predictions_are_paired_with_measurements_of_the_same_point() -> None:
    entries = [
        entry(study="s", point="a", figures={"samples_per_s": 100.0}),
        entry("predicted", "here", study="s", point="a", figures={"samples_per_s": 200.0}),
        entry("predicted", "zion", study="s", point="a", figures={"samples_per_s": 999.0}),
        entry("predicted", "here", study="s", point="b", figures={"samples_per_s": 1.0}),
        entry("predicted", "here", study="other", point="a", figures={"samples_per_s": 1.0}),
        entry(study="s", point="c", figures={"samples_per_s": 80.0}),
        entry("predicted", "here", study="s", point="c", figures={"samples_per_s": 40.0}),
    ]
    found = charts_predictions.pairs(entries)
    assert [(pair.measured, pair.predicted) for pair in found] == [(100.0, 200.0), (80.0, 40.0)]
    errors = charts_predictions.errors(found)
    assert errors is not None
    assert errors.geomean == pytest.approx(1.0)
    assert errors.largest == pytest.approx(1.0)
    assert errors.bias == pytest.approx(1.0)
    figure = charts_predictions.draw_pairs(found)
    assert figure is not None
    assert figure.traces[1]["x"] == [100.0, 80.0]


def test_many_pairs_are_reduced_to_the_worst_and_a_selection_that_is_described() -> None:
    many = [charts_predictions.Pair(group="g", what=str(i), measured=1.0, predicted=1.0 + i / 1e5) for i in range(5000)]
    worst = charts_predictions.Pair(group="g", what="worst", measured=1.0, predicted=50.0)
    shown = charts_predictions.shown_pairs([*many, worst])
    assert len(shown) == charts_predictions.MAX_SHOWN
    assert worst in shown
    figure = charts_predictions.draw_pairs([*many, worst])
    assert figure is not None
    assert "2,000 of 5,001 points" in figure.words


def test_efficiency_prefers_measured_watts_and_omits_entries_without_power() -> None:
    entries = [
        entry("predicted", "zion", study="s", figures={"samples_per_s": 100.0, "nameplate_watts": 50.0}),
        entry("measured", "box", study="s", figures={"samples_per_s": 100.0, "watts": 20.0, "nameplate_watts": 50.0}),
        entry("measured", "other", study="s", figures={"samples_per_s": 100.0}),
    ]
    found = {(one.machine, one.kind): one.samples_per_j for one in charts_predictions.efficiencies(entries)}
    assert found == {("zion", "nameplate"): (2.0,), ("box", "measured"): (5.0,)}
    assert charts_predictions.draw_efficiency([]) is None
