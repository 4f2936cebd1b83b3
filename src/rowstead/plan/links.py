"""Exchanges of a synchronous step: pooled vectors and gradients between the devices of a server, and between servers."""

from __future__ import annotations

from rowstead.plan.collective import across_servers_s, all_reduce_s, all_to_all_s
from rowstead.plan.schedule import Task
from rowstead.plan.trainer_node import TrainerNode
from rowstead.spec.phases import Phase


def exchange(node: TrainerNode, what: str, *, after: str) -> list[Task]:
    """All-to-all of pooled vectors (or their gradients) between the devices that hold tables and those that hold examples.

    Within a server it uses the links of the devices, between servers the network.
    """
    setup = node.setup
    sent = setup.batch_size * sum(table.pooled_bytes for table in node.on_devices)
    within = sent / setup.num_in_step
    tasks = []
    if setup.num_devices > 1 and node.through_host:
        moved = within * (setup.num_devices - 1) / setup.num_devices
        num_parts = len(node.on_devices) / setup.num_in_step * (setup.num_devices - 1) / setup.num_devices
        num_copies = max(1.0, node.software.operators_per_exchange * num_parts)
        tasks += through_host(node, f"exchange {what}", moved, setup.num_devices * moved, after=after, num_copies=num_copies)
    elif setup.num_devices > 1:
        seconds = all_to_all_s(node.fabric, setup.num_devices, within)
        tasks.append(_exchange_task(f"exchange {what}", "device links", seconds, after=(after,)))
    if setup.num_in_step > 1:
        tasks += between_servers(node, what, setup.num_devices * sent, after=after, on_devices=node.has_devices)
    return tasks


def exchange_from_hosts(node: TrainerNode, what: str, *, after: str) -> list[Task]:
    """The same for tables in system memory, which are sharded over the servers of a step."""
    if node.setup.num_in_step == 1:
        return []
    num_bytes = node.server_batch * sum(table.pooled_bytes for table in node.off_devices)
    return between_servers(node, f"host {what}", num_bytes, after=after, on_devices=False)


def between_servers(node: TrainerNode, what: str, num_bytes: float, *, after: str, on_devices: bool) -> list[Task]:
    """This server sends and receives so many bytes; its cores pack and unpack them unless the network is direct."""
    setup, network = node.setup, node.network
    moved = num_bytes * (setup.num_in_step - 1) / setup.num_in_step
    seconds = across_servers_s(network.bandwidth_bytes_per_s, network.latency_s, setup.num_in_step, num_bytes, reduce=False)
    sent = _exchange_task(f"send {what}", "network out", seconds, after=(after, f"pack {what}"))
    if network.direct:
        return [sent]
    packed = node.on_cores(f"pack {what}", Phase.EXCHANGE, 2 * moved, after=(after, f"copy {what} to host"))
    if not on_devices:
        return [packed, sent]
    return [
        node.on_link(f"copy {what} to host", Phase.EXCHANGE, moved / setup.num_devices, after=(after,)),
        packed,
        sent,
        node.on_link(f"copy {what} to device", Phase.EXCHANGE, moved / setup.num_devices, after=(f"send {what}",)),
    ]


def through_host(
    node: TrainerNode, name: str, link_bytes: float, core_bytes: float, *, after: str, num_copies: float = 1.0
) -> list[Task]:
    """Bytes of each device are copied to system memory, rearranged by the host's cores, and copied back."""
    return [
        node.on_link(f"{name}, to host", Phase.EXCHANGE, link_bytes, after=(after,), num_copies=num_copies),
        node.on_cores(f"{name}, on host", Phase.EXCHANGE, core_bytes, after=(f"{name}, to host",)),
        node.on_link(name, Phase.EXCHANGE, link_bytes, after=(f"{name}, on host",), num_copies=num_copies),
    ]


def all_reduce(node: TrainerNode, *, after: str) -> list[Task]:
    """Dense gradients are all-reduced over the devices of a server, then over servers, each device sending its part."""
    setup, num_bytes = node.setup, node.work.dense_bytes
    tasks: list[Task] = []
    if setup.num_devices > 1 and node.through_host:
        tasks += through_host(node, "all-reduce", num_bytes, setup.num_devices * num_bytes, after=after)
    elif setup.num_devices > 1:
        seconds = all_reduce_s(node.fabric, setup.num_devices, num_bytes)
        tasks.append(_exchange_task("all-reduce", "device links", seconds, after=(after,)))
    if setup.num_in_step == 1:
        return tasks
    network, summed = node.network, (after, "all-reduce")
    seconds = across_servers_s(network.bandwidth_bytes_per_s, network.latency_s, setup.num_in_step, num_bytes, reduce=True)
    sent = _exchange_task("all-reduce servers", "network out", seconds, after=(*summed, "pack dense gradients"))
    if network.direct:
        return [*tasks, sent]
    moved = 2 * num_bytes * (setup.num_in_step - 1) / setup.num_in_step
    packed = node.on_cores("pack dense gradients", Phase.EXCHANGE, 2 * moved, after=(*summed, "copy dense gradients to host"))
    if not node.has_devices:
        return [*tasks, packed, sent]
    device_bytes = num_bytes / setup.num_devices
    return [
        *tasks,
        node.on_link("copy dense gradients to host", Phase.EXCHANGE, device_bytes, after=summed),
        packed,
        sent,
        node.on_link("copy dense gradients to device", Phase.EXCHANGE, device_bytes, after=("all-reduce servers",)),
    ]


def _exchange_task(name: str, resource: str, seconds: float, *, after: tuple[str, ...]) -> Task:
    return Task(name=name, phase=Phase.EXCHANGE, resource=resource, seconds=seconds, after=after)
