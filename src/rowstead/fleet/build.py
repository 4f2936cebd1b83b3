"""Builds the parts of a fleet's roles from its spec: connections, the store over the sparse servers, the model, files of dense parameters."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from rowstead.data.batch import Batch
from rowstead.data.log_files import check_log_files
from rowstead.data.open_log import Sources, open_sources
from rowstead.data.transforms import DenseTransforms
from rowstead.fleet.keys import Keys
from rowstead.fleet.partition import Partition, partition_tables
from rowstead.fleet.reader_server import assignment_log_path
from rowstead.fleet.remote_store import RemoteStore
from rowstead.fleet.roster import PRIVATE, ROLES_FOLDER, Roster, create_roles_folder
from rowstead.fleet.rpc_client import Client
from rowstead.kernels.layout import layout_of
from rowstead.nn.dlrm import DLRM
from rowstead.records.files import write_atomic
from rowstead.records.plain_files import read_plain
from rowstead.spec.errors import CheckpointError, RowsteadError
from rowstead.spec.fleet import FleetSpec, RoleKind
from rowstead.spec.run import RunSpec
from rowstead.stores.base import EmbeddingStore
from rowstead.stores.host import HostStore
from rowstead.stores.state import StatePart
from rowstead.training import checkpoint
from rowstead.training.build import ROW_DTYPES, build_model, expected_lookups
from rowstead.training.progress import Position
from rowstead.training.trained import checkpoint_facts

KEYS_FILE = "keys.json"
"""Under `roles/`: the keys of a fleet whose roles may be on several machines; drawn anew whenever its coordinator starts."""
MAX_DENSE_BYTES = 1 << 34
DENSE_REQUEST = "dense.request"
"""Under `roles/`: its time is when trainers were last asked to save their dense parameters."""
INITIAL_FILE = "initial.safetensors"
"""Under `roles/`: the dense parameters and optimizer state that trainers start with instead of the seed's."""


def resolve_fleet(spec: RunSpec) -> RunSpec:
    """Fill in the values of a fleet's spec that follow from the others."""
    fleet = fleet_of(spec).at_scale(spec.scale)
    if fleet.tables == "local":
        fleet = dataclasses.replace(fleet, num_dense=0)  # the single trainer has the whole model
    return dataclasses.replace(spec, fleet=fleet, train=spec.train.resolve_sync(fleet.num_trainers))


def fleet_of(spec: RunSpec) -> FleetSpec:
    """The fleet of a run's spec; an error for a run without one."""
    if spec.fleet is None:
        raise RowsteadError("this run has no fleet: it was trained by a single process")
    return spec.fleet


def build_shared_facts(spec: RunSpec, sources: Sources, *, dtype: torch.dtype, total_steps: int) -> dict[str, Any]:
    """Build the facts that the coordinator shares with all roles."""
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
    """The dtype of dense parameters: FP32, or FP64 in tests."""
    found: torch.dtype = getattr(torch, roster.facts["dtype"])
    return found


def row_dtype(spec: RunSpec, dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else ROW_DTYPES[spec.model.row_format]


def load_sources(spec: RunSpec, roster: Roster) -> Sources:
    """Open the log with the transforms that the coordinator has fitted; it must be the log that the coordinator has opened."""
    facts = roster.facts
    sources = open_sources(spec, DenseTransforms.from_plain(facts["transforms"]), facts["id_kinds"])
    check_log_files(roster.path.parent, sources)
    return sources


class Connections:
    """Creates the clients of one process, and sums their traffic."""

    def __init__(self, roster: Roster, name: str, keys: Keys | None, *, deadline_s: float, max_in_flight: int = 8) -> None:
        self._roster, self._name, self._keys = roster, name, keys
        self._deadline_s, self._max_in_flight = deadline_s, max_in_flight
        self._clients: list[Client] = []

    def to(self, kind: RoleKind, number: int, name: str | None = None) -> Client:
        """Create a client of a server, for use by one thread."""
        address = self._roster.address(kind, number)
        client = Client(
            address,
            name=name or self._name,
            keys=self._keys,
            deadline_s=self._deadline_s,
            max_in_flight=self._max_in_flight,
        )
        self._clients.append(client)
        return client

    def close(self) -> None:
        """Close all clients; none may be in use. A ZeroMQ context that is never closed blocks its garbage collection."""
        for client in self._clients:
            client.close()

    def figures(self) -> dict[str, float]:
        clients = list(self._clients)
        return {
            "num_bytes_sent": sum(client.num_bytes_sent for client in clients),
            "num_bytes_received": sum(client.num_bytes_received for client in clients),
            "num_resent": sum(client.num_resent for client in clients),
        }


def build_remote_store(spec: RunSpec, roster: Roster, connections: Connections, *, staleness: int) -> RemoteStore:
    return RemoteStore(
        layout_of(spec.features, spec.tables),
        spec.train.sparse_optimizer,
        Partition.from_json(roster.facts["partition"]),
        lambda number: connections.to("sparse", number),
        staleness=staleness,
        dtype=row_dtype(spec, fleet_dtype(roster)),
        check=spec.check_ids,
    )


def wrap_for_device(store: EmbeddingStore, device: torch.device) -> EmbeddingStore:
    """Wrap a CPU store for a model on `device`."""
    return store if device.type == "cpu" else HostStore(store, device)


def build_fleet_model(spec: RunSpec, device: torch.device, store: EmbeddingStore, dtype: torch.dtype) -> DLRM:
    """Build the model over a store, with the dense parameters that the spec's seed gives."""
    model = build_model(spec, device, trains=True, store=store)
    model.net.to(dtype)
    return model


def cast_batch(batch: Batch, dtype: torch.dtype) -> Batch:
    if batch.dense.dtype == dtype:
        return batch
    labels, weights = (None if value is None else value.to(dtype) for value in (batch.labels, batch.weights))
    return dataclasses.replace(batch, dense=batch.dense.to(dtype), labels=labels, weights=weights)


# Dense parameters in files, from one incarnation of a trainer to the next


def write_dense(path: Path, tensors: dict[str, Tensor]) -> None:
    for leftover in path.parent.glob(f".{path.name}.tmp-*"):  # of an incarnation that was killed while it wrote
        leftover.unlink(missing_ok=True)
    content = save({name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()})
    write_atomic(path, content, mode=PRIVATE)


def read_dense(folder: Path, number: int | None = None) -> dict[str, Tensor] | None:
    """Read what a trainer saved last, or without a number what all trainers start with; None if there is no file."""
    path = dense_file(folder, number) if number is not None else folder / ROLES_FOLDER / INITIAL_FILE
    if not os.path.lexists(path):
        return None
    try:
        return load(read_plain(path, MAX_DENSE_BYTES))
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Resume the run from its checkpoint") from None


def dense_file(folder: Path, number: int) -> Path:
    """Path of a trainer's dense parameters and optimizer state."""
    return folder / ROLES_FOLDER / f"trainer-{number}.safetensors"


def request_dense(folder: Path, number: int, *, timeout_s: float) -> bool:
    """Ask trainers to save their dense parameters, and wait for those of trainer `number`; whether it has saved."""
    request = folder / ROLES_FOLDER / DENSE_REQUEST
    try:
        request.touch(PRIVATE)
    except OSError:  # the disk may be full
        return False
    deadline_s = time.monotonic() + timeout_s
    while is_dense_requested(folder, number):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return True


def is_dense_requested(folder: Path, number: int) -> bool:
    """Whether a trainer was asked to save its dense parameters since it last did."""
    try:
        asked_ns = (folder / ROLES_FOLDER / DENSE_REQUEST).stat().st_mtime_ns
    except OSError:
        return False
    try:
        return dense_file(folder, number).stat().st_mtime_ns < asked_ns
    except OSError:
        return True


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
    """Write an ordinary checkpoint of a fleet's model to `folder`."""
    shared = roster.facts
    facts = checkpoint_facts(spec, shared["transforms"], shared["id_kinds"])
    facts |= {"position": vars(position), "readers": progress}
    return checkpoint.save(folder, position.step, dense, facts, keep=keep, parts=parts)


def read_reader_progress(spec: RunSpec, folder: Path) -> list[str]:
    files = [assignment_log_path(folder, number) for number in range(fleet_of(spec).num_readers)]
    return [file.read_bytes().decode(errors="replace") if file.is_file() else "" for file in files]


def restore_reader_progress(folder: Path, progress: list[str]) -> None:
    """Write the assignment logs from a checkpoint, so that readers continue there."""
    for number, text in enumerate(progress):
        if text:
            write_atomic(assignment_log_path(folder, number), text, mode=PRIVATE)


def create_keys(folder: Path) -> None:
    """Draw the keys of the run."""
    Keys.generate().save(create_roles_folder(folder) / KEYS_FILE)


def load_keys(folder: Path) -> Keys | None:
    """Load the keys of the run; None if it has none, because all its roles are on this machine."""
    path = folder / ROLES_FOLDER / KEYS_FILE
    return Keys.load(path) if path.exists() else None
