"""Checkpoints move: whatever the processes and the pieces that saved one, any others load it, bit for bit."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rowstead.distributed.process_group import ProcessGroup
from rowstead.spec.errors import CheckpointError
from rowstead.stores.state import StatePart, load_parts, part_of
from rowstead.training.checkpoint import Checkpoint, load, load_latest, save
from rowstead.training.checkpoint_manifest import MANIFEST, MANIFEST_DIGEST, digest_line
from rowstead.training.saved_tensors import StoreTensors
from tests.distributed.cuts import Cut, cuts
from tests.distributed.thread_process_group import ThreadProcessGroup, in_threads

Result = TypeVar("Result")
Parts = dict[str, list[Cut]]
"""By tensor, the pieces that a process has of it."""
SHAPES = {"user.rows": (101, 6), "user.sum": (101, 1), "item.rows": (40, 6), "item.sum": (40, 1)}


def in_processes(world_size: int, work: Callable[[ProcessGroup], Result]) -> list[Result | Exception]:
    """What `work(channel)` returned, or raised, in each process of a job; they are threads here."""

    def one(process_group: ThreadProcessGroup) -> Result | Exception:
        try:
            return work(process_group)
        except CheckpointError as error:
            return error

    return in_threads(world_size, one)


def tables(seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def parts_of(tensors: dict[str, Tensor], pieces: Parts, *, copies: Sequence[str] = ()) -> list[StatePart]:
    """Parts that share the memory of whole tensors."""
    return [
        dataclasses.replace(
            part_of(name, tensors[name][a:b, c:d]),
            shape=(tensors[name].shape[0], tensors[name].shape[1]),
            first_row=a,
            first_column=c,
            is_copy=name in copies,
        )
        for name, cuts_of in pieces.items()
        for a, b, c, d in cuts_of
    ]


def row_wise(rank: int, world_size: int) -> Parts:
    return {
        name: [(rank * rows // world_size, (rank + 1) * rows // world_size, 0, width)] for name, (rows, width) in SHAPES.items()
    }


def table_wise(rank: int, world_size: int) -> Parts:
    return {
        name: [(0, rows, 0, width)]
        for name, (rows, width) in SHAPES.items()
        if ["user", "item"].index(name.split(".")[0]) % world_size == rank
    }


def column_wise(rank: int, world_size: int) -> Parts:
    """Columns of the rows; what the optimizer keeps once a row is with each process."""
    return {
        name: [(0, rows, rank * width // world_size, (rank + 1) * width // world_size)]
        if name.endswith("rows")
        else [(0, rows, 0, width)]
        for name, (rows, width) in SHAPES.items()
    }


def save_in(folder: Path, world_size: int, cut: Callable[[int, int], Parts], **more: Any) -> list[Path | Exception]:
    source, dense = tables(), {"net.bias": torch.arange(3.0), "net.scale": torch.tensor(2)}

    def work(process_group: ProcessGroup) -> Path:
        copies = [name for name in SHAPES if cut is column_wise and name.endswith("sum") and process_group.rank]
        parts = parts_of(source, cut(process_group.rank, world_size), copies=copies)
        return save(folder, 7, dense, {"rank": process_group.rank}, keep=2, parts=parts, process_group=process_group, **more)

    return in_processes(world_size, work)


@pytest.mark.parametrize("saved_by", [(4, row_wise), (2, table_wise), (3, column_wise), (1, row_wise)])
@pytest.mark.parametrize("loaded_by", [(1, row_wise), (2, table_wise), (3, column_wise), (3, row_wise)])
def test_any_processes_load_what_any_others_saved(
    tmp_path: Path, saved_by: tuple[int, Callable[..., Parts]], loaded_by: tuple[int, Callable[..., Parts]]
) -> None:
    paths = save_in(tmp_path, *saved_by, shard_bytes=500)
    assert paths == [tmp_path / "step-000000007"] * saved_by[0]
    world_size, cut = loaded_by
    into = {name: torch.zeros(shape) for name, shape in SHAPES.items()}

    def work(process_group: ProcessGroup) -> Checkpoint:
        found = load_latest(tmp_path, pytest.fail, process_group=process_group)
        load_parts(parts_of(into, cut(process_group.rank, world_size)), StoreTensors(found.tensors))
        return found

    for found in in_processes(world_size, work):
        assert isinstance(found, Checkpoint), found
        assert (found.step, found.facts) == (7, {"rank": 0})
        assert torch.equal(found.tensors["net.bias"], torch.arange(3.0))
        assert found.tensors["net.scale"] == 2
    assert all(torch.equal(into[name], value) for name, value in tables().items())


@settings(max_examples=25, deadline=None)
@given(
    data=st.data(),
    num_rows=st.integers(1, 30),
    width=st.integers(1, 6),
    world_size=st.integers(1, 3),
    shard_bytes=st.integers(40, 400),
)
def test_any_rectangle_is_read_from_any_pieces(
    data: st.DataObject, num_rows: int, width: int, world_size: int, shard_bytes: int
) -> None:
    table = torch.arange(num_rows * width).reshape(num_rows, width)
    pieces = data.draw(cuts(num_rows, width))
    owners = [data.draw(st.integers(0, world_size - 1)) for _ in pieces]
    rows = sorted(data.draw(st.integers(0, num_rows)) for _ in range(2))
    columns = sorted(data.draw(st.integers(0, width)) for _ in range(2))
    with tempfile.TemporaryDirectory() as temporary:

        def work(process_group: ProcessGroup) -> Path:
            own = [piece for piece, owner in zip(pieces, owners, strict=True) if owner == process_group.rank]
            parts = parts_of({"t.rows": table}, {"t.rows": own})
            return save(Path(temporary), 1, {}, {}, keep=1, shard_bytes=shard_bytes, parts=parts, process_group=process_group)

        path = in_processes(world_size, work)[0]
        assert isinstance(path, Path), path
        saved = load(path).tensors
        assert torch.equal(saved.rows("store.t.rows", *rows, *columns), table[slice(*rows), slice(*columns)])
        assert torch.equal(saved["store.t.rows"], table)


def failing(error: Exception) -> Callable[[int, int], Tensor]:
    def read(start: int, stop: int) -> Tensor:
        raise error

    return read


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), r"disk full while saving step 8 .*needs .* KB, free"),
        (RuntimeError("the bus is gone"), r"cannot save step 8 .*RuntimeError: the bus is gone \(process 2\)"),
    ],
)
def test_if_one_process_fails_all_fail_with_the_same_error_and_nothing_is_left(
    tmp_path: Path, error: Exception, text: str
) -> None:
    first = save_in(tmp_path, 3, row_wise)[0]

    def work(process_group: ProcessGroup) -> Path:
        parts = parts_of(tables(), row_wise(process_group.rank, 3))
        if process_group.rank == 2:
            parts[1] = StatePart(**{**vars(parts[1]), "read": failing(error)})
        return save(tmp_path, 8, {}, {}, keep=2, parts=parts, process_group=process_group)

    results = in_processes(3, work)
    assert all(isinstance(one, CheckpointError) for one in results), results
    assert len({str(one) for one in results}) == 1
    with pytest.raises(CheckpointError, match=text + rf".*last valid checkpoint is {first}"):
        raise results[0]  # type: ignore[misc]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000007"]


def test_pieces_that_do_not_cover_a_tensor_are_not_saved(tmp_path: Path) -> None:
    def work(process_group: ProcessGroup) -> Path:
        return save(
            tmp_path, 8, {}, {}, keep=2, parts=parts_of(tables(), row_wise(process_group.rank, 3)), process_group=process_group
        )

    results = in_processes(2, work)
    assert all("pieces of `tensors.store.user.rows` have" in str(one) for one in results), results
    assert not list(tmp_path.iterdir())


def test_a_file_that_any_process_finds_damaged_is_refused_by_all(tmp_path: Path) -> None:
    path = save_in(tmp_path, 3, row_wise)[0]
    assert isinstance(path, Path)
    for file in sorted(path.glob("*.safetensors")):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        results = in_processes(2, lambda process_group: load(path, process_group=process_group))
        assert [f"{file.name} does not match its digest" in str(one) for one in results] == [True, True]
        file.write_bytes(content)


def edited(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A checkpoint with another manifest, whose digest is right."""
    manifest = json.loads((path / MANIFEST).read_text())
    change(manifest)
    text = json.dumps(manifest).encode()
    (path / MANIFEST).write_bytes(text)
    (path / MANIFEST_DIGEST).write_bytes(digest_line(text))
    return path


def test_a_piece_that_is_missing_is_noticed_before_anything_is_read(tmp_path: Path) -> None:
    path = save_in(tmp_path, 4, row_wise)[0]
    assert isinstance(path, Path)
    edited(path, lambda manifest: manifest["tensors"]["store.user.rows"]["pieces"].pop(2))
    with pytest.raises(CheckpointError, match=r"pieces of `tensors\.store\.user\.rows` have 456 of its 606 elements"):
        load(path)


def test_the_first_format_is_still_read(tmp_path: Path) -> None:
    tensors = {"store.user.rows": torch.randn(50, 4), "net.bias": torch.randn(3), "optimizer.0.step": torch.tensor(5.0)}
    path = save(tmp_path, 3, tensors, {"a": 1}, keep=1, shard_bytes=200)

    def as_first(manifest: dict[str, Any]) -> None:
        assert all(len(piece) == 3 for entry in manifest["tensors"].values() for piece in entry["pieces"])
        manifest["format"] = 1

    found = load(edited(path, as_first))
    assert (found.step, found.facts, found.base) == (3, {"a": 1}, None)
    assert all(torch.equal(found.tensors[name], value) for name, value in tensors.items())


LARGE = """
import sys, torch
from pathlib import Path
from rowstead.records.usage import peak_memory_bytes
from rowstead.stores.state import StatePart, load_parts
from rowstead.training.checkpoint import load, save
from rowstead.training.saved_tensors import StoreTensors

def values(start, stop):
    return torch.arange(start, stop, dtype=torch.float32)[:, None].expand(-1, 16)

def write(start, given):
    assert torch.equal(given, values(start, start + len(given)))

rows = 2_500_000
part = StatePart(name="t.rows", shape=(rows, 16), dtype=torch.float32, num_rows=rows, num_columns=16, read=values, write=write, take=print)
save(Path(sys.argv[1]), 1, {"t": torch.ones(1)}, {}, keep=1)
before = peak_memory_bytes()
path = save(Path(sys.argv[1]), 2, {}, {}, keep=1, shard_bytes=30 << 20, parts=[part])
load_parts([part], StoreTensors(load(path).tensors))
print(peak_memory_bytes() - before)
"""


def test_a_table_that_is_nowhere_in_memory_is_saved_and_loaded_within_little(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LARGE, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 110e6  # the table has 160 MB
