"""Roles on a Ray cluster: Ray finds each a node that has what it asks for; what becomes of one that ends is decided in `restart.py`.

An actor on that node starts the role as a process of its own and watches it. All nodes must see the run's folder. Roles listen on
their node's address, with the keys of the run.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rowstead.fleet.local_process import ASK, HEAD, LOOK_EVERY_S
from rowstead.fleet.roster import ROLES_FOLDER, RoleFiles
from rowstead.records.usage import usable_cores
from rowstead.spec.errors import RowsteadError
from rowstead.spec.fleet import FleetSpec, RoleKind

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What Ray sets aside for a role."""

    num_cpus: float = 1.0
    num_gpus: float = 0.0


class RayRole:
    """One role, whose process an actor watches."""

    def __init__(self, ray: Any, actor: Any, files: RoleFiles, incarnation: int) -> None:
        self._ray, self._actor, self.files = ray, actor, files
        self._ended = actor.run.remote(str(files.folder.resolve()), files.kind, files.number, incarnation)
        self._code: int | None = None

    def code(self) -> int | None:
        """The exit code, negative for a signal; none while it runs, or waits for a node with room."""
        if self._code is None and self._ray.wait([self._ended], timeout=0)[0]:
            try:
                self._code = int(self._ray.get(self._ended))
            except self._ray.exceptions.RayError:
                self._code = -signal.SIGKILL  # the actor is gone, with its node perhaps, and the process ends with it
        return self._code

    def ask_to_stop(self) -> None:
        """Let it finish what it does and end."""
        self._actor.send.remote(int(ASK))

    def kill(self) -> None:
        """End it at once; it may not even have a node yet."""
        if self.code() is None:
            self._ray.kill(self._actor)
            self._code = -signal.SIGKILL

    def wait(self, timeout_s: float | None = None) -> int | None:
        """The exit code once it has ended; none if it has not in time."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while (code := self.code()) is None and (until is None or time.monotonic() < until):
            time.sleep(LOOK_EVERY_S)
        return code


class RayRoles:
    """Starts roles on a Ray cluster, inside a `with`; when that ends, so do all of them.

    The cluster is the one of `RAY_ADDRESS` or of this machine; where there is none, one is begun here that listens on the loopback
    interface, and ended with the rest.
    """

    def __init__(self, folder: Path, spec: FleetSpec, needs: Mapping[RoleKind, Needs]) -> None:
        self._folder, self._needs = folder, needs
        self._total = [needs[kind] for kind, _ in spec.roles()]
        self._all: list[RayRole] = []
        self._is_ours = False
        (folder / ROLES_FOLDER).mkdir(exist_ok=True)

    def start(self, kind: RoleKind, number: int, incarnation: int = 0) -> RayRole:
        """Begin a role; it is ready once it has told so (`roster.told`)."""
        files = RoleFiles(self._folder, kind, number)
        files.told.unlink(missing_ok=True)
        needs = self._needs[kind]
        actor = self._actors.options(
            num_cpus=needs.num_cpus,
            num_gpus=needs.num_gpus,
            max_restarts=0,  # starting again is decided in one place, and it is not here
            max_concurrency=2,  # one thread waits for the process, the other passes signals on
            scheduling_strategy="SPREAD",
        ).remote()
        role = RayRole(self._ray, actor, files, incarnation)
        self._all.append(role)
        return role

    def __enter__(self) -> RayRoles:
        self._ray = ray = imported_ray()
        num_cpus, num_gpus = (sum(getattr(needs, name) for needs in self._total) for name in ("num_cpus", "num_gpus"))
        if not ray.is_initialized():
            self._is_ours = True
            options = {"log_to_driver": False, "logging_level": "ERROR"}
            try:
                ray.init(address="auto", **options)
            except ConnectionError:
                cores = max(usable_cores(), int(num_cpus) + 1)  # Ray only counts them, and the user has asked for so many roles
                ray.init(num_cpus=cores, include_dashboard=False, _node_ip_address=LOOPBACK, **options)
        found = ray.cluster_resources()
        if found.get("CPU", 0) < num_cpus or found.get("GPU", 0) < num_gpus:
            self.__exit__()
            raise RowsteadError(
                f"this fleet asks Ray for {num_cpus:g} CPUs and {num_gpus:g} GPUs, and the cluster has {found.get('CPU', 0):g} and "
                f"{found.get('GPU', 0):g}: 1. add nodes; 2. ask for fewer roles; 3. set `fleet.ray_cpus` below 1, so that roles "
                "share cores"
            )
        self._actors = ray.remote(_Watch)
        return self

    def __exit__(self, *_: object) -> None:
        for role in self._all:
            role.kill()
        if self._is_ours:
            self._ray.shutdown()


def imported_ray() -> Any:
    """Ray, or what to do to have it."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # as Ray will have it; it warns of the other way
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise RowsteadError("a fleet on Ray needs Ray: pip install 'rowstead[ray]'") from None


class _Watch:
    """In an actor: starts the process of a role on this node, and waits for its end."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: list[int] = []

    def run(self, folder: str, kind: RoleKind, number: int, incarnation: int) -> int:
        """The exit code of the role's process, once it has ended."""
        util = importlib.import_module("ray.util")
        address = f"tcp://{util.get_node_ip_address()}:0"
        words = ["role", kind, folder, str(number), "--incarnation", str(incarnation), "--address", address]
        with open(RoleFiles(Path(folder), kind, number).log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rowstead", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, HEAD: str(os.getpid())},
            )
        for asked in self._asked:
            self._process.send_signal(asked)
        return self._process.wait()

    def send(self, number: int) -> None:
        """Pass a signal on to the process, or keep it until there is one."""
        if self._process is None:
            self._asked.append(number)
        elif self._process.poll() is None:
            self._process.send_signal(number)
