"""The look-up of `EmbeddingBags` as operators that torch.compile, torch.export and the meta device understand.

`rowstead::pooled_rows` is a function of the tables, so an exported program needs no module. `rowstead::fused_lookup` and
`rowstead::fused_update` train the tables of a live module, named by a handle. The update is a side effect of the backward pass: it
returns the gradient of the `tape`, a tensor that requires gradients, so no compiler drops it; and both operators are registered as
ordered effects, so none repeats, merges or reorders them.

In eager mode `FusedLookup` (`fused_lookup.py`) does the same with less overhead.

Letters: B examples, F features of the batch as given, nnz its ids.
"""

from __future__ import annotations

import itertools
import json
import weakref
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from rowstead.data.batch import Sparse
from rowstead.kernels import reference
from rowstead.kernels.check import check_sparse
from rowstead.kernels.choose import kernels_for
from rowstead.kernels.layout import Layout
from rowstead.kernels.row_state import compute_dtype
from rowstead.nn.bag_tables import BagTable, layout_of, select_features
from rowstead.nn.fused_lookup import OTHER_TABLES, refuse_data_parallel
from rowstead.spec.errors import RowsteadError

if TYPE_CHECKING:
    from rowstead.nn.embedding_bags import EmbeddingBags

_MODULES: weakref.WeakValueDictionary[int, EmbeddingBags] = weakref.WeakValueDictionary()
_HANDLES = itertools.count(1)


def register_module(bags: EmbeddingBags) -> int:
    """A number by which compiled code finds the module, as long as it lives."""
    handle = next(_HANDLES)
    _MODULES[handle] = bags
    return handle


def _module_of(handle: int) -> EmbeddingBags:
    bags = _MODULES.get(handle)
    if bags is None:
        raise RowsteadError("the EmbeddingBags of this compiled code no longer exist: keep the module, and compile it again")
    return bags


def layout_text(tables: Sequence[BagTable]) -> str:
    """The tables as text, for operators and exported programs."""
    return json.dumps(
        [[table.name, table.num_embeddings, table.embedding_dim, len(table.feature_names), table.pooling] for table in tables]
    )


@lru_cache(maxsize=256)
def _layout_from(text: str) -> Layout:
    """The layout that `layout_text` describes; features have no names here."""
    names = map(str, itertools.count())
    return layout_of(
        [
            BagTable(
                name=name,
                num_embeddings=num_rows,
                embedding_dim=width,
                feature_names=tuple(itertools.islice(names, num_features)),
                pooling=pooling,
            )
            for name, num_rows, width, num_features, pooling in json.loads(text)
        ]
    )


def _batch(ids: Tensor, offsets: Tensor, weights: Tensor | None, num_given: int, chosen: Sequence[int]) -> Sparse:
    """The batch with the features `chosen`, or as it is where there are none to choose."""
    sparse = Sparse(ids=ids, offsets=offsets, num_features=num_given, weights=weights)
    return select_features(sparse, chosen) if chosen else sparse


def _empty(offsets: Tensor, num_given: int, width: int, rows: Tensor) -> Tensor:
    """What a look-up returns, [B, width], without values."""
    return rows.new_empty((offsets.shape[0] - 1) // num_given, width, dtype=compute_dtype(rows.dtype))


_BATCH = "Tensor ids, Tensor offsets, Tensor? weights, SymInt num_given, SymInt[] chosen"


@torch.library.custom_op(
    "rowstead::pooled_rows",
    mutates_args=(),
    schema=f"(Tensor[] tables, {_BATCH}, str layout, str kernel, bool check) -> Tensor",
)
def pooled_rows(
    tables: list[Tensor],
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    num_given: int,
    chosen: list[int],
    layout: str,
    kernel: str,
    check: bool,
) -> Tensor:
    """Pooled rows of all features, [B, sum of widths]."""
    sparse, known = _batch(ids, offsets, weights, num_given, chosen), _layout_from(layout)
    if check:
        check_sparse(
            known, sparse.ids, sparse.offsets, sparse.weights, num_features=sparse.num_features, device=tables[0].device
        )
    _, kernels = kernels_for(kernel, tables[0].device)
    return kernels.lookup([rows.detach() for rows in tables], known, sparse.ids, sparse.offsets, sparse.weights)


@pooled_rows.register_fake
def _(tables, ids, offsets, weights, num_given, chosen, layout, kernel, check):  # type: ignore[no-untyped-def]
    return _empty(offsets, num_given, _layout_from(layout).total_width, tables[0])


@torch.library.custom_op(
    "rowstead::pooled_rows_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor[] tables, {_BATCH}, str layout, bool of_tables, bool of_weights) -> Tensor[]",
)
def pooled_rows_backward(
    grad: Tensor,
    tables: list[Tensor],
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    num_given: int,
    chosen: list[int],
    layout: str,
    of_tables: bool,
    of_weights: bool,
) -> list[Tensor]:
    """The gradients of the tables and of the weights, as far as they are wanted."""
    sparse, known = _batch(ids, offsets, weights, num_given, chosen), _layout_from(layout)
    gradients = []
    if of_tables:
        gradients += reference.table_gradients(tables, known, sparse.ids, sparse.offsets, sparse.weights, grad)
    if of_weights and weights is not None:
        gradients.append(_weight_gradients(tables, known, sparse, weights, chosen, num_given, offsets, grad))
    return gradients


@pooled_rows_backward.register_fake
def _(grad, tables, ids, offsets, weights, num_given, chosen, layout, of_tables, of_weights):  # type: ignore[no-untyped-def]
    gradients = [torch.empty_like(rows) for rows in tables] if of_tables else []
    return [*gradients, torch.empty_like(weights)] if of_weights else gradients


def _weight_gradients(
    tables: Sequence[Tensor],
    layout: Layout,
    sparse: Sparse,
    weights: Tensor,
    chosen: Sequence[int],
    num_given: int,
    offsets: Tensor,
    grad: Tensor,
) -> Tensor:
    """The gradient of the weights of a batch as given [nnz], of which `sparse` has the features `chosen`."""
    gradient = reference.weight_gradients(tables, layout, sparse.ids, sparse.offsets, grad).to(weights.dtype)
    if not chosen:
        return gradient
    order = torch.arange(weights.numel(), device=weights.device)
    copied = select_features(Sparse(ids=order, offsets=offsets, num_features=num_given), chosen).ids
    return torch.zeros_like(weights).index_add_(0, copied, gradient)


def _save_pooled(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tables, ids, offsets, weights, ctx.num_given, ctx.chosen, ctx.layout, _, _ = inputs
    ctx.save_for_backward(ids, offsets, weights, *tables)


def _backward_of_pooled(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    ids, offsets, weights, *tables = ctx.saved_tensors
    of_tables, of_weights = any(ctx.needs_input_grad[0]), bool(ctx.needs_input_grad[3])
    batch = ids, offsets, weights, ctx.num_given, ctx.chosen
    gradients = torch.ops.rowstead.pooled_rows_backward(grad, tables, *batch, ctx.layout, of_tables, of_weights)
    of_each = gradients[: len(tables)] if of_tables else [None] * len(tables)
    return of_each, None, None, gradients[-1] if of_weights else None, None, None, None, None, None


pooled_rows.register_autograd(_backward_of_pooled, setup_context=_save_pooled)


@torch.library.custom_op(
    "rowstead::fused_lookup",
    mutates_args=(),
    schema=f"(Tensor tape, Tensor[] tables, {_BATCH}, SymInt handle) -> (Tensor, Tensor)",
)
def fused_lookup(
    tape: Tensor,
    tables: list[Tensor],
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    num_given: int,
    chosen: list[int],
    handle: int,
) -> tuple[Tensor, Tensor]:
    """Pooled rows of all features [B, sum of widths], and the addresses of the tables that were read [T]."""
    bags = _module_of(handle)
    refuse_data_parallel()
    sparse = _batch(ids, offsets, weights, num_given, chosen)
    with torch.no_grad():
        pooled = bags._store.lookup(sparse, [rows.detach() for rows in tables])
    return pooled, _addresses(tables)


@fused_lookup.register_fake
def _(tape, tables, ids, offsets, weights, num_given, chosen, handle):  # type: ignore[no-untyped-def]
    width = _module_of(handle)._store.layout.total_width
    return _empty(offsets, num_given, width, tables[0]), torch.empty(len(tables), dtype=torch.int64, device="cpu")


def _addresses(tables: Sequence[Tensor]) -> Tensor:
    return torch.tensor([rows.data_ptr() for rows in tables], dtype=torch.int64, device="cpu")


@torch.library.custom_op(
    "rowstead::fused_update",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor addresses, {_BATCH}, SymInt handle, bool of_weights) -> (Tensor, Tensor)",
)
def fused_update(
    grad: Tensor,
    addresses: Tensor,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    num_given: int,
    chosen: list[int],
    handle: int,
    of_weights: bool,
) -> tuple[Tensor, Tensor]:
    """Update the rows that a `fused_lookup` read; returns the gradients of its tape and of its weights."""
    bags = _module_of(handle)
    if not torch.equal(_addresses(bags._tables()), addresses):
        raise RowsteadError(OTHER_TABLES)
    sparse = _batch(ids, offsets, weights, num_given, chosen)
    gradient = torch.empty(0, device=grad.device)
    if of_weights and weights is not None:  # with the rows as they were read: before the update
        rows = [table.detach() for table in bags._tables()]
        gradient = _weight_gradients(rows, bags._store.layout, sparse, weights, chosen, num_given, offsets, grad)
    bags._update([sparse], [grad])
    return torch.empty(0, device="cpu"), gradient


@fused_update.register_fake
def _(grad, addresses, ids, offsets, weights, num_given, chosen, handle, of_weights):  # type: ignore[no-untyped-def]
    return torch.empty(0, device="cpu"), torch.empty_like(weights) if of_weights else torch.empty(0, device=grad.device)


def _save_fused(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, tables, ids, offsets, weights, ctx.num_given, ctx.chosen, ctx.handle = inputs
    ctx.num_tables = len(tables)
    ctx.save_for_backward(output[1], ids, offsets, weights)


def _backward_of_fused(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    addresses, *batch = ctx.saved_tensors
    of_weights = bool(ctx.needs_input_grad[4])
    arguments = grad, addresses, *batch, ctx.num_given, ctx.chosen, ctx.handle, of_weights
    tape, gradient = torch.ops.rowstead.fused_update(*arguments)
    return tape, [None] * ctx.num_tables, None, None, gradient if of_weights else None, None, None, None


fused_lookup.register_autograd(_backward_of_fused, setup_context=_save_fused)
_EFFECTS = [
    _register_effectful_op(operator, _EffectType.ORDERED)
    for operator in (torch.ops.rowstead.fused_lookup.default, torch.ops.rowstead.fused_update.default)
]
