"""Roles that people start: head and roles notice each other's end by files alone, whatever their clocks say."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from rowstead.fleet import manual_launch
from rowstead.fleet.manual_launch import GONE, ManualLauncher, StopRequested, ask_former, leave_code
from rowstead.fleet.roster import RoleFiles, tell
from tests.small_runs import wait_until


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manual_launch, "LOOK_AT_FILES_EVERY_S", 0.005)
    monkeypatch.setattr(manual_launch, "BEAT_EVERY_S", 0.01)


def test_a_role_whose_clock_is_an_hour_behind_is_alive_while_it_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manual_launch, "GONE_AFTER_S", 1.0)
    files = RoleFiles(tmp_path, "sparse", 0)
    with ManualLauncher(tmp_path, lambda text: None) as launcher:
        role = launcher.start("sparse", 0)
        assert role.code() is None, "it is still to come"
        tell(tmp_path, "sparse", 0, "tcp://127.0.0.1:1", 0)
        for number in range(60):
            with open(files.usage, "a") as file:
                file.write("{}\n")
            os.utime(files.usage, (number, number))
            os.utime(files.told, (1, 1))
            assert role.wait(0.01) is None
        asked = StopRequested(tmp_path, "sparse", 0, 0)
        assert not asked.is_so()
        assert role.wait(20) == GONE, "it samples no more"
        wait_until(asked.is_so, what="the order to end, should it only have been held up")


def test_a_role_that_leaves_its_code_has_ended_with_it(tmp_path: Path) -> None:
    with ManualLauncher(tmp_path, lambda text: None) as launcher:
        role = launcher.start("trainer", 1, incarnation=2)
        leave_code(tmp_path, "trainer", 1, 1, 7)
        assert role.code() is None, "that was an earlier start"
        leave_code(tmp_path, "trainer", 1, 2, 75)
        assert role.code() == 75


def test_a_role_ends_when_its_head_is_gone_and_not_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manual_launch, "HEAD_GONE_AFTER_S", 1.0)
    words = set()
    with ManualLauncher(tmp_path, lambda text: None):
        asked = StopRequested(tmp_path, "reader", 0, 0)

        def has_beaten() -> bool:
            assert not asked.is_so()
            with contextlib.suppress(FileNotFoundError):
                words.add((tmp_path / "roles" / manual_launch.HEAD_FILE).read_text())
            return len(words) > 5

        wait_until(has_beaten, what="some words of the head")
    wait_until(asked.is_so, what="the role to notice", deadline_s=20)


def test_roles_that_an_earlier_head_has_left_are_asked_to_end(tmp_path: Path) -> None:
    (tmp_path / "roles").mkdir()
    tell(tmp_path, "sparse", 0, "tcp://127.0.0.1:1", 3)
    asked = StopRequested(tmp_path, "sparse", 0, 3)
    assert not asked.is_so()
    ask_former(tmp_path, [("sparse", 0), ("sparse", 1)])
    wait_until(asked.is_so, what="the order to end")
