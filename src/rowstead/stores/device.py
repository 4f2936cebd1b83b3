"""Rows in the memory of the device that trains: GPU memory, or system memory on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rowstead.data.batch import Sparse, check_batch
from rowstead.kernels import reference
from rowstead.kernels.check import check_gradient
from rowstead.kernels.choose import EmbeddingKernels, kernels_for
from rowstead.kernels.initial import fill_initial_rows, initial_rows
from rowstead.kernels.layout import Layout
from rowstead.kernels.row_state import RowState, compute_dtype, new_row_state
from rowstead.spec.errors import RowsteadError
from rowstead.spec.features import Table
from rowstead.spec.row_optimizers import RowOptimizerName, SparseOptimizerSpec
from rowstead.spec.run import Kernel
from rowstead.stores.base import EmbeddingStore, GraphRows
from rowstead.stores.state import StatePart, part_of

if TYPE_CHECKING:
    from rowstead.kernels.gpu.embedding import UpdatePlan


def resolve_device(device: torch.device | str) -> torch.device:
    """The device with its index, as tensors have it: `cuda` becomes the current one of several."""
    return torch.empty(0, device=device).device


class DeviceStore(EmbeddingStore):
    """An EmbeddingStore whose tables are parameters of the module.

    Tables do not require gradients, since `update` trains them. After `requires_grad_(True)` they take part in autograd
    like any other parameter. Without an optimizer the store only answers look-ups and holds no optimizer state.
    Rows have type `dtype`; in BF16 and FP16 updates use stochastic rounding, while look-ups, gradients and optimizer state are
    FP32. With `contiguous`, on a GPU, tables of one width share one allocation, which lives as long as any of them.
    """

    def __init__(
        self,
        layout: Layout,
        optimizer: SparseOptimizerSpec | None,
        *,
        seed: int = 1,
        kernel: Kernel = "auto",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        check: bool = True,
        contiguous: bool = True,
    ) -> None:
        super().__init__(layout, check=check)
        device = torch.device(device)
        self.optimizer = optimizer
        self._kernel_choice: Kernel = kernel
        self._checked_addresses: list[int] = []
        kind: RowOptimizerName = optimizer.kind if optimizer else "sgd"
        if contiguous and device.type == "cuda" and len(layout.tables) > 1 and len({t.width for t in layout.tables}) == 1:
            rows, self.row_states = _allocate_contiguous(layout.tables, kind, seed=seed, dtype=dtype, device=device)
        else:
            rows = [initial_rows(table, seed=seed, dtype=dtype, device=device) for table in layout.tables]
            self.row_states = [new_row_state(kind, table_rows) for table_rows in rows]
        self.weights = nn.ParameterList(nn.Parameter(table_rows, requires_grad=False) for table_rows in rows)

    def lookup(self, sparse: Sparse, tables: Sequence[Tensor] | None = None) -> Tensor:
        """Pooled rows; `tables`, of the same shapes, take the place of the store's own for this look-up."""
        weights = self._rows() if tables is None else list(tables)
        if tables is not None:
            self.check_tables(weights)
        elif self._check:
            self._check_moved_tables(weights)
        if self._check:
            sparse = check_batch(sparse, self.layout, weights[0].device)
        inputs = weights if sparse.weights is None else [*weights, sparse.weights]
        in_autograd = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
        kernels = reference if in_autograd else kernels_for(self._kernel_choice, weights[0].device)[1]
        return kernels.lookup(weights, self.layout, sparse.ids, sparse.offsets, sparse.weights)

    @torch.no_grad()
    def update(self, sparse: Sparse, grad: Tensor, *, lr: float, step: int) -> None:
        assert self.optimizer is not None, "this store was made for look-ups only"
        weights = self._rows()
        if self._check:
            self._check_moved_tables(weights)
            sparse = check_batch(sparse, self.layout, weights[0].device)
            check_gradient(self.layout, sparse.offsets, grad)
        assert grad.dtype == compute_dtype(weights[0].dtype), f"rows are {weights[0].dtype}, their gradient is {grad.dtype}"
        assert all(value.device == grad.device for value in self.row_states[0].values()), "move it before training"
        batch = sparse.ids, sparse.offsets, sparse.weights
        self._kernels().update(weights, self.row_states, self.layout, *batch, grad, optimizer=self.optimizer, lr=lr, step=step)

    def _check_moved_tables(self, weights: list[Tensor]) -> None:
        """Check the store's tables again whenever one has moved, and the optimizer's state with them."""
        addresses = [rows.data_ptr() for rows in weights]
        if addresses == self._checked_addresses:
            return
        self.check_tables(weights)
        kind = weights[0].dtype, weights[0].device
        for table, state in zip(self.tables, self.row_states, strict=True):
            for name, value in state.items():
                if value.dtype != compute_dtype(kind[0]) or value.device != kind[1]:
                    raise RowsteadError(
                        f"`{name}` of table `{table.name}` is {value.dtype} on {value.device}, and its rows are {kind[0]} on "
                        f"{kind[1]}: convert the store before training, or create a new one"
                    )
        self._checked_addresses = addresses

    def check_tables(self, weights: Sequence[Tensor]) -> None:
        """Refuse tables that the kernels would misread."""
        kind = weights[0].dtype, weights[0].device
        for table, rows in zip(self.tables, weights, strict=True):
            if rows.shape != (table.num_rows, table.width) or not rows.is_contiguous() or (rows.dtype, rows.device) != kind:
                raise RowsteadError(
                    f"table `{table.name}` is {rows.dtype} {tuple(rows.shape)} on {rows.device} with strides {rows.stride()}: it "
                    f"must be contiguous {kind[0]} {(table.num_rows, table.width)} on {kind[1]} like the first"
                )

    @torch.no_grad()
    def resize(self, layout: Layout) -> None:
        """Extend tables to the rows of `layout`; the new rows are uninitialised."""
        for index, (before, table) in enumerate(zip(self.tables, layout.tables, strict=True)):
            more = table.num_rows - before.num_rows
            if not more:
                continue
            rows = self.weights[index]
            state = self.row_states[index]
            self.weights[index] = nn.Parameter(torch.cat([rows, rows.new_empty(more, table.width)]), requires_grad=False)
            self.row_states[index] = {
                name: torch.cat([value, value.new_empty(more, value.shape[1])]) for name, value in state.items()
            }
        self.layout = layout

    def lookup_unchecked(self, sparse: Sparse, dtype: torch.dtype | None = None) -> Tensor:
        """`lookup` on a GPU of a batch that is known to fit, with the result in `dtype`; see `kernels.gpu`."""
        from rowstead.kernels.gpu import embedding as gpu

        return gpu.lookup(self._rows(), self.layout, sparse.ids, sparse.offsets, sparse.weights, dtype=dtype)

    def plan_update(self, sparse: Sparse, *, scalars: Tensor) -> UpdatePlan:
        """The part of an update on a GPU that needs no gradient; see `kernels.gpu`."""
        from rowstead.kernels.gpu import embedding as gpu

        assert self.optimizer is not None, "this store was made for look-ups only"
        rows, ids, offsets = self._rows(), sparse.ids, sparse.offsets
        return gpu.plan_update(rows, self.row_states, self.layout, ids, offsets, optimizer=self.optimizer, scalars=scalars)

    @torch.no_grad()
    def apply_plan(self, plan: UpdatePlan, sparse: Sparse, grad: Tensor, *, scalars: Tensor, guard: Tensor) -> None:
        """`update` on a GPU by a plan, with learning rate and step in GPU memory; see `kernels.gpu`."""
        from rowstead.kernels.gpu import embedding as gpu

        assert self.optimizer is not None, "this store was made for look-ups only"
        batch = sparse.offsets, sparse.weights, grad
        gpu.apply_plan(plan, self._rows(), self.layout, *batch, optimizer=self.optimizer, scalars=scalars, guard=guard)

    @property
    def kernel(self) -> str:
        return kernels_for(self._kernel_choice, self.weights[0].device)[0] if self.tables else "none"

    def _rows(self) -> list[Tensor]:
        return list(self.weights._parameters.values())  # type: ignore[arg-type]  # iterating over a ParameterList is slow

    def _kernels(self) -> EmbeddingKernels:
        return kernels_for(self._kernel_choice, self.weights[0].device)[1]

    moves_with_module = True

    @property
    def device(self) -> torch.device | None:
        return self.weights[0].device if self.tables else None

    @property
    def can_share_between_threads(self) -> bool:
        return self.kernel == "cpu"

    def graph_rows(self) -> GraphRows | None:
        is_fp64 = any(rows.dtype == torch.float64 for rows in self._rows())
        return self if self.kernel in ("gpu", "none") and not is_fp64 else None

    generation = 0

    @property
    def resident(self) -> DeviceStore:
        """The store itself: see `GraphRows`."""
        return self

    def enter(self, sparse: Sparse) -> Sparse:
        """The batch unchanged: all rows are resident."""
        return sparse

    def leave(self) -> None:
        """No-op: all rows are resident."""

    def rows(self, table: str, ids: Tensor) -> Tensor:
        index = [t.name for t in self.tables].index(table)
        return self.weights[index].detach()[ids]

    def parts(self) -> list[StatePart]:
        named = []
        for table, rows, row_state in zip(self.tables, self._rows(), self.row_states, strict=True):
            named += [(f"{table.name}.{name}", value) for name, value in {"rows": rows.detach(), **row_state}.items()]
        return [part_of(name, value) for name, value in named]


def _allocate_contiguous(
    tables: Sequence[Table], kind: RowOptimizerName, *, seed: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[Tensor], list[RowState]]:
    """Rows and states of tables of one width in one allocation, which the GPU kernels address faster."""
    sizes = [table.num_rows for table in tables]
    slab = torch.empty(sum(sizes), tables[0].width, dtype=dtype, device=device)
    states = {name: value.split(sizes) for name, value in new_row_state(kind, slab).items()}
    rows = [part.data for part in slab.split(sizes)]  # views would share autograd's version counter
    for table, into in zip(tables, rows, strict=True):
        fill_initial_rows(into, table, seed=seed, device=device)
    return rows, [{name: parts[index] for name, parts in states.items()} for index in range(len(sizes))]
