"""Seconds of the parts of a step on one processor: matrix products, activations, row look-ups and updates."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rowstead.plan.work import StepWork, TableWork
from rowstead.spec.machine import Compute, Machine, Memory, Precision
from rowstead.spec.network_options import Layer
from rowstead.spec.software import Software
from rowstead.spec.timings import Timings

ACTIVATION_TOUCHES = 6
"""Reads and writes of an activation per step: bias, ReLU and the next layer, and their gradients."""


@dataclass(frozen=True, kw_only=True)
class Processor:
    """The cores of a host, or one accelerator."""

    compute: Compute
    memory: Memory
    gemm_share: float
    random_share: float
    call_s: float
    """Overhead of an operator: its dispatch on a CPU, its kernel's latency on an accelerator."""
    calls_per_layer: float = 3.0
    """Operators of a linear layer in one step."""
    activation_share: float = 1.0
    """Share of the bandwidth that operators between matrix products reach."""
    timings: Timings | None = None
    """Measured times of the parts of a step; without them the rates above are used."""

    def gemm_s(self, flops: float, precision: Precision, *, num_calls: float = 1.0) -> float:
        """Seconds of matrix products."""
        return flops / (self.compute.flops_per_s(precision) * self.gemm_share) + num_calls * self.call_s

    def stream_s(self, num_bytes: float, *, held_bytes: float | None = None) -> float:
        """Seconds to read or write bytes sequentially; the share of `held_bytes` that fits in the cache moves at its speed."""
        held = num_bytes if held_bytes is None else held_bytes
        cached = min(1.0, self.memory.cache_bytes / held) if held > 0 else 0.0
        fast = self.memory.cache_bandwidth_bytes_per_s or self.memory.bandwidth_bytes_per_s
        return num_bytes * (cached / fast + (1 - cached) / self.memory.bandwidth_bytes_per_s)

    def levels(self, access_bytes: float) -> list[tuple[float, float]]:
        """Levels of the memory hierarchy for random accesses: capacity up to that level, and seconds per access within it.

        A measured curve gives the mean time within a working set; the time of a level follows from the difference to the smaller one.
        """
        if access_bytes not in self._known_levels:  # tables have few widths
            self._known_levels[access_bytes] = self._levels_of(access_bytes)
        return self._known_levels[access_bytes]

    @functools.cached_property
    def _known_levels(self) -> dict[float, list[tuple[float, float]]]:
        return {}

    def _levels_of(self, access_bytes: float) -> list[tuple[float, float]]:
        if self.timings is None:
            slow = self.memory.random_bytes_per_s(access_bytes) * self.random_share
            fast = max((self.memory.cache_bandwidth_bytes_per_s or slow) * self.random_share, slow)
            moved = self.memory.lines(access_bytes)
            return [(self.memory.cache_bytes, moved / fast), (math.inf, moved / slow)]
        curve = self.timings.read_row
        found, before, spent = [], 0.0, 0.0
        for within in curve.axes[0].sizes:
            now = within * curve.at(within, access_bytes)
            found.append((within, max((now - spent) / (within - before), 1e-12)))
            before, spent = within, now
        return [*found[:-1], (math.inf, found[-1][1])]

    def bag_s(self, table: TableWork) -> float:
        """Seconds to write what a look-up of a table gives for one example."""
        if self.timings is None:
            return table.pooled_bytes / self.memory.bandwidth_bytes_per_s
        return table.vectors_per_sample * self.timings.bag.at(4 * table.width)

    def update_id_s(self, table: TableWork, software: Software) -> float:
        """Seconds of an update per id, besides its row: the gradient of its bag is read."""
        if self.timings is None:
            return (4 * table.width + software.grouping_bytes_per_id) / self.memory.bandwidth_bytes_per_s
        return self.timings.update_id.at(4 * table.width)

    def update_row_s(self, table: TableWork, shares: Sequence[float], within_bytes: float) -> float:
        """Seconds to read and write a row and its state, from shares of the levels, or from measured times within so many bytes."""
        if self.timings is None:
            return 2 * (_expected_s(self, table.row_bytes, shares) + _expected_s(self, table.state_bytes, shares))
        more = (table.row_bytes + table.state_bytes) / (table.row_bytes + 4)
        return more * self.timings.update_row.at(within_bytes, table.row_bytes)


def host_processor(machine: Machine, software: Software) -> Processor:
    """The cores of a server."""
    return Processor(
        compute=machine.host.compute,
        memory=machine.host.memory,
        gemm_share=software.cpu_gemm_share,
        random_share=software.cpu_random_share,
        call_s=software.operator_s,
        calls_per_layer=software.operators_per_layer,
        activation_share=machine.host.core_share if software.one_core_activations else 1.0,
        timings=software.cpu_timings,
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
        calls_per_layer=software.operators_per_layer,
        timings=software.device_timings,
    )


def layers_s(
    processor: Processor, work: StepWork, layers: Sequence[Layer], batch_size: int, precision: Precision, *, passes: int
) -> float:
    """Seconds of some layers' products and activations: one pass forward, two backward."""
    if processor.timings is not None:
        parts_s = sum(
            _layer_s(
                processor.timings, layer, batch_size, precision, passes=passes, is_first=layers is work.bottom and not index
            )
            for index, layer in enumerate(layers)
        )
        return processor.timings.dense.seconds(parts_s, passes / 3 * batch_size * layer_bytes(layers))
    flops = batch_size * passes * sum(layer.forward_flops for layer in layers)
    touched = ACTIVATION_TOUCHES / 3 * passes * batch_size * 4 * sum(layer.outputs for layer in layers)
    products_s = processor.gemm_s(flops, precision, num_calls=passes / 3 * processor.calls_per_layer * len(layers))
    held = batch_size * work.activation_bytes
    return products_s + processor.stream_s(touched, held_bytes=held) / processor.activation_share


def layer_bytes(layers: Sequence[Layer]) -> float:
    """Inputs and outputs of layers, for one example."""
    return 4.0 * sum(layer.inputs + layer.outputs for layer in layers)


def _layer_s(timings: Timings, layer: Layer, batch_size: int, precision: Precision, *, passes: int, is_first: bool) -> float:
    """Measured seconds of one layer; the input of the first layer needs no gradient."""
    times, sizes = timings.of_layers(precision), (batch_size, layer.inputs, layer.outputs)
    seconds = 0.0
    if passes != 2:
        seconds += times.forward.at(*sizes) + timings.fresh_s(4 * batch_size * layer.outputs)
    if passes != 1:
        seconds += (times.back_first if is_first else times.back).at(*sizes)
        seconds += timings.fresh_s(0 if is_first else 4 * batch_size * layer.inputs)
    return seconds


def interaction_s(processor: Processor, work: StepWork, batch_size: int, precision: Precision, *, passes: int) -> float:
    """Seconds of what is between the linear layers: one pass forward, two backward."""
    network, touched = work.network, passes * batch_size * work.interaction_bytes
    held = batch_size * work.activation_bytes
    if processor.timings is not None and network.pair_flops:
        timings, vectors = processor.timings, (batch_size, network.num_vectors, work.vector_width)
        forward_s = timings.interaction_forward.at(*vectors) + timings.fresh_s(batch_size * 4 * work.top[0].inputs)
        back_s = timings.interaction_back.at(*vectors) + timings.fresh_s(batch_size * work.pooled_bytes)
        parts_s = {1: forward_s, 2: back_s, 3: forward_s + back_s}[passes]
        parts_s *= timings.fp32_interaction_factor if precision == "fp32" else 1.0
        return timings.dense.seconds(parts_s, passes / 3 * batch_size * 2 * work.pooled_bytes)
    flops = batch_size * passes * (network.pair_flops + network.product_flops)
    products_s = processor.gemm_s(flops, precision, num_calls=passes * network.operators)
    fresh_s = 0.0
    if processor.timings is not None:
        each = 4 * batch_size * network.written / network.operators
        fresh_s = passes * network.operators * processor.timings.fresh_s(each)
    return products_s + fresh_s + processor.stream_s(touched, held_bytes=held) / processor.activation_share


ADAGRAD_TOUCHES = 5
"""Reads and writes of Adagrad per element: the gradient once, parameter and state twice."""


def dense_update_s(processor: Processor, work: StepWork) -> float:
    """Seconds of the dense optimizer: gradients are read, parameters and state read and written."""
    touches = 3 + 2 * work.dense_state_per_parameter
    if processor.timings is not None:
        parts_s = touches / ADAGRAD_TOUCHES * processor.timings.dense_update.at(max(1, work.num_parameters))
        return processor.timings.dense_optimizer.fixed_s + processor.timings.dense_optimizer.seconds(parts_s)
    return processor.stream_s(work.dense_bytes * touches, held_bytes=3 * work.dense_bytes)


def fill_s(processor: Processor, work: StepWork, batch_size: int) -> float:
    """Seconds to copy a batch to the static buffers of a CUDA graph; 0 without them."""
    if processor.timings is None or not processor.timings.fills_batch:
        return 0.0
    return 2 * batch_size * work.input_bytes / processor.memory.bandwidth_bytes_per_s


def accesses_of(tables: Iterable[TableWork]) -> float:
    """Bytes of rows that an example reads; tables share a cache in proportion to it."""
    return sum(table.ids_per_sample * table.row_bytes for table in tables)


def level_shares(processor: Processor, accesses: float, table: TableWork) -> list[float]:
    """Shares of a table's accesses that each level of the memory serves, when tables share caches in proportion to accesses.

    `accesses` are the bytes of rows that an example reads from all tables.
    """
    shares, before = [], 0.0
    for within, _ in processor.levels(table.row_bytes):
        if within == math.inf:
            served = 1.0
        elif within == 0 or accesses == 0:
            served = 0.0
        else:
            part = within * table.ids_per_sample * table.row_bytes / accesses
            served = table.hit_share(part / processor.memory.lines(table.row_bytes))
        shares.append(max(served - before, 0.0))
        before = max(before, served)
    return shares


def _expected_s(processor: Processor, access_bytes: float, shares: Sequence[float]) -> float:
    """Mean seconds of one access."""
    if access_bytes == 0:
        return 0.0
    return sum(share * seconds for share, (_, seconds) in zip(shares, processor.levels(access_bytes), strict=True))


def lookup_s(processor: Processor, tables: Sequence[TableWork], batch_size: float, *, num_sharing: int = 1) -> float:
    """Seconds to read and pool the rows of a batch.

    Where the tables are sharded over several processors, each serves its part of the rows to the batches of all, with more cache per row.
    """
    accesses = accesses_of(tables) / num_sharing
    seconds = sum(table_lookup_s(processor, accesses, table, batch_size) for table in tables)
    if processor.timings is None or not tables:
        return seconds
    timings, pooled_bytes = processor.timings, batch_size * sum(table.pooled_bytes for table in tables)
    in_step_s = timings.lookup.seconds(seconds + timings.fresh_s(pooled_bytes), pooled_bytes)
    return timings.lookup_call_s + timings.lookup.fixed_s + in_step_s


def table_lookup_s(processor: Processor, accesses: float, table: TableWork, batch_size: float) -> float:
    """Seconds to read and pool one table's rows; `accesses` are the bytes per example of all tables on this processor."""
    row_s = _expected_s(processor, table.row_bytes, level_shares(processor, accesses, table))
    return batch_size * (table.ids_per_sample * row_s + processor.bag_s(table))


def update_s(
    processor: Processor, tables: Sequence[TableWork], batch_size: float, software: Software, *, num_sharing: int = 1
) -> float:
    """Seconds to turn the gradients of pooled vectors into updates of rows.

    Where the tables are sharded over several processors, each updates its part of the rows for the batches of all, among which more ids
    repeat. Rows that the look-up left in a cache are found within the bytes touched since; others anywhere in the tables.
    """
    accesses = accesses_of(tables) / num_sharing

    def seconds_within(num_bytes: float) -> float:
        return sum(
            table_update_s(processor, accesses, table, batch_size, software, num_bytes, num_sharing=num_sharing)
            for table in tables
        )

    if processor.timings is None or not tables:
        return seconds_within(math.inf)
    touched = sum(
        table.distinct_rows(batch_size * num_sharing) / num_sharing * table.row_bytes + 2 * batch_size * table.pooled_bytes
        for table in tables
    )
    whole = sum(table.bytes for table in tables) / num_sharing
    kept = min(1.0, processor.memory.cache_bytes / max(touched, 1.0))  # share of the rows that are still in the cache
    seconds = kept * seconds_within(min(touched, whole))
    if kept < 1:
        seconds += (1 - kept) * seconds_within(whole)
    timings, pooled_bytes = processor.timings, batch_size * sum(table.pooled_bytes for table in tables)
    return timings.update_call_s + timings.update.fixed_s + timings.update.seconds(seconds, pooled_bytes)


def table_update_s(
    processor: Processor,
    accesses: float,
    table: TableWork,
    batch_size: float,
    software: Software,
    within_bytes: float = math.inf,
    *,
    num_sharing: int = 1,
) -> float:
    """Seconds to update one table's rows, with a working set of `within_bytes`."""
    ids = batch_size * table.ids_per_sample
    if software.sparse_updates_all_ids:
        rows, shares = ids, level_shares(processor, accesses, table)
    else:
        rows = table.distinct_rows(batch_size * num_sharing) / num_sharing
        shares = [*[0.0] * (len(processor.levels(table.row_bytes)) - 1), 1.0]
    return ids * processor.update_id_s(table, software) + rows * processor.update_row_s(table, shares, within_bytes)
