"""Scenarios become recipes and back, and what they come to follows them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rowstead.plan.traffic import mean_ids
from rowstead.plan.work import step_work
from rowstead.spec.catalogue import MACHINES, calibrated_path
from rowstead.spec.errors import RowsteadError
from rowstead.spec.parse import parse, to_plain
from rowstead.spec.run import RunSpec, load_recipe, recipe_names
from rowstead.ui.jobs import recipe_text
from rowstead.ui.scenario import MAX_DENSE, Scenario, checked_base, scenario_of, spec_of
from rowstead.ui.whatif import answers, known, known_machines


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_that_is_not_moved_stays_as_it_is(name: str) -> None:
    spec = load_recipe(name)
    assert spec_of(scenario_of(spec), spec) == spec


@settings(max_examples=30, deadline=None)
@given(
    base=st.sampled_from([None, "quickstart", "m1", "criteo", "mlperf"]),
    num_dense=st.integers(0, 300),
    num_sparse=st.integers(1, 60),
    ids=st.floats(1, 100),
    num_rows=st.integers(10, 10**8),
    width=st.sampled_from([4, 24, 128]),
    batch_size=st.integers(1, 10**5),
)
def test_a_moved_scenario_is_a_recipe_with_those_numbers(base: str | None, num_rows: int, ids: float, **moved: Any) -> None:
    spec = load_recipe(base) if base is not None else None
    start = scenario_of(spec) if spec is not None else Scenario()
    scenario = dataclasses.replace(start, num_rows=num_rows, ids=ids, **moved, interaction="concat")
    made = spec_of(scenario, spec)
    assert parse(RunSpec, yaml.safe_load(recipe_text(scenario, None if spec is None else to_plain(spec)))) == made
    assert len(made.features.expanded_dense()) == moved["num_dense"]
    assert len(made.features.expanded_sparse()) == moved["num_sparse"]
    assert made.model.width == moved["width"]
    assert made.train.batch_size == moved["batch_size"]
    rows = [table.num_rows for table in made.tables]
    assert sum(rows) / len(rows) == pytest.approx(num_rows, rel=0.05, abs=1)
    lengths = mean_ids(made)
    assert sum(lengths) / len(lengths) == pytest.approx(ids, rel=0.12)


def test_proportions_of_the_base_stay_when_tables_grow() -> None:
    spec = load_recipe("mlperf")
    start = scenario_of(spec)
    made = spec_of(dataclasses.replace(start, num_rows=2 * start.num_rows), spec)
    before, after = [t.num_rows for t in spec.tables], [t.num_rows for t in made.tables]
    ratios = [b / a for a, b in zip(before, after, strict=True) if a > 1000]
    assert len(ratios) > 10
    assert ratios == pytest.approx([2.0] * len(ratios), rel=0.01)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_sparse": 10**9},
        {"num_dense": -1},
        {"width": 0},
        {"bottom": [0]},
        {"ids": float("inf")},
        {"num_dense": 0, "num_sparse": 0},
    ],
)
def test_what_no_model_can_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RowsteadError):
        parse(Scenario, wrong)


def test_a_recipe_with_too_many_features_is_refused_before_it_is_written_out() -> None:
    plain = to_plain(load_recipe("quickstart"))
    plain["features"]["dense"][0]["repeat"] = 10**12
    with pytest.raises(RowsteadError, match=f"up to {MAX_DENSE:,}"):
        checked_base(plain)


def test_the_answer_has_the_fleet_first_and_then_every_platform() -> None:
    first, *platforms = answers(Scenario(machine="zion"), None)
    assert first["fleet"]["machine"] == "zion"
    assert first["fleet"]["samples_per_s"] > 0
    assert first["fleet"]["timeline"]
    assert first["model"]["table_bytes"] == 32 * 1_000_000 * (64 * 4 + 4)
    names = [line["platform"]["machine"] for line in platforms]
    assert names[0] == "zion"
    assert len(names) == len(set(names)) > 8


def test_more_servers_train_faster_and_what_does_not_fit_says_why() -> None:
    one, several = (next(answers(Scenario(num_trainers=n), None))["fleet"] for n in (1, 4))
    assert several["samples_per_s"] > 2 * one["samples_per_s"]
    assert several["watts"] == 4 * one["watts"]
    huge = next(answers(Scenario(num_rows=10**9, machine="laptop"), None))["fleet"]
    assert not huge["fits"]
    assert "usable" in huge["why"][0]
    assert huge["remedies"]
    lone = next(answers(Scenario(machine="laptop", num_trainers=2), None))["fleet"]
    assert "no network" in lone["why"][0]


def test_a_machine_without_a_network_has_no_readers() -> None:
    alone, served = (next(answers(Scenario(machine=name), None))["fleet"] for name in ("h200", "zion"))
    assert "num_readers" not in alone
    assert served["num_readers"] > 0


def test_the_timeline_shows_overlapped_tasks() -> None:
    held_up = next(answers(Scenario(machine="bigbasin-32", num_dense=4096, batch_size=4096), None))["fleet"]
    overlapped = {slot["resource"] for slot in held_up["timeline"] if slot["is_overlapped"]}
    assert overlapped == {held_up["bottlenecks"][0]["resource"]}


def test_a_place_can_be_asked_for() -> None:
    found = {
        placement: next(answers(Scenario(placement=placement), None))["fleet"]  # type: ignore[arg-type]
        for placement in ("device", "host", "remote")
    }
    assert [one["placement"] for one in found.values()] == ["GPU memory", "system memory", "parameter servers"]
    assert found["device"]["samples_per_s"] > found["host"]["samples_per_s"]
    with_servers = next(answers(Scenario(placement="remote", num_servers=7), None))["fleet"]
    assert "7 sparse" in with_servers["servers"]


def test_a_machine_that_was_measured_is_offered_as_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("ROWSTEAD_MACHINE", raising=False)
    known.cache_clear()
    assert "here" not in known_machines()
    file = calibrated_path("cpu")
    file.parent.mkdir(parents=True)
    file.write_text((MACHINES / "laptop.yaml").read_text())
    assert known_machines()[0] == "here"
    first, *platforms = answers(Scenario(machine="here"), None)
    assert first["fleet"]["machine"] == "here"
    assert platforms[0]["platform"]["machine"] == "here"
    known.cache_clear()


def test_a_network_of_the_users_own_is_said_to_be_predicted_as_the_built_in_one() -> None:
    spec = load_recipe("quickstart", ["model.network=mine.py:Net"])
    scenario = scenario_of(spec)
    (note,) = next(answers(scenario, spec))["notes"]
    assert "mine.py:Net" in note
    assert "a DLRM with this recipe's `bottom`, `top` and `interaction` instead" in note
    assert next(answers(scenario, load_recipe("quickstart")))["notes"] == []


def test_a_built_in_network_of_a_recipe_stays_while_sliders_move() -> None:
    spec = load_recipe("dcnv2")
    facts = [next(answers(dataclasses.replace(scenario_of(spec), top=top), spec)) for top in (spec.model.top, (512, 512))]
    assert [one["notes"] for one in facts] == [[], []]
    assert facts[0]["model"]["num_dense_parameters"] == step_work(spec).num_parameters
    assert facts[0]["model"]["num_dense_parameters"] < facts[1]["model"]["num_dense_parameters"]


def test_tasks_of_files_read_the_label_of_the_synthetic_log_that_takes_their_turn() -> None:
    tasks = "model.tasks=[{name: a, label: c}, {name: b, weight: 2, loss: regression}]"
    stop = ("data.parquet.group=user", "train.eval_every=9", "train.early_stop={monitor: gauc, task: a}")
    spec = load_recipe("criteo", [tasks, *stop])
    start = scenario_of(spec)
    assert spec_of(start, spec) == spec
    for moved in ({"num_sparse": 30}, {"num_rows": 2 * start.num_rows}, {"ids": 3.0}):
        made = spec_of(dataclasses.replace(start, **moved), spec)
        assert made.data.synth is not None
        assert [(task.name, task.label, task.weight) for task in made.model.tasks] == [("a", "label", 1), ("b", "label", 2)]
        assert made.train.early_stop is not None
        assert made.train.early_stop.monitor is None
        assert parse(RunSpec, to_plain(made)) == made


def test_tasks_of_a_synthetic_log_keep_their_labels() -> None:
    labels = ["data.synth.conversion={}", "model.tasks=[{name: click, label: label}, {name: conversion}]"]
    spec = load_recipe("quickstart", labels)
    made = spec_of(dataclasses.replace(scenario_of(spec), num_sparse=30), spec)
    assert made.model.tasks == spec.model.tasks
