"""A reader without RPC: every sample once, in order, in bounded memory, despite restarts and losses."""

from __future__ import annotations

import contextlib
import os
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rowstead.fleet import reader as reader_module
from rowstead.fleet.batch_assignments import Holder
from rowstead.fleet.log_share import LogShare, NewBatch
from rowstead.fleet.reader import READ_AHEAD_BYTES, BatchRequest, Reader
from rowstead.fleet.reader_server import plan_readers, steps_of_reader
from rowstead.fleet.wire import WireError
from rowstead.spec.errors import RowsteadError
from tests.fleet.numbered_log import DirectTrainer, numbers_in, source_of, write_log, write_log_with_a_late_bad_row
from tests.small_runs import wait_until


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return write_log(tmp_path_factory.mktemp("log"), 1000)


@pytest.fixture(scope="module", autouse=True)
def _no_long_waits():
    """One thread plays all trainers, so waiting for another trainer is useless."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader_module, "WAIT_S", 0.01)
        yield


@contextlib.contextmanager
def open_reader(path, folder, *, number=0, source=None, read_ahead_bytes=READ_AHEAD_BYTES, **named):
    share = LogShare(source or source_of(path), number=number, **{"batch_size": 32, **named})
    reader = Reader(share, folder / f"reader-{number}.progress", read_ahead_bytes=read_ahead_bytes)
    with contextlib.closing(reader):
        yield reader


def rows_by_epoch(trained, epochs):
    return [Counter(row for epoch, rows in trained if epoch == wanted for row in rows) for wanted in range(epochs)]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(num_readers=st.integers(1, 4), num_trainers=st.integers(1, 3), batch_size=st.integers(20, 400), want=st.integers(1, 5))
def test_readers_together_assign_every_sample_once_per_epoch(
    log, tmp_path_factory, num_readers, num_trainers, batch_size, want
):
    folder, trained = tmp_path_factory.mktemp("run"), []
    for number in range(num_readers):
        with open_reader(log, folder, number=number, num_readers=num_readers, batch_size=batch_size, epochs=2) as reader:
            trainers = [DirectTrainer(reader, f"trainer-{i}") for i in range(num_trainers)]
            while not all(trainer.state == "ended" for trainer in trainers):
                for trainer in trainers:
                    trainer.ask(want)
                    while trainer.has:
                        trainer.train()
            trained += [item for trainer in trainers for item in trainer.trained]
            status = reader.status()
            assert status["num_done"] == status["num_batches"]
            assert (status["num_batches_repeated"], status["num_batches_resent"], status["num_skipped"]) == (0, 0, 0)
    once = Counter(range(1000))
    assert rows_by_epoch(trained, 2) == [once, once]


def test_a_reader_whose_disk_is_full_assigns_no_more_batches_and_says_why(log, tmp_path):
    with open_reader(log, tmp_path) as reader, open("/dev/full", "wb") as full:
        trainer = DirectTrainer(reader)
        trainer.fill(2)
        wait_until(lambda: reader.status()["queue_depth"] > 0, what="the next batch")
        os.dup2(full.fileno(), reader._log_file._file)
        with pytest.raises(RowsteadError, match=r"cannot write .*, so no more batches are assigned: .*No space left on device"):
            trainer.ask(1)
        assert reader.status()["state"] == "failed"


def test_one_trainer_of_one_reader_sees_what_a_run_in_one_process_sees(log, tmp_path):
    expected = [batch for epoch in range(2) for batch, _ in source_of(log).batches(32, epoch=epoch)]
    with open_reader(log, tmp_path, epochs=2) as reader:
        trainer = DirectTrainer(reader)
        trainer.train_on(want=3)
    assert list(trainer.batches) == list(range(len(expected)))
    for got, wanted in zip(trainer.batches.values(), expected, strict=True):
        assert torch.equal(got.dense, wanted.dense)
        assert torch.equal(got.labels, wanted.labels)
        assert torch.equal(got.sparse.ids.long(), wanted.sparse.ids)
        assert torch.equal(got.sparse.offsets, wanted.sparse.offsets)
    assert numbers_in(expected[0]) != sorted(numbers_in(expected[0])), "the log should be shuffled"


def test_batches_of_a_lost_trainer_are_reassigned_and_counted(log, tmp_path):
    with open_reader(log, tmp_path) as reader:
        lost, other = DirectTrainer(reader, "trainer-0"), DirectTrainer(reader, "trainer-1")
        lost.fill(5)
        lost.train()
        lost.ask(0)  # acknowledges one
        lost.train()  # never acknowledged
        other.fill(3)
        reader.set_alive(["trainer-1"])
        other.train_on()
        assert other.state == "ended"
        status = reader.status()
    held = 4
    assert (status["num_batches_repeated"], status["num_samples_repeated"]) == (held, held * 32)
    rows = rows_by_epoch(lost.trained[:1] + other.trained, 1)[0]
    assert rows == Counter(range(1000))


def test_the_end_is_reported_only_when_everything_is_done(log, tmp_path):
    with open_reader(log, tmp_path, batch_size=300) as reader:
        slow, quick = DirectTrainer(reader, "slow"), DirectTrainer(reader, "quick")
        slow.fill(1)
        quick.train_on()
        assert quick.state == "drained"
        assert not quick.ask(1), "no batch is left to assign"
        assert quick.state == "drained"
        slow.train()
        slow.ask(1)
        assert slow.state == "ended"
        quick.ask(1)
        assert quick.state == "ended"
        assert reader.status()["num_batches_repeated"] == 0


def test_batches_of_a_trainer_lost_at_the_very_end_are_reassigned(log, tmp_path):
    with open_reader(log, tmp_path, batch_size=300) as reader:
        lost, other = DirectTrainer(reader, "lost"), DirectTrainer(reader, "other")
        lost.fill(1)
        other.train_on()
        assert other.state == "drained"
        reader.set_alive(["other"])
        other.state = "reading"
        other.train_on()
        assert other.state == "ended"
        assert rows_by_epoch(other.trained, 1)[0] == Counter(range(1000))


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stops=st.lists(st.integers(1, 12), min_size=1, max_size=4), replies_lost=st.booleans())
def test_a_restarted_reader_resumes_in_order(log, tmp_path_factory, stops, replies_lost):
    folder = tmp_path_factory.mktemp("run")
    expected = [numbers_in(batch) for epoch in range(2) for batch, _ in source_of(log).batches(32, epoch=epoch)]
    trainer = None
    for stop in [*stops, None]:
        with open_reader(log, folder, epochs=2) as reader:
            trainer = trainer or DirectTrainer(reader)
            trainer.reader = reader
            for _ in range(stop or 0):
                trainer.ask(2)
                if len(trainer.has) > 2:
                    trainer.train()
            if stop is None:
                trainer.train_on()
                status = reader.status()
            elif replies_lost:  # killed between assigning and replying
                facts = {"num_wanted": 3, "held": tuple(trainer.has), "done": (), "last_state": trainer.state}
                reader.request_batches(
                    BatchRequest(holder=trainer.holder, sequence=trainer.sequence + 1, **facts), lambda message: None
                )
    assert [rows for _, rows in trainer.trained] == expected
    assert status["state"] == "ended"
    assert (status["num_batches"], status["num_done"]) == (len(expected), len(expected))
    assert status["num_samples"] == 2000
    assert status["num_batches_repeated"] == 0
    assert replies_lost or status["num_batches_resent"] == 0


def test_the_error_of_a_bad_row_comes_after_the_batches_before_it(tmp_path):
    log, bad, before = write_log_with_a_late_bad_row(tmp_path / "log")
    with open_reader(log, tmp_path) as reader:
        trainer = DirectTrainer(reader)
        trainer.train_on()
        assert trainer.state == "failed"
        assert f"row {bad}" in trainer.error
        assert "on_bad_row: skip" in trainer.error
        assert [rows for _, rows in trainer.trained] == before
        assert reader.status()["error"] == trainer.error
        assert reader.status()["state"] == "failed"


def test_the_error_of_a_missing_file_names_it(tmp_path):
    log = write_log(tmp_path / "log", 400)
    source = source_of(log)
    log.unlink()
    with open_reader(log, tmp_path, source=source) as reader:
        trainer = DirectTrainer(reader)
        trainer.train_on()
        assert trainer.state == "failed"
        assert str(log) in trainer.error


def test_skipped_rows_are_counted_once_even_when_reread(tmp_path):
    bad = set(range(0, 600, 7))
    log = write_log(tmp_path / "log", 600, bad=bad)
    good = Counter(row for row in range(600) if row not in bad)
    trained = []
    for at in (5, 3, None):
        with open_reader(log, tmp_path, epochs=2, source=source_of(log, on_bad_row="skip")) as reader:
            trainer = DirectTrainer(
                reader, incarnation=1 + len(trained)
            )  # a new incarnation each time, so that batches are repeated
            trainer.fill(at or 1)
            if at is None:
                trainer.train_on()
                status = reader.status()
            trained.append(trainer.trained)
    assert status["num_skipped"] == 2 * len(bad)
    assert rows_by_epoch(trained[-1], 2) == [good, good]
    assert status["num_batches_repeated"] == 5 + 3


def test_reading_ahead_is_bounded_by_bytes(log, tmp_path):
    batch_bytes = 32 * 4 * 8  # no batch of this log is larger
    with open_reader(log, tmp_path, read_ahead_bytes=3 * batch_bytes) as reader:
        wait_until(lambda: reader.status()["queue_bytes"] >= 3 * batch_bytes, what="a full queue")
        trainer = DirectTrainer(reader)
        while trainer.state != "ended":
            assert reader.status()["queue_bytes"] <= 4 * batch_bytes
            trainer.ask(1)
            while trainer.has:
                trainer.train()
        assert reader.status()["num_samples"] == 1000
        assert reader.status()["waited_for_space_s"] > 0


def test_a_reader_assigns_no_more_than_its_share_of_steps(log, tmp_path):
    shares = [steps_of_reader(10, number, 3) for number in range(3)]
    assert shares == [4, 3, 3]
    trained = []
    for number, share in enumerate(shares):
        with open_reader(log, tmp_path, number=number, num_readers=3, max_batches=share) as reader:
            trainer = DirectTrainer(reader)
            trainer.train_on()
            assert trainer.state == "ended"
            trained += trainer.trained
    assert len(trained) == 10


@pytest.mark.parametrize(("num_readers", "max_steps"), [(1, None), (3, None), (3, 20), (7, 11), (7, 1000)])
def test_the_number_of_batches_per_reader_is_known_beforehand(log, num_readers, max_steps):
    plan = {"batch_size": 64, "epochs": 2}
    expected = [each.num_batches for each in plan_readers(1000, num_readers, **plan, max_steps=max_steps)]
    for number, count in enumerate(expected):
        most = None if max_steps is None else steps_of_reader(max_steps, number, num_readers)
        share = LogShare(source_of(log), number=number, num_readers=num_readers, max_batches=most, **plan)
        assert count == sum(isinstance(item, NewBatch) for item in share.read_from())


def test_more_readers_than_rows_work(tmp_path):
    log = write_log(tmp_path / "log", 3)
    trained = []
    for number in range(5):
        with open_reader(log, tmp_path, number=number, num_readers=5, epochs=2) as reader:
            trainer = DirectTrainer(reader)
            trainer.train_on()
            assert trainer.state == "ended"
            trained += trainer.trained
    assert rows_by_epoch(trained, 2) == [Counter(range(3))] * 2


def test_an_earlier_incarnation_of_a_trainer_gets_no_more_batches(log, tmp_path):
    with open_reader(log, tmp_path) as reader:
        old, new = DirectTrainer(reader, incarnation=1), DirectTrainer(reader, incarnation=2)
        old.fill(2)
        new.fill(1)
        assert not old.ask(1)
        assert old.state == "replaced"


def test_an_abandoned_request_gets_no_batches(log, tmp_path, monkeypatch):
    monkeypatch.setattr(reader_module, "WAIT_S", 60.0)
    with open_reader(log, tmp_path, max_batches=1) as reader:
        first = DirectTrainer(reader, "first")
        first.fill(1)
        answers = []
        facts = {"num_wanted": 1, "held": (), "done": (), "last_state": "drained"}
        wait_until(lambda: reader.status()["state"] == "drained", what="the end of the log")
        assert reader.request_batches(BatchRequest(holder=Holder("second", 1), sequence=1, **facts), answers.append) is None
        assert reader.request_batches(BatchRequest(holder=Holder("second", 1), sequence=2, **facts), answers.append) is None
        assert len(answers) == 1
        assert not answers[0].facts["batches"]


def test_an_invalid_request_is_refused():
    for facts in (
        {},
        {"name": "a", "incarnation": "x", "sequence": 1, "num_wanted": 1},
        {"name": "a", "incarnation": 1, "sequence": 1, "num_wanted": 1, "held": 3},
    ):
        with pytest.raises(WireError):
            BatchRequest.from_facts(facts)


def test_no_batch_is_assigned_that_cannot_be_logged(log, tmp_path, monkeypatch):
    with open_reader(log, tmp_path) as reader:
        trainer = DirectTrainer(reader)
        trainer.fill(1)
        real = reader_module.AssignmentLog.flush

        def full(progress):
            raise RowsteadError("disk full")

        monkeypatch.setattr(reader_module.AssignmentLog, "flush", full)
        with pytest.raises(RowsteadError, match="disk full"):
            trainer.ask(1)
        monkeypatch.setattr(reader_module.AssignmentLog, "flush", real)
        assert not trainer.ask(1)
        assert (trainer.state, trainer.error) == ("failed", "disk full")
