"""What the benchmark of remote rows counts; its timings are not tested."""

from __future__ import annotations

import threading

import torch
import zmq

from benchmarks.exchange import Echo, Exchange, Shape, _exchanges
from rowstead.distributed.sharding import piece_layout
from rowstead.fleet.remote_store import RemoteStore
from rowstead.fleet.rpc_client import Client
from rowstead.fleet.sparse_server import SparseServer
from rowstead.fleet.table_shard import TableShard
from rowstead.spec.row_optimizers import SparseOptimizerSpec

SMALL = Shape("small", 6, 500, 4, 40, num_servers=2, width=16)


def test_bytes_of_a_look_up_and_an_update_are_those_of_ids_vectors_and_gradients() -> None:
    layout, optimizer = SMALL.layout, SparseOptimizerSpec()
    servers = [
        SparseServer(TableShard(piece_layout(layout, SMALL.partition.pieces_of(layout, n)), optimizer)).start()
        for n in range(2)
    ]
    clients: list[Client] = []

    def connect(number: int) -> Client:
        clients.append(Client(servers[number].address, name=f"trainer-{number}"))
        return clients[-1]

    store = RemoteStore(layout, optimizer, SMALL.partition, connect, check=False)
    try:
        rng = torch.Generator().manual_seed(1)
        lookup, update = _exchanges(store, clients, SMALL.draw(rng), torch.randn(40, 6 * 16, generator=rng))
    finally:
        store.close()
        for server in servers:
            server.close()
    vectors, ids, heads = 4 * 40 * 6 * 16, 4 * 40 * 6 * 4, 2 * 700
    for each in (lookup, update):
        assert len(each.sent) == len(each.received) == 2
    # Ids may travel as 4 bytes or 8, and vectors once each way; beside them are headers and facts alone.
    assert ids <= sum(lookup.sent) <= 2 * ids + heads
    assert vectors <= sum(lookup.received) <= vectors + heads
    assert vectors <= sum(update.sent) <= vectors + heads
    assert 0 < sum(update.received) <= heads


def test_the_echo_sends_and_receives_as_many_bytes_as_it_is_told() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind("tcp://127.0.0.1:0")
    heard: list[int] = []

    def answer() -> None:
        for _ in range(2):
            route, wanted, content = router.recv_multipart()
            heard.append(len(content))
            router.send_multipart([route, bytes(int(wanted))])

    thread = threading.Thread(target=answer)
    thread.start()
    echo = Echo([router.getsockopt_string(zmq.LAST_ENDPOINT)])
    for num_bytes in (10, 200_000):
        echo.exchange(Exchange((num_bytes,), (num_bytes + 1,)))
    thread.join()
    echo.close()
    router.close(0)
    context.term()
    assert heard == [10, 200_000]
