"""The model of a fleet, gathered from where its parts are: rows from the sparse servers, dense parameters from the centre.

Used by one thread at a time, while training goes on or after it. What is saved is an ordinary checkpoint; that training goes on
meanwhile shows only in that some rows are a few steps newer than others.
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
    cast,
    dense_file,
    fleet_dtype,
    fleet_model,
    fleet_of,
    read_dense,
    remote_store,
    save_checkpoint,
    write_dense,
)
from rowstead.fleet.dense_server import DenseServerClient
from rowstead.fleet.keys import Keys
from rowstead.fleet.roster import ROLES_FOLDER, Roster
from rowstead.fleet.rpc_client import RefusedError
from rowstead.spec.errors import RowsteadError
from rowstead.spec.run import RunSpec
from rowstead.training import checkpoint
from rowstead.training.evaluate import evaluate
from rowstead.training.flat_parameters import flat_of, named_parts
from rowstead.training.metrics import Quality
from rowstead.training.progress import Position
from rowstead.training.saved_tensors import StoreTensors
from rowstead.training.step import load_net
from rowstead.training.trained import evaluate as evaluate_run

DEADLINE_S = 600.0
"""How long a server may be away: whoever looks after the roles says sooner when one cannot come back."""
SNAPSHOT_S = 3600.0
MOST_TRIES = 5
"""Of giving the servers a model, if they are killed meanwhile."""


class GatheredModel:
    """The fleet's model as the head sees it."""

    def __init__(self, spec: RunSpec, folder: Path, keys: Keys | None) -> None:
        self._spec, self._folder, self._roster = spec, folder, Roster(folder)
        connections = self._connections = Connections(self._roster, "head", keys, deadline_s=DEADLINE_S)
        self._dtype = fleet_dtype(self._roster)
        store = remote_store(spec, self._roster, connections, staleness=0)
        self.model = fleet_model(spec, torch.device("cpu"), store, self._dtype)
        flat_of(self.model.net)
        self._centre: DenseServerClient | None = None
        if fleet_of(spec).num_dense:
            self._centre = DenseServerClient(connections.to("dense", 0, "head-centre"), exchange_timeout_s=DEADLINE_S)
        self._sparse = [connections.to("sparse", number, "head-rows") for number in range(fleet_of(spec).num_sparse)]
        self._optimizer: dict[str, Tensor] = {}

    def put(self, saved: checkpoint.Checkpoint, *, with_optimizer: bool) -> None:
        """Give a saved model to the fleet while no trainer is at work; servers that are killed later come back with it."""
        load_net(self.model, saved.tensors)
        for _ in range(MOST_TRIES):
            before = self._asked_all("status")
            self.model.store.load_state(StoreTensors(saved.tensors), rows_only=not with_optimizer)
            if self._asked_all("snapshot") == before:
                break
        else:
            raise RowsteadError(
                f"sparse servers were started again {MOST_TRIES} times while they were given saved rows: their logs under "
                f"{self._folder / ROLES_FOLDER} say why"
            )
        dense = {name: saved.tensors[name] for name in saved.tensors if name.startswith("net.")}
        if with_optimizer:
            self._optimizer = {name: saved.tensors[name] for name in saved.tensors if name.startswith("optimizer.")}
            dense |= self._optimizer
        write_dense(self._folder / ROLES_FOLDER / INITIAL_FILE, dense)

    def take(self) -> None:
        """Bring the dense parameters up to date; rows are where they are."""
        kept = self._trainers_own()
        if kept is not None:
            load_net(self.model, kept)
            self._optimizer = {name: value for name, value in kept.items() if name.startswith("optimizer.")}
        if self._centre is None:
            return
        with contextlib.suppress(RefusedError):  # no trainer has got as far as to join
            common = named_parts(self.model.net, self._centre.pull())
            with torch.no_grad():
                for name, parameter in self.model.net.named_parameters():
                    parameter.copy_(common[name])

    def save(self, folder: Path, position: Position, *, keep: int, progress: list[str]) -> Path:
        """Write a checkpoint of what `take` has brought, with how far the readers had come."""
        dense = {f"net.{name}": value.detach() for name, value in self.model.net.state_dict().items()}
        parts = self.model.store.parts()
        return save_checkpoint(self._spec, self._roster, folder, position, dense | self._optimizer, parts, keep, progress)

    def evaluate(self, source: Source, max_samples: int | None) -> Quality:
        """Score what `take` has brought."""
        if self._dtype != torch.float32:
            source = source.map(lambda batch: cast(batch, self._dtype))
        return evaluate(
            self.model,
            source,
            device=torch.device("cpu"),
            negative_keep_rate=self._spec.data.negative_keep_rate,
            max_samples=max_samples,
        )

    def _asked_all(self, kind: str) -> list[int | None]:
        """Ask each sparse server, and say which start of it has answered."""
        for client in self._sparse:
            client.call(kind, deadline_s=SNAPSHOT_S)
        return [client.server_incarnation for client in self._sparse]

    def close(self) -> None:
        """Let go of all connections; nobody may be using it."""
        self._connections.close()

    def _trainers_own(self) -> dict[str, Tensor] | None:
        """What the first trainer that has kept anything has kept, or what all began with."""
        for number in range(fleet_of(self._spec).num_trainers):
            if dense_file(self._folder, number).is_file():
                return read_dense(self._folder, number)
        return read_dense(self._folder)


class TrainersModel:
    """The model of a fleet whose one trainer keeps the tables: it saves them, and what it saved is scored."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, saved: checkpoint.Checkpoint, *, with_optimizer: bool) -> None:
        """The trainer takes it over by itself."""

    def take(self) -> None:
        """The trainer has saved it."""

    def save(self, folder: Path, position: Position, *, keep: int, progress: list[str]) -> Path:
        """The trainer has saved it."""
        return folder

    def evaluate(self, source: Source, max_samples: int | None) -> Quality:
        """Score the newest checkpoint."""
        return evaluate_run(str(self._folder), root=self._folder.parent)

    def close(self) -> None:
        """Nothing is held."""
