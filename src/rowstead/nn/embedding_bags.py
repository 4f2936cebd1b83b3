"""`EmbeddingBags`: rowstead's tables and kernels as a module for any PyTorch model.

It replaces TorchRec's EmbeddingBagCollection: same configuration, same input, same output, same names in
`state_dict`. TorchRec is never imported here; its objects are recognized by their methods.

Letters: B examples, nnz ids in the batch.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rowstead.data.batch import Sparse
from rowstead.kernels.row_state import compute_dtype
from rowstead.nn.bag_ops import layout_text, register_module
from rowstead.nn.bag_tables import BagTable, PooledFeatures, choose_features, layout_of, select_features
from rowstead.nn.table_module import TableModule
from rowstead.spec.errors import DataError, RowsteadError
from rowstead.spec.row_optimizers import RowOptimizerName, SparseOptimizerSpec
from rowstead.spec.run import Kernel
from rowstead.stores.device import DeviceStore


class EmbeddingBags(TableModule):
    """Many embedding tables with one pooled look-up, and an optimizer that is fused with the backward pass.

    `tables` are `BagTable`s or TorchRec's EmbeddingBagConfigs. With an `optimizer` (a SparseOptimizerSpec, or its kind, and
    `lr`) the tables require no gradients: `loss.backward()` updates the rows that were read. Each look-up is one
    update, also where several look-ups precede one `backward()`. Without an optimizer the tables are ordinary
    parameters with dense gradients, for any torch optimizer, through the slower reference kernels.

    `dtype` is that of the rows (float32, bfloat16, float16); pooled vectors are float32 unless rows are float64. With `check`, a
    batch that does not fit the tables is refused before any row is read; on a GPU that synchronizes with the device.
    """

    _TABLES = "embedding_bags"
    embedding_bags: nn.ModuleDict
    _configs: tuple[BagTable, ...]

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
        configs = [BagTable.like(table) for table in tables]
        arguments: dict[str, Any] = {"dtype": dtype, "optimizer": optimizer, "lr": lr}
        layout = layout_of(configs)
        super().__init__(tables, configs, layout, [layout], device, seed=seed, kernel=kernel, check=check, **arguments)
        self._is_weighted = is_weighted
        self._lengths = [table.embedding_dim for table in configs for _ in table.feature_names]
        self._layout_text = layout_text(configs)
        self._handle = register_module(self)

    def forward(self, features: Any):  # type: ignore[no-untyped-def]  # torch.fx gives a return type to TorchScript, which lacks `Any`
        """Pooled vectors of every feature: of a Sparse as PooledFeatures, of a KeyedJaggedTensor as TorchRec's KeyedTensor.

        Ids in the order of `self.features`, each feature read by one table, are used without a copy. Where features are in
        another order, too many, or read by several tables, ids and offsets are copied first.
        """
        if isinstance(features, torch.fx.Proxy):
            return self._traced(features)
        sparse, given = self._given(features)
        if self._is_weighted and sparse.weights is None:
            raise DataError("is_weighted is set, but the batch has no weights")
        if not self._is_weighted and sparse.weights is not None:
            sparse = dataclasses.replace(sparse, weights=None)
        if torch.compiler.is_compiling() or (tables := self._tables())[0].is_meta:
            pooled = self._pooled_by_operators(sparse, given)
        else:
            if given != self._wanted:
                sparse = select_features(sparse, choose_features(given, self._wanted))
            (pooled,) = self._look_up([self._checked(sparse, tables)], tables)
        if not isinstance(features, Sparse) and (torchrec := sys.modules.get("torchrec.sparse.jagged_tensor")) is not None:
            return torchrec.KeyedTensor(keys=self._keys, length_per_key=self._lengths, values=pooled)
        return PooledFeatures(self._keys, self._lengths, pooled)

    def embedding_bag_configs(self) -> tuple[BagTable, ...]:
        return self._configs

    def is_weighted(self) -> bool:
        return self._is_weighted

    @property
    def _store(self) -> DeviceStore:
        """The only store: all tables are looked up together."""
        return self._stores[0]

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

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_handle"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._handle = register_module(self)
