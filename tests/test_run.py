"""Whole runs: they stop early, start warm, measure what they say, and say what is wrong."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import rowstead
from rowstead.data.synth import write_parquet
from rowstead.records.events import read_events
from rowstead.records.run_folder import RunFolder
from rowstead.run import resume, train
from rowstead.spec.errors import CheckpointError, DataError, RowsteadError, TrainingError
from rowstead.spec.parse import digest, to_plain
from rowstead.training import checkpoint
from rowstead.training.step import Stepper
from rowstead.training.trained import evaluate, load
from tests.small_runs import (
    RecordingCallback,
    assert_same_weights,
    figures_of,
    overfitting,
    parquet_spec,
    small_spec,
    tensors_in,
    written_log,
)

GOLDEN = Path(__file__).parent / "golden" / "losses.json"


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_log(tmp_path_factory.mktemp("log"))


def test_early_stopping_takes_back_the_best_weights(tmp_path: Path) -> None:
    callback = RecordingCallback()
    result = train(overfitting(), out=tmp_path / "run", callback=callback)
    assert result.outcome.ending == "stopped early"
    assert result.outcome.position.step < 500
    evaluations = [event for event in read_events(result.folder / "events.jsonl") if event["kind"] == "evaluation"]
    *before, final = evaluations
    best = min(before, key=lambda event: event["ne"])
    assert before[-1]["step"] - best["step"] == 30
    assert final["ne"] == pytest.approx(best["ne"], rel=1e-9)
    assert figures_of(result)["ne"] == final["ne"]
    assert any(f"restored the weights of the best evaluation, at step {best['step']}" in text for text in callback.messages)
    taken_back = tensors_in(result.folder, "best")
    assert all(torch.equal(value, taken_back[name]) for name, value in tensors_in(result.folder).items())


def test_a_warm_start_begins_with_the_weights_of_the_earlier_run(tmp_path: Path) -> None:
    first = train(small_spec("name=first"), root=tmp_path)
    cold, warm = RecordingCallback(), RecordingCallback()
    other = small_spec("name=second", "data.synth.seed=1", "train.max_steps=1")
    train(other, root=tmp_path, callback=cold)
    train(other, root=tmp_path, callback=warm, init_from=first.folder.name)
    assert warm.steps[0].loss < 0.9 * cold.steps[0].loss


def test_a_warm_start_from_another_architecture_is_refused(tmp_path: Path) -> None:
    train(small_spec("name=first", "train.max_steps=1"), root=tmp_path)
    with pytest.raises(CheckpointError, match="another model") as caught:
        train(small_spec("name=second", "model.width=4"), root=tmp_path, init_from="first-001")
    assert "spec.yaml" in str(caught.value)
    assert not (tmp_path / "second-001").exists()
    with pytest.raises(RowsteadError, match="did you mean `first-001`"):
        train(small_spec(), root=tmp_path, init_from="frist-001")


def test_a_folder_that_exists_is_refused_and_left_alone(tmp_path: Path) -> None:
    result = train(small_spec("train.max_steps=2"), out=tmp_path / "run")
    files = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    with pytest.raises(RowsteadError, match=r"already holds a run: .*--resume"):
        train(small_spec("train.max_steps=2"), out=result.folder)
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == files
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("precious")
    with pytest.raises(RowsteadError, match="not empty"):
        train(small_spec("train.max_steps=2"), out=tmp_path / "other")


def test_runs_of_one_name_are_numbered(tmp_path: Path) -> None:
    names = [train(small_spec("train.max_steps=1"), root=tmp_path).folder.name for _ in range(2)]
    assert names == ["small-001", "small-002"]


def test_training_ends_after_max_steps_or_all_epochs_whichever_comes_first(tmp_path: Path) -> None:
    for number, (overrides, steps, samples) in enumerate(
        [
            (("train.max_steps=7",), 7, 7 * 64),
            (("train.batch_size=1000",), 7, 6400),
            (("train.batch_size=1000", "train.epochs=2"), 14, 12_800),
            (("train.batch_size=1000", "train.epochs=2", "train.max_steps=9"), 9, 6400 + 2000),
        ]
    ):
        position = train(small_spec(*overrides), out=tmp_path / str(number)).outcome.position
        assert (position.step, position.num_samples) == (steps, samples)


def test_the_event_file_tells_the_history_of_a_run(tmp_path: Path) -> None:
    spec = small_spec("train.max_steps=30", "train.log_every=10", "train.eval_every=15", "train.checkpoint_every=20")
    result = train(spec, out=tmp_path / "run", callback=RecordingCallback(stop_after=25))
    resume(str(result.folder))
    events = read_events(result.folder / "events.jsonl")
    history = [(event["kind"], event["step"]) for event in events]
    assert history == [
        ("train", 10),
        ("evaluation", 15),
        ("calibration", 15),
        ("train", 20),
        ("checkpoint", 20),
        ("checkpoint", 25),
        ("features", 25),
        ("resumed", 25),
        ("train", 30),
        ("checkpoint", 30),
        ("evaluation", 30),
        ("calibration", 30),
        ("features", 30),
    ]
    assert {"loss", "ne", "samples_per_s", "waiting_share", "num_samples"} <= events[0].keys()
    assert {"ne", "auc", "log_loss", "calibration", "mse", "ne_best", "ne_expected"} <= events[1].keys()
    assert list((result.folder / "tensorboard").iterdir())


def test_only_the_last_checkpoints_are_kept(tmp_path: Path) -> None:
    result = train(
        small_spec("train.max_steps=10", "train.checkpoint_every=2", "train.keep_checkpoints=3"), out=tmp_path / "run"
    )
    assert [path.name for path in checkpoint.checkpoints_in(result.folder / "checkpoints")] == [
        "step-000000006",
        "step-000000008",
        "step-000000010",
    ]


def test_the_record_has_the_figures_and_where_they_come_from(tmp_path: Path) -> None:
    spec = small_spec("train.max_steps=20")
    result = train(spec, out=tmp_path / "run")
    record = json.loads((result.folder / "record.json").read_text())
    assert record == to_plain(RunFolder(result.folder).read_record())
    assert record["kind"] == "measured"
    assert record["spec_digest"] == digest(spec)
    assert record["versions"]["torch"] == torch.__version__
    assert record["machine"]["kernel"] == ("gpu" if torch.cuda.is_available() else "cpu")
    assert record["machine"]["num_threads"] == 1
    figures = record["figures"]
    assert figures["num_steps"] == 20
    assert figures["num_samples"] == 20 * 64
    assert figures["num_eval_samples"] == 2000
    assert figures["samples_per_s"] > 0
    assert {"ne", "auc", "ne_best", "train_s", "forward_s", "data_s", "peak_memory_bytes"} <= figures.keys()
    assert figures["ne"] == result.quality.ne  # type: ignore[union-attr]
    assert RunFolder(result.folder).read_spec() == spec


def test_evaluations_in_between_use_as_many_examples_as_asked(tmp_path: Path) -> None:
    spec = small_spec("train.max_steps=4", "train.eval_every=2", "train.eval_samples=123")
    result = train(spec, out=tmp_path / "run")
    events = [event for event in read_events(result.folder / "events.jsonl") if event["kind"] == "evaluation"]
    assert [event["num_samples"] for event in events] == [123, 2000]


def _with_columns(log: Path, folder: Path, change: Callable[[pa.Table], pa.Table]) -> Path:
    """A copy of a log whose files went through `change`."""
    folder.mkdir()
    for file in log.glob("*.parquet"):
        pq.write_table(change(pq.read_table(file)), folder / file.name, row_group_size=400)
    return folder


def _columns(files: list[Path]) -> dict[str, Any]:
    table = pa.concat_tables(pq.read_table(file) for file in sorted(files))
    return {name: table[name].to_pylist() for name in table.column_names}


def test_evaluation_is_what_predict_and_the_formulas_say(tmp_path: Path, log: Path) -> None:
    def with_weights(table: pa.Table) -> pa.Table:
        weights = np.random.default_rng(7).choice([0.0, 0.5, 2.0], table.num_rows).astype(np.float32)
        return table.append_column("importance", pa.array(weights))

    weighted = _with_columns(log, tmp_path / "log", with_weights)
    transforms = "features.dense=[{name: 'dense_{i}', repeat: 4, standardise: true, clip: [-2, 2]}]"
    spec = parquet_spec(weighted, "data.parquet.weight=importance", transforms)
    result = train(spec, out=tmp_path / "run")
    raw = _columns(list(weighted.glob("eval-*.parquet")))
    model = rowstead.load(str(result.folder))
    p = model.predict(model.encode(raw)).double().numpy()
    y, w, truth = (np.array(raw[name], np.float64) for name in ("label", "importance", "true_p"))

    def mean(values: np.ndarray) -> float:
        return float((w * values).sum() / w.sum())

    def entropy(q: float) -> float:
        return -(q * math.log(q) + (1 - q) * math.log(1 - q))

    log_loss = mean(-(y * np.log(p) + (1 - y) * np.log(1 - p)))
    quality = result.quality
    assert quality is not None
    assert quality.num_samples == len(y) == 2000
    assert quality.log_loss == pytest.approx(log_loss, rel=1e-6)
    assert quality.ne == pytest.approx(log_loss / entropy(mean(y)), rel=1e-6)
    assert quality.mse == pytest.approx(mean((p - y) ** 2), rel=1e-6)
    assert quality.calibration == pytest.approx(mean(p) / mean(y), rel=1e-6)
    best = mean(-(truth * np.log(truth) + (1 - truth) * np.log(1 - truth))) / entropy(mean(truth))
    assert quality.ne_best == pytest.approx(best, rel=1e-6)
    assert evaluate(str(result.folder)) == quality
    assert evaluate(str(result.folder), data=[f"{weighted}/eval-*.parquet"]) == quality


@pytest.mark.slow
def test_down_sampled_negatives_are_corrected_for(tmp_path: Path) -> None:
    decay = "train.schedule.decay=linear"
    spec = small_spec("data.synth.num_train_samples=40000", "data.synth.num_eval_samples=20000", decay)
    assert spec.data.synth is not None
    write_parquet(spec.data.synth, tmp_path / "whole")

    def thinned(table: pa.Table) -> pa.Table:
        draws = np.random.default_rng(table.num_rows).random(table.num_rows)
        return table.filter(pa.array((table["label"].to_numpy() == 1) | (draws < 0.2)))

    kept = _with_columns(tmp_path / "whole", tmp_path / "kept", thinned)
    result = train(parquet_spec(kept, "data.negative_keep_rate=0.2", decay), out=tmp_path / "run")
    on_kept = result.quality
    assert on_kept is not None
    on_whole = evaluate(str(train(spec, out=tmp_path / "whole-run").folder))
    assert on_kept.mean_label == pytest.approx(on_whole.mean_label, rel=0.05)
    assert on_kept.calibration == pytest.approx(1, abs=0.05)
    assert on_kept.ne == pytest.approx(on_whole.ne, rel=0.03)
    assert on_kept.ne_best == pytest.approx(on_whole.ne_best, rel=0.03)
    model = load(str(result.folder))
    whole = _columns(list((tmp_path / "whole").glob("eval-*.parquet")))
    assert model.predict(model.encode(whole)).mean().item() == pytest.approx(float(np.mean(whole["label"])), rel=0.06)


def test_a_loss_that_is_not_finite_names_the_step_and_the_batch(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"at step \d+.*epoch 0, after \d+ examples, reader at"):
        train(small_spec("train.dense_optimizer={kind: sgd, lr: 1e20}"), out=tmp_path / "run")


def test_a_bad_row_in_the_middle_loses_no_step_and_training_continues_once_it_is_fixed(tmp_path: Path, log: Path) -> None:
    good = parquet_spec(log, "data.parquet.shuffle_rows=400")
    straight = train(good, out=tmp_path / "straight")
    broken = _with_columns(log, tmp_path / "log", lambda table: table)
    last = max(broken.glob("train-*.parquet"))
    right = pq.read_table(last)
    labels = right["label"].to_numpy().copy()
    labels[-1] = 7
    pq.write_table(right.set_column(right.schema.get_field_index("label"), "label", pa.array(labels)), last, row_group_size=400)
    spec = dataclasses.replace(good, data=parquet_spec(broken, "data.parquet.shuffle_rows=400").data)
    with pytest.raises(DataError, match=r"labels must be between 0 and 1") as caught:
        train(spec, out=tmp_path / "run")
    assert last.name in str(caught.value)
    assert f"rowstead train --resume {tmp_path / 'run'} --accept-changed-log" in str(caught.value)
    assert checkpoint.checkpoints_in(tmp_path / "run" / "checkpoints")
    pq.write_table(right, last, row_group_size=400)
    assert_same_weights(straight.folder, resume(str(tmp_path / "run"), accept_changed_log=True).folder)


def test_skipped_rows_are_counted_and_reported(tmp_path: Path, log: Path) -> None:
    def spoiled(table: pa.Table) -> pa.Table:
        values = table["dense_1"].to_numpy().copy()
        values[:3] = np.nan
        return table.set_column(table.schema.get_field_index("dense_1"), "dense_1", pa.array(values))

    bad = _with_columns(log, tmp_path / "log", spoiled)
    num_files = len(list(bad.glob("train-*.parquet")))
    callback = RecordingCallback()
    result = train(parquet_spec(bad, "data.parquet.on_bad_row=skip"), out=tmp_path / "run", callback=callback)
    assert result.outcome.position.num_samples == 6400 - 3 * num_files
    assert f"skipped {3 * num_files} bad rows of the training split (on_bad_row: skip)" in callback.messages
    assert result.record is not None
    assert result.record.figures["num_rows_skipped"] == 3 * num_files
    assert any("evaluation split" in text for text in callback.messages)
    callback = RecordingCallback()
    evaluate(str(result.folder), callback=callback)
    assert any(text.startswith("skipped") for text in callback.messages)


def test_a_log_of_nothing_but_bad_rows_is_an_error(tmp_path: Path, log: Path) -> None:
    def spoiled(table: pa.Table) -> pa.Table:
        nothing = pa.array(np.full(table.num_rows, np.nan, np.float32))
        return table.set_column(table.schema.get_field_index("dense_1"), "dense_1", nothing)

    bad = _with_columns(log, tmp_path / "log", spoiled)
    with pytest.raises(DataError, match="every row of the training split is bad"):
        train(parquet_spec(bad, "data.parquet.on_bad_row=skip"), out=tmp_path / "run")


def test_tables_that_cannot_fit_are_refused_with_sizes_and_remedies(tmp_path: Path) -> None:
    huge = small_spec("features.sparse.0.num_rows=100000000000", "train.sparse_optimizer.kind=adam", "device=cpu")
    with pytest.raises(RowsteadError, match=r"need \d+\.\d TB .*, available: .* of system memory") as caught:
        train(huge, out=tmp_path / "run")
    assert "1. place tables on disk" in str(caught.value)
    assert "rowwise_adagrad" in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_full_disk_is_named_with_sizes_and_the_last_good_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = train(small_spec("train.max_steps=10"), out=tmp_path / "run")
    plain = first.folder / "spec.yaml"
    plain.write_text(plain.read_text().replace("max_steps: 10", "max_steps: 20"))
    full = shutil.disk_usage(tmp_path)._replace(free=100)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: full)
        with pytest.raises(CheckpointError, match=r"disk full while saving step 20 .*needs .* KB, free 100 bytes") as caught:
            resume(str(first.folder))
    assert f"the last valid checkpoint is {first.folder / 'checkpoints' / 'step-000000010'}" in str(caught.value)
    again = resume(str(first.folder))
    assert again.outcome.position.step == 20


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_asking_for_a_gpu_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RowsteadError, match="no CUDA GPU here: use `--set device=cpu`"):
        train(small_spec("device=cuda"), out=tmp_path / "run")


def test_a_run_leaves_the_random_state_threads_and_signals_of_its_process_alone(tmp_path: Path) -> None:
    torch.manual_seed(3)
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    train(small_spec("train.max_steps=2"), out=tmp_path / "run", callback=RecordingCallback(stop_after=1))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def first_losses(out: Path) -> list[float]:
    """The losses of the first steps of one small synchronous run."""
    losses: list[float] = []
    start = Stepper.start

    def listened(self: Stepper, *arguments: Any) -> Callable[[], float]:
        loss = start(self, *arguments)
        losses.append(loss())
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stepper, "start", listened)
        train(small_spec("train.max_steps=20", "device=cpu"), out=out)
    return losses


def test_losses_are_the_ones_that_were_stored(tmp_path: Path) -> None:
    # After a change that is meant to change them: python -m tests.test_run
    # Processors differ in the last bits of a sum; anything that changes the algorithm differs by far more than 1e-5.
    assert first_losses(tmp_path / "run") == pytest.approx(json.loads(GOLDEN.read_text()), rel=1e-5)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        GOLDEN.write_text(json.dumps(first_losses(Path(folder) / "run"), indent=1) + "\n")
