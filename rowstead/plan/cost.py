"""Seconds of the parts of a step on one processor: matrix products, activations, rows read and updated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rowstead.plan.traffic import hit_share
from rowstead.plan.work import Layer, StepWork, TableWork
from rowstead.spec.machine import Compute, Machine, Memory, Precision, Software

ACTIVATION_TOUCHES = 6
"""Times that an activation is read or written in a step: bias, ReLU and the next layer, and their gradients."""


@dataclass(frozen=True, kw_only=True)
class Processor:
    """What computes: the cores of a host, or one accelerator."""

    compute: Compute
    memory: Memory
    gemm_share: float
    random_share: float
    call_s: float
    """Least time of an operator beside its work: its dispatch on a CPU, its kernel's latency on an accelerator."""
    activation_share: float = 1.0
    """Share of the bandwidth that operators between matrix products reach."""

    def gemm_s(self, flops: float, precision: Precision, *, num_calls: int = 1) -> float:
        """Seconds of matrix products."""
        return flops / (self.compute.flops_per_s(precision) * self.gemm_share) + num_calls * self.call_s

    def stream_s(self, num_bytes: float, *, held_bytes: float | None = None) -> float:
        """Seconds to read or write bytes in order; what the cache can hold of `held_bytes` moves at its speed."""
        held = num_bytes if held_bytes is None else held_bytes
        cached = min(1.0, self.memory.cache_bytes / held) if held > 0 else 0.0
        fast = self.memory.cache_bandwidth_bytes_per_s or self.memory.bandwidth_bytes_per_s
        return num_bytes * (cached / fast + (1 - cached) / self.memory.bandwidth_bytes_per_s)

    def random_s(self, num_pieces: float, piece_bytes: float, *, cached_share: float = 0.0) -> float:
        """Seconds to read or write pieces at random places, whole lines each; a share of them is in the cache."""
        if num_pieces == 0 or piece_bytes == 0:
            return 0.0
        moved = num_pieces * self.memory.lines(piece_bytes)
        slow = self.memory.random_bytes_per_s(piece_bytes) * self.random_share
        fast = max((self.memory.cache_bandwidth_bytes_per_s or slow) * self.random_share, slow)
        return moved * (cached_share / fast + (1 - cached_share) / slow)


def host_processor(machine: Machine, software: Software) -> Processor:
    """The cores of a server."""
    return Processor(
        compute=machine.host.compute,
        memory=machine.host.memory,
        gemm_share=software.cpu_gemm_share,
        random_share=software.cpu_random_share,
        call_s=software.operator_s,
        activation_share=machine.host.core_share if software.one_core_activations else 1.0,
    )


def device_processor(machine: Machine, software: Software) -> Processor:
    """One accelerator of a server, or its cores where it has none."""
    if machine.accelerators is None:
        return host_processor(machine, software)
    return Processor(
        compute=machine.accelerators.compute,
        memory=machine.accelerators.memory,
        gemm_share=software.device_gemm_share,
        random_share=software.device_random_share,
        call_s=software.kernel_s,
    )


def layers_s(
    processor: Processor, work: StepWork, layers: Sequence[Layer], batch_size: int, precision: Precision, *, passes: int
) -> float:
    """Seconds of some layers' products and activations: one pass forward, two backward."""
    flops = batch_size * passes * sum(layer.forward_flops for layer in layers)
    touched = ACTIVATION_TOUCHES / 3 * passes * batch_size * 4 * sum(layer.outputs for layer in layers)
    products_s = processor.gemm_s(flops, precision, num_calls=passes * len(layers))
    held = batch_size * work.activation_bytes
    return products_s + processor.stream_s(touched, held_bytes=held) / processor.activation_share


def interaction_s(processor: Processor, work: StepWork, batch_size: int, precision: Precision, *, passes: int) -> float:
    """Seconds of the interaction: one pass forward, two backward."""
    touched = passes * batch_size * work.interaction_bytes
    products_s = processor.gemm_s(batch_size * passes * work.interaction_flops, precision, num_calls=passes)
    held = batch_size * work.activation_bytes
    return products_s + processor.stream_s(touched, held_bytes=held) / processor.activation_share


def dense_update_s(processor: Processor, work: StepWork) -> float:
    """Seconds of the dense optimizer: gradients are read, parameters and state read and written."""
    return processor.stream_s(work.dense_bytes * (3 + 2 * work.dense_state_per_parameter), held_bytes=3 * work.dense_bytes)


def accesses_of(tables: Iterable[TableWork]) -> float:
    """Bytes of rows that an example reads, by which tables divide a cache."""
    return sum(table.ids_per_sample * table.row_bytes for table in tables)


def cached_share(processor: Processor, accesses: float, table: TableWork) -> float:
    """Share of a table's accesses that the processor's cache serves when tables divide it as they are accessed."""
    if processor.memory.cache_bytes == 0 or accesses == 0:
        return 0.0
    part = processor.memory.cache_bytes * table.ids_per_sample * table.row_bytes / accesses
    return hit_share(table.popularity, part / processor.memory.lines(table.row_bytes))


def lookup_s(processor: Processor, tables: Sequence[TableWork], batch_size: float) -> float:
    """Seconds to read and pool the rows of a batch."""
    accesses = accesses_of(tables)
    return sum(table_lookup_s(processor, accesses, table, batch_size) for table in tables)


def table_lookup_s(processor: Processor, accesses: float, table: TableWork, batch_size: float) -> float:
    """Seconds to read and pool one table's rows, where all tables on this processor are read `accesses` bytes an example."""
    hits = cached_share(processor, accesses, table)
    reads = processor.random_s(batch_size * table.ids_per_sample, table.row_bytes, cached_share=hits)
    return reads + batch_size * table.pooled_bytes / processor.memory.bandwidth_bytes_per_s


def update_s(processor: Processor, tables: Sequence[TableWork], batch_size: float, software: Software) -> float:
    """Seconds to turn the gradients of pooled vectors into updates of rows."""
    accesses = accesses_of(tables)
    return sum(table_update_s(processor, accesses, table, batch_size, software) for table in tables)


def table_update_s(processor: Processor, accesses: float, table: TableWork, batch_size: float, software: Software) -> float:
    """Seconds to update one table's rows."""
    hits = cached_share(processor, accesses, table)
    ids = batch_size * table.ids_per_sample
    touches = 2 if software.gradient_per_id else 1  # written out and read again, or read as the rows are summed
    streamed = ids * (touches * 4 * table.width + software.grouping_bytes_per_id)
    gradients = streamed / processor.memory.bandwidth_bytes_per_s
    if software.sparse_updates_all_ids:
        rows, hits_of_rows = ids, hits
    else:
        rows, hits_of_rows = table.distinct_rows(batch_size), 0.0
    row = 2 * processor.random_s(rows, table.row_bytes, cached_share=hits_of_rows)
    return gradients + row + 2 * processor.random_s(rows, table.state_bytes, cached_share=hits_of_rows)
