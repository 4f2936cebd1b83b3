"""Runs small enough for tests: a log that is learned in a second, a recording callback, and checks of results."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rowstead.data.synth import write_parquet
from rowstead.run import Result
from rowstead.spec.parse import override, parse
from rowstead.spec.run import RunSpec
from rowstead.training import checkpoint
from rowstead.training.progress import Callback, Progress


def small_plain() -> dict[str, Any]:
    """A valid recipe as YAML would give it."""
    return {
        "name": "small",
        "data": {
            "synth": {
                "num_train_samples": 6400,
                "num_eval_samples": 2000,
                "num_dense": 4,
                "num_sparse": 3,
                "num_ids": 50,
                "lengths": "poisson",
                "mean_ids": 1.5,
            }
        },
        "features": {
            "dense": [{"name": "dense_{i}", "repeat": 4}],
            "sparse": [{"name": "sparse_{i}", "repeat": 3, "num_rows": 50}],
        },
        "model": {"width": 8, "bottom": [16], "top": [16]},
        "train": {"batch_size": 64},
        "threads": 1,  # so small a model is only slower with more, much so where other tests run beside it
    }


def recipe(folder: Path, **train: object) -> Path:
    """The small recipe in a file, with changes to how it trains."""
    plain = small_plain()
    plain["train"] |= train
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(plain))
    return path


def small_spec(*overrides: str) -> RunSpec:
    """The small recipe with `key.path=value` changes."""
    return parse(RunSpec, override(small_plain(), overrides))


def parquet_spec(log: Path, *overrides: str) -> RunSpec:
    """The small recipe reading Parquet: the files that `write_parquet` left in `log`."""
    plain = small_plain()
    plain["data"] = {
        "parquet": {"train": [f"{log}/train-*.parquet"], "eval": [f"{log}/eval-*.parquet"], "true_p": "true_p"},
    }
    return parse(RunSpec, override(plain, overrides))


def wait_until(condition: Callable[[], bool], *, what: str, deadline_s: float = 120.0) -> None:
    """Return as soon as `condition` holds; fail with `what` if it does not in time."""
    ends = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < ends, f"timed out after {deadline_s} s waiting for {what}"
        time.sleep(0.002)


def written_log(folder: Path) -> Path:
    """The small synthetic log in several uneven Parquet files."""
    synth = small_spec().data.synth
    assert synth is not None
    write_parquet(synth, folder, rows_per_file=1500, rows_per_group=400)
    return folder


class RecordingCallback(Callback):
    """Records messages and steps; stops the process after a step, as Ctrl-C or `kill` would."""

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


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def overfitting() -> RunSpec:
    """Few examples and many epochs: the evaluation gets better, then worse."""
    return small_spec(
        "data.synth.num_train_samples=320",
        "train.epochs=100",
        "train.eval_every=10",
        "train.early_stop.patience=3",
        "train.dense_optimizer={kind: adam, lr: 0.02}",
        "train.sparse_optimizer.lr=0.3",
    )
