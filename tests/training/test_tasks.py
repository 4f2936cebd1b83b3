"""Models of several labels: each task is measured over the labels that it has, and trains the same from every kind of log and in every way."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch

import rowstead
from rowstead.cli.console import quality_rows
from rowstead.data.batch import Batch, BatchTotals
from rowstead.data.open_log import open_sources
from rowstead.data.synth import SynthLog, write_parquet
from rowstead.nn.heads import Head
from rowstead.report.charts_runs import tasks_of
from rowstead.report.inputs import gather
from rowstead.run import Result, resume, train
from rowstead.serve.export import export
from rowstead.serve.exported import load_exported
from rowstead.serve.predict import predict
from rowstead.spec.errors import CheckpointError, DataError, TrainingError
from rowstead.spec.heads import TaskSpec
from rowstead.spec.parse import override, parse, to_plain
from rowstead.spec.run import RunSpec
from rowstead.spec.train import EarlyStopSpec, TrainSpec
from rowstead.training import trained
from rowstead.training.checkpoint import Checkpoint, SavedTensors
from rowstead.training.checkpoint_fits import architecture, check_same_model
from rowstead.training.metrics import Evaluation, Quality
from rowstead.training.progress import EarlyStopping, Position
from rowstead.training.progress_bar import quality_line
from rowstead.training.task_metrics import NumberEvaluation, TaskEvaluation
from tests.small_runs import small_plain, small_spec, tensors_in

TASKS = (
    "data.synth.conversion={rate: 0.3}",
    "model.tasks=[{name: click, label: label}, {name: buy, label: conversion, weight: 0.5}]",
    "model.task_head={kind: mmoe, width: 8, experts: 2, expert: [8], tower: [4]}",
)


def two_labels(*changes: str) -> RunSpec:
    return small_spec(*TASKS, "data.synth.num_train_samples=640", "data.synth.num_eval_samples=300", *changes)


def batches_of(spec: RunSpec, num: int = 3) -> list[Batch]:
    return [batch for _, (batch, _) in zip(range(num), open_sources(spec).train.batches(64), strict=False)]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("log")
    synth = two_labels().data.synth
    assert synth is not None
    write_parquet(synth, folder, rows_per_file=400, rows_per_group=150)
    return folder


def from_files(kind: str, log: Path, *changes: str) -> RunSpec:
    plain = override(small_plain(), TASKS[1:])
    plain["data"] = {kind: {"train": [f"{log}/train-*"], "eval": [f"{log}/eval-*"], "shuffle_rows": 0}}
    return parse(RunSpec, override(plain, changes))


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("kind", ["parquet", "csv", "synth"])
def test_every_kind_of_log_gives_the_same_labels_missing_ones_as_nan(
    kind: str, is_packed: bool, log: Path, tmp_path: Path
) -> None:
    cache = [f"data.cache={tmp_path}/packed"] if is_packed else []
    if kind == "csv":
        for file in log.glob("*.parquet"):
            table = pq.read_table(file)
            for index, field in enumerate(table.schema):
                if pa.types.is_list(field.type):
                    text = ["|".join(map(str, bag)) for bag in table[field.name].to_pylist()]
                    table = table.set_column(index, field.name, pa.array(text))
            pa.csv.write_csv(table, tmp_path / f"{file.stem}.csv")
        types = "data.csv.types={sparse_0: list<int64>, sparse_1: list<int64>, sparse_2: list<int64>, conversion: float64}"
        found = batches_of(from_files("csv", tmp_path, types, *cache))
    else:
        found = batches_of(two_labels(*cache) if kind == "synth" else from_files("parquet", log, *cache))
    synth = two_labels().data.synth
    assert synth is not None
    block = SynthLog(synth).rows(0, 192, labels=("label", "conversion"))
    labels = np.concatenate([batch.labels.numpy() for batch in found if batch.labels is not None])
    np.testing.assert_array_equal(labels, block.labels)
    clicks, conversions = labels.T
    np.testing.assert_array_equal(np.isnan(conversions), clicks == 0)
    assert 0 < np.nanmean(conversions) < 1
    for batch, plain in zip(found, batches_of(two_labels()), strict=True):
        assert torch.equal(batch.sparse.ids.long(), plain.sparse.ids)
        assert batch.totals == BatchTotals.of(plain.labels, None)  # type: ignore[arg-type]


def test_labels_out_of_range_are_refused_by_the_task_that_they_are_of(tmp_path: Path) -> None:
    rows = {"x": [1.0, 2.0, 3.0], "bought": [1.0, None, 0.5], "spent": [1e6, None, -3.0]}
    pq.write_table(pa.table(rows), tmp_path / "train-0.parquet")
    plain = {
        "name": "t",
        "data": {"parquet": {"train": [f"{tmp_path}/train-*"], "eval": [f"{tmp_path}/train-*"], "shuffle_rows": 0}},
        "features": {"dense": [{"name": "x"}]},
        "model": {"tasks": [{"name": "bought"}, {"name": "spent", "loss": "regression"}]},
    }
    (batch,) = batches_of(parse(RunSpec, plain))
    assert batch.labels is not None
    np.testing.assert_array_equal(batch.labels.numpy(), np.array([[1, 1e6], [np.nan, np.nan], [0.5, -3]], np.float32))
    with pytest.raises(DataError, match=r"label column `spent` contains 1000000.0; labels must be between 0 and 1"):
        batches_of(parse(RunSpec, override(plain, ["model.tasks=[{name: bought}, {name: spent}]"])))
    with pytest.raises(DataError, match="has no column `spend`: did you mean `spent`"):
        batches_of(parse(RunSpec, override(plain, ["model.tasks=[{name: bought}, {name: spend}]"])))


def test_the_teacher_of_conversions_has_the_rate_and_the_correlation_that_it_is_given() -> None:
    for rate, correlation in ((0.05, 0.0), (0.3, 0.9), (0.2, -0.7)):
        spec = two_labels(
            f"data.synth.conversion={{rate: {rate}, correlation: {correlation}}}", "data.synth.num_train_samples=20000"
        )
        assert spec.data.synth is not None
        block = SynthLog(spec.data.synth).rows(0, 20_000, labels=("label", "conversion"))
        assert block.true_p is not None
        assert block.labels is not None
        p = block.true_p.astype(np.float64)
        log_odds = np.log(p / (1 - p))
        assert p[:, 1].mean() == pytest.approx(rate, rel=0.15)
        assert np.corrcoef(log_odds.T)[0, 1] == pytest.approx(correlation, abs=0.05)
        clicked = block.labels[:, 0] == 1
        assert block.labels[clicked, 1].mean() == pytest.approx(p[clicked, 1].mean(), abs=0.02)


def test_a_second_label_leaves_the_first_one_as_it_is() -> None:
    spec = two_labels()
    assert spec.data.synth is not None
    with_conversions = SynthLog(spec.data.synth).rows(0, 500, labels=("conversion", "label"))
    alone = SynthLog(dataclasses.replace(spec.data.synth, conversion=None)).rows(0, 500)
    assert with_conversions.labels is not None
    assert with_conversions.true_p is not None
    np.testing.assert_array_equal(with_conversions.labels[:, 1], alone.labels)
    np.testing.assert_array_equal(with_conversions.true_p[:, 1], alone.true_p)


def test_measures_of_a_task_are_those_of_the_examples_that_have_its_label() -> None:
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(300, 2)).astype(np.float32), (rng.random((300, 2)) < 0.4).astype(np.float32)
    logits[:, 1] = labels[:, 1] * 50 + 7
    labels[:, 1] *= 50
    labels[rng.random(300) < 0.3, 0] = np.nan
    weights = rng.random(300).astype(np.float32)
    evaluation = TaskEvaluation([TaskSpec(name="click"), TaskSpec(name="spent", loss="regression")])
    for part in (slice(0, 100), slice(100, 300)):
        evaluation.add(logits[part], labels[part], weights[part])
    found, known = evaluation.quality(), ~np.isnan(labels[:, 0])
    alone = Evaluation()
    alone.add(logits[known, 0], labels[known, 0], weights[known])
    expected, click, spent = alone.quality(), found.tasks["click"], found.tasks["spent"]
    assert (click.num_samples, click.num_missing, spent.num_missing) == (known.sum(), 300 - known.sum(), 0)
    for name in ("ne", "auc", "log_loss", "mse", "mean_label", "calibration"):
        assert getattr(click, name) == pytest.approx(getattr(expected, name), rel=1e-12), name
        assert getattr(found, name) == getattr(click, name)
    assert spent.mse == pytest.approx(49)
    assert (spent.ne, spent.log_loss, spent.auc) == (None, None, None)
    figures = found.figures()
    assert figures["spent/mse"] == spent.mse
    assert figures["ne"] == figures["click/ne"]
    assert figures["num_samples"] == 300


def test_a_number_is_measured_as_its_head_predicts_it() -> None:
    evaluation = NumberEvaluation(Head(example_loss=torch.sub, predict=torch.exp))
    evaluation.add(np.log(np.array([1.0, 2.0, 4.0], np.float32)), np.array([1.0, 2.0, 7.0], np.float32))
    found = evaluation.quality()
    assert (found.mse, found.mean_prediction) == (pytest.approx(3), pytest.approx(7 / 3))
    with pytest.raises(TrainingError, match="not finite"):
        evaluation.add(np.array([1e9], np.float32), np.ones(1, np.float32))


def test_a_task_without_labels_is_left_out_and_named_and_the_first_one_must_have_some() -> None:
    tasks = [TaskSpec(name="click"), TaskSpec(name="buy", label="bought")]
    evaluation = TaskEvaluation(tasks)
    labels = np.array([[0, np.nan], [1, np.nan], [0, np.nan]], np.float32)
    evaluation.add(np.zeros((3, 2), np.float32), labels)
    found = evaluation.quality()
    assert (list(found.tasks), found.tasks_without_labels) == (["click"], ("buy",))
    assert quality_line(found).endswith("; buy: no example has its label")
    stop = EarlyStopping(TrainSpec(eval_every=1, early_stop=EarlyStopSpec(task="buy")), Position(), tasks)
    with pytest.raises(DataError, match=r"follows task `buy`, but no evaluated example has a label in `bought`"):
        stop.observe(found)
    evaluation = TaskEvaluation(tasks)
    evaluation.add(np.zeros((3, 2), np.float32), labels[:, ::-1])
    with pytest.raises(DataError, match="nothing to evaluate of task `click`: no example of the 3 has a label in `click`"):
        evaluation.quality()


def test_a_conversion_is_measured_where_there_was_a_click_whatever_the_log_has_elsewhere() -> None:
    rng = np.random.default_rng(0)
    click = rng.random(4000) < 0.1
    buy = click & (rng.random(4000) < 0.2)
    logits = np.tile(np.log(np.array([0.1 / 0.9, 0.2 / 0.8], np.float32)), (4000, 1))
    found = []
    for elsewhere in (0.0, np.nan):
        evaluation = TaskEvaluation([TaskSpec(name="click"), TaskSpec(name="buy")], is_chain=True)
        labels = np.stack([click, np.where(click, buy, elsewhere)], axis=1).astype(np.float32)
        evaluation.add(logits, labels)
        found.append(evaluation.quality().tasks["buy"])
    assert found[0] == found[1]
    assert found[0].num_samples == click.sum()
    assert found[0].ne == pytest.approx(1, abs=0.02)


def test_early_stopping_follows_the_task_and_the_measure_that_it_names() -> None:
    tasks = (TaskSpec(name="click"), TaskSpec(name="buy"))

    def quality(click: float, buy: float) -> Quality:
        def one(auc: float) -> Quality:
            return Quality(num_samples=9, mse=0.2, mean_label=0.3, mean_prediction=0.3, ne=1 - auc, auc=auc)

        return dataclasses.replace(one(click), tasks={"click": one(click), "buy": one(buy)})

    for stop, expected in (
        (EarlyStopSpec(), [True, True, False]),
        (EarlyStopSpec(task="buy", monitor="auc"), [True, False, True]),
    ):
        rule = EarlyStopping(TrainSpec(eval_every=1, early_stop=stop), Position(), tasks)
        assert [rule.observe(quality(*pair)) for pair in ((0.6, 0.6), (0.7, 0.5), (0.5, 0.8))] == expected


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, log: Path) -> Result:
    root = tmp_path_factory.mktemp("runs")
    spec = from_files("parquet", log, "train.eval_every=5", "train.early_stop={task: buy, patience: 9}")
    return train(spec, out=root / "run")


def test_a_run_reports_every_task_and_evaluates_to_the_same(run: Result) -> None:
    assert run.quality is not None
    assert run.record is not None
    assert {"ne", "click/ne", "buy/ne", "buy/auc", "buy/num_missing"} <= run.record.figures.keys()
    assert run.record.figures["ne"] == run.record.figures["click/ne"]
    again = trained.evaluate(str(run.folder))
    assert again.tasks["buy"].ne == pytest.approx(run.quality.tasks["buy"].ne)
    events = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    assert "buy/calibration" in next(event for event in events if event["kind"] == "evaluation")


def test_tables_have_a_row_for_each_task(run: Result) -> None:
    assert run.quality is not None
    shown = dict(quality_rows(run.quality))
    missing = run.quality.tasks["buy"].num_missing
    assert shown["buy: labels missing"] == f"{missing} of 300, not counted"
    assert shown["click: NE"] == f"{run.quality.tasks['click'].ne:.4f}"
    assert "click: labels missing" not in shown
    table = tasks_of(gather([run.folder]).runs)
    assert table is not None
    assert [row[:2] for row in table.rows] == [("run", "click"), ("run", "buy")]
    assert (table.headings[2], table.headings[-1]) == ("NE", "labels missing")
    assert float(table.rows[1][2]) == pytest.approx(run.quality.tasks["buy"].ne, rel=1e-2)
    assert table.rows[1][-1] == str(missing)


def test_load_predict_and_export_agree_on_every_task(run: Result, log: Path, tmp_path: Path) -> None:
    files, name = f"{log}/eval-*.parquet", str(run.folder)
    predict(name, tmp_path / "p.parquet", data=files, keep=["dense_0"])
    table = pq.read_table(tmp_path / "p.parquet")
    assert table.column_names == ["p_click", "p_buy", "label_click", "label_buy", "dense_0"]
    rows = pa.concat_tables([pq.read_table(file) for file in sorted(log.glob("eval-*"))])
    assert table["label_buy"].null_count == rows["conversion"].null_count > 0
    export(name, tmp_path / "exported")
    exported = load_exported(tmp_path / "exported")
    assert exported.tasks == {"click": "label", "buy": "conversion"}
    p = np.stack([table["p_click"].to_numpy(), table["p_buy"].to_numpy()], axis=1)
    np.testing.assert_allclose(exported.predict(rows), p, rtol=0, atol=1e-6)
    np.testing.assert_allclose(rowstead.load(name).predict(rows), p, rtol=0, atol=1e-6)
    predict(str(tmp_path / "exported"), tmp_path / "q.parquet", data=files)
    other = pq.read_table(tmp_path / "q.parquet")
    np.testing.assert_allclose(other["p_buy"].to_numpy(), p[:, 1], rtol=0, atol=1e-6)
    assert other["label_buy"].equals(table["label_buy"])


def test_a_run_that_is_resumed_ends_with_the_same_weights(log: Path, tmp_path: Path) -> None:
    spec = from_files("parquet", log, "train.epochs=2", "train.checkpoint_every=6", "train.keep_checkpoints=9")
    whole = train(spec, out=tmp_path / "whole")
    stopped = train(dataclasses.replace(spec, train=dataclasses.replace(spec.train, max_steps=6)), out=tmp_path / "part")
    plain = (stopped.folder / "spec.yaml").read_text().replace("max_steps: 6", "max_steps: null")
    (stopped.folder / "spec.yaml").write_text(plain)
    resumed = resume(str(stopped.folder))
    expected, found = tensors_in(whole.folder), tensors_in(resumed.folder)
    assert expected.keys() == found.keys()
    assert any("net.head.gates" in name for name in expected)
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


@pytest.mark.slow
def test_hogwild_trains_several_labels(tmp_path: Path) -> None:
    spec = two_labels(
        "data.synth.num_train_samples=64000", "train.sync.hogwild_threads=2", "train.dense_optimizer={kind: adam, lr: 0.01}"
    )
    result = train(spec, out=tmp_path / "run")
    assert result.quality is not None
    assert result.quality.ne is not None
    assert result.quality.ne < 0.97


def test_a_warm_start_may_have_other_weights_and_labels_but_no_other_losses(tmp_path: Path) -> None:
    first = train(two_labels("train.max_steps=1"), root=tmp_path)
    later = TASKS[1].replace("weight: 0.5", "weight: 0.2").replace("label: conversion", "label: label")
    train(two_labels(later, "train.max_steps=1"), root=tmp_path, init_from=first.folder.name)
    for other, key in (("name: buy", "name: sale"), ("weight: 0.5", "loss: mse")):
        with pytest.raises(CheckpointError, match=r"another model: model\.tasks"):
            train(two_labels(TASKS[1].replace(other, key), "train.max_steps=1"), root=tmp_path, init_from=first.folder.name)


def test_a_checkpoint_that_has_the_weights_of_its_tasks_is_of_the_same_model() -> None:
    spec = two_labels()
    plain = to_plain(spec.model, defaults=False)
    assert [set(task) for task in plain["tasks"]] == [{"name", "label"}, {"name", "label", "weight"}]
    facts = {"architecture": architecture(spec) | {"model": plain}}
    assert facts["architecture"] != architecture(spec)
    saved = Checkpoint(path=Path("x"), step=1, facts=facts, tensors=cast(SavedTensors, {}))
    check_same_model(two_labels(TASKS[1].replace("0.5", "0.2")), saved, pytest.fail)
