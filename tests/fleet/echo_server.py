"""An echo server in its own process, to be killed: `python -m tests.fleet.echo_server [ADDRESS [KEYS_FILE]]`; prints its address."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rowstead.fleet.deduplication import Caller
from rowstead.fleet.keys import Keys
from rowstead.fleet.rpc_server import Server
from rowstead.fleet.wire import Message


def echo(message: Message, caller: Caller) -> Message:
    """Echo the message after `delay_s` seconds."""
    time.sleep(message.facts.get("delay_s", 0.0))
    return Message("echo", message.facts, message.tensors)


def weigh(message: Message, caller: Caller) -> Message:
    """Return the sum of the tensors after `delay_s` seconds."""
    time.sleep(message.facts.get("delay_s", 0.0))
    return Message("weight", {"sum": sum(float(tensor.sum()) for tensor in message.tensors)})


class Count:
    """Counts its requests."""

    def __init__(self) -> None:
        self._num_requests = 0

    def __call__(self, message: Message, caller: Caller) -> Message:
        self._num_requests += 1
        return Message("count", {"num_requests": self._num_requests})


class Process:
    """Starts and kills the server."""

    def __init__(self, *arguments: str, within: Sequence[str] = ()) -> None:
        """`within` is a command that runs it, such as `ip netns exec NAME`."""
        command = [*within, sys.executable, "-m", "tests.fleet.echo_server", *arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    @property
    def address(self) -> str:
        if not hasattr(self, "_address"):
            assert self._process.stdout is not None
            self._address = self._process.stdout.readline().strip()
        return self._address

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


if __name__ == "__main__":
    address, *keys = sys.argv[1:] or [None]
    handlers = {"echo": echo, "weigh": weigh, "count": Count()}
    server = Server(handlers, address=address, keys=Keys.load(Path(keys[0])) if keys else None)
    print(server.address, flush=True)
    server.serve()
