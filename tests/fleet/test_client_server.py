"""Clients and servers over real sockets: right answers, once each, in bounded time and memory, whatever fails between them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch

from rowstead.fleet.client import Client, RefusedError, ServerGone
from rowstead.fleet.keys import Keys
from rowstead.fleet.ledger import Caller
from rowstead.fleet.server import Later, Server
from rowstead.fleet.wire import Limits, Message
from rowstead.spec.errors import RowsteadError
from tests.fleet.echo_server import Process, echo
from tests.fleet.relay import Relay


def eventually(is_met: Callable[[], bool], within_s: float = 10.0) -> None:
    """Wait for a condition, and fail when it does not come."""
    until_s = time.monotonic() + within_s
    while not is_met():
        assert time.monotonic() < until_s, "it did not happen in time"
        time.sleep(0.001)


class Counter:
    """A handler that must run once for each request."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def __call__(self, message: Message, caller: Caller) -> Message:
        self.may_go_on.wait(timeout=30)
        self.seen.append(message.facts["n"])
        return Message("counted", {"n": message.facts["n"], "num_seen": len(self.seen)})


@pytest.fixture(params=[(1, False), (3, False), (1, True)], ids=["one thread", "threads", "keys"])
def setting(request: pytest.FixtureRequest) -> dict[str, Any]:
    threads, has_keys = request.param
    return {"threads": threads, "keys": Keys.make() if has_keys else None}


@pytest.fixture
def counter() -> Counter:
    return Counter()


@pytest.fixture
def server(setting: dict[str, Any], counter: Counter) -> Iterator[Server]:
    with Server({"echo": echo, "count": counter}, **setting).start() as server:
        yield server


def test_answers_are_right_for_small_and_large_tensors(server: Server, setting: dict[str, Any]) -> None:
    with Client(server.address, name="me", keys=setting["keys"]) as client:
        for num_rows in (0, 1, 77, 2000, 50_000):
            sent = [torch.randn(num_rows, 16), torch.arange(num_rows), torch.randn(num_rows).bfloat16()]
            answer = client.call("echo", {"n": num_rows, "é": [1.5, None]}, sent)
            assert answer.facts == {"n": num_rows, "é": [1.5, None]}
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(sent, answer.tensors, strict=True))
            answer.tensors[1].add_(1)  # they are ours to write to


def test_many_clients_at_once_get_their_own_answers(server: Server, setting: dict[str, Any]) -> None:
    wrong: list[str] = []

    def ask(number: int) -> None:
        with Client(server.address, name=f"client-{number}", keys=setting["keys"]) as client:
            pending = [client.start("echo", {"of": [number, k]}, [torch.full((1000,), float(k))]) for k in range(50)]
            for k, each in enumerate(pending):
                answer = each.wait()
                if answer.facts["of"] != [number, k] or not bool((answer.tensors[0] == k).all()):
                    wrong.append(f"{number} {k}")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert server.num_requests == 300


def test_requests_of_one_client_run_in_order(server: Server, setting: dict[str, Any], counter: Counter) -> None:
    with Client(server.address, name="me", keys=setting["keys"], max_in_flight=16) as client:
        pending = [client.start("count", {"n": n}) for n in range(200)]
        assert [each.wait().facts["n"] for each in pending] == list(range(200))
    assert counter.seen == list(range(200))


def test_a_problem_of_the_user_is_told_and_one_of_ours_is_named_and_the_server_goes_on() -> None:
    def fail(message: Message, caller: Caller) -> Message:
        if message.facts:
            raise RowsteadError("no such table: did you mean `users`?")
        return Message("never", {"x": 1 / 0})

    def unsendable(message: Message, caller: Caller) -> Message:
        return Message("x", {"object": object()})

    handlers = {"fail": fail, "unsendable": unsendable, "echo": echo}
    with Server(handlers, name="sparse-1").start() as server, Client(server.address, name="me") as client:
        with pytest.raises(RefusedError, match=r"did you mean `users`\?$"):
            client.call("fail", {"a": 1})
        with pytest.raises(RefusedError, match="sparse-1 failed at `fail`: ZeroDivisionError"):
            client.call("fail")
        with pytest.raises(RefusedError, match="cannot send its answer to `unsendable`: TypeError"):
            client.call("unsendable")
        with pytest.raises(RefusedError, match=r"nobody answers `other` here; known: echo, fail, status, unsendable"):
            client.call("other")
        assert client.call("echo", {"n": 1}).facts == {"n": 1}


def test_status_says_what_the_server_has_done() -> None:
    with (
        Server({"echo": echo}, name="x", status=lambda: {"num_samples": 5}).start() as server,
        Client(server.address, name="me") as client,
    ):
        client.call("echo", {}, [torch.zeros(1000)])
        facts = client.call("status").facts
    assert facts["name"] == "x"
    assert facts["num_samples"] == 5
    assert facts["num_requests"] == 2
    assert facts["num_bytes_received"] > 4000 < facts["num_bytes_sent"]
    assert facts["cpu_s"] > 0
    assert facts["rss_bytes"] > 1 << 20
    assert {"queue_depth", "waiting_s", "num_refused", "num_repeated"} <= facts.keys()


def test_an_answer_may_come_later_from_another_thread_and_the_client_is_not_held_up() -> None:
    waiting: list[Later] = []

    def round_of_two(message: Message, caller: Caller) -> Later:
        later = Later()
        waiting.append(later)
        return later

    with Server({"round": round_of_two, "echo": echo}).start() as server, Client(server.address, name="me") as client:
        first, second, third = (client.start("round") for _ in range(3))
        assert client.call("echo", {"n": 1}).facts == {"n": 1}
        eventually(lambda: len(waiting) == 3)
        assert not first.is_done
        waiting[1].answer(Message("mean", {"n": 2}))
        assert second.wait().facts == {"n": 2}
        waiting[0].fail("one is missing")
        with pytest.raises(RefusedError, match="one is missing"):
            first.wait()
        waiting[2].answer(Message("mean", {"n": 3}))
        eventually(lambda: third.is_done)
        assert third.wait().facts == {"n": 3}


def test_an_answer_that_was_lost_is_given_again_and_the_handler_runs_once(
    server: Server, setting: dict[str, Any], counter: Counter
) -> None:
    with Relay(server.address) as relay, Client(relay.address, name="me", keys=setting["keys"]) as client:
        client.call("count", {"n": 0})
        relay.loses_answers = True
        pending = [client.start("count", {"n": n}) for n in (1, 2, 3)]
        eventually(lambda: counter.seen == [0, 1, 2, 3])
        relay.loses_answers = False
        relay.cut()
        assert [each.wait().facts["num_seen"] for each in pending] == [2, 3, 4]
        assert client.num_sent_again >= 3
    assert counter.seen == [0, 1, 2, 3]
    assert server.num_repeated >= 3


def test_a_request_that_is_still_running_is_not_started_again(setting: dict[str, Any]) -> None:
    started: list[Later] = []

    def begin(message: Message, caller: Caller) -> Later:
        started.append(Later())
        return started[-1]

    with (
        Server({"begin": begin}, **setting).start() as server,
        Relay(server.address) as relay,
        Client(relay.address, name="me", keys=setting["keys"]) as client,
    ):
        pending = [client.start("begin") for _ in range(3)]
        eventually(lambda: pending[0].is_done or len(started) == 3)
        for num_repeated in (3, 6):
            relay.cut()
            eventually(lambda num_repeated=num_repeated: pending[0].is_done or server.num_repeated >= num_repeated)  # type: ignore[misc]
        for number, later in enumerate(started):
            later.answer(Message("ended", {"n": number}))
        assert [each.wait().facts["n"] for each in pending] == [0, 1, 2]
    assert len(started) == 3


def test_one_that_waits_for_a_thread_is_not_queued_again(counter: Counter) -> None:
    counter.may_go_on.clear()
    with (
        Server({"count": counter}, threads=2).start() as server,
        Relay(server.address) as relay,
        Client(relay.address, name="me") as client,
    ):
        pending = [client.start("count", {"n": n}) for n in range(3)]
        eventually(lambda: pending[0].is_done or server.queue_depth == 3)
        relay.cut()
        eventually(lambda: pending[0].is_done or server.num_repeated >= 3)
        assert server.queue_depth == 3
        counter.may_go_on.set()
        assert [each.wait().facts["n"] for each in pending] == [0, 1, 2]
    assert counter.seen == [0, 1, 2]


def test_connections_that_break_again_and_again_lose_and_repeat_nothing(
    server: Server, setting: dict[str, Any], counter: Counter
) -> None:
    with Relay(server.address) as relay, Client(relay.address, name="me", keys=setting["keys"]) as client:
        ended = threading.Event()

        def vandal() -> None:
            while not ended.wait(0.03):
                relay.cut()

        thread = threading.Thread(target=vandal)
        thread.start()
        try:
            pending = []
            for n in range(150):
                pending.append(client.start("count", {"n": n}, [torch.zeros(5000)]))
                ended.wait(0.001)
            assert [each.wait().facts["n"] for each in pending] == list(range(150))
        finally:
            ended.set()
            thread.join()
        assert client.num_sent_again > 0
    assert counter.seen == list(range(150))


def test_a_server_that_is_silent_is_noticed_and_reached_again_by_another_way(counter: Counter) -> None:
    with Server({"count": counter}).start() as server, Relay(server.address) as pulled:
        addresses = [pulled.address]
        with Client(lambda: addresses[-1], name="me", send_again_after_s=0.5) as client:
            client.call("count", {"n": 0})
            pulled.is_silent = True
            addresses.append(server.address)
            assert client.call("count", {"n": 1}, deadline_s=15).facts["n"] == 1
    assert counter.seen == [0, 1]


def test_a_server_that_was_killed_and_started_on_another_port_is_found_again() -> None:
    with Process() as first, Process() as second:
        running = [first]
        with Client(lambda: running[-1].address, name="me") as client:
            assert client.call("echo", {"n": 1}).facts == {"n": 1}
            incarnation = client.server_incarnation
            slow = client.start("echo", {"n": 2, "delay_s": 0.5})
            queued = [client.start("echo", {"n": n}, [torch.full((100_000,), float(n))]) for n in (3, 4)]
            first.kill()
            running.append(second)
            assert slow.wait().facts["n"] == 2
            assert [each.wait().tensors[0][0].item() for each in queued] == [3.0, 4.0]
            assert client.server_incarnation != incarnation
            assert client.num_sent_again >= 3


def test_a_deadline_that_passes_says_who_did_not_answer_and_counts_only_waiting() -> None:
    with Client("tcp://127.0.0.1:1", name="trainer-0", deadline_s=0.3) as client:
        pending = client.start("lookup")
        start_s = time.monotonic()
        with pytest.raises(
            ServerGone, match=r"server at tcp://127.0.0.1:1 has not answered `lookup` of trainer-0 in time; there is no"
        ):
            pending.wait()
        assert 0.25 < time.monotonic() - start_s < 20
        assert client.num_in_flight == 0
        assert client.waited_s >= 0.3


def test_a_server_that_is_slow_is_not_taken_for_gone_before_the_deadline_and_said_to_be_slow_after_it(counter: Counter) -> None:
    counter.may_go_on.clear()
    try:
        with Server({"count": counter}).start() as server, Client(server.address, name="me") as client:
            with pytest.raises(ServerGone, match="perhaps only slow"):
                client.call("count", {"n": 0}, deadline_s=0.3)
            counter.may_go_on.set()
            assert client.call("count", {"n": 1}).facts["num_seen"] == 2
    finally:
        counter.may_go_on.set()


def test_a_client_waits_for_an_address_that_is_not_known_yet(counter: Counter) -> None:
    with Server({"count": counter}).start() as server:
        asked = []

        def address() -> str:
            asked.append(1)
            if len(asked) < 4:
                raise RowsteadError("fleet.json is missing")
            return server.address

        with Client(address, name="me") as client:
            assert client.call("count", {"n": 0}).facts["num_seen"] == 1

        def never() -> str:
            raise RowsteadError("fleet.json is missing")

        with Client(never, name="me") as client, pytest.raises(ServerGone, match=r"fleet.json is missing"):
            client.call("count", {"n": 0}, deadline_s=0.2)


def test_a_client_waits_when_as_many_requests_as_may_be_are_unanswered(
    server: Server, setting: dict[str, Any], counter: Counter
) -> None:
    counter.may_go_on.clear()
    with Client(server.address, name="me", keys=setting["keys"], max_in_flight=3) as client:
        for n in range(3):
            client.start("count", {"n": n})
        timer = threading.Timer(0.1, counter.may_go_on.set)
        timer.start()
        before_s = client.waited_s
        client.start("count", {"n": 3}).wait()
        assert client.waited_s - before_s > 0.05
        timer.join()
    assert counter.seen == [0, 1, 2, 3]


def test_more_requests_than_a_server_takes_of_one_client_are_refused_not_queued(counter: Counter) -> None:
    counter.may_go_on.clear()
    limits = Limits(in_flight_per_client=4)
    with (
        Server({"count": counter}, limits=limits, threads=2).start() as server,
        Client(server.address, name="me", max_in_flight=8) as client,
    ):
        pending = [client.start("count", {"n": n}) for n in range(6)]
        for each in pending[4:]:
            with pytest.raises(RefusedError, match="too many requests in flight"):
                each.wait()
        assert server.queue_depth == 4
        counter.may_go_on.set()
        assert [each.wait().facts["n"] for each in pending[:4]] == [0, 1, 2, 3]


def test_a_server_whose_queue_is_full_reads_no_more_until_there_is_room(counter: Counter) -> None:
    counter.may_go_on.clear()
    limits = Limits(queued_bytes=1 << 20)
    with Server({"count": counter}, limits=limits, threads=2).start() as server:
        clients = [Client(server.address, name=f"client-{number}") for number in range(4)]
        try:
            pending = [client.start("count", {"n": n}, [torch.zeros(100_000)]) for n in range(4) for client in clients]
            eventually(lambda: server._queued_bytes > limits.queued_bytes)
            assert server.queue_depth <= 4
            counter.may_go_on.set()
            for each in pending:
                each.wait()
            assert len(counter.seen) == 16
            eventually(lambda: server.queue_depth == 0)
        finally:
            counter.may_go_on.set()
            for client in clients:
                client.close()


def test_a_server_ten_times_slower_makes_memory_grow_neither_here_nor_there() -> None:
    """Of 400 MB that are sent no more than what is in flight is ever held, on either side."""
    with Process() as process, Client(process.address, name="me") as client:
        tensor_bytes = 1 << 20
        for delay_s in (0.0005, 0.005):
            peaks = []
            for _ in range(200):
                client.start("weigh", {"delay_s": delay_s}, [torch.ones(tensor_bytes // 4)])
                peaks.append(psutil.Process().memory_info().rss)
            facts = client.call("status").facts
            assert client.num_in_flight <= 8
            assert max(peaks) - peaks[10] < 60 * tensor_bytes
            if delay_s == 0.0005:
                fast_bytes = facts["rss_bytes"]
        assert facts["rss_bytes"] - fast_bytes < 60 * tensor_bytes
        assert facts["num_bytes_received"] > 400 * tensor_bytes


def test_answers_that_are_had_are_forgotten_by_the_server(server: Server, setting: dict[str, Any]) -> None:
    with Client(server.address, name="me", keys=setting["keys"]) as client:
        for _ in range(20):
            client.call("echo", {}, [torch.zeros(250_000)])
        assert client.call("status").facts["remembered_bytes"] < 3 << 20


def test_closing_leaves_no_thread_and_no_descriptor(setting: dict[str, Any]) -> None:
    def use() -> None:
        with (
            Server({"echo": echo}, **setting).start() as server,
            Client(server.address, name="me", keys=setting["keys"]) as client,
        ):
            client.call("echo", {}, [torch.zeros(100_000)])
            client.start("echo", {}, [torch.zeros(100_000)])

    use()  # what ZeroMQ's bindings start once and for all is there now
    this = psutil.Process()
    descriptors, threads = this.num_fds(), this.num_threads()
    for _ in range(5):
        use()
    eventually(lambda: this.num_threads() <= threads)
    assert this.num_fds() <= descriptors
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("rowstead-")]


def test_a_closed_client_says_so_and_what_it_left_unanswered_does_not_hang() -> None:
    client = Client("tcp://127.0.0.1:1", name="me")
    pending = client.start("echo")
    client.close()
    client.close()
    with pytest.raises(ServerGone, match="closed before `echo` was answered"):
        pending.wait()
    with pytest.raises(RuntimeError, match="closed"):
        client.start("echo")


def test_a_server_ends_when_it_is_told_to_and_not_before() -> None:
    ended = threading.Event()
    server = Server({"echo": echo})
    thread = threading.Thread(target=server.serve, args=(ended.is_set,))
    thread.start()
    with Client(server.address, name="me") as client:
        client.call("echo")
        assert thread.is_alive()
        ended.set()
        thread.join(timeout=10)
        assert not thread.is_alive()
    server.close()
