"""A trained run has all its charts: steps, time, quality, calibration and tables."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rowstead import run
from rowstead.report import charts_runs
from rowstead.report.inputs import gather
from rowstead.report.page import page_from, sections_of
from rowstead.spec.phases import Phase
from rowstead.spec.run import load_recipe
from tests.distributed.thread_process_group import ThreadProcessGroup, in_threads
from tests.small_runs import small_spec

OTHER_SECONDS = {"train_s", "cpu_s", "samples_per_s", "alone_samples_per_s"}
"""Metrics of a record that end in `_s` and are not phases."""
IN_EVERY_STEP = {Phase.LOOKUP, Phase.FORWARD, Phase.BACKWARD, Phase.DENSE_UPDATE, Phase.ROW_UPDATE}


def test_a_trained_run_has_every_figure(tmp_path: Path) -> None:
    changes = [
        "data.synth.num_train_samples=6_000",
        "data.synth.num_eval_samples=2_000",
        "train.batch_size=256",
        "train.eval_every=10",
        "train.log_every=5",
        "train.checkpoint_every=null",
        "threads=1",
    ]
    result = run.train(load_recipe("quickstart", changes), root=tmp_path)
    inputs = gather([tmp_path])
    keys = {figure.key: figure for section in sections_of(inputs) for figure in section.charts}
    assert {"mean-step", "time-by-phase", "speed", "ne", "calibration", "feature-sizes", "placement-by-memory"} <= keys.keys()
    assert result.quality is not None
    assert keys["ne"].traces[1]["y"][-1] == result.quality.ne
    assert result.quality.reliability is not None
    assert tuple(keys["calibration"].traces[1]["x"]) == result.quality.reliability.predicted
    assert sum(keys["calibration"].traces[1]["customdata"]) == 2_000
    assert result.folder.name in page_from(inputs)


def train_eagerly(folder: Path) -> None:
    run.train(small_spec("device=cpu", "train.max_steps=5"), out=folder)


def train_with_hogwild(folder: Path) -> None:
    run.train(small_spec("device=cpu", "train.max_steps=5", "train.sync.hogwild_threads=2"), out=folder)


def train_sharded(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        groups = {}
        patch.setattr(run, "open_process_group", lambda device: contextlib.nullcontext(groups[threading.get_ident()]))
        spec = small_spec("device=cpu", "train.max_steps=5")

        def train(group: ThreadProcessGroup) -> None:
            groups[threading.get_ident()] = group
            run.train(spec, out=folder)

        in_threads(2, train)


@pytest.mark.parametrize(
    ("train", "phases"),
    [
        (train_eagerly, IN_EVERY_STEP),
        (train_with_hogwild, {Phase.HOGWILD}),
        (train_sharded, IN_EVERY_STEP | {Phase.PREFETCH, Phase.EXCHANGE}),
    ],
)
def test_every_phase_of_a_record_is_drawn(train: Callable[[Path], None], phases: set[Phase], tmp_path: Path) -> None:
    train(tmp_path / "run")
    (view,) = gather([tmp_path / "run"]).runs
    recorded = {key for key in view.figures if key.endswith("_s")} - OTHER_SECONDS
    (spent,) = charts_runs.times_spent([view])
    assert spent.seconds.keys() == {Phase.DATA, Phase.EVALUATION, Phase.CHECKPOINT} | phases
    assert recorded == {phase.key for phase in spent.seconds}
