"""What faults do to a machine: fill a small disk, send signals, close TCP connections."""

from __future__ import annotations

import contextlib
import resource
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

DISK_BYTES = 64 << 20


class SmallDisk:
    """A file system of a few megabytes that can be filled up; for others than root, a limit on the size of files instead."""

    def __init__(self, path: Path, processes: Callable[[], list[psutil.Process]]) -> None:
        self.path, self._processes, self.is_full = path, processes, False
        path.mkdir()
        mount = shutil.which("mount")
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=700", "tmpfs", str(path)]
        self.is_mounted = mount is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0

    def fill(self) -> None:
        self.is_full = True
        if not self.is_mounted:
            self._limit(1)
            return
        with contextlib.suppress(OSError), open(self.path / "ballast", "ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size))

    def free(self) -> None:
        self.is_full = False
        if not self.is_mounted:
            self._limit(resource.RLIM_INFINITY)
            return
        (self.path / "ballast").unlink(missing_ok=True)

    def _limit(self, most: int) -> None:
        for process in self._processes():
            with contextlib.suppress(OSError, ValueError, psutil.Error):
                _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (min(most, hard) if hard >= 0 else most, hard))

    def remove(self) -> None:
        if self.is_mounted:
            subprocess.run(["umount", "-l", str(self.path)], capture_output=True, check=False)


def send(processes: list[psutil.Process], number: int) -> None:
    """Send a signal to those that still run; psutil knows a process from a later one with its id."""
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            process.send_signal(number)


def cut_tcp(processes: Any) -> bool:
    """Close the TCP connections between processes of this machine, which only root can; whether any was."""
    if shutil.which("ss") is None:
        return False
    was_cut = False
    for process in processes:
        with contextlib.suppress(psutil.Error):
            for one in process.net_connections("tcp"):
                if one.status == psutil.CONN_ESTABLISHED:
                    local, remote = (
                        f"{'[' + end.ip + ']' if ':' in end.ip else end.ip}:{end.port}" for end in (one.laddr, one.raddr)
                    )
                    done = subprocess.run(
                        ["ss", "-K", "src", local, "dst", remote], capture_output=True, check=False, text=True
                    )
                    was_cut |= done.returncode == 0 and "ESTAB" in done.stdout
    return was_cut
