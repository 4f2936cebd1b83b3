"""Rows whose gradients are summed over processes before the optimizer: replicated tables, and column slices of wide ones.

Letters: B examples, N rows, D width, U distinct rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rowstead.data.batch import Sparse
from rowstead.distributed.process_group import ProcessGroup
from rowstead.distributed.router import Router
from rowstead.distributed.sharded_ids import IdExchange, one_batch
from rowstead.distributed.sharded_pieces import Make, Pieces
from rowstead.distributed.sharding import ShardPiece, piece_layout
from rowstead.kernels.choose import kernels_for
from rowstead.kernels.layout import Layout
from rowstead.spec.row_optimizers import ROW_OPTIMIZERS, SparseOptimizerSpec, adam_correction
from rowstead.stores.base import EmbeddingStore
from rowstead.stores.snapshot import Snapshot
from rowstead.stores.state import StatePart, part_of

_SUM = SparseOptimizerSpec(kind="sgd")


class ReplicatedTables:
    """Replicated tables: each process looks up in its own copy, and gradients are summed over all processes row by row.

    The sum has the same bits in every process, and so have the copies.
    """

    def __init__(
        self,
        layout: Layout,
        copies: Sequence[ShardPiece],
        process_group: ProcessGroup,
        make: Make,
        optimizer: SparseOptimizerSpec | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._process_group, self._optimizer, self._device, self._dtype = process_group, optimizer, device, dtype
        self._router = Router(layout, [copies])
        self.layout = piece_layout(layout, copies)
        self.store = make(self.layout, optimizer) if copies else None

    def lookup(self, sparse: Sparse) -> Tensor:
        """The pooled rows of the features that read replicated tables, [B, their widths]."""
        if self.store is None:
            return torch.empty(sparse.num_samples, 0, dtype=self._dtype, device=self._device)
        return self.store.lookup(self._own(sparse))

    def start_update(self, sparse: Sparse, grad: Tensor) -> Callable[[float, int], None]:
        """Start to sum the gradients of all rows; the returned function waits for the sum and applies it."""
        if self.store is None or self._optimizer is None:
            return lambda lr, step: None
        tables, own = self.layout.tables, self._own(sparse)
        sizes = [table.num_elements for table in tables]
        # Where a row that is read changes even if its gradient is zero, which rows were read is summed as well.
        counts_reads = self._optimizer.moves_without_gradient
        num_rows = [table.num_rows for table in tables] if counts_reads else []
        flat = torch.zeros(sum(sizes) + sum(num_rows), dtype=self._dtype, device=self._device)
        gradients, reads = flat.split([sum(sizes), sum(num_rows)])
        sums = [each.view(-1, table.width) for each, table in zip(gradients.split(sizes), tables, strict=True)]
        add_gradients(sums, self.layout, own, grad)
        if counts_reads and own.ids.numel():
            firsts = torch.tensor([sum(num_rows[:table]) for table in self.layout.table_of], device=self._device)
            counts = own.offsets.diff().view(self.layout.num_features, -1).sum(dim=1)
            reads[own.ids.long() + torch.repeat_interleave(firsts, counts)] = 1
        # In full precision: a row of a small table sums many examples, and rounding errors do not average out.
        waiting = self._process_group.start_all_reduce(flat, of_rows=True)

        def apply(lr: float, step: int) -> None:
            assert self.store is not None
            waiting.wait()
            found = []
            was_read = reads.split(num_rows) if counts_reads else [(each != 0).any(dim=1) for each in sums]
            for each, read in zip(sums, was_read, strict=True):
                distinct = read.nonzero().squeeze(1)
                found.append((distinct, each[distinct]))
            update_rows(self.store, self.layout, found, lr=lr, step=step)

        return apply

    def _own(self, sparse: Sparse) -> Sparse:
        """The bags of the features that read replicated tables."""
        if self.layout.num_features < sparse.num_features:
            sparse = one_batch(self._router.route(sparse), self.layout.num_features)
        return dataclasses.replace(sparse, checked_for=self.layout)


class ColumnPieces(Pieces):
    """Column slices under an optimizer that divides a row by the squares of all its columns: row-wise Adagrad or row-wise Adam.

    Every process has the same ids. Each sums the gradients of its slice of a row, all sum their squares, and each applies the
    result to its slice by gradient descent. The optimizer's state is kept here; what it has per row is the same in every process.
    """

    def __init__(
        self,
        layout: Layout,
        pieces: Sequence[Sequence[ShardPiece]],
        process_group: ProcessGroup,
        make: Make,
        optimizer: SparseOptimizerSpec,
        **options: Any,
    ) -> None:
        local = dataclasses.replace(optimizer, kind="sgd", l2=0.0)
        super().__init__(layout, pieces, process_group, make, local, **options)
        self._optimizer, self._state = optimizer, ROW_OPTIMIZERS[optimizer.kind].state
        self._states = [
            {
                tensor.name: torch.zeros(
                    table.num_rows, 1 if tensor.is_per_row else table.width, dtype=self.dtype, device=self.device
                )
                for tensor in self._state
            }
            for table in self.layout.tables
        ]

    def prefetch(self, exchange: IdExchange) -> None:
        """Only wait for the ids: the local store is updated with other batches than it looks up."""
        self.receive(exchange)

    def update(self, here: Sparse, grad: Tensor, *, lr: float, step: int) -> None:
        assert self.store is not None
        found = sum_by_row(self.layout, here, grad)
        if self._optimizer.l2:
            for table, (distinct, summed) in zip(self.layout.tables, found, strict=True):
                summed.add_(self.store.rows(table.name, distinct), alpha=self._optimizer.l2)
        squares = torch.cat([summed.square().sum(dim=1) for _, summed in found])
        self.process_group.start_all_reduce(squares, of_rows=True).wait()
        scaled = []
        by_table = squares.split([distinct.numel() for distinct, _ in found])
        for table, state, (distinct, summed), square in zip(self.layout.tables, self._states, found, by_table, strict=True):
            mean = square.unsqueeze(1) / table.whole_shape[1]
            scaled.append((distinct, self._direction(state, distinct, summed, mean, step)))
        update_rows(self.store, self.layout, scaled, lr=lr, step=step)

    def _direction(self, state: dict[str, Tensor], distinct: Tensor, grad: Tensor, mean: Tensor, step: int) -> Tensor:
        """What gradient descent subtracts, [U, D of the slice], of gradients whose squares have the mean [U, 1] over whole rows."""
        rule = self._optimizer
        assert rule.kind in ("rowwise_adagrad", "rowwise_adam"), (
            "every row optimizer whose columns depend on each other has a rule"
        )
        if rule.kind == "rowwise_adagrad":
            total = state["sum"][distinct] + mean
            state["sum"][distinct] = total
            return grad / (total.sqrt() + rule.eps)
        assert set(state) == {"moment1", "moment2"}, "every row optimizer whose columns depend on each other has a rule"
        moment1 = torch.lerp(state["moment1"][distinct], grad, 1 - rule.beta1)
        moment2 = torch.lerp(state["moment2"][distinct], mean, 1 - rule.beta2)
        state["moment1"][distinct], state["moment2"][distinct] = moment1, moment2
        return adam_correction(rule, step) * moment1 / (moment2.sqrt() + rule.eps)

    def parts(self) -> list[StatePart]:
        return super().parts() + self._parts_of_states(self._states)

    def snapshot(self) -> Snapshot | None:
        found = super().snapshot()
        states = [{name: tensor.to("cpu", copy=True) for name, tensor in state.items()} for state in self._states]
        return found and dataclasses.replace(found, parts=[*found.parts, *self._parts_of_states(states)])

    def _parts_of_states(self, states: Sequence[dict[str, Tensor]]) -> list[StatePart]:
        is_copy = self.process_group.rank > 0
        parts = []
        for table, state in zip(self.layout.tables, states, strict=True):
            for tensor in self._state:
                part = part_of(f"{table.name}.{tensor.name}", state[tensor.name], is_copy=is_copy and tensor.is_per_row)
                parts.append(part if tensor.is_per_row else self._part_of_whole(part))
        return parts


def sum_by_row(layout: Layout, sparse: Sparse, grad: Tensor) -> list[tuple[Tensor, Tensor]]:
    """For each table the distinct rows of a batch, ascending [U], and the sum of each one's gradients [U, D]."""
    count = len(grad)
    bounds = sparse.offsets[::count].tolist() if count else [0] * (layout.num_features + 1)
    renumbered = torch.empty(sparse.ids.numel(), dtype=torch.int64, device=grad.device)
    found = []
    for table in layout.tables:
        runs = [slice(bounds[feature], bounds[feature + 1]) for feature in table.features]
        distinct, indices = torch.unique(torch.cat([sparse.ids[run] for run in runs]), return_inverse=True)
        for run, own in zip(runs, indices.split([run.stop - run.start for run in runs]), strict=True):
            renumbered[run] = own
        found.append((distinct.long(), grad.new_zeros(distinct.numel(), table.width)))
    add_gradients([sums for _, sums in found], layout, dataclasses.replace(sparse, ids=renumbered), grad)
    return found


def add_gradients(sums: Sequence[Tensor], layout: Layout, sparse: Sparse, grad: Tensor) -> None:
    """Add the gradients of a batch to those of its rows in `sums`, one tensor [N, D] per table."""
    if sparse.ids.numel():
        # Gradient descent with a learning rate of -1 sums gradients.
        update = kernels_for("auto", grad.device)[1].update
        states: list[dict[str, Tensor]] = [{} for _ in sums]
        update(sums, states, layout, sparse.ids, sparse.offsets, sparse.weights, grad, optimizer=_SUM, lr=-1.0, step=1)


def update_rows(store: EmbeddingStore, layout: Layout, found: Sequence[tuple[Tensor, Tensor]], *, lr: float, step: int) -> None:
    """Apply summed gradients [U, D] to the distinct rows [U] of each table of a store, as bags of one id each."""
    num_bags = max(distinct.numel() for distinct, _ in found)
    if not num_bags:
        return
    first, device = found[0][0], found[0][1].device
    lengths = torch.zeros(layout.num_features, num_bags, dtype=torch.int64, device=device)
    grad = torch.zeros(num_bags, layout.total_width, dtype=found[0][1].dtype, device=device)
    ids: list[Tensor] = [first[:0]] * layout.num_features
    for table, (distinct, summed) in zip(layout.tables, found, strict=True):
        feature = table.features[0]
        ids[feature] = distinct
        lengths[feature, : distinct.numel()] = 1
        grad[: distinct.numel(), layout.columns[feature] : layout.columns[feature + 1]] = summed
    offsets = torch.cat([lengths.new_zeros(1), lengths.flatten().cumsum(0)])
    sparse = Sparse(ids=torch.cat(ids), offsets=offsets, num_features=layout.num_features, checked_for=layout)
    store.update(sparse, grad, lr=lr, step=step)
