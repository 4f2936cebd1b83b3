"""A trainer with servers in this process."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rowstead.data.open_log import open_sources
from rowstead.distributed.sharding import piece_layout
from rowstead.fleet.build import dense_file, read_dense
from rowstead.fleet.log_share import LogShare
from rowstead.fleet.partition import partition_tables
from rowstead.fleet.reader import Reader
from rowstead.fleet.reader_server import ReaderServer
from rowstead.fleet.roster import RoleAddress, Roster
from rowstead.fleet.sparse_server import SparseServer
from rowstead.fleet.table_shard import TableShard
from rowstead.fleet.trainer import FleetTrainer
from rowstead.kernels.layout import layout_of
from rowstead.spec.fleet import FleetSpec, RoleKind
from tests.small_runs import small_spec, wait_until

NUM_BATCHES = 3


class BlockedServer(SparseServer):
    """Applies updates only after `gate` is set."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.gate = threading.Event()
        super().__init__(*arguments, **options)

    def _update(self, message: Any, caller: Any) -> Any:
        assert self.gate.wait(60)
        return super()._update(message, caller)


@contextlib.contextmanager
def blocked_training(folder: Path, **fleet: Any) -> Iterator[tuple[FleetTrainer, Reader, BlockedServer]]:
    """A trainer that has done all its steps, and whose server has applied none yet; it has to end well once the server's gate is set."""
    spec = dataclasses.replace(small_spec("train.sync.staleness=4"), fleet=FleetSpec(num_sparse=1, num_dense=0, **fleet))
    layout = layout_of(spec.features, spec.tables)
    partition = partition_tables(layout.tables, 1)
    kept = TableShard(piece_layout(layout, partition.pieces_of(layout, 0)), spec.train.sparse_optimizer, seed=spec.seed)
    with contextlib.ExitStack() as stack:
        share = LogShare(open_sources(spec).train, batch_size=64, max_batches=NUM_BATCHES)
        reader = Reader(share, folder / "reader-0.progress")
        serving = stack.enter_context(ReaderServer(reader, name="reader-0")).start()
        sparse = BlockedServer(kept).start()
        stack.callback(sparse.close)
        stack.callback(sparse.gate.set)
        servers: list[tuple[RoleKind, str]] = [("reader", serving.address), ("sparse", sparse.address)]
        addresses = [RoleAddress(kind=kind, number=0, address=at, incarnation=0, pid=os.getpid()) for kind, at in servers]
        facts = {"dtype": "float32", "partition": partition.to_json(), "total_steps": NUM_BATCHES}
        Roster(folder).write(addresses, facts)

        trainer, ended = FleetTrainer(spec, folder, 0), list[bool]()
        thread = threading.Thread(
            target=lambda: ended.append(trainer.run(until=lambda: False, ready=lambda: None)), daemon=True
        )
        thread.start()
        wait_until(lambda: trainer.figures()["num_steps"] == NUM_BATCHES, what="all steps")
        yield trainer, reader, sparse
        sparse.gate.set()
        thread.join(60)
        assert ended == [True]


def test_a_batch_is_reported_done_only_after_the_servers_have_its_update(tmp_path: Path) -> None:
    """If the trainer were killed in between, another trainer would have to train on the batch."""
    (tmp_path / "roles").mkdir()
    with blocked_training(tmp_path) as (_, reader, sparse):
        assert not sparse.gate.wait(0.3)  # batches done at the end of a log are reported at once
        assert reader.status()["num_done"] == 0
    assert reader.status()["num_done"] == NUM_BATCHES


def test_a_trainer_that_cannot_save_its_dense_parameters_continues_and_saves_them_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    obstacle = dense_file(tmp_path, 0)
    obstacle.mkdir(parents=True)
    with blocked_training(tmp_path, snapshot_every_s=1e-3) as (trainer, _, _):
        assert "trainer-0 could not save its dense parameters, and tries again later: " in caplog.text
        assert trainer.figures()["num_unsaved_steps"] == NUM_BATCHES
        obstacle.rmdir()
    assert trainer.figures()["num_unsaved_steps"] == 0
    assert read_dense(tmp_path, 0)
