"""Remote batches and readers over real sockets, with processes that are killed."""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter

import pytest
import torch

from rowstead.fleet.log_share import LogShare
from rowstead.fleet.reader import Reader
from rowstead.fleet.reader_server import ReaderServer, build_reader_server
from rowstead.fleet.remote_batches import RemoteBatches
from rowstead.fleet.rpc_client import Client
from rowstead.kernels.layout import layout_of
from rowstead.spec.errors import DataError, RowsteadError
from tests.fleet import reader_process
from tests.fleet.numbered_log import FEATURES, TABLES, numbers_in, source_of, write_log, write_log_with_a_late_bad_row
from tests.fleet.reader_process import kill, process, run_reader, run_trainer, status_of, trained_by, wait_for_reader
from tests.small_runs import wait_until


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return write_log(tmp_path_factory.mktemp("log"), 1000)


@contextlib.contextmanager
def served(log, folder, *, num_readers=1, source=None, **named):
    """Readers served by this process: yields functions that connect to each, and the readers."""
    with contextlib.ExitStack() as stack:
        connects, readers = [], []
        for number in range(num_readers):
            progress = folder / f"reader-{number}.progress"
            named = {"batch_size": 32, **named}
            share = LogShare(source or source_of(log), number=number, num_readers=num_readers, **named)
            readers.append(Reader(share, progress))
            server = stack.enter_context(ReaderServer(readers[-1], name=f"reader-{number}")).start()
            connects.append(lambda address=server.address: Client(address, name="trainer"))
        yield connects, readers


def train(feed, trained):
    """Train to the end, as a trainer does."""
    while feed.more():
        for batch, ticket in feed:
            trained.append((ticket.epoch, numbers_in(batch)))
            feed.acknowledge(ticket)


def rows_by_epoch(trained, epochs=1):
    return [Counter(row for epoch, rows in trained if epoch == wanted for row in rows) for wanted in range(epochs)]


@pytest.mark.parametrize(("num_readers", "num_trainers", "num_threads"), [(1, 1, 1), (2, 3, 1), (3, 2, 2)])
def test_trainers_together_get_every_sample_once_per_epoch(log, tmp_path, num_readers, num_trainers, num_threads):
    trained = []
    with served(log, tmp_path, num_readers=num_readers, epochs=2) as (connects, readers), contextlib.ExitStack() as stack:
        feeds = [
            stack.enter_context(RemoteBatches(connects, name=f"trainer-{i}", batches_ahead=4)) for i in range(num_trainers)
        ]
        threads = [threading.Thread(target=train, args=(feed, trained)) for feed in feeds for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for reader in readers:
            status = reader.status()
            assert status["state"] == "ended"
            assert status["num_done"] == status["num_batches"]
            assert status["num_batches_repeated"] == status["num_batches_resent"] == 0
        assert sum(feed.num_samples for feed in feeds) == 2000
    once = Counter(range(1000))
    assert rows_by_epoch(trained, 2) == [once, once]


def test_one_trainer_of_one_reader_gets_the_batches_of_a_single_process_in_order(log, tmp_path):
    expected = [batch for epoch in range(2) for batch, _ in source_of(log).batches(32, epoch=epoch)]
    with served(log, tmp_path, epochs=2) as (connects, _), RemoteBatches(connects, name="trainer-0", ids=torch.int64) as feed:
        count = 0
        while feed.more():
            for (batch, ticket), wanted in zip(feed, expected[count:], strict=False):
                assert ticket.step == ticket.number == count
                assert ticket.num_samples == wanted.num_samples
                for got, want in zip(batch.tensors(), wanted.tensors(), strict=True):
                    assert got.dtype == want.dtype
                    assert torch.equal(got, want)
                feed.acknowledge(ticket)
                count += 1
        assert count == len(expected)
        assert not feed.more()
        assert 0 <= feed.nonempty_share <= 1
        assert feed.figures()["num_samples"] == 2000
        assert feed.figures()["num_bytes_received"] > 2000 * 4


def test_steps_count_the_readers_round_robin(log, tmp_path):
    with served(log, tmp_path, num_readers=2) as (connects, _), RemoteBatches(connects, name="trainer-0") as feed:
        steps = []
        while feed.more():
            for _, ticket in feed:
                steps.append(ticket.step)
                feed.acknowledge(ticket)
    assert sorted(steps) == list(range(32))


def test_a_trainer_may_take_all_batches_before_it_acknowledges_any(log, tmp_path):
    with served(log, tmp_path) as (connects, _), RemoteBatches(connects, name="trainer-0", batches_ahead=2) as feed:
        tickets = [ticket for _, ticket in feed]
        assert sum(ticket.num_samples for ticket in tickets) == 1000
        for ticket in tickets:
            feed.acknowledge(ticket)
            feed.acknowledge(ticket)  # has no effect
        assert not feed.more()


def test_a_slow_trainer_holds_no_more_than_it_requested(log, tmp_path):
    with (
        served(log, tmp_path, batch_size=8) as (connects, readers),
        RemoteBatches(connects, name="trainer-0", batches_ahead=6) as feed,
    ):
        assert feed.more()
        for _ in range(10):
            _, ticket = next(feed)
            wait_until(lambda: feed.figures()["queue_depth"] > 3, what="batches ahead")
            assert feed.figures()["queue_depth"] <= 6
            assert readers[0].status()["num_held"] <= 8
            feed.acknowledge(ticket)


def test_closing_releases_batches_that_were_not_taken(log, tmp_path):
    with served(log, tmp_path) as (connects, readers):
        first = []
        with RemoteBatches(connects, name="trainer-0", batches_ahead=8) as feed:
            assert feed.more()
            batch, ticket = next(feed)
            first.append((ticket.epoch, numbers_in(batch)))
            feed.acknowledge(ticket)
            next(feed)  # never acknowledged
        second = []
        with RemoteBatches(connects, name="trainer-1") as feed:
            train(feed, second)
        status = readers[0].status()
    assert rows_by_epoch(first + second)[0] == Counter(range(1000))
    assert status["num_batches_repeated"] == 1, "only the batch that was taken may have been trained on"


def test_batches_released_by_an_idle_trainer_are_not_counted_as_repeated(log, tmp_path):
    with served(log, tmp_path) as (connects, readers):
        feed = RemoteBatches(connects, name="trainer-0")
        assert feed.more()
        next(feed)  # prefetched, and then the trainer is told to stop
        feed.close(is_idle=True)
        trained = []
        with RemoteBatches(connects, name="trainer-1") as other:
            train(other, trained)
        status = readers[0].status()
    assert rows_by_epoch(trained)[0] == Counter(range(1000))
    assert status["num_batches_repeated"] == 0
    assert status["num_batches_resent"] > 0


def test_no_thread_waits_for_a_batch_once_told_to_stop(log, tmp_path):
    stops, ended = threading.Event(), []
    with served(log, tmp_path, max_batches=1) as (connects, _), RemoteBatches(connects, name="trainer-0") as holder:
        next(holder)  # never acknowledged: all others would wait forever
        with RemoteBatches(connects, name="trainer-1", until=stops.is_set) as feed:
            threads = [threading.Thread(target=lambda: ended.append(feed.more()), daemon=True) for _ in range(2)]
            for thread in threads:
                thread.start()
            wait_until(lambda: feed._readers[0].state == "drained", what="the end of the log")
            assert not ended
            stops.set()
            for thread in threads:
                thread.join(20)
            assert ended == [False, False]
            assert not feed.is_over


def test_an_error_of_the_reader_comes_after_its_good_batches(tmp_path):
    log, bad, before = write_log_with_a_late_bad_row(tmp_path / "log")
    with served(log, tmp_path) as (connects, _):
        trained = []
        with RemoteBatches(connects, name="trainer-0") as feed, pytest.raises(DataError, match=rf"reader 0: .*row {bad}"):
            train(feed, trained)
        assert [rows for _, rows in trained] == before
        with connects[0]() as client:
            assert f"row {bad}" in client.call("status").facts["error"]


def test_a_replaced_trainer_gets_an_error(log, tmp_path):
    with served(log, tmp_path, batch_size=4) as (connects, _), contextlib.ExitStack() as stack:
        old = stack.enter_context(RemoteBatches(connects, name="trainer-0", incarnation=1, batches_ahead=2))
        assert old.more()
        new = stack.enter_context(RemoteBatches(connects, name="trainer-0", incarnation=2))
        assert new.more()
        with pytest.raises(RowsteadError, match="was restarted"):
            train(old, [])


def test_batches_that_the_reader_checked_need_no_check_by_the_trainer(log, tmp_path):
    layout, mine = (layout_of(FEATURES, TABLES) for _ in range(2))
    source = source_of(log).check_ids(layout)
    with served(log, tmp_path, source=source) as (connects, _), RemoteBatches(connects, name="trainer-0", layout=mine) as feed:
        batch, _ = next(feed)
        assert batch.sparse.checked_for is mine


def test_a_malformed_request_leaves_a_reader_as_it_was(log, tmp_path):
    with served(log, tmp_path) as (connects, _):
        with connects[0]() as client:
            for kind, facts in (
                ("request_batches", {}),
                ("request_batches", {"name": [], "num_wanted": "all"}),
                ("members", {"names": 3}),
                ("members", {}),
            ):
                with pytest.raises(RowsteadError):
                    client.call(kind, facts)
        trained = []
        with RemoteBatches(connects, name="trainer-0") as feed:
            train(feed, trained)
    assert rows_by_epoch(trained)[0] == Counter(range(1000))


def test_a_reader_serves_until_told_to_stop(log, tmp_path):
    ended, trained = threading.Event(), []
    with build_reader_server(source_of(log), tmp_path, 0, num_readers=1, batch_size=32, max_steps=3) as server:
        thread = threading.Thread(target=server.serve, args=(ended.is_set,))
        thread.start()
        with RemoteBatches([lambda: Client(server.address, name="trainer-0")], name="trainer-0") as feed:
            train(feed, trained)
        assert len(trained) == 3
        assert server.status()["num_batches"] == 3
        assert server.status()["num_bytes_sent"] > 0
        ended.set()
        thread.join(20)
        assert not thread.is_alive()


def test_a_reader_killed_in_mid_epoch_loses_nothing(log, tmp_path):
    trained = []
    with contextlib.ExitStack() as stack:
        others = stack.enter_context(process(run_reader, log, tmp_path, 1, 2, epochs=2))
        victim = stack.enter_context(process(run_reader, log, tmp_path, 0, 2, epochs=2))
        for number in (0, 1):
            wait_for_reader(tmp_path, number)
        connects = [reader_process.connect(tmp_path, number, "trainer-0") for number in (0, 1)]
        feeds = [stack.enter_context(RemoteBatches(connects, name=f"trainer-{i}", batches_ahead=6)) for i in range(2)]
        for feed in feeds:
            for _ in range(15):
                batch, ticket = next(feed)
                trained.append((ticket.epoch, numbers_in(batch)))
                feed.acknowledge(ticket)
        kill(victim)
        stack.enter_context(process(run_reader, log, tmp_path, 0, 2, incarnation=1, epochs=2))
        threads = [threading.Thread(target=train, args=(feed, trained)) for feed in feeds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        status = [status_of(tmp_path, number) for number in (0, 1)]
        assert others.is_alive()
    once = Counter(range(1000))
    assert rows_by_epoch(trained, 2) == [once, once]
    for one in status:
        assert (one["state"], one["num_batches_repeated"], one["num_done"]) == ("ended", 0, one["num_batches"])
    assert sum(one["num_samples"] for one in status) == 2000


def test_batches_of_a_killed_trainer_are_trained_on_by_another(log, tmp_path):
    with contextlib.ExitStack() as stack:
        stack.enter_context(process(run_reader, log, tmp_path, 0, 1))
        wait_for_reader(tmp_path, 0)
        victim = stack.enter_context(process(run_trainer, tmp_path, "trainer-1", 1, hang_after=7))
        wait_until(lambda: len(trained_by(tmp_path, "trainer-1")) == 7, what="seven batches of the trainer")
        trained = []
        feed = stack.enter_context(RemoteBatches([reader_process.connect(tmp_path, 0, "trainer-0")], name="trainer-0"))
        thread = threading.Thread(target=train, args=(feed, trained))
        thread.start()
        wait_until(lambda: status_of(tmp_path, 0)["state"] == "drained", what="the end of the log")
        held = status_of(tmp_path, 0)["held_by"]["trainer-1"]
        kill(victim)
        with reader_process.connect(tmp_path, 0, "coordinator")() as client:
            client.call("members", {"names": ["trainer-0"]})
        thread.join()
        status = status_of(tmp_path, 0)
    lost = trained_by(tmp_path, "trainer-1")
    seen = rows_by_epoch(trained + lost)[0]
    assert set(seen) == set(range(1000)), "an example was lost"
    twice = sum(seen.values()) - len(seen)
    assert 0 < twice <= status["num_samples_repeated"]
    assert (status["num_batches_repeated"], status["num_samples_repeated"]) == (held, 8 * held)
    assert held <= 7 + 4, "no more than it had capacity for, and had not acknowledged"


def test_a_restarted_trainer_gets_the_batches_that_it_held(log, tmp_path):
    with contextlib.ExitStack() as stack:
        stack.enter_context(process(run_reader, log, tmp_path, 0, 1))
        wait_for_reader(tmp_path, 0)
        victim = stack.enter_context(process(run_trainer, tmp_path, "trainer-0", 1, hang_after=7))
        wait_until(lambda: len(trained_by(tmp_path, "trainer-0")) == 7, what="seven batches of the trainer")
        kill(victim)
        again = stack.enter_context(process(run_trainer, tmp_path, "trainer-0", 1))
        again.join(60)
        assert again.exitcode == 0
        status = status_of(tmp_path, 0)
    seen = rows_by_epoch(trained_by(tmp_path, "trainer-0"))[0]
    assert set(seen) == set(range(1000))
    assert 0 < sum(seen.values()) - len(seen) <= status["num_samples_repeated"] <= 8 * (7 + 4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_readers_and_trainers_killed_at_any_moment_lose_nothing(tmp_path, seed):
    log = write_log(tmp_path / "log", 6000)
    chance = random.Random(seed)
    incarnations = Counter()
    posts = [*(("reader", number) for number in range(2)), *(("trainer", number) for number in range(3))]
    running = {}
    with contextlib.ExitStack() as stack:

        def start(kind, number):
            if kind == "reader":
                named = {"incarnation": incarnations[kind, number], "epochs": 2}
                running[kind, number] = stack.enter_context(process(run_reader, log, tmp_path, number, 2, **named))
                wait_for_reader(tmp_path, number, incarnations[kind, number])
            else:
                running[kind, number] = stack.enter_context(process(run_trainer, tmp_path, f"trainer-{number}", 2))
            incarnations[kind, number] += 1

        def num_trained():
            return sum(len(trained_by(tmp_path, f"trainer-{number}")) for number in range(3))

        for post in posts:
            start(*post)
        for _ in range(8):
            aim = min(num_trained() + chance.randrange(20, 150), 1400)
            wait_until(lambda aim=aim: num_trained() >= aim, what="more training")
            post = chance.choice(posts)
            kill(running[post])
            start(*post)
        for number in range(3):
            trainer = running["trainer", number]
            trainer.join(120)
            assert trainer.exitcode == 0
        status = [status_of(tmp_path, number) for number in range(2)]
    trained = [item for number in range(3) for item in trained_by(tmp_path, f"trainer-{number}")]
    for seen in rows_by_epoch(trained, 2):
        assert set(seen) == set(range(6000)), "an example was lost"
    twice = sum(len(rows) for _, rows in trained) - 2 * 6000
    assert twice <= sum(one["num_samples_repeated"] for one in status)
    kills_of_trainers = sum(incarnations["trainer", number] - 1 for number in range(3))
    # Of each reader a trainer holds what it prefetched (2), as much that it has not yet acknowledged, and one to train on.
    assert sum(one["num_batches_repeated"] for one in status) <= kills_of_trainers * 2 * (2 + 4 + 1)
    for one in status:
        assert (one["state"], one["num_done"], one["num_samples"]) == ("ended", one["num_batches"], 6000)


@pytest.mark.slow
def test_the_memory_of_a_reader_does_not_grow_with_assigned_batches(log, tmp_path):
    with contextlib.ExitStack() as stack:
        stack.enter_context(process(run_reader, log, tmp_path, 0, 1, epochs=1000, read_ahead_bytes=1 << 16))
        wait_for_reader(tmp_path, 0)
        feed = stack.enter_context(RemoteBatches([reader_process.connect(tmp_path, 0, "trainer-0")], name="trainer-0"))
        never_done = [next(feed) for _ in range(3)]  # as long as these are held, their assignments are stored
        rss_bytes = []
        for count, (_, ticket) in enumerate(feed):
            feed.acknowledge(ticket)
            if count in (1000, 12_000):
                rss_bytes.append(status_of(tmp_path, 0)["rss_bytes"])
            if count == 12_000:
                break
        status = status_of(tmp_path, 0)
    assert rss_bytes[1] < rss_bytes[0] + (16 << 20)
    assert status["queue_bytes"] <= (1 << 16) + 8 * 64
    assert 3 <= status["num_held"] <= 3 + 2 * 8 + 1
    assert (tmp_path / "roles" / "reader-0.progress").stat().st_size < 1.2 * (1 << 20)
    assert [ticket.number for _, ticket in never_done] == [0, 1, 2]
