"""Servers on Unix sockets, and on TCP with keys; and the result that disturbed fleets are compared with."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from typing import Any

import pytest

from rowstead.fleet.keys import Keys
from rowstead.fleet.rpc_server import Server
from tests.fleet.counting import Counter
from tests.fleet.disturbed import train_undisturbed
from tests.fleet.echo_server import echo


@pytest.fixture(params=["unix", "tcp"])
def setting(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A private Unix socket without keys, or TCP with keys."""
    return {"keys": None} if request.param == "unix" else {"address": "tcp://127.0.0.1:0", "keys": Keys.generate()}


@pytest.fixture
def counter() -> Counter:
    return Counter()


@pytest.fixture
def server(setting: dict[str, Any], counter: Counter) -> Iterator[Server]:
    with Server({"echo": echo, "count": counter}, **setting).start() as server:
        yield server


@pytest.fixture(scope="session")
def undisturbed_ne(tmp_path_factory: pytest.TempPathFactory) -> float:
    """NE of the same fleet on the same samples, when nothing happens to it; trained once, in whichever process comes first."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    found = shared / "undisturbed_ne"
    with open(shared / "undisturbed_ne.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            found.write_text(repr(train_undisturbed(tmp_path_factory.mktemp("undisturbed"))))
        return float(found.read_text())
