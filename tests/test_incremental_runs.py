"""Runs with incremental checkpoints: resumed, evaluated, exported and started from like any other, and small on disk."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from rowstead.run import resume, train
from rowstead.serve.export import export
from rowstead.serve.exported import load_exported
from rowstead.serve.predict import predict
from rowstead.spec.run import RunSpec
from rowstead.training import checkpoint
from rowstead.training.trained import evaluate, load
from tests.small_runs import RecordingCallback, assert_same_weights, figures_of, overfitting, small_spec, tensors_in, truncate

INCREMENTAL = ("train.checkpoint_every=10", "train.full_checkpoint_every=4")


def kinds_in(run: Path) -> dict[int, int]:
    """By step, how many incremental checkpoints there were since the last full one."""
    return {found.step: found.number for found in map(checkpoint.load, checkpoint.checkpoints_in(run / "checkpoints"))}


@pytest.mark.parametrize("kind", ["rowwise_adagrad", "adam"])
def test_a_run_that_was_stopped_at_increments_ends_at_the_same_weights_bit_for_bit(tmp_path: Path, kind: str) -> None:
    changes = (
        "train.max_steps=100",
        f"train.sparse_optimizer.kind={kind}",
        "train.dense_optimizer.kind=adam",
        "train.epochs=2",
    )
    straight = train(small_spec(*changes), out=tmp_path / "straight")
    spec = small_spec(*changes, *INCREMENTAL, "train.keep_checkpoints=9")
    stopped = train(spec, out=tmp_path / "stopped", callback=RecordingCallback(stop_after=37))
    assert kinds_in(stopped.folder) == {10: 0, 20: 1, 30: 2, 37: 3}
    resume(str(stopped.folder), callback=RecordingCallback(stop_after=45, by=signal.SIGTERM))
    assert kinds_in(stopped.folder) == {10: 0, 20: 1, 30: 2, 37: 3, 40: 0, 45: 1}
    ended = resume(str(stopped.folder))
    assert_same_weights(straight.folder, ended.folder)
    assert figures_of(ended) == figures_of(straight)
    assert kinds_in(ended.folder) == {10: 0, 37: 3, 40: 0, 45: 1, 50: 2, 60: 3, 70: 0, 80: 1, 90: 2, 100: 3}


def test_a_damaged_increment_is_reported_and_the_run_continues_from_the_previous_one(tmp_path: Path) -> None:
    straight = train(small_spec("train.max_steps=60"), out=tmp_path / "straight")
    spec = small_spec("train.max_steps=60", *INCREMENTAL)
    stopped = train(spec, out=tmp_path / "stopped", callback=RecordingCallback(stop_after=35))
    newest = stopped.folder / "checkpoints" / "step-000000035"
    truncate(newest / "shard-00000.safetensors")
    callback = RecordingCallback()
    ended = resume(str(stopped.folder), callback=callback)
    assert any(str(newest) in text and "trying the previous one" in text for text in callback.messages)
    assert f"resuming {stopped.folder} after step 30" in callback.messages
    assert_same_weights(straight.folder, ended.folder)


def test_everything_that_reads_a_run_reads_one_that_ends_in_an_increment(tmp_path: Path) -> None:
    plain = train(small_spec("train.max_steps=25"), out=tmp_path / "plain")
    run = train(small_spec("train.max_steps=25", *INCREMENTAL), out=tmp_path / "run")
    assert kinds_in(run.folder) == {10: 0, 20: 1, 25: 2}
    assert evaluate(str(run.folder)).figures() == figures_of(plain)
    rows = [load(str(folder)).store.rows("sparse_0", torch.arange(50)) for folder in (run.folder, plain.folder)]
    assert torch.equal(*rows)
    for name in ("run", "plain"):
        predict(str(tmp_path / name), tmp_path / f"{name}.parquet")
    assert pq.read_table(tmp_path / "run.parquet").equals(pq.read_table(tmp_path / "plain.parquet"))
    spec = small_spec("train.max_steps=3", "seed=5")
    warm = [train(spec, out=tmp_path / f"from-{r.folder.name}", init_from=str(r.folder)).folder for r in (run, plain)]
    assert_same_weights(*warm)


@pytest.mark.slow
def test_a_run_that_ends_in_an_increment_is_exported_like_any_other(tmp_path: Path) -> None:
    plain = train(small_spec("train.max_steps=25"), out=tmp_path / "plain")
    run = train(small_spec("train.max_steps=25", *INCREMENTAL), out=tmp_path / "run")
    columns = {f"dense_{i}": [0.5, 1.0] for i in range(4)} | {f"sparse_{i}": [[1, 7], [3]] for i in range(3)}
    exported = [export(str(r.folder), tmp_path / f"{r.folder.name}-exported").folder for r in (run, plain)]
    one, other = (load_exported(folder).predict(columns) for folder in exported)
    assert one.tolist() == other.tolist()


def test_a_warm_start_begins_with_a_full_checkpoint_of_its_own(tmp_path: Path) -> None:
    earlier = train(small_spec("train.max_steps=25", *INCREMENTAL), out=tmp_path / "earlier")
    spec = small_spec("train.max_steps=15", *INCREMENTAL, "train.keep_checkpoints=5")
    warm = train(spec, out=tmp_path / "warm", init_from=str(earlier.folder))
    assert kinds_in(warm.folder) == {0: 0, 10: 1, 15: 2}


def test_early_stopping_takes_back_the_best_weights_and_saves_all_of_them(tmp_path: Path) -> None:
    spec = overfitting()
    incremental = dataclasses.replace(spec.train, checkpoint_every=10, full_checkpoint_every=4)
    plain = train(spec, out=tmp_path / "plain")
    result = train(dataclasses.replace(spec, train=incremental), out=tmp_path / "run")
    assert result.outcome.ending == "stopped early"
    kinds = kinds_in(result.folder)
    assert kinds.popitem() == (result.outcome.position.step, 0)
    assert any(number > 0 for number in kinds.values())
    assert_same_weights(plain.folder, result.folder)
    taken_back = tensors_in(result.folder, "best")
    assert all(torch.equal(value, taken_back[name]) for name, value in tensors_in(result.folder).items())


def criteo_like(*overrides: str) -> RunSpec:
    """Tables of 20,000 rows with a Zipf law under which 1 % of the rows get 90 % of the accesses.

    Between two checkpoints a table is read a quarter as often as it has rows: on Criteo's log that is once in 2.5 million
    examples for its largest tables, which have some ten million ids each.
    """
    return small_spec(
        "data.synth={num_train_samples: 50000, num_eval_samples: 100, num_dense: 4, num_sparse: 3, num_ids: 20000, skew: 1.362}",
        "features.sparse=[{name: 'sparse_{i}', repeat: 3, num_rows: 20000, hash: none}]",
        "model.width=16",
        "train={batch_size: 500, max_steps: 100, checkpoint_every: 10, keep_checkpoints: 20, full_checkpoint_every: 10}",
        *overrides,
    )


def bytes_in(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def test_on_a_criteo_like_log_increments_are_a_fifth_of_full_ones_at_most_and_restore_exactly(tmp_path: Path) -> None:
    runs = [train(criteo_like(f"train.full_checkpoint_every={every}"), out=tmp_path / str(every)).folder for every in (1, 10)]
    full, incremental = (checkpoint.checkpoints_in(run / "checkpoints") for run in runs)
    assert [path.name for path in full] == [path.name for path in incremental]
    ratios = [bytes_in(one) / bytes_in(other) for one, other in zip(full, incremental, strict=True)]
    assert min(ratios[1:]) > 5, ratios  # some 25 for the first, 6.5 for the ninth
    for index in (0, 1, 9):
        one, other = checkpoint.load(full[index]), checkpoint.load(incremental[index])
        assert (other.number, list(other.tensors)) == (index, list(one.tensors))
        assert all(torch.equal(value, other.tensors[name]) for name, value in one.tensors.items())


@pytest.mark.parametrize("encoding", ["fp16", "int8"])
def test_a_run_resumed_from_rounded_rows_is_as_good(tmp_path: Path, encoding: str) -> None:
    plain = train(small_spec("train.max_steps=100"), out=tmp_path / "plain")
    spec = small_spec("train.max_steps=100", *INCREMENTAL, f"train.checkpoint_format={encoding}")
    stopped = train(spec, out=tmp_path / "run", callback=RecordingCallback(stop_after=35))
    assert kinds_in(stopped.folder)[35] == 3
    ended = resume(str(stopped.folder))
    assert figures_of(ended)["ne"] == pytest.approx(figures_of(plain)["ne"], rel=2e-3)
