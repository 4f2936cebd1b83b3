"""What a process is told, through its environment, of the job that it is one process of."""

from __future__ import annotations

import os
from collections.abc import Mapping

RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""How often the job was started again; torchrun's name for it."""
MEETING_FILE = "ROWSTEAD_MEETING_FILE"
"""The file through which processes that `rowstead train --processes` has started find each other."""
LAUNCHER = "ROWSTEAD_LAUNCHER"
"""The process that has started them."""


def is_one_of_many(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun, or `rowstead train --processes`, has started this process as one of a job."""
    return all(name in environment for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
