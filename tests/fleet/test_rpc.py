"""Clients and servers over real sockets: correct replies, in order, in bounded memory, and no resource leaks."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import psutil
import pytest
import torch

from rowstead.fleet.deduplication import Caller
from rowstead.fleet.keys import Keys
from rowstead.fleet.rpc_client import Client, RefusedError, ServerUnavailable
from rowstead.fleet.rpc_server import DeferredReply, Server
from rowstead.fleet.wire import Limits, Message
from rowstead.spec.errors import RowsteadError
from tests.fleet.counting import Counter, eventually
from tests.fleet.echo_server import Process, echo


def test_replies_are_correct_for_small_and_large_tensors(server: Server, setting: dict[str, Any]) -> None:
    with Client(server.address, name="me", keys=setting["keys"]) as client:
        for num_rows in (0, 1, 77, 2000, 50_000):
            sent = [torch.randn(num_rows, 16), torch.arange(num_rows), torch.randn(num_rows).bfloat16()]
            answer = client.call("echo", {"n": num_rows, "é": [1.5, None]}, sent)
            assert answer.facts == {"n": num_rows, "é": [1.5, None]}
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(sent, answer.tensors, strict=True))
            answer.tensors[1].add_(1)  # received tensors are writable


def test_concurrent_clients_get_their_own_replies(server: Server, setting: dict[str, Any]) -> None:
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


def test_errors_of_a_handler_reach_the_client_and_the_server_continues() -> None:
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
        with pytest.raises(RefusedError, match="cannot send its reply to `unsendable`: TypeError"):
            client.call("unsendable")
        with pytest.raises(RefusedError, match=r"unknown request `other`; known: echo, fail, status, unsendable"):
            client.call("other")
        assert client.call("echo", {"n": 1}).facts == {"n": 1}


def test_status_counts_what_the_server_has_done() -> None:
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
    assert {"waiting_s", "num_refused", "num_repeated"} <= facts.keys()


def test_a_deferred_reply_from_another_thread_does_not_block_the_client() -> None:
    waiting: list[DeferredReply] = []

    def round_of_two(message: Message, caller: Caller) -> DeferredReply:
        later = DeferredReply()
        waiting.append(later)
        return later

    with Server({"round": round_of_two, "echo": echo}).start() as server, Client(server.address, name="me") as client:
        first, second, third = (client.start("round") for _ in range(3))
        assert client.call("echo", {"n": 1}).facts == {"n": 1}
        eventually(lambda: len(waiting) == 3)
        assert not first.is_done
        waiting[1].send(Message("mean", {"n": 2}))
        assert second.wait().facts == {"n": 2}
        waiting[0].send(RowsteadError("one is missing"))
        with pytest.raises(RefusedError, match="one is missing"):
            first.wait()
        waiting[2].send(Message("mean", {"n": 3}))
        eventually(lambda: third.is_done)
        assert third.wait().facts == {"n": 3}


def test_a_client_blocks_at_max_in_flight(server: Server, setting: dict[str, Any], counter: Counter) -> None:
    counter.gate.clear()
    with Client(server.address, name="me", keys=setting["keys"], max_in_flight=3) as client:
        for n in range(3):
            client.start("count", {"n": n})
        timer = threading.Timer(0.1, counter.gate.set)
        timer.start()
        before_s = client.waited_s
        client.start("count", {"n": 3}).wait()
        assert client.waited_s - before_s > 0.05
        timer.join()
    assert counter.seen == [0, 1, 2, 3]


def test_requests_over_the_limit_per_client_are_refused_not_queued() -> None:
    started: list[DeferredReply] = []

    def begin(message: Message, caller: Caller) -> DeferredReply:
        started.append(DeferredReply())
        return started[-1]

    limits = Limits(in_flight_per_client=4)
    with (
        Server({"begin": begin}, limits=limits).start() as server,
        Client(server.address, name="me", max_in_flight=8) as client,
    ):
        pending = [client.start("begin") for _ in range(6)]
        for each in pending[4:]:
            with pytest.raises(RefusedError, match="too many requests in flight"):
                each.wait()
        assert len(started) == 4
        for number, later in enumerate(started):
            later.send(Message("ended", {"n": number}))
        assert [each.wait().facts["n"] for each in pending[:4]] == [0, 1, 2, 3]


def test_a_server_ten_times_slower_does_not_grow_memory_on_either_side() -> None:
    """Of the 400 MB sent, neither side ever holds more than what is in flight."""
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


def test_the_server_drops_replies_that_the_client_has_received(server: Server, setting: dict[str, Any]) -> None:
    with Client(server.address, name="me", keys=setting["keys"]) as client:
        for _ in range(20):
            client.call("echo", {}, [torch.zeros(250_000)])
        assert client.call("status").facts["kept_replies_bytes"] < 3 << 20


def test_closing_leaves_no_thread_and_no_descriptor(setting: dict[str, Any]) -> None:
    def use() -> None:
        with (
            Server({"echo": echo}, **setting).start() as server,
            Client(server.address, name="me", keys=setting["keys"]) as client,
        ):
            client.call("echo", {}, [torch.zeros(100_000)])
            client.start("echo", {}, [torch.zeros(100_000)])

    use()  # ZeroMQ's bindings have started their own threads now
    this = psutil.Process()
    descriptors, threads = this.num_fds(), this.num_threads()
    for _ in range(5):
        use()
    eventually(lambda: this.num_threads() <= threads)
    assert this.num_fds() <= descriptors
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("rowstead-")]


def test_unanswered_requests_of_a_closed_client_fail() -> None:
    client = Client("tcp://127.0.0.1:1", name="me", keys=Keys.generate())
    pending = client.start("echo")
    client.close()
    client.close()
    with pytest.raises(ServerUnavailable, match="closed before `echo` was answered"):
        pending.wait()
    with pytest.raises(RuntimeError, match="closed"):
        client.start("echo")


def test_a_server_stops_when_told_to_and_not_before() -> None:
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


def test_collecting_an_unclosed_client_does_not_block(server: Server, setting: dict[str, Any]) -> None:
    client = Client(server.address, name="me", keys=setting["keys"])
    client.call("echo")
    descriptors = psutil.Process().num_fds()
    pending = client.start("count", {"n": 1})  # a reference cycle with its client, for the garbage collector
    known = weakref.ref(client)
    del client, pending
    thread = threading.Thread(target=gc.collect, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert known() is None
    eventually(lambda: psutil.Process().num_fds() < descriptors)
