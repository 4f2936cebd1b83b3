"""Whole runs: they resume exactly, survive damage, stop early, start warm, and measure what they say."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

import rowstead
from rowstead.data.synth import write_parquet
from rowstead.records.events import read_events
from rowstead.records.run_folder import RunFolder
from rowstead.run import Result, resume, train
from rowstead.spec.errors import CheckpointError, DataError, RowsteadError, TrainingError
from rowstead.spec.parse import digest, to_plain
from rowstead.spec.run import RunSpec
from rowstead.trained import evaluate, load
from rowstead.training import checkpoint
from rowstead.training.progress import Progress, Silent
from rowstead.training.step import Stepper
from tests.small_runs import parquet_spec, small_spec, wait_until

GOLDEN = Path(__file__).parent / "golden" / "losses.json"


class Listening(Silent):
    """Keeps the messages, and asks the process to stop after a step, as Ctrl-C or `kill` would."""

    def __init__(self, stop_after: int | None = None, by: signal.Signals = signal.SIGINT) -> None:
        self.messages: list[str] = []
        self.steps: list[Progress] = []
        self._stop_after, self._by = stop_after, by

    def on_step(self, progress: Progress) -> None:
        self.steps.append(progress)
        if progress.step == self._stop_after:
            os.kill(os.getpid(), self._by)

    def on_message(self, text: str) -> None:
        self.messages.append(text)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small synthetic log in several uneven Parquet files."""
    synth = small_spec().data.synth
    assert synth is not None
    folder = tmp_path_factory.mktemp("log")
    write_parquet(synth, folder, rows_per_file=1500, rows_per_group=400)
    return folder


@pytest.fixture(params=["synth", "parquet"])
def spec_of(request: pytest.FixtureRequest, log: Path) -> Callable[..., RunSpec]:
    """Specs of a synthetic log, and of shuffled Parquet files."""
    if request.param == "synth":
        return small_spec
    return lambda *overrides: parquet_spec(log, "data.parquet.shuffle_rows=1000", *overrides)


def tensors_in(run: Path, folder: str = "checkpoints") -> dict[str, torch.Tensor]:
    """The tensors of a run's newest checkpoint."""
    saved = checkpoint.load_latest(run / folder, lambda text: pytest.fail(text))
    return dict(saved.tensors)


def assert_same_weights(one: Path, other: Path) -> None:
    first, second = tensors_in(one), tensors_in(other)
    assert first.keys() == second.keys()
    different = [name for name, value in first.items() if not torch.equal(value, second[name])]
    assert not different


def figures_of(result: Result) -> dict[str, float]:
    assert result.quality is not None
    return result.quality.figures()


def test_a_run_that_was_stopped_twice_ends_at_the_same_weights_bit_for_bit(
    tmp_path: Path, spec_of: Callable[..., RunSpec]
) -> None:
    spec = spec_of("train.epochs=2", "train.max_steps=150", "train.schedule={warmup_steps: 20, decay: cosine}")
    straight = train(spec, out=tmp_path / "straight")
    stopped = train(spec, out=tmp_path / "stopped", watcher=Listening(stop_after=37))
    assert (stopped.outcome.ending, stopped.outcome.position.step) == ("interrupted", 37)
    assert stopped.record is None
    assert not (stopped.folder / "record.json").exists()
    again = resume(str(stopped.folder), watcher=Listening(stop_after=120, by=signal.SIGTERM))
    assert (again.outcome.ending, again.outcome.position.step) == ("interrupted", 120)
    listening = Listening()
    ended = resume(str(stopped.folder), watcher=listening)
    assert ended.outcome.ending == "finished"
    assert f"resuming {stopped.folder} after step 120" in listening.messages
    assert listening.steps[0].step == 121
    assert_same_weights(straight.folder, ended.folder)
    assert figures_of(ended) == figures_of(straight)


@pytest.mark.parametrize("sparse", ["sgd", "adagrad", "adam"])
def test_resuming_is_exact_with_every_sparse_optimizer(tmp_path: Path, sparse: str) -> None:
    spec = small_spec("train.max_steps=40", f"train.sparse_optimizer.kind={sparse}", "train.dense_optimizer.kind=adam")
    straight = train(spec, out=tmp_path / "straight")
    train(spec, out=tmp_path / "stopped", watcher=Listening(stop_after=17))
    assert_same_weights(straight.folder, resume(str(tmp_path / "stopped")).folder)


def _truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 4
    file.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("damage", "file"),
    [(_truncate, "shard-00000.safetensors"), (_flip_a_bit, "shard-00000.safetensors"), (_flip_a_bit, "manifest.json")],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    tmp_path: Path, damage: Callable[[Path], None], file: str
) -> None:
    spec = small_spec("train.max_steps=60", "train.checkpoint_every=20")
    straight = train(spec, out=tmp_path / "straight")
    stopped = train(spec, out=tmp_path / "stopped", watcher=Listening(stop_after=45))
    newest = stopped.folder / "checkpoints" / "step-000000045"
    damage(newest / file)
    listening = Listening()
    quality = evaluate(str(stopped.folder), watcher=listening)
    assert quality.num_samples == 2000
    assert any(str(newest) in text and "trying the one before" in text for text in listening.messages)
    listening = Listening()
    ended = resume(str(stopped.folder), watcher=listening)
    assert any(str(newest) in text and "damaged" in text for text in listening.messages)
    assert f"resuming {stopped.folder} after step 40" in listening.messages
    assert_same_weights(straight.folder, ended.folder)


def test_where_every_checkpoint_is_damaged_each_is_named(tmp_path: Path) -> None:
    result = train(small_spec("train.max_steps=10", "train.checkpoint_every=5"), out=tmp_path / "run")
    for path in checkpoint.checkpoints_in(result.folder / "checkpoints"):
        _truncate(path / "shard-00000.safetensors")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is usable") as caught:
        resume(str(result.folder))
    assert "step-000000005" in str(caught.value)
    assert "step-000000010" in str(caught.value)


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    spec = small_spec("train.max_steps=10")
    straight = train(spec, out=tmp_path / "straight")
    RunFolder.create_at(tmp_path / "killed").write_spec(spec)
    listening = Listening()
    again = resume(str(tmp_path / "killed"), watcher=listening)
    assert any("no checkpoint yet" in text for text in listening.messages)
    assert_same_weights(straight.folder, again.folder)


def test_a_warm_start_survives_a_death_before_the_first_checkpoint(tmp_path: Path) -> None:
    earlier = train(small_spec("train.max_steps=10"), out=tmp_path / "earlier")
    spec = small_spec("train.max_steps=5", "seed=7")

    class Dying(Listening):
        def on_step(self, progress: Progress) -> None:
            raise MemoryError("as good as killed")

    with pytest.raises(MemoryError):
        train(spec, out=tmp_path / "warm", init_from=str(earlier.folder), watcher=Dying())
    straight = train(spec, out=tmp_path / "straight", init_from=str(earlier.folder))
    assert_same_weights(straight.folder, resume(str(tmp_path / "warm")).folder)


def _overfitting() -> RunSpec:
    """Few examples and many epochs: the evaluation gets better, then worse."""
    return small_spec(
        "data.synth.num_train_samples=320",
        "train.epochs=100",
        "train.eval_every=10",
        "train.early_stop.patience=3",
        "train.dense_optimizer={kind: adam, lr: 0.02}",
        "train.sparse_optimizer.lr=0.3",
    )


def test_early_stopping_takes_back_the_best_weights(tmp_path: Path) -> None:
    listening = Listening()
    result = train(_overfitting(), out=tmp_path / "run", watcher=listening)
    assert result.outcome.ending == "stopped early"
    assert result.outcome.position.step < 500
    evaluations = [event for event in read_events(result.folder / "events.jsonl") if event["kind"] == "evaluation"]
    *before, final = evaluations
    best = min(before, key=lambda event: event["ne"])
    assert before[-1]["step"] - best["step"] == 30
    assert final["ne"] == pytest.approx(best["ne"], rel=1e-9)
    assert figures_of(result)["ne"] == final["ne"]
    assert any(f"took back the weights of step {best['step']}" in text for text in listening.messages)
    taken_back = tensors_in(result.folder, "best")
    assert all(torch.equal(value, taken_back[name]) for name, value in tensors_in(result.folder).items())


def test_resuming_a_run_that_stopped_early_trains_no_further(tmp_path: Path) -> None:
    result = train(_overfitting(), out=tmp_path / "run")
    before = tensors_in(result.folder)
    listening = Listening()
    again = resume(str(result.folder), watcher=listening)
    assert not listening.steps
    assert again.outcome.ending == "stopped early"
    assert again.quality == result.quality
    assert all(torch.equal(value, before[name]) for name, value in tensors_in(again.folder).items())


def test_early_stopping_is_resumed_exactly(tmp_path: Path) -> None:
    straight = train(_overfitting(), out=tmp_path / "straight")
    train(_overfitting(), out=tmp_path / "stopped", watcher=Listening(stop_after=straight.outcome.position.step - 15))
    ended = resume(str(tmp_path / "stopped"))
    assert ended.outcome.ending == "stopped early"
    assert ended.outcome.position.step == straight.outcome.position.step
    assert_same_weights(straight.folder, ended.folder)


def test_a_finished_run_that_is_resumed_changes_nothing(tmp_path: Path) -> None:
    result = train(small_spec("train.max_steps=10"), out=tmp_path / "run")
    before = tensors_in(result.folder)
    again = resume(str(result.folder))
    assert again.quality == result.quality
    assert again.outcome.samples_per_s is None
    assert all(torch.equal(value, before[name]) for name, value in tensors_in(again.folder).items())


def test_a_warm_start_begins_with_the_weights_of_the_earlier_run(tmp_path: Path) -> None:
    first = train(small_spec("name=first"), root=tmp_path)
    cold, warm = Listening(), Listening()
    other = small_spec("name=second", "data.synth.seed=1", "train.max_steps=1")
    train(other, root=tmp_path, watcher=cold)
    train(other, root=tmp_path, watcher=warm, init_from=first.folder.name)
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


def test_a_run_that_is_being_trained_cannot_be_resumed(tmp_path: Path) -> None:
    result = train(small_spec("train.max_steps=2"), out=tmp_path / "run")
    with RunFolder(result.folder).lock(), pytest.raises(RowsteadError, match=f"being trained by process {os.getpid()}"):
        resume(str(result.folder))
    assert resume(str(result.folder)).outcome.ending == "finished"


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
    result = train(spec, out=tmp_path / "run", watcher=Listening(stop_after=25))
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
        ("resumed", 25),
        ("train", 30),
        ("checkpoint", 30),
        ("evaluation", 30),
        ("calibration", 30),
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
    assert {"ne", "auc", "ne_best", "train_s", "forward_s", "waiting_for_data_s", "peak_memory_bytes"} <= figures.keys()
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


def test_a_loss_that_is_no_number_names_the_step_and_the_batch(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"at step \d+.*epoch 0, after \d+ examples, reader at"):
        train(small_spec("train.dense_optimizer={kind: sgd, lr: 1e20}"), out=tmp_path / "run")


def test_a_bad_row_in_the_middle_loses_no_step_and_training_goes_on_once_it_is_right(tmp_path: Path, log: Path) -> None:
    good = parquet_spec(log, "data.parquet.shuffle_rows=400")
    straight = train(good, out=tmp_path / "straight")
    broken = _with_columns(log, tmp_path / "log", lambda table: table)
    last = max(broken.glob("train-*.parquet"))
    right = pq.read_table(last)
    labels = right["label"].to_numpy().copy()
    labels[-1] = 7
    pq.write_table(right.set_column(right.schema.get_field_index("label"), "label", pa.array(labels)), last, row_group_size=400)
    spec = dataclasses.replace(good, data=parquet_spec(broken, "data.parquet.shuffle_rows=400").data)
    with pytest.raises(DataError, match=r"is no label") as caught:
        train(spec, out=tmp_path / "run")
    assert last.name in str(caught.value)
    assert f"rowstead train --resume {tmp_path / 'run'}" in str(caught.value)
    assert checkpoint.checkpoints_in(tmp_path / "run" / "checkpoints")
    pq.write_table(right, last, row_group_size=400)
    assert_same_weights(straight.folder, resume(str(tmp_path / "run")).folder)


def test_skipped_rows_are_counted_and_reported(tmp_path: Path, log: Path) -> None:
    def spoiled(table: pa.Table) -> pa.Table:
        values = table["dense_1"].to_numpy().copy()
        values[:3] = np.nan
        return table.set_column(table.schema.get_field_index("dense_1"), "dense_1", pa.array(values))

    bad = _with_columns(log, tmp_path / "log", spoiled)
    num_files = len(list(bad.glob("train-*.parquet")))
    listening = Listening()
    result = train(parquet_spec(bad, "data.parquet.on_bad_row=skip"), out=tmp_path / "run", watcher=listening)
    assert result.outcome.position.num_samples == 6400 - 3 * num_files
    assert f"left out {3 * num_files} bad rows while reading the training split (on_bad_row: skip)" in listening.messages
    assert result.record is not None
    assert result.record.figures["num_rows_skipped"] == 3 * num_files
    assert any("evaluation split" in text for text in listening.messages)
    listening = Listening()
    evaluate(str(result.folder), watcher=listening)
    assert any(text.startswith("left out") for text in listening.messages)


def test_a_log_of_nothing_but_bad_rows_is_an_error(tmp_path: Path, log: Path) -> None:
    def spoiled(table: pa.Table) -> pa.Table:
        nothing = pa.array(np.full(table.num_rows, np.nan, np.float32))
        return table.set_column(table.schema.get_field_index("dense_1"), "dense_1", nothing)

    bad = _with_columns(log, tmp_path / "log", spoiled)
    with pytest.raises(DataError, match="every row of the training split is bad"):
        train(parquet_spec(bad, "data.parquet.on_bad_row=skip"), out=tmp_path / "run")


def test_tables_that_cannot_fit_are_refused_with_sizes_and_remedies(tmp_path: Path) -> None:
    huge = small_spec("features.sparse.0.num_rows=100000000000", "train.sparse_optimizer.kind=adam", "device=cpu")
    with pytest.raises(RowsteadError, match=r"need \d+\.\d TB, .*; system memory has .* for tables") as caught:
        train(huge, out=tmp_path / "run")
    assert "1. let tables go to disk" in str(caught.value)
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
    assert f"the last good checkpoint is {first.folder / 'checkpoints' / 'step-000000010'}" in str(caught.value)
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
    train(small_spec("train.max_steps=2"), out=tmp_path / "run", watcher=Listening(stop_after=1))
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


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "rowstead", *arguments]


def _recipe(folder: Path, spec: RunSpec) -> str:
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(to_plain(spec)))
    return str(file)


def _slower(spec: RunSpec) -> RunSpec:
    """The same with steps of some milliseconds, so that a signal arrives in the middle of training."""
    return dataclasses.replace(
        spec,
        model=dataclasses.replace(spec.model, bottom=(512, 512), top=(512, 512)),
        train=dataclasses.replace(spec.train, batch_size=32, max_steps=200, checkpoint_every=100),
    )


@pytest.mark.slow
def test_200_steps_are_100_steps_sigkill_resume_and_100_steps(tmp_path: Path, spec_of: Callable[..., RunSpec]) -> None:
    spec = _slower(spec_of())
    straight = train(spec, out=tmp_path / "straight")
    killed = tmp_path / "killed"
    process = subprocess.Popen(_command("train", _recipe(tmp_path, spec), "--out", str(killed)), stdout=subprocess.DEVNULL)
    try:
        wait_until(
            lambda: (killed / "checkpoints" / "step-000000100").is_dir() or process.poll() is not None,
            what="the checkpoint of step 100",
        )
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL, "it finished before it could be killed"
    assert not (killed / "record.json").exists()
    done = subprocess.run(_command("train", "--resume", str(killed)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "after step 100" in done.stdout
    assert_same_weights(straight.folder, killed)


@pytest.mark.slow
@pytest.mark.parametrize("full_every", [1, 5])
def test_a_run_killed_again_and_again_while_it_saves_ends_at_the_same_weights(tmp_path: Path, full_every: int) -> None:
    spec = _slower(small_spec())
    straight = train(spec, out=tmp_path / "straight")
    spec = dataclasses.replace(
        spec, train=dataclasses.replace(spec.train, checkpoint_every=1, full_checkpoint_every=full_every)
    )
    killed = tmp_path / "killed"
    arguments = ["train", _recipe(tmp_path, spec), "--out", str(killed)]
    for until in (20, 60, 130):
        process = subprocess.Popen(_command(*arguments), stdout=subprocess.DEVNULL)

        def steps_saved() -> int:
            names = [path.name for path in checkpoint.checkpoints_in(killed / "checkpoints")]
            return int(names[-1].split("-")[1]) if names else 0

        try:
            wait_until(lambda: steps_saved() >= until or process.poll() is not None, what=f"step {until}")  # noqa: B023
        finally:
            process.kill()
        assert process.wait() == -signal.SIGKILL
        assert steps_saved() >= until
        arguments = ["train", "--resume", str(killed)]
    done = subprocess.run(_command(*arguments), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "damaged" not in done.stdout
    assert_same_weights(straight.folder, killed)
    assert not list((killed / "checkpoints").glob(".tmp-*"))


@pytest.mark.slow
def test_ctrl_c_saves_says_how_to_go_on_and_loses_nothing(tmp_path: Path) -> None:
    spec = _slower(small_spec("train.log_every=1"))
    spec = dataclasses.replace(spec, train=dataclasses.replace(spec.train, checkpoint_every=None))
    straight = train(spec, out=tmp_path / "straight")
    stopped = tmp_path / "stopped"
    process = subprocess.Popen(
        _command("train", _recipe(tmp_path, spec), "--out", str(stopped)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    events = stopped / "events.jsonl"
    try:
        wait_until(
            lambda: (events.is_file() and len(events.read_bytes().splitlines()) >= 20) or process.poll() is not None,
            what="20 steps",
        )
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert "the checkpoint is saved" in output
    assert f"go on with: rowstead train --resume {stopped}" in output
    assert len(checkpoint.checkpoints_in(stopped / "checkpoints")) == 1
    done = subprocess.run(_command("train", "--resume", str(stopped)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert_same_weights(straight.folder, stopped)


@pytest.mark.slow
def test_a_second_process_cannot_train_into_a_run_that_is_being_trained(tmp_path: Path) -> None:
    result = train(small_spec("train.max_steps=2"), out=tmp_path / "run")
    with RunFolder(result.folder).lock():
        done = subprocess.run(_command("train", "--resume", str(result.folder)), capture_output=True, text=True)
    assert done.returncode == 2
    assert f"is being trained by process {os.getpid()}" in done.stderr
    assert "Traceback" not in done.stderr


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        GOLDEN.write_text(json.dumps(first_losses(Path(folder) / "run"), indent=1) + "\n")
