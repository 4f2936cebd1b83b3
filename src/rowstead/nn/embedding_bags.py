"""`EmbeddingBags`: rowstead's tables and kernels as a module for any PyTorch model.

It replaces TorchRec's EmbeddingBagCollection: same configuration, same input, same output, same names in
`state_dict`. TorchRec is never imported here; its objects are recognized by their methods.

Letters: B examples, nnz ids in the batch.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rowstead.data.batch import Sparse, sparse_from_kjt
from rowstead.kernels import reference
from rowstead.kernels.layout import Layout
from rowstead.kernels.row_state import new_row_state
from rowstead.spec.errors import CheckpointError, DataError, RowsteadError, SpecError, did_you_mean, require
from rowstead.spec.features import Pooling, Table
from rowstead.spec.row_optimizers import LEAN_OPTIMIZER, ROW_OPTIMIZERS, RowOptimizerName, SparseOptimizerSpec
from rowstead.spec.run import Kernel
from rowstead.stores.device import DeviceStore


@dataclass(frozen=True, kw_only=True)
class BagTable:
    """One table and the features that read it; the fields have the names of TorchRec's EmbeddingBagConfig."""

    name: str
    num_embeddings: int
    """Rows."""
    embedding_dim: int
    """Elements per row."""
    feature_names: tuple[str, ...] = ()
    """Features whose ids are rows of this table; one with the table's name when left out."""
    pooling: Pooling = "sum"
    """How the rows of one bag are pooled."""

    def __post_init__(self) -> None:
        require(bool(self.name) and "." not in self.name, "name", f"must not be empty or have a dot in it, got `{self.name}`")
        require(self.num_embeddings >= 1, "num_embeddings", f"must be at least 1, got {self.num_embeddings}")
        require(self.embedding_dim >= 1, "embedding_dim", f"must be at least 1, got {self.embedding_dim}")
        require(self.pooling in ("sum", "mean"), "pooling", f"must be sum or mean, got {self.pooling}")
        require(
            not isinstance(self.feature_names, str), "feature_names", f"must be a list of names, got `{self.feature_names}`"
        )
        object.__setattr__(self, "feature_names", tuple(self.feature_names) or (self.name,))
        twice = next((name for name, count in Counter(self.feature_names).items() if count > 1), None)
        require(twice is None, "feature_names", f"`{twice}` is named twice")

    @classmethod
    def like(cls, config: Any) -> BagTable:
        """The table that an EmbeddingBagConfig describes, or anything else with its attributes."""
        if isinstance(config, cls):
            return config
        try:
            return cls(
                name=config.name,
                num_embeddings=config.num_embeddings,
                embedding_dim=config.embedding_dim,
                feature_names=tuple(config.feature_names),
                pooling=_word(config.pooling),  # type: ignore[arg-type]
            )
        except SpecError as error:
            raise error.within(f"table `{config.name}`") from None


class PooledFeatures:
    """Pooled vectors by feature, with the interface of TorchRec's KeyedTensor."""

    def __init__(self, keys: Sequence[str], length_per_key: Sequence[int], values: Tensor) -> None:
        self._keys, self._lengths, self._values = list(keys), list(length_per_key), values

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        """All vectors concatenated, [B, sum of widths]."""
        return self._values

    def length_per_key(self) -> list[int]:
        """Width of each feature's vector."""
        return self._lengths

    def offset_per_key(self) -> list[int]:
        """First column of each feature's vector in `values`, and the total width last."""
        return [0, *accumulate(self._lengths)]

    def __getitem__(self, key: str) -> Tensor:
        """The vectors of one feature, [B, width]."""
        if key not in self._keys:
            raise KeyError(f"no feature `{key}`: {did_you_mean(key, self._keys)}")
        return self.to_dict()[key]

    def to_dict(self) -> dict[str, Tensor]:
        """Each feature's vectors, [B, width]."""
        return dict(zip(self._keys, self._values.split(self._lengths, dim=1), strict=True))


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
        _require_one_of("kernel", kernel, get_args(Kernel))
        _require_one_of("dtype", dtype, (None, torch.float32, torch.bfloat16, torch.float16, torch.float64))
        self._configs = tuple(BagTable.like(table) for table in tables)
        self._is_weighted = is_weighted
        layout = _layout_of(self._configs)
        self._wanted = [feature for table in self._configs for feature in table.feature_names]
        """The feature of each pooled vector; a feature that several tables read occurs several times."""
        self.features = tuple(dict.fromkeys(self._wanted))
        """The features, in the order in which a Sparse must have them."""
        self._keys = _keys_of(self._configs)
        self._lengths = [table.embedding_dim for table in self._configs for _ in table.feature_names]
        self._lr, self._num_updates = 0.0, 0
        spec = _optimizer_of(optimizer, lr)
        if spec is not None:
            self.lr = spec.lr
        rows_dtype = dtype or _dtype_of(tables)
        store = DeviceStore(layout, spec, seed=seed, kernel=kernel, device=device or "cpu", dtype=rows_dtype, check=check)
        # Not a submodule, or its tables would have two names in `state_dict`.
        self.__dict__["_store"] = store
        self.embedding_bags = nn.ModuleDict(
            {table.name: _Rows(rows) for table, rows in zip(self._configs, store.weights, strict=True)}
        )
        self.requires_grad_(spec is None)
        for config, rows in zip(tables, store.weights, strict=True):
            if callable(initialise := getattr(config, "init_fn", None)):  # of TorchRec's configurations
                with torch.no_grad():
                    initialise(rows)
        self.register_load_state_dict_post_hook(_tie_again)

    @torch.compiler.disable  # the kernels are compiled already; the model around them still is
    def forward(self, features: Any) -> Any:
        """Pooled vectors of every feature: of a Sparse as PooledFeatures, of a KeyedJaggedTensor as TorchRec's KeyedTensor.

        Ids in the order of `self.features`, each feature read by one table, are used without a copy. Where features are in
        another order, too many, or read by several tables, ids and offsets are copied first.
        """
        pooled = self._pooled(self._ordered(features))
        if not isinstance(features, Sparse) and (torchrec := sys.modules.get("torchrec.sparse.jagged_tensor")) is not None:
            return torchrec.KeyedTensor(keys=self._keys, length_per_key=self._lengths, values=pooled)
        return PooledFeatures(self._keys, self._lengths, pooled)

    @property
    def optimizer(self) -> SparseOptimizerSpec | None:
        """The optimizer that is fused with the backward pass."""
        return self._store.optimizer

    @property
    def lr(self) -> float:
        """The fused optimizer's learning rate; may be set between steps."""
        return self._lr

    @lr.setter
    def lr(self, lr: float) -> None:
        if not 0 <= lr < math.inf:
            raise ValueError(f"lr must be at least 0 and finite, got {lr}")
        self._lr = float(lr)

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
        return {**state, "num_updates": torch.tensor(self._num_updates)}

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Load what `optimizer_state` returned, so that training continues bit for bit."""
        if "num_updates" not in state:
            raise CheckpointError("no `num_updates`: this is not the result of `optimizer_state`")
        rows = {name: value for name, value in self._store.state().items() if name.endswith(".rows")}
        self._store.load_state({**state, **rows})
        self._num_updates = int(state["num_updates"])

    def extra_repr(self) -> str:
        return f"{len(self._configs)} tables, {len(self.features)} features, optimizer={self.optimizer}"

    def _pooled(self, sparse: Sparse) -> Tensor:
        """[B, sum of widths]."""
        store, weights = self._store, sparse.weights
        sparse = store.check_batch(sparse)
        if store.optimizer is not None and weights is not None:
            sparse = dataclasses.replace(sparse, weights=weights.detach())
        if store.optimizer is not None and torch.is_grad_enabled():
            # Autograd calls backward only if some input requires gradients.
            pooled: Tensor = _Fused.apply(torch.empty(0, requires_grad=True), weights, self, sparse)
            return pooled
        return store.lookup(sparse)

    def _update(self, sparse: Sparse, grad: Tensor) -> None:
        self._num_updates += 1
        if sparse.ids.numel():
            self._store.update(sparse, grad, lr=self._lr, step=self._num_updates)

    def _ordered(self, features: Any) -> Sparse:
        """The batch with features in the order of the tables."""
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
        return sparse if given == self._wanted else _selected(sparse, given, self._wanted)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EmbeddingBags:
        super()._apply(fn, recurse)
        self._tie()
        return self

    def _tie(self) -> None:
        """Give the store the tables that this module has now, and move the optimizer's state to their device and dtype."""
        store = self._store
        for index, table in enumerate(self._configs):
            rows = self.embedding_bags[table.name].weight
            assert isinstance(rows, nn.Parameter)
            store.weights[index] = rows
            if store.optimizer is not None:
                like = new_row_state(store.optimizer.kind, rows.detach()[:1])
                store.row_states[index] = {name: value.to(like[name]) for name, value in store.row_states[index].items()}


def _tie_again(bags: EmbeddingBags, _: object) -> None:
    """After `load_state_dict`, which replaces tables under `assign=True`. No lambda: modules are pickled."""
    bags._tie()


class _Rows(nn.Module):
    """One table, under its name in TorchRec."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


class _Fused(torch.autograd.Function):
    """A look-up whose backward pass is the optimizer's update of the rows that it read."""

    @staticmethod
    def forward(ctx: Any, tape: Tensor, weights: Tensor | None, bags: EmbeddingBags, sparse: Sparse) -> Tensor:
        ctx.bags, ctx.sparse = bags, sparse
        ctx.save_for_backward(sparse.ids, sparse.offsets, weights)
        return bags._store.lookup(sparse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Reading them fails if they were changed since, or if this backward pass ran before.
        _, _, weights = ctx.saved_tensors
        of_weights = None
        if ctx.needs_input_grad[1]:  # with the rows as they were read: before the update
            of_weights = _gradient_of_weights(ctx.bags._store, ctx.sparse, weights, grad)
        ctx.bags._update(ctx.sparse, grad)
        return None, of_weights, None, None


def _gradient_of_weights(store: DeviceStore, sparse: Sparse, weights: Tensor, grad: Tensor) -> Tensor:
    """The gradient of each id's weight [nnz]."""
    rows = [table.detach() for table in store.weights]
    with torch.enable_grad():
        leaf = weights.detach().requires_grad_()
        pooled = reference.lookup(rows, store.layout, sparse.ids, sparse.offsets, leaf)
        return torch.autograd.grad(pooled, leaf, grad)[0]


def _selected(sparse: Sparse, given: list[str], wanted: list[str]) -> Sparse:
    """The features `wanted` of a batch that has the features `given`, copied."""
    missing = next((name for name in wanted if name not in given), None)
    if missing is not None:
        raise DataError(f"the batch has no feature `{missing}`, which a table reads: {did_you_mean(missing, given)}")
    num_samples = sparse.num_samples
    bounds = sparse.offsets[:: max(1, num_samples)].tolist() if num_samples else [0] * (len(given) + 1)
    if bounds[0] != 0 or bounds[-1] != sparse.ids.numel() or any(a > b for a, b in pairwise(bounds)):
        raise DataError(f"offsets must rise from 0 to the number of ids, {sparse.ids.numel()}: the features start at {bounds}")
    chosen = [given.index(name) for name in wanted]

    def gather(values: Tensor) -> Tensor:
        return torch.cat([values[bounds[index] : bounds[index + 1]] for index in chosen])

    lengths = sparse.offsets.diff().view(len(given), num_samples)[chosen].view(-1)
    return Sparse(
        ids=gather(sparse.ids),
        offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        num_features=len(wanted),
        weights=None if sparse.weights is None else gather(sparse.weights),
    )


def _layout_of(tables: tuple[BagTable, ...]) -> Layout:
    require(bool(tables), "tables", "give at least one")
    twice = next((name for name, count in Counter(table.name for table in tables).items() if count > 1), None)
    require(twice is None, "tables", f"`{twice}` is named twice")
    starts = [0, *accumulate(len(table.feature_names) for table in tables)]
    readers = [(index, table) for index, table in enumerate(tables) for _ in table.feature_names]
    return Layout(
        tables=tuple(
            Table(
                name=table.name,
                num_rows=table.num_embeddings,
                width=table.embedding_dim,
                features=tuple(range(start, start + len(table.feature_names))),
            )
            for table, start in zip(tables, starts, strict=False)
        ),
        table_of=tuple(index for index, _ in readers),
        columns=(0, *accumulate(table.embedding_dim for _, table in readers)),
        is_mean=tuple(table.pooling == "mean" for _, table in readers),
    )


def _keys_of(tables: tuple[BagTable, ...]) -> list[str]:
    """Names of the pooled vectors: the feature's, or `feature@table` where several tables read it."""
    readers = Counter(feature for table in tables for feature in table.feature_names)
    return [
        f"{feature}@{table.name}" if readers[feature] > 1 else feature for table in tables for feature in table.feature_names
    ]


def _optimizer_of(optimizer: SparseOptimizerSpec | RowOptimizerName | None, lr: float | None) -> SparseOptimizerSpec | None:
    if optimizer is None:
        if lr is not None:
            raise RowsteadError(f"lr without an optimizer: name one, such as optimizer='{LEAN_OPTIMIZER}'")
        return None
    if isinstance(optimizer, str):
        _require_one_of("optimizer", optimizer, tuple(ROW_OPTIMIZERS))
    spec = SparseOptimizerSpec(kind=optimizer) if isinstance(optimizer, str) else optimizer
    return spec if lr is None else dataclasses.replace(spec, lr=lr)


def _require_one_of(name: str, value: object, known: Sequence[object]) -> None:
    if value not in known:
        raise RowsteadError(f"{name}={value!r}: use one of {', '.join(str(one) for one in known)}")


def _dtype_of(tables: Sequence[Any]) -> torch.dtype:
    """The dtype of rows in TorchRec's configurations; float32 for those without one."""
    known = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    asked = {_word(getattr(table, "data_type", "fp32")) for table in tables}
    if len(asked) != 1 or not asked <= set(known):
        raise RowsteadError(
            f"tables of data types {', '.join(sorted(asked))}: all must have the same one of {', '.join(known)}"
        )
    return known[asked.pop()]


def _word(value: Any) -> str:
    """A setting, given as one of TorchRec's enums or as text, in lower case."""
    return str(getattr(value, "value", value)).lower()
