"""Readers and trainers as processes of their own, to be killed."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
from pathlib import Path

from rowstead.fleet import roster
from rowstead.fleet.reader_server import serve_reader
from rowstead.fleet.remote_batches import RemoteBatches
from rowstead.fleet.rpc_client import Client
from tests.fleet.numbered_log import numbers_in, source_of
from tests.small_runs import wait_until

_PROCESSES = multiprocessing.get_context("forkserver")  # forks a process that has imported everything and has no threads
_PROCESSES.set_forkserver_preload([__name__])


@contextlib.contextmanager
def process(target, *arguments, **named):
    """A process that runs a function, killed at the end if it still does."""
    started = _PROCESSES.Process(target=target, args=arguments, kwargs=named, daemon=True)
    started.start()
    try:
        yield started
    finally:
        kill(started)


def kill(started):
    """End a process at once, and wait for that."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(started.pid, signal.SIGKILL)
    started.join()


def connect(folder: Path, number: int, name: str):
    """How a trainer reaches a reader: where it is now, asked each time."""
    return lambda: Client(lambda: roster.read_address(folder, "reader", number).address, name=name)


def run_reader(log: Path, folder: Path, number: int, num_readers: int, incarnation: int = 0, **named):
    """Serve until killed."""
    serve_reader(
        source_of(log),
        folder,
        number,
        num_readers=num_readers,
        until=lambda: os.getppid() == 1,
        ready=lambda address: roster.report_ready(folder, "reader", number, address, incarnation),
        **{"batch_size": 8, **named},
    )


def wait_for_reader(folder: Path, number: int, incarnation: int = 0):
    """Return once a reader has said where it is."""

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
    """Write down the rows of each batch, then say that it is done; hang after so many batches."""
    path = trained_file(folder, name)
    if path.exists():  # a line that whoever was killed has begun is of a batch that was not done
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
    """Of a file that may be being written: whoever reads meanwhile may see the first half of a line that crosses a page."""
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def trained_by(folder: Path, name: str) -> list[tuple[int, list[int]]]:
    """What a trainer has written down."""
    path = trained_file(folder, name)
    return [tuple(json.loads(line)) for line in whole_lines(path)] if path.exists() else []
