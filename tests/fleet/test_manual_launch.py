"""Manually started roles: coordinator and roles notice each other's exit through files, whatever their clocks say."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from rowstead.fleet import manual_launch
from rowstead.fleet.manual_launch import GONE, ManualLauncher, StopRequested, stop_earlier_roles, write_exit_code
from rowstead.fleet.roster import RoleFiles, report_ready
from tests.small_runs import wait_until


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manual_launch, "FILE_POLL_INTERVAL_S", 0.005)
    monkeypatch.setattr(manual_launch, "HEARTBEAT_INTERVAL_S", 0.01)


def test_a_role_whose_clock_is_an_hour_behind_is_alive_while_it_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manual_launch, "GONE_AFTER_S", 1.0)
    files = RoleFiles(tmp_path, "sparse", 0)
    with ManualLauncher(tmp_path, lambda text: None) as launcher:
        role = launcher.start("sparse", 0)
        assert role.exit_code() is None, "it was not started yet"
        report_ready(tmp_path, "sparse", 0, "tcp://127.0.0.1:1", 0)
        for number in range(60):
            with open(files.usage, "a") as file:
                file.write("{}\n")
            os.utime(files.usage, (number, number))
            os.utime(files.address, (1, 1))
            assert role.wait(0.01) is None
        stop_requested = StopRequested(tmp_path, "sparse", 0, 0)
        assert not stop_requested.is_set()
        assert role.wait(20) == GONE, "it stopped sampling"
        wait_until(stop_requested.is_set, what="the stop request, in case it only hung")


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


def test_roles_of_an_earlier_coordinator_are_asked_to_stop(tmp_path: Path) -> None:
    (tmp_path / "roles").mkdir()
    report_ready(tmp_path, "sparse", 0, "tcp://127.0.0.1:1", 3)
    stop_requested = StopRequested(tmp_path, "sparse", 0, 3)
    assert not stop_requested.is_set()
    stop_earlier_roles(tmp_path, [("sparse", 0), ("sparse", 1)])
    wait_until(stop_requested.is_set, what="the stop request")
