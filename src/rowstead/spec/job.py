"""Environment variables of the processes of one job."""

from __future__ import annotations

import os
from collections.abc import Mapping

RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""Number of restarts of the job; torchrun's name for it."""
RENDEZVOUS_FILE = "ROWSTEAD_RENDEZVOUS_FILE"
"""Path of the file through which the processes of `rowstead train --processes` find each other."""
LAUNCHER = "ROWSTEAD_LAUNCHER"
"""Process id of the launcher: the parent of a process of `--processes`, or of a role of a fleet. Absent where the user started it."""


def is_multi_process(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun or `rowstead train --processes` started this process as one of several."""
    return all(name in environment for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
