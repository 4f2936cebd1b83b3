"""A network between two machines that is cut for a while, using two network namespaces; needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rowstead.fleet.keys import Keys
from rowstead.fleet.rpc_client import Client
from tests.fleet.echo_server import Process

NAME = f"rw{os.getpid() % 100_000}"
HERE, THERE = "10.197.64.1", "10.197.64.2"
CUT_S = 7.0
"""Longer than the timeout of a silent peer (5 s); `tests/fleet/test_network_cut.py` cuts a whole fleet for ten."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def network() -> Iterator[None]:
    """A namespace `NAME` whose end of a cable has the address THERE; ours has HERE."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("only root can create network namespaces with `ip`")
    try:
        ip("netns", "add", NAME)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"cannot create a network namespace: {error.stderr!r}")
    try:
        ip("link", "add", f"{NAME}a", "type", "veth", "peer", "name", f"{NAME}b", "netns", NAME)
        ip("addr", "add", f"{HERE}/30", "dev", f"{NAME}a")
        ip("link", "set", f"{NAME}a", "up")
        ip("-n", NAME, "addr", "add", f"{THERE}/30", "dev", f"{NAME}b")
        ip("-n", NAME, "link", "set", f"{NAME}b", "up")
        ip("-n", NAME, "link", "set", "lo", "up")
        yield
    finally:
        ip("netns", "del", NAME)


@pytest.mark.slow
def test_a_network_cut_longer_than_the_peer_timeout_loses_and_repeats_no_request(network: None, tmp_path: Path) -> None:
    keys = Keys.generate()
    keys.save(tmp_path / "keys.json")
    there = Process(f"tcp://{THERE}:0", str(tmp_path / "keys.json"), within=["ip", "netns", "exec", NAME])
    with there, Client(there.address, name="me", keys=keys, deadline_s=60) as client:
        assert client.call("count").facts["num_requests"] == 1
        ip("-n", NAME, "link", "set", f"{NAME}b", "down")
        mended = threading.Timer(CUT_S, ip, ["-n", NAME, "link", "set", f"{NAME}b", "up"])
        mended.start()
        start_s = time.monotonic()
        pending = [client.start("count") for _ in range(5)]
        assert [each.wait().facts["num_requests"] for each in pending] == [2, 3, 4, 5, 6]
        took_s = time.monotonic() - start_s
        mended.join()
        assert CUT_S <= took_s < 30, "it continues some seconds after the network is back"
        assert client.call("count").facts["num_requests"] == 7
