"""Rows in a file come back as they were written, whatever was written, cleaned or interrupted in between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rowstead.data.batch import Sparse
from rowstead.kernels.cpu import disk
from rowstead.kernels.initial import initial_rows
from rowstead.kernels.layout import Layout, layout_of
from rowstead.spec.caching import GAP_BYTES
from rowstead.spec.errors import RowsteadError
from rowstead.spec.features import FeaturesSpec, SparseFeatureSpec, tables_of
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.stores.cached import CachedStore
from rowstead.stores.device import DeviceStore
from rowstead.stores.groups import CacheGroup, group_tables
from rowstead.stores.ssd import FileRows, initial_rows_of
from tests.stores.store_contract import StoreContract

COLUMNS = [(torch.float32, 6), (torch.float32, 1)]


def counted(rows: Tensor) -> Tensor:
    """Initial numbers that say which row they belong to."""
    return rows.unsqueeze(1) + torch.arange(6) / 8


def made(num_rows: int, columns: Any) -> list[Tensor]:
    return [(torch.randn(num_rows, width) * 8).to(dtype) for dtype, width in columns]


def read(store: FileRows, rows: Tensor) -> list[Tensor]:
    into = [torch.full((len(rows), width), 77, dtype=dtype) for dtype, width in store.columns]
    store.read(rows, into)
    return into


@pytest.fixture(params=["queue", "direct, no queue", "buffered"])
def open_rows(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., FileRows]]:
    """Makes row files for each way to read them, and closes them."""
    opened = []
    if request.param == "direct, no queue":

        def none(depth: int) -> None:
            raise OSError("none here")

        monkeypatch.setattr(disk, "ReadQueue", none)

    def make(num_rows: int, columns: Any = COLUMNS, name: str = "rows", **options: Any) -> FileRows:
        store = FileRows(tmp_path / name, num_rows, columns, direct=request.param != "buffered", **options)
        opened.append(store)
        return store

    yield make
    for store in opened:
        store.close()


@settings(max_examples=25, deadline=None)
@given(
    num_rows=st.integers(1, 400),
    columns=st.sampled_from(
        [
            COLUMNS,
            [(torch.float64, 3)],
            [(torch.bfloat16, 5), (torch.float32, 5), (torch.float32, 5)],
            [(torch.float32, 1100)],
            [(torch.float32, 700), (torch.float32, 700)],
        ]
    ),
    direct=st.booleans(),
    spare=st.sampled_from([1.1, 1.5, 3.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_what_is_read_is_what_was_written_last(
    tmp_path_factory: pytest.TempPathFactory, num_rows: int, columns: Any, direct: bool, spare: float, seed: int
) -> None:
    random, folder = np.random.default_rng(seed), tmp_path_factory.mktemp("rows")
    (dtype, width), *states = columns

    def initial(rows: Tensor) -> Tensor:
        return (rows.unsqueeze(1) + torch.zeros(width)).to(dtype)

    expected = [initial(torch.arange(num_rows)), *(torch.zeros(num_rows, wide, dtype=kind) for kind, wide in states)]
    store = FileRows(folder / "rows", num_rows, columns, initial=initial, direct=direct, spare=spare)
    try:
        for _ in range(random.integers(1, 40)):
            rows = torch.from_numpy(random.permutation(num_rows)[: random.integers(0, num_rows + 1)])
            if random.random() < 0.7:
                values = made(len(rows), columns)
                store.write(rows, values)
                for whole, value in zip(expected, values, strict=True):
                    whole[rows] = value
            else:
                for whole, found in zip(expected, read(store, rows), strict=True):
                    assert torch.equal(found, whole[rows])
        for whole, found in zip(expected, read(store, torch.arange(0, num_rows)), strict=True):
            assert torch.equal(found, whole)
    finally:
        store.close()
    assert not list(folder.iterdir()), "the file is scratch space, and goes"


def test_rows_stay_right_while_segments_are_cleaned(open_rows: Callable[..., FileRows]) -> None:
    num_rows = 20_000
    store = open_rows(num_rows, spare=1.2)
    expected = made(num_rows, COLUMNS)
    store.write(torch.arange(num_rows), expected)
    for turn in range(60):
        torch.manual_seed(turn)
        rows = torch.randperm(num_rows)[:1500]
        values = made(1500, COLUMNS)
        store.write(rows, values)
        for whole, value in zip(expected, values, strict=True):
            whole[rows] = value
        some = torch.randperm(num_rows)[:700]
        assert all(torch.equal(found, whole[some]) for found, whole in zip(read(store, some), expected, strict=True))
    assert store.counts.bytes_cleaned > 0
    assert all(torch.equal(found, whole) for found, whole in zip(read(store, torch.arange(0, num_rows)), expected, strict=True))


def test_rows_that_were_never_written_are_made_and_take_no_disk_space(open_rows: Callable[..., FileRows]) -> None:
    store = open_rows(5_000_000, initial=counted)
    rows = torch.tensor([4_999_999, 3, 3_000_000])
    store.write(rows[1:2], [torch.ones(1, 6), torch.ones(1, 1)])
    values, state = read(store, rows)
    assert torch.equal(values, torch.stack([counted(rows[:1])[0].float(), torch.ones(6), counted(rows[2:])[0].float()]))
    assert state.flatten().tolist() == [0, 1, 0]
    assert os.stat(store.file.path).st_blocks * 512 < 10 << 20
    assert store.counts.rows_read == 0, "what still waits to be written is read from memory"


def test_the_initial_rows_of_a_group_are_those_of_its_tables(tmp_path: Path) -> None:
    features = FeaturesSpec(
        sparse=tuple(SparseFeatureSpec(name=name, num_rows=rows) for name, rows in (("a", 50), ("b", 7), ("c", 90)))
    )
    tables = tables_of(features, width=6)
    assert layout_of(features, tables).tables == tables
    (group,) = group_tables(tables, dict.fromkeys("abc", 5), dtype=torch.float32, optimizer=SparseOptimizerSpec(kind="adagrad"))
    expected = torch.cat([initial_rows(t, seed=3, dtype=torch.float32, device=torch.device("cpu")) for t in tables])
    store = FileRows(tmp_path / "rows", group.num_rows, group.columns, initial=initial_rows_of(group, seed=3))
    rows = torch.randperm(group.num_rows)[:100]
    assert torch.equal(read(store, rows)[0], expected[rows])
    assert torch.equal(read(store, torch.tensor([51]))[0], expected[51:52])
    store.close()


def test_records_go_to_and_come_from_slots(open_rows: Callable[..., FileRows]) -> None:
    store = open_rows(3000, initial=counted)
    cache = [torch.full((50, 6), 77.0), torch.full((50, 1), 77.0)]
    rows, slots = torch.randperm(3000)[:20], torch.randperm(50)[:20]
    store.read(rows, cache, slots)
    assert torch.equal(cache[0][slots], counted(rows).float())
    assert int((cache[1] == 77).sum()) == 30, "other slots stay as they are"
    cache[1][slots] = slots.unsqueeze(1).float()
    store.write(rows, cache, slots)
    assert torch.equal(read(store, rows)[1].flatten(), slots.float())


def test_reads_of_neighbours_are_one(open_rows: Callable[..., FileRows]) -> None:
    num_rows = 50_000
    store = open_rows(num_rows)
    store.write(torch.arange(num_rows), made(num_rows, COLUMNS))
    read(store, torch.arange(0, 20_000))
    assert 0 < store.counts.reads < store.counts.rows_read / 100


def test_threads_may_read_while_others_write(open_rows: Callable[..., FileRows]) -> None:
    num_rows = 5000
    store = open_rows(num_rows, initial=counted)

    def write(thread: int) -> None:
        rows = torch.arange(thread, num_rows, 8)
        for number in range(20):
            store.write(rows, [counted(rows).float() + number, torch.full((len(rows), 1), float(number))])

    def look(thread: int) -> None:
        for _ in range(20):
            rows = torch.randperm(num_rows)[:500]
            values, state = read(store, rows)
            assert torch.equal(values, counted(rows).float() + state), "a record is never half new"

    with ThreadPoolExecutor(16) as pool:
        for done in [*pool.map(write, range(8)), *pool.map(look, range(8))]:
            assert done is None
    assert read(store, torch.arange(0, num_rows))[1].eq(19).all()


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(RowsteadError, match=r"folder `.*/nowhere` for the row file .* does not exist"):
        FileRows(tmp_path / "nowhere" / "rows", 30, COLUMNS)


def test_other_files_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("a letter")
    with pytest.raises(RowsteadError, match="exists and is not a row file"):
        FileRows(tmp_path / "rows", 30, COLUMNS)
    assert (tmp_path / "rows").read_text() == "a letter"


def test_a_file_in_use_is_refused(tmp_path: Path) -> None:
    store = FileRows(tmp_path / "rows", 30, COLUMNS, initial=counted)
    with pytest.raises(RowsteadError, match="is in use by another process or store"):
        FileRows(tmp_path / "rows", 30, COLUMNS)
    assert read(store, torch.tensor([4]))[0][0, 0] == 4
    store.close()


def test_a_disk_with_too_little_space_is_named_beforehand(tmp_path: Path) -> None:
    with pytest.raises(
        RowsteadError,
        match=r"not enough disk space for the row file .*/rows`: it needs .* TB more, and .* are free there\. 1\. ",
    ):
        FileRows(tmp_path / "rows", 10**12, COLUMNS)
    assert not (tmp_path / "rows").exists()


def test_a_file_that_is_truncated_or_changed_is_noticed(open_rows: Callable[..., FileRows]) -> None:
    for name, harm in (
        ("shorter", lambda path: os.truncate(path, 8192)),
        ("changed", lambda path: path.write_bytes(bytes(1 << 22))),
    ):
        store = open_rows(20_000, name=name)
        store.write(torch.arange(20_000), made(20_000, COLUMNS))
        read(store, torch.arange(0, 20_000, 3))
        harm(store.file.path)
        # Of many reads at once the first that fails is told, and one across the new end may find zeros instead of the end.
        told = "was changed while in use"
        with pytest.raises(RowsteadError, match=f"was truncated while in use|{told}" if name == "shorter" else told):
            read(store, torch.arange(0, 20_000, 3))


def in_child(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("direct", [True, False])
def test_a_disk_that_gets_full_ends_with_sizes_and_remedies(tmp_path: Path, direct: bool) -> None:
    # In a process of its own, since compilers that a test before this one may have loaded take the signal of a file that is too large.
    script = """
        import resource, sys, torch
        from rowstead.spec.errors import RowsteadError
        from rowstead.stores.ssd import FileRows
        store = FileRows(sys.argv[1], 100_000, [(torch.float32, 64)], direct=sys.argv[2] == "True")
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        for _ in range(2):  # every call after the first failure fails too
            try:
                store.write(torch.arange(100_000), [torch.zeros(100_000, 64)])
            except RowsteadError as error:
                print(error, end="\\0")
        store.close()
    """
    child = in_child(script, tmp_path / "rows", direct)
    failures = child.stdout.split("\0")[:-1]
    assert (child.returncode, len(failures)) == (0, 2), child.stderr
    for failure in failures:
        for part in ("not enough disk space", "rows` (File too large)", "MB more", "are free there", "1. ", "2. ", "3. "):
            assert part in failure
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_that_ends_leaves_no_file_and_one_that_is_killed_does_not_block_the_next(tmp_path: Path) -> None:
    script = """
        import os, signal, sys, torch
        from rowstead.stores.ssd import FileRows
        store = FileRows(sys.argv[1], 100, [(torch.float32, 8)])
        store.write(torch.arange(100), [torch.zeros(100, 8)])
        os.kill(os.getpid(), int(sys.argv[2])) if int(sys.argv[2]) else None
    """
    assert in_child(script, tmp_path / "rows", 0).returncode == 0
    assert not list(tmp_path.iterdir())
    assert in_child(script, tmp_path / "rows", int(signal.SIGKILL)).returncode == -signal.SIGKILL
    assert (tmp_path / "rows").exists()
    FileRows(tmp_path / "rows", 100, [(torch.float32, 8)]).close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("starts", "reads"), [([0, 30, 60], [(0, 512)]), ([500], [(0, 1024)]), ([0, 5000, 20_000], [(0, 5120), (19968, 512)])]
)
def test_reads_cover_whole_sectors_and_small_gaps(starts: list[int], reads: list[tuple[int, int]]) -> None:
    cut, firsts = disk.cut_reads(np.array(starts), 30, 512, GAP_BYTES, 16384)
    assert [tuple(read) for read in cut.tolist()] == reads
    assert firsts[-1] == len(starts)


def ssd_store(
    layout: Layout, optimizer: SparseOptimizerSpec, dtype: torch.dtype, folder: str, num_slots: int = 2
) -> CachedStore:
    def backing(group: CacheGroup) -> FileRows:
        path = Path(folder) / f"rows-{group.width}"
        return FileRows(path, group.num_rows, group.columns, initial=initial_rows_of(group, seed=1))

    counts = {table.name: num_slots for table in layout.tables}
    return CachedStore(layout, optimizer, num_slots=counts, backing=backing, dtype=dtype)


class TestSsdStore(StoreContract):
    """All tables in files behind two slots each."""

    def make(self, layout: Layout, optimizer: SparseOptimizerSpec, dtype: torch.dtype) -> CachedStore:
        self.folder = tempfile.TemporaryDirectory()
        return ssd_store(layout, optimizer, dtype, self.folder.name)


def test_prefetched_batches_train_the_rows_of_a_file_as_those_in_memory(tmp_path: Path) -> None:
    features = FeaturesSpec(sparse=tuple(SparseFeatureSpec(name=name, num_rows=2000) for name in "ab"))
    layout, optimizer = layout_of(features, tables_of(features, width=8)), SparseOptimizerSpec(kind="rowwise_adagrad")
    memory = DeviceStore(layout, optimizer, dtype=torch.float64)
    store = ssd_store(layout, optimizer, torch.float64, str(tmp_path), num_slots=300)
    torch.manual_seed(1)
    offsets = torch.arange(2 * 50 + 1) * 4
    batches = [Sparse(ids=torch.randint(0, 2000, (400,)), offsets=offsets, num_features=2) for _ in range(60)]
    prefetched = 0
    for step, sparse in enumerate(batches, start=1):
        while prefetched < min(len(batches), step + store.batches_ahead):
            store.prefetch(batches[prefetched])
            prefetched += 1
        pooled = store.lookup(sparse)
        assert torch.equal(pooled, memory.lookup(sparse))
        store.update(sparse, pooled.cos(), lr=0.1, step=step)
        memory.update(sparse, pooled.cos(), lr=0.1, step=step)
    assert all(torch.equal(value, store.state()[name]) for name, value in memory.state().items())
    store.close()
    assert not list(tmp_path.iterdir())
