"""What each role of a fleet does from start to end, as plain functions: whoever starts a role calls `serve_role`.

A role finds in its run's folder all that it needs: the spec, the addresses of the others, the keys. It says there that it is
ready, and samples there what it uses.
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

from rowstead.distributed.launch import LOST
from rowstead.fleet.build import fleet_dtype, fleet_of, row_dtype, sources_of, told_keys
from rowstead.fleet.fork_server import serve_forks
from rowstead.fleet.keys import Keys
from rowstead.fleet.local_process import end_with_coordinator, stop_asked
from rowstead.fleet.manual_launch import StopRequested, is_manual, leave_code
from rowstead.fleet.restart_policy import MISTAKE, STOPPED
from rowstead.fleet.role_lock import sole_holder
from rowstead.fleet.role_usage import RoleSampler
from rowstead.fleet.roster import ROLES_FOLDER, RoleFiles, Roster, tell, told
from rowstead.fleet.supervisor import TRAINERS_BEGIN
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
    """Be one role of the fleet that trains into `folder`, until its work is done or `until` holds.

    Returns whether it has ended as it should: a trainer that ends before everything is trained on has not.
    """
    spec = RunFolder(folder).read_spec()
    role = _Role(spec, folder, kind, number, until=until, incarnation=incarnation, address=address, keys=told_keys(folder))
    return {"sparse": _serve_sparse, "dense": _serve_dense, "reader": _serve_reader, "trainer": _train}[kind](role)


def run_role(kind: RoleKind, folder: Path, number: int, incarnation: int, *, address: str = LOOPBACK) -> int:
    """Be a role in a process of its own, until asked to end or its head is gone; returns the exit code."""
    is_asked = stop_asked()
    end_with_coordinator()
    asked_by_hand = StopRequested(folder, kind, number, incarnation) if is_manual() else None

    def until() -> bool:
        return is_asked() or (asked_by_hand is not None and asked_by_hand.is_so())

    def serve() -> bool:
        _check_role(kind, folder, number)
        with sole_holder(folder, kind, number):
            return serve_role(kind, folder, number, until=until, incarnation=incarnation, address=address)

    code = _code_of(serve)
    if asked_by_hand is not None:
        if code == STOPPED and asked_by_hand.is_so():
            code = 0  # it was the head who asked
        found = told(folder, kind, number)
        if found is not None and found.pid == os.getpid():  # else the head waits for another start, by who can read why
            leave_code(folder, kind, number, incarnation, code)
    return code


def _code_of(serve: Callable[[], bool]) -> int:
    """The exit code of a role, which prints its last words."""
    try:
        return 0 if serve() else STOPPED
    except RowsteadError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return LOST if isinstance(error, LostProcessError) else MISTAKE
    except Exception:
        traceback.print_exc()
        return 1


def _check_role(kind: RoleKind, folder: Path, number: int) -> None:
    run = RunFolder(folder)
    if not run.spec_file.is_file():
        raise RowsteadError(f"{folder} is not the folder of a run: give that of a fleet whose head is running")
    count = fleet_of(run.read_spec()).count(kind)
    if not 0 <= number < count:
        raise RowsteadError(f"{folder} has {count} roles `{kind}`, numbered from 0: there is no {number}")
    (folder / ROLES_FOLDER).mkdir(exist_ok=True)


class _Role:
    """What the functions below need to know of themselves."""

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
        """Tell the head."""
        tell(self.folder, self.kind, self.number, address, self.incarnation)

    def sampled(self, facts: Facts) -> None:
        """Sample these facts from now on, until the role ends."""
        usage = RoleFiles(self.folder, self.kind, self.number).usage
        self._sampling.enter_context(RoleSampler(usage, facts, incarnation=self.incarnation, interval_s=SAMPLE_EVERY_S))

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        with self._sampling:
            yield

    def options(self) -> dict[str, Any]:
        """What all servers take."""
        return {
            "address": self.address,
            "keys": self.keys,
            "until": self.until,
            "ready": self.ready,
            "sampled": self.sampled,
        }


def _serve_sparse(role: _Role) -> bool:
    from rowstead.fleet.sparse_server import serve_sparse

    with role.at_work():
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

    with role.at_work():
        serve_dense(role.folder, role.number, incarnation=role.incarnation, **role.options())
    return True


def _serve_reader(role: _Role) -> bool:
    from rowstead.fleet.reader_server import serve_reader
    from rowstead.kernels.layout import layout_of

    spec = role.spec
    with role.at_work():
        serve_reader(
            sources_of(spec, role.roster).train,
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

    while not role.roster.facts.get(TRAINERS_BEGIN):  # started by hand, before there was anything to train with
        if role.until():
            return False
        time.sleep(0.1)
    trainer = FleetTrainer(role.spec, role.folder, role.number, incarnation=role.incarnation, keys=role.keys)
    with role.at_work():
        role.sampled(trainer.figures)
        return trainer.run(until=role.until, ready=role.ready)


if __name__ == "__main__":  # the process that is forked for each role: `fleet/fork_server.py`
    from rowstead.fleet import dense_server as dense_server
    from rowstead.fleet import sparse_server as sparse_server
    from rowstead.fleet import trainer as trainer  # all that roles need is imported before

    serve_forks(Path(sys.argv[1]), run_role)
