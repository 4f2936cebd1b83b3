"""Roles forked from one process: started, stopped, and gone when whoever started them is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from rowstead.fleet.fork_server import ForkServer
from rowstead.fleet.local_process import stopped
from rowstead.fleet.roster import told
from tests.small_runs import wait_until

MODULE = "tests.fleet.small_roles"
HEAD = """
import sys, time
from pathlib import Path
from rowstead.fleet.fork_server import ForkServer
with ForkServer(Path(sys.argv[1]), "tests.fleet.small_roles") as nursery:
    for kind in ("sparse", "dense"):
        nursery.start(kind, 0)
    time.sleep(600)
"""


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_forked_roles_end_with_the_codes_that_ordinary_processes_have(tmp_path: Path) -> None:
    with ForkServer(tmp_path, MODULE) as nursery:
        asked, deaf, failing, killed = (
            nursery.start(*role) for role in (("sparse", 0), ("dense", 0), ("reader", 0), ("sparse", 1))
        )
        for kind, number in (("sparse", 0), ("dense", 0), ("sparse", 1)):
            wait_until(lambda kind=kind, number=number: told(tmp_path, kind, number) is not None, what="a role to be ready")
        assert failing.wait(10) == 2
        assert asked.code() is None
        os.kill(killed.pid, signal.SIGKILL)
        assert killed.wait(10) == -9
        assert stopped([asked, deaf], grace_s=0.3) == [0, -9]
        again = nursery.start("sparse", 1, incarnation=1)
        wait_until(lambda: told(tmp_path, "sparse", 1) is not None, what="the role to come back")
        found = told(tmp_path, "sparse", 1)
        assert found is not None
        assert (found.incarnation, found.pid) == (1, again.pid)
    assert not is_running(again.pid)
    assert failing.files.last_lines() == "error: nothing to read"
    assert asked.files.last_lines() == "asked to stop"


def test_roles_of_a_killed_nursery_count_as_killed_and_start_again(tmp_path: Path) -> None:
    with ForkServer(tmp_path, MODULE) as nursery:
        first = nursery.start("sparse", 0)
        wait_until(lambda: told(tmp_path, "sparse", 0) is not None, what="the role to be ready")
        psutil.Process(psutil.Process(first.pid).ppid()).kill()
        assert first.wait(20) == -9
        wait_until(lambda: not is_running(first.pid), what="the role to end")
        again = nursery.start("sparse", 0, incarnation=1)
        wait_until(lambda: told(tmp_path, "sparse", 0) is not None, what="the role to come back")
        assert again.code() is None


def test_no_forked_role_outlives_a_head_that_was_killed(tmp_path: Path) -> None:
    head = subprocess.Popen([sys.executable, "-c", HEAD, str(tmp_path)])
    try:
        wait_until(lambda: all(told(tmp_path, kind, 0) is not None for kind in ("sparse", "dense")), what="both to be ready")
        found = [said.pid for kind in ("sparse", "dense") if (said := told(tmp_path, kind, 0)) is not None]
        found.append(psutil.Process(found[0]).ppid())
    finally:
        head.kill()
        head.wait()
    wait_until(lambda: not any(map(is_running, found)), what="all to end", deadline_s=40)
