"""Roles as the coordinator starts them, but the trainers leave after some steps as if the log were finished."""

from __future__ import annotations

import sys
from pathlib import Path

from rowstead.distributed.launch import exit_with_launcher
from rowstead.fleet.fork_server import serve_forks
from rowstead.fleet.local_process import STOP_SIGNAL
from rowstead.fleet.roles import run_role, serve_role
from rowstead.spec.fleet import RoleKind
from tests.fleet.test_fleet import steps_of


def run_leaving_role(kind: RoleKind, folder: Path, number: int, incarnation: int) -> int:
    if kind != "trainer":
        return run_role(kind, folder, number, incarnation)
    exit_with_launcher(STOP_SIGNAL)
    serve_role(kind, folder, number, until=lambda: steps_of(folder, kind, number) >= 10, incarnation=incarnation)
    return 0


if __name__ == "__main__":
    serve_forks(Path(sys.argv[1]), run_leaving_role)
