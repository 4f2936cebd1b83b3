"""The router: cuts a batch by the owners of its rows, and joins what they answer.

Owners are the processes of a synchronous job or the sparse servers of a fleet. On a CPU compiled programs do the work; on a GPU
plain torch does, which is also their reference.

Letters: B examples, F features, nnz ids, W owners.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowstead.data.batch import Sparse
from rowstead.distributed import router_kernels as programs
from rowstead.distributed.sharding import ShardPiece, features_of, is_cut_by_rows
from rowstead.kernels.layout import Layout

Array = NDArray[Any]


@dataclass(frozen=True)
class RoutedBags:
    """The bags of a batch that one owner is asked for."""

    ids: Tensor
    """[nnz], as rows of the owner's pieces, in the order of its features."""
    lengths: Tensor
    """[F, B]: ids of each bag; all zero where the owner keeps none of a bag's rows."""
    weights: Tensor | None
    """[nnz]."""


class Router:
    """Which ids go to which owner.

    `pieces` are those of each owner. The features of a table that is cut by rows have their bags split between its owners; those
    of a table that is cut by columns go to every owner as they are.
    """

    def __init__(self, layout: Layout, pieces: Sequence[Sequence[ShardPiece]]) -> None:
        self.layout = layout
        self.features = [features_of(layout, own) for own in pieces]
        """The features of each owner, in the order of the batch."""
        owners: list[list[tuple[int, int]]] = [[] for _ in layout.tables]
        """For each table the first rows of its pieces and their owners."""
        split = set()
        for owner, own in enumerate(pieces):
            for piece in own:
                owners[piece.table].append((piece.first_row, owner))
                if is_cut_by_rows(layout, piece):
                    split.add(piece.table)
        self.is_split = np.array([table in split for table in layout.table_of], np.bool_)
        """For each feature, whether its bags are split between the owners of their rows."""
        flat = [sorted(owners[table]) for table in layout.table_of]
        self._shard_offsets = np.cumsum([0] + [len(each) for each in flat], dtype=np.int64)
        self._shard_owners = np.array([owner for each in flat for _, owner in each], np.int64)
        self._shard_first_rows = np.array([first for each in flat for first, _ in each], np.int64)
        self._reads = np.zeros((len(pieces), layout.num_features), np.int64)
        for owner, features in enumerate(self.features):
            self._reads[owner, features] = 1
        largest = max((piece.num_rows for own in pieces for piece in own), default=1)
        self.id_dtype = torch.int32 if largest <= 2**31 else torch.int64
        """Of ids that leave."""

    def route(self, sparse: Sparse) -> list[RoutedBags]:
        """The bags of a batch for each owner."""
        if sparse.ids.device.type != "cpu":
            return self.route_by_torch(sparse)
        weights = np.empty(0, np.float32) if sparse.weights is None else sparse.weights.detach().numpy()
        return [
            RoutedBags(
                ids=torch.from_numpy(ids),
                lengths=torch.from_numpy(lengths).view(len(features), sparse.num_samples),
                weights=None if sparse.weights is None else torch.from_numpy(own),
            )
            for features, (ids, lengths, own) in zip(
                self.features, self.route_arrays(sparse.ids.numpy(), sparse.offsets.numpy(), weights), strict=True
            )
        ]

    def route_arrays(self, ids: Array, offsets: Array, weights: Array) -> list[tuple[Array, Array, Array]]:
        """The ids [nnz], lengths int32 [F * B] and weights [nnz] (which may be empty) for each owner, by one compiled call."""
        num_samples = (len(offsets) - 1) // self.layout.num_features if self.layout.num_features else 0
        counts = np.diff(offsets[::num_samples]) if num_samples else np.zeros(self.layout.num_features, np.int64)
        starts = np.concatenate([[0], np.cumsum(self._reads @ counts)]).astype(np.int64)
        sizes = [len(features) * num_samples for features in self.features]
        length_starts = np.cumsum([0, *sizes], dtype=np.int64)
        out = np.empty(starts[-1], np.int32 if self.id_dtype == torch.int32 else np.int64)
        lengths, out_weights = np.empty(length_starts[-1], np.int32), np.empty(starts[-1] if len(weights) else 0, weights.dtype)
        num_ids = programs.cut_batch(
            ids, offsets, weights, num_samples, self.is_split, self._shard_offsets, self._shard_owners, self._shard_first_rows,
            starts[:-1], length_starts[:-1], out, lengths, out_weights,
        )  # fmt: skip
        return [
            (out[first : first + count], lengths[bag : bag + size], out_weights[first : first + count])
            for first, count, bag, size in zip(starts, num_ids, length_starts, sizes, strict=False)
        ]

    def route_by_torch(self, sparse: Sparse) -> list[RoutedBags]:
        """`route` in plain torch, on any device."""
        device, num_features = sparse.ids.device, self.layout.num_features
        start, stop = sparse.offsets[[0, -1]].tolist()
        ids = sparse.ids[start:stop].long()
        weights = None if sparse.weights is None else sparse.weights[start:stop]
        lengths = sparse.offsets.diff().view(num_features, sparse.num_samples)
        feature = torch.repeat_interleave(
            torch.arange(num_features, device=device), lengths.sum(dim=1), output_size=stop - start
        )
        keys, first_rows, takes = (tensor.to(device) for tensor in self._homes)
        home = torch.searchsorted(keys, ids + feature * self._key_range, right=True) - 1
        rows = (ids - first_rows[home]).to(self.id_dtype)
        ends = lengths.flatten().cumsum(0)
        routed = []
        for own, is_taken in zip(self.features, takes, strict=True):
            is_here = is_taken[home]
            up_to = torch.cat([ends.new_zeros(1), is_here.cumsum(0)])
            here = up_to[ends].diff(prepend=ends.new_zeros(1)).view(lengths.shape)
            routed.append(RoutedBags(rows[is_here], here[own], None if weights is None else weights[is_here]))
        return routed

    @property
    def _key_range(self) -> int:
        return 1 + max(table.num_rows for table in self.layout.tables)

    @cached_property
    def _homes(self) -> tuple[Tensor, Tensor, Tensor]:
        """Homes of rows by feature and first row: a rising key, the first row, and for each owner whether it takes the ids [W, homes].

        A feature that nobody keeps has a home as well, whose ids nobody takes.
        """
        features = np.repeat(np.arange(self.layout.num_features), np.diff(self._shard_offsets))
        nowhere = np.flatnonzero(np.diff(self._shard_offsets) == 0)
        features = np.concatenate([features, nowhere])
        first_rows = np.concatenate([self._shard_first_rows, np.zeros_like(nowhere)])
        owners = np.concatenate([self._shard_owners, np.full_like(nowhere, -1)])
        takes = np.where(self.is_split[features], owners == np.arange(len(self.features))[:, None], self._reads[:, features])
        keys = features * self._key_range + first_rows
        order = np.argsort(keys, kind="stable")
        return torch.from_numpy(keys[order]), torch.from_numpy(first_rows[order]), torch.from_numpy(takes[:, order] != 0)
