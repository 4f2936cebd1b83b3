"""`TableModule`: tables under any PyTorch model, with an optimizer that is fused with the backward pass.

`EmbeddingBags` pool the rows that they look up, `Embeddings` return them one by one; everything else about their tables is here.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor, nn

from rowstead.data.batch import Sparse, check_batch, sparse_from_kjt
from rowstead.kernels.layout import Layout
from rowstead.kernels.row_state import RowState, new_row_state
from rowstead.nn.bag_tables import EmbeddingTable, dtype_of, keys_of, optimizer_of, require_one_of
from rowstead.nn.fused_lookup import FusedLookup, refuse_data_parallel
from rowstead.nn.fused_optimizer import FusedOptimizer
from rowstead.spec.errors import CheckpointError, DataError, RowsteadError
from rowstead.spec.row_optimizers import RowOptimizerName, SparseOptimizerSpec
from rowstead.spec.run import Kernel
from rowstead.stores.device import DeviceStore
from rowstead.stores.state import load_parts, whole_state


class TableModule(nn.Module):
    """Base class: holds the tables by name, as TorchRec does, and has stores read and train them.

    `layout` is that of a whole batch. Each of the `layouts` has a store, which looks up its tables together; they have the tables in the
    order of the configuration.
    """

    _TABLES: ClassVar[str]
    """Name of the submodule that has the tables."""
    _stores: tuple[DeviceStore, ...]

    def __init__(
        self,
        tables: Sequence[Any],
        configs: Sequence[EmbeddingTable],
        layout: Layout,
        layouts: Sequence[Layout],
        device: torch.device | str | None,
        *,
        dtype: torch.dtype | None,
        optimizer: SparseOptimizerSpec | RowOptimizerName | None,
        lr: float | None,
        seed: int,
        kernel: Kernel,
        check: bool,
    ) -> None:
        super().__init__()
        require_one_of("kernel", kernel, get_args(Kernel))
        require_one_of("dtype", dtype, (None, torch.float32, torch.bfloat16, torch.float16, torch.float64))
        self._configs, self._kernel, self._check, self._layout = tuple(configs), kernel, check, layout
        self._wanted = [feature for table in configs for feature in table.feature_names]
        """The feature of each look-up; a feature that several tables read occurs several times."""
        self.features = tuple(dict.fromkeys(self._wanted))
        """The features, in the order in which a Sparse must have them."""
        self._keys = keys_of(configs)
        spec = optimizer_of(optimizer, lr)
        rows_dtype, device = dtype or dtype_of(tables), device or torch.get_default_device()
        # In a tuple they are no submodules: or the tables would have two names in `state_dict`.
        self._stores = tuple(
            DeviceStore(layout, spec, seed=seed, kernel=kernel, device=device, dtype=rows_dtype, check=check)
            for layout in layouts
        )
        weights = [rows for store in self._stores for rows in store.weights]
        named = {table.name: _Rows(rows) for table, rows in zip(self._configs, weights, strict=True)}
        self.add_module(self._TABLES, nn.ModuleDict(named))
        self.requires_grad_(spec is None)
        self._fused = None if spec is None else FusedOptimizer(self._named_tables(), self._row_states(), lr=spec.lr)
        # Autograd calls a backward pass only if some input requires gradients.
        self._tape = torch.empty(0, requires_grad=True, device="cpu")
        for config, rows in zip(tables, weights, strict=True):
            if callable(initialise := getattr(config, "init_fn", None)):  # of TorchRec's configurations
                with torch.no_grad():
                    initialise(rows)
        self.register_load_state_dict_post_hook(_tie_again)

    @property
    def optimizer(self) -> SparseOptimizerSpec | None:
        """The optimizer that is fused with the backward pass."""
        return self._stores[0].optimizer

    def fused_optimizer(self) -> FusedOptimizer:
        """The fused optimizer as a torch.optim.Optimizer, for learning rate schedulers and checkpoints."""
        if self._fused is None:
            raise RowsteadError(f"no optimizer is fused with these tables: give {type(self).__name__} an `optimizer`")
        return self._fused

    @property
    def lr(self) -> float:
        """The fused optimizer's learning rate; may be set between steps."""
        return self.fused_optimizer().lr

    @lr.setter
    def lr(self, lr: float) -> None:
        if not 0 <= lr < math.inf:
            raise ValueError(f"lr must be at least 0 and finite, got {lr}")
        self.fused_optimizer().param_groups[0]["lr"] = float(lr)

    @property
    def device(self) -> torch.device:
        return self._stores[0].weights[0].device

    @property
    def kernel(self) -> str:
        """Name of the kernels that run."""
        return self._stores[0].kernel

    def optimizer_state(self) -> dict[str, Tensor]:
        """State of the fused optimizer, as `<table>.<name>`, and `num_updates`; `state_dict` has only the rows."""
        return {**self._state(rows=False), "num_updates": self.fused_optimizer().num_updates.clone()}

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Load what `optimizer_state` returned, so that training continues bit for bit."""
        if "num_updates" not in state:
            raise CheckpointError("no `num_updates`: this is not the result of `optimizer_state`")
        load_parts([part for store in self._stores for part in store.parts()], {**state, **self._state(rows=True)})
        self.fused_optimizer().num_updates.fill_(int(state["num_updates"]))

    def _state(self, *, rows: bool) -> dict[str, Tensor]:
        """The rows of the tables, or the optimizer's state, by name."""
        state = whole_state([part for store in self._stores for part in store.parts()])
        return {name: value for name, value in state.items() if name.endswith(".rows") == rows}

    def extra_repr(self) -> str:
        return f"{len(self._configs)} tables, {len(self.features)} features, optimizer={self.optimizer}"

    def _given(self, features: Any) -> tuple[Sparse, list[str]]:
        """The batch and the names of its features, in their order."""
        if isinstance(features, Sparse):
            given = list(self.features)
            if features.num_features != len(given):
                raise DataError(
                    f"the batch has {features.num_features} features, but the tables read {len(given)}: {', '.join(given)}"
                )
            return features, given
        if all(hasattr(features, name) for name in ("keys", "values", "offsets", "weights_or_none")):
            return sparse_from_kjt(features), list(features.keys())
        raise TypeError(f"give a rowstead.Sparse or a KeyedJaggedTensor, not {type(features).__name__}")

    def _checked(self, sparse: Sparse, tables: list[Tensor]) -> Sparse:
        """The batch, marked as one that fits the tables if this module checks batches."""
        return check_batch(sparse, self._layout, tables[0].device) if self._check else sparse

    def _look_up(self, parts: Sequence[Sparse], tables: list[Tensor]) -> tuple[Tensor, ...]:
        """What each store finds for its part of a batch, in the tables that this module has now."""
        are_own, weights = self._adopt(tables), parts[0].weights
        if self._fused is None or not torch.is_grad_enabled():
            return self._read(parts, None if are_own else tables)
        refuse_data_parallel()
        if weights is not None:
            parts = [dataclasses.replace(parts[0], weights=weights.detach())]
        found: tuple[Tensor, ...] = FusedLookup.apply(self._tape, weights, self, parts, tables, are_own)
        return found

    def _read(self, parts: Sequence[Sparse], tables: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
        """What each store finds, in `tables` or in its own."""
        if tables is None:
            return tuple(store.lookup(part, None) for store, part in zip(self._stores, parts, strict=True))
        rest = iter(tables)
        of_stores = [list(islice(rest, len(store.tables))) for store in self._stores]
        return tuple(store.lookup(part, own) for store, part, own in zip(self._stores, parts, of_stores, strict=True))

    def _update(self, parts: Sequence[Sparse], grads: Sequence[Tensor]) -> None:
        optimizer = self.fused_optimizer()
        lr, step = optimizer.lr, int(optimizer.num_updates.add_(1))
        for store, part, grad in zip(self._stores, parts, grads, strict=True):
            if part.ids.numel():
                store.update(part, grad, lr=lr, step=step)

    def _tables(self) -> list[Tensor]:
        """The tables that this module has now: parameters, or what torch.func.functional_call or a parametrization puts there."""
        held: Any = self._modules[self._TABLES]
        tables = held._modules.values()
        return [table.weight if (rows := table._parameters.get("weight")) is None else rows for table in tables]

    def _named_tables(self) -> dict[str, nn.Parameter]:
        held: Any = self._modules[self._TABLES]
        return {f"{self._TABLES}.{table.name}.weight": held[table.name].weight for table in self._configs}

    def _row_states(self) -> list[RowState]:
        return [state for store in self._stores for state in store.row_states]

    def _adopt(self, tables: list[Tensor]) -> bool:
        """Whether `tables` are those of the stores, which take parameters that have replaced theirs where these could be trained."""
        own = (rows for store in self._stores for rows in store.weights._parameters.values())
        if all(map(operator.is_, tables, own)):
            return True
        if not torch.is_grad_enabled() or not all(isinstance(rows, nn.Parameter) for rows in tables):
            return False
        rest = iter(tables)
        for store in self._stores:
            store.check_tables(list(islice(rest, len(store.tables))))
        self._tie()
        return True

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TableModule:
        super()._apply(fn, recurse)
        self._tie()
        return self

    def _tie(self) -> None:
        """Give the stores the tables that this module has now, and move the optimizer's state to their device and dtype."""
        tables = self._named_tables()
        for (store, index), rows in zip(self._slots(), tables.values(), strict=True):
            if isinstance(rows, nn.Parameter):  # a parametrization has others
                store.weights[index] = rows
            if store.optimizer is not None:
                store.row_states[index] = _state_like(store.row_states[index], store.optimizer, rows.detach())
        if self._fused is not None:
            self._fused.tie(tables, self._row_states())

    def _slots(self) -> Iterator[tuple[DeviceStore, int]]:
        """For each table its store, and its index there."""
        return ((store, index) for store in self._stores for index in range(len(store.tables)))


def _state_like(state: RowState, optimizer: SparseOptimizerSpec, rows: Tensor) -> RowState:
    """The optimizer's state on the device and in the type that `rows` need; new where it was on the meta device."""
    if any(value.is_meta for value in state.values()) and not rows.is_meta:
        return new_row_state(optimizer.kind, rows)
    like = new_row_state(optimizer.kind, rows[:1])
    return {name: value.to(like[name]) for name, value in state.items()}


def _tie_again(module: TableModule, _: object) -> None:
    """After `load_state_dict`, which replaces tables under `assign=True`. No lambda: modules are pickled."""
    module._tie()


class _Rows(nn.Module):
    """One table, under its name in TorchRec."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
