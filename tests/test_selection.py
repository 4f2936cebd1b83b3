"""Which weights a run ships, what it says of them, and that nothing is chosen by the test split."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from rowstead.records.run_folder import RunFolder
from rowstead.run import Result, resume, train
from rowstead.spec.errors import RowsteadError
from rowstead.spec.run import RunSpec
from rowstead.spec.train import EarlyStopSpec, ScheduleSpec, TrainSpec
from rowstead.training.advice import closing_advice
from rowstead.training.metrics import Evaluation, Quality
from rowstead.training.progress import Position
from rowstead.training.trained import evaluate, open_run
from tests.small_runs import RecordingCallback, assert_same_weights, figures_of, overfitting, small_spec, tensors_in


def patient(**early_stop: object) -> RunSpec:
    """Overfits until its last step, with a patience that never runs out."""
    spec = overfitting()
    rule = EarlyStopSpec(patience=1000, **early_stop)  # type: ignore[arg-type]
    return dataclasses.replace(spec, train=dataclasses.replace(spec.train, max_steps=200, early_stop=rule))


def events(run: Path, kind: str) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, RecordingCallback]:
    callback = RecordingCallback()
    out = tmp_path_factory.mktemp("runs") / "run"
    spec = patient()
    synth = dataclasses.replace(spec.data.synth, num_test_samples=500)  # type: ignore[type-var]
    return train(
        dataclasses.replace(spec, data=dataclasses.replace(spec.data, synth=synth)), out=out, callback=callback
    ), callback


def test_a_run_that_reached_its_end_ships_the_weights_of_its_best_evaluation(
    finished: tuple[Result, RecordingCallback],
) -> None:
    result, callback = finished
    assert result.outcome.ending == "finished"
    seen = events(result.folder, "evaluation")
    best = min(seen[:-1], key=lambda event: event["ne"])
    assert best["step"] < 200
    assert figures_of(result)["ne"] == best["ne"] < seen[-2]["ne"], "the last evaluation is of the weights that are shipped"
    assert f"finished: restored the weights of the best evaluation, at step {best['step']}" in callback.messages
    shipped, kept = tensors_in(result.folder), tensors_in(result.folder, "best")
    assert all(np.array_equal(value.numpy(), kept[name].numpy()) for name, value in shipped.items())


def test_the_test_split_is_evaluated_once_with_the_shipped_weights(finished: tuple[Result, RecordingCallback]) -> None:
    result, _ = finished
    assert result.outcome.test is not None
    assert result.record is not None
    (event,) = events(result.folder, "test")
    again = evaluate(str(result.folder), split="test")
    assert event["ne"] == again.ne == result.outcome.test.ne == result.record.figures["test_ne"]
    assert again.num_samples == 500
    assert again.ne != result.outcome.quality.ne  # type: ignore[union-attr]


def test_best_is_evaluated_like_a_run(finished: tuple[Result, RecordingCallback]) -> None:
    result, _ = finished
    assert evaluate(f"{result.folder}/best") == result.quality
    assert evaluate(f"{result.folder.name}/best", root=result.folder.parent) == result.quality
    assert open_run(f"{result.folder}/best").spec == open_run(str(result.folder)).spec


def test_a_run_resumed_from_its_best_checkpoint_trains_on_from_there(tmp_path: Path) -> None:
    result = train(patient(), out=tmp_path / "run")
    callback = RecordingCallback(stop_after=150)
    again = resume(f"{result.folder}/best", callback=callback)
    first = callback.steps[0].step
    assert first == min(events(result.folder, "evaluation")[:20], key=lambda event: event["ne"])["step"] + 1
    assert again.outcome.position.step == 150
    assert tensors_in(result.folder)
    assert sorted(path.name for path in RunFolder(result.folder).checkpoints.iterdir())[-1] == "step-000000150"


def test_a_run_without_early_stop_has_no_best_checkpoint(tmp_path: Path) -> None:
    train(small_spec("train.max_steps=5"), out=tmp_path / "run")
    with pytest.raises(RowsteadError, match=r"no best evaluation: only runs with train\.early_stop"):
        evaluate(str(tmp_path / "run" / "best"))


def test_the_monitor_decides_which_evaluation_is_best(tmp_path: Path) -> None:
    result = train(patient(monitor="auc"), out=tmp_path / "run")
    assert figures_of(result)["auc"] == max(event["auc"] for event in events(result.folder, "evaluation"))


def test_a_plateau_lowers_the_rates_and_resuming_is_exact_with_dropout_and_batch_norm(tmp_path: Path) -> None:
    options = ("model.top_norm=batch", "model.bottom_dropout=0.2", "model.top_dropout=0.2", "train.eval_every=10")
    spec = small_spec(
        *options,
        "train.max_steps=60",
        "train.schedule={decay: plateau, factor: 0.5, final: 0.2}",
        "train.dense_optimizer.lr=0.2",
    )
    straight = train(spec, out=tmp_path / "straight")
    scale = straight.outcome.position.lr_scale
    assert scale < 1, "the test needs an evaluation that is no better"
    train(spec, out=tmp_path / "stopped", callback=RecordingCallback(stop_after=37))
    ended = resume(str(tmp_path / "stopped"))
    assert ended.outcome.position.lr_scale == scale
    assert_same_weights(straight.folder, ended.folder)


def test_ne_by_trainings_rate_is_against_the_mean_label_that_training_saw() -> None:
    position = Position(label_weight=100.0, label_sum=20.0)
    assert position.train_rate(1.0) == 0.2
    assert position.train_rate(0.5) == pytest.approx(20 / (20 + 160))
    assert Position().train_rate(1.0) is None
    evaluation = Evaluation()
    evaluation.add(np.full(10, np.log(0.2 / 0.8), np.float32), np.array([1, 0, 0, 0, 0, 0, 0, 0, 0, 1], np.float32))
    assert evaluation.quality(0.2).ne_train_rate == pytest.approx(1)
    assert evaluation.quality(0.1).ne_train_rate < 1  # type: ignore[operator]


def quality(ne: float | None) -> Quality:
    return Quality(num_samples=10, log_loss=0.5, mse=0.2, mean_label=0.5, mean_prediction=0.5, ne=ne)


def test_a_run_that_went_well_gets_no_advice() -> None:
    assert not closing_advice(TrainSpec(), 100, quality(0.8), 0.75)
    assert not closing_advice(TrainSpec(), 100, None)


@pytest.mark.parametrize(
    ("num_steps", "ne", "train_ne", "text"),
    [
        (99, 0.8, 0.8, "step 99, within its warm-up of 100 steps"),
        (100, 1.2, 1.1, "NE is 1.2000: above 1"),
        (100, 0.8, 0.4, "training NE, 0.4000, is far below the evaluation's, 0.8000"),
    ],
)
def test_what_went_wrong_is_said_in_a_sentence(num_steps: int, ne: float, train_ne: float, text: str) -> None:
    spec = TrainSpec(schedule=ScheduleSpec(warmup_steps=100))
    (said,) = closing_advice(spec, num_steps, quality(ne), train_ne)
    assert text in said
