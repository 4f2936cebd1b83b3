"""Manually started roles: coordinator and roles notice each other's exit through files, whatever their clocks say."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from rowstead.fleet import liveness, manual_launch
from rowstead.fleet.manual_launch import GONE, ManualLauncher, StopRequested, stop_earlier_roles, write_exit_code
from rowstead.fleet.roster import report_ready
from tests.small_runs import wait_until


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (manual_launch, liveness):
        monkeypatch.setattr(module, "FILE_POLL_INTERVAL_S", 0.005)
    monkeypatch.setattr(manual_launch, "HEARTBEAT_INTERVAL_S", 0.01)


def test_a_role_that_no_longer_is_waited_for_is_told_to_stop_in_case_it_only_hung(tmp_path: Path) -> None:
    with ManualLauncher(tmp_path, lambda text: None) as launcher:
        role = launcher.start("sparse", 0)
        assert role.exit_code() is None, "it was not started yet"
        report_ready(tmp_path, "sparse", 0, "tcp://127.0.0.1:1", 0)
        stop_requested = StopRequested(tmp_path, "sparse", 0, 0)
        assert not stop_requested.is_set()
        role.kill()
        assert role.exit_code() == GONE
        wait_until(stop_requested.is_set, what="the stop request")


def test_the_exit_code_of_a_role_is_the_one_that_it_wrote(tmp_path: Path) -> None:
    with ManualLauncher(tmp_path, lambda text: None) as launcher:
        role = launcher.start("trainer", 1, incarnation=2)
        write_exit_code(tmp_path, "trainer", 1, 1, 7)
        assert role.exit_code() is None, "that was an earlier incarnation"
        write_exit_code(tmp_path, "trainer", 1, 2, 75)
        assert role.exit_code() == 75


def test_a_role_stops_when_its_coordinator_is_gone_and_not_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manual_launch, "COORDINATOR_GONE_AFTER_S", 1.0)
    heartbeats = set()
    with ManualLauncher(tmp_path, lambda text: None):
        stop_requested = StopRequested(tmp_path, "reader", 0, 0)

        def has_beaten() -> bool:
            assert not stop_requested.is_set()
            with contextlib.suppress(FileNotFoundError):
                heartbeats.add((tmp_path / "roles" / manual_launch.HEARTBEAT_FILE).read_text())
            return len(heartbeats) > 5

        wait_until(has_beaten, what="some heartbeats")
    wait_until(stop_requested.is_set, what="the role to notice", deadline_s=20)
    assert not stop_requested.by_coordinator(), "nobody asked"


def test_roles_of_an_earlier_coordinator_are_asked_to_stop(tmp_path: Path) -> None:
    (tmp_path / "roles").mkdir()
    report_ready(tmp_path, "sparse", 0, "tcp://127.0.0.1:1", 3)
    stop_requested = StopRequested(tmp_path, "sparse", 0, 3)
    assert not stop_requested.is_set()
    stop_earlier_roles(tmp_path, [("sparse", 0), ("sparse", 1)])
    wait_until(stop_requested.is_set, what="the stop request")
    assert stop_requested.by_coordinator()
