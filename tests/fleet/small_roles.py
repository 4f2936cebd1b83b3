"""What tests of the nursery fork: roles that wait to be asked, and one that fails."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rowstead.fleet.fork_server import serve_forks
from rowstead.fleet.local_process import end_with_coordinator, stop_asked
from rowstead.fleet.roster import tell
from rowstead.spec.fleet import RoleKind


def be_role(kind: RoleKind, folder: Path, number: int, incarnation: int) -> int:
    """Waits until it is asked to end; readers fail at once, dense servers do not listen."""
    is_asked = stop_asked()
    end_with_coordinator(grace_s=0.5)
    if kind == "reader":
        print("error: nothing to read", file=sys.stderr)
        return 2
    tell(folder, kind, number, "tcp://127.0.0.1:1", incarnation)
    while not is_asked() or kind == "dense":
        time.sleep(0.01)
    print("asked to stop")
    return 0


if __name__ == "__main__":
    serve_forks(Path(sys.argv[1]), be_role)
