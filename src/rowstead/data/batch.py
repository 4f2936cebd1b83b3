"""`Batch`: one mini-batch as every room sees it.

Letters: B examples, F sparse features, Fd dense features, nnz ids in the whole batch.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from rowstead.spec.errors import DataError, RowsteadError


@dataclass(frozen=True, kw_only=True)
class Sparse:
    """The ids of a batch, feature-major: the layout of TorchRec's KeyedJaggedTensor. Empty bags are legal."""

    ids: Tensor
    """Rows of the tables, int64 or int32 [nnz]."""
    offsets: Tensor
    """int64 [F*B + 1]: feature f of example b owns ids[offsets[f*B+b] : offsets[f*B+b+1]]."""
    num_features: int
    """F."""
    weights: Tensor | None = None
    """Per-id weights [nnz], where the log has them."""
    checked_for: object | None = dataclasses.field(default=None, repr=False, compare=False)
    """The kernels' layout that all of this is known to fit, so that nobody need check it again; none before any check."""

    @property
    def num_samples(self) -> int:
        """B."""
        return (self.offsets.numel() - 1) // self.num_features if self.num_features else 0

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Sparse:
        return _moved(self, device, non_blocking)

    def examples(self, start: int, stop: int) -> Sparse:
        """The ids of examples `start` to `stop` alone, copied."""
        begins = self.offsets[:-1].view(self.num_features, -1)
        ends = self.offsets[1:].view(self.num_features, -1)
        lengths = (ends - begins)[:, start:stop].flatten()
        if stop > start:
            pieces = list(zip(begins[:, start].tolist(), ends[:, stop - 1].tolist(), strict=True))
        else:
            pieces = [(0, 0)] * self.num_features
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        ids = torch.cat([self.ids[first:last] for first, last in pieces])
        weights = None if self.weights is None else torch.cat([self.weights[first:last] for first, last in pieces])
        return dataclasses.replace(self, ids=ids, offsets=offsets, weights=weights)


@dataclass(frozen=True, kw_only=True)
class GlobalBatch:
    """What is known of a batch of which every process of a job has a share."""

    num_samples: int
    weight: float
    """Sum of the example weights; the number of examples where there are none."""
    mean_label: float
    """By weight."""

    @classmethod
    def of(cls, labels: Tensor, weights: Tensor | None) -> GlobalBatch:
        """Of all examples' labels [B] and weights [B]."""
        count = labels.numel()
        if weights is None:
            return cls(num_samples=count, weight=float(count), mean_label=float(labels.mean()) if count else 0.0)
        exact = weights.double()
        weight = float(exact.sum())
        return cls(num_samples=count, weight=weight, mean_label=float((labels * exact).sum()) / weight if weight > 0 else 0.0)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Examples ready for a model: transforms applied, ids hashed to rows."""

    dense: Tensor
    """float32 [B, Fd]."""
    sparse: Sparse
    """The ids of all sparse features."""
    labels: Tensor | None = None
    """float32 [B], from 0 to 1; absent when predicting."""
    weights: Tensor | None = None
    """Example weights, float32 [B]."""
    true_p: Tensor | None = None
    """True click probabilities, float32 [B]; only a synthetic log knows them."""
    global_batch: GlobalBatch | None = None
    """The batch that this is one process's share of; none where it is all of it."""

    @property
    def num_samples(self) -> int:
        """B."""
        return int(self.dense.shape[0])

    @property
    def global_facts(self) -> GlobalBatch:
        """What is known of the whole batch."""
        if self.global_batch is not None:
            return self.global_batch
        assert self.labels is not None
        return GlobalBatch.of(self.labels, self.weights)

    def share(self, rank: int, world_size: int) -> Batch:
        """The examples that one of `world_size` processes trains on: those of all ranks, in order, are the batch."""
        if world_size == 1:
            return self
        start, stop = share_bounds(self.num_samples, rank, world_size)
        return Batch(
            dense=self.dense[start:stop],
            sparse=self.sparse.examples(start, stop) if self.sparse.num_features else self.sparse,
            labels=None if self.labels is None else self.labels[start:stop],
            weights=None if self.weights is None else self.weights[start:stop],
            true_p=None if self.true_p is None else self.true_p[start:stop],
            global_batch=None if self.labels is None else self.global_facts,
        )

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        return _moved(self, device, non_blocking)

    def pin_memory(self) -> Batch:
        """The same in page-locked memory, from which a GPU copies by itself."""
        return _each(self, Tensor.pin_memory)

    def tensors(self) -> list[Tensor]:
        """All tensors of the batch."""
        own = [self.dense, self.labels, self.weights, self.true_p]
        sparse = [self.sparse.ids, self.sparse.offsets, self.sparse.weights]
        return [tensor for tensor in own + sparse if tensor is not None]


def share_bounds(num_samples: int, rank: int, world_size: int) -> tuple[int, int]:
    """First and last example of the share that one of `world_size` processes has of a batch."""
    return num_samples * rank // world_size, num_samples * (rank + 1) // world_size


def sparse_from_kjt(features: Any) -> Sparse:
    """The ids of TorchRec's KeyedJaggedTensor, features in the order of its keys.

    Shares its memory; only offsets that are not int64 are copied. TorchRec itself is not imported.
    """
    if hasattr(features, "variable_stride_per_key") and features.variable_stride_per_key():
        raise DataError("the features of this KeyedJaggedTensor have different numbers of examples: give each as many")
    return Sparse(
        ids=features.values(),
        offsets=features.offsets().to(torch.int64),
        num_features=len(features.keys()),
        weights=features.weights_or_none(),
    )


def kjt_from_sparse(sparse: Sparse, keys: Sequence[str]) -> Any:
    """TorchRec's KeyedJaggedTensor over the memory of `sparse`; `keys` names its features. Needs TorchRec."""
    if len(keys) != sparse.num_features:
        raise DataError(f"{len(keys)} keys for {sparse.num_features} features: give one each")
    try:
        torchrec = importlib.import_module("torchrec")
    except ImportError as error:
        raise RowsteadError(f"a KeyedJaggedTensor needs TorchRec, and it cannot be imported here: {error}") from error
    return torchrec.KeyedJaggedTensor(keys=list(keys), values=sparse.ids, offsets=sparse.offsets, weights=sparse.weights)


Movable = TypeVar("Movable", Sparse, Batch)


def _moved(value: Movable, device: torch.device | str, non_blocking: bool) -> Movable:
    return _each(value, lambda tensor: tensor.to(device, non_blocking=non_blocking))


def _each(value: Movable, change: Callable[[Tensor], Tensor]) -> Movable:
    """The same with every tensor changed."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        part = getattr(value, field.name)
        if isinstance(part, Tensor):
            changes[field.name] = change(part)
        elif isinstance(part, Sparse):
            changes[field.name] = _each(part, change)
    return dataclasses.replace(value, **changes)
