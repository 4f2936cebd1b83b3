"""Exchanges of a synchronous step: pooled vectors and gradients between the devices of a server, and between servers."""

from __future__ import annotations

from rowstead.plan.collective import across_servers_s, all_reduce_s, all_to_all_s
from rowstead.plan.schedule import Task
from rowstead.plan.trainer_node import TrainerNode


def exchange(site: TrainerNode, what: str, *, after: str) -> list[Task]:
    """Pooled vectors (or their gradients) go between the devices that hold tables and those that hold examples.

    What stays on a server goes over the links of its devices, the rest over the network.
    """
    setup = site.setup
    sent = setup.batch_size * sum(table.pooled_bytes for table in site.on_devices)
    within = sent / setup.num_in_step
    tasks = []
    if setup.num_devices > 1 and site.through_host:
        moved = within * (setup.num_devices - 1) / setup.num_devices
        num_pieces = len(site.on_devices) / setup.num_in_step * (setup.num_devices - 1) / setup.num_devices
        num_copies = max(1.0, site.software.operators_per_exchange * num_pieces)
        tasks += by_host(site, f"exchange {what}", moved, setup.num_devices * moved, after=after, num_copies=num_copies)
    elif setup.num_devices > 1:
        seconds = all_to_all_s(site.fabric, setup.num_devices, within)
        tasks.append(Task(name=f"exchange {what}", resource="device links", seconds=seconds, after=(after,)))
    if setup.num_in_step > 1:
        tasks += between_servers(site, what, setup.num_devices * sent, after=after, on_devices=site.has_devices)
    return tasks


def exchange_from_hosts(site: TrainerNode, what: str, *, after: str) -> list[Task]:
    """The same for tables in system memory, which the servers of a step hold between them."""
    if site.setup.num_in_step == 1:
        return []
    num_bytes = site.server_batch * sum(table.pooled_bytes for table in site.off_devices)
    return between_servers(site, f"host {what}", num_bytes, after=after, on_devices=False)


def between_servers(site: TrainerNode, what: str, num_bytes: float, *, after: str, on_devices: bool) -> list[Task]:
    """Bytes of this server go to the others, as many come; cores pack and unpack them unless the network is direct."""
    setup, network = site.setup, site.network
    moved = num_bytes * (setup.num_in_step - 1) / setup.num_in_step
    seconds = across_servers_s(network.bandwidth_bytes_per_s, network.latency_s, setup.num_in_step, num_bytes, reduce=False)
    sent = Task(name=f"send {what}", resource="network out", seconds=seconds, after=(after, f"pack {what}"))
    if network.direct:
        return [sent]
    packed = site.on_cores(f"pack {what}", 2 * moved, after=(after, f"lift {what}"))
    if not on_devices:
        return [packed, sent]
    return [
        site.on_link(f"lift {what}", moved / setup.num_devices, after=(after,)),
        packed,
        sent,
        site.on_link(f"lower {what}", moved / setup.num_devices, after=(f"send {what}",)),
    ]


def by_host(
    site: TrainerNode, name: str, link_bytes: float, core_bytes: float, *, after: str, num_copies: float = 1.0
) -> list[Task]:
    """Bytes of each device go up to system memory, are sorted there by the host's cores, and come down."""
    return [
        site.on_link(f"{name}, up", link_bytes, after=(after,), num_copies=num_copies),
        site.on_cores(f"{name}, on the host", core_bytes, after=(f"{name}, up",)),
        site.on_link(name, link_bytes, after=(f"{name}, on the host",), num_copies=num_copies),
    ]


def all_reduce(site: TrainerNode, *, after: str) -> list[Task]:
    """Dense gradients are summed over the devices of a server, then over servers, of which each device sends its part."""
    setup, num_bytes = site.setup, site.work.dense_bytes
    tasks: list[Task] = []
    if setup.num_devices > 1 and site.through_host:
        tasks += by_host(site, "all-reduce", num_bytes, setup.num_devices * num_bytes, after=after)
    elif setup.num_devices > 1:
        seconds = all_reduce_s(site.fabric, setup.num_devices, num_bytes)
        tasks.append(Task(name="all-reduce", resource="device links", seconds=seconds, after=(after,)))
    if setup.num_in_step == 1:
        return tasks
    network, summed = site.network, (after, "all-reduce")
    seconds = across_servers_s(network.bandwidth_bytes_per_s, network.latency_s, setup.num_in_step, num_bytes, reduce=True)
    sent = Task(name="all-reduce servers", resource="network out", seconds=seconds, after=(*summed, "pack sums"))
    if network.direct:
        return [*tasks, sent]
    moved = 2 * num_bytes * (setup.num_in_step - 1) / setup.num_in_step
    packed = site.on_cores("pack sums", 2 * moved, after=(*summed, "lift sums"))
    if not site.has_devices:
        return [*tasks, packed, sent]
    return [
        *tasks,
        site.on_link("lift sums", num_bytes / setup.num_devices, after=summed),
        packed,
        sent,
        site.on_link("lower sums", num_bytes / setup.num_devices, after=("all-reduce servers",)),
    ]
