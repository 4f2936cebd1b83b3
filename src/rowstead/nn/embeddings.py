"""`Embeddings`: the rows of ids in order, not pooled, for histories in any PyTorch model.

It replaces TorchRec's EmbeddingCollection: same configuration, same input, same output, same names in `state_dict`. TorchRec is never
imported here; its objects are recognized by their methods.

A look-up that does not pool is a look-up of bags of one id each. The features that read a table are one feature of its store: their ids
follow each other in the batch. Memory follows the ids: nothing is padded.

Letters: B examples, n ids of one feature, D width.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from rowstead.data.batch import Sparse
from rowstead.nn.bag_tables import EmbeddingTable, choose_features, layout_of, select_features
from rowstead.nn.table_module import TableModule
from rowstead.spec.errors import RowsteadError
from rowstead.spec.row_optimizers import RowOptimizerName, SparseOptimizerSpec
from rowstead.spec.run import Kernel
from rowstead.stores.mixed import feature_bounds


class JaggedRows:
    """The rows of one feature's ids, one example after the other, with the interface of TorchRec's JaggedTensor."""

    def __init__(self, values: Tensor, offsets: Tensor) -> None:
        self._values, self._offsets = values, offsets

    def values(self) -> Tensor:
        """The rows of all examples, [n, D]."""
        return self._values

    def offsets(self) -> Tensor:
        """int64 [B + 1]: the rows of example b are `values()[offsets()[b] : offsets()[b + 1]]`."""
        return self._offsets

    def lengths(self) -> Tensor:
        """Ids of each example, [B]."""
        return self._offsets.diff()


class Embeddings(TableModule):
    """Many embedding tables whose rows are looked up one by one, and an optimizer that is fused with the backward pass.

    `tables` are `EmbeddingTable`s or TorchRec's EmbeddingConfigs, of any widths. The other arguments, and how `optimizer` trains the
    tables, are those of `EmbeddingBags`: the gradients of one row are summed over all its ids in the batch, then it is updated.
    """

    _TABLES = "embeddings"

    def __init__(
        self,
        tables: Sequence[Any],
        device: torch.device | str | None = None,
        *,
        dtype: torch.dtype | None = None,
        optimizer: SparseOptimizerSpec | RowOptimizerName | None = None,
        lr: float | None = None,
        seed: int = 1,
        kernel: Kernel = "auto",
        check: bool = True,
    ) -> None:
        for table in tables:
            if hasattr(table, "pooling"):
                raise RowsteadError(
                    f"table `{table.name}` has a `pooling`, but Embeddings keep the rows of ids apart: give an EmbeddingTable, or use "
                    "EmbeddingBags"
                )
        configs = [EmbeddingTable.like(table) for table in tables]
        arguments: dict[str, Any] = {"dtype": dtype, "optimizer": optimizer, "lr": lr, "seed": seed, "kernel": kernel}
        layout, layouts = layout_of(configs), [layout_of([replace(one, feature_names=(one.name,))]) for one in configs]
        super().__init__(tables, configs, layout, layouts, device, check=check, **arguments)
        ends = accumulate((len(table.feature_names) for table in configs), initial=0)
        self._features_of = list(pairwise(ends))
        """For each table its first feature, and the first after it."""

    @torch.compiler.disable(reason="how many rows rowstead.Embeddings return depends on the values of offsets")
    def forward(self, features: Any) -> dict[str, Any]:
        """The rows of every feature by its name: of a Sparse as JaggedRows, of a KeyedJaggedTensor as TorchRec's JaggedTensor.

        The name is `feature@table` where several tables read a feature. Weights of ids are ignored. Ids in the order of
        `self.features`, each feature read by one table, are used without a copy.
        """
        if isinstance(features, torch.fx.Proxy) or torch.compiler.is_compiling():
            raise RowsteadError("Embeddings cannot be traced: how many rows they return depends on the values of offsets")
        if (tables := self._tables())[0].is_meta:
            raise RowsteadError("Embeddings on the meta device have no rows: call `to_empty` and load rows before a look-up")
        sparse, given = self._given(features)
        sparse, chosen = replace(sparse, weights=None), choose_features(given, self._wanted)
        if given != self._wanted:
            sparse = select_features(sparse, chosen)
        sparse = self._checked(sparse, tables)
        bounds = feature_bounds(sparse)
        found, rows = self._look_up(self._parts_of(sparse, bounds), tables), list[Tensor]()
        for of_table, (first, last) in zip(found, self._features_of, strict=True):
            sizes = [stop - start for start, stop in pairwise(bounds[first : last + 1])]
            rows += [of_table] if len(sizes) == 1 else of_table.split(sizes)
        torchrec = sys.modules.get("torchrec.sparse.jagged_tensor")
        if isinstance(features, Sparse) or torchrec is None:
            offsets = _offsets_of_features(sparse)
            return {key: JaggedRows(*of_feature) for key, *of_feature in zip(self._keys, rows, offsets, strict=True)}
        lengths = features.lengths().view(len(given), sparse.num_samples)[chosen]
        named = zip(self._keys, rows, lengths, strict=True)
        return {key: torchrec.JaggedTensor(values=values, lengths=own) for key, values, own in named}

    def embedding_configs(self) -> tuple[EmbeddingTable, ...]:
        return self._configs

    def _parts_of(self, sparse: Sparse, bounds: Sequence[int]) -> list[Sparse]:
        """For each table the ids of all its features, as bags of one id; `bounds` [F + 1] says where those of each feature begin."""
        spans = [(bounds[first], bounds[last]) for first, last in self._features_of]
        offsets = torch.arange(max(stop - start for start, stop in spans) + 1, device=sparse.offsets.device)
        return [
            Sparse(ids=sparse.ids[start:stop], offsets=offsets[: stop - start + 1], num_features=1, checked_for=store.layout)
            for store, (start, stop) in zip(self._stores, spans, strict=True)
        ]

    def __prepare_scriptable__(self) -> nn.Module:
        raise RowsteadError("torch.jit.script cannot compile Embeddings: script the modules above them")


def _offsets_of_features(sparse: Sparse) -> tuple[Tensor, ...]:
    """Where each example's ids of a feature begin among the feature's, F times [B + 1]."""
    count = sparse.num_samples
    if not count:
        return sparse.offsets.new_zeros(sparse.num_features, 1).unbind()
    own = sparse.offsets.unfold(0, count + 1, count)
    return (own - own[:, :1]).unbind()
