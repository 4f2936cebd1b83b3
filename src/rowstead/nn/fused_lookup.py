"""`FusedLookup`: a look-up in eager mode whose backward pass is the optimizer's update, for every `TableModule`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel

from rowstead.data.batch import Sparse
from rowstead.kernels import reference
from rowstead.spec.errors import RowsteadError

if TYPE_CHECKING:
    from rowstead.nn.table_module import TableModule


class FusedLookup(torch.autograd.Function):
    """A look-up in each of a module's stores; the backward pass updates the rows that were read."""

    @staticmethod
    def forward(
        ctx: Any,
        tape: Tensor,
        weights: Tensor | None,
        module: TableModule,
        parts: Sequence[Sparse],
        tables: list[Tensor],
        are_own: bool,
    ) -> tuple[Tensor, ...]:
        """`parts` are each store's; `weights`, those of the only part, are the ones that gradients are for.

        `are_own`: whether `tables` are those of the module's stores; others are read, but cannot be trained.
        """
        ctx.module, ctx.parts, ctx.tables = module, parts, tables
        ctx.save_for_backward(weights, *(tensor for part in parts for tensor in (part.ids, part.offsets)))
        return module._read(parts, None if are_own else tables)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Reading them fails if they were changed since, or if this backward pass ran before.
        weights, *_ = ctx.saved_tensors
        if any(now is not read for now, read in zip(ctx.module._tables(), ctx.tables, strict=True)):
            raise RowsteadError(OTHER_TABLES)
        of_weights = None
        if ctx.needs_input_grad[1]:  # with the rows as they were read: before the update
            (store,), (part,), (grad,) = ctx.module._stores, ctx.parts, grads
            of_weights = reference.weight_gradients(ctx.tables, store.layout, part.ids, part.offsets, grad).to(weights.dtype)
        ctx.module._update(ctx.parts, grads)
        return None, of_weights, None, None, None, None


OTHER_TABLES = (
    "the tables are no longer those that the look-up read, so backward() cannot update them: with a fused optimizer, replace tables "
    "between steps only, and call torch.func.functional_call under torch.no_grad(), or leave out `optimizer`"
)


def refuse_data_parallel() -> None:
    """Refuse to train inside DistributedDataParallel, which would leave each process with tables of its own."""
    active = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if active is not None and active.process_group.size() > 1:
        raise RowsteadError(
            "DistributedDataParallel synchronizes gradients, but a fused optimizer updates tables without any, so each process would "
            "train other tables: leave out `optimizer`, so that tables have gradients, or train with `rowstead train --processes`"
        )
