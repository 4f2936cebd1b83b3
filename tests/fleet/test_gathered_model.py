"""The model of a fleet in the coordinator."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rowstead.distributed.sharding import piece_layout
from rowstead.fleet.build import dense_file, read_dense, write_dense
from rowstead.fleet.coordinator import train_fleet
from rowstead.fleet.gathered_model import GatheredModel
from rowstead.fleet.partition import partition_tables
from rowstead.fleet.roster import RoleAddress, Roster
from rowstead.fleet.sparse_server import SparseServer
from rowstead.fleet.table_shard import TableShard
from rowstead.kernels.layout import layout_of
from rowstead.run import train
from rowstead.spec.fleet import FleetSpec
from rowstead.training import checkpoint
from rowstead.training.checkpoint import checkpoints_in
from rowstead.training.checkpoint_manifest import STORE
from tests.small_runs import small_spec


def test_a_server_that_is_killed_while_a_model_is_loaded_has_it_in_the_end_and_after_the_next_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = small_spec("train.max_steps=3")
    train(spec, out=tmp_path / "first")
    saved = checkpoint.load_latest(tmp_path / "first" / "checkpoints", pytest.fail)
    spec = dataclasses.replace(spec, fleet=FleetSpec(num_sparse=1, num_dense=0))
    layout = layout_of(spec.features, spec.tables)
    partition = partition_tables(layout.tables, 1)
    pieces = piece_layout(layout, partition.pieces_of(layout, 0))
    servers: list[SparseServer] = []

    def start() -> None:
        """Replace the server by one that has only the snapshots of the one before."""
        if servers:
            servers[-1].close()
        kept = TableShard(pieces, spec.train.sparse_optimizer, seed=spec.seed)
        servers.append(SparseServer(kept, snapshots=tmp_path / "snapshots").start())
        address = RoleAddress(kind="sparse", number=0, address=servers[-1].address, incarnation=len(servers), pid=os.getpid())
        Roster(tmp_path).write([address], {"dtype": "float32", "partition": partition.to_json()})

    (tmp_path / "roles").mkdir()
    start()
    gathered = GatheredModel(spec, tmp_path, None)
    store = gathered.model.store
    load_state = store.load_state

    def killed_after(state: Mapping[str, Tensor], *, rows_only: bool = False) -> None:
        load_state(state, rows_only=rows_only)
        if len(servers) == 1:
            start()

    monkeypatch.setattr(store, "load_state", killed_after)
    try:
        gathered.load(saved, with_optimizer=True)
        assert len(servers) == 2
        start()
        for name, value in store.state().items():
            assert torch.equal(value, saved.tensors[f"{STORE}{name}"]), name
    finally:
        gathered.close()
        servers[-1].close()


@pytest.mark.slow
def test_dense_parameters_of_a_checkpoint_during_training_are_as_new_as_its_rows(tmp_path: Path) -> None:
    spec = small_spec("train.epochs=60", "train.max_steps=1000", "train.checkpoint_every=100", "train.keep_checkpoints=20")
    train_fleet(dataclasses.replace(spec, fleet=FleetSpec(num_sparse=1, num_dense=0, num_readers=1)), out=tmp_path / "run")
    found = [checkpoint.load(path) for path in checkpoints_in(tmp_path / "run" / "checkpoints")]
    assert len(found) > 2
    for saved in found:
        assert float(saved.tensors["optimizer.0.step"]) >= saved.step


def test_what_a_killed_trainer_has_left_is_removed_by_the_next_save(tmp_path: Path) -> None:
    (tmp_path / "roles").mkdir()
    leftover = tmp_path / "roles" / ".trainer-0.safetensors.tmp-4711"
    leftover.write_bytes(b"half")
    write_dense(dense_file(tmp_path, 0), {"net.weight": torch.ones(2)})
    assert not leftover.exists()
    saved = read_dense(tmp_path, 0)
    assert saved is not None
    assert torch.equal(saved["net.weight"], torch.ones(2))
