"""Runs that end before their time: stopped, killed, their checkpoints damaged; they go on, and end where they would have ended."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from rowstead.records.run_folder import RunFolder
from rowstead.run import resume, train
from rowstead.spec.errors import CheckpointError, RowsteadError
from rowstead.spec.parse import to_plain
from rowstead.spec.run import RunSpec
from rowstead.training import checkpoint
from rowstead.training.progress import Progress
from rowstead.training.trained import evaluate
from tests.small_runs import (
    RecordingCallback,
    assert_same_weights,
    figures_of,
    overfitting,
    parquet_spec,
    small_spec,
    tensors_in,
    truncate,
    wait_until,
    written_log,
)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_log(tmp_path_factory.mktemp("log"))


@pytest.fixture(params=["synth", "parquet"])
def spec_of(request: pytest.FixtureRequest, log: Path) -> Callable[..., RunSpec]:
    """Specs of a synthetic log, and of shuffled Parquet files."""
    if request.param == "synth":
        return small_spec
    return lambda *overrides: parquet_spec(log, "data.parquet.shuffle_rows=1000", *overrides)


def test_a_run_that_was_stopped_twice_ends_at_the_same_weights_bit_for_bit(
    tmp_path: Path, spec_of: Callable[..., RunSpec]
) -> None:
    spec = spec_of("train.epochs=2", "train.max_steps=150", "train.schedule={warmup_steps: 20, decay: cosine}")
    straight = train(spec, out=tmp_path / "straight")
    stopped = train(spec, out=tmp_path / "stopped", callback=RecordingCallback(stop_after=37))
    assert (stopped.outcome.ending, stopped.outcome.position.step) == ("interrupted", 37)
    assert stopped.record is None
    assert not (stopped.folder / "record.json").exists()
    again = resume(str(stopped.folder), callback=RecordingCallback(stop_after=120, by=signal.SIGTERM))
    assert (again.outcome.ending, again.outcome.position.step) == ("interrupted", 120)
    callback = RecordingCallback()
    ended = resume(str(stopped.folder), callback=callback)
    assert ended.outcome.ending == "finished"
    assert f"resuming {stopped.folder} after step 120" in callback.messages
    assert callback.steps[0].step == 121
    assert_same_weights(straight.folder, ended.folder)
    assert figures_of(ended) == figures_of(straight)


def test_a_run_continues_in_another_placement_and_ends_at_the_same_weights_bit_for_bit(tmp_path: Path) -> None:
    spec = small_spec("train.max_steps=40")
    straight = train(spec, out=tmp_path / "straight")
    train(spec, out=tmp_path / "stopped", callback=RecordingCallback(stop_after=17))
    (tmp_path / "rows").mkdir()
    on_disk = ("placement={'*': {where: ssd, cache_fraction: 0.1}}", f"memory.folder={tmp_path / 'rows'}")
    callback = RecordingCallback(stop_after=29)
    resume(str(tmp_path / "stopped"), changes=on_disk, callback=callback)
    kept = RunFolder.open(str(tmp_path / "stopped"), tmp_path).read_spec()
    assert kept.memory.folder == str(tmp_path / "rows")
    ended = resume(str(tmp_path / "stopped"), changes=("placement=auto",))
    assert_same_weights(straight.folder, ended.folder)
    with pytest.raises(RowsteadError, match="remove `--set seed=2` "):
        resume(str(tmp_path / "stopped"), changes=("seed=2",))


@pytest.mark.parametrize("sparse", ["sgd", "adagrad", "adam"])
def test_resuming_is_exact_with_every_sparse_optimizer(tmp_path: Path, sparse: str) -> None:
    spec = small_spec("train.max_steps=40", f"train.sparse_optimizer.kind={sparse}", "train.dense_optimizer.kind=adam")
    straight = train(spec, out=tmp_path / "straight")
    train(spec, out=tmp_path / "stopped", callback=RecordingCallback(stop_after=17))
    assert_same_weights(straight.folder, resume(str(tmp_path / "stopped")).folder)


def _flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 4
    file.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("damage", "file"),
    [(truncate, "shard-00000.safetensors"), (_flip_a_bit, "shard-00000.safetensors"), (_flip_a_bit, "manifest.json")],
)
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_is_used(
    tmp_path: Path, damage: Callable[[Path], None], file: str
) -> None:
    spec = small_spec("train.max_steps=60", "train.checkpoint_every=20")
    straight = train(spec, out=tmp_path / "straight")
    stopped = train(spec, out=tmp_path / "stopped", callback=RecordingCallback(stop_after=45))
    newest = stopped.folder / "checkpoints" / "step-000000045"
    damage(newest / file)
    callback = RecordingCallback()
    quality = evaluate(str(stopped.folder), callback=callback)
    assert quality.num_samples == 2000
    assert any(str(newest) in text and "trying the previous one" in text for text in callback.messages)
    callback = RecordingCallback()
    ended = resume(str(stopped.folder), callback=callback)
    assert any(str(newest) in text and "damaged" in text for text in callback.messages)
    assert f"resuming {stopped.folder} after step 40" in callback.messages
    assert_same_weights(straight.folder, ended.folder)


def test_where_every_checkpoint_is_damaged_each_is_named(tmp_path: Path) -> None:
    result = train(small_spec("train.max_steps=10", "train.checkpoint_every=5"), out=tmp_path / "run")
    for path in checkpoint.checkpoints_in(result.folder / "checkpoints"):
        truncate(path / "shard-00000.safetensors")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is usable") as caught:
        resume(str(result.folder))
    assert "step-000000005" in str(caught.value)
    assert "step-000000010" in str(caught.value)


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    spec = small_spec("train.max_steps=10")
    straight = train(spec, out=tmp_path / "straight")
    RunFolder.create_at(tmp_path / "killed").write_spec(spec)
    callback = RecordingCallback()
    again = resume(str(tmp_path / "killed"), callback=callback)
    assert any("no checkpoint yet" in text for text in callback.messages)
    assert_same_weights(straight.folder, again.folder)


def test_a_warm_start_survives_a_death_before_the_first_checkpoint(tmp_path: Path) -> None:
    earlier = train(small_spec("train.max_steps=10"), out=tmp_path / "earlier")
    spec = small_spec("train.max_steps=5", "seed=7")

    class Dying(RecordingCallback):
        def on_step(self, progress: Progress) -> None:
            raise MemoryError("as good as killed")

    with pytest.raises(MemoryError):
        train(spec, out=tmp_path / "warm", init_from=str(earlier.folder), callback=Dying())
    straight = train(spec, out=tmp_path / "straight", init_from=str(earlier.folder))
    assert_same_weights(straight.folder, resume(str(tmp_path / "warm")).folder)


def test_resuming_a_run_that_stopped_early_trains_no_further(tmp_path: Path) -> None:
    result = train(overfitting(), out=tmp_path / "run")
    before = tensors_in(result.folder)
    callback = RecordingCallback()
    again = resume(str(result.folder), callback=callback)
    assert not callback.steps
    assert again.outcome.ending == "stopped early"
    assert again.quality == result.quality
    assert all(torch.equal(value, before[name]) for name, value in tensors_in(again.folder).items())


def test_early_stopping_is_resumed_exactly(tmp_path: Path) -> None:
    straight = train(overfitting(), out=tmp_path / "straight")
    train(overfitting(), out=tmp_path / "stopped", callback=RecordingCallback(stop_after=straight.outcome.position.step - 15))
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


def test_a_run_that_is_being_trained_cannot_be_resumed(tmp_path: Path) -> None:
    result = train(small_spec("train.max_steps=2"), out=tmp_path / "run")
    with RunFolder(result.folder).lock(), pytest.raises(RowsteadError, match=f"being trained by process {os.getpid()}"):
        resume(str(result.folder))
    assert resume(str(result.folder)).outcome.ending == "finished"


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
def test_ctrl_c_saves_says_how_to_continue_and_loses_nothing(tmp_path: Path) -> None:
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
    assert f"Resume with: rowstead train --resume {stopped}" in output
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
