"""Signs of life through files: whose clock is wrong lives, who is frozen is found, and nobody is blamed while nobody ran."""

from __future__ import annotations

import os
from pathlib import Path

from rowstead.fleet import liveness
from rowstead.fleet.liveness import SILENT_AFTER_S, AwakeClock, FileActivity
from rowstead.fleet.role_usage import RoleSampler
from tests.small_runs import wait_until


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_file_that_changes_is_never_idle_whatever_the_clock_of_its_writer_says(tmp_path: Path) -> None:
    path, clock = tmp_path / "usage", Clock()
    activity = FileActivity(tmp_path / "missing", path, clock=clock)
    for number in range(60):
        with open(path, "a") as file:
            file.write("{}\n")
        os.utime(path, (number, number))
        assert activity.idle_s() < 1
        clock.now_s += 0.6
    for _ in range(30):
        assert activity.idle_s() <= SILENT_AFTER_S + 3
        clock.now_s += 0.6
    assert activity.idle_s() > SILENT_AFTER_S
    os.utime(path)
    clock.now_s += 0.6
    assert activity.idle_s() == 0.0


def test_nobody_is_silent_because_of_a_time_in_which_the_observer_did_not_run_either(tmp_path: Path) -> None:
    path, clock = tmp_path / "usage", Clock()
    path.touch()
    activity = FileActivity(path, clock=clock)
    assert activity.idle_s() == 0.0
    clock.now_s += 3600  # all were suspended
    assert activity.idle_s() < SILENT_AFTER_S / 2
    os.utime(path)
    clock.now_s += 0.6
    assert activity.idle_s() == 0.0


def test_a_suspension_uses_up_no_time_in_which_a_role_must_be_ready() -> None:
    clock = Clock()
    awake_s = AwakeClock(clock)
    for _ in range(10):
        clock.now_s += 0.5
        awake_s()
    assert awake_s() == 5.0
    clock.now_s += 3600
    assert awake_s() <= 5.0 + liveness.MAX_COUNTED_S


def test_a_role_that_cannot_write_its_samples_still_gives_signs_of_life(tmp_path: Path) -> None:
    path = tmp_path / "usage"
    path.touch()

    def facts() -> dict[str, float]:
        raise OSError(28, "No space left on device")

    states = set()
    with RoleSampler(path, facts, interval_s=0.01):

        def has_changed() -> bool:
            states.add(liveness._file_state(path))
            return len(states) > 3

        wait_until(has_changed, what="signs of life", deadline_s=20)
    assert path.stat().st_size == 0
