"""One process a role: a second one is refused while the first lives, whatever becomes of that."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rowstead.fleet.role_lock import sole_holder
from rowstead.spec.errors import RowsteadError
from tests.small_runs import wait_until

HOLDER = """
import signal, sys
from pathlib import Path
from rowstead.fleet.role_lock import sole_holder
with sole_holder(Path(sys.argv[1]), "reader", 0):
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
            with refused, sole_holder(tmp_path, "reader", 0, wait_s=0.05):
                pytest.fail("two processes would be one reader")
            with sole_holder(tmp_path, "reader", 1, wait_s=0.0):
                pass  # another number is another role
        finally:
            os.kill(first.pid, signal.SIGKILL)
    with sole_holder(tmp_path, "reader", 0, wait_s=5.0):
        pass


def test_one_that_is_just_ending_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "roles").mkdir()
    got: list[str] = []

    def follow() -> None:
        with sole_holder(tmp_path, "sparse", 0, wait_s=60.0):
            got.append("second")

    with sole_holder(tmp_path, "sparse", 0):
        thread = threading.Thread(target=follow)
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
        got.append("first")
    wait_until(lambda: len(got) == 2, what="the second")
    thread.join(10)
    assert got == ["first", "second"]
