"""Supervised processes: restarted when killed, and given up with the error message of the current incarnation only."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from rowstead.fleet import supervisor as supervisor_module
from rowstead.fleet.fork_server import ForkServer
from rowstead.fleet.roster import RoleFiles
from rowstead.fleet.supervisor import RoleError, Supervisor
from rowstead.spec.fleet import FleetSpec
from tests.small_runs import wait_until

MODULE = "tests.fleet.small_roles"
SPEC = FleetSpec(num_sparse=1, num_dense=0, max_restarts=1)


def test_the_error_of_a_role_that_is_killed_too_often_does_not_repeat_the_log_of_an_earlier_run(tmp_path: Path) -> None:
    messages: list[str] = []
    with ForkServer(tmp_path, MODULE) as server:
        RoleFiles(tmp_path, "sparse", 0).log.write_text("error: the loss is nan at step 7\n")
        supervisor = Supervisor(tmp_path, SPEC, server, {}, on_message=messages.append)
        supervisor.start("sparse")
        for _ in range(2):
            supervisor.wait_ready()
            (handle,) = supervisor.handles
            assert handle.address is not None
            os.kill(handle.address.pid, signal.SIGKILL)
            handle.role.wait(20)
            if not messages:
                supervisor.poll()
        with pytest.raises(RoleError) as error:
            supervisor.poll()
        supervisor.close()
    assert messages == ["sparse 0 was killed by SIGKILL: restarting it (1 of 1)"]
    assert "sparse 0 was killed by SIGKILL after 1 restart" in str(error.value)
    assert "the loss is nan" not in str(error.value)
    assert not error.value.is_user_error
    assert supervisor.num_restarts == {"sparse": 1}


def test_a_role_that_reports_an_error_ends_the_fleet_with_its_message(tmp_path: Path) -> None:
    with ForkServer(tmp_path, MODULE) as server:
        supervisor = Supervisor(tmp_path, SPEC, server, {}, on_message=pytest.fail)
        supervisor.start("reader")
        with pytest.raises(RoleError, match=r"^reader 0: nothing to read$") as error:
            supervisor.wait_ready()
        supervisor.close()
    assert error.value.is_user_error


def test_a_frozen_role_is_named_killed_and_replaced_and_the_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "SILENT_AFTER_S", 4.0)
    messages: list[str] = []
    with ForkServer(tmp_path, MODULE) as server:
        supervisor = Supervisor(tmp_path, FleetSpec(num_sparse=2, num_dense=0), server, {}, on_message=messages.append)
        supervisor.start("sparse")
        supervisor.wait_ready()
        frozen, other = supervisor.handles
        assert frozen.address is not None
        os.kill(frozen.address.pid, signal.SIGSTOP)

        def is_replaced() -> bool:
            supervisor.poll()
            return frozen.incarnation == 1 and frozen.state == "ready"

        wait_until(is_replaced, what="the role to be replaced", deadline_s=60)
        assert (other.incarnation, other.state) == (0, "ready")
        supervisor.close()
    assert messages == [
        "sparse 0 has given no sign of life for 4 s: killing it",
        "sparse 0 was silent and has been killed: restarting it (1 of 3)",
    ]
