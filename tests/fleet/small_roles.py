"""Roles for tests of the fork server: some wait for a stop request, one fails."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rowstead.distributed.launch import exit_with_launcher
from rowstead.fleet.fork_server import serve_forks
from rowstead.fleet.local_process import STOP_SIGNAL, install_stop_handlers
from rowstead.fleet.role_usage import RoleSampler
from rowstead.fleet.roster import RoleFiles, report_ready
from rowstead.spec.fleet import RoleKind


def run_role(kind: RoleKind, folder: Path, number: int, incarnation: int) -> int:
    """Wait for a stop request; readers fail at once, dense servers ignore it."""
    is_stop_requested = install_stop_handlers()
    exit_with_launcher(STOP_SIGNAL, grace_s=0.5)
    if kind == "reader":
        print("error: nothing to read", file=sys.stderr)
        return 2
    report_ready(folder, kind, number, "tcp://127.0.0.1:1", incarnation)
    with RoleSampler(RoleFiles(folder, kind, number).usage, dict, incarnation=incarnation, interval_s=0.1):
        while not is_stop_requested() or kind == "dense":
            time.sleep(0.01)
    print("asked to stop")
    return 0


if __name__ == "__main__":
    serve_forks(Path(sys.argv[1]), run_role)
