"""Readers and trainers in their own processes, to be killed."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
from pathlib import Path

from rowstead.fleet import roster
from rowstead.fleet.reader_server import build_reader_server
from rowstead.fleet.remote_batches import RemoteBatches
from rowstead.fleet.rpc_client import Client
from tests.fleet.numbered_log import numbers_in, source_of
from tests.small_runs import wait_until

_PROCESSES = multiprocessing.get_context("forkserver")  # forks a process that has imported everything and has no threads
_PROCESSES.set_forkserver_preload([__name__])


@contextlib.contextmanager
def process(target, *arguments, **named):
    """Run a function in a process; kill it at the end if it still runs."""
    started = _PROCESSES.Process(target=target, args=arguments, kwargs=named, daemon=True)
    started.start()
    try:
        yield started
    finally:
        kill(started)


def kill(started):
    """Kill a process and wait for it."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(started.pid, signal.SIGKILL)
    started.join()


def connect(folder: Path, number: int, name: str):
    """Return a function that connects to the current address of a reader."""
    return lambda: Client(lambda: roster.read_address(folder, "reader", number).address, name=name)


def run_reader(log: Path, folder: Path, number: int, num_readers: int, incarnation: int = 0, **named):
    """Serve until killed."""
    named = {"batch_size": 8, **named}
    with build_reader_server(source_of(log), folder, number, num_readers=num_readers, **named) as server:
        roster.report_ready(folder, "reader", number, server.address, incarnation)
        server.serve(lambda: os.getppid() == 1)


def wait_for_reader(folder: Path, number: int, incarnation: int = 0):
    """Wait until a reader has written its address."""

    def is_there():
        found = roster.read_address(folder, "reader", number)
        return found is not None and found.incarnation == incarnation

    wait_until(is_there, what=f"reader {number}")


def status_of(folder: Path, number: int) -> dict:
    with connect(folder, number, "test")() as client:
        return client.call("status").facts


def trained_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.trained"


def run_trainer(folder: Path, name: str, num_readers: int, hang_after: int | None = None):
    """Record the rows of each batch, then acknowledge it; hang after `hang_after` batches."""
    path = trained_file(folder, name)
    if path.exists():  # an incomplete line is of a batch that was not acknowledged
        path.write_bytes(b"".join(whole_lines(path)))
    with open(path, "ab", buffering=0) as file:
        feed = RemoteBatches([connect(folder, number, name) for number in range(num_readers)], name=name, batches_ahead=4)
        count = 0
        while feed.more():
            for batch, ticket in feed:
                file.write(json.dumps([ticket.epoch, numbers_in(batch)]).encode() + b"\n")
                count += 1
                while hang_after == count:
                    signal.pause()
                feed.acknowledge(ticket)
        feed.close()


def whole_lines(path: Path) -> list[bytes]:
    """Read a file that may be written meanwhile: the last line may be incomplete."""
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def trained_by(folder: Path, name: str) -> list[tuple[int, list[int]]]:
    """Return what a trainer has recorded."""
    path = trained_file(folder, name)
    return [tuple(json.loads(line)) for line in whole_lines(path)] if path.exists() else []
