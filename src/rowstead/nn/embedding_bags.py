"""`EmbeddingBags`: rowstead's tables and kernels as a module for any PyTorch model.

It replaces TorchRec's EmbeddingBagCollection: same configuration, same input, same output, same names in
`state_dict`. TorchRec is never imported here; its objects are recognized by their methods.

Letters: B examples, nnz ids in the batch.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn

from rowstead.data.batch import Sparse, sparse_from_kjt
from rowstead.kernels.row_state import RowState, compute_dtype, new_row_state
from rowstead.nn.bag_ops import FusedLookup, layout_text, refuse_data_parallel, register_module
from rowstead.nn.bag_tables import (
    BagTable,
    PooledFeatures,
    choose_features,
    dtype_of,
    keys_of,
    layout_of,
    optimizer_of,
    require_one_of,
    select_features,
)
from rowstead.nn.fused_optimizer import FusedOptimizer
from rowstead.spec.errors import CheckpointError, DataError, RowsteadError
from rowstead.spec.row_optimizers import RowOptimizerName, SparseOptimizerSpec
from rowstead.spec.run import Kernel
from rowstead.stores.device import DeviceStore


class EmbeddingBags(nn.Module):
    """Many embedding tables with one pooled look-up, and an optimizer that is fused with the backward pass.

    `tables` are `BagTable`s or TorchRec's EmbeddingBagConfigs. With an `optimizer` (a SparseOptimizerSpec, or its kind, and
    `lr`) the tables require no gradients: `loss.backward()` updates the rows that were read. Each look-up is one
    update, also where several look-ups precede one `backward()`. Without an optimizer the tables are ordinary
    parameters with dense gradients, for any torch optimizer, through the slower reference kernels.

    `dtype` is that of the rows (float32, bfloat16, float16); pooled vectors are float32 unless rows are float64. With `check`, a
    batch that does not fit the tables is refused before any row is read; on a GPU that synchronizes with the device.
    """

    _store: DeviceStore

    def __init__(
        self,
        tables: Sequence[Any],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        *,
        dtype: torch.dtype | None = None,
        optimizer: SparseOptimizerSpec | RowOptimizerName | None = None,
        lr: float | None = None,
        seed: int = 1,
        kernel: Kernel = "auto",
        check: bool = True,
    ) -> None:
        super().__init__()
        require_one_of("kernel", kernel, get_args(Kernel))
        require_one_of("dtype", dtype, (None, torch.float32, torch.bfloat16, torch.float16, torch.float64))
        self._configs = tuple(BagTable.like(table) for table in tables)
        self._is_weighted, self._kernel, self._check = is_weighted, kernel, check
        layout = layout_of(self._configs)
        self._wanted = [feature for table in self._configs for feature in table.feature_names]
        """The feature of each pooled vector; a feature that several tables read occurs several times."""
        self.features = tuple(dict.fromkeys(self._wanted))
        """The features, in the order in which a Sparse must have them."""
        self._keys = keys_of(self._configs)
        self._lengths = [table.embedding_dim for table in self._configs for _ in table.feature_names]
        self._layout_text = layout_text(self._configs)
        spec = optimizer_of(optimizer, lr)
        rows_dtype, device = dtype or dtype_of(tables), device or torch.get_default_device()
        store = DeviceStore(layout, spec, seed=seed, kernel=kernel, device=device, dtype=rows_dtype, check=check)
        # Not a submodule, or its tables would have two names in `state_dict`.
        self.__dict__["_store"] = store
        self.embedding_bags = nn.ModuleDict(
            {table.name: _Rows(rows) for table, rows in zip(self._configs, store.weights, strict=True)}
        )
        self.requires_grad_(spec is None)
        self._fused = None if spec is None else FusedOptimizer(self._named_tables(), store.row_states, lr=spec.lr)
        # Autograd calls a backward pass only if some input requires gradients.
        self._tape = torch.empty(0, requires_grad=True, device="cpu")
        self._handle = register_module(self)
        for config, rows in zip(tables, store.weights, strict=True):
            if callable(initialise := getattr(config, "init_fn", None)):  # of TorchRec's configurations
                with torch.no_grad():
                    initialise(rows)
        self.register_load_state_dict_post_hook(_tie_again)

    def forward(self, features: Any):  # type: ignore[no-untyped-def]  # torch.fx gives a return type to TorchScript, which lacks `Any`
        """Pooled vectors of every feature: of a Sparse as PooledFeatures, of a KeyedJaggedTensor as TorchRec's KeyedTensor.

        Ids in the order of `self.features`, each feature read by one table, are used without a copy. Where features are in
        another order, too many, or read by several tables, ids and offsets are copied first.
        """
        if isinstance(features, torch.fx.Proxy):
            return self._traced(features)
        sparse, given = self._given(features)
        if torch.compiler.is_compiling() or (tables := self._tables())[0].is_meta:
            pooled = self._pooled_by_operators(sparse, given)
        elif given == self._wanted:
            pooled = self._pooled(sparse, tables)
        else:
            pooled = self._pooled(select_features(sparse, choose_features(given, self._wanted)), tables)
        if not isinstance(features, Sparse) and (torchrec := sys.modules.get("torchrec.sparse.jagged_tensor")) is not None:
            return torchrec.KeyedTensor(keys=self._keys, length_per_key=self._lengths, values=pooled)
        return PooledFeatures(self._keys, self._lengths, pooled)

    @property
    def optimizer(self) -> SparseOptimizerSpec | None:
        """The optimizer that is fused with the backward pass."""
        return self._store.optimizer

    def fused_optimizer(self) -> FusedOptimizer:
        """The fused optimizer as a torch.optim.Optimizer, for learning rate schedulers and checkpoints."""
        if self._fused is None:
            raise RowsteadError("no optimizer is fused with these tables: give EmbeddingBags an `optimizer`")
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
        return self._store.weights[0].device

    @property
    def kernel(self) -> str:
        """Name of the kernels that run."""
        return self._store.kernel

    def embedding_bag_configs(self) -> tuple[BagTable, ...]:
        return self._configs

    def is_weighted(self) -> bool:
        return self._is_weighted

    def optimizer_state(self) -> dict[str, Tensor]:
        """State of the fused optimizer, as `<table>.<name>`, and `num_updates`; `state_dict` has only the rows."""
        state = {name: value for name, value in self._store.state().items() if not name.endswith(".rows")}
        return {**state, "num_updates": self.fused_optimizer().num_updates.clone()}

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Load what `optimizer_state` returned, so that training continues bit for bit."""
        if "num_updates" not in state:
            raise CheckpointError("no `num_updates`: this is not the result of `optimizer_state`")
        rows = {name: value for name, value in self._store.state().items() if name.endswith(".rows")}
        self._store.load_state({**state, **rows})
        self.fused_optimizer().num_updates.fill_(int(state["num_updates"]))

    def extra_repr(self) -> str:
        return f"{len(self._configs)} tables, {len(self.features)} features, optimizer={self.optimizer}"

    def _pooled(self, sparse: Sparse, tables: list[Tensor]) -> Tensor:
        """[B, sum of widths], from the tables that this module has now."""
        store, weights = self._store, sparse.weights
        given = None if all(map(operator.is_, tables, store.weights._parameters.values())) else tables
        if given is not None and torch.is_grad_enabled() and all(isinstance(rows, nn.Parameter) for rows in tables):
            store.check_tables(tables)
            self._tie()
            given = None
        sparse = store.check_batch(sparse)
        if store.optimizer is None:
            return store.lookup(sparse, given)
        if weights is not None:
            sparse = dataclasses.replace(sparse, weights=weights.detach())
        if not torch.is_grad_enabled():
            return store.lookup(sparse, given)
        refuse_data_parallel()
        pooled: Tensor = FusedLookup.apply(self._tape, weights, self, sparse, tables, given is None)
        return pooled

    def _pooled_by_operators(self, sparse: Sparse, given: list[str]) -> Tensor:
        """The same by operators that compilers and the meta device understand; they order and check the batch when they run."""
        tables = [self.embedding_bags[table.name].weight for table in self._configs]
        chosen = [] if given == self._wanted else choose_features(given, self._wanted)
        batch = sparse.ids, sparse.offsets, sparse.weights, len(given), chosen
        # The flag itself: for Dynamo of torch 2.11 `is_exporting()` is true under torch.compile, too.
        if self._fused is not None and torch.is_grad_enabled() and not torch.compiler._is_exporting_flag:
            pooled: Tensor = torch.ops.rowstead.fused_lookup(self._tape, tables, *batch, self._handle)[0]
            return pooled
        inputs = tables if sparse.weights is None else [*tables, sparse.weights]
        in_autograd = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
        kernel = "reference" if in_autograd else self._kernel
        by_function: Tensor = torch.ops.rowstead.pooled_rows(tables, *batch, self._layout_text, kernel, self._check)
        return by_function

    def _traced(self, features: torch.fx.Proxy) -> Any:
        """The look-up of a KeyedJaggedTensor in torch operations, as torch.fx records and TorchScript compiles them."""
        torchrec = sys.modules.get("torchrec.sparse.jagged_tensor")
        if torchrec is None:
            raise RowsteadError(
                "torch.fx traces a look-up of TorchRec's KeyedJaggedTensor: import torchrec first, or use torch.export"
            )
        if self._fused is not None and self.training:
            raise RowsteadError(
                "a traced look-up does not update rows: trace the module after `eval()`, or one without `optimizer` that has "
                "the same state_dict"
            )
        if features.node.op == "placeholder":
            features.node.type = torchrec.KeyedJaggedTensor  # TorchScript needs it
        by_feature: Any = features.to_dict()
        pooled, dtype = [], compute_dtype(self._tables()[0].dtype)
        for table in self._configs:
            rows: Any = self.embedding_bags[table.name].weight
            for name in table.feature_names:
                bag = by_feature[name]
                is_mean = table.pooling == "mean"
                weights = bag.weights() if self._is_weighted else None
                mode = "mean" if is_mean and weights is None else "sum"
                how: dict[str, Any] = {"mode": mode, "include_last_offset": True, "norm_type": 2.0}  # TorchScript: a float
                vectors: Any = nn.functional.embedding_bag(bag.values(), rows, bag.offsets(), per_sample_weights=weights, **how)
                if is_mean and weights is not None:
                    vectors = vectors / bag.lengths().clamp(min=1).unsqueeze(1)
                pooled.append(vectors.to(dtype))
        return torchrec.KeyedTensor(keys=self._keys, length_per_key=self._lengths, values=torch.cat(pooled, dim=1))

    def __prepare_scriptable__(self) -> nn.Module:
        """What torch.jit.script compiles in place of this module."""
        if self._fused is not None:
            raise RowsteadError(
                "torch.jit.script has no fused optimizer: script EmbeddingBags without `optimizer` that have the same state_dict"
            )
        return torch.fx.symbolic_trace(self)

    def _update(self, sparse: Sparse, grad: Tensor) -> None:
        optimizer = self.fused_optimizer()
        lr, step = optimizer.lr, optimizer.num_updates.add_(1)
        if sparse.ids.numel():
            self._store.update(sparse, grad, lr=lr, step=int(step))

    def _given(self, features: Any) -> tuple[Sparse, list[str]]:
        """The batch and the names of its features, in their order."""
        if isinstance(features, Sparse):
            sparse, given = features, list(self.features)
            if sparse.num_features != len(given):
                raise DataError(
                    f"the batch has {sparse.num_features} features, but the tables read {len(given)}: {', '.join(given)}"
                )
        elif all(hasattr(features, name) for name in ("keys", "values", "offsets", "weights_or_none")):
            sparse, given = sparse_from_kjt(features), list(features.keys())
        else:
            raise TypeError(f"give a rowstead.Sparse or a KeyedJaggedTensor, not {type(features).__name__}")
        if self._is_weighted and sparse.weights is None:
            raise DataError("is_weighted is set, but the batch has no weights")
        if not self._is_weighted and sparse.weights is not None:
            sparse = dataclasses.replace(sparse, weights=None)
        return sparse, given

    def _tables(self) -> list[Tensor]:
        """The tables that this module has now: parameters, or what torch.func.functional_call or a parametrization puts there."""
        bags: Any = self.embedding_bags._modules.values()
        return [bag.weight if (rows := bag._parameters.get("weight")) is None else rows for bag in bags]

    def _named_tables(self) -> dict[str, nn.Parameter]:
        bags: Any = self.embedding_bags
        return {f"embedding_bags.{table.name}.weight": bags[table.name].weight for table in self._configs}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_handle"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._handle = register_module(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EmbeddingBags:
        super()._apply(fn, recurse)
        self._tie()
        return self

    def _tie(self) -> None:
        """Give the store the tables that this module has now, and move the optimizer's state to their device and dtype."""
        store = self._store
        for index, rows in enumerate(self._named_tables().values()):
            if isinstance(rows, nn.Parameter):  # a parametrization has others
                store.weights[index] = rows
            if store.optimizer is not None:
                store.row_states[index] = _state_like(store.row_states[index], store.optimizer, rows.detach())
        if self._fused is not None:
            self._fused.tie(self._named_tables(), store.row_states)


def _state_like(state: RowState, optimizer: SparseOptimizerSpec, rows: Tensor) -> RowState:
    """The optimizer's state on the device and in the type that `rows` need; new where it was on the meta device."""
    if any(value.is_meta for value in state.values()) and not rows.is_meta:
        return new_row_state(optimizer.kind, rows)
    like = new_row_state(optimizer.kind, rows[:1])
    return {name: value.to(like[name]) for name, value in state.items()}


def _tie_again(bags: EmbeddingBags, _: object) -> None:
    """After `load_state_dict`, which replaces tables under `assign=True`. No lambda: modules are pickled."""
    bags._tie()


class _Rows(nn.Module):
    """One table, under its name in TorchRec."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
