"""`Batch`: one mini-batch, as every package sees it.

Letters: B examples, F sparse features, Fd dense features, nnz ids in the whole batch.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from rowstead.kernels.check import check_sparse
from rowstead.kernels.layout import Layout
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
    """The kernels' layout that these ids were checked against, so that they are not checked again; None before any check."""

    @property
    def num_samples(self) -> int:
        """B."""
        return (self.offsets.numel() - 1) // self.num_features if self.num_features else 0

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Sparse:
        return _move(self, device, non_blocking)

    def examples(self, start: int, stop: int) -> Sparse:
        """A copy of the ids of examples `start` to `stop`."""
        begins = self.offsets[:-1].view(self.num_features, -1)
        ends = self.offsets[1:].view(self.num_features, -1)
        lengths = (ends[:, start:stop] - begins[:, start:stop]).flatten()
        if stop > start:
            pieces = list(zip(begins[:, start].tolist(), ends[:, stop - 1].tolist(), strict=True))
        else:
            pieces = [(0, 0)] * self.num_features
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        ids = torch.cat([self.ids[first:last] for first, last in pieces])
        weights = None if self.weights is None else torch.cat([self.weights[first:last] for first, last in pieces])
        return dataclasses.replace(self, ids=ids, offsets=offsets, weights=weights)


def check_batch(sparse: Sparse, layout: Layout, device: torch.device | None = None) -> Sparse:
    """The same batch, marked as one that fits `layout`; raises a DataError that names what does not fit.

    A batch that has the mark is not read again, also after it was moved to another device. `device` is where the rows are.
    """
    if sparse.checked_for is layout and (device is None or sparse.ids.device == device):
        return sparse
    check_sparse(layout, sparse.ids, sparse.offsets, sparse.weights, num_features=sparse.num_features, device=device)
    return dataclasses.replace(sparse, checked_for=layout)


@dataclass(frozen=True, kw_only=True)
class BatchTotals:
    """Totals over the examples of a batch."""

    num_samples: int
    weight: float
    """Sum of the example weights; the number of examples where there are none."""
    mean_label: float
    """Weighted mean; 0 where examples have several labels."""
    task_weights: tuple[float, ...] = ()
    """Where examples have several labels, for each the sum of the weights of the examples that have it."""

    @classmethod
    def of(cls, labels: Tensor, weights: Tensor | None) -> BatchTotals:
        """Totals from the examples' labels, [B] or [B, T], and weights [B]."""
        count = len(labels)
        if labels.dim() == 2:
            own = torch.ones(count, dtype=torch.float64) if weights is None else weights.double()
            of_tasks = torch.where(labels.isnan(), 0, own.to(labels.device).unsqueeze(1)).sum(dim=0)
            return cls(num_samples=count, weight=float(own.sum()), mean_label=0.0, task_weights=tuple(of_tasks.tolist()))
        if weights is None:
            return cls(num_samples=count, weight=float(count), mean_label=float(labels.mean()) if count else 0.0)
        exact = weights.double()
        weight = float(exact.sum())
        return cls(num_samples=count, weight=weight, mean_label=float((labels * exact).sum()) / weight if weight > 0 else 0.0)


class StagedBatch(Protocol):
    """A batch in host memory that is about to be moved to a device, in whichever layout. A `Batch` is one."""

    @property
    def num_samples(self) -> int: ...

    @property
    def totals(self) -> BatchTotals: ...

    @property
    def sparse(self) -> Sparse:
        """The ids in the layout of a `Batch`, in host memory; it may have to be computed."""

    def first_sparse(self, num_samples: int) -> Sparse:
        """Those of the first examples alone, which is cheap."""

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """The batch on `device`. With `non_blocking` the copy of pinned memory is queued on the current stream."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Examples ready for a model: transforms applied, ids hashed to table rows.

    In a job of several processes each process has a local share of a global batch.
    """

    dense: Tensor
    """float32 [B, Fd]."""
    sparse: Sparse
    """The ids of all sparse features."""
    labels: Tensor | None = None
    """float32 [B], from 0 to 1, or of a model with tasks [B, T], NaN where one is missing; absent when predicting."""
    weights: Tensor | None = None
    """Example weights, float32 [B]."""
    true_p: Tensor | None = None
    """True probabilities of the labels, float32 [B] or [B, T]; only a synthetic log knows them."""
    groups: Tensor | None = None
    """Values of the log's `group_columns`, such as user and country, int64 [B, G]; only for evaluation, and only in the global batch on the CPU."""
    global_totals: BatchTotals | None = None
    """Totals of the global batch where this is a local share of one; None where this batch is the global batch."""

    @property
    def num_samples(self) -> int:
        """B."""
        return int(self.dense.shape[0])

    @property
    def totals(self) -> BatchTotals:
        """Totals of the global batch; needs labels."""
        if self.global_totals is not None:
            return self.global_totals
        assert self.labels is not None
        return BatchTotals.of(self.labels, self.weights)

    def first_sparse(self, num_samples: int) -> Sparse:
        return self.sparse.examples(0, min(num_samples, self.num_samples)) if self.sparse.num_features else self.sparse

    def local_share(self, rank: int, world_size: int) -> Batch:
        """The examples that process `rank` trains on. The shares of all ranks, concatenated in order, are the batch."""
        if world_size == 1:
            return self
        start, stop = share_bounds(self.num_samples, rank, world_size)
        return Batch(
            dense=self.dense[start:stop],
            sparse=self.sparse.examples(start, stop) if self.sparse.num_features else self.sparse,
            labels=None if self.labels is None else self.labels[start:stop],
            weights=None if self.weights is None else self.weights[start:stop],
            true_p=None if self.true_p is None else self.true_p[start:stop],
            global_totals=None if self.labels is None else self.totals,
        )

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        return _move(self, device, non_blocking)

    def pin_memory(self) -> Batch:
        """A copy in pinned memory, which a GPU copies from asynchronously."""
        return _map_tensors(self, Tensor.pin_memory)

    def tensors(self) -> list[Tensor]:
        """All tensors of the batch."""
        own = [self.dense, self.labels, self.weights, self.true_p]
        sparse = [self.sparse.ids, self.sparse.offsets, self.sparse.weights]
        return [tensor for tensor in own + sparse if tensor is not None]


def share_bounds(num_samples: int, rank: int, world_size: int) -> tuple[int, int]:
    """First example of one rank's share of a batch, and the first after it."""
    return num_samples * rank // world_size, num_samples * (rank + 1) // world_size


def sparse_from_kjt(features: Any) -> Sparse:
    """The ids of a TorchRec KeyedJaggedTensor, features in the order of its keys.

    The tensors share memory; only offsets that are not int64 are copied. TorchRec is not imported.
    """
    if hasattr(features, "variable_stride_per_key") and features.variable_stride_per_key():
        raise DataError("the features of this KeyedJaggedTensor differ in batch size; give all features the same batch size")
    return Sparse(
        ids=features.values(),
        offsets=features.offsets().to(torch.int64),
        num_features=len(features.keys()),
        weights=features.weights_or_none(),
    )


def kjt_from_sparse(sparse: Sparse, keys: Sequence[str]) -> Any:
    """A TorchRec KeyedJaggedTensor that shares the memory of `sparse`; `keys` names its features. Needs TorchRec."""
    if len(keys) != sparse.num_features:
        raise DataError(f"got {len(keys)} keys for {sparse.num_features} features; give one key per feature")
    try:
        torchrec = importlib.import_module("torchrec")
    except ImportError as error:
        raise RowsteadError(f"KeyedJaggedTensor needs TorchRec, which cannot be imported: {error}") from error
    return torchrec.KeyedJaggedTensor(keys=list(keys), values=sparse.ids, offsets=sparse.offsets, weights=sparse.weights)


Movable = TypeVar("Movable", Sparse, Batch)


def _move(value: Movable, device: torch.device | str, non_blocking: bool) -> Movable:
    return _map_tensors(value, lambda tensor: tensor.to(device, non_blocking=non_blocking))


def _map_tensors(value: Movable, change: Callable[[Tensor], Tensor]) -> Movable:
    """A copy with `change` applied to every tensor."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        part = getattr(value, field.name)
        if isinstance(part, Tensor):
            changes[field.name] = change(part)
        elif isinstance(part, Sparse):
            changes[field.name] = _map_tensors(part, change)
    return dataclasses.replace(value, **changes)
