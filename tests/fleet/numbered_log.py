"""A Parquet log with numbered rows, so that every sample is recognisable; and trainers without RPC."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from rowstead.data.encode import Encoder
from rowstead.data.file_source import FileSource
from rowstead.data.parquet import ParquetLog
from rowstead.data.transforms import DenseTransforms
from rowstead.fleet.batch_assignments import Holder
from rowstead.fleet.packing import unpack
from rowstead.fleet.reader import BatchRequest, Reader
from rowstead.spec.data import ParquetSpec
from rowstead.spec.errors import DataError
from rowstead.spec.features import DenseFeatureSpec, FeaturesSpec, SparseFeatureSpec, tables_of
from tests.small_runs import wait_until

FEATURES = FeaturesSpec(
    dense=(DenseFeatureSpec(name="number"),),
    sparse=(SparseFeatureSpec(name="likes", num_rows=1000), SparseFeatureSpec(name="city", num_rows=50)),
)
TABLES = tables_of(FEATURES, width=4)


def write_log(folder, num_rows, *, group_rows=50, bad=()):
    """Write a file of numbered rows; those in `bad` have an invalid label."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = range(num_rows)
    table = pa.table(
        {
            "number": pa.array(numbers, pa.float32()),
            "likes": pa.array([[n, n + 1][: n % 3] for n in numbers], pa.list_(pa.int64())),
            "city": pa.array([n % 7 for n in numbers], pa.int64()),
            "label": pa.array([7.0 if n in bad else float(n % 2) for n in numbers], pa.float32()),
        }
    )
    pq.write_table(table, folder / "log.parquet", row_group_size=group_rows)
    return folder / "log.parquet"


def source_of(path, *, seed=1, **spec):
    """Return a source over all rows of a file, shuffled in small windows."""
    spec = {"shuffle_rows": 120, "decode_threads": 1, **spec}
    log = ParquetLog(ParquetSpec(train=(str(path),), **spec), FEATURES, split="all")
    return FileSource(log, Encoder(FEATURES, TABLES, DenseTransforms.learn(FEATURES)), seed=seed)


def write_log_with_a_late_bad_row(folder, num_rows=600):
    """Write a log with a bad row late in reading order; returns the file, the row, and the rows of each batch of 32 before it."""
    path = write_log(folder, num_rows)
    *_, last = (numbers_in(batch) for batch, _ in source_of(path).batches(32))
    path, before = write_log(folder, num_rows, bad={last[0]}), []
    try:
        for batch, _ in source_of(path).batches(32):
            before.append(numbers_in(batch))
    except DataError:
        assert before
        return path, last[0], before
    raise AssertionError("a bad row was not detected")


def numbers_in(batch):
    """Return the row numbers of a batch."""
    return [int(number) for number in batch.dense[:, 0].tolist()]


class DirectTrainer:
    """A trainer that calls a reader directly."""

    def __init__(self, reader: Reader, name="trainer-0", incarnation=1):
        self.reader, self.holder = reader, Holder(name, incarnation)
        self.sequence, self.state, self.error = 0, "reading", None
        self.has: dict[int, tuple[int, list[int]]] = {}
        """Numbers of batches, with their epochs and rows."""
        self.batches = {}
        self.trained: list[tuple[int, list[int]]] = []
        self._done: list[int] = []

    def ask(self, want=1, *, deadline_s=20.0, **changes):
        """Request batches and wait for the reply; returns the numbers of the batches received."""
        self.sequence += 1
        facts = {"num_wanted": want, "held": tuple(self.has), "done": tuple(self._done), "last_state": self.state, **changes}
        answers = []
        answer = self.reader.request_batches(BatchRequest(holder=self.holder, sequence=self.sequence, **facts), answers.append)
        if answer is None:
            wait_until(lambda: bool(answers), what="a reply of the reader", deadline_s=deadline_s)
            answer = answers[0]
        self._done = []
        self.state, self.error = answer.facts["state"], answer.facts.get("error")
        at, came = 0, []
        for facts in answer.facts.get("batches", ()):
            batch = unpack(facts, answer.tensors[at : at + facts["tensors"]])
            at += facts["tensors"]
            self.has[facts["number"]] = facts["epoch"], numbers_in(batch)
            self.batches[facts["number"]] = batch
            came.append(facts["number"])
        assert at == len(answer.tensors)
        return came

    def fill(self, count):
        """Request batches until it has `count`."""
        while len(self.has) < count:
            self.ask(count - len(self.has))

    def train(self, number=None):
        """Train on one batch, by default the oldest."""
        number = next(iter(self.has)) if number is None else number
        self.trained.append(self.has.pop(number))
        self._done.append(number)

    def train_on(self, want=2):
        """Request batches and train on them until the reader has no more, without waiting for other trainers."""
        while True:
            while self.has:
                self.train()
            if self.state in ("ended", "failed", "stopped") or (self.state == "drained" and not self._done):
                return
            self.ask(want)
