"""What caches add to a step: ids are mapped to slots, missing rows are fetched and evicted ones written back during earlier steps.

A measured machine has times of these. On any other they follow from bytes: rows cross the link between device and host once each way
and are read and written at random in system memory; a file is read at the disk's rate of random reads or its bandwidth, whichever is
slower, and rows are appended to it in long writes.
"""

from __future__ import annotations

from collections.abc import Sequence

from rowstead.plan.caching import CacheModel
from rowstead.plan.cost import Processor
from rowstead.plan.schedule import Task
from rowstead.plan.trainer_node import TrainerNode
from rowstead.spec.phases import Phase
from rowstead.spec.timings import Timings

MAP_BYTES = 4
"""Bytes that say which slot a row is in."""


def find_slots(node: TrainerNode) -> list[Task]:
    """Ids of cached tables are mapped to cache slots; where the same cores transfer rows, that slows the step down."""
    caches, timings = node.caches, node.processor.timings
    on_host = [*caches.over_file] if node.has_devices else []
    groups = caches.over_bus if node.has_devices else caches.over_file
    tasks = []
    if on_host:
        seconds = sum(_ids_per_batch(group) for group in on_host) / node.setup.num_in_step * _find_id_s(node.host)
        tasks.append(Task("find rows in system memory", Phase.PREFETCH, "host memory", seconds, after=node.ready))
    if not groups:
        return tasks
    num_ids = sum(_ids_per_batch(group) for group in groups) / node.num_sharing
    if timings is None:
        if node.has_devices:  # the host waits for the number of missing rows of a set, then launches their transfer
            planned_s = sum(2 * node.accelerators.host_link.latency_s / group.set_size for group in groups)
            tasks.append(Task("plan cache transfers", Phase.PREFETCH, "dispatch", planned_s, hidden=True))
        return [
            *tasks,
            node.compute_task("find cache slots", Phase.PREFETCH, num_ids * _find_id_s(node.processor), after=node.ready),
        ]
    found_s = num_ids * timings.cache_id_s
    if node.has_devices:  # threads of the dispatching process plan, one at a time since they share its interpreter
        planned_s = sum(timings.cache_batch_s + timings.cache_set_s / group.set_size for group in groups)
        tasks.append(Task("plan cache transfers", Phase.PREFETCH, "dispatch", planned_s, hidden=node.software.runs_ahead))
    else:
        found_s += timings.cache_batch_s
    tasks.append(node.compute_task("find cache slots", Phase.PREFETCH, found_s, after=node.ready))
    if timings.move_share:
        seconds = timings.move_share * _measured_transfer_s(node, timings)
        tasks.append(node.compute_task("slowed by cache transfers", Phase.PREFETCH, seconds, after=node.ready))
    return tasks


def transfers(node: TrainerNode, in_step: Sequence[Task]) -> list[Task]:
    """Missing rows are fetched, and evicted ones written back, during earlier steps."""
    caches, timings, tasks = node.caches, node.processor.timings, list[Task]()
    is_measured = timings is not None and timings.move_row is not None
    if is_measured and (caches.over_bus if node.has_devices else caches.over_file):
        assert timings is not None
        transfer_s = _measured_transfer_s(node, timings)
        own_s = sum(task.seconds for task in in_step if task.resource == node.compute and not task.hidden)
        slowed_s = timings.move_share * (own_s - timings.move_share * transfer_s)
        busy_s = transfer_s + slowed_s if transfer_s else 0.0
        tasks.append(Task("transfer cache rows", Phase.PREFETCH, "cache transfers", transfer_s, hidden=True, busy_s=busy_s))
    elif caches.over_bus:
        tasks += _over_bus(node, caches.over_bus)
    if caches.over_file and (node.has_devices or not is_measured):
        tasks.append(Task("transfer rows of files", Phase.PREFETCH, "disk", _disk_s(node, caches.over_file), hidden=True))
    return tasks


def _over_bus(node: TrainerNode, groups: Sequence[CacheModel]) -> list[Task]:
    """Rows go up and down a full-duplex link at the same time; state of one number per row stays on the device."""
    accelerators, host = node.accelerators, node.host
    link_bytes = sum(group.missing_rows * group.bus_bytes for group in groups) / node.num_sharing
    per_row = [(group, host.memory.random_bytes_per_s(group.bus_bytes) * host.random_share) for group in groups]
    memory_s = sum(2 * group.missing_rows * host.memory.lines(group.bus_bytes) / rate for group, rate in per_row)
    link_s = link_bytes / accelerators.host_bytes_per_s(node.setup.num_devices)
    return [
        Task("transfer cache rows", Phase.PREFETCH, "host link", link_s, hidden=True),
        Task("read and write cached rows", Phase.PREFETCH, "host memory", memory_s / node.setup.num_in_step, hidden=True),
    ]


def _disk_s(node: TrainerNode, groups: Sequence[CacheModel]) -> float:
    """Seconds of a server's disk for its part of the rows."""
    disk = node.machine.disk
    assert disk is not None, "predict rejects tables on the SSD of a machine without one"
    io = [group.file_io(group.missing_rows) for group in groups]
    read_s = sum(max(one.num_reads / disk.random_reads_per_s, one.read_bytes / disk.read_bytes_per_s) for one in io)
    cleaned_s = sum(one.cleaned_bytes for one in io) / disk.read_bytes_per_s
    written_s = sum(one.written_bytes for one in io) / disk.write_bytes_per_s
    return (read_s + cleaned_s + written_s) / node.setup.num_in_step


def _measured_transfer_s(node: TrainerNode, timings: Timings) -> float:
    """Seconds per step to transfer rows between the caches and the memory behind them, as measured."""
    assert timings.move_row is not None, "only a machine whose caches were measured has cached tables"
    groups = node.caches.over_bus if node.has_devices else node.caches.over_file
    seconds = 0.0
    for group in groups:
        seconds += group.missing_rows * timings.move_row.at(group.row_bytes)
        seconds += 0.0 if node.has_devices else group.num_reads(group.missing_rows) * timings.move_read_s
    return seconds / node.num_sharing


def _ids_per_batch(group: CacheModel) -> float:
    return group.batch_size * sum(table.ids_per_sample for table in group.tables)


def _find_id_s(processor: Processor) -> float:
    """Seconds to read the slot of one id's row, at random in memory."""
    memory = processor.memory
    return memory.lines(MAP_BYTES) / (memory.random_bytes_per_s(MAP_BYTES) * processor.random_share)
