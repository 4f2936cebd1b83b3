"""The work of one step: operations, bytes, ids and rows of the dense part and of each table."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rowstead.plan.traffic import Popularity, distinct_ids, hit_share, mean_ids, popularities, rows_of_ids
from rowstead.spec.encoders import ENCODERS
from rowstead.spec.model import ModelSpec
from rowstead.spec.network_options import TOUCHES, DLRMSpec, Layer, NetworkWork
from rowstead.spec.networks import NETWORKS
from rowstead.spec.row_optimizers import LEAN_OPTIMIZER, ROW_OPTIMIZERS
from rowstead.spec.run import RunSpec
from rowstead.spec.train import DENSE_STATE

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
ID_BYTES = 8
WireFormat = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class TableWork:
    """One table: its size, and what an example reads from it."""

    name: str
    num_rows: int
    width: int
    row_bytes: int
    """Bytes of one row as stored."""
    state_bytes: int
    """Optimizer state of one row."""
    reads: tuple[tuple[float, Popularity], ...]
    """For each feature that reads it: ids per example and their distribution."""
    histories: tuple[int, ...] = ()
    """Those of `reads` whose rows are kept in order; each other gives one pooled vector per example."""
    is_hashed: bool = True
    """Whether ids are hashed to rows, so that several may share one; else each id has its own row."""

    @functools.cached_property
    def num_features(self) -> int:
        return len(self.reads)

    @functools.cached_property
    def ids_per_sample(self) -> float:
        """Rows that an example reads."""
        return sum(ids for ids, _ in self.reads)

    @property
    def bytes(self) -> int:
        """Memory for its rows and their optimizer state."""
        return self.num_rows * (self.row_bytes + self.state_bytes)

    @functools.cached_property
    def vectors(self) -> tuple[float, ...]:
        """For each of `reads` the vectors that a look-up gives for an example: one that is pooled, or one for each id of a history."""
        return tuple(ids if index in self.histories else 1.0 for index, (ids, _) in enumerate(self.reads))

    @functools.cached_property
    def vectors_per_sample(self) -> float:
        return sum(self.vectors)

    @functools.cached_property
    def pooled_bytes(self) -> float:
        """What a look-up gives for an example, FP32."""
        return self.vectors_per_sample * self.width * 4

    def distinct_rows(self, batch_size: float) -> float:
        """Distinct rows that a batch reads; features draw their ids independently."""
        num_ids = sum(distinct_ids(popularity, batch_size * ids) for ids, popularity in self.reads)
        return rows_of_ids(num_ids, self.num_rows) if self.is_hashed else min(num_ids, float(self.num_rows))

    def columns(self, num_slices: int) -> TableWork:
        """One of so many slices of its columns; state of one number per row is in each."""
        slices = min(num_slices, self.width)
        state_bytes = self.state_bytes if self.state_bytes < 4 * self.width else math.ceil(self.state_bytes / slices)
        width, row_bytes = math.ceil(self.width / slices), math.ceil(self.row_bytes / slices)
        return replace(self, width=width, row_bytes=row_bytes, state_bytes=state_bytes)

    def hit_share(self, num_kept: float) -> float:
        """Share of the accesses that hit the rows of the most popular ids; other ids may be hashed to them too."""
        if num_kept >= self.num_rows:
            return 1.0
        served = sum(self._share(ids) * hit_share(popularity, num_kept * self._share(ids)) for ids, popularity in self.reads)
        return served + (1 - served) * num_kept / self.num_rows if self.is_hashed else served

    def _share(self, ids: float) -> float:
        """Share of one feature in all accesses."""
        return ids / self.ids_per_sample if self.ids_per_sample else 1 / self.num_features


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """The work of a step, per example."""

    num_dense: int
    network: NetworkWork
    vector_width: int
    """Elements of each of the network's vectors that are multiplied in pairs."""
    tables: tuple[TableWork, ...]
    dense_state_per_parameter: int

    @property
    def bottom(self) -> tuple[Layer, ...]:
        """The linear layers that need no rows."""
        return self.network.bottom

    @property
    def top(self) -> tuple[Layer, ...]:
        """The other linear layers."""
        return self.network.top

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self.bottom + self.top

    @property
    def interaction_bytes(self) -> float:
        """What the dense part reads and writes outside of linear layers for one example, forward."""
        return 4 * (self.network.written * self.network.touches + TOUCHES * self._written_after_layers)

    @property
    def _written_after_layers(self) -> int:
        """Numbers that norms and dropout write."""
        return sum(layer.num_following * layer.outputs for layer in self.layers)

    @property
    def num_parameters(self) -> int:
        """Of the dense part."""
        return sum(layer.num_parameters for layer in self.layers) + self.network.other_parameters

    @property
    def dense_bytes(self) -> int:
        """Parameters of the dense part, FP32."""
        return 4 * self.num_parameters

    @functools.cached_property
    def table_bytes(self) -> int:
        """All tables with their optimizer state."""
        return sum(table.bytes for table in self.tables)

    @property
    def ids_per_sample(self) -> float:
        return sum(table.ids_per_sample for table in self.tables)

    @functools.cached_property
    def pooled_bytes(self) -> float:
        """What a look-up gives for an example: pooled vectors, and rows of histories."""
        return sum(table.pooled_bytes for table in self.tables)

    @functools.cached_property
    def input_bytes(self) -> float:
        """One example as a batch holds it: dense values, ids, lengths, label."""
        return self.input_bytes_with(self.tables)

    def input_bytes_with(self, tables: Sequence[TableWork]) -> float:
        """The same with ids and lengths of these tables only."""
        ids, num_features = sum(table.ids_per_sample for table in tables), sum(table.num_features for table in tables)
        return 4 * self.num_dense + ID_BYTES * ids + 4 * num_features + 4

    @property
    def activation_bytes(self) -> float:
        """What the forward pass of the dense part writes for one example."""
        return 4 * (sum(layer.outputs for layer in self.layers) + self.network.written + self._written_after_layers)

    def dense_traffic_bytes(self, batch_size: int) -> float:
        """Bytes that the dense part of a step reads and writes: inputs, outputs and weights in three passes, and the optimizer."""
        of_sample = 12 * sum(layer.inputs + layer.outputs for layer in self.layers) + 3 * self.interaction_bytes
        return batch_size * of_sample + self.dense_bytes * (6 + 2 * self.dense_state_per_parameter)

    @property
    def flops(self) -> float:
        """Floating-point operations of one example in a step: the backward pass costs twice the forward pass."""
        products = self.network.pair_flops + self.network.product_flops
        return 3 * (sum(layer.forward_flops for layer in self.layers) + products)


def record_bytes(spec: RunSpec, width: int, *, trains: bool = True) -> int:
    """Bytes of a row and its optimizer state."""
    state_bytes = ROW_OPTIMIZERS[spec.train.sparse_optimizer.kind].state_bytes(width) if trains else 0
    return width * ELEMENT_BYTES[spec.model.row_format] + state_bytes


def table_bytes(spec: RunSpec) -> int:
    """Bytes of all tables with their optimizer state."""
    return sum(table.num_rows * record_bytes(spec, table.width) for table in spec.tables)


def with_lean_optimizer(spec: RunSpec) -> RunSpec:
    """The same run with the row optimizer that has the least state."""
    optimizer = replace(spec.train.sparse_optimizer, kind=LEAN_OPTIMIZER)
    return replace(spec, train=replace(spec.train, sparse_optimizer=optimizer))


def with_16_bit_rows(spec: RunSpec) -> RunSpec:
    return replace(spec, model=replace(spec.model, row_format="bf16"))


def step_work(spec: RunSpec) -> StepWork:
    """The work of one step of a run."""
    return StepWork(
        num_dense=len(spec.features.expanded_dense()),
        network=_network_of(spec),
        vector_width=spec.model.width,
        tables=tuple(_tables_of(spec)),
        dense_state_per_parameter=len(DENSE_STATE[spec.train.dense_optimizer.kind]),
    )


def _network_of(spec: RunSpec) -> NetworkWork:
    """The work of the network and of encoders; a network of the user's own, which is not known here, counts as the DLRM of the same recipe."""
    options = spec.model.network_options if spec.model.network in NETWORKS else DLRMSpec()
    return _with_head(_with_encoders(options.work(spec.network_shape), spec), spec.model)


def _with_head(work: NetworkWork, model: ModelSpec) -> NetworkWork:
    """The same with the head of several labels."""
    if not model.tasks or model.task_head is None:
        return work
    layers = model.task_head.layers(len(model.tasks))
    # Each output of an expert is written when experts are stacked, and for each task when they are mixed.
    written = model.num_outputs + sum(layer.outputs for layer in layers) * len(model.tasks)
    operators = work.operators + 2 + 4 * len(model.tasks)
    return replace(work, top=(*work.top, *layers), written=work.written + written, operators=operators)


def _with_encoders(work: NetworkWork, spec: RunSpec) -> NetworkWork:
    """The same with the encoders of histories."""
    for (index, feature), ids in zip(enumerate(spec.features.expanded_sparse()), mean_ids(spec), strict=True):
        if feature.encoder is None:
            continue
        encode = ENCODERS[feature.encoder.kind].work
        encoder = encode(feature.encoder, spec.network_shape.widths[index], feature.max_ids or 0, ids)
        work = replace(
            work,
            product_flops=work.product_flops + encoder.flops,
            written=work.written + encoder.written,
            operators=work.operators + encoder.operators,
            other_parameters=work.other_parameters + encoder.num_parameters,
        )
    return work


def _tables_of(spec: RunSpec) -> list[TableWork]:
    ids, popular, features = mean_ids(spec), popularities(spec), spec.features.expanded_sparse()
    is_known = spec.data.synth is not None  # an unknown distribution is one of rows
    return [
        TableWork(
            name=table.name,
            num_rows=table.num_rows,
            width=table.width,
            row_bytes=record_bytes(spec, table.width, trains=False),
            state_bytes=ROW_OPTIMIZERS[spec.train.sparse_optimizer.kind].state_bytes(table.width),
            reads=tuple((ids[index], popular[index]) for index in table.features),
            histories=tuple(read for read, index in enumerate(table.features) if features[index].is_history),
            is_hashed=is_known and any(features[one].hash == "mix" for one in table.features),
        )
        for table in spec.tables
    ]
