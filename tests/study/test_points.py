"""The points of a sweep: every combination once, names that stay, and mistakes that are said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rowstead.records.store import StoreEntry
from rowstead.spec.axis import AxisSpec, axis_from, with_settings
from rowstead.spec.errors import RowsteadError, SpecError
from rowstead.spec.parse import parse, settings_from
from rowstead.spec.record import Record
from rowstead.spec.sweep import SweepSpec, load_sweep, sweep_names
from rowstead.study.points import point_of, points_of
from rowstead.study.predictions import expected_s
from rowstead.study.sweep import remaining_s
from tests.small_runs import small_plain

HOSTILE = "<script>alert(1)</script>; rm -rf / $(x) `y` ‮猫 " + "z" * 200


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(small_plain()))
    return path


def spec_of(recipe: Path, **changes: Any) -> SweepSpec:
    plain = {"name": "s", "recipe": str(recipe), "grid": [{"keys": "train.batch_size", "values": [64, 128]}]}
    return parse(SweepSpec, plain | changes)


def test_every_combination_is_a_point_once(recipe: Path) -> None:
    grid = [
        {"name": "batch", "keys": "train.batch_size", "values": [64, 128, 64]},
        {"name": "features", "keys": ["data.synth.num_dense", "features.dense.0.repeat"], "values": [2, 4]},
        {"name": "net", "options": {"a": {"model.bottom": [8]}, "b": {"model.bottom": [8, 8], "model.top": [4]}}},
    ]
    points = points_of(spec_of(recipe, grid=grid))
    assert len(points) == 8
    assert len({point.key for point in points}) == 8
    last = points[-1]
    assert last.axes == {"batch": 128, "features": 4, "net": "b"}
    assert last.spec is not None
    assert last.spec.model.top == (4,)
    assert len(last.spec.features.expanded_dense()) == 4


def test_a_key_stays_when_the_sweep_grows(recipe: Path) -> None:
    small = {point.key for point in points_of(spec_of(recipe))}
    grid = [{"keys": "train.batch_size", "values": [32, 64, 128]}, {"keys": "seed", "values": [1, 2]}]
    assert small < {point.key for point in points_of(spec_of(recipe, grid=grid))}


def test_a_population_is_drawn_within_its_ranges_and_grows_at_its_end(recipe: Path) -> None:
    grid = [
        {"name": "lr", "keys": "train.dense_optimizer.lr", "low": 0.001, "high": 0.1, "log": True},
        {"name": "batch", "keys": "train.batch_size", "low": 1, "high": 8, "whole": True},
    ]
    few, many = (points_of(spec_of(recipe, grid=grid, population={"num_points": n})) for n in (5, 20))
    assert [point.key for point in few] == [point.key for point in many[:5]]
    assert all(0.001 <= point.axes["lr"] <= 0.1 and point.axes["batch"] in range(1, 9) for point in many)
    assert len(many) == 20


def test_a_point_that_makes_no_recipe_is_kept_with_its_reason(recipe: Path) -> None:
    good, bad = points_of(spec_of(recipe, grid=[{"keys": "train.batch_size", "values": [64, 0]}]))
    assert good.problem is None
    assert bad.spec is None
    assert "train.batch_size" in str(bad.problem)


def test_a_sweep_over_a_key_that_is_none_is_refused(recipe: Path) -> None:
    with pytest.raises(SpecError, match="batch_size"):
        points_of(spec_of(recipe, grid=[{"keys": "train.batchsize", "values": [64, 128]}]))


@pytest.mark.parametrize(
    ("grid", "problem"),
    [
        ([], "at least one axis"),
        ([{"keys": "seed"}], "one of"),
        ([{"keys": "seed", "values": [1], "low": 1, "high": 2}], "one of"),
        ([{"keys": "seed", "low": 1, "high": 2}], "population"),
        ([{"values": [1]}], "keys"),
        ([{"keys": "run.shell", "values": [1]}], "run.processes"),
        ([{"keys": "seed", "values": [1]}, {"keys": "seed", "values": [2]}], "another axis"),
        ([{"keys": "seed", "values": [1]}, {"name": "x", "keys": "seed", "values": [2]}], "set by another"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(recipe: Path, grid: list[Any], problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        spec_of(recipe, grid=grid)


def test_hostile_names_and_values_are_data(recipe: Path) -> None:
    grid = [{"name": HOSTILE, "options": {HOSTILE: {"name": "fine"}, "b": {"data.synth.seed": 2}}}]
    points = points_of(spec_of(recipe, grid=grid))
    assert [point.axes[HOSTILE] for point in points] == [HOSTILE, "b"]
    with pytest.raises(SpecError, match="letters"):
        spec_of(recipe, name="../../etc")
    changed = with_settings(small_plain(), {"features.dense.0.column": HOSTILE})
    assert changed["features"]["dense"][0]["column"] == HOSTILE


def test_an_axis_of_the_command_line() -> None:
    assert axis_from("train.batch_size=64,128").values == (64, 128)
    assert axis_from("model.top=[[64], [64, 32]]").values == ([64], [64, 32])
    assert axis_from("train.precision=fp32,bf16").values == ("fp32", "bf16")
    assert settings_from(["a.b=[1, 2]", "c=x"]) == {"a.b": [1, 2], "c": "x"}
    for wrong in ("", "a", "a=", "=1", "a=[1"):
        with pytest.raises(RowsteadError):
            axis_from(wrong)


@pytest.mark.parametrize("name", sweep_names())
def test_every_shipped_sweep_makes_recipes_in_both_sizes(name: str) -> None:
    spec = load_sweep(name)
    assert spec.name == name
    for one in (spec, spec.made_quick()):
        assert all(point.spec is not None for point in points_of(one))
    assert len(points_of(spec.made_quick())) <= 16


def test_the_shipped_sweeps_are_the_figures_of_the_study() -> None:
    assert set(sweep_names()) == {"fig5", "fig9", *(f"fig{number}" for number in range(10, 16))}


def test_a_recipe_of_one_run_needs_axes(recipe: Path) -> None:
    with pytest.raises(SpecError, match="--grid"):
        load_sweep(str(recipe))
    assert load_sweep(str(recipe), grid=[AxisSpec(keys=("seed",), values=(1, 2))]).name == "small-sweep"
    with pytest.raises(RowsteadError, match="fig10"):
        load_sweep("fig100")


def test_the_time_left_is_exact_where_points_take_what_was_expected() -> None:
    expected = [1.0, 5.0, 2.0, 8.0, 3.0]
    taken = [4.0 + 2.5 * one for one in expected]
    assert remaining_s([], [1.0]) is None
    for num_done in (3, 4):
        done = list(zip(expected[:num_done], taken[:num_done], strict=True))
        assert remaining_s(done, expected[num_done:]) == pytest.approx(sum(taken[num_done:]))
    assert remaining_s(list(zip(expected, taken, strict=True)), []) == 0


def test_the_time_left_is_the_mean_where_nothing_is_expected() -> None:
    assert remaining_s([(None, 2.0), (None, 4.0)], [None, None]) == pytest.approx(6.0)
    assert remaining_s([(1.0, 2.0), (1.0, 4.0), (1.0, 6.0)], [1.0]) == pytest.approx(4.0)


def test_the_expected_time_of_a_run_follows_from_its_log_where_that_is_generated() -> None:
    record = Record(kind="predicted", name="n", spec_digest="d", date="2026-01-01", figures={"samples_per_s": 300.0})
    plain = small_plain() | {"data": {"interests": {"num_train_samples": 6000}}}
    files = small_plain() | {"data": {"parquet": {"train": "x.parquet"}}}
    for recipe, settings, seconds in ((plain, {}, 20), (files, {}, None), (files, {"train.max_steps": 75}, 16)):
        assert expected_s(point_of(recipe, {}, settings, {}), [StoreEntry(record=record)]) == seconds
