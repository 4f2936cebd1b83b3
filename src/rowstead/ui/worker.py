"""Runs jobs in processes of their own, under a limit of time and memory, so that no request can stop the server.

The server writes one JSON object per line to a worker's standard input: `{"job": "plan", ...}`. The worker writes `{"answer": ...}` lines, and
at last `{"end": true}` or `{"error": "..."}`. An empty line asks it to leave a job half done. A worker exits when its input ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import resource
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

from rowstead.spec.errors import RowsteadError
from rowstead.spec.sizes import format_bytes

JOB_S = 30
"""Longest time of one job."""
JOB_BYTES = 1 << 30
"""Memory of a worker beyond what it has after its imports."""
QUEUE_S = 45.0
"""Longest time that a job waits for a worker: less than the time after which clients give up."""

Jobs = Mapping[str, Callable[[dict[str, Any]], Iterator[Any]]]
"""Functions by name, which yield their answers."""


class BusyError(RowsteadError):
    """All workers are busy."""


class WorkerError(Exception):
    """A bug in a job; its traceback is on the terminal."""


class Workers:
    """Up to `num_workers` processes of `module`, which calls `serve_jobs`. Thread-safe; a job has one process to itself."""

    def __init__(self, module: str, num_workers: int = 2) -> None:
        self._module, self._num_workers = module, num_workers
        self._free: queue.LifoQueue[_Worker | None] = queue.LifoQueue()  # the one that was used last is warm
        for _ in range(num_workers):
            self._free.put(None)

    def start(self) -> None:
        """Start all processes now, not at their first jobs."""
        for worker in [self._free.get() or _Worker(self._module) for _ in range(self._num_workers)]:
            self._free.put(worker)

    def run(self, job: str, **arguments: Any) -> Generator[Any, None, None]:
        """The answers of a job, as they come; those that are not asked for are not computed."""
        try:
            worker = self._free.get(timeout=QUEUE_S)
        except queue.Empty:
            raise BusyError("the server is busy: try again in a few seconds") from None
        try:
            worker = worker or _Worker(self._module)
            yield from worker.run({"job": job, **arguments})
        finally:
            self._free.put(worker if worker is not None and worker.is_idle() else None)

    def close(self) -> None:
        """End the processes that have no job; the others end with this one."""
        with contextlib.suppress(queue.Empty):
            while True:
                worker = self._free.get_nowait()
                if worker is not None:
                    worker.close()


class _Worker:
    """One process."""

    def __init__(self, module: str) -> None:
        words = [sys.executable, "-m", module]
        own = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **own}, start_new_session=True
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._is_running = False

    def run(self, request: dict[str, Any]) -> Iterator[Any]:
        self._is_running = True
        with contextlib.suppress(BrokenPipeError):  # it is gone, and `_read` says why
            self._send(json.dumps(request).encode())
        while True:
            message = self._read()
            if "answer" not in message:
                break
            yield message["answer"]
        self._is_running = False
        if "error" in message:
            raise RowsteadError(message["error"])
        if "bug" in message:
            raise WorkerError

    def is_idle(self) -> bool:
        """Whether it can take another job; one that was left half done is ended first."""
        with contextlib.suppress(OSError, RowsteadError):
            if self._is_running:
                self._send(b"")
                while "answer" in self._read():
                    pass
                self._is_running = False
        if self._is_running or self._process.poll() is not None:
            self.close()
            return False
        return True

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._input, self._output):
            with contextlib.suppress(OSError):
                pipe.close()

    def _send(self, line: bytes) -> None:
        self._input.write(line + b"\n")
        self._input.flush()

    def _read(self) -> dict[str, Any]:
        line = self._output.readline()
        if line:
            message: dict[str, Any] = json.loads(line)
            return message
        if self._process.wait() == -signal.SIGALRM:
            raise RowsteadError(f"this took longer than {JOB_S} s and was stopped: ask for a smaller model or fewer runs")
        raise RowsteadError("the process that worked on this was killed: try again")


# In the worker's process


def serve_jobs(jobs: Jobs) -> None:
    """Run the requested jobs, one after the other, until the input ends."""
    _limit_memory()
    while line := sys.stdin.buffer.readline():
        if line.isspace():  # a request to stop that came after the end
            continue
        request = json.loads(line)
        signal.alarm(JOB_S)  # its default action ends the process, whatever it is doing
        _write(_run_job(jobs, request))
        signal.alarm(0)


def _run_job(jobs: Jobs, request: dict[str, Any]) -> dict[str, Any]:
    """Write the answers of a job; return its last message."""
    try:
        for answer in jobs[request["job"]](request):
            _write({"answer": answer})
            if select.select([sys.stdin], [], [], 0)[0]:
                break
    except RowsteadError as error:
        return {"error": str(error)}
    except RecursionError:
        return {"error": "the request is nested too deeply"}
    except MemoryError:
        return {"error": f"this took more than {format_bytes(JOB_BYTES)} of memory: ask for a smaller model or fewer runs"}
    except Exception:  # a bug: the traceback goes to the terminal
        traceback.print_exc()
        return {"bug": True}
    return {"end": True}


def _limit_memory() -> None:
    """Limit the address space to what it is now and `JOB_BYTES`; where the system does not tell, there is no limit."""
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + JOB_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _write(message: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(message).encode() + b"\n")
    sys.stdout.buffer.flush()
