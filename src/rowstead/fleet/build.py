"""The parts of a fleet's roles, made from its spec: connections, the store over the sparse servers, the centre, number formats."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from rowstead.data.batch import Batch
from rowstead.data.open_log import Sources, open_sources
from rowstead.data.transforms import DenseTransforms
from rowstead.fleet.keys import Keys
from rowstead.fleet.partition import Partition, partition_tables
from rowstead.fleet.reader_server import assignment_log_path
from rowstead.fleet.remote_store import RemoteStore
from rowstead.fleet.roster import ROLES_FOLDER, Roster
from rowstead.fleet.rpc_client import Client
from rowstead.kernels.layout import layout_of
from rowstead.nn.dlrm import DLRM
from rowstead.records.files import write_atomic
from rowstead.records.usage import versions
from rowstead.spec.errors import RowsteadError
from rowstead.spec.fleet import FleetSpec, RoleKind
from rowstead.spec.parse import digest
from rowstead.spec.run import RunSpec
from rowstead.stores.base import EmbeddingStore
from rowstead.stores.host import HostStore
from rowstead.stores.state import StatePart
from rowstead.training import checkpoint
from rowstead.training.build import ROW_DTYPES, build_model, expected_lookups
from rowstead.training.progress import Position
from rowstead.training.trained import architecture

KEYS_FILE = "keys.json"
INITIAL_FILE = "initial.safetensors"
"""Under `roles/`: the dense parameters, and the optimizer's state, that trainers begin with instead of the seed's."""


def resolve_fleet(spec: RunSpec) -> RunSpec:
    """The spec of a fleet with what follows from the rest made plain."""
    fleet = fleet_of(spec)
    if fleet.tables == "local":
        fleet = dataclasses.replace(fleet, num_dense=0)  # the one trainer keeps all of the model
    sync = dataclasses.replace(spec.train.sync, mode=spec.train.sync.mode_for(fleet.num_trainers))
    return dataclasses.replace(spec, fleet=fleet, train=dataclasses.replace(spec.train, sync=sync))


def fleet_of(spec: RunSpec) -> FleetSpec:
    """The fleet of a run that has one."""
    if spec.fleet is None:
        raise RowsteadError("this run has no fleet: it was trained by one process")
    return spec.fleet


def shared_facts(spec: RunSpec, sources: Sources, *, dtype: torch.dtype, total_steps: int) -> dict[str, Any]:
    """What the head works out once for all roles."""
    fleet, layout = fleet_of(spec), layout_of(spec.features, spec.tables)
    facts: dict[str, Any] = {
        "dtype": str(dtype).removeprefix("torch."),
        "total_steps": total_steps,
        "transforms": sources.encoder.transforms.to_plain(),
        "id_kinds": sources.id_kinds,
    }
    if fleet.tables == "remote":
        partition = partition_tables(
            layout.tables,
            fleet.num_sparse,
            lookups=expected_lookups(spec, layout),
            optimizer=spec.train.sparse_optimizer.kind,
            element_bytes=row_dtype(spec, dtype).itemsize,
        )
        facts["partition"] = partition.to_json()
    return facts


def fleet_dtype(roster: Roster) -> torch.dtype:
    """Number format of the dense arithmetic: FP32, or FP64 where arithmetic is checked."""
    found: torch.dtype = getattr(torch, roster.facts["dtype"])
    return found


def row_dtype(spec: RunSpec, dtype: torch.dtype) -> torch.dtype:
    """Number format of rows."""
    return dtype if dtype == torch.float64 else ROW_DTYPES[spec.model.row_format]


def sources_of(spec: RunSpec, roster: Roster) -> Sources:
    """The log, with the transforms that the head has learned."""
    facts = roster.facts
    return open_sources(spec, DenseTransforms.from_plain(facts["transforms"]), facts["id_kinds"])


class Connections:
    """Makes the clients of one process, and adds up what they sent."""

    def __init__(self, roster: Roster, name: str, keys: Keys | None, *, deadline_s: float, max_in_flight: int = 8) -> None:
        self._roster, self._name, self._keys = roster, name, keys
        self._deadline_s, self._max_in_flight = deadline_s, max_in_flight
        self._made: list[Client] = []

    def to(self, kind: RoleKind, number: int, name: str | None = None) -> Client:
        """A client of a server, to be used by one thread."""
        address = self._roster.address(kind, number)
        client = Client(
            address,
            name=name or self._name,
            keys=self._keys,
            deadline_s=self._deadline_s,
            max_in_flight=self._max_in_flight,
        )
        self._made.append(client)
        return client

    def close(self) -> None:
        """Let go of all connections; nobody may be using one. A context of ZeroMQ that nobody closes hangs whoever collects it."""
        for client in self._made:
            client.close()

    def figures(self) -> dict[str, float]:
        """Totals over all clients."""
        made = list(self._made)
        return {
            "num_bytes_sent": sum(client.num_bytes_sent for client in made),
            "num_bytes_received": sum(client.num_bytes_received for client in made),
            "num_resent": sum(client.num_resent for client in made),
        }


def remote_store(spec: RunSpec, roster: Roster, connections: Connections, *, staleness: int) -> RemoteStore:
    """The tables in the sparse servers, as a store."""
    return RemoteStore(
        layout_of(spec.features, spec.tables),
        spec.train.sparse_optimizer,
        Partition.from_json(roster.facts["partition"]),
        lambda number: connections.to("sparse", number),
        staleness=staleness,
        dtype=row_dtype(spec, fleet_dtype(roster)),
        check=spec.check_ids,
    )


def on_device(store: EmbeddingStore, device: torch.device) -> EmbeddingStore:
    """A store of the CPU's for a model on `device`."""
    return store if device.type == "cpu" else HostStore(store, device)


def fleet_model(spec: RunSpec, device: torch.device, store: EmbeddingStore, dtype: torch.dtype) -> DLRM:
    """The model over a store, with the initial dense parameters of the spec's seed."""
    model = build_model(spec, device, trains=True, store=store)
    model.net.to(dtype)
    return model


def cast(batch: Batch, dtype: torch.dtype) -> Batch:
    """A batch whose numbers are in another format."""
    if batch.dense.dtype == dtype:
        return batch
    labels, weights = (None if value is None else value.to(dtype) for value in (batch.labels, batch.weights))
    return dataclasses.replace(batch, dense=batch.dense.to(dtype), labels=labels, weights=weights)


# Dense parameters in files, from one start of a trainer to the next


def write_dense(path: Path, tensors: dict[str, Tensor]) -> None:
    """Keep dense parameters and optimizer state, whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, save({name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}))


def read_dense(folder: Path, number: int | None = None) -> dict[str, Tensor] | None:
    """What a trainer kept last, or with no number what all begin with; none where there is nothing."""
    path = dense_file(folder, number) if number is not None else folder / ROLES_FOLDER / INITIAL_FILE
    return load_file(path) if path.is_file() else None


def dense_file(folder: Path, number: int) -> Path:
    """Where a trainer keeps its dense parameters and its optimizer's state."""
    return folder / ROLES_FOLDER / f"trainer-{number}.safetensors"


def save_checkpoint(
    spec: RunSpec,
    roster: Roster,
    folder: Path,
    position: Position,
    dense: dict[str, Tensor],
    parts: list[StatePart],
    keep: int,
    progress: list[str],
) -> Path:
    """An ordinary checkpoint of a fleet's model, in `folder`."""
    shared = roster.facts
    facts: dict[str, Any] = {
        "architecture": architecture(spec),
        "spec_digest": digest(spec),
        "transforms": shared["transforms"],
        "id_kinds": shared["id_kinds"],
        "versions": versions(),
        "position": position.to_plain(),
        "readers": progress,
    }
    return checkpoint.save(folder, position.step, dense, facts, keep=keep, parts=parts)


def readers_progress(spec: RunSpec, folder: Path) -> list[str]:
    """How far each reader has come, as it has written it down."""
    files = [assignment_log_path(folder, number) for number in range(fleet_of(spec).num_readers)]
    return [file.read_text() if file.is_file() else "" for file in files]


def put_progress(folder: Path, progress: list[str]) -> None:
    """Let readers go on where they had come."""
    for number, text in enumerate(progress):
        if text:
            assignment_log_path(folder, number).write_text(text)


def told_keys(folder: Path) -> Keys | None:
    """The keys of the job, where it has any."""
    path = folder / KEYS_FILE
    return Keys.load(path) if path.exists() else None
