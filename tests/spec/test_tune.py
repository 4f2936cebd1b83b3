"""The spec of a search: its space, its initial settings, and what it refuses."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from rowstead.spec.errors import RowsteadError, SpecError
from rowstead.spec.parse import parse
from rowstead.spec.run import RunSpec, load_recipe
from rowstead.spec.tune import (
    TuneSpec,
    build_space,
    changes_of,
    initial_settings,
    load_tune,
    num_steps_of,
    space_axis_from,
    trial_run,
    unchanged_settings,
)
from tests.small_runs import small_plain
from tests.study.learnable import BATCH, LARGER, learnable_recipe


def search(folder: Path, **changes: Any) -> TuneSpec:
    return dataclasses.replace(load_tune(learnable_recipe(folder)), **changes)


def test_the_default_space_contains_the_recipe_s_settings(tmp_path: Path) -> None:
    spec = search(tmp_path)
    space = {axis.title: axis for axis in build_space(spec)}
    assert set(space) == {"sparse lr", "dense lr", "sparse eps", "warm-up", "decay"}
    (start,) = initial_settings(spec, space.values())
    assert start == {"sparse lr": 0.1, "dense lr": 0.01, "sparse eps": 0.01, "warm-up": 0, "decay": "linear"}
    for title in ("sparse lr", "dense lr"):
        low, high = space[title].low, space[title].high
        assert low is not None
        assert high is not None
        assert low < start[title] < high


def test_a_larger_batch_starts_from_the_old_settings_and_from_scaled_rates(tmp_path: Path) -> None:
    spec = search(tmp_path, retune_for={"train.batch_size": LARGER})
    assert trial_run(spec).train.batch_size == LARGER
    assert num_steps_of(trial_run(spec)) == 391
    same, root, linear = initial_settings(spec, build_space(spec))
    assert (same["sparse lr"], same["dense lr"]) == (0.1, 0.01)
    assert root["dense lr"] == pytest.approx(0.01 * (LARGER / BATCH) ** 0.5)
    assert linear["sparse lr"] == pytest.approx(0.8)
    assert same["sparse eps"] == 0.01
    # The gradients of rare rows are 8 times smaller.
    assert root["sparse eps"] == linear["sparse eps"] == pytest.approx(0.01 / 8)
    assert (same["dense beta1"], same["dense beta2"]) == (0.9, 0.999)
    assert root["dense beta1"] == pytest.approx(0.9**8)  # the same decay per sample
    assert linear["dense beta2"] == pytest.approx(0.999**8)
    warm = dataclasses.replace(spec, set={"train.schedule.warmup_steps": 64})
    assert [start["warm-up"] for start in initial_settings(warm, build_space(warm))] == [64, 8, 8]


def test_settings_in_steps_keep_their_number_of_samples(tmp_path: Path) -> None:
    before = {"train.max_steps": 800, "train.eval_every": 100}
    spec = search(tmp_path, set=before, retune_for={"train.batch_size": LARGER})
    assert changes_of(spec) == {"train.max_steps": 100, "train.eval_every": 12, **spec.retune_for}
    assert trial_run(spec).train.max_steps == 100
    told = dataclasses.replace(spec, retune_for={"train.batch_size": LARGER, "train.max_steps": 5})
    assert trial_run(told).train.max_steps == 5
    assert changes_of(search(tmp_path, set=before, retune_for={"seed": 2})) == {"seed": 2}


def test_unchanged_settings_are_none_if_they_are_outside_the_space(tmp_path: Path) -> None:
    spec = search(tmp_path, retune_for={"train.batch_size": LARGER})
    assert unchanged_settings(spec, build_space(spec)) == initial_settings(spec, build_space(spec))[0]
    for text in ("train.dense_optimizer.lr=0.02..0.05", "model.top=[[8], [4, 4]]"):
        assert unchanged_settings(spec, (space_axis_from(text),)) is None


def test_initial_settings_stay_inside_a_given_space(tmp_path: Path) -> None:
    axes = (space_axis_from("train.dense_optimizer.lr=0.02..0.05"), space_axis_from("model.top=[[8], [32, 16]]"))
    spec = search(tmp_path, space=axes, retune_for={"train.batch_size": LARGER})
    starts = initial_settings(spec, build_space(spec))
    assert all(0.02 <= start["train.dense_optimizer.lr"] <= 0.05 for start in starts)
    assert starts[0]["model.top"] == [32, 16]


def test_axes_are_parsed_from_the_command_line() -> None:
    rate = space_axis_from("train.dense_optimizer.lr=1e-4..1e-1")
    assert (rate.low, rate.high, rate.log, rate.whole) == (1e-4, 1e-1, True, False)
    steps = space_axis_from("train.schedule.warmup_steps=0..50")
    assert (steps.low, steps.high, steps.log, steps.whole) == (0, 50, False, True)
    assert space_axis_from("model.width=4,8").values == (4, 8)
    for wrong in ("lr=a..b", "lr=2..1", "lr"):
        with pytest.raises(RowsteadError):
            space_axis_from(wrong)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"name": "<b>"}, "letters"),
        ({"trials": 0}, "at least 1"),
        ({"trials": None}, "minutes"),
        ({"sampler": "grid"}, "values"),
        ({"sampler": "grid", "space": [{"keys": "seed", "low": 1, "high": 2}]}, "not a range"),
        ({"sampler": "tqe"}, "tpe"),
        ({"space": [{"keys": "seed", "values": [1]}, {"keys": "seed", "values": [2]}]}, "another axis"),
    ],
)
def test_an_invalid_search_is_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        parse(TuneSpec, {"name": "t", "recipe": "quickstart"} | change)


def test_the_steps_of_any_generated_log_are_known() -> None:
    assert num_steps_of(load_recipe("din")) == 586
    files = {"data": {"parquet": {"train": "x.parquet"}}, "train": {"max_steps": 7}}
    assert num_steps_of(RunSpec.from_dict({**small_plain(), **files})) == 7
