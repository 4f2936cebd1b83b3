"""What the tests of disturbed fleets compare with."""

from __future__ import annotations

import fcntl
import os

import pytest

from tests.fleet_run.disturbed import train_undisturbed


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
