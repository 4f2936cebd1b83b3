"""Broken connections, and silent, killed or slow servers: each request runs once, or fails with an error."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from rowstead.fleet.deduplication import Caller
from rowstead.fleet.keys import Keys
from rowstead.fleet.rpc_client import Client, ServerUnavailable
from rowstead.fleet.rpc_server import DeferredReply, Server
from rowstead.fleet.wire import Message
from rowstead.spec.errors import RowsteadError
from tests.fleet.counting import Counter, eventually
from tests.fleet.echo_server import Process
from tests.fleet.relay import Relay


def test_a_lost_reply_is_resent_and_the_handler_runs_once(server: Server, setting: dict[str, Any], counter: Counter) -> None:
    with Relay(server.address) as relay, Client(relay.address, name="me", keys=setting["keys"]) as client:
        client.call("count", {"n": 0})
        relay.loses_replies = True
        pending = [client.start("count", {"n": n}) for n in (1, 2, 3)]
        eventually(lambda: counter.seen == [0, 1, 2, 3])
        relay.cut()  # before replies pass again, since the last one may still be in transit
        relay.loses_replies = False
        assert [each.wait().facts["num_seen"] for each in pending] == [2, 3, 4]
        assert client.num_resent >= 3
    assert counter.seen == [0, 1, 2, 3]
    assert server.num_repeated >= 3


def test_a_request_that_is_still_running_is_not_started_again(setting: dict[str, Any]) -> None:
    started: list[DeferredReply] = []

    def begin(message: Message, caller: Caller) -> DeferredReply:
        started.append(DeferredReply())
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
            later.send(Message("ended", {"n": number}))
        assert [each.wait().facts["n"] for each in pending] == [0, 1, 2]
    assert len(started) == 3


def test_repeatedly_broken_connections_lose_and_repeat_nothing(
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
        assert client.num_resent > 0
    assert counter.seen == list(range(150))


def test_a_silent_server_is_detected_and_reached_at_another_address(counter: Counter) -> None:
    with Server({"count": counter}).start() as server, Relay(server.address) as pulled:
        addresses = [pulled.address]
        with Client(lambda: addresses[-1], name="me", resend_after_s=0.5) as client:
            client.call("count", {"n": 0})
            pulled.is_silent = True
            addresses.append(server.address)
            assert client.call("count", {"n": 1}, deadline_s=15).facts["n"] == 1
    assert counter.seen == [0, 1]


def test_a_server_restarted_on_another_port_is_found_again() -> None:
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
            assert client.num_resent >= 3


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "ipc:///folder/gone"])
def test_the_error_of_a_deadline_names_the_server_and_only_waiting_counts(address: str) -> None:
    with Client(address, name="trainer-0", keys=Keys.generate(), deadline_s=0.3) as client:
        pending = client.start("lookup")
        start_s = time.monotonic()
        with pytest.raises(
            ServerUnavailable, match=rf"server at {address} did not answer `lookup` of trainer-0 in time; there is no"
        ):
            pending.wait()
        assert 0.25 < time.monotonic() - start_s < 20
        assert client.num_in_flight == 0
        assert client.waited_s >= 0.3


def test_a_slow_server_is_unavailable_only_after_the_deadline_and_the_error_says_it_may_be_slow(counter: Counter) -> None:
    counter.gate.clear()
    try:
        with Server({"count": counter}).start() as server, Client(server.address, name="me") as client:
            with pytest.raises(ServerUnavailable, match="may only be slow"):
                client.call("count", {"n": 0}, deadline_s=0.3)
            counter.gate.set()
            assert client.call("count", {"n": 1}).facts["num_seen"] == 2
    finally:
        counter.gate.set()


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

        with Client(never, name="me") as client, pytest.raises(ServerUnavailable, match=r"fleet.json is missing"):
            client.call("count", {"n": 0}, deadline_s=0.2)
