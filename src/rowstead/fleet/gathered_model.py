"""The model of a fleet, gathered from its parts: rows from the sparse servers, dense parameters from the dense servers.

Used by one thread at a time, during training or after it. It saves ordinary checkpoints; in one saved during training some rows
are a few steps newer than others.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
from torch import Tensor

from rowstead.data.source import Source
from rowstead.fleet.build import (
    INITIAL_FILE,
    Connections,
    build_fleet_model,
    build_remote_store,
    cast_batch,
    dense_file,
    fleet_dtype,
    fleet_of,
    read_dense,
    request_dense,
    save_checkpoint,
    write_dense,
)
from rowstead.fleet.dense_client import DenseServerClient
from rowstead.fleet.keys import Keys
from rowstead.fleet.roster import ROLES_FOLDER, Roster
from rowstead.fleet.rpc_client import RefusedError
from rowstead.spec.errors import RowsteadError
from rowstead.spec.run import RunSpec
from rowstead.training import checkpoint
from rowstead.training.evaluate import evaluate
from rowstead.training.flat_parameters import flatten_parameters, named_parts
from rowstead.training.metrics import Quality
from rowstead.training.progress import Position
from rowstead.training.saved_tensors import StoreTensors
from rowstead.training.step import load_net
from rowstead.training.trained import evaluate as evaluate_run

DEADLINE_S = 600.0
"""How long to wait for a server: the supervisor reports sooner if one cannot be restarted."""
SNAPSHOT_S = 3600.0
DENSE_SAVE_S = 2.0
"""How long to wait until a trainer has saved its dense parameters; one that waits for batches does not."""
MAX_ATTEMPTS = 5
"""Attempts to load a model into the servers, if they are killed meanwhile."""


class GatheredModel:
    def __init__(self, spec: RunSpec, folder: Path, keys: Keys | None) -> None:
        self._spec, self._folder, self._roster = spec, folder, Roster(folder)
        connections = self._connections = Connections(self._roster, "coordinator", keys, deadline_s=DEADLINE_S)
        self._dtype = fleet_dtype(self._roster)
        store = build_remote_store(spec, self._roster, connections, staleness=0)
        self.model = build_fleet_model(spec, torch.device("cpu"), store, self._dtype)
        flatten_parameters(self.model.net)
        fleet = fleet_of(spec)
        dense = [connections.to("dense", number, "coordinator-dense") for number in range(fleet.num_dense)]
        self._dense_server = DenseServerClient(dense, exchange_timeout_s=DEADLINE_S) if dense else None
        self._sparse = [connections.to("sparse", number, "coordinator-rows") for number in range(fleet.num_sparse)]
        self._optimizer: dict[str, Tensor] = {}

    def load(self, saved: checkpoint.Checkpoint, *, with_optimizer: bool) -> None:
        """Load a checkpoint into the fleet while no trainer runs; servers that are killed later restart from it."""
        load_net(self.model, saved.tensors)
        for _ in range(MAX_ATTEMPTS):
            before = self._call_sparse("status")
            self.model.store.load_state(StoreTensors(saved.tensors), rows_only=not with_optimizer)
            if self._call_sparse("snapshot") == before:
                break
        else:
            raise RowsteadError(
                f"sparse servers were restarted {MAX_ATTEMPTS} times while a checkpoint was loaded into them: see their logs under "
                f"{self._folder / ROLES_FOLDER}"
            )
        dense = {name: saved.tensors[name] for name in saved.tensors if name.startswith("net.")}
        if with_optimizer:
            self._optimizer = {name: saved.tensors[name] for name in saved.tensors if name.startswith("optimizer.")}
            dense |= self._optimizer
        write_dense(self._folder / ROLES_FOLDER / INITIAL_FILE, dense)

    def gather(self, *, is_training: bool = False) -> None:
        """Fetch the current dense parameters; rows stay in the servers. During training trainers are asked to save theirs first."""
        if is_training:
            request_dense(self._folder, self._first_saved() or 0, timeout_s=DENSE_SAVE_S)
        saved = self._read_saved_dense()
        if saved is not None:
            load_net(self.model, saved)
            self._optimizer = {name: value for name, value in saved.items() if name.startswith("optimizer.")}
        if self._dense_server is None:
            return
        with contextlib.suppress(RefusedError):  # no trainer has joined yet
            shared = named_parts(self.model.net, self._dense_server.pull())
            with torch.no_grad():
                for name, parameter in self.model.net.named_parameters():
                    parameter.copy_(shared[name])

    def save(self, folder: Path, position: Position, *, keep: int, progress: list[str]) -> Path:
        """Write a checkpoint of what `gather` has fetched, with the readers' assignment logs."""
        dense = {f"net.{name}": value.detach() for name, value in self.model.net.state_dict().items()}
        parts = self.model.store.parts()
        return save_checkpoint(self._spec, self._roster, folder, position, dense | self._optimizer, parts, keep, progress)

    def evaluate(self, source: Source, max_samples: int | None) -> Quality:
        if self._dtype != torch.float32:
            source = source.map(lambda batch: cast_batch(batch, self._dtype))
        return evaluate(
            self.model,
            source,
            device=torch.device("cpu"),
            negative_keep_rate=self._spec.data.negative_keep_rate,
            max_samples=max_samples,
            top_k=self._spec.train.eval_top_k,
        )

    def _call_sparse(self, kind: str) -> list[int | None]:
        """Call each sparse server, and return the incarnations that replied."""
        for client in self._sparse:
            client.call(kind, deadline_s=SNAPSHOT_S)
        return [client.server_incarnation for client in self._sparse]

    def close(self) -> None:
        """Close all connections; none may be in use."""
        self._connections.close()

    def _read_saved_dense(self) -> dict[str, Tensor] | None:
        """Read what the first trainer with a file has saved, or what all started with."""
        return read_dense(self._folder, self._first_saved())

    def _first_saved(self) -> int | None:
        """The first trainer that has saved its dense parameters."""
        numbers = range(fleet_of(self._spec).num_trainers)
        return next((number for number in numbers if dense_file(self._folder, number).is_file()), None)


class LocalTablesModel:
    """The model of a fleet with `tables: local`: its single trainer saves it, and the newest checkpoint is evaluated."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, saved: checkpoint.Checkpoint, *, with_optimizer: bool) -> None:
        """Do nothing: the trainer loads it by itself."""

    def gather(self, *, is_training: bool = False) -> None:
        """Do nothing: the trainer has saved it."""

    def save(self, folder: Path, position: Position, *, keep: int, progress: list[str]) -> Path:
        """Do nothing: the trainer has saved it."""
        return folder

    def evaluate(self, source: Source, max_samples: int | None) -> Quality:
        """Evaluate the newest checkpoint."""
        return evaluate_run(str(self._folder), source=source, root=self._folder.parent)

    def close(self) -> None:
        """Do nothing: there are no connections."""
