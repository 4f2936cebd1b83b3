"""What other servers do for a trainer: sparse servers look up and update rows, dense servers average parameters."""

from __future__ import annotations

from dataclasses import replace

from rowstead.plan.cost import host_processor
from rowstead.plan.schedule import Task
from rowstead.plan.trainer_node import TrainerNode
from rowstead.plan.work import ID_BYTES
from rowstead.spec.machine import Link, Machine
from rowstead.spec.phases import Phase
from rowstead.spec.sync import SYNC_MODES

NUM_PIECES = 4
"""Pieces that a request is split into, so that one is packed while another is sent."""


def pieces(stem: str) -> tuple[str, ...]:
    """The names of a task that is split into pieces."""
    return tuple(f"{stem} {piece}" for piece in range(NUM_PIECES))


def request(node: TrainerNode, *, after: tuple[str, ...]) -> list[Task]:
    """Ids go to the sparse servers, which look up and pool; vectors come back, in pieces that overlap."""
    request_bytes, reply_bytes = ids_bytes(node), vectors_bytes(node)
    serving_s = _serving_s(node, request_bytes + reply_bytes, update=False)
    tasks = []
    for piece in range(NUM_PIECES):
        tasks += [
            _message(node, f"pack {piece}", Phase.LOOKUP, request_bytes / NUM_PIECES, after=after),
            *_wire(node, f"request {piece}", Phase.LOOKUP, "out", request_bytes / NUM_PIECES, after=(f"pack {piece}",)),
            _served(node, f"serve {piece}", Phase.LOOKUP, serving_s / NUM_PIECES, after=(f"request {piece}",)),
            *_wire(node, f"reply {piece}", Phase.LOOKUP, "in", reply_bytes / NUM_PIECES, after=(f"serve {piece}",)),
        ]
    return tasks


def unpack(node: TrainerNode) -> list[Task]:
    """Pooled vectors are unpacked from the replies, and copied to the devices where there are some."""
    tasks = [
        _message(node, f"unpack {piece}", Phase.LOOKUP, vectors_bytes(node) / NUM_PIECES, after=(f"reply {piece}",))
        for piece in range(NUM_PIECES)
    ]
    return [*tasks, node.host_copy("copy pooled", Phase.EXCHANGE, after=pieces("unpack"))] if node.has_devices else tasks


def push(node: TrainerNode, *, after: tuple[str, ...]) -> list[Task]:
    """Gradients are sent; the servers apply them while the next step runs."""
    gradient_bytes = vectors_bytes(node)  # the servers still have the ids
    serving_s = _serving_s(node, gradient_bytes, update=True)
    sent = _wire(node, "send gradients", Phase.ROW_UPDATE, "out", gradient_bytes, after=())
    applied = _served(node, "apply gradients", Phase.ROW_UPDATE, serving_s, after=())
    return [
        _message(node, "pack gradients", Phase.ROW_UPDATE, gradient_bytes, after=after),
        *(replace(task, hidden=True) for task in (*sent, applied)),
    ]


def average(node: TrainerNode, *, after: str) -> list[Task]:
    """Dense parameters are averaged with the dense servers, or gradients in every step; each step is charged its share.

    A mode that exchanges in every step waits until the servers have heard all trainers.
    """
    mode = SYNC_MODES[node.setup.sync]
    setup, network, server, wire = node.setup, node.network, _server(node), _server_wire(node)
    num_bytes = node.work.dense_bytes / (1 if mode.every_step else setup.sync_every)
    wait_s = num_bytes / min(network.bandwidth_bytes_per_s, wire.bandwidth_bytes_per_s * setup.num_dense_servers)
    serving_s = max(num_bytes / wire.bandwidth_bytes_per_s, node.message_s(server, 2 * num_bytes)) / setup.num_dense_servers
    own_s, busy_s = num_bytes / network.bandwidth_bytes_per_s, serving_s * setup.num_trainers
    waited_s = max(wait_s, busy_s if mode.every_step else serving_s)
    hidden = mode.in_background
    return [
        node.on_cores("pack dense", Phase.SYNC, 2 * num_bytes, after=(after,), hidden=hidden),
        Task("average dense", Phase.SYNC, "dense servers", waited_s, busy_s=busy_s, after=("pack dense",), hidden=hidden),
        Task("send dense", Phase.SYNC, "network out", own_s, hidden=True),
        Task("receive average", Phase.SYNC, "network in", own_s, hidden=True),
    ]


def ids_bytes(node: TrainerNode) -> float:
    """Bytes of the ids of a batch; of a table with histories only the distinct ones are sent."""
    batch = node.server_batch
    return ID_BYTES * sum(t.distinct_rows(batch) if t.histories else batch * t.ids_per_sample for t in node.work.tables)


def vectors_bytes(node: TrainerNode) -> float:
    """Bytes of the pooled vectors of a batch, and of the distinct rows of tables with histories; their gradients take as many."""
    batch = node.server_batch
    return sum(4 * t.width * t.distinct_rows(batch) if t.histories else batch * t.pooled_bytes for t in node.work.tables)


def _server(node: TrainerNode) -> Machine:
    assert node.setup.server is not None, "Setup requires `server` with parameter servers"
    return node.setup.server


def _server_wire(node: TrainerNode) -> Link:
    network = _server(node).network
    assert network is not None, "predict refuses parameter servers without a network"
    return network


def _serving_s(node: TrainerNode, message_bytes: float, *, update: bool) -> float:
    """Seconds of each sparse server for its part of this trainer's batch."""
    server, count = _server(node), node.setup.num_sparse_servers
    processor = host_processor(server, node.software)
    rows_s = node.rows_s(processor, node.off_devices, node.server_batch / count, count, update=update)
    calls_s = len(node.off_devices) * node.software.operator_s
    return rows_s + (calls_s + node.message_s(server, message_bytes)) / count


def _served(node: TrainerNode, name: str, phase: Phase, seconds: float, *, after: tuple[str, ...]) -> Task:
    """Something that the sparse servers do for one trainer after the other."""
    return Task(name, phase, "sparse servers", seconds, after=after, busy_s=seconds * node.setup.num_trainers)


def _message(node: TrainerNode, name: str, phase: Phase, num_bytes: float, *, after: tuple[str, ...]) -> Task:
    task = node.on_cores(name, phase, num_bytes, after=after)
    return replace(task, seconds=node.software.rpc_s / NUM_PIECES + task.seconds)


def _wire(
    node: TrainerNode, name: str, phase: Phase, direction: str, num_bytes: float, *, after: tuple[str, ...]
) -> list[Task]:
    """Bytes between this trainer and the sparse servers, at the speed of the slower end; the other end is busy meanwhile.

    `direction` is the trainer's. The servers' end carries the bytes of all trainers.
    """
    own, theirs = node.network, _server_wire(node)
    own_s, latency_s = num_bytes / own.bandwidth_bytes_per_s, own.latency_s / NUM_PIECES
    theirs_s = num_bytes / (theirs.bandwidth_bytes_per_s * node.setup.num_sparse_servers)
    ends = [
        (f"network {direction}", own_s, own_s),
        (f"servers' network {'in' if direction == 'out' else 'out'}", theirs_s, theirs_s * node.setup.num_trainers),
    ]
    (slow, seconds, busy_s), (fast, _, fast_busy_s) = ends if own_s >= theirs_s else reversed(ends)
    return [
        Task(name, phase, slow, latency_s + seconds, busy_s=busy_s, after=after),
        Task(f"{name}, other end", phase, fast, fast_busy_s, hidden=True),
    ]
