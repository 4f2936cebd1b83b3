"""Logs behind http:// and s3:// give the batches of local ones, read only what is selected, and outlive short failures."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
from fsspec.registry import _registry as registry
from hypothesis import given
from hypothesis import strategies as st

from rowstead.data import fetch, files, footers
from rowstead.data.encode import Encoder
from rowstead.data.fetch import RowGroupFetcher, plan_requests
from rowstead.data.file_source import FileSource
from rowstead.data.files import LogFile
from rowstead.data.parquet import ParquetLog
from rowstead.data.transforms import DenseTransforms
from rowstead.spec.data import ParquetSpec
from rowstead.spec.errors import DataError
from rowstead.spec.features import DenseFeatureSpec, FeaturesSpec, SparseFeatureSpec, tables_of
from tests.remote_servers import FileServer, s3_server, serve
from tests.small_runs import wait_until

FEATURES = FeaturesSpec(
    dense=(DenseFeatureSpec(name="number"), DenseFeatureSpec(name="count")),
    sparse=(SparseFeatureSpec(name="likes", num_rows=1000), SparseFeatureSpec(name="city", num_rows=50)),
)
DAYS, DAY_ROWS = 3, 700


def write_days(folder: Path) -> Path:
    """A log of some days, with columns for our own decoder (`number`, `likes`, `label`) and for pyarrow's (`count`, `city`)."""
    for day in range(DAYS):
        numbers = range(day * DAY_ROWS, (day + 1) * DAY_ROWS)
        table = pa.table(
            {
                "number": pa.array(numbers, pa.float32()),
                "likes": pa.array([[n, n + 1][: n % 3] for n in numbers], pa.list_(pa.int64())),
                "unread": pa.array(np.random.default_rng(day).bytes(64) for _ in numbers),
                "count": pa.array([n % 5 for n in numbers], pa.int32()),
                "city": pa.array([f"city {n % 7}" for n in numbers]),
                "label": pa.array([float(n % 2) for n in numbers], pa.float32()),
            }
        )
        (folder / f"day={day}").mkdir(parents=True)
        pq.write_table(
            table, folder / f"day={day}" / "x.parquet", row_group_size=100, compression=("snappy", "zstd", "none")[day]
        )
    return folder


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_days(tmp_path_factory.mktemp("days"))


@pytest.fixture
def server(days: Path) -> Iterator[FileServer]:
    with serve(days) as server:
        yield server


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PAUSES_S", (0.01,) * len(files.PAUSES_S))


def source_of(where: str, features: FeaturesSpec = FEATURES, **spec: object) -> FileSource:
    """A source over `WHERE/day=*/x.parquet`, shuffled in windows that do not fit row groups."""
    options = {"shuffle_rows": 230, "decode_threads": 2, **spec}
    log = ParquetLog(ParquetSpec(train=(f"{where}/day=*/x.parquet",), **options), features, split="all")  # type: ignore[arg-type]
    return FileSource(log, Encoder(features, tables_of(features, width=4), DenseTransforms.learn(features)), seed=3)


def contents(batches: object) -> list[list[object]]:
    """Everything in the batches, with the cursors after them."""
    return [[*(t.tolist() for t in batch.tensors()), cursor] for batch, cursor in batches]  # type: ignore[attr-defined]


def assert_same_batches(remote: str, local: Path) -> None:
    there, here = source_of(remote), source_of(str(local))
    assert there.num_samples == here.num_samples == DAYS * DAY_ROWS
    for epoch, rank, world_size in ((0, 0, 1), (1, 0, 1), (0, 1, 3), (0, 2, 3)):
        where = {"epoch": epoch, "rank": rank, "world_size": world_size}
        expected = contents(here.batches(64, **where))
        assert contents(there.batches(64, **where)) == expected
        for done in (1, len(expected) // 2):
            cursor = expected[done - 1][-1]
            assert contents(there.batches(64, **where, cursor=cursor)) == expected[done:]  # type: ignore[arg-type]


def test_http_gives_the_batches_of_local_files(server: FileServer, days: Path) -> None:
    pytest.importorskip("aiohttp")
    assert_same_batches(server.url, days)


@pytest.fixture
def bucket(days: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket of a local S3 server with the log, and the environment to use it."""
    with s3_server(days.parent) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield days.name


def test_s3_gives_the_batches_of_local_files(bucket: str, days: Path) -> None:
    assert_same_batches(f"s3://{bucket}", days)


def test_an_s3_glob_can_have_wildcards_anywhere_below_the_bucket(bucket: str) -> None:
    for pattern, found in (
        ("day=*/x.parquet", [0, 1, 2]),
        ("day=[12]/*.parquet", [1, 2]),
        ("**/x.parquet", [0, 1, 2]),
        ("day=1/x.parquet", [1]),
    ):
        urls = [f"s3://{bucket}/day={day}/x.parquet" for day in found]
        assert [file.path for file in files.find_files([f"s3://{bucket}/{pattern}"])] == urls
    with pytest.raises(DataError, match=f"no file matches `s3://{bucket}/week="):
        files.find_files([f"s3://{bucket}/week=*/x.parquet"])
    with pytest.raises(DataError, match=f"no file `s3://{bucket}/day=9/x.parquet`"):
        files.find_files([f"s3://{bucket}/day=9/x.parquet"])


def test_another_object_of_the_same_size_and_end_is_told_by_its_etag(
    bucket: str, days: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(footers, "FOOTER_BYTES", 1000)
    file = days / "day=1" / "x.parquet"
    whole = file.read_bytes()
    before = source_of(f"s3://{bucket}").log.fingerprints
    assert all(found.etag for found in before.values())
    try:
        file.write_bytes(whole[:2000] + bytes([whole[2000] ^ 1]) + whole[2001:])
        now = source_of(f"s3://{bucket}").log.fingerprints
    finally:
        file.write_bytes(whole)
    assert footers.describe_changes(before, now) == f"`s3://{bucket}/day=1/x.parquet`: its ETag differs"


def test_a_missing_bucket_is_named(bucket: str) -> None:
    for pattern in ("x.parquet", "day=*/x.parquet"):
        with pytest.raises(DataError, match="no such bucket: `nowhere`"):
            files.find_files([f"s3://nowhere/{pattern}"])


@pytest.mark.parametrize("secret", ["wrong", None])
def test_wrong_and_missing_credentials_are_named_with_a_remedy(
    bucket: str, secret: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    if secret is not None:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    for pattern in ("x.parquet", "day=*/x.parquet"):
        with pytest.raises(DataError, match=f"access to `s3://{bucket}/{pattern[:3]}.* is denied .*AWS_SECRET_ACCESS_KEY"):
            files.find_files([f"s3://{bucket}/{pattern}"])


def test_selecting_few_of_many_columns_reads_about_their_share_of_the_bytes(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    num_columns, num_selected, num_rows = 2203, 14, 1500
    (tmp_path / "day=0").mkdir()
    path = tmp_path / "day=0" / "x.parquet"
    rng = np.random.default_rng(0)
    names = [f"c{i}" for i in range(num_columns - 1)]
    with pq.ParquetWriter(
        path, pa.schema([(name, pa.float32()) for name in [*names, "label"]]), use_dictionary=False, write_statistics=False
    ) as writer:
        for _ in range(2):
            columns = [*rng.standard_normal((num_columns - 1, num_rows), dtype=np.float32), np.zeros(num_rows, np.float32)]
            writer.write_table(pa.table(dict(zip([*names, "label"], columns, strict=True))), row_group_size=num_rows)
    chosen = names[:: num_columns // (num_selected - 1)][: num_selected - 1]
    features = FeaturesSpec(dense=tuple(DenseFeatureSpec(name=name) for name in chosen))
    with serve(tmp_path) as server:
        source = source_of(server.url, features)
        opened = server.num_sent_bytes
        num_read = sum(batch.num_samples for batch, _ in source.batches(512))
        read = server.num_sent_bytes - opened
    assert num_read == 2 * num_rows
    share = num_selected / num_columns
    size = path.stat().st_size
    assert read < 1.05 * share * size
    footer = int.from_bytes(path.read_bytes()[-8:-4], "little")
    assert opened < footer + 2 * footers.FOOTER_BYTES + 1000


def test_short_failures_are_outlived(server: FileServer, days: Path) -> None:
    pytest.importorskip("aiohttp")
    server.num_failures = 2
    source = source_of(server.url)
    batches = source.batches(64)
    found = contents(itertools.islice(batches, 3))
    server.num_failures = len(files.PAUSES_S)
    assert found + contents(batches) == contents(source_of(str(days)).batches(64))


def test_a_failure_that_stays_is_named_with_the_file(server: FileServer) -> None:
    pytest.importorskip("aiohttp")
    source = source_of(server.url)
    server.status = 500
    with pytest.raises(DataError, match=rf"cannot read `{server.url}/day=\d/x.parquet`: 500.* 6 attempts failed"):
        next(source.batches(64))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("fetch", "decode-"))]


@pytest.mark.parametrize(("status", "words"), [(403, r"access to .* is denied .*403"), (404, "no file `http")])
def test_a_refusal_is_not_tried_again(server: FileServer, status: int, words: str) -> None:
    pytest.importorskip("aiohttp")
    server.status = status
    with pytest.raises(DataError, match=words):
        files.find_files([f"{server.url}/day=0/x.parquet"])
    assert server.num_requests <= 2


def test_a_server_without_ranges_is_refused(server: FileServer) -> None:
    pytest.importorskip("aiohttp")
    server.supports_ranges = False
    with pytest.raises(DataError, match="range requests"):
        next(source_of(server.url).batches(64))


def test_a_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.http", raising=False)
    for scheme in ("http", "https"):
        monkeypatch.delitem(registry, scheme, raising=False)
    for name in ("S3FileSystem", "GcsFileSystem"):  # as in a pyarrow that is built without them
        monkeypatch.delattr(pyarrow.fs, name)
        monkeypatch.setattr(pyarrow.fs, "_not_imported", [*pyarrow.fs._not_imported, name])
    for scheme, extra in (("http", "http"), ("https", "http"), ("s3", "s3"), ("gs", "gs")):
        with pytest.raises(
            DataError, match=rf"cannot open `{scheme}://somewhere/x.parquet`: .* pip install -e '.*\[{extra}\]'"
        ):
            files.find_files([f"{scheme}://somewhere/x.parquet"])


def test_row_groups_are_fetched_while_earlier_ones_are_trained_on(server: FileServer) -> None:
    pytest.importorskip("aiohttp")
    server.latency_s = 0.02
    source = source_of(server.url)
    opened = server.num_requests
    batches = source.batches(10)
    next(batches)
    groups = DAYS * DAY_ROWS // 100
    wait_until(lambda: server.num_requests - opened >= groups, what="requests for all row groups", deadline_s=20)
    assert server.most_at_once > 2
    batches.close()


class FakeFile(LogFile):
    """A file of zeros that counts what is held in memory."""

    size = 1000  # type: ignore[assignment]

    def read(self, start: int, stop: int) -> bytes:
        return bytes(stop - start)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=40), st.integers(1, 500))
def test_fetched_bytes_are_bounded(sizes: list[int], limit: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fetch, "FETCHED_BYTES", limit)
        fetcher = RowGroupFetcher([lambda size=size: (FakeFile("a"), [(0, size)]) for size in sizes])  # type: ignore[misc]
        most = 0
        for number, size in enumerate(sizes):
            with fetcher.fetched(number) as path:
                most = max(most, fetcher._held_bytes)
                assert path is not None
                assert Path(path).read_bytes() == bytes(1000)
                assert fetcher._held_bytes <= max(limit, size)
        assert fetcher._held_bytes == 0
        fetcher.close()


def test_closing_does_not_wait_for_requests_that_were_never_sent() -> None:
    sent, answer = threading.Semaphore(0), threading.Event()

    class SlowFile(LogFile):
        size = 10**6

        def read(self, start: int, stop: int) -> bytes:
            sent.release()
            answer.wait(30)
            return bytes(stop - start)

    parts = [(at, at + 1) for at in range(3 * fetch.THREADS)]
    fetcher = RowGroupFetcher([lambda: (SlowFile("a"), parts)])
    with fetcher._changed:
        fetcher._start_more()
    for _ in range(fetch.THREADS):
        sent.acquire()
    closing = threading.Thread(target=fetcher.close, daemon=True)
    closing.start()
    answer.set()
    closing.join(20)
    assert not closing.is_alive()
    assert not sent.acquire(blocking=False)  # no other request was sent


@given(st.lists(st.tuples(st.integers(0, 10**8), st.integers(1, 3 * 10**7)), max_size=30))
def test_requests_cover_every_range_and_little_else(ranges: list[tuple[int, int]]) -> None:
    spans = [(start, start + size) for start, size in ranges]
    requests = plan_requests(spans)
    assert all(0 < stop - start <= fetch.REQUEST_BYTES for start, stop in requests)
    assert requests == sorted(requests)
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(requests))
    for start, stop in spans:
        covered = sum(max(0, min(stop, last) - max(start, first)) for first, last in requests)
        assert covered == stop - start
    needed = sum(stop - start for start, stop in requests) - fetch.GAP_BYTES * len(spans)
    assert needed <= sum(stop - start for start, stop in spans)
