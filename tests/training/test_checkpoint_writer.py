"""Checkpoints that are written while training goes on: exact, one at a time, and safe against stops, kills and full disks."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rowstead.distributed.process_group import ProcessGroup, SingleProcess
from rowstead.distributed.sharded_store import ShardedStore
from rowstead.distributed.sharding import SHARDS, plan_shards
from rowstead.run import resume, train
from rowstead.spec.errors import CheckpointError
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.stores.base import EmbeddingStore
from rowstead.stores.device import DeviceStore
from rowstead.training import checkpoint
from rowstead.training.checkpoint_writer import CheckpointWriter
from tests.distributed.thread_process_group import in_threads
from tests.small_runs import RecordingCallback, assert_same_weights, small_spec, wait_until
from tests.stores.store_contract import KINDS, layouts, sparse_batches

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


class HeldBack:
    """Holds every write of a checkpoint back until training has done so many more steps, or has something to say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, until_step: int, **options: Any) -> None:
        self.callback = _Releasing(until_step, **options)
        write = checkpoint.write_shard

        def write_later(*arguments: Any) -> Any:
            assert self.callback.released.wait(60)
            return write(*arguments)

        monkeypatch.setattr(checkpoint, "write_shard", write_later)


class _Releasing(RecordingCallback):
    def __init__(self, until_step: int, **options: Any) -> None:
        super().__init__(**options)
        self.released = threading.Event()
        self._until_step = until_step

    def on_step(self, progress: Any) -> None:
        super().on_step(progress)
        if progress.step >= self._until_step:
            self.released.set()

    def on_message(self, text: str) -> None:
        super().on_message(text)
        if "is still being written" in text:
            self.released.set()


def names_in(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("train.full_checkpoint_every=3",),
        ("train.sparse_optimizer.kind=adam",),
        pytest.param(("device=cuda",), marks=needs_gpu),
        pytest.param(("device=cuda", "train.full_checkpoint_every=3"), marks=needs_gpu),
    ],
)
def test_a_checkpoint_written_beside_training_equals_that_of_a_run_that_stopped_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: tuple[str, ...]
) -> None:
    spec = small_spec("train.max_steps=30", *changes, "train.checkpoint_every=10", "train.keep_checkpoints=3")
    for step in (10, 20):
        with monkeypatch.context() as patch:
            held = HeldBack(patch, until_step=step + 7)
            train(spec, out=tmp_path / f"beside-{step}", callback=held.callback)
        stopped = train(spec, out=tmp_path / f"stopped-{step}", callback=RecordingCallback(stop_after=step)).folder
        name = f"step-{step:09d}"
        beside, alone = (checkpoint.load(run / "checkpoints" / name) for run in (tmp_path / f"beside-{step}", stopped))
        assert beside.number == alone.number
        assert all(torch.equal(value, alone.tensors[key]) for key, value in beside.tensors.items())
        positions = [{k: v for k, v in saved.facts["position"].items() if k != "train_s"} for saved in (beside, alone)]
        assert positions[0] == positions[1]
    assert_same_weights(tmp_path / "beside-10", tmp_path / "beside-20")


def test_a_checkpoint_that_is_due_while_one_is_written_waits_for_it_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldBack(monkeypatch, until_step=1000)
    spec = small_spec("train.max_steps=25", "train.checkpoint_every=10", "train.keep_checkpoints=9")
    train(spec, out=tmp_path / "run", callback=held.callback)
    assert any("the checkpoint of step 10 is still being written: training waits" in text for text in held.callback.messages)
    assert names_in(tmp_path / "run") == ["step-000000010", "step-000000020", "step-000000025"]


def test_a_stop_during_a_write_saves_both_that_checkpoint_and_the_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldBack(monkeypatch, until_step=13, stop_after=13, by=signal.SIGTERM)
    result = train(small_spec("train.max_steps=30", "train.checkpoint_every=10"), out=tmp_path / "run", callback=held.callback)
    assert (result.outcome.ending, result.outcome.position.step) == ("interrupted", 13)
    assert names_in(tmp_path / "run") == ["step-000000010", "step-000000013"]


def test_a_full_disk_ends_training_at_the_next_step_and_names_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage, callback = shutil.disk_usage, RecordingCallback()

    def full_at_20(folder: Path) -> Any:
        is_full = callback.steps[-1].step >= 20
        return shutil._ntuple_diskusage(100, 98, 2) if is_full else usage(folder)

    monkeypatch.setattr(shutil, "disk_usage", full_at_20)
    spec = small_spec("train.max_steps=5000", "train.checkpoint_every=10", "train.epochs=100")
    with pytest.raises(CheckpointError, match=r"disk full while saving step 20 .*last valid checkpoint is .*step-000000010"):
        train(spec, out=tmp_path / "run", callback=callback)
    assert callback.steps[-1].step < 30, "the checkpoint of step 30 was not waited for"
    assert names_in(tmp_path / "run") == ["step-000000010"]


def test_ctrl_c_twice_during_a_write_leaves_no_thread_and_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupting(_Releasing):
        def on_step(self, progress: Any) -> None:
            super().on_step(progress)
            if progress.step == 12:
                raise KeyboardInterrupt

    held = HeldBack(monkeypatch, until_step=12)
    held.callback = Interrupting(12)
    with pytest.raises(KeyboardInterrupt):
        train(small_spec("train.max_steps=30", "train.checkpoint_every=10"), out=tmp_path / "run", callback=held.callback)
    wait_until(
        lambda: not any(thread.name.startswith("checkpoint") for thread in threading.enumerate()), what="the thread's end"
    )
    assert not [name for name in names_in(tmp_path / "run") if name.startswith(".tmp")]


DIES_WHILE_WRITING = """
import os, signal, sys, threading
from pathlib import Path
from rowstead.run import train
from rowstead.training import checkpoint
from tests.small_runs import RecordingCallback, small_spec
write = checkpoint.write_shard
def write_half(path, slices):
    written = write(path, slices)
    if "000000020" in str(path):
        threading.Event().wait()
    return written
checkpoint.write_shard = write_half
train(small_spec(*sys.argv[2:]), out=Path(sys.argv[1]), callback=RecordingCallback(stop_after=25, by=signal.SIGKILL))
"""


@pytest.mark.slow
def test_a_run_killed_while_it_writes_a_checkpoint_resumes_from_the_one_before(tmp_path: Path) -> None:
    settings = ("train.max_steps=30", "train.checkpoint_every=10", "train.keep_checkpoints=5")
    command = [sys.executable, "-c", DIES_WHILE_WRITING, str(tmp_path / "killed"), *settings]
    assert subprocess.run(command, timeout=120, check=False, env=os.environ).returncode == -signal.SIGKILL
    assert [name[:9] for name in names_in(tmp_path / "killed")] == [".tmp-save", "step-0000"]
    callback = RecordingCallback()
    resume(str(tmp_path / "killed"), callback=callback)
    assert callback.steps[0].step == 11
    assert names_in(tmp_path / "killed") == ["step-000000010", "step-000000020", "step-000000030"]
    straight = train(small_spec(*settings), out=tmp_path / "straight")
    assert_same_weights(straight.folder, tmp_path / "killed")


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_processes_save_the_state_of_one_step_although_they_train_on(data: st.DataObject) -> None:
    layout, world_size = data.draw(layouts()), data.draw(st.integers(1, 3))
    plan = plan_shards(layout, {table.name: data.draw(st.sampled_from(SHARDS)) for table in layout.tables}, world_size)
    optimizer = SparseOptimizerSpec(kind=data.draw(st.sampled_from(KINDS)))
    batches = [data.draw(sparse_batches(layout, weighted=False)) for _ in range(4)]
    dense = {"net.x": torch.arange(3.0)}

    def run(process_group: ProcessGroup) -> tuple[dict[str, Tensor], Callable[[], dict[str, Tensor]]]:
        store: EmbeddingStore = DeviceStore(layout, optimizer)
        if world_size > 1:
            store = ShardedStore(plan, optimizer, process_group, DeviceStore)
        writer = CheckpointWriter(process_group)
        for step, sparse in enumerate(batches, 1):
            pooled = store.lookup(sparse)
            store.update(sparse, torch.ones_like(pooled), lr=0.1, step=step)
            if step == 2:
                state = {name: value.clone() for name, value in store.state().items()}
                own = {name: value.clone() for name, value in dense.items()}
                writer.start(folder, step, own, {}, keep=1, store=store)
                own["net.x"].zero_()
        written = writer.finish()
        assert written is not None
        return state, dict(checkpoint.load(written.path).tensors)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results = [run(SingleProcess())] if world_size == 1 else in_threads(world_size, run)
        for state, saved in results:
            expected = {f"store.{name}": value for name, value in state.items()} | dense
            assert saved.keys() == expected.keys()
            assert all(torch.equal(saved[name], value) for name, value in expected.items())
