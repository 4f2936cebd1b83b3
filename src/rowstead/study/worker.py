"""The worker process that runs points, so that a crash ends only that point: `python -m rowstead.study.worker`.

It reads one JSON object per line from standard input (`spec`, `out`, `processes`, `fleet`), trains, and answers with one line,
`{}` or `{"failure": …}`. It exits as soon as its input ends, also when its parent was killed.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

MAX_REASON = 2_000
"""Longest reason that is kept, in characters."""


def main() -> None:
    """Run jobs until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries goes to the log, not between the answers
    jobs: queue.Queue[dict[str, Any]] = queue.Queue()
    running: list[subprocess.Popen[bytes]] = []
    threading.Thread(target=_listen, args=(jobs, running), name="listen", daemon=True).start()
    while True:
        job = jobs.get()
        failure = _failure_of(job, running)
        print(json.dumps({} if failure is None else {"failure": failure[:MAX_REASON]}), file=answers, flush=True)


def _listen(jobs: queue.Queue[dict[str, Any]], running: list[subprocess.Popen[bytes]]) -> None:
    for line in sys.stdin:
        jobs.put(json.loads(line))
    for process in running:
        process.send_signal(signal.SIGKILL)
    os._exit(0)


def _failure_of(job: dict[str, Any], running: list[subprocess.Popen[bytes]]) -> str | None:
    """Run a job; returns the reason if it failed."""
    from rowstead.spec.errors import RowsteadError

    try:
        from rowstead.spec.run import load_recipe
        from rowstead.training.device import check_precision

        spec = load_recipe(job["spec"])
        check_precision(spec)
        if job["processes"] > 1 or job["fleet"] is not None:
            return _by_command(job, running)
        from rowstead import run

        run.train(spec, out=job["out"], progress=False)
    except RowsteadError as error:
        return str(error)
    except MemoryError as error:
        return f"out of memory: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _by_command(job: dict[str, Any], running: list[subprocess.Popen[bytes]]) -> str | None:
    """Run a job of several processes with the command line."""
    how = ["--fleet", job["fleet"]] if job["fleet"] is not None else ["--processes", str(job["processes"])]
    command = [sys.executable, "-m", "rowstead", "train", job["spec"], "--out", job["out"], *how]
    log = Path(f"{job['out']}.log")
    with open(log, "wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        running.append(process)
        code = process.wait()
        running.remove(process)
    if code == 0:
        return None
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in said if line.startswith("error: ")]
    return (errors or said or [f"`{' '.join(how)}` ended with status {code}"])[-1].removeprefix("error: ")


if __name__ == "__main__":
    main()
