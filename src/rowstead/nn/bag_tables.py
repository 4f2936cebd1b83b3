"""The tables of `EmbeddingBags` and `Embeddings`, how batches are laid out for them, and pooled vectors by name.

Letters: B examples.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rowstead.data.batch import Sparse
from rowstead.kernels.layout import Layout
from rowstead.spec.errors import DataError, RowsteadError, SpecError, did_you_mean, require
from rowstead.spec.features import Pooling, Table
from rowstead.spec.row_optimizers import LEAN_OPTIMIZER, ROW_OPTIMIZERS, RowOptimizerName, SparseOptimizerSpec

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True)
class EmbeddingTable:
    """One table and the features that read it; the fields have the names of TorchRec's EmbeddingConfig."""

    name: str
    num_embeddings: int
    """Rows."""
    embedding_dim: int
    """Elements per row."""
    feature_names: tuple[str, ...] = ()
    """Features whose ids are rows of this table; one with the table's name when left out."""

    def __post_init__(self) -> None:
        require(bool(self.name) and "." not in self.name, "name", f"must not be empty or have a dot in it, got `{self.name}`")
        require(self.num_embeddings >= 1, "num_embeddings", f"must be at least 1, got {self.num_embeddings}")
        require(self.embedding_dim >= 1, "embedding_dim", f"must be at least 1, got {self.embedding_dim}")
        require(
            not isinstance(self.feature_names, str), "feature_names", f"must be a list of names, got `{self.feature_names}`"
        )
        object.__setattr__(self, "feature_names", tuple(self.feature_names) or (self.name,))
        twice = next((name for name, count in Counter(self.feature_names).items() if count > 1), None)
        require(twice is None, "feature_names", f"`{twice}` is named twice")

    @classmethod
    def like(cls, config: Any) -> Self:
        """The table that one of TorchRec's configurations describes, or anything else with its attributes."""
        if isinstance(config, cls):
            return config
        names = [field.name for field in dataclasses.fields(cls)]
        missing = next((name for name in names if not hasattr(config, name)), None)
        if missing is not None:
            raise RowsteadError(f"a table is {type(config).__name__}, which has no `{missing}`: give a {cls.__name__}")
        values = {name: getattr(config, name) for name in names}
        if "pooling" in values:
            values["pooling"] = _word(values["pooling"])
        try:
            return cls(**values)
        except SpecError as error:
            raise error.within(f"table `{config.name}`") from None


@dataclass(frozen=True, kw_only=True)
class BagTable(EmbeddingTable):
    """A table whose rows are pooled; the fields have the names of TorchRec's EmbeddingBagConfig."""

    pooling: Pooling = "sum"
    """How the rows of one bag are pooled."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.pooling in ("sum", "mean"), "pooling", f"must be sum or mean, got {self.pooling}")


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


def choose_features(given: Sequence[str], wanted: Sequence[str]) -> list[int]:
    """For each feature wanted its index in a batch that has the features `given`."""
    missing = next((name for name in wanted if name not in given), None)
    if missing is not None:
        raise DataError(f"the batch has no feature `{missing}`, which a table reads: {did_you_mean(missing, given)}")
    return [given.index(name) for name in wanted]


def select_features(sparse: Sparse, chosen: Sequence[int]) -> Sparse:
    """The features of a batch at the indices `chosen`, copied."""
    num_given, num_samples = sparse.num_features, sparse.num_samples
    bounds = sparse.offsets[:: max(1, num_samples)].tolist() if num_samples else [0] * (num_given + 1)
    if bounds[0] != 0 or bounds[-1] != sparse.ids.numel() or any(a > b for a, b in pairwise(bounds)):
        raise DataError(f"offsets must rise from 0 to the number of ids, {sparse.ids.numel()}: the features start at {bounds}")

    def gather(values: Tensor) -> Tensor:
        return torch.cat([values[bounds[index] : bounds[index + 1]] for index in chosen])

    lengths = sparse.offsets.diff().view(num_given, num_samples)[list(chosen)].view(-1)
    return Sparse(
        ids=gather(sparse.ids),
        offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        num_features=len(chosen),
        weights=None if sparse.weights is None else gather(sparse.weights),
    )


def layout_of(tables: Sequence[EmbeddingTable]) -> Layout:
    """What kernels need to know of tables whose rows are pooled, by sum where they do not say how; refuses none, and two of one name."""
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
        is_mean=tuple(isinstance(table, BagTable) and table.pooling == "mean" for _, table in readers),
    )


def keys_of(tables: Sequence[EmbeddingTable]) -> list[str]:
    """Names of what is looked up: the feature's, or `feature@table` where several tables read it."""
    readers = Counter(feature for table in tables for feature in table.feature_names)
    return [
        f"{feature}@{table.name}" if readers[feature] > 1 else feature for table in tables for feature in table.feature_names
    ]


def optimizer_of(optimizer: SparseOptimizerSpec | RowOptimizerName | None, lr: float | None) -> SparseOptimizerSpec | None:
    """The optimizer that the arguments of `TableModule` name."""
    if optimizer is None:
        if lr is not None:
            raise RowsteadError(f"lr without an optimizer: name one, such as optimizer='{LEAN_OPTIMIZER}'")
        return None
    if isinstance(optimizer, str):
        require_one_of("optimizer", optimizer, tuple(ROW_OPTIMIZERS))
    spec = SparseOptimizerSpec(kind=optimizer) if isinstance(optimizer, str) else optimizer
    return spec if lr is None else dataclasses.replace(spec, lr=lr)


def require_one_of(name: str, value: object, known: Sequence[object]) -> None:
    """Raise a RowsteadError that lists the known values unless `value` is one of them."""
    if value not in known:
        raise RowsteadError(f"{name}={value!r}: use one of {', '.join(str(one) for one in known)}")


def dtype_of(tables: Sequence[Any]) -> torch.dtype:
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


# torch.export takes and returns only types that it can take apart.


def _register_for_export(
    kind: type, name: str, parts: Callable[[Any], dict[str, Any]], rest: Callable[[Any], Any], build: Any
) -> None:
    """`build` makes an instance of `kind` from the values of its `parts` and from the `rest`, which is plain data."""
    pytree.register_pytree_node(
        kind,
        lambda value: (list(parts(value).values()), rest(value)),
        build,
        serialized_type_name=name,
        flatten_with_keys_fn=lambda value: (
            [(pytree.MappingKey(key), part) for key, part in parts(value).items()],
            rest(value),
        ),
    )


def _build_sparse(parts: Any, num_features: int) -> Sparse:
    ids, offsets, weights = parts
    return Sparse(ids=ids, offsets=offsets, weights=weights, num_features=num_features)


def _build_pooled(parts: Any, names: list[Any]) -> PooledFeatures:
    (values,), (keys, lengths) = parts, names
    return PooledFeatures(keys, lengths, values)


_register_for_export(
    Sparse,
    "rowstead.Sparse",
    lambda sparse: {"ids": sparse.ids, "offsets": sparse.offsets, "weights": sparse.weights},
    lambda sparse: sparse.num_features,
    _build_sparse,
)
_register_for_export(
    PooledFeatures,
    "rowstead.PooledFeatures",
    lambda pooled: {"values": pooled.values()},
    lambda pooled: [pooled.keys(), pooled.length_per_key()],
    _build_pooled,
)
torch.serialization.add_safe_globals([Sparse])  # exported programs keep the example that they were traced with
