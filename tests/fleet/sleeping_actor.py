"""A Ray actor of a role whose process only sleeps."""

from __future__ import annotations

import subprocess
from pathlib import Path

from rowstead.fleet.ray_launch import _RoleActor
from rowstead.spec.fleet import RoleKind


class SleepingActor(_RoleActor):
    def run(self, folder: str, kind: RoleKind, number: int, incarnation: int) -> int:
        self._process = subprocess.Popen(["sleep", "600"])
        Path(folder, "pid").write_text(str(self._process.pid))
        return self._process.wait()
