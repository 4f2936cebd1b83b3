"""Fleets on a real Ray cluster of several nodes, all of them on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rowstead.fleet.ray_launch import RayRole, find_cluster, local_cluster
from rowstead.fleet.roster import RoleFiles, read_address
from rowstead.run import train
from tests.fleet.sleeping_actor import SleepingActor
from tests.fleet.test_fleet import command, figures_of, left_behind
from tests.small_runs import recipe, small_spec, wait_until

cluster_utils = pytest.importorskip("ray.cluster_utils")

NUM_NODES, CPUS_PER_NODE = 2, 4
ROLES = "ray,trainers=2,sparse=2,dense=1,readers=1"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a cluster whose nodes have CPUs for four roles each."""
    cluster = cluster_utils.Cluster()
    try:
        for _ in range(NUM_NODES):
            cluster.add_node(num_cpus=CPUS_PER_NODE, object_store_memory=100 << 20)
        cluster.wait_for_nodes()
        yield str(cluster.address)
    finally:
        cluster.shutdown()


@contextlib.contextmanager
def run_command(address: str, printed: Path, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command that prints to a file, because Ray's processes may keep a pipe open."""
    environ = {**os.environ, "RAY_ADDRESS": address}
    with open(printed, "wb") as output:
        process = subprocess.Popen(command(*arguments), env=environ, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_fleet_on_several_nodes_trains_and_recovers_from_a_kill_and_leaves_no_process(address: str, tmp_path: Path) -> None:
    out, printed = tmp_path / "out", tmp_path / "printed"
    with run_command(address, printed, "train", recipe(tmp_path, epochs=3), "--fleet", ROLES, "--out", out) as coordinator:
        wait_until(
            lambda: any(read_address(out, "trainer", n) for n in range(2)) or coordinator.poll() is not None, what="a trainer"
        )
        victim = read_address(out, "sparse", 1)
        assert victim is not None, printed.read_text()
        os.kill(victim.pid, signal.SIGKILL)
        assert coordinator.wait(timeout=200) == 0, printed.read_text()
    assert "sparse 1 was killed by SIGKILL" in printed.read_text()
    figures = figures_of(out)
    assert figures["num_restarts"] >= 1
    single = train(small_spec("train.epochs=3"), out=tmp_path / "single").quality
    assert single is not None
    assert figures["ne"] == pytest.approx(single.ne, rel=0.04)
    assert left_behind(out) == []


@pytest.mark.slow
def test_a_frozen_process_of_a_role_is_killed_with_its_actor(tmp_path: Path) -> None:
    import ray

    with local_cluster(ray, 1):
        actor = ray.remote(SleepingActor).options(num_cpus=1, max_concurrency=2).remote()
        role = RayRole(ray, actor, RoleFiles(tmp_path, "sparse", 0), 0)
        pid = tmp_path / "pid"
        wait_until(lambda: role.exit_code() is not None or (pid.exists() and pid.read_text() != ""), what="its process")
        frozen = psutil.Process(int(pid.read_text()))
        frozen.suspend()
        role.kill()
        wait_until(lambda: not frozen.is_running(), what="its end", deadline_s=30)
        assert role.exit_code() == -signal.SIGKILL


@pytest.mark.slow
def test_a_fleet_larger_than_the_cluster_is_refused_with_remedies(address: str, tmp_path: Path) -> None:
    printed, out = tmp_path / "printed", tmp_path / "out"
    with run_command(address, printed, "train", recipe(tmp_path), "--fleet", "ray,trainers=20", "--out", out) as coordinator:
        assert coordinator.wait(timeout=120) == 2, printed.read_text()
    output = " ".join(printed.read_text().split())
    assert "asks Ray for 23 CPUs" in output
    assert "fleet.ray_cpus" in output


LISTENERS = """
import json, os, subprocess, sys
import psutil
from rowstead.fleet.ray_launch import import_ray, local_cluster
ray = import_ray()
with local_cluster(ray, 2):
    actor = ray.remote(psutil.Process).remote()  # a worker
    ray.get(actor.ppid.remote())
    this = psutil.Process()
    listening = {
        f"{process.name()} {each.laddr.ip}"
        for process in (this, *this.children(recursive=True))
        for each in process.net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    }
    join = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"
    strangers = {
        who: subprocess.run([sys.executable, "-c", join, ray.get_runtime_context().gcs_address], env=env, capture_output=True, text=True)
        for who, env in (
            ("ours", dict(os.environ)),
            ("no token", {name: value for name, value in os.environ.items() if "AUTH" not in name}),
            ("wrong token", {**os.environ, "RAY_AUTH_TOKEN": 64 * "0"}),
        )
    }
    found = {who: each.stderr[-300:] if each.returncode else "joined" for who, each in strangers.items()}
print(json.dumps({"listening": sorted(listening), "joined": found, "left": [n for n in os.environ if "RAY_AUTH" in n]}))
"""


@pytest.mark.slow
def test_a_cluster_that_a_fleet_starts_listens_on_loopback_only_and_admits_nobody_without_its_token() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", LISTENERS], env=environ, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    names = {each.split()[0] for each in found["listening"]}
    assert {"gcs_server", "raylet", "python"} <= names, found
    assert {each.split()[-1].removeprefix("::ffff:") for each in found["listening"]} == {"127.0.0.1"}, found
    assert found["joined"]["ours"] == "joined"
    assert "oken" in found["joined"]["no token"]
    assert "oken" in found["joined"]["wrong token"]
    assert found["left"] == []


def test_a_cluster_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the cluster can run code in the processes that connect to it."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert find_cluster() is None
    (tmp_path / "ray").mkdir()
    known = tmp_path / "ray" / "ray_current_cluster"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        known.write_text(f"127.0.0.1:{listener.getsockname()[1]}\n")
        assert find_cluster() == known.read_text().strip()
        if os.geteuid() == 0:
            os.chown(known, 65534, 65534)
            assert find_cluster() is None
            os.chown(known, 0, 0)
            os.seteuid(65534)
            try:
                of_another = socket.create_server(("127.0.0.1", 0))
            finally:
                os.seteuid(0)
            with of_another:
                known.write_text(f"127.0.0.1:{of_another.getsockname()[1]}\n")
                assert find_cluster() is None, "another account has taken the port"
            known.write_text(f"127.0.0.1:{listener.getsockname()[1]}\n")
        known.rename(tmp_path / "elsewhere")
        known.symlink_to(tmp_path / "elsewhere")
        assert find_cluster() is None
        known.unlink()
        (tmp_path / "elsewhere").rename(known)
    assert find_cluster() is None, "it is gone"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert find_cluster() == "10.0.0.1:6379"


@pytest.mark.slow
def test_a_cluster_that_does_not_start_is_an_error_of_one_sentence(tmp_path: Path) -> None:
    """Ray cannot create its sockets in a folder with a path this long."""
    environ = {**os.environ, "RAY_TMPDIR": str(tmp_path / ("long" * 20))}
    run = [*command("train", recipe(tmp_path), "--fleet", ROLES, "--out", tmp_path / "out")]
    done = subprocess.run(run, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "Ray did not start: " in " ".join((done.stdout + done.stderr).split())
