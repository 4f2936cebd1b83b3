"""The main functions of the roles of a fleet; `run_role` runs one in its own process.

A role finds everything it needs in the run's folder: the spec, the addresses of the others, the keys. It reports there that it is
ready, and writes its usage samples there.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rowstead.distributed.launch import LOST, USER_ERROR, exit_with_launcher
from rowstead.fleet.build import fleet_dtype, fleet_of, load_keys, load_sources, row_dtype
from rowstead.fleet.fork_server import serve_forks
from rowstead.fleet.keys import Keys
from rowstead.fleet.local_process import GRACE_S, STOP_SIGNAL, install_stop_handlers
from rowstead.fleet.manual_launch import StopRequested, is_manual, write_exit_code
from rowstead.fleet.restart_policy import STOPPED
from rowstead.fleet.role_usage import RoleSampler
from rowstead.fleet.roster import ROLES_FOLDER, RoleFiles, Roster, hold_role, read_address, report_ready
from rowstead.fleet.supervisor import TRAINERS_MAY_START
from rowstead.records.run_folder import RunFolder
from rowstead.spec.errors import LostProcessError, RowsteadError
from rowstead.spec.fleet import RoleKind
from rowstead.spec.run import RunSpec

LOOPBACK = "tcp://127.0.0.1:0"
SAMPLE_EVERY_S = 0.5

Facts = Callable[[], Mapping[str, Any]]


def serve_role(
    kind: RoleKind,
    folder: Path,
    number: int,
    *,
    until: Callable[[], bool],
    incarnation: int = 0,
    address: str = LOOPBACK,
) -> bool:
    """Run one role of the fleet that trains into `folder`, until its work is done or `until` holds.

    Returns whether it has finished: a trainer that stops before the end of the log has not.
    """
    spec = RunFolder(folder).read_spec()
    role = _Role(spec, folder, kind, number, until=until, incarnation=incarnation, address=address, keys=load_keys(folder))
    return {"sparse": _serve_sparse, "dense": _serve_dense, "reader": _serve_reader, "trainer": _train}[kind](role)


def run_role(kind: RoleKind, folder: Path, number: int, incarnation: int, *, address: str = LOOPBACK) -> int:
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
        if code == STOPPED and stop_requested.is_set():
            code = 0  # the coordinator asked
        found = read_address(folder, kind, number)
        if (
            found is not None and found.pid == os.getpid()
        ):  # else it never was ready: the user sees why, and the coordinator waits for the next start
            write_exit_code(folder, kind, number, incarnation, code)
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
    (folder / ROLES_FOLDER).mkdir(exist_ok=True)


class _Role:
    """Arguments of the functions below."""

    def __init__(
        self,
        spec: RunSpec,
        folder: Path,
        kind: RoleKind,
        number: int,
        *,
        until: Callable[[], bool],
        incarnation: int,
        address: str,
        keys: Keys | None,
    ) -> None:
        self.spec, self.folder, self.kind, self.number = spec, folder, kind, number
        self.until, self.incarnation, self.address, self.keys = until, incarnation, address, keys
        self.roster = Roster(folder)
        self._sampling = contextlib.ExitStack()

    def ready(self, address: str = "") -> None:
        """Report to the coordinator that the role is ready."""
        report_ready(self.folder, self.kind, self.number, address, self.incarnation)

    def start_sampling(self, facts: Facts) -> None:
        """Sample these facts from now on, until the role exits."""
        usage = RoleFiles(self.folder, self.kind, self.number).usage
        self._sampling.enter_context(RoleSampler(usage, facts, incarnation=self.incarnation, interval_s=SAMPLE_EVERY_S))

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        with self._sampling:
            yield

    def options(self) -> dict[str, Any]:
        """Return the options that all servers take."""
        return {
            "address": self.address,
            "keys": self.keys,
            "until": self.until,
            "ready": self.ready,
            "start_sampling": self.start_sampling,
        }


def _serve_sparse(role: _Role) -> bool:
    from rowstead.fleet.sparse_server import serve_sparse

    with role.sampling():
        serve_sparse(
            role.spec,
            role.folder,
            role.number,
            dtype=row_dtype(role.spec, fleet_dtype(role.roster)),
            snapshot_every_s=fleet_of(role.spec).snapshot_every_s,
            incarnation=role.incarnation,
            **role.options(),
        )
    return True


def _serve_dense(role: _Role) -> bool:
    from rowstead.fleet.dense_server import serve_dense

    with role.sampling():
        serve_dense(role.folder, role.number, incarnation=role.incarnation, **role.options())
    return True


def _serve_reader(role: _Role) -> bool:
    from rowstead.fleet.reader_server import serve_reader
    from rowstead.kernels.layout import layout_of

    spec = role.spec
    with role.sampling():
        serve_reader(
            load_sources(spec, role.roster).train,
            role.folder,
            role.number,
            num_readers=fleet_of(spec).num_readers,
            batch_size=spec.train.batch_size,
            epochs=spec.train.epochs,
            max_steps=spec.train.max_steps,
            layout=layout_of(spec.features, spec.tables) if spec.check_ids else None,
            **role.options(),
        )
    return True


def _train(role: _Role) -> bool:
    from rowstead.fleet.trainer import FleetTrainer

    while not role.roster.facts.get(TRAINERS_MAY_START):  # a manually started trainer may come before the servers are ready
        if role.until():
            return False
        time.sleep(0.1)
    trainer = FleetTrainer(role.spec, role.folder, role.number, incarnation=role.incarnation, keys=role.keys)
    with role.sampling():
        role.start_sampling(trainer.figures)
        return trainer.run(until=role.until, ready=role.ready)


if __name__ == "__main__":  # the fork server: it imports everything that roles need before it forks
    from rowstead.fleet import dense_server as dense_server
    from rowstead.fleet import sparse_server as sparse_server
    from rowstead.fleet import trainer as trainer

    serve_forks(Path(sys.argv[1]), run_role)
