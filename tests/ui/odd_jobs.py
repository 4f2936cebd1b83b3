"""A worker whose jobs go wrong, under smaller limits: `python -m tests.ui.odd_jobs`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

from rowstead.spec.errors import RowsteadError
from rowstead.ui import worker


def plan(asked: dict[str, Any]) -> Iterator[Any]:
    odd = asked["scenario"]
    yield {"began": odd, "pid": os.getpid()}
    if odd == "half":
        raise RowsteadError("no more of it")
    if odd == "wrong":
        raise ZeroDivisionError("oh")
    if odd == "memory":
        yield len(bytearray(1 << 30))
    if odd == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    while odd == "endless":
        sum(range(10**9))
    for number in range(10**6 if odd == "long" else 1):
        yield {"number": number}


if __name__ == "__main__":
    worker.JOB_S, worker.JOB_BYTES = 1, 1 << 28
    worker.serve_jobs({"plan": plan})
