"""Roles forked from one process: started, stopped, and gone when the coordinator is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from rowstead.fleet import fork_server
from rowstead.fleet.fork_server import ForkServer
from rowstead.fleet.local_process import stop_roles
from rowstead.fleet.roster import read_address
from rowstead.spec.errors import RowsteadError
from tests.small_runs import wait_until

MODULE = "tests.fleet.small_roles"
COORDINATOR = """
import sys, time
from pathlib import Path
from rowstead.fleet.fork_server import ForkServer
with ForkServer(Path(sys.argv[1]), "tests.fleet.small_roles") as server:
    for kind in ("sparse", "dense"):
        server.start(kind, 0)
    time.sleep(600)
"""


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_forked_roles_have_the_exit_codes_of_ordinary_processes(tmp_path: Path) -> None:
    with ForkServer(tmp_path, MODULE) as server:
        stopped, deaf, failing, killed = (
            server.start(*role) for role in (("sparse", 0), ("dense", 0), ("reader", 0), ("sparse", 1))
        )
        for kind, number in (("sparse", 0), ("dense", 0), ("sparse", 1)):
            wait_until(
                lambda kind=kind, number=number: read_address(tmp_path, kind, number) is not None, what="a role to be ready"
            )
        assert failing.wait(10) == 2
        assert stopped.exit_code() is None
        os.kill(killed.pid, signal.SIGKILL)
        assert killed.wait(10) == -9
        assert stop_roles([stopped, deaf], grace_s=0.3) == [0, -9]
        again = server.start("sparse", 1, incarnation=1)
        wait_until(lambda: read_address(tmp_path, "sparse", 1) is not None, what="the role to be ready again")
        found = read_address(tmp_path, "sparse", 1)
        assert found is not None
        assert (found.incarnation, found.pid) == (1, again.pid)
    assert not is_running(again.pid)
    assert failing.files.last_lines() == "error: nothing to read"
    assert stopped.files.last_lines() == "asked to stop"


def test_roles_of_a_killed_fork_server_count_as_killed_and_can_be_restarted(tmp_path: Path) -> None:
    with ForkServer(tmp_path, MODULE) as server:
        first = server.start("sparse", 0)
        wait_until(lambda: read_address(tmp_path, "sparse", 0) is not None, what="the role to be ready")
        psutil.Process(psutil.Process(first.pid).ppid()).kill()
        assert first.wait(20) == -9
        wait_until(lambda: not is_running(first.pid), what="the role to exit")
        again = server.start("sparse", 0, incarnation=1)
        wait_until(lambda: read_address(tmp_path, "sparse", 0) is not None, what="the role to be ready again")
        assert again.exit_code() is None


def test_a_fork_server_that_is_not_ready_in_time_is_named_with_the_setting_to_raise(tmp_path: Path) -> None:
    with ForkServer(tmp_path, MODULE, start_s=0.5) as server:
        psutil.Process().children()[-1].suspend()  # before it has imported everything
        with pytest.raises(RowsteadError, match=r"was not ready after 0\.5 s .* raise `fleet\.start_s`"):
            server.start("sparse", 0)


def test_a_fork_server_that_fails_is_not_started_again_and_what_it_printed_is_shown(tmp_path: Path) -> None:
    with ForkServer(tmp_path, "tests.fleet.no_such_module") as server:
        with pytest.raises(RowsteadError, match=r"(?s)the fork server exited with code 1\. .*No module named"):
            server.start("sparse", 0)
        assert (tmp_path / "roles" / fork_server.LOG_FILE).read_text().count("No module named") == 1


def test_a_fork_server_that_is_killed_again_and_again_while_it_starts_still_starts_a_role(tmp_path: Path) -> None:
    with ForkServer(tmp_path, MODULE) as server:
        killed: list[int] = []

        def kill_twice() -> None:
            for _ in range(2):
                wait_until(lambda: any(child.pid not in killed for child in psutil.Process().children()), what="a fork server")
                child = next(child for child in psutil.Process().children() if child.pid not in killed)
                killed.append(child.pid)
                child.kill()

        thread = threading.Thread(target=kill_twice)
        thread.start()
        role = server.start("sparse", 0)
        thread.join()
        wait_until(lambda: read_address(tmp_path, "sparse", 0) is not None, what="the role to be ready", deadline_s=60)
        assert (role.exit_code(), len(killed)) == (None, 2)


@pytest.mark.slow
def test_a_frozen_fork_server_is_replaced_and_its_roles_count_as_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "SILENT_AFTER_S", 4.0)
    messages: list[str] = []
    with ForkServer(tmp_path, MODULE, on_message=messages.append) as server:
        first = server.start("sparse", 0)
        frozen = psutil.Process(first.pid).parent()
        assert frozen is not None
        frozen.suspend()
        again = server.start("sparse", 0, incarnation=1)
        wait_until(lambda: read_address(tmp_path, "sparse", 0) is not None, what="the role to be ready again")
        assert (first.exit_code(), again.exit_code()) == (-9, None)
        assert not is_running(frozen.pid)
    assert messages == ["the fork server gave no sign of life and has been killed, and all roles with it: restarting them"]


def test_no_forked_role_outlives_a_killed_coordinator(tmp_path: Path) -> None:
    coordinator = subprocess.Popen([sys.executable, "-c", COORDINATOR, str(tmp_path)])
    try:
        wait_until(
            lambda: all(read_address(tmp_path, kind, 0) is not None for kind in ("sparse", "dense")), what="both to be ready"
        )
        found = [role.pid for kind in ("sparse", "dense") if (role := read_address(tmp_path, kind, 0)) is not None]
        found.append(psutil.Process(found[0]).ppid())
    finally:
        coordinator.kill()
        coordinator.wait()
    wait_until(lambda: not any(map(is_running, found)), what="all to exit", deadline_s=40)
