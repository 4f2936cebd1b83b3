"""Roles on a Ray cluster: Ray schedules each on a node with the requested resources; `restart_policy.py` decides about restarts.

An actor on that node starts the role as a process and waits for its exit. All nodes must see the run's folder. Roles listen on
their node's address, with the keys of the run.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rowstead.fleet.local_process import STOP_SIGNAL, Role
from rowstead.fleet.roster import RoleFiles, create_roles_folder
from rowstead.records.files import open_private
from rowstead.records.usage import usable_cores
from rowstead.spec.errors import RowsteadError, install_command
from rowstead.spec.fleet import FleetSpec, RoleKind
from rowstead.spec.job import LAUNCHER

_LISTENING = "0A"
"""State of a socket in /proc/net/tcp."""

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class RoleResources:
    """What Ray reserves for a role."""

    num_cpus: float = 1.0
    num_gpus: float = 0.0


class RayRole(Role):
    """One role, whose process an actor watches."""

    def __init__(self, ray: Any, actor: Any, files: RoleFiles, incarnation: int) -> None:
        self._ray, self._actor, self.files = ray, actor, files
        self._exited = actor.run.remote(str(files.folder.resolve()), files.kind, files.number, incarnation)
        self._code: int | None = None

    def exit_code(self) -> int | None:
        """Return the exit code; None while it runs, or waits for a node with free resources."""
        if self._code is None and self._ray.wait([self._exited], timeout=0)[0]:
            try:
                self._code = int(self._ray.get(self._exited))
            except self._ray.exceptions.RayError:
                self._code = -signal.SIGKILL  # the actor is gone, perhaps with its node, and the process exits with it
        return self._code

    def request_stop(self) -> None:
        self._actor.send.remote(int(STOP_SIGNAL))

    def kill(self) -> None:
        """Kill it at once; it may not even have a node yet."""
        if self.exit_code() is None:
            self._ray.kill(self._actor)  # Ray kills its process too, also a frozen one
            self._code = -signal.SIGKILL


class RayRoles:
    """Starts roles on a Ray cluster, inside a `with`; at its end all of them are killed.

    Connects to the cluster of `RAY_ADDRESS`, or that this user has started on this machine; without one, starts a cluster that only this user's processes on this machine
    can use (`local_cluster`), and shuts it down at the end.
    """

    def __init__(self, folder: Path, spec: FleetSpec, resources: Mapping[RoleKind, RoleResources]) -> None:
        self._folder, self._resources = folder, resources
        self._requested = [resources[kind] for kind, _ in spec.roles()]
        self._roles: list[RayRole] = []
        self._connection = contextlib.ExitStack()
        create_roles_folder(folder)

    def start(self, kind: RoleKind, number: int, incarnation: int = 0) -> RayRole:
        """Start a role; it is ready once its address file says so (`roster.read_address`)."""
        files = RoleFiles(self._folder, kind, number)
        files.address.unlink(missing_ok=True)
        resources = self._resources[kind]
        actor = self._actors.options(
            num_cpus=resources.num_cpus,
            num_gpus=resources.num_gpus,
            max_restarts=0,  # `restart_policy.py` decides about restarts
            max_concurrency=2,  # one thread waits for the process, the other forwards signals
            scheduling_strategy="SPREAD",
        ).remote()
        role = RayRole(self._ray, actor, files, incarnation)
        self._roles.append(role)
        return role

    def __enter__(self) -> RayRoles:
        self._ray = ray = import_ray()
        num_cpus, num_gpus = (sum(getattr(one, name) for one in self._requested) for name in ("num_cpus", "num_gpus"))
        if not ray.is_initialized():
            if (address := find_cluster()) is not None:
                init_ray(ray, address=address)
                self._connection.callback(ray.shutdown)
            else:  # Ray only counts the cores, and the user asked for this many roles
                self._connection.enter_context(local_cluster(ray, max(usable_cores(), int(num_cpus) + 1)))
        available = ray.cluster_resources()
        if available.get("CPU", 0) < num_cpus or available.get("GPU", 0) < num_gpus:
            self.__exit__()
            raise RowsteadError(
                f"this fleet asks Ray for {num_cpus:g} CPUs and {num_gpus:g} GPUs, but the cluster has {available.get('CPU', 0):g} and "
                f"{available.get('GPU', 0):g}: 1. add nodes; 2. use fewer roles; 3. set `fleet.ray_cpus` below 1, so that roles share cores"
            )
        self._actors = ray.remote(_RoleActor)
        return self

    def __exit__(self, *_: object) -> None:
        for role in self._roles:
            role.kill()
        self._connection.close()


def import_ray() -> Any:
    """Import Ray, or say how to install it."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray's future default; it warns about the other value
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise RowsteadError(f"a fleet on Ray needs Ray: {install_command('ray')}") from None


def find_cluster() -> str | None:
    """Return `RAY_ADDRESS`, or the address of the cluster that this user has started on this machine with `ray start`.

    Ray's own `address="auto"` connects to the cluster of any user, who could then run code here.
    """
    if address := os.environ.get("RAY_ADDRESS"):
        return address
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    try:
        with open(Path(folder, "ray", "ray_current_cluster"), opener=_open_own) as file:
            address = file.read(1000).strip()
        host, _, port = address.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()  # the file outlives a killed cluster
        others = _listeners_at(int(port)) - {os.getuid()}
    except (OSError, ValueError):
        return None
    return None if others else address


def _listeners_at(port: int) -> set[int]:
    """The users whose processes listen at a TCP port of this machine: another may have taken the port of a cluster that is gone."""
    users = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    users.add(int(fields[7]))
    return users


def _open_own(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NOFOLLOW)
    if os.fstat(descriptor).st_uid != os.geteuid():
        os.close(descriptor)
        raise PermissionError(f"{path} belongs to another user")
    return descriptor


def init_ray(ray: Any, *, address: str, **options: Any) -> None:
    """Call `ray.init`, and say in a sentence why it fails."""
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **options)
    except Exception as error:  # noqa: BLE001, RUF100 - Ray raises a plain `Exception` after a timeout, and many others
        ray.shutdown()
        what = "Ray did not start" if address == "local" else f"the Ray cluster at {address} cannot be reached"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RowsteadError(
            f"{what}: {reason}. Its logs are in /tmp/ray/session_latest/logs. Try again when the machine is less busy, start the cluster "
            "yourself (`ray start --head`), or leave out `ray` to run all roles on this machine"
        ) from None


@contextlib.contextmanager
def local_cluster(ray: Any, num_cpus: int) -> Iterator[None]:
    """Start a cluster for the processes of this user on this machine: it listens on loopback only, and asks for a token.

    Ray replaces a given loopback address by one that other machines can reach, and then listens on all interfaces, except where it takes this
    machine to be no part of a cluster: `ENABLE_RAY_CLUSTER`. Its processes inherit the token in their environment.
    """
    constants: Any = importlib.import_module("ray._private.ray_constants")
    raylet: Any = importlib.import_module("ray._raylet")

    def read_environment() -> None:
        if hasattr(raylet, "AuthenticationTokenLoader"):  # Ray 2.52 and later
            raylet.Config.initialize("")
            raylet.AuthenticationTokenLoader.instance().reset_cache()

    before = {name: os.environ.get(name) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")}
    was_enabled = getattr(constants, "ENABLE_RAY_CLUSTER", True)
    try:
        os.environ.pop("RAY_AUTH_TOKEN_PATH", None)
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
        constants.ENABLE_RAY_CLUSTER = False
        read_environment()
        init_ray(ray, address="local", num_cpus=num_cpus, include_dashboard=False, _node_ip_address=LOOPBACK)
        address = ray.util.get_node_ip_address()
        if address != LOOPBACK:
            raise RowsteadError(
                f"Ray {ray.__version__} listens on {address}, where other machines can reach it: start a cluster yourself, behind a firewall "
                "(`ray start --head`), or leave out `ray` to run all roles on this machine"
            )
        yield
    finally:
        ray.shutdown()
        constants.ENABLE_RAY_CLUSTER = was_enabled
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        read_environment()


class _RoleActor:
    """A Ray actor: starts the process of a role on its node, and waits for its exit."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._pending_signals: list[int] = []

    def run(self, folder: str, kind: RoleKind, number: int, incarnation: int) -> int:
        """Run the role's process and return its exit code."""
        util = importlib.import_module("ray.util")
        address = f"tcp://{util.get_node_ip_address()}:0"
        arguments = ["role", kind, folder, str(number), "--incarnation", str(incarnation), "--address", address]
        with open(RoleFiles(Path(folder), kind, number).log, "ab", opener=open_private) as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rowstead", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, LAUNCHER: str(os.getpid())},
            )
        for pending in self._pending_signals:
            self._process.send_signal(pending)
        return self._process.wait()

    def send(self, number: int) -> None:
        """Forward a signal to the process, or keep it until there is one."""
        if self._process is None:
            self._pending_signals.append(number)
        elif self._process.poll() is None:
            self._process.send_signal(number)
