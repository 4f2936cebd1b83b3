"""Reading Parquet: nothing lost or read twice, the same order for any threads, exact resume, clear errors."""

from __future__ import annotations

import threading
from itertools import islice

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rowstead.data import file_log, file_source, parquet, rowgroup
from rowstead.data.encode import Encoder
from rowstead.data.file_source import FileSource
from rowstead.data.parquet import ParquetLog
from rowstead.data.transforms import DenseTransforms
from rowstead.spec.data import ParquetSpec
from rowstead.spec.errors import DataError
from rowstead.spec.features import DenseFeatureSpec, FeaturesSpec, SparseFeatureSpec, tables_of

FEATURES = FeaturesSpec(
    dense=(DenseFeatureSpec(name="number"),),
    sparse=(SparseFeatureSpec(name="likes", num_rows=1000), SparseFeatureSpec(name="city", num_rows=50)),
)
"""`number` numbers the rows of a test's whole log, so that every example can be recognised."""

on_files = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


def table_of(start, num_rows):
    numbers = range(start, start + num_rows)
    return pa.table(
        {
            "number": pa.array(numbers, pa.float32()),
            "likes": pa.array([[n, n + 1][: n % 3] for n in numbers], pa.list_(pa.int64())),
            "city": pa.array([f"city {n % 7}" for n in numbers], pa.string()),
            "label": pa.array([n % 2 for n in numbers], pa.int8()),
            "unused": pa.array([object.__name__] * num_rows, pa.string()),
        }
    )


def write_log(folder, file_rows, group_rows=5):
    """Files with these numbers of rows, row groups of `group_rows`, numbered in one go."""
    for old in folder.glob("*.parquet"):
        old.unlink()
    start = 0
    for i, num_rows in enumerate(file_rows):
        pq.write_table(table_of(start, num_rows), folder / f"{i:03}.parquet", row_group_size=group_rows)
        start += num_rows
    return str(folder / "*.parquet")


def source_of(*paths, split="all", seed=1, with_labels=True, features=FEATURES, **spec):
    log = ParquetLog(ParquetSpec(train=paths, **spec), features, split=split, with_labels=with_labels)
    encoder = Encoder(features, tables_of(features, width=4), DenseTransforms.learn(features))
    return FileSource(log, encoder, seed=seed, shuffle=split != "eval")


def numbers_of(source, batch_size=4, **where):
    return [int(x) for batch, _ in source.batches(batch_size, **where) for x in batch.dense[:, 0]]


def plain(batch):
    return (batch.dense.tolist(), batch.sparse.ids.tolist(), batch.sparse.offsets.tolist(), batch.labels.tolist())


logs = st.lists(st.integers(0, 23), min_size=1, max_size=5).filter(sum)


@on_files
@given(logs, st.integers(1, 9), st.integers(0, 30), st.integers(1, 9), st.integers(1, 4))
def test_ranks_together_read_every_example_once(tmp_path, file_rows, group_rows, shuffle_rows, batch_size, world_size):
    source = source_of(write_log(tmp_path, file_rows, group_rows), shuffle_rows=shuffle_rows, decode_threads=2)
    total = sum(file_rows)
    assert source.num_samples == total
    assert sorted(numbers_of(source, batch_size)) == list(range(total))
    shares = [numbers_of(source, batch_size, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert sorted(n for share in shares for n in share) == list(range(total))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@on_files
@given(logs, st.integers(1, 9), st.integers(0, 30), st.integers(1, 9), st.integers(1, 4))
def test_resuming_at_any_cursor_continues_with_the_same_batches(
    tmp_path, file_rows, group_rows, shuffle_rows, batch_size, world_size
):
    pattern = write_log(tmp_path, file_rows, group_rows)
    where = {"epoch": 3, "rank": world_size - 1, "world_size": world_size}
    batches = list(source_of(pattern, shuffle_rows=shuffle_rows, decode_threads=1).batches(batch_size, **where))
    assert all(batch.num_samples == batch_size for batch, _ in batches[:-1])
    fresh = source_of(pattern, shuffle_rows=shuffle_rows, decode_threads=1)
    for done, (_, cursor) in enumerate(batches, 1):
        again = list(fresh.batches(batch_size, **where, cursor=cursor))
        assert [(plain(b), c) for b, c in again] == [(plain(b), c) for b, c in batches[done:]]


@on_files
@given(logs, st.integers(1, 9), st.integers(0, 30))
def test_the_sequence_does_not_depend_on_threads_or_on_pieces(tmp_path, file_rows, group_rows, shuffle_rows):
    pattern = write_log(tmp_path, file_rows, group_rows)
    one = source_of(pattern, shuffle_rows=shuffle_rows, decode_threads=1)
    three = source_of(pattern, shuffle_rows=shuffle_rows, decode_threads=3)
    three.log._piece_rows = 2
    assert [(plain(b), c) for b, c in one.batches(4)] == [(plain(b), c) for b, c in three.batches(4)]


@on_files
@given(logs, st.integers(1, 9), st.integers(1, 8))
def test_splitting_a_batch_among_threads_does_not_change_it(tmp_path, file_rows, group_rows, batch_size):
    pattern = write_log(tmp_path, file_rows, group_rows)
    before, file_source.PART_ROWS = file_source.PART_ROWS, 1
    try:
        one, many = (source_of(pattern, shuffle_rows=batch_size, decode_threads=threads) for threads in (1, 5))
        assert [(plain(b), c) for b, c in one.batches(batch_size)] == [(plain(b), c) for b, c in many.batches(batch_size)]
    finally:
        file_source.PART_ROWS = before
    assert not [t for t in threading.enumerate() if t.name.startswith(("part", "make", "decode"))]


def test_file_order_is_kept_without_shuffling(tmp_path):
    pattern = write_log(tmp_path, [7, 0, 20])
    assert numbers_of(source_of(pattern, shuffle_rows=0)) == list(range(27))


def test_shuffling_depends_on_seed_and_epoch_only(tmp_path):
    pattern = write_log(tmp_path, [40, 40])
    first = numbers_of(source_of(pattern, shuffle_rows=16))
    assert first != list(range(80))
    assert numbers_of(source_of(pattern, shuffle_rows=16)) == first
    assert numbers_of(source_of(pattern, shuffle_rows=16, seed=2)) != first
    assert numbers_of(source_of(pattern, shuffle_rows=16), epoch=1) != first


def test_a_rank_decodes_only_row_groups_that_overlap_its_share(tmp_path, monkeypatch):
    source = source_of(write_log(tmp_path, [30, 30]), shuffle_rows=0)
    decoded = []
    decode = ParquetLog._decode
    monkeypatch.setattr(ParquetLog, "_decode", lambda self, span, *a: decoded.append(span) or decode(self, span, *a))
    assert numbers_of(source, rank=1, world_size=4) == list(range(15, 30))
    assert [(span.file, span.group) for span in decoded] == [(0, 3), (0, 4), (0, 5)]


def test_the_last_rows_are_held_out_when_no_files_are_named_for_evaluation(tmp_path):
    pattern = write_log(tmp_path, [13, 0, 12])
    train = source_of(pattern, split="train", eval_fraction=0.2)
    held_out = source_of(pattern, split="eval", eval_fraction=0.2)
    assert sorted(numbers_of(train)) == list(range(20))
    assert numbers_of(held_out) == list(range(20, 25))


def test_named_evaluation_files_are_the_evaluation_split(tmp_path):
    write_log(tmp_path, [6, 4])
    one, two = (str(tmp_path / f"00{i}.parquet") for i in range(2))
    assert sorted(numbers_of(source_of(one, split="train", eval=(two,)))) == list(range(6))
    assert numbers_of(source_of(one, split="eval", eval=(two,))) == list(range(6, 10))


def test_a_log_without_labels_can_be_read_for_prediction(tmp_path):
    pq.write_table(table_of(0, 9).drop_columns(["label"]), tmp_path / "a.parquet")
    source = source_of(str(tmp_path / "a.parquet"), with_labels=False, shuffle_rows=0)
    assert [batch.labels for batch, _ in source.batches(5)] == [None, None]
    with pytest.raises(DataError, match=r"a\.parquet`: the log has no column `label`"):
        source_of(str(tmp_path / "a.parquet"))


def test_raw_blocks_give_all_rows_or_a_spread_sample(tmp_path):
    log = source_of(write_log(tmp_path, [100, 100], group_rows=10)).log
    everything = np.concatenate([block.dense[:, 0] for block in log.raw_blocks()])
    assert everything.tolist() == list(range(200))
    sample = np.concatenate([block.dense[:, 0] for block in log.raw_blocks(40)])
    assert len(sample) == 40
    assert sample.min() == 0
    assert sample.max() >= 190


def test_files_behind_urls_are_read_through_fsspec():
    memory = fsspec.filesystem("memory")
    for i, (start, num_rows) in enumerate([(0, 11), (11, 0), (11, 8)]):
        with memory.open(f"/rowstead-test/{i}.parquet", "wb") as file:
            pq.write_table(table_of(start, num_rows), file, row_group_size=3)
    source = source_of("memory://rowstead-test/*.parquet", decode_threads=3, shuffle_rows=6)
    assert sorted(numbers_of(source)) == list(range(19))
    with pytest.raises(DataError, match="no file matches `memory://nowhere/"):
        source_of("memory://nowhere/*.parquet")
    with pytest.raises(DataError, match="no file `memory://rowstead-test/9"):
        source_of("memory://rowstead-test/9.parquet")
    with pytest.raises(DataError, match="cannot open `nosuch://x`"):
        source_of("nosuch://x")


def test_an_abandoned_iterator_leaves_no_threads(tmp_path):
    source = source_of(write_log(tmp_path, [50, 50]), shuffle_rows=10, decode_threads=3)
    batches = source.batches(4)
    assert len(list(islice(batches, 2))) == 2
    batches.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("decode-")]


def with_bad_rows(folder, column, changes):
    table = table_of(0, 20)
    values = table[column].to_pylist()
    for row, value in changes.items():
        values[row] = value
    table = table.set_column(table.schema.get_field_index(column), column, pa.array(values, pa.float32()))
    pq.write_table(table, folder / "bad.parquet", row_group_size=6)
    return str(folder / "bad.parquet")


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("number", None, r"bad\.parquet`, row 8 \(from 0\): dense column `number` has a missing value; .*on_bad_row: skip"),
        ("number", float("inf"), r"row 8 \(from 0\): dense column `number` contains inf; .*clip"),
        ("label", 2.0, r"row 8 \(from 0\): label column `label` contains 2.0; labels must be between 0 and 1"),
    ],
)
def test_a_bad_row_is_named_with_file_row_column_and_remedy(tmp_path, column, value, message):
    path = with_bad_rows(tmp_path, column, {8: value, 9: value})
    with pytest.raises(DataError, match=message):
        numbers_of(source_of(path))


def test_bad_rows_are_skipped_and_counted_on_request(tmp_path):
    path = with_bad_rows(tmp_path, "label", {0: None, 8: -1.0, 19: 7.0})
    source = source_of(path, on_bad_row="skip", shuffle_rows=7)
    batches = list(source.batches(4))
    assert sorted(n for b, _ in batches for n in b.dense[:, 0].int().tolist()) == sorted(set(range(20)) - {0, 8, 19})
    assert source.num_skipped == 3
    for done, (_, cursor) in enumerate(batches, 1):
        assert [plain(b) for b, _ in source.batches(4, cursor=cursor)] == [plain(b) for b, _ in batches[done:]]


def test_missing_and_unreadable_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"no file `.*nothing\.parquet` \(looked in "):
        source_of(str(tmp_path / "nothing.parquet"))
    with pytest.raises(DataError, match=r"no file matches `.*\*\.parquet`"):
        source_of(str(tmp_path / "*.parquet"))
    with pytest.raises(DataError, match=r"folder `.*` has no files that end in `\.parquet`"):
        source_of(str(tmp_path))
    (tmp_path / "text.parquet").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match=r"text\.parquet` is not a Parquet file"):
        source_of(str(tmp_path / "text.parquet"))


def test_a_log_without_rows_is_refused(tmp_path):
    pattern = write_log(tmp_path, [0, 0])
    with pytest.raises(DataError, match="no rows in"):
        source_of(pattern)
    with pytest.raises(DataError, match="no rows for the train split"):
        source_of(write_log(tmp_path, [1]), split="train")


def test_a_file_whose_columns_differ_is_named(tmp_path):
    pattern = write_log(tmp_path, [5])
    table = table_of(5, 5)
    pq.write_table(table.drop_columns(["city"]), tmp_path / "more.parquet")
    with pytest.raises(DataError, match=r"more\.parquet`: the log has no column `city`"):
        source_of(pattern)
    index = table.schema.get_field_index("city")
    pq.write_table(table.set_column(index, "city", pa.array(range(5))), tmp_path / "more.parquet")
    with pytest.raises(DataError, match=r"`city` is text in .*000\.parquet` but integers in .*more\.parquet`"):
        source_of(pattern)


def test_a_damaged_row_group_is_named(tmp_path):
    path = tmp_path / "000.parquet"
    write_log(tmp_path, [5000], group_rows=1000)
    data = bytearray(path.read_bytes())
    data[4:4000] = b"\xff" * 3996
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"000\.parquet`: row group \d cannot be read"):
        numbers_of(source_of(str(path)))


def test_resuming_in_another_log_is_refused(tmp_path):
    pattern = write_log(tmp_path, [20])
    _, cursor = next(source_of(pattern).batches(4))
    with pytest.raises(DataError, match="share of the log had 20 rows and now has 30"):
        next(source_of(write_log(tmp_path, [30])).batches(4, cursor=cursor))


def test_a_huge_row_group_is_decoded_in_bounded_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "PIECE_BYTES", 4096)
    monkeypatch.setattr(rowgroup, "DECODED_BYTES", 4096)
    pattern = write_log(tmp_path, [5000], group_rows=5000)
    source = source_of(pattern, shuffle_rows=500, decode_threads=2)
    blocks = list(source.log.raw_blocks())
    assert max(block.num_rows for block in blocks) <= 256
    assert sorted(numbers_of(source, 64)) == list(range(5000))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_pinned_batches_are_encoded_into_pinned_memory(tmp_path):
    pattern = write_log(tmp_path, [40, 40])
    plainly, pinned = (source_of(pattern, shuffle_rows=16, decode_threads=3) for _ in range(2))
    found = list(pinned.pin_memory().batches(5))
    assert all(tensor.is_pinned() for batch, _ in found for tensor in batch.tensors())
    assert [(plain(b), c) for b, c in found] == [(plain(b), c) for b, c in plainly.batches(5)]


def test_mapped_functions_run_in_worker_threads_and_errors_keep_their_position(tmp_path):
    source = source_of(write_log(tmp_path, [40]), shuffle_rows=16, decode_threads=3)
    expected, threads = numbers_of(source), set()

    def finish(batch):
        threads.add(threading.current_thread().name)
        if batch.dense[0, 0] == expected[20]:
            raise KeyError("lost")
        return batch

    batches = source.map(finish).batches(4)
    assert [int(next(batches)[0].dense[0, 0]) for _ in range(5)] == expected[:20:4]
    with pytest.raises(KeyError, match="lost"):
        next(batches)
    assert all(name.startswith("make") for name in threads)


def test_busy_threads_are_one_per_core_unless_decode_threads_is_set():
    assert [file_log.choose_num_busy(threads, 16) for threads in (None, 1, 6, 10, 16, 64)] == [16, 2, 12, 16, 16, 64]
