"""Charts of runs show the numbers of their records and events."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rowstead.records.events import EventLog
from rowstead.report import charts_runs
from rowstead.report.inputs import gather
from rowstead.spec.phases import Phase
from rowstead.spec.run import load_recipe
from tests.report.made_records import a_run


def test_time_is_split_by_the_phases_of_the_record(tmp_path: Path) -> None:
    run = a_run(
        tmp_path, figures={"forward_s": 2.0, "backward_s": 3.0, "evaluation_s": 5.0, "checkpoint_s": 0.0, "train_s": 9.0}
    )
    (spent,) = charts_runs.times_spent([run])
    assert spent.seconds == {Phase.FORWARD: 2.0, Phase.BACKWARD: 3.0, Phase.EVALUATION: 5.0}
    assert spent.step_s == {Phase.FORWARD: 0.2, Phase.BACKWARD: 0.3}
    figure = charts_runs.draw_times([spent])
    assert figure is not None
    assert [trace["x"] for trace in figure.traces] == [[20.0], [30.0], [50.0]]
    steps = charts_runs.draw_steps([spent])
    assert steps is not None
    assert [trace["base"] for trace in steps.traces] == [[0.0], [200.0]]


def test_curves_of_a_resumed_run_have_no_point_twice(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    with closing(EventLog(run.folder.events_file)) as events:
        for step in range(1, 1001):
            events.write("train", step=step, ne=1 / step, samples_per_s=100.0 * step)
        events.resumed(500)
        events.write("evaluation", step=501, ne=0.5, ne_best=0.4)
        events.write("calibration", step=501, predicted=[0.1, 0.5], observed=[0.2, 0.4], weight=[10, 20])
    (curves,) = charts_runs.quality_curves([run])
    assert len(curves.training.steps) == charts_runs.MAX_POINTS
    assert curves.training.steps[0] == 1
    assert curves.training.steps[-1] == 500
    assert curves.evaluation.values == (0.5,)
    assert curves.best == 0.4
    (calibration,) = charts_runs.calibrations([run])
    assert (calibration.predicted, calibration.observed, calibration.weight) == ((0.1, 0.5), (0.2, 0.4), (10.0, 20.0))
    figure = charts_runs.draw_calibration([calibration], {})
    assert figure is not None
    assert figure.traces[1]["y"] == [0.2, 0.4]
    (drawn,) = charts_runs.draw_quality([curves], {})
    assert drawn.traces[1]["x"] == [501 * 2048]  # samples: the batch is the recipe's
    assert charts_runs.draw_speed(charts_runs.speed_curves([run]), {}) is not None


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
def test_an_invalid_calibration_is_not_drawn(tmp_path: Path, parts: dict[str, Any]) -> None:
    run = a_run(tmp_path)
    lines = [{"kind": "calibration", "step": 1, **parts}, {"kind": "train", "step": 1, "ne": 10**400, "samples_per_s": True}]
    run.folder.events_file.write_text("".join(json.dumps(line) + "\n" for line in lines) + "[" * 100_000)
    assert charts_runs.calibrations([run]) == []
    assert charts_runs.quality_curves([run]) == []
    assert charts_runs.draw_calibration([], {}) is None


def test_a_run_has_one_color_in_all_charts_and_a_log_its_own_best_possible_ne(tmp_path: Path) -> None:
    runs = [a_run(tmp_path, figures={"ne": 0.8}) for _ in range(3)]
    other = load_recipe("quickstart", ["data.synth.seed=7"])
    runs[2].folder.write_spec(other)
    for index, run in enumerate(runs):
        with closing(EventLog(run.folder.events_file)) as events:
            if index:  # the first run has no curve
                events.write("evaluation", step=10, ne=0.9, ne_best=0.5 + 0.1 * index)
            for step in (10, 20):
                events.write("train", step=step, samples_per_s=100.0)
    views = sorted(gather([tmp_path]).runs, key=lambda run: run.name)
    inks = charts_runs.inks_of(views)
    speed = charts_runs.draw_speed(charts_runs.speed_curves(views), inks)
    charts = charts_runs.draw_quality(charts_runs.quality_curves(views), inks)
    assert speed is not None
    colors = {trace["name"]: trace["line"]["color"] for trace in speed.traces}
    assert len(set(colors.values())) == 3
    assert [[trace["line"]["color"] for trace in chart.traces] for chart in charts] == [
        [colors["quickstart-002"]],
        [colors["quickstart-003"]],
    ]
    assert [[shape["y0"] for shape in chart.layout["shapes"]] for chart in charts] == [[0.6], [0.7]]
