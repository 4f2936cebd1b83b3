"""Sends damaged and made-up messages to the servers of a fleet, and damaged replies to their clients.

Whatever the frames, a server must refuse or answer them, without a traceback, and go on serving others; decoding must give a message or a WireError,
and a batch or a WireError. For many cases, in processes of their own, so that a crash is a case number and not the end:

    python -m tests.fleet.fuzz_frames --cases 100000
    python -m tests.fleet.fuzz_frames --start 4711 --cases 64     # some cases again
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import random
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import torch
import zmq
from torch import Tensor

from rowstead.data.batch import Batch
from rowstead.fleet.dense_server import DenseServerProcess
from rowstead.fleet.packing import pack, unpack
from rowstead.fleet.reader_server import build_reader_server
from rowstead.fleet.rpc_client import Client
from rowstead.fleet.rpc_server import Server
from rowstead.fleet.sparse_server import SparseServer
from rowstead.fleet.table_shard import TableShard
from rowstead.fleet.wire import (
    DEFAULT_LIMITS,
    ERROR,
    HEADER_BYTES,
    REPLY,
    REQUEST,
    Limits,
    Message,
    WireError,
    decode,
    decode_header,
    encode,
)
from tests.fleet.numbered_log import source_of, write_log
from tests.fleet.sparse_servers import ADAGRAD, plain_layout

PER_PROCESS = 10_000
BURST = 32
"""Cases between two questions whether the servers still serve."""
HANGS_AFTER_S = 60.0
"""A burst takes some milliseconds."""
MAX_GROWTH_BYTES = 400 << 20
"""Memory that a process may take more than after its first burst."""
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 63, 2**31, 2**53 + 1, 2**62, 2**63, 2**64, 10**40, 10**400),
    *(0.5, -0.0, 1e-300, 1e300, float("inf"), float("-inf"), float("nan")),
    *("", "x", "t0", "rows", "sum", "trainer-0.0", "\0", "é" * 40, "x" * 5000),
    *([], [0], [-1, -1, -1], [1, 2, 3], [10**30] * 3, ["a"], [[0]], [None] * 3, list(range(3000)), {}, {"a": {"b": []}}),
)
DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


def build_requests() -> dict[str, list[Message]]:
    """Valid requests by server: damage starts from them."""
    ids, one_each = torch.arange(3), {"samples": 1, "length": 1}
    who = {"client": "trainer-0.0"}
    flat = torch.ones(6)
    sparse = [
        Message("lookup", one_each, [ids]),
        Message(
            "lookup",
            {"samples": 2, "keep": True, "batch": 1, **who},
            [torch.zeros(4, dtype=torch.int32), torch.tensor([1, 0, 1, 1, 0, 1], dtype=torch.uint8)],
        ),
        Message("lookup", {"samples": 1, "counts": [-1, 2, 0], "length": 1}, [torch.tensor([1, 0, 1])]),
        Message("update", {**one_each, **who, "number": 1, "step": 1, "lr": 0.1}, [ids, torch.ones(1, 24)]),
        Message("update", {**who, "number": 2, "step": 1, "lr": 0.1, "batch": 1}, [torch.ones(2, 24)]),
        Message("flush", {**who, "sent": 2}),
        Message("read_rows", {"table": "t0", "part": "rows", "start": 0, "stop": 3}),
        Message("read_rows", {"table": "t1", "part": "sum"}, [ids]),
        Message("write_rows", {"table": "t0", "part": "rows", "start": 0}, [torch.ones(2, 8)]),
        Message("snapshot"),
        Message("status"),
    ]
    dense = [
        Message("join", {}, [flat]),
        Message("pull"),
        Message("push", {}, [flat]),
        Message("elastic_average", {"alpha": 0.5}, [flat]),
        Message("average_parameters", {"momentum": 0.5, "lr": 0.5}, [flat]),
        Message("average", {"group": "gradients.0"}, [flat]),
        Message("save_state", {"name": "optimizer"}, [flat]),
        Message("load_state", {"name": "optimizer"}),
        Message("finish", {}, [flat]),
        Message("members", {"names": ["fuzz"]}),
        Message("leave"),
    ]
    request = {
        "name": "trainer-0",
        "incarnation": 1,
        "sequence": 1,
        "num_wanted": 2,
        "held": [],
        "done": [0],
        "last_state": "reading",
    }
    reader = [
        Message("request_batches", request),
        Message("request_batches", {**request, "name": "trainer-1", "held": [0, 1], "is_leaving": True}),
        Message("members", {"names": ["trainer-0", "trainer-1"]}),
        Message("status"),
    ]
    return {"sparse": sparse, "dense": dense, "reader": reader}


def odd_tensor(draw: random.Random) -> Tensor:
    """A small tensor of any type and shape, with numbers that are not expected."""
    shape = [draw.choice((0, 1, 2, 3, 6, 24)) for _ in range(draw.choice((0, 1, 1, 1, 2, 2, 3)))]
    numbers = torch.tensor(
        [draw.choice((0, 1, -1, 2, 49, 50, 127, 2**31 - 1)) for _ in range(torch.Size(shape).numel())]
    ).reshape(shape)
    tensor = numbers.to(draw.choice(DTYPES))
    if tensor.is_floating_point() and tensor.numel() and draw.random() < 0.3:
        tensor.view(-1)[0] = draw.choice((float("nan"), float("inf"), -float("inf")))
    return tensor


def make_up(message: Message, draw: random.Random) -> Message:
    """Another message, whose fields and tensors are valid on the wire but not what is expected."""
    facts, tensors = dict(message.facts), list(message.tensors)
    for _ in range(draw.choice((1, 1, 2, 3))):
        kind = draw.randrange(5)
        if kind == 0 and facts:
            facts[draw.choice(list(facts))] = draw.choice(ODD)
        elif kind == 1 and facts:
            del facts[draw.choice(list(facts))]
        elif kind == 2:
            facts[
                draw.choice(
                    (
                        "samples",
                        "length",
                        "counts",
                        "weighted",
                        "keep",
                        "batch",
                        "number",
                        "held",
                        "done",
                        "lr",
                        "start",
                        "stop",
                    )
                )
            ] = draw.choice(ODD)
        elif kind == 3 and tensors:
            tensors[draw.randrange(len(tensors))] = odd_tensor(draw)
        else:
            tensors = [*tensors, odd_tensor(draw)] if draw.random() < 0.5 else tensors[:-1]
    return Message(message.kind, facts, tensors)


def damage(frames: list[bytes], draw: random.Random) -> list[bytes]:
    """Other frames than were encoded."""
    frames = list(frames)
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.choice((0, 0, 0, draw.randrange(len(frames))))
        frame = bytearray(frames[at])
        kind = draw.randrange(9)
        where = draw.randrange(len(frame)) if frame else 0
        if kind == 0 and frame:
            frame[where] ^= 1 << draw.randrange(8)
        elif kind == 1:
            frame[where : where + draw.choice((1, 2, 4, 8))] = draw.randbytes(draw.choice((1, 2, 4, 8)))
        elif kind == 2:
            del frame[where:]
        elif kind == 3:
            frame[where:where] = draw.randbytes(draw.choice((1, 8, 300)))
        elif kind == 4 and at == 0 and len(frame) >= HEADER_BYTES:  # sizes and counts of the header
            offset, layout = draw.choice(
                ((4, "<H"), (6, "<B"), (8, "<Q"), (16, "<Q"), (24, "<Q"), (32, "<I"), (36, "<I"), (40, "<Q"))
            )
            most = 2 ** (8 * struct.calcsize(layout)) - 1
            struct.pack_into(
                layout, frame, offset, min(most, draw.choice((0, 1, 2, 3, 100, 2**20, 2**31, 2**32 - 1, 2**63, most)))
            )
        elif kind == 5 and at == 0 and len(frame) > HEADER_BYTES + 10:  # dtype, dimensions, shape
            frame[HEADER_BYTES + draw.randrange(10)] = draw.choice((0, 1, 8, 9, 10, 127, 255))
        elif kind == 6:
            frames.insert(draw.randrange(len(frames) + 1), draw.choice((b"", b"more", bytes(frame))))
            continue
        elif kind == 7 and len(frames) > 1:
            del frames[draw.randrange(1, len(frames))]
            continue
        elif kind == 8:
            facts = draw.choice(
                (
                    b"[1,2]",
                    b"{",
                    b"[" * 5000,
                    b'{"a":1e999}',
                    b"null",
                    b"\xff" * 9,
                    b"9" * 5000,
                    b'{"a":NaN}',
                    b'{"a":"\\ud800"}',
                )
            )
            frame = frame[:HEADER_BYTES] + facts
            if len(frame) >= HEADER_BYTES:
                struct.pack_into("<I", frame, 32, len(facts))
        frames[min(at, len(frames) - 1)] = bytes(frame)
    return frames


class Tracebacks(logging.Handler):
    """Records what servers log: a traceback is a bug, a warning may be right."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.found.append(self.format(record))


class Fuzzer:
    """Runs cases by number, inside a `with`; the same number sends the same frames, though servers also know earlier cases."""

    def __init__(self, folder: Path) -> None:
        self._requests = build_requests()
        self.outcomes: Counter[str] = Counter()
        self._stack = contextlib.ExitStack()
        shard = TableShard(plain_layout(50, 50, 50), ADAGRAD)
        source = source_of(write_log(folder / "log", 500))
        self._servers: dict[str, Server] = {
            "sparse": SparseServer(shard, name="sparse", snapshots=folder / "sparse"),
            "dense": DenseServerProcess(name="dense", round_deadline_s=0.05),
            "reader": build_reader_server(source, folder, 0, num_readers=1, batch_size=10, epochs=1000),
        }
        self._log = Tracebacks()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self.clients: dict[str, Client] = {}
        self._batch = pack(next(iter(source.batches(10)))[0])
        self._rss_bytes = 0

    def __enter__(self) -> Fuzzer:
        logging.getLogger("rowstead.fleet").addHandler(self._log)
        self._stack.callback(logging.getLogger("rowstead.fleet").removeHandler, self._log)
        self._stack.callback(self._context.term)
        for name, server in self._servers.items():
            self._stack.callback(server.close)
            server.start()
            self.clients[name] = self._stack.enter_context(Client(server.address, name="good", deadline_s=HANGS_AFTER_S))
            self._connect(name)
        return self

    def __exit__(self, *_: object) -> None:
        for socket in self._sockets.values():
            socket.close(0)
        self._stack.close()

    def run(self, case: int) -> None:
        """Raise an AssertionError if a case does not end as it must; what servers do with theirs is seen in `settle`."""
        draw = random.Random(case)
        what = ("sparse", "dense", "reader", "decode", "reply", "batch")[case % 6]
        if what == "batch":
            self._unpack(case, draw)
            return
        message = draw.choice(self._requests[what if what in self._requests else draw.choice(("sparse", "dense", "reader"))])
        if is_made_up := draw.random() < 0.5:
            message = make_up(message, draw)
        role = REPLY if what == "reply" else REQUEST
        # Clients whose requests run are few: a server keeps the replies of each.
        sent = encode(
            message, role=role, number=case + 1, sender=draw.randrange(1, 4), name="fuzz", answered_below=max(0, case - 500)
        )
        frames = [bytes(frame) for frame in sent]
        if not is_made_up or draw.random() < 0.1:
            frames = damage(frames, draw)
        if what in ("decode", "reply"):
            self._decode(case, frames)
        else:
            self._send(what, frames)

    def _decode(self, case: int, frames: list[bytes]) -> None:
        """Decode frames, as servers and clients do before anything else."""
        limits = (
            Limits(facts_bytes=1 << 16, num_tensors=8, frame_bytes=1 << 16, message_bytes=1 << 17)
            if case % 4
            else DEFAULT_LIMITS
        )
        try:
            message = decode(decode_header(frames[0], limits), frames[0], [bytearray(frame) for frame in frames[1:]])
        except WireError:
            self.outcomes["refused"] += 1
            return
        except Exception as error:
            raise AssertionError(f"case {case} ended with a traceback") from error
        num_bytes = sum(tensor.nbytes for tensor in message.tensors)
        assert num_bytes <= sum(map(len, frames)), f"case {case} became {num_bytes:,} bytes"
        self.outcomes["decoded"] += 1

    def _unpack(self, case: int, draw: random.Random) -> None:
        """Unpack a batch as a trainer does."""
        made_up = make_up(Message("batch", self._batch.facts, self._batch.tensors), draw)
        try:
            batch = unpack(made_up.facts, made_up.tensors)
        except WireError:
            self.outcomes["batch refused"] += 1
            return
        except Exception as error:
            raise AssertionError(f"case {case} ended with a traceback: {made_up}") from error
        assert isinstance(batch, Batch)
        self.outcomes["batch unpacked"] += 1

    def _connect(self, name: str) -> None:
        if name in self._sockets:
            self._sockets[name].close(0)
        socket = self._sockets[name] = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.connect(self._servers[name].address)

    def _send(self, name: str, frames: list[bytes]) -> None:
        self._sockets[name].send_multipart(frames)
        self.outcomes["sent"] += 1

    def settle(self, case: int) -> None:
        """Read the answers so far, and check that every server still serves, logs no traceback, and takes no more memory."""
        faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
        for name, client in self.clients.items():
            assert client.call("status").facts["name"], f"{name} does not answer after case {case}"
            while self._sockets[name].poll(0):
                first = self._sockets[name].recv_multipart()[0]
                role = decode_header(first, DEFAULT_LIMITS).role
                self.outcomes["answered by an error" if role == ERROR else "answered"] += 1
        faulthandler.cancel_dump_traceback_later()
        assert not self._log.found, f"a traceback until case {case}:\n{self._log.found[0]}"
        rss_bytes = psutil.Process().memory_info().rss
        self._rss_bytes = self._rss_bytes or rss_bytes
        assert rss_bytes < self._rss_bytes + MAX_GROWTH_BYTES, f"{rss_bytes - self._rss_bytes:,} bytes more after case {case}"


def run_cases(folder: Path, start: int, stop: int) -> Counter[str]:
    """Run cases in this process."""
    with Fuzzer(folder) as fuzzer:
        for case in range(start, stop):
            fuzzer.run(case)
            if case % BURST == BURST - 1 or case == stop - 1:
                print(case, file=sys.stderr, flush=True)
                fuzzer.settle(case)
        return fuzzer.outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--here", action="store_true", help="in this process")
    options = parser.parse_args()
    stop, began_s, num_failed = options.start + options.cases, time.monotonic(), 0
    if options.here:
        with tempfile.TemporaryDirectory() as folder:
            print(dict(run_cases(Path(folder), options.start, stop)))
        return 0
    for start in range(options.start, stop, PER_PROCESS):
        count = min(PER_PROCESS, stop - start)
        command = [sys.executable, "-m", "tests.fleet.fuzz_frames", "--here", "--start", str(start), "--cases", str(count)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        print(f"{start + count - options.start:,} cases, {time.monotonic() - began_s:.0f} s: {done.stdout.strip()}", flush=True)
        if done.returncode:
            num_failed += 1
            print(f"failed ({done.returncode}): {done.stderr.strip()[-3000:]}", flush=True)
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
