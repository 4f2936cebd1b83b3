"""Temporary folders of killed processes are removed by the next one; all others are left alone."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from rowstead.records.temporary import MARKER, remove_abandoned, temporary_folder

HOLD = """
import sys
from rowstead.records.temporary import temporary_folder
with temporary_folder(sys.argv[1]) as folder:
    (folder / "content").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


def hold(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    """Another process that owns a folder."""
    owner = subprocess.Popen([sys.executable, "-c", HOLD, parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    return owner, Path(owner.stdout.readline().strip())


def test_the_folder_of_a_killed_process_is_removed_at_the_next_start_and_that_of_a_live_one_is_not(tmp_path: Path) -> None:
    (killed, abandoned), (live, used) = hold(tmp_path), hold(tmp_path)
    try:
        killed.kill()
        killed.wait()
        assert (abandoned / "content").exists()
        with temporary_folder(tmp_path) as ours:
            assert not abandoned.exists()
            assert (used / "content").exists()
            assert stat.S_IMODE(ours.stat().st_mode) == 0o700
        assert not ours.exists()
        live.communicate("", timeout=30)
        assert not used.exists()
    finally:
        live.kill()
        live.communicate()
        killed.communicate()


def abandon(parent: Path, name: str) -> Path:
    """A folder like those that a killed process leaves."""
    folder = parent / name
    folder.mkdir(mode=0o700)
    (folder / MARKER).touch()
    return folder


def test_a_folder_that_is_not_certainly_ours_is_left_alone(tmp_path: Path) -> None:
    other_name, unmarked, open_to_others = (
        abandon(tmp_path, name) for name in ("somebody-else", "rowstead-data", "rowstead-open")
    )
    (unmarked / MARKER).unlink()
    open_to_others.chmod(0o755)
    (tmp_path / "rowstead-file").touch()
    (elsewhere := tmp_path / "elsewhere").mkdir()
    target = abandon(elsewhere, "rowstead-target")
    (tmp_path / "rowstead-link").symlink_to(target)
    theirs = abandon(tmp_path, "rowstead-theirs")
    if os.geteuid() == 0:
        os.chown(theirs, 65534, 65534)
    ours = abandon(tmp_path, "rowstead-ours")
    (ours / "link").symlink_to(target)
    (ours / "deep").mkdir()
    remove_abandoned(tmp_path)
    assert not ours.exists()
    assert (target / MARKER).exists(), "links are not followed"
    assert all(path.exists() for path in (other_name, unmarked, open_to_others, tmp_path / "rowstead-file"))
    assert theirs.exists() == (os.geteuid() == 0)


def test_a_folder_that_cannot_be_listed_does_not_stop_a_start(tmp_path: Path) -> None:
    remove_abandoned(tmp_path / "missing")
    with pytest.raises(FileNotFoundError), temporary_folder(tmp_path / "missing"):
        pass
