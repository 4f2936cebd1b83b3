"""A packed log gives the batches of the log that it was made of, bit for bit, and is refused where it is not that log's."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rowstead.data.batch import Batch
from rowstead.data.open_log import Sources, open_sources, open_to_pack
from rowstead.data.order_test import batch_columns
from rowstead.data.pack import INDEX, fill_cache, open_pack, pack_log
from rowstead.data.packed_files import PackedColumns, PackedReader, PackedRows, PackedWriter
from rowstead.data.packed_gather import GatheredBatch, gather
from rowstead.data.packed_source import empty_bytes
from rowstead.data.parquet import ParquetLog
from rowstead.data.source import Source
from rowstead.data.synth import write_parquet
from rowstead.kernels.check import check_sparse
from rowstead.kernels.layout import layout_of
from rowstead.run import train
from rowstead.spec.data import SynthSpec
from rowstead.spec.errors import DataError
from rowstead.spec.parse import parse
from rowstead.spec.run import RunSpec
from tests.data.source_contract import NUM_SAMPLES, SourceContract, assert_same
from tests.small_runs import RecordingCallback, parquet_spec, small_plain, small_spec, tensors_in, written_log

LOG = SynthSpec(
    num_train_samples=NUM_SAMPLES, num_eval_samples=50, num_dense=4, num_sparse=3, num_ids=50, lengths="poisson", mean_ids=1.5
)

SMALL_LOG = dataclasses.replace(LOG, num_train_samples=150, num_eval_samples=20)


def cached(spec: RunSpec, folder: Path) -> RunSpec:
    return dataclasses.replace(spec, data=dataclasses.replace(spec.data, cache=str(folder)))


def packed(spec: RunSpec, folder: Path) -> Sources:
    return open_sources(cached(spec, folder))


def write_log(folder: Path, log: SynthSpec = LOG, *, num_bad: int = 0, group_rows: int = 120) -> Path:
    """Files with weights and, every few rows, a label that is none."""
    folder.mkdir(exist_ok=True)
    write_parquet(log, folder, overwrite=True)
    for file in folder.glob("*.parquet"):
        table = pq.read_table(file)
        labels = table["label"].to_numpy().copy()
        labels[:: max(1, table.num_rows // max(1, num_bad))] = 7 if num_bad else labels[0]
        weights = pa.array([0.25 * (row % 5) for row in range(table.num_rows)], pa.float32())
        table = table.set_column(table.schema.get_field_index("label"), "label", pa.array(labels))
        table = table.append_column("group", pa.array(np.arange(table.num_rows) % 7))
        names = [None if row % 11 == 0 else f"n{row % 5}" for row in range(table.num_rows)]
        table = table.append_column("segment", pa.array(names))
        pq.write_table(table.append_column("weight", weights), file, row_group_size=group_rows)
    return folder


class TestPackedSynth(SourceContract):
    @pytest.fixture
    def source(self, tmp_path: Path) -> Source:
        return packed(small_spec(f"data.synth.num_train_samples={NUM_SAMPLES}"), tmp_path / "pack").train


class TestPackedParquet(SourceContract):
    @pytest.fixture
    def source(self, tmp_path: Path) -> Source:
        changes = ("data.parquet.weight=weight", "data.parquet.shuffle_rows=150")
        return packed(parquet_spec(write_log(tmp_path / "log"), *changes), tmp_path / "pack").train


def tensors(batch: Batch) -> dict[str, torch.Tensor | None]:
    parts = {name: getattr(batch, name) for name in ("dense", "labels", "weights", "true_p")}
    return parts | {"groups": batch.groups, "ids": batch.sparse.ids, "offsets": batch.sparse.offsets}


def assert_equal_bits(found: Source, expected: Source, **how: Any) -> None:
    for (mine, after), (other, cursor) in zip(found.batches(**how), expected.batches(**how), strict=True):
        assert after == cursor
        for name, value in tensors(other).items():
            own = tensors(mine)[name]
            assert (own is None) == (value is None), name
            if own is not None and value is not None:
                assert own.dtype == value.dtype, name
                assert own.numpy().tobytes() == value.numpy().tobytes(), name
    assert found.num_skipped == expected.num_skipped


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 3),
    num_bad=st.sampled_from([0, 3, 60]),
    group_rows=st.sampled_from([1, 7, 40, 600]),
    shuffle_rows=st.sampled_from([0, 1, 20, 50, 1000]),
    batch_size=st.sampled_from([3, 17, 32, 700]),
    epoch=st.integers(0, 2),
    world=st.sampled_from([(0, 1), (0, 2), (2, 3)]),
    split=st.sampled_from(["order", "hash"]),
)
def test_packed_batches_are_those_of_the_log_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    num_bad: int,
    group_rows: int,
    shuffle_rows: int,
    batch_size: int,
    epoch: int,
    world: tuple[int, int],
    split: str,
) -> None:
    folder = tmp_path_factory.mktemp("log")
    spec = parquet_spec(
        write_log(folder, SMALL_LOG, num_bad=num_bad, group_rows=group_rows),
        "data.parquet.weight=weight",
        "data.parquet.on_bad_row=skip",
        f"data.parquet.shuffle_rows={shuffle_rows}",
        f"data.parquet.split.by={split}",
        "data.parquet.test_fraction=0.2",
        "data.parquet.group=group",
        "data.parquet.segment=segment",
        "features.dense.0={name: dense_0, clip: [-1, 1], standardise: true}",
        "features.sparse.0={name: sparse_0, num_rows: 20, max_ids: 2}",
        f"seed={seed}",
    )
    ours, theirs = packed(spec, folder / "pack"), open_sources(spec)
    how: dict[str, Any] = {"batch_size": batch_size, "epoch": epoch, "rank": world[0], "world_size": world[1]}
    assert_equal_bits(ours.train, theirs.train, **how)
    assert_equal_bits(ours.eval, theirs.eval, batch_size=batch_size)
    assert ours.test is not None
    assert theirs.test is not None
    assert_equal_bits(ours.test, theirs.test, batch_size=batch_size)
    cursors = [cursor for _, cursor in theirs.train.batches(**how)]
    middle = cursors[len(cursors) // 2]
    assert_same(ours.train.batches(**how, cursor=middle), theirs.train.batches(**how, cursor=middle))


def test_staged_batches_become_the_same_batches_on_the_device(tmp_path: Path) -> None:
    source = packed(parquet_spec(write_log(tmp_path / "log"), "data.parquet.weight=weight"), tmp_path / "pack").train
    staged = source.staged_batches(64, epoch=1)
    for (batch, after), (expected, cursor) in zip(staged, source.batches(64, epoch=1), strict=True):
        assert (after, batch.num_samples, batch.totals) == (cursor, expected.num_samples, expected.totals)
        assert torch.equal(batch.sparse.ids, expected.sparse.ids)
        assert batch.sparse.ids.dtype == torch.int64
        moved = tensors(batch.to("cpu"))
        assert all(torch.equal(moved[name], value) for name, value in tensors(expected).items() if value is not None)


@pytest.mark.parametrize(
    "changes",
    [(), ("data.synth.max_ids=500", "data.synth.mean_ids=300", "data.synth.num_eval_samples=10")],
    ids=["short bags", "long bags"],
)
def test_the_first_examples_of_a_staged_batch_are_read_without_the_others(changes: tuple[str, ...], tmp_path: Path) -> None:
    spec = small_spec("data.synth.num_train_samples=100", *changes)
    source = packed(spec, tmp_path / "pack").train
    staged = source.staged_batches(64, epoch=1)
    for (batch, _), (expected, _) in zip(staged, source.batches(64, epoch=1), strict=True):
        assert isinstance(batch, GatheredBatch)
        assert batch.shapes.has_long_bags == bool(changes)
        for count in (0, 1, 17, batch.num_samples, 1000):
            wanted = expected.sparse.examples(0, min(count, batch.num_samples))
            for found in (batch.first_sparse(count), expected.first_sparse(count)):
                assert torch.equal(found.ids, wanted.ids)
                assert torch.equal(found.offsets, wanted.offsets)
            labels, *ids = batch_columns(expected, count)
            missing, *same = batch_columns(batch, count)
            assert len(labels) == len(missing) == min(count, batch.num_samples)
            np.testing.assert_array_equal(same, ids)
        assert "_on_host" not in vars(batch), "the whole batch was unpacked"


def test_the_gpu_unpacks_a_staged_batch_as_the_host_does(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from rowstead.kernels.gpu import bag_layout

    staged, _ = next(packed(small_spec("data.synth.num_train_samples=200"), tmp_path / "pack").train.staged_batches(64))
    assert isinstance(staged, GatheredBatch)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found, expected = staged.unpack(staged.buffer.to(device), bag_layout.to_feature_major).to("cpu"), staged.to("cpu")
    assert found.sparse.ids.dtype == torch.int32
    assert all(
        torch.equal(value, tensors(found)[name].to(value.dtype))
        for name, value in tensors(expected).items()
        if value is not None
    )


def test_ids_are_checked_once_as_they_are_gathered(tmp_path: Path) -> None:
    spec = small_spec("data.synth.num_train_samples=200")
    layout = layout_of(spec.features, spec.tables)
    source = packed(spec, tmp_path / "pack").train
    assert all(batch.sparse.checked_for is layout for batch, _ in source.check_ids(layout).batches(64))
    assert all(batch.sparse.checked_for is layout for batch, _ in source.check_ids(layout).staged_batches(64))
    assert all(batch.sparse.checked_for is None for batch, _ in source.batches(64))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("features.sparse.0={name: sparse_0, num_rows: 40}", r"`features.sparse.0.num_rows` was 50 and is now 40"),
        ("features.sparse.1={name: sparse_1, num_rows: 50, max_ids: 3}", r"`features.sparse.1.max_ids` was None and is now 3"),
        (
            "features.sparse.1={name: sparse_1, num_rows: 50, hash: modulo}",
            r"`features.sparse.1.hash` was mix and is now modulo",
        ),
        ("features.dense.0.log=true", r"`features.dense.0.log` was False and is now True"),
        ("data.synth.seed=9", r"`data.synth.seed` was 1 and is now 9"),
    ],
)
def test_a_pack_of_another_recipe_is_refused_and_what_differs_is_named(tmp_path: Path, change: str, named: str) -> None:
    plain = "features.sparse=[{name: sparse_0, num_rows: 50}, {name: sparse_1, num_rows: 50}]"
    spec = small_spec("data.synth.num_train_samples=200", plain)
    packed(spec, tmp_path / "pack")
    changed = small_spec("data.synth.num_train_samples=200", plain, change)
    with pytest.raises(DataError, match=rf"{named}.*\. Pack it again: `rowstead data pack RECIPE --out .*--overwrite`"):
        packed(changed, tmp_path / "pack")


def test_what_does_not_change_the_rows_does_not_matter(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log")
    packed(parquet_spec(log), tmp_path / "pack")
    (tmp_path / "log").rename(tmp_path / "moved")
    changes = ("data.parquet.shuffle_rows=7", "data.parquet.decode_threads=3", "seed=5", "train.batch_size=3", "model.width=4")
    moved = parquet_spec(tmp_path / "moved", *changes)
    assert_equal_bits(packed(moved, tmp_path / "pack").train, open_sources(moved).train, batch_size=64)


def test_a_log_in_csv_is_packed_too(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    lines = [f"{random.random():.3f},{random.integers(50)},{random.integers(2)}" for _ in range(90)]
    (tmp_path / "log.csv").write_text("\n".join(["dense_0,sparse_0,label", *lines]) + "\n")
    log = {"csv": {"train": [f"{tmp_path}/log.csv"], "shuffle_rows": 20}}
    features = {"dense": [{"name": "dense_0"}], "sparse": [{"name": "sparse_0", "num_rows": 50}]}
    spec = parse(RunSpec, {**small_plain(), "data": log, "features": features})
    ours, theirs = packed(spec, tmp_path / "pack"), open_sources(spec)
    assert_equal_bits(ours.train, theirs.train, batch_size=16, epoch=1)
    assert_equal_bits(ours.eval, theirs.eval, batch_size=16)


def test_a_pack_of_other_files_is_refused(tmp_path: Path) -> None:
    packed(parquet_spec(write_log(tmp_path / "log")), tmp_path / "pack")
    write_log(tmp_path / "log", num_bad=1)
    with pytest.raises(DataError, match=r"`files.train.0.bytes` was \d+ and is now"):
        packed(parquet_spec(tmp_path / "log"), tmp_path / "pack")


def test_long_bags_and_ids_beyond_31_bits_are_packed(tmp_path: Path) -> None:
    spec = small_spec(
        "data.synth={num_train_samples: 60, num_eval_samples: 4, num_dense: 0, num_sparse: 2, lengths: poisson, mean_ids: [250, 1], max_ids: 400}",
        "features={sparse: [{name: sparse_0, num_rows: 5000000000}, {name: sparse_1, num_rows: 50}]}",
    )
    ours = packed(spec, tmp_path / "pack").train
    assert_equal_bits(ours, open_sources(spec).train, batch_size=7)


def test_a_file_begins_anew_where_bags_get_long(tmp_path: Path) -> None:
    columns = PackedColumns(num_dense=0, last_rows=(9,), scalars=())
    writer = PackedWriter(tmp_path, "train", columns)
    lengths = [1, 2, 300, 0, 4]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rowstead.data.packed_files.RECORD_BATCH_BYTES", 1)
        for length in lengths:
            writer.write(
                PackedRows(
                    dense=np.empty((1, 0), np.float32),
                    lengths=np.array([[length]], np.int32),
                    ids=np.full(length, length % 10, np.int32),
                    scalars=(),
                )
            )
        writer.close()
    assert [pa.ipc.open_file(tmp_path / file).num_record_batches for file in writer.files] == [2, 3]
    batch = gather(PackedReader(tmp_path, writer.files, columns), np.arange(5)[::-1], empty_bytes).to("cpu")
    assert batch.sparse.offsets.diff().tolist() == lengths[::-1]
    assert batch.sparse.ids.tolist() == [length % 10 for length in lengths[::-1] for _ in range(length)]


# Hostile files


def spoil_values(folder: Path, column: str, change: Callable[[np.ndarray], None]) -> None:
    """Write over the values of a column of the first training file, where they are."""
    path = next(folder.glob("train-0*.arrow"))
    content = bytearray(path.read_bytes())
    buffer = pa.ipc.open_file(pa.BufferReader(bytes(content))).get_batch(0).column(column).buffers()
    wanted = buffer[1].to_pybytes() if column == "offsets" else buffer[-1].to_pybytes()
    kinds = {"ids": np.uint32, "lengths": np.uint8, "labels": np.float32}
    at = bytes(content).index(wanted)
    change(np.frombuffer(content, kinds[column], len(wanted) // kinds[column]().itemsize, at))
    path.write_bytes(content)


def _spoil(index: int, value: float) -> Callable[[np.ndarray], None]:
    def change(values: np.ndarray) -> None:
        values[index] = value

    return change


@pytest.mark.parametrize(
    ("column", "value", "named"),
    [
        ("ids", 50, r"an id of feature \d is outside its table, whose last row is 49"),
        ("ids", 2**32 - 1, r"an id of feature \d is outside its table, whose last row is 49"),
        ("lengths", 255, "it has not as many ids as its lengths say"),
        ("labels", float("nan"), "its label, weight or probability is out of range"),
        ("labels", 1.5, "its label, weight or probability is out of range"),
    ],
)
def test_rows_that_do_not_fit_are_refused_as_they_are_gathered(tmp_path: Path, column: str, value: float, named: str) -> None:
    spec = small_spec("data.synth.num_train_samples=200")
    packed(spec, tmp_path / "pack")
    spoil_values(tmp_path / "pack", column, _spoil(70, value))
    source = packed(spec, tmp_path / "pack").train
    with pytest.raises(DataError, match=rf"train-00000.arrow`, row \d+ \(from 0\): {named}. Pack the log again"):
        list(source.batches(64))


@settings(deadline=None, max_examples=25)
@given(
    where=st.floats(0, 1, exclude_max=True),
    value=st.integers(0, 255),
    length=st.sampled_from([1, 4, 8]),
    seed=st.integers(0, 9),
)
def test_damaged_files_end_in_batches_that_fit_or_in_an_error(
    small_pack: tuple[RunSpec, Path], where: float, value: int, length: int, seed: int
) -> None:
    spec, folder = small_pack
    layout = layout_of(spec.features, spec.tables)
    path = folder / "train-00000.arrow"
    intact = path.read_bytes()
    content = bytearray(intact)
    at = int(where * len(content))
    random = np.random.default_rng(seed)
    content[at : at + length] = bytes([value] * length) if seed else random.bytes(length)
    try:
        path.write_bytes(content[: len(intact)])
        for batch, _ in packed(spec, folder).train.batches(16):
            check_sparse(layout, batch.sparse.ids, batch.sparse.offsets)
    except DataError:
        pass
    finally:
        path.write_bytes(intact)


@pytest.fixture(scope="module")
def small_pack(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunSpec, Path]:
    folder = tmp_path_factory.mktemp("pack") / "pack"
    spec = small_spec("data.synth.num_train_samples=40", "data.synth.num_eval_samples=4")
    packed(spec, folder)
    return spec, folder


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"format": 99}, "its format is 99"),
        ({"facts": None}, "was packed for another recipe"),
        ({"transforms": {}}, "`transforms.names` is"),
        ({"splits": {}}, "is damaged"),
        (
            {"splits": {name: {"scalars": [], "files": [["../x.arrow", 1]]} for name in ("train", "eval")}},
            "x.arrow is no file of the train split",
        ),
    ],
)
def test_an_index_that_is_wrong_is_refused(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    spec = small_spec("data.synth.num_train_samples=40", "data.synth.num_eval_samples=4")
    packed(spec, tmp_path / "pack")
    index = tmp_path / "pack" / INDEX
    index.write_text(json.dumps(json.loads(index.read_text()) | change))
    with pytest.raises(DataError, match=named):
        packed(spec, tmp_path / "pack")


# Writing


def test_a_pack_that_is_interrupted_leaves_no_folder_and_the_next_one_starts_anew(tmp_path: Path) -> None:
    spec, folder = small_spec("data.synth.num_train_samples=40"), tmp_path / "pack"
    leftover = tmp_path / "pack.packing"
    leftover.mkdir()
    (leftover / "train-00000.arrow").write_bytes(b"of a killed process")

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack_log(open_to_pack(spec), folder, progress=stop)
    assert list(tmp_path.iterdir()) == []
    pack_log(open_to_pack(spec), folder)
    assert sorted(path.name for path in folder.iterdir()) == ["eval-00000.arrow", INDEX, "train-00000.arrow"]
    assert list(tmp_path.iterdir()) == [folder]


def test_an_existing_pack_is_replaced_only_when_asked_and_other_files_never(tmp_path: Path) -> None:
    spec, folder = small_spec("data.synth.num_train_samples=40"), tmp_path / "pack"
    pack_log(open_to_pack(spec), folder)
    with pytest.raises(DataError, match="is a packed log already"):
        pack_log(open_to_pack(spec), folder)
    other = small_spec("data.synth.num_train_samples=41")
    pack_log(open_to_pack(other), folder, overwrite=True)
    assert open_pack(open_to_pack(other), folder).splits["train"].reader.num_rows == 41
    (folder / "notes.txt").touch()
    with pytest.raises(DataError, match=r"it also has `notes.txt`"):
        pack_log(open_to_pack(spec), folder, overwrite=True)
    (folder / INDEX).unlink()
    with pytest.raises(DataError, match="is not empty, and is no packed log"):
        fill_cache(open_to_pack(spec), folder, lambda text: None)


def test_processes_that_want_the_same_pack_make_it_once(tmp_path: Path) -> None:
    spec, folder = small_spec("data.synth.num_train_samples=40"), tmp_path / "pack"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: fill_cache(open_to_pack(spec), folder, lambda text: None), range(4)))
    assert open_pack(open_to_pack(spec), folder).splits["train"].reader.num_rows == 40
    assert list(tmp_path.iterdir()) == [folder]


def test_training_from_a_cache_ends_at_the_same_weights(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log")
    spec = parquet_spec(log, "train.epochs=2", "train.checkpoint_every=5")
    told = []
    for name, how in (("plain", spec), ("cached", cached(spec, tmp_path / "pack"))):
        callback = RecordingCallback()
        train(how, out=tmp_path / name, callback=callback)
        told.append([text for text in callback.messages if "packing the log" in text])
    assert [len(messages) for messages in told] == [0, 1]
    ours, theirs = tensors_in(tmp_path / "cached"), tensors_in(tmp_path / "plain")
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_pack_does_not_depend_on_the_order_in_which_threads_open_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = parquet_spec(written_log(tmp_path / "log"))
    names = [f["name"] for f in open_to_pack(spec).facts()["files"]["train"]]
    assert len(names) > 1
    inspect = ParquetLog._inspect

    def backwards(log: ParquetLog) -> Any:
        for number in reversed(range(len(log.files))):
            log._inspect_file(number)
        return inspect(log)

    monkeypatch.setattr(ParquetLog, "_inspect", backwards)
    assert [f["name"] for f in open_to_pack(spec).facts()["files"]["train"]] == names == sorted(names)
