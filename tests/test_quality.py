"""Models end near the best NE that their log allows, and a linear model does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.quality import quickstart, train_logistic_regression
from rowstead import run
from rowstead.spec.run import RunSpec, load_recipe
from rowstead.training.metrics import Quality


def small_log() -> RunSpec:
    """The quickstart with fewer and smaller features, so that a tenth of the examples is enough."""
    changes = [
        "data.synth.num_train_samples=250_000",
        "data.synth.num_eval_samples=40_000",
        "data.synth.num_sparse=4",
        "data.synth.num_ids=[20, 40, 80, 160]",
        "data.synth.mean_ids=[1, 1, 2, 1]",
        "features.sparse=[{name: 'sparse_{i}', repeat: 4, num_rows: 160, hash: modulo}]",
        "model.width=8",
        "model.bottom=[32]",
        "model.top=[64, 32]",
        "train.batch_size=512",
        "train.dense_optimizer.lr=0.01",
        "train.eval_every=null",
        "train.checkpoint_every=null",
    ]
    return load_recipe("quickstart", changes)


def trained(spec: RunSpec, folder: Path) -> Quality:
    quality = run.train(spec, out=folder).quality
    assert quality is not None
    return quality


def above(quality: Quality, other_ne: float | None) -> float:
    """How far, in parts of it, the model's NE is above another one; both in expectation under the teacher."""
    assert quality.ne_expected
    assert other_ne
    return quality.ne_expected / other_ne - 1


def test_a_small_model_comes_near_its_teacher(tmp_path: Path) -> None:
    quality = trained(small_log(), tmp_path / "run")
    assert quality.ne_best is not None
    assert quality.ne_best < 0.80
    assert above(quality, quality.ne_best) < 0.03  # a linear model ends more than twice as far away


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_quickstart_is_worth_learning_and_learned(tmp_path: Path) -> None:
    spec = quickstart(seed=1)
    ours = trained(spec, tmp_path / "run")
    linear, _ = train_logistic_regression(spec)
    assert ours.ne_best is not None
    assert ours.ne_best <= 0.80
    assert above(ours, ours.ne_best) <= 0.015
    assert above(linear, ours.ne_expected) >= 0.02


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rows_in_bf16_cost_no_quality(tmp_path: Path) -> None:
    full = quickstart(seed=1)
    half = replace(full, model=replace(full.model, row_format="bf16"))
    with_fp32, with_bf16 = trained(full, tmp_path / "fp32"), trained(half, tmp_path / "bf16")
    assert abs(above(with_bf16, with_fp32.ne_expected)) <= 0.0005
