"""`fuse_embedding_optimizer`: tables of a model that is there already, with an optimizer fused with the backward pass."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rowstead.nn.bag_tables import optimizer_of
from rowstead.nn.embedding_bags import EmbeddingBags
from rowstead.nn.embeddings import Embeddings
from rowstead.nn.table_module import TableModule
from rowstead.spec.errors import RowsteadError
from rowstead.spec.row_optimizers import LEAN_OPTIMIZER, ROW_OPTIMIZERS, RowOptimizerName, SparseOptimizerSpec

_KINDS: dict[str, RowOptimizerName] = {name.replace("_", ""): name for name in ROW_OPTIMIZERS}
"""Row optimizers by the names that classes of torch.optim and TorchRec have, in lower case."""


def fuse_embedding_optimizer(
    model: nn.Module,
    optimizer: SparseOptimizerSpec | RowOptimizerName | type[torch.optim.Optimizer],
    optimizer_kwargs: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
    *,
    lr: float | None = None,
) -> nn.Module:
    """Fuse an `optimizer` with the tables in `model`.

    EmbeddingBags and TorchRec's EmbeddingBagCollections are replaced by EmbeddingBags, Embeddings and TorchRec's EmbeddingCollections by
    Embeddings. Takes the arguments of TorchRec's function of this name, or an optimizer as `EmbeddingBags` take it. The tables keep their rows
    and all their names; they no longer require gradients, so create the optimizer of the other parameters afterwards. Returns
    `model`, or its replacement where it is a collection itself. Tables that have a fused optimizer stay as they are.
    """
    if isinstance(optimizer, type):
        spec: SparseOptimizerSpec | None = _spec_of(optimizer, dict(optimizer_kwargs or {}))
        spec = optimizer_of(spec, lr)
    elif optimizer_kwargs:
        raise RowsteadError("optimizer_kwargs are those of a class of torch.optim: give a SparseOptimizerSpec instead")
    else:
        spec = optimizer_of(optimizer, lr)
    if spec is None:
        raise RowsteadError(f"name the optimizer to fuse, such as '{LEAN_OPTIMIZER}'")
    replaced: dict[int, nn.Module] = {}

    def replace(module: nn.Module) -> nn.Module:
        if id(module) not in replaced:
            replaced[id(module)] = _fused(module, spec, device) if _is_unfused(module) else module
            for name, child in list(module._modules.items()):
                if child is not None and replaced[id(module)] is module:
                    module._modules[name] = replace(child)
        return replaced[id(module)]

    return replace(model)


def _is_unfused(module: nn.Module) -> bool:
    if isinstance(module, TableModule):
        return module.optimizer is None
    torchrec = sys.modules.get("torchrec.modules.embedding_modules")
    return torchrec is not None and isinstance(module, (torchrec.EmbeddingBagCollection, torchrec.EmbeddingCollection))


def _fused(module: Any, spec: SparseOptimizerSpec, device: torch.device | str | None) -> TableModule:
    rows = {name: value.detach() for name, value in module.state_dict().items()}
    kinds = {(value.dtype, value.is_meta) for value in rows.values()}
    if len(kinds) != 1:
        raise RowsteadError("the tables of one collection must have the same data type and device before an optimizer is fused")
    dtype, is_meta = kinds.pop()
    arguments: dict[str, Any] = {"dtype": dtype, "optimizer": spec}
    if isinstance(module, TableModule):
        arguments |= {"kernel": module._kernel, "check": module._check}
    # Without memory of its own where there are tables, which it takes.
    arguments["device"] = "meta" if not is_meta else device or "meta"
    fused: TableModule
    if hasattr(module, "embedding_bag_configs"):
        fused = EmbeddingBags(module.embedding_bag_configs(), is_weighted=module.is_weighted(), **arguments)
    else:
        if not isinstance(module, TableModule) and module.need_indices():
            raise RowsteadError("Embeddings return rows without ids: make the EmbeddingCollection without `need_indices`")
        fused = Embeddings(module.embedding_configs(), **arguments)
    if not is_meta:
        fused.load_state_dict(rows, assign=True)
        if device is not None:
            fused.to(device)
    return fused.train(module.training)


def _spec_of(optimizer: type[torch.optim.Optimizer], given: dict[str, Any]) -> SparseOptimizerSpec:
    """The row optimizer that computes what a class of torch.optim does with the arguments `given`."""
    kind = _KINDS.get(optimizer.__name__.lower())
    if kind is None:
        raise RowsteadError(f"cannot fuse {optimizer.__name__}: use one of {', '.join(ROW_OPTIMIZERS)}")
    parameters = inspect.signature(optimizer).parameters
    if "learning_rate" in given:
        given["lr"] = given.pop("learning_rate")
    unknown = next((name for name in given if name not in parameters), None)
    if unknown is not None:
        raise RowsteadError(f"{optimizer.__name__} has no argument `{unknown}`")
    candidates = [ROW_OPTIMIZERS[kind], *(entry for entry in ROW_OPTIMIZERS.values() if entry.extends == kind)]
    fields: dict[str, Any] = {}
    for name in ("lr", *(name for entry in candidates for name in entry.hyper_parameters)):
        argument, index = ("betas", int(name[-1]) - 1) if name in ("beta1", "beta2") else (name, None)
        if argument in parameters:
            value = given.get(argument, parameters[argument].default)
            fields[name] = float(value if index is None else value[index])
    taken = {"betas" if name in ("beta1", "beta2") else name for name in fields}
    ignored = next((name for name, value in given.items() if value and name not in taken), None)
    if ignored is not None:
        raise RowsteadError(f"{ignored}={given[ignored]}: a fused {optimizer.__name__} has only {', '.join(sorted(taken))}")
    entry = next((one for one in candidates[1:] if all(fields.get(name) for name in one.hyper_parameters)), candidates[0])
    return SparseOptimizerSpec(
        kind=entry.name, **{name: fields[name] for name in ("lr", *entry.hyper_parameters) if name in fields}
    )
