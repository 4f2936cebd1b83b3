"""Snapshots of servers and positions of readers from anybody are refused unless they are whole, and say what to do."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from rowstead.fleet.batch_assignments import BatchAssignments, Holder, parse_log
from rowstead.fleet.build import dense_file, read_dense
from rowstead.fleet.dense_server import DenseServerProcess, encode_snapshot
from rowstead.fleet.dense_server_state import DenseServerState
from rowstead.fleet.role_usage import UsageReader
from rowstead.fleet.snapshot import MANIFEST
from rowstead.fleet.sparse_server import AppliedUpdates
from rowstead.spec.errors import CheckpointError
from tests.fleet.sparse_servers import plain_layout
from tests.fleet.test_snapshot import Trained

LAYOUT = plain_layout(20)
MAGIC = b"RSTDROW1"
Attack = Callable[[Path], Any]


def encode_header(**header: Any) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(4, "little") + text


def block(first: Any = None, rows: tuple[int, ...] = (), num: Any = None, **changes: Any) -> bytes:
    """Rows of the table in a block of zeros with the right checksum."""
    count = len(rows) if rows else 20
    data = (np.array(rows, np.int64).tobytes() if rows else b"") + bytes(3 * count * 8 * 8)
    header = {"table": "t0", "count": count if num is None else num, "crc": zlib.crc32(data)}
    if not rows:
        header["first"] = first
    return encode_header(**{**header, **changes}) + data


def row_file(*blocks: bytes, rows: Any = 20, magic: bytes = MAGIC, tail: bytes = b"") -> Attack:
    return lambda folder: (folder / "full-000001.rows").write_bytes(magic + b"".join(blocks) + encode_header(rows=rows) + tail)


def field(key: str, value: Any) -> Attack:
    def attack(folder: Path) -> None:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        manifest[key] = value
        (folder / MANIFEST).write_text(json.dumps(manifest))

    return attack


def replaced(name: str, make: Callable[[Path], Any]) -> Attack:
    def attack(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return attack


ATTACKS = {
    "rows in a folder above": (field("full", "../full-000001.rows"), "`full`"),
    "rows in /etc/passwd": (field("full", "/etc/passwd"), "`full`"),
    "rows of a number": (field("touched", 5), "`touched`"),
    "rows missing": (field("full", "full-000009.rows"), "missing"),
    "number true": (field("number", True), "`number`"),
    "number negative": (field("number", -1), "`number`"),
    "number NaN": (field("number", float("nan")), "`number`"),
    "counts a list": (field("counts", []), "`counts`"),
    "tables of others": (field("of", {}), "other tables"),
    "manifest a list": (lambda folder: (folder / MANIFEST).write_text("[]"), "other tables"),
    "manifest nested": (lambda folder: (folder / MANIFEST).write_text("[" * 100_000), "cannot be read"),
    "manifest huge": (lambda folder: os.truncate(folder / MANIFEST, 1 << 40), "cannot be read"),
    "manifest a pipe": (replaced(MANIFEST, os.mkfifo), "a named pipe"),
    "rows a pipe": (replaced("full-000001.rows", os.mkfifo), "a named pipe"),
    "rows a link": (replaced("full-000001.rows", lambda file: file.symlink_to("/dev/zero")), "a symbolic link"),
    "a row twice": (row_file(block(0), block(0), rows=40), "comes twice"),
    "a row twice in a block": (row_file(block(rows=(3, 3)), rows=2), "comes twice"),
    "rows left out": (row_file(block(rows=(3, 2, 1)), rows=3), "missing"),
    "rows beyond the table": (row_file(block(1)), "from `1` on"),
    "rows below 0": (row_file(block(-1)), "from `-1` on"),
    "rows from NaN on": (row_file(block(float("nan"))), "from `nan` on"),
    "rows of huge numbers": (row_file(block(rows=(2**62,)), rows=1), "damaged"),
    "more rows than the table": (row_file(block(0, num=2**40)), "rows of `t0` in one block"),
    "rows true": (row_file(block(0, num=True)), "rows of `t0` in one block"),
    "rows of another table": (row_file(block(0, table="t9")), "unknown table"),
    "rows of a list": (row_file(block(0, table=[])), "unknown table"),
    "more after the end": (row_file(block(0), tail=b"more"), "goes on"),
    "another number of rows": (row_file(block(0), rows="20"), "20 rows"),
    "no blocks": (row_file(rows=0), "missing"),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ATTACKS)
def test_a_crafted_snapshot_of_a_sparse_server_is_refused(tmp_path: Path, name: str) -> None:
    attack, words = ATTACKS[name]
    trained = Trained(LAYOUT, tmp_path)
    trained.shard.touched[:] = 1
    assert trained.snapshots.take().is_full
    attack(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        Trained(LAYOUT, tmp_path).snapshots.restore()
    assert words in str(caught.value)


def test_the_crafted_blocks_are_otherwise_right(tmp_path: Path) -> None:
    trained = Trained(LAYOUT, tmp_path)
    trained.shard.touched[:] = 1
    trained.snapshots.take()
    row_file(block(0))(tmp_path)
    again = Trained(LAYOUT, tmp_path)
    again.snapshots.restore()
    assert all(not tensor.any() for tensor in again.rows())


@pytest.mark.parametrize(
    "content", [None, [], {"a": 1}, {"a": [1]}, {"a": [True, []]}, {"a": [1, [[0]]]}, {"a": [-1, []]}, {"a": ["1", []]}]
)
def test_counts_of_updates_that_are_none_are_refused(content: Any) -> None:
    if content == []:
        content = [1]
    with pytest.raises(CheckpointError, match="counts of a snapshot"):
        AppliedUpdates.from_json(content)


def flat(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def dense_snapshot(**tensors: torch.Tensor) -> bytes:
    return safetensors.torch.save(tensors)


DENSE = {
    "no parameters": lambda file: file.write_bytes(dense_snapshot(**{"saved.a": flat(1)})),
    "parameters of integers": lambda file: file.write_bytes(dense_snapshot(parameters=torch.tensor([1, 2]))),
    "parameters in a matrix": lambda file: file.write_bytes(dense_snapshot(parameters=torch.ones(2, 2))),
    "others of another size": lambda file: file.write_bytes(dense_snapshot(parameters=flat(1), **{"finished.a": flat(1, 2)})),
    "unknown tensors": lambda file: file.write_bytes(dense_snapshot(parameters=flat(1), more=flat(1))),
    "not safetensors": lambda file: file.write_bytes(b"\xff" * 100),
    "empty": lambda file: file.write_bytes(b""),
    "a pipe": os.mkfifo,
    "a link": lambda file: file.symlink_to("/dev/zero"),
    "a link to nothing": lambda file: file.symlink_to("nothing"),
    "huge": lambda file: (file.touch(), os.truncate(file, 1 << 40)),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", DENSE)
def test_a_crafted_snapshot_of_a_dense_server_is_refused(tmp_path: Path, name: str) -> None:
    snapshot = tmp_path / "dense.safetensors"
    DENSE[name](snapshot)
    with pytest.raises(ValueError, match=r"dense server's snapshot.*[Rr]emove it"):
        DenseServerProcess(snapshot=snapshot)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["not safetensors", "empty", "a pipe", "a link", "huge"])
def test_crafted_parameters_of_a_trainer_are_refused(tmp_path: Path, name: str) -> None:
    file = dense_file(tmp_path, 0)
    file.parent.mkdir()
    DENSE[name](file)
    with pytest.raises(CheckpointError, match=r"trainer-0.*Resume the run"):
        read_dense(tmp_path, 0)


def test_a_good_snapshot_of_a_dense_server_is_read(tmp_path: Path) -> None:
    state = DenseServerState()
    state.push(flat(1, 2))
    state.save("optimizer", flat(3))
    snapshot = tmp_path / "dense.safetensors"
    content = encode_snapshot(state)
    assert content is not None
    snapshot.write_bytes(content)
    server = DenseServerProcess(snapshot=snapshot)
    try:
        assert torch.equal(server.state.pull(), flat(1, 2))
    finally:
        server.close()


# Positions of readers, which checkpoints of fleets hold


def log_of(*events: Any, **changes: Any) -> bytes:
    state = BatchAssignments()
    holder = Holder("trainer-0", 0)
    state.assign_next(holder, 64, {"row": 64})
    plain = {**state.to_json(), **changes}
    return b"".join(json.dumps(line).encode() + b"\n" for line in ({"share": {}, "assignments": plain}, *events))


LOGS = {
    "empty": b"\n",
    "nested": b"[" * 100_000 + b"\n",
    "a list": b"[1]\n",
    "a counter negative": log_of(next_number=-1),
    "a counter true": log_of(num_done=True),
    "a counter of text": log_of(num_samples="1"),
    "a counter NaN": log_of(next_epoch=float("nan")),
    "a cursor a number": log_of(next_cursor=3),
    "a cursor negative": log_of(next_cursor={"row": -1}),
    "held without a batch": log_of(held=[[0, "a", 0]]),
    "held at a negative row": log_of(held=[[0, "a", 0, 0, {"row": -1}, 64]]),
    "held by nobody": log_of(held=[[0, None, 0, 0, None, 64]]),
    "held in a list": log_of(held=[[[], "a", 0, 0, None, 64]]),
    "an event unknown": log_of(["run", "rm"]),
    "an event a number": log_of(5),
    "an event empty": log_of([]),
    "an event in a list": log_of([[]]),
    "assigned with a cursor of text": log_of(["assign", "a", 0, 64, "row"]),
    "assigned with negative samples": log_of(["assign", "a", 0, -64, {"row": 0}]),
    "done that is not held": log_of(["done", [9]]),
    "done true": log_of(["done", [True]]),
}


@pytest.mark.parametrize("name", LOGS)
def test_a_readers_position_that_is_none_is_refused(name: str) -> None:
    parse_log(log_of(["assign", "trainer-0", 0, 64, {"row": 128}], ["done", [0]]))
    with pytest.raises(ValueError):
        parse_log(LOGS[name])


def test_usage_samples_that_are_none_are_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "reader-0.jsonl"
    good = b'{"time_s": 1.0, "num_samples": 5}\n'
    file.write_bytes(b'5\n{"time_s": "x"}\n[]\n' + b"[" * 100_000 + b"\n" + good + b'{"time_s": 2.0, "num_samples": "x"}\n')
    usage = UsageReader(file)
    usage.read()
    assert usage.last["time_s"] == 2.0
    assert usage.rate("num_samples") is None
