"""Runs points one after the other in a worker process."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rowstead.records.files import write_atomic
from rowstead.records.run_folder import RunFolder
from rowstead.records.usage import machine_facts, versions
from rowstead.spec.errors import RowsteadError
from rowstead.spec.parse import to_yaml
from rowstead.spec.record import Record, date_now
from rowstead.study.points import Point


@dataclass(frozen=True, kw_only=True)
class PointResult:
    """The result of a point: a record, or the reason for its failure."""

    record: Record | None
    failure: str | None
    spent_s: float | None = None
    """Wall time with the start of its process; None for a point that had finished before."""


class PointRunner:
    """Runs points in a worker process; a context manager.

    `fresh` starts a new process for each point, so that none sees another's memory, threads or compiled kernels. Otherwise a
    process is reused, which saves some seconds per point. `held` are file descriptors that the worker keeps open, such as the
    lock of its study.
    """

    def __init__(self, folder: Path, *, fresh: bool, limit_s: float | None = None, held: tuple[int, ...] = ()) -> None:
        self.folder = folder
        self._fresh = fresh
        self._limit_s = limit_s
        self._held = held
        self._worker: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> PointRunner:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def finished(self, point: Point) -> PointResult | None:
        """The result of a point that had finished before but was not stored."""
        try:
            return PointResult(record=RunFolder(self._out(point)).read_record(), failure=None)
        except RowsteadError:
            return None

    def run(self, point: Point) -> PointResult:
        """Run one point until it ends or fails."""
        if point.spec is None:
            return PointResult(record=None, failure=point.problem)
        out, started = self._out(point), time.monotonic()
        shutil.rmtree(out, ignore_errors=True)
        recipe = self.folder / f"{point.key}.yaml"
        write_atomic(recipe, to_yaml(point.spec))
        job = {"spec": str(recipe), "out": str(out), "processes": point.num_processes, "fleet": point.fleet}
        failure, record = self._answer(job), None
        if failure is None:
            try:
                record = RunFolder(out).read_record()
            except RowsteadError as error:
                failure = str(error)
        if self._fresh:
            self._end()
        return PointResult(record=record, failure=failure, spent_s=time.monotonic() - started)

    def forget(self, point: Point) -> None:
        """Remove the files of a point, once its record is stored."""
        shutil.rmtree(self._out(point), ignore_errors=True)
        for end in (".yaml", ".log"):
            (self.folder / f"{point.key}{end}").unlink(missing_ok=True)

    def _out(self, point: Point) -> Path:
        return self.folder / point.key

    def _answer(self, job: dict[str, Any]) -> str | None:
        """Send a job to the worker; returns the reason if it failed."""
        worker = self._start_worker()
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            worker.stdin.write(json.dumps(job).encode() + b"\n")
            worker.stdin.flush()
        except OSError:
            return self._why_it_ended(worker)
        with selectors.DefaultSelector() as selector:
            selector.register(worker.stdout, selectors.EVENT_READ)
            if not selector.select(self._limit_s):
                self._end()
                return f"exceeded the time limit of {self._limit_s:g} s"
        line = worker.stdout.readline()
        if not line.endswith(b"\n"):
            return self._why_it_ended(worker)
        failure = json.loads(line).get("failure")
        return None if failure is None else str(failure)

    def _why_it_ended(self, worker: subprocess.Popen[bytes]) -> str:
        code = worker.wait()
        self._end()
        return why_it_ended(code, self._log)

    @property
    def _log(self) -> Path:
        return self.folder / "worker.log"

    def _start_worker(self) -> subprocess.Popen[bytes]:
        if self._worker is None:
            with open(self._log, "wb") as log:
                self._worker = subprocess.Popen(
                    [sys.executable, "-m", "rowstead.study.worker"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C is handled here, which ends the worker
                    pass_fds=self._held,
                )
        return self._worker

    def _end(self) -> None:
        if self._worker is None:
            return
        worker, self._worker = self._worker, None
        assert worker.stdin is not None
        assert worker.stdout is not None
        with contextlib.suppress(OSError):
            worker.stdin.close()  # then it exits, with the processes that it started
        try:
            worker.wait(timeout=10)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
        worker.stdout.close()


def why_it_ended(code: int, log: Path) -> str:
    """The reason why a worker process ended, from its exit status and its log."""
    if code < 0:
        memory = ", probably out of memory" if -code == signal.SIGKILL else ""
        return f"its process was killed by {signal.Signals(-code).name}{memory}"
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"its process ended with status {code}" + (f": {said[-1]}" if said and code else "")


def build_failed_record(name: str, spec_digest: str) -> Record:
    """The record of a run that has no figures."""
    return Record(
        kind="measured", name=name, spec_digest=spec_digest, date=date_now(), machine=machine_facts(), versions=versions()
    )


@contextlib.contextmanager
def lock_study(folder: Path, *, deadline_s: float = 60.0) -> Iterator[int]:
    """Lock a study; a RowsteadError if another process holds it. Yields the descriptor of the lock, which workers keep open.

    Where the holder was killed, waits until its worker has exited too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        until = time.monotonic() + deadline_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
                if (holder.isdigit() and psutil.pid_exists(int(holder))) or time.monotonic() > until:
                    raise RowsteadError(
                        f"the study in {folder} is running in process {holder}: wait for it, or use another --name"
                    ) from None
                time.sleep(0.05)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)
