"""Any number of dense servers gives the same parameters as one, and trainers continue without those that are killed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rowstead.fleet.dense_client import DenseServerClient
from rowstead.fleet.dense_server import DenseServerProcess
from rowstead.fleet.dense_server_state import DenseServerState, LocalDenseServer
from rowstead.fleet.rpc_client import Client
from rowstead.training.sync_base import DenseServer, DenseServerUnavailable
from tests.small_runs import wait_until

NUM_MEMBERS = 3


class DenseServers:
    """Running dense servers, which can be killed and started again, and their clients."""

    def __init__(self, num_servers: int, folder: Path | None = None) -> None:
        self._folder = folder
        self.servers = [self._start(number) for number in range(num_servers)]
        self._clients: list[DenseServerClient] = []

    def _start(self, number: int) -> DenseServerProcess:
        snapshot = None if self._folder is None else self._folder / f"dense-{number}.safetensors"
        return DenseServerProcess(snapshot=snapshot, snapshot_every_s=1e9).start()

    def connect(self, name: str, **timeouts: float) -> DenseServerClient:
        clients = [
            Client(lambda number=number: self.servers[number].address, name=name)  # type: ignore[misc]
            for number in range(len(self.servers))
        ]
        self._clients.append(DenseServerClient(clients, **timeouts))
        return self._clients[-1]

    def kill(self, number: int) -> None:
        """Stop a server; its snapshot stays what it was, as after a kill."""
        server = self.servers[number]
        server._snapshot = None
        server.close()

    def restart(self, number: int) -> None:
        self.servers[number] = self._start(number)

    def close(self) -> None:
        for client in self._clients:
            client.close()
        for server in self.servers:
            server.close()


@contextlib.contextmanager
def running(num_servers: int, folder: Path | None = None) -> Iterator[DenseServers]:
    servers = DenseServers(num_servers, folder)
    try:
        yield servers
    finally:
        servers.close()


CALLS = st.one_of(
    st.tuples(st.just("elastic_average"), st.integers(0, NUM_MEMBERS - 1), st.floats(0.0, 1.0)),
    st.tuples(st.just("push"), st.integers(0, NUM_MEMBERS - 1), st.none()),
    st.tuples(st.just("average"), st.none(), st.none()),
    st.tuples(st.just("average_parameters"), st.none(), st.tuples(st.floats(0.0, 0.9), st.floats(0.1, 1.0))),
    st.tuples(st.just("save_state"), st.integers(0, NUM_MEMBERS - 1), st.integers(0, 25)),
    st.tuples(st.just("finish"), st.integers(0, NUM_MEMBERS - 1), st.none()),
)


def run(members: list[Any], calls: list[tuple[str, Any, Any]], size: int) -> list[Tensor]:
    """All results of a series of calls; in a round, all members call at once."""
    draw = torch.Generator().manual_seed(size)

    def some(num: int = size) -> Tensor:
        return torch.randn(num, generator=draw, dtype=torch.float64)

    results = [member.join(some()) for member in members]
    with ThreadPoolExecutor(len(members)) as pool:
        for kind, number, option in calls:
            if kind == "average":
                own = [some() for _ in members]
                rounds = pool.map(lambda pair: pair[0].average(pair[1], "gradients.0"), zip(members, own, strict=True))
                results += [mean for mean, _ in rounds]
            elif kind == "average_parameters":
                momentum, lr = option
                own = [some() for _ in members]
                results += pool.map(
                    lambda pair, rule=(momentum, lr): pair[0].average_parameters(pair[1], momentum=rule[0], lr=rule[1]),  # type: ignore[misc]
                    zip(members, own, strict=True),
                )
            elif kind == "elastic_average":
                results.append(members[number].elastic_average(some(), option))
            elif kind == "save_state":
                members[number].save_state("optimizer", some(option))
                results.append(members[number - 1].load_state("optimizer"))
            elif kind == "finish":
                members[number].finish(some())
                results.append(members[number].join(some()))
            else:
                members[number].push(some())
            results.append(members[0].pull())
    return results


@settings(max_examples=25, deadline=None)
@given(num_servers=st.integers(1, 5), size=st.integers(1, 40), calls=st.lists(CALLS, max_size=6))
def test_any_number_of_servers_gives_the_parameters_of_one(
    num_servers: int, size: int, calls: list[tuple[str, Any, Any]]
) -> None:
    state = DenseServerState()
    expected = run([LocalDenseServer(state, f"trainer-{i}.0") for i in range(NUM_MEMBERS)], calls, size)
    with running(num_servers) as servers:
        found = run([servers.connect(f"trainer-{i}.0") for i in range(NUM_MEMBERS)], calls, size)
        held = [server.status()["num_parameters"] for server in servers.servers]
    assert sum(held) == size
    assert max(held) - min(held) <= 1, "every server holds an equal share"
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=0)


def test_exchanges_continue_with_the_other_servers_while_one_is_gone(tmp_path: Path) -> None:
    with running(2, tmp_path) as servers:
        client = servers.connect("trainer-0.0", exchange_timeout_s=0.5)
        other = servers.connect("trainer-1.0", exchange_timeout_s=0.5)
        for each in (client, other):
            each.join(torch.zeros(4))
        servers.kill(1)
        local = torch.ones(4)
        assert client.elastic_average(local, 0.5).tolist() == [0.5, 0.5, 0.0, 0.0], "nothing moves in the missing range"
        before_s = client._clients[1].waited_s
        client.push(torch.full((4,), 3.0))
        other.leave()
        assert client.average(torch.full((4,), 5.0), "gradients.0")[0].tolist() == [5.0] * 4
        assert client.average_parameters(torch.full((4,), 2.0)).tolist() == [2.0] * 4
        client.save_state("optimizer", torch.ones(6))
        waited_s = client._clients[1].waited_s - before_s
        assert waited_s == 0, "later calls do not wait for the missing server"
        assert client.num_partial == 4
        for needs_all in (client.pull, lambda: client.join(local), lambda: client.load_state("optimizer")):
            with pytest.raises(DenseServerUnavailable):
                needs_all()
        servers.restart(1)

        def is_back() -> bool:
            before = client.num_partial
            client.elastic_average(torch.full((4,), 8.0), 0.5)
            return client.num_partial == before

        wait_until(is_back, what="an exchange with both servers")
        moved = client.elastic_average(torch.zeros(4), 1.0)
        assert moved[2:].tolist() == [-8.0, -8.0], "the restarted server took over the parameters of the first trainer"
        assert client.pull().tolist() == [0.0] * 4


def test_without_any_server_a_trainer_is_told_so() -> None:
    with running(2) as servers:
        client: DenseServer = servers.connect("trainer-0.0", exchange_timeout_s=0.2)
        client.join(torch.zeros(4))
        for number in (0, 1):
            servers.kill(number)
        for _ in range(3):
            with pytest.raises(DenseServerUnavailable, match="the dense server is unavailable"):
                client.elastic_average(torch.ones(4), 0.5)


def test_final_parameters_are_on_every_server_when_one_is_killed_in_between(tmp_path: Path) -> None:
    with running(3, tmp_path) as servers:
        one, two = servers.connect("trainer-0.0"), servers.connect("trainer-1.0")
        one.join(torch.zeros(5))
        one.finish(torch.full((5,), 2.0))
        servers.kill(1)
        servers.restart(1)
        two.finish(torch.full((5,), 4.0))
        assert two.pull().tolist() == [3.0] * 5, "the mean of both"
