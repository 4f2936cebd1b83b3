"""What a fleet of one trainer without staleness must end at: the weights of one process, in FP64."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rowstead.data.open_log import open_sources
from rowstead.fleet.build import cast_batch
from rowstead.fleet.coordinator import train_fleet
from rowstead.kernels.layout import layout_of
from rowstead.nn.dlrm import DLRM
from rowstead.spec.fleet import FleetSpec
from rowstead.spec.run import RunSpec
from rowstead.training import checkpoint
from rowstead.training.step import Stepper
from tests.fleet.small_histories import local_store


def weights_in(out: Path) -> dict[str, Tensor]:
    saved = checkpoint.load_latest(out / "checkpoints", pytest.fail)
    return {name: saved.tensors[name] for name in saved.tensors}


def check_one_trainer(spec: RunSpec, num_dense: int, tmp_path: Path) -> None:
    fleet = FleetSpec(num_trainers=1, num_sparse=2, num_dense=num_dense, num_readers=1)
    result = train_fleet(dataclasses.replace(spec, fleet=fleet), out=tmp_path / "fleet", dtype=torch.float64)
    assert result.outcome.position.step == 40
    record = result.record
    assert record is not None
    assert record.figures["samples_per_s"] > 40 * 64 / record.figures["train_s"] / 2, "a short run has a throughput too"
    found, expected = weights_in(tmp_path / "fleet"), one_process_fp64(spec)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def one_process_fp64(spec: RunSpec) -> dict[str, Tensor]:
    """Weights of an ordinary model after the same steps, in FP64."""
    sources, dtype = open_sources(spec), torch.float64
    store = local_store(layout_of(spec.features, spec.tables), spec.train.sparse_optimizer, seed=spec.seed, dtype=dtype)
    torch.manual_seed(spec.seed)
    model = DLRM(spec.model, spec.features, store).to(dtype)
    assert spec.train.max_steps is not None
    stepper = Stepper(model, spec.train, total_steps=spec.train.max_steps)
    batches = sources.train.batches(spec.train.batch_size)
    for number, (batch, _) in zip(range(1, spec.train.max_steps + 1), batches, strict=False):
        stepper.step(cast_batch(batch, dtype), number)
    return stepper.state()
