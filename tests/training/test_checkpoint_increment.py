"""Incremental checkpoints hold the rows that were touched, and restore everything."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rowstead.data.batch import Sparse
from rowstead.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from rowstead.spec.errors import CheckpointError
from rowstead.spec.features import Table
from rowstead.spec.train import CheckpointFormat, TrainSpec
from rowstead.stores.state import load_parts
from rowstead.training.checkpoint import checkpoints_in, load, load_latest, save
from rowstead.training.checkpoint_files import ENCODINGS
from rowstead.training.checkpoint_increment import CheckpointChanges
from rowstead.training.saved_tensors import StoreTensors
from rowstead.training.touched import RowBitmap, TouchedRows, num_bytes
from tests.training.test_checkpoint_pieces import SHAPES, Parts, column_wise, in_processes, parts_of, row_wise, table_wise

USER = Table(name="user", num_rows=101, width=6, features=(0, 2))
ITEM = Table(name="item", num_rows=40, width=6, features=(1,))


def sparse_of(user: list[int], item: list[int], dtype: torch.dtype = torch.int64) -> Sparse:
    """One example with all those ids; those of `user` in its two features."""
    ids = [*user[::2], *item, *user[1::2]]
    offsets = [0, len(user[::2]), len(user[::2]) + len(item), len(ids)]
    return Sparse(ids=torch.tensor(ids, dtype=dtype), offsets=torch.tensor(offsets), num_features=3)


def bits_of(num_rows: int, rows: set[int]) -> NDArray[np.uint8]:
    flags = np.zeros(8 * num_bytes(num_rows), dtype=np.uint8)
    flags[list(rows)] = 1
    return np.packbits(flags, bitorder="little")


@settings(max_examples=100, deadline=None)
@given(data=st.data(), num_rows=st.sampled_from([1, 7, 8, 9, 1000, 32_768, 32_769, 100_000]))
def test_the_bits_of_a_table_are_a_set_of_rows_in_order(data: st.DataObject, num_rows: int) -> None:
    rows = data.draw(st.sets(st.integers(0, num_rows - 1), max_size=40))
    bits, order = RowBitmap(num_rows, bits_of(num_rows, rows)), sorted(rows)
    start, stop = sorted(data.draw(st.integers(0, num_rows)) for _ in range(2))
    first, last = sorted(data.draw(st.integers(0, len(rows))) for _ in range(2))
    assert bits.count == len(rows)
    assert bits.position(start) == sum(row < start for row in rows)
    assert bits.between(start, stop).tolist() == [row for row in order if start <= row < stop]
    assert bits.at(first, last).tolist() == order[first:last]


@settings(max_examples=50, deadline=None)
@given(data=st.data(), dtype=st.sampled_from([torch.int32, torch.int64]), world_size=st.integers(1, 3))
def test_every_row_that_any_process_saw_is_touched_and_no_other(
    data: st.DataObject, dtype: torch.dtype, world_size: int
) -> None:
    user, item = st.lists(st.integers(0, 100), max_size=9), st.lists(st.integers(0, 39), max_size=9)
    batches = [[(data.draw(user), data.draw(item)) for _ in range(2)] for _ in range(world_size)]

    def work(process_group: ProcessGroup) -> list[list[int]]:
        touched = TouchedRows([USER, ITEM])
        touched.mark(sparse_of([100], [39], dtype))
        touched.clear()
        for batch in batches[process_group.rank]:
            touched.mark(sparse_of(*batch, dtype))
        touched.merge(process_group)
        return [touched.rows_of(table).between(0, table.num_rows).tolist() for table in (USER, ITEM)]

    every = [sorted({row for own in batches for batch in own for row in batch[table]}) for table in (0, 1)]
    assert in_processes(world_size, work) == [every] * world_size


def test_ids_out_of_range_touch_no_rows() -> None:
    touched = TouchedRows([USER, ITEM])
    touched.mark(sparse_of([101, -1, 2**40], [40, -(2**60)]))
    assert [touched.rows_of(table).count for table in (USER, ITEM)] == [0, 0]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), width=st.integers(1, 40), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_int8_rows_come_back_within_half_a_step_of_their_spread(data: st.DataObject, width: int, dtype: torch.dtype) -> None:
    rows = torch.randn(5, width, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))).to(dtype)
    rows[0] = 3.0
    stored = ENCODINGS["int8"].encode(rows)
    assert stored.shape == (5, width + 8)
    assert stored.dtype == torch.uint8
    back = ENCODINGS["int8"].decode(stored).to(dtype)
    spread = (rows.amax(1) - rows.amin(1)).double()
    coarse = torch.finfo(dtype if dtype != torch.float64 else torch.float32).eps * 4 * rows.abs().amax(1).double()
    assert ((back.double() - rows.double()).abs().amax(1) <= spread / 255 / 2 + coarse).all()
    assert torch.equal(back[0], rows[0])


def test_fp16_rows_come_back_rounded_and_never_infinite() -> None:
    rows = torch.tensor([[1.0, 1e6], [-1e9, 0.1]])
    back = ENCODINGS["fp16"].decode(ENCODINGS["fp16"].encode(rows))
    assert back.tolist() == [[1.0, 65504.0], [-65504.0, float(torch.tensor(0.1).half())]]


class Run:
    """A run's tables and checkpoints without its training: steps change a few rows."""

    def __init__(self, folder: Path, every: int, encoding: CheckpointFormat = "exact") -> None:
        self.folder = folder
        self.spec = TrainSpec(full_checkpoint_every=every, checkpoint_format=encoding)
        self.tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
        self.changes = CheckpointChanges(self.spec, [USER, ITEM])
        self.step = 0

    def train(self, user: list[int], item: list[int]) -> None:
        self.step += 1
        self.changes.mark(sparse_of(user, item))
        for name, value in self.tensors.items():
            value[user if name.startswith("user") else item] += 1.0

    def save(self, keep: int = 2, process_group: ProcessGroup = SINGLE_PROCESS, pieces: Parts | None = None) -> Path:
        whole = {name: [(0, rows, 0, width)] for name, (rows, width) in SHAPES.items()}
        parts = parts_of(self.tensors, whole if pieces is None else pieces)
        increment = self.changes.next(self.folder, process_group)
        dense = {"net.step": torch.tensor(self.step)}
        path = save(self.folder, self.step, dense, {}, keep=keep, parts=parts, increment=increment, process_group=process_group)
        self.changes.saved(path, increment)
        return path

    def goes_on_from(self, path: Path) -> Run:
        """Another run, as after a resume from a checkpoint."""
        other = Run(self.folder, self.spec.full_checkpoint_every, self.spec.checkpoint_format)
        found = load(path)
        other.tensors = {name: found.tensors[f"store.{name}"] for name in SHAPES}
        other.changes = CheckpointChanges(other.spec, [USER, ITEM], found)
        other.step = found.step
        return other

    def assert_same(self, path: Path) -> None:
        saved = load(path).tensors
        assert list(saved) == ["net.step", *(f"store.{name}" for name in SHAPES)]
        assert saved["net.step"] == self.step
        for name, value in self.tensors.items():
            assert saved.shape(f"store.{name}") == tuple(value.shape)
            assert torch.equal(saved[f"store.{name}"], value), name
            assert torch.equal(saved.rows(f"store.{name}", 3, 30, 0, 1), value[3:30, :1]), name


rows_touched = st.tuples(
    st.lists(st.integers(0, 100), max_size=6, unique=True), st.lists(st.integers(0, 39), max_size=6, unique=True)
)


@settings(max_examples=12, deadline=None)
@given(steps=st.lists(rows_touched, min_size=1, max_size=7), every=st.integers(2, 4), resumes=st.booleans())
def test_what_is_restored_is_what_was_saved_also_after_resuming(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[list[int], list[int]]], every: int, resumes: bool
) -> None:
    run = Run(tmp_path_factory.mktemp("run"), every)
    run.save()
    for number, step in enumerate(steps, start=1):
        run.train(*step)
        path = run.save()
        run.assert_same(path)
        assert (load(path).base is None) == (number % every == 0)
        assert load(path).number == number % every
        run = run.goes_on_from(path) if resumes else run
    shutil.rmtree(run.folder)


def test_an_increment_holds_only_the_touched_rows(tmp_path: Path) -> None:
    run = Run(tmp_path, 3)
    run.save()
    run.train([5, 70], [0])
    first = run.save()
    run.train([5, 99], [39])
    second = run.save()
    assert [load(path).tensors._increment.shape("store.user.rows") for path in (first, second)] == [(2, 6), (3, 6)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("saved_by", [(4, row_wise), (2, table_wise), (3, column_wise)])
@pytest.mark.parametrize("encoding", ["exact", "int8"])
def test_increments_move_between_processes_too(
    tmp_path: Path, saved_by: tuple[int, Callable[[int, int], Parts]], encoding: CheckpointFormat
) -> None:
    world_size, cut = saved_by
    run = Run(tmp_path, 3, encoding)
    run.save()
    batches = [([1 + 9 * rank, 100 - rank], [rank]) for rank in range(world_size)]
    before = {name: value.clone() for name, value in run.tensors.items()}
    for batch in batches:
        run.train(*batch)

    def work(process_group: ProcessGroup) -> Path:
        """Each process has seen only its own share of the ids, and has its own pieces."""
        own = run.goes_on_from(tmp_path / "step-000000000")
        own.changes.mark(sparse_of(*batches[process_group.rank]))
        own.tensors, own.step = run.tensors, 1
        pieces = cut(process_group.rank, world_size)
        if cut is column_wise and process_group.rank:
            pieces = {name: cuts for name, cuts in pieces.items() if name.endswith("rows")}
        return own.save(process_group=process_group, pieces=pieces)

    paths = in_processes(world_size, work)
    assert paths == [tmp_path / "step-000000001"] * world_size
    path = tmp_path / "step-000000001"
    assert load(path).base == "step-000000000"
    into = {name: torch.zeros(shape) for name, shape in SHAPES.items()}

    def read(process_group: ProcessGroup) -> None:
        load_parts(
            parts_of(into, row_wise(process_group.rank, 3)), StoreTensors(load(path, process_group=process_group).tensors)
        )

    assert in_processes(3, read) == [None] * 3
    for name, value in run.tensors.items():
        if encoding == "exact" or name.endswith("sum"):
            assert torch.equal(into[name], value), name
        else:
            torch.testing.assert_close(into[name], value, atol=0.02, rtol=0)
            untouched = (value == before[name]).all(1)
            assert torch.equal(into[name][untouched], value[untouched])


def test_a_full_checkpoint_is_kept_as_long_as_a_kept_one_needs_it(tmp_path: Path) -> None:
    run = Run(tmp_path, 4)
    names = []
    for step in range(10):
        run.save(keep=2)
        names.append([int(path.name[5:]) for path in checkpoints_in(tmp_path)])
        run.train([step], [step])
    assert names == [[0], [0, 1], [0, 1, 2], [0, 2, 3], [0, 3, 4], [4, 5], [4, 5, 6], [4, 6, 7], [4, 7, 8], [8, 9]]


def damage(path: Path) -> None:
    shard = next(path.glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size - 1)


@pytest.mark.parametrize(
    ("damaged", "left", "reported"),
    [
        ([6], 5, ["step-000000006 is damaged"]),
        ([4], 3, ["step-000000006 needs the full checkpoint step-000000004, and", "step-000000005 needs", "step-000000004 is damaged"]),
        ([4, 3], 2, ["step-000000006 needs", "step-000000005 needs", "step-000000004 is", "step-000000003 is damaged"]),
        ([4, 0], None, []),
    ],
)  # fmt: skip
def test_a_damaged_base_or_increment_falls_back_to_the_newest_that_can_be_restored(
    tmp_path: Path, damaged: list[int], left: int | None, reported: list[str]
) -> None:
    run = Run(tmp_path, 4)
    states = []
    for step in range(7):
        run.save(keep=10)
        states.append({name: value.clone() for name, value in run.tensors.items()})
        run.train([step], [step])
    for step in damaged:
        damage(tmp_path / f"step-{step:09d}")
    messages: list[str] = []
    if left is None:
        with pytest.raises(CheckpointError, match=r"(?s)no checkpoint in .* is usable.*000000006 needs.*000000000 is damaged"):
            load_latest(tmp_path, messages.append)
        return
    found = load_latest(tmp_path, messages.append)
    assert found.step == left
    assert all(torch.equal(found.tensors[f"store.{name}"], value) for name, value in states[left].items())
    assert len(messages) == len(reported)
    assert all(
        part in message and "trying the previous one" in message for part, message in zip(reported, messages, strict=True)
    )
    again = run.goes_on_from(found.path)
    again.train([50], [20])
    again.assert_same(again.save(keep=10))


def test_a_base_that_was_replaced_by_another_is_refused(tmp_path: Path) -> None:
    run, other = Run(tmp_path / "run", 4), Run(tmp_path / "other", 4)
    base = run.save()
    run.train([1], [1])
    path = run.save()
    shutil.rmtree(base)
    shutil.copytree(other.save(), base)
    with pytest.raises(CheckpointError, match=r"needs the full checkpoint .*is not the expected one"):
        load(path)
    shutil.rmtree(base)
    with pytest.raises(CheckpointError, match=r"needs the full checkpoint .* there is no checkpoint at"):
        load(path)
    run.train([2], [2])
    assert load(run.save()).base is None
