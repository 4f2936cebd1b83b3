"""The main functions of the roles of a fleet; `run_role` runs one in its own process.

A role finds everything it needs in the run's folder: the spec, the addresses of the others, the keys. It reports there that it is
ready, and writes its usage samples there.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rowstead.distributed.launch import LOST, USER_ERROR, exit_with_launcher
from rowstead.fleet.build import fleet_dtype, fleet_of, load_keys, load_sources, row_dtype
from rowstead.fleet.dense_server import DenseServerProcess
from rowstead.fleet.fork_server import serve_forks
from rowstead.fleet.local_process import GRACE_S, STOP_SIGNAL, install_stop_handlers
from rowstead.fleet.local_sockets import socket_address
from rowstead.fleet.manual_launch import StopRequested, is_manual, write_exit_code
from rowstead.fleet.partition import Partition
from rowstead.fleet.reader_server import build_reader_server
from rowstead.fleet.restart_policy import STOPPED
from rowstead.fleet.role_usage import RoleSampler
from rowstead.fleet.roster import SOCKETS, RoleFiles, Roster, create_roles_folder, hold_role, read_address, report_ready
from rowstead.fleet.rpc_server import Server
from rowstead.fleet.sparse_server import SNAPSHOTS_FOLDER, build_sparse_server
from rowstead.fleet.supervisor import TRAINERS_MAY_START
from rowstead.fleet.trainer import FleetTrainer
from rowstead.kernels.layout import layout_of
from rowstead.records.run_folder import RunFolder
from rowstead.spec.errors import LostProcessError, RowsteadError
from rowstead.spec.fleet import RoleKind
from rowstead.spec.run import RunSpec

SAMPLE_EVERY_S = 0.5


def serve_role(
    kind: RoleKind,
    folder: Path,
    number: int,
    *,
    until: Callable[[], bool],
    incarnation: int = 0,
    address: str | None = None,
) -> bool:
    """Run one role of the fleet that trains into `folder`, until its work is done or `until` holds.

    A server listens on `address`; by default on a Unix socket, in the folder that the roster names if it does.

    Returns whether it has finished: a trainer that stops before the end of the log has not.
    """
    spec, keys, usage = RunFolder(folder).read_spec(), load_keys(folder), RoleFiles(folder, kind, number).usage

    def ready(address: str = "") -> None:
        report_ready(folder, kind, number, address, incarnation)

    def sample(facts: Callable[[], Mapping[str, Any]]) -> RoleSampler:
        return RoleSampler(usage, facts, incarnation=incarnation, interval_s=SAMPLE_EVERY_S)

    if kind == "trainer":
        if not _wait_for_servers(folder, until):
            return False
        trainer = FleetTrainer(spec, folder, number, incarnation=incarnation, keys=keys)
        with sample(trainer.figures):
            return trainer.run(until=until, ready=ready)
    if address is None and (sockets := Roster(folder).facts.get(SOCKETS)) is not None:
        address = socket_address(sockets, f"{kind}-{number}-{incarnation}")
    with _build_server(kind, spec, folder, number, address=address, keys=keys) as server, sample(server.status):
        ready(server.address)
        server.serve(until)
    return True


def _wait_for_servers(folder: Path, until: Callable[[], bool]) -> bool:
    """Wait until a trainer may start: one that was started manually may come before the servers are ready."""
    roster = Roster(folder)
    while not roster.facts.get(TRAINERS_MAY_START):
        if until():
            return False
        time.sleep(0.1)
    return True


def _build_server(kind: RoleKind, spec: RunSpec, folder: Path, number: int, **options: Any) -> Server:
    fleet, roster = fleet_of(spec), Roster(folder)
    if kind == "dense":
        name = f"dense-{number}"
        return DenseServerProcess(name=name, snapshot=folder / SNAPSHOTS_FOLDER / f"{name}.safetensors", **options)
    if kind == "sparse":
        partition, dtype = Partition.from_json(roster.facts["partition"]), row_dtype(spec, fleet_dtype(roster))
        every_s = fleet.snapshot_every_s
        return build_sparse_server(spec, folder, number, partition, dtype=dtype, snapshot_every_s=every_s, **options)
    return build_reader_server(
        load_sources(spec, roster).train,
        folder,
        number,
        num_readers=fleet.num_readers,
        batch_size=spec.train.batch_size,
        epochs=spec.train.epochs,
        max_steps=spec.train.max_steps,
        layout=layout_of(spec.features, spec.tables) if spec.check_ids else None,
        **options,
    )


def run_role(kind: RoleKind, folder: Path, number: int, incarnation: int, *, address: str | None = None) -> int:
    """Run a role in this process until it is asked to stop or its coordinator is gone; return the exit code."""
    is_signalled = install_stop_handlers()
    exit_with_launcher(STOP_SIGNAL, GRACE_S)
    stop_requested = StopRequested(folder, kind, number, incarnation) if is_manual() else None

    def until() -> bool:
        return is_signalled() or (stop_requested is not None and stop_requested.is_set())

    def serve() -> bool:
        _check_role(kind, folder, number)
        with hold_role(folder, kind, number):
            return serve_role(kind, folder, number, until=until, incarnation=incarnation, address=address)

    code = _run_to_exit_code(serve)
    if stop_requested is not None:
        if code == STOPPED and stop_requested.by_coordinator():
            code = 0
        found = read_address(folder, kind, number)
        if found is not None and found.pid == os.getpid():
            write_exit_code(folder, kind, number, incarnation, code)
        # else it never was ready: the user sees why, and the coordinator waits for the next start
    return code


def _run_to_exit_code(serve: Callable[[], bool]) -> int:
    """Run a role, print its error if it fails, and return the exit code."""
    try:
        return 0 if serve() else STOPPED
    except RowsteadError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return LOST if isinstance(error, LostProcessError) else USER_ERROR
    except Exception:
        traceback.print_exc()
        return 1


def _check_role(kind: RoleKind, folder: Path, number: int) -> None:
    run = RunFolder(folder)
    if not run.spec_file.is_file():
        raise RowsteadError(f"{folder} is not the folder of a run: give the folder of a running fleet")
    count = fleet_of(run.read_spec()).count(kind)
    if not 0 <= number < count:
        raise RowsteadError(f"{folder} has {count} `{kind}` roles, numbered from 0: {number} does not exist")
    create_roles_folder(folder)


if __name__ == "__main__":  # the fork server: it has imported everything that roles need before it forks
    serve_forks(Path(sys.argv[1]), run_role)
