"""Exchanges of a synchronous step: pooled vectors and gradients between the devices of a server, and between servers."""

from __future__ import annotations

from dataclasses import replace

from rowstead.plan.collective import across_servers_s, all_reduce_s, all_to_all_s
from rowstead.plan.schedule import Task
from rowstead.plan.trainer_node import TrainerNode
from rowstead.spec.phases import Phase


def exchange(node: TrainerNode, what: str, *, after: str) -> list[Task]:
    """All-to-all of pooled vectors (or their gradients) between the devices that hold tables and those that hold examples.

    Within a server it uses the links of the devices, between servers the network.
    """
    setup = node.setup
    sent = setup.batch_size * node.exchanged_bytes
    within = sent / setup.num_in_step
    tasks = []
    if setup.num_devices > 1 and node.through_host:
        moved = within * (setup.num_devices - 1) / setup.num_devices
        num_parts = len(node.on_devices) / setup.num_in_step * (setup.num_devices - 1) / setup.num_devices
        num_copies = max(1.0, node.software.operators_per_exchange * num_parts)
        tasks += _through_host(node, f"exchange {what}", moved, after=after, num_copies=num_copies)
    elif setup.num_devices > 1:
        seconds = all_to_all_s(node.fabric, setup.num_devices, within)
        tasks.append(Task(f"exchange {what}", Phase.EXCHANGE, "device links", seconds, after=(after,)))
    if setup.num_in_step > 1:
        tasks += _between_servers(node, what, setup.num_devices * sent, after=after, on_devices=node.has_devices)
    return tasks


def exchange_from_hosts(node: TrainerNode, what: str, *, after: str) -> list[Task]:
    """The same for tables in system memory, which are sharded over the servers of a step."""
    if node.setup.num_in_step == 1:
        return []
    num_bytes = node.server_batch * sum(table.pooled_bytes for table in node.off_devices) * node.wire_bytes / 4
    return _between_servers(node, f"host {what}", num_bytes, after=after, on_devices=False)


def all_reduce(node: TrainerNode, *, after: str) -> list[Task]:
    """Dense gradients are all-reduced over the devices of a server, then over servers, each device sending its part."""
    setup, num_bytes = node.setup, node.reduced_bytes
    tasks: list[Task] = []
    if setup.num_devices > 1 and node.through_host:
        tasks += _through_host(node, "all-reduce", num_bytes, after=after)
    elif setup.num_devices > 1:
        seconds = all_reduce_s(node.fabric, setup.num_devices, num_bytes)
        tasks.append(Task("all-reduce", Phase.EXCHANGE, "device links", seconds, after=(after,)))
    if setup.num_in_step == 1:
        return tasks
    network = node.network
    seconds = across_servers_s(network.bandwidth_bytes_per_s, network.latency_s, setup.num_in_step, num_bytes, reduce=True)
    sent = Task("all-reduce servers", Phase.EXCHANGE, "network out", seconds, after=(after, "all-reduce"))
    moved = 2 * num_bytes * (setup.num_in_step - 1) / setup.num_in_step
    link_bytes = num_bytes / setup.num_devices
    return [*tasks, *_over_network(node, sent, "dense gradients", moved, link_bytes, on_devices=node.has_devices)]


def _between_servers(node: TrainerNode, what: str, num_bytes: float, *, after: str, on_devices: bool) -> list[Task]:
    """This server sends and receives so many bytes in an all-to-all."""
    setup, network = node.setup, node.network
    moved = num_bytes * (setup.num_in_step - 1) / setup.num_in_step
    seconds = across_servers_s(network.bandwidth_bytes_per_s, network.latency_s, setup.num_in_step, num_bytes, reduce=False)
    sent = Task(f"send {what}", Phase.EXCHANGE, "network out", seconds, after=(after,))
    return _over_network(node, sent, what, moved, moved / setup.num_devices, on_devices=on_devices)


def _over_network(node: TrainerNode, sent: Task, what: str, moved: float, link_bytes: float, *, on_devices: bool) -> list[Task]:
    """Unless the network is direct, the cores pack and unpack what is sent, and devices copy it to the host and back."""
    if node.network.direct:
        return [sent]
    before = sent.after
    packed = node.on_cores(f"pack {what}", Phase.EXCHANGE, 2 * moved, after=(*before, f"copy {what} to host"))
    tasks = [packed, replace(sent, after=(*before, packed.name))]
    if not on_devices:
        return tasks
    return [
        node.on_link(f"copy {what} to host", Phase.EXCHANGE, link_bytes, after=before),
        *tasks,
        node.on_link(f"copy {what} to device", Phase.EXCHANGE, link_bytes, after=(sent.name,)),
    ]


def _through_host(node: TrainerNode, name: str, link_bytes: float, *, after: str, num_copies: float = 1.0) -> list[Task]:
    """Bytes of each device are copied to system memory, rearranged by the host's cores, and copied back."""
    core_bytes = node.setup.num_devices * link_bytes
    return [
        node.on_link(f"{name}, to host", Phase.EXCHANGE, link_bytes, after=(after,), num_copies=num_copies),
        node.on_cores(f"{name}, on host", Phase.EXCHANGE, core_bytes, after=(f"{name}, to host",)),
        node.on_link(name, Phase.EXCHANGE, link_bytes, after=(f"{name}, on host",), num_copies=num_copies),
    ]
