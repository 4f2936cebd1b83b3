"""Fleets on a real Ray cluster of several nodes, all of them on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rowstead.fleet.roster import read_address
from rowstead.run import train
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
        wait_until(lambda: read_address(out, "trainer", 1) is not None or coordinator.poll() is not None, what="trainers")
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
def test_a_fleet_larger_than_the_cluster_is_refused_with_remedies(address: str, tmp_path: Path) -> None:
    printed, out = tmp_path / "printed", tmp_path / "out"
    with run_command(address, printed, "train", recipe(tmp_path), "--fleet", "ray,trainers=20", "--out", out) as coordinator:
        assert coordinator.wait(timeout=120) == 2, printed.read_text()
    output = " ".join(printed.read_text().split())
    assert "asks Ray for 23 CPUs" in output
    assert "fleet.ray_cpus" in output
