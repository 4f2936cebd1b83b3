"""What a trainer has done by other servers: rows of sparse parameter servers, and averages with the dense ones."""

from __future__ import annotations

from dataclasses import replace

from rowstead.plan import cost
from rowstead.plan.cost import host_processor
from rowstead.plan.schedule import Task
from rowstead.plan.trainer_node import TrainerNode
from rowstead.plan.work import ID_BYTES
from rowstead.spec.machine import Link, Machine

NUM_PIECES = 4
"""Pieces in which requests to servers travel, so that one is packed while another is on the wire."""


def pieces(stem: str) -> tuple[str, ...]:
    """The names of a task that is done piece by piece."""
    return tuple(f"{stem} {piece}" for piece in range(NUM_PIECES))


def request(site: TrainerNode, *, after: tuple[str, ...]) -> list[Task]:
    """Ids go to the sparse servers, which read and pool; pooled vectors come back, in pieces that overlap."""
    ids_bytes = site.server_batch * ID_BYTES * site.work.ids_per_sample
    pooled_bytes = site.server_batch * site.work.pooled_bytes
    serving_s = _serving_s(site, ids_bytes + pooled_bytes, update=False)
    tasks = []
    for piece in range(NUM_PIECES):
        tasks += [
            _message(site, f"pack {piece}", ids_bytes / NUM_PIECES, after=after),
            *_wire(site, f"request {piece}", "out", ids_bytes / NUM_PIECES, after=(f"pack {piece}",)),
            _served(site, f"serve {piece}", serving_s / NUM_PIECES, after=(f"request {piece}",)),
            *_wire(site, f"answer {piece}", "in", pooled_bytes / NUM_PIECES, after=(f"serve {piece}",)),
        ]
    return tasks


def unpack(site: TrainerNode) -> list[Task]:
    """Pooled vectors are taken out of the answers, and copied to the devices where there are some."""
    pooled_bytes = site.server_batch * site.work.pooled_bytes
    tasks = [
        _message(site, f"unpack {piece}", pooled_bytes / NUM_PIECES, after=(f"answer {piece}",)) for piece in range(NUM_PIECES)
    ]
    return [*tasks, site.host_copy("copy pooled", after=pieces("unpack"))] if site.has_devices else tasks


def push(site: TrainerNode) -> list[Task]:
    """Gradients are sent off; the servers apply them while the next step runs."""
    gradient_bytes = site.server_batch * site.work.pooled_bytes  # the servers still have the ids
    serving_s = _serving_s(site, gradient_bytes, update=True)
    return [
        _message(site, "pack gradients", gradient_bytes, after=("top", "copy gradients")),
        *(replace(task, hidden=True) for task in _wire(site, "send gradients", "out", gradient_bytes, after=())),
        replace(_served(site, "apply gradients", serving_s, after=()), hidden=True),
    ]


def average(site: TrainerNode, *, after: str) -> list[Task]:
    """Now and then dense parameters go to the dense servers, which keep an average, and it comes back; of each step its share."""
    setup, network, server, wire = site.setup, site.network, _server(site), _server_wire(site)
    num_bytes = site.work.dense_bytes / setup.sync_every
    wait_s = num_bytes / min(network.bandwidth_bytes_per_s, wire.bandwidth_bytes_per_s * setup.num_dense_servers)
    serving_s = max(num_bytes / wire.bandwidth_bytes_per_s, site.message_s(server, 2 * num_bytes)) / setup.num_dense_servers
    own_s = num_bytes / network.bandwidth_bytes_per_s
    return [
        site.on_cores("pack dense", 2 * num_bytes, after=(after,)),
        Task(
            name="average dense",
            resource="dense servers",
            seconds=max(wait_s, serving_s),
            busy_s=serving_s * setup.num_trainers,
            after=("pack dense",),
        ),
        Task(name="dense on the wire", resource="network out", seconds=own_s, hidden=True),
        Task(name="average on the wire", resource="network in", seconds=own_s, hidden=True),
    ]


def _server(site: TrainerNode) -> Machine:
    assert site.setup.server is not None, "a set-up with parameter servers says what they are"
    return site.setup.server


def _server_wire(site: TrainerNode) -> Link:
    network = _server(site).network
    assert network is not None, "predict refuses parameter servers without a network"
    return network


def _serving_s(site: TrainerNode, message_bytes: float, *, update: bool) -> float:
    """Seconds of each sparse server for its part of this trainer's batch."""
    server, count, software = _server(site), site.setup.num_sparse_servers, site.software
    processor, batch = host_processor(server, software), site.server_batch / count
    if update:
        rows_s = cost.update_s(processor, site.off_devices, batch, software, num_sharing=count)
    else:
        rows_s = cost.lookup_s(processor, site.off_devices, batch, num_sharing=count)
    calls_s = len(site.off_devices) * software.operator_s
    return rows_s + (calls_s + site.message_s(server, message_bytes)) / count


def _served(site: TrainerNode, name: str, seconds: float, *, after: tuple[str, ...]) -> Task:
    """Something that the sparse servers do for each trainer in turn."""
    return Task(name=name, resource="sparse servers", seconds=seconds, after=after, busy_s=seconds * site.setup.num_trainers)


def _message(site: TrainerNode, name: str, num_bytes: float, *, after: tuple[str, ...]) -> Task:
    task = site.on_cores(name, num_bytes, after=after)
    return replace(task, seconds=site.software.rpc_s / NUM_PIECES + task.seconds)


def _wire(site: TrainerNode, name: str, direction: str, num_bytes: float, *, after: tuple[str, ...]) -> list[Task]:
    """Bytes between this trainer and the sparse servers, at the speed of the slower end; the other end is busy meanwhile.

    `direction` is that of the trainer; what goes out here comes in there. The servers' end carries the bytes of all trainers.
    """
    own, theirs = site.network, _server_wire(site)
    own_s = num_bytes / own.bandwidth_bytes_per_s
    theirs_s = num_bytes / (theirs.bandwidth_bytes_per_s * site.setup.num_sparse_servers)
    ends = [
        (f"network {direction}", own_s, own_s),
        (f"servers' network {'in' if direction == 'out' else 'out'}", theirs_s, theirs_s * site.setup.num_trainers),
    ]
    (slow, seconds, busy_s), (fast, _, beside_s) = ends if own_s >= theirs_s else reversed(ends)
    return [
        Task(name=name, resource=slow, seconds=own.latency_s / NUM_PIECES + seconds, busy_s=busy_s, after=after),
        Task(name=f"{name}, the other end", resource=fast, seconds=beside_s, hidden=True),
    ]
