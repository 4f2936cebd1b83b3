"""The lock of a role: a second process is refused while the first is alive."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rowstead.fleet.roster import hold_role
from rowstead.spec.errors import RowsteadError
from tests.small_runs import wait_until

HOLDER = """
import signal, sys
from pathlib import Path
from rowstead.fleet.roster import hold_role
with hold_role(Path(sys.argv[1]), "reader", 0):
    print("held", flush=True)
    signal.pause()
"""


def test_a_second_process_is_refused_with_the_name_of_the_first_until_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "roles").mkdir()
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout is not None
            assert first.stdout.readline() == "held\n"
            refused = pytest.raises(RowsteadError, match=rf"reader 0 of .* as process {first.pid} of {socket.gethostname()}")
            with refused, hold_role(tmp_path, "reader", 0, wait_s=0.05):
                pytest.fail("two processes hold one role")
            with hold_role(tmp_path, "reader", 1, wait_s=0.0):
                pass  # another number is another role
        finally:
            os.kill(first.pid, signal.SIGKILL)
    with hold_role(tmp_path, "reader", 0, wait_s=5.0):
        pass


def test_a_process_that_is_just_exiting_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "roles").mkdir()
    got: list[str] = []

    def follow() -> None:
        with hold_role(tmp_path, "sparse", 0, wait_s=60.0):
            got.append("second")

    with hold_role(tmp_path, "sparse", 0):
        thread = threading.Thread(target=follow)
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
        got.append("first")
    wait_until(lambda: len(got) == 2, what="the second")
    thread.join(10)
    assert got == ["first", "second"]
