"""A fleet on one machine is closed to its other users, and leaves nothing when it is killed."""

from __future__ import annotations

import os
import signal
import stat
import tempfile
from pathlib import Path

import psutil
import pytest

from rowstead.fleet.roster import Roster, read_address
from rowstead.records.temporary import remove_abandoned
from rowstead.spec.fleet import RoleKind
from tests.fleet.test_fleet import LONG, address_of, left_behind, training
from tests.small_runs import wait_until


@pytest.mark.slow
def test_a_local_fleet_opens_no_port_and_nothing_of_it_is_open_to_other_users_and_a_kill_leaves_nothing(tmp_path: Path) -> None:
    with training(tmp_path, LONG, fleet="trainers=1,sparse=1,dense=1") as (coordinator, out):
        wait_until(lambda: read_address(out, "trainer", 0) is not None, what="the trainer")
        this = psutil.Process(coordinator.pid)
        processes = [this, *this.children(recursive=True)]
        assert len(processes) >= 6
        connections = [each for process in processes for each in process.net_connections("inet")]
        assert not [each for each in connections if each.status == psutil.CONN_LISTEN]
        sockets = Path(Roster(out).facts["sockets"])
        assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
        kinds: tuple[RoleKind, ...] = ("sparse", "dense", "reader")
        for kind in kinds:
            assert Path(address_of(out, kind).address.removeprefix("ipc://")).parent == sockets
        assert stat.S_IMODE((out / "roles").stat().st_mode) == 0o700
        files = [out / "fleet.json", *(out / "roles").iterdir()]
        assert {str(file): oct(stat.S_IMODE(file.stat().st_mode)) for file in files} == dict.fromkeys(map(str, files), "0o600")
        os.kill(address_of(out, "sparse").pid, signal.SIGKILL)
        wait_until(
            lambda: (found := read_address(out, "sparse", 0)) is not None and found.incarnation == 1, what="a new server"
        )
        remove_abandoned(sockets.parent)
        assert sockets.exists(), "the folder of a live fleet"
        coordinator.kill()
        coordinator.communicate(timeout=30)
        wait_until(lambda: not left_behind(out), what="the roles to exit")
        remove_abandoned(sockets.parent)  # as every start does
        assert not sockets.exists()
    assert sockets.parent in (Path(tempfile.gettempdir()), Path("/tmp"))
