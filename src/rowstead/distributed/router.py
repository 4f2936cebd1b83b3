"""The router: cuts a batch by the owners of its rows, and joins what they answer.

Owners are the processes of a synchronous job or the sparse servers of a fleet. On a CPU compiled programs do the work; on a GPU
plain torch does, which is also their reference.

Letters: B examples, F features, nnz ids, W owners.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
        """The features of each owner, in the order in which it answers."""
        owners: list[list[tuple[int, int]]] = [[] for _ in layout.tables]
        """For each table the first rows of its pieces and their owners."""
        split = set()
        for owner, own in enumerate(pieces):
            for piece in own:
                owners[piece.table].append((piece.first_row, owner))
                if is_cut_by_rows(layout, piece):
                    split.add(piece.table)
        self.is_split = np.array([table in split for table in layout.table_of], np.bool_)
        self.split_features = [feature for feature, table in enumerate(layout.table_of) if table in split]
        """Features whose bags are split between the owners of their rows."""
        flat = [sorted(owners[table]) for table in layout.table_of]
        self._shard_offsets = np.cumsum([0] + [len(each) for each in flat], dtype=np.int64)
        self._shard_owners = np.array([owner for each in flat for _, owner in each], np.int64)
        self._shard_first_rows = np.array([first for each in flat for first, _ in each], np.int64)
        self._order = np.array(sorted(range(layout.num_features), key=lambda feature: not self.is_split[feature]), np.int64)
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
            ids, offsets, weights, num_samples, self._order, self.is_split, self._shard_offsets, self._shard_owners, self._shard_first_rows,
            starts[:-1], length_starts[:-1], out, lengths, out_weights,
        )  # fmt: skip
        return [
            (out[first : first + count], lengths[bag : bag + size], out_weights[first : first + count])
            for first, count, bag, size in zip(starts, num_ids, length_starts, sizes, strict=False)
        ]

    def route_by_torch(self, sparse: Sparse) -> list[RoutedBags]:
        """`route` in plain torch, on any device."""
        num_samples = sparse.num_samples
        lengths = sparse.offsets.diff().view(self.layout.num_features, num_samples)
        bounds = sparse.offsets[::num_samples].tolist() if num_samples else [0] * (self.layout.num_features + 1)
        split = self._split_by_torch(sparse, lengths, bounds) if self.split_features else []
        routed = []
        for owner, features in enumerate(self.features):
            num_split = sum(bool(self.is_split[feature]) for feature in features)
            whole = features[num_split:]
            runs = [slice(bounds[first], bounds[last + 1]) for first, last in _runs(whole)]
            ids = [sparse.ids[run] for run in runs]
            weights = [] if sparse.weights is None else [sparse.weights[run] for run in runs]
            counts = [lengths if len(whole) == len(lengths) else lengths[whole]] if whole else []
            if num_split:
                own = split[owner]
                ids, counts = [own.ids, *ids], [own.lengths, *counts]
                weights = weights if own.weights is None else [own.weights, *weights]
            routed.append(
                RoutedBags(
                    ids=_join(ids, sparse.ids).to(self.id_dtype),
                    lengths=_join(counts, lengths),
                    weights=None if sparse.weights is None else _join(weights, sparse.weights),
                )
            )
        return routed

    def _split_by_torch(self, sparse: Sparse, lengths: Tensor, bounds: list[int]) -> list[RoutedBags]:
        """For each owner the bags of `split_features`, with only those ids whose rows it keeps."""
        device, features = sparse.ids.device, self.split_features
        runs = [slice(bounds[first], bounds[last + 1]) for first, last in _runs(features)]
        ids = _join([sparse.ids[run] for run in runs], sparse.ids).long()
        weights = None if sparse.weights is None else _join([sparse.weights[run] for run in runs], sparse.weights)
        lengths = lengths[features]
        # One sorted list of first rows for all features: each has a range of keys of its own.
        key_range = 1 + max(table.num_rows for table in self.layout.tables)
        homes = [home for f in features for home in range(self._shard_offsets[f], self._shard_offsets[f + 1])]
        number_of = {feature: number for number, feature in enumerate(features)}
        feature_of_home = np.repeat(np.arange(self.layout.num_features), np.diff(self._shard_offsets))
        keys = [number_of[int(feature_of_home[home])] * key_range + int(self._shard_first_rows[home]) for home in homes]
        counts = torch.tensor([bounds[feature + 1] - bounds[feature] for feature in features], device=device)
        numbers = torch.repeat_interleave(torch.arange(len(features), device=device), counts)
        home = torch.searchsorted(torch.tensor(keys, device=device), ids + numbers * key_range, right=True) - 1
        owner = torch.from_numpy(self._shard_owners[homes]).to(device)[home]
        rows = ids - torch.from_numpy(self._shard_first_rows[homes]).to(device)[home]
        ends = lengths.flatten().cumsum(0)
        routed = []
        for rank, own in enumerate(self.features):
            is_here = owner == rank
            up_to = torch.cat([ends.new_zeros(1), is_here.cumsum(0)])
            here = up_to[ends].diff(prepend=ends.new_zeros(1)).view(lengths.shape)
            known = [number for number, feature in enumerate(features) if feature in own]  # an owner may keep no row of a table
            routed.append(
                RoutedBags(
                    ids=rows[is_here],
                    lengths=here if len(known) == len(here) else here[known],
                    weights=None if weights is None else weights[is_here],
                )
            )
        return routed


def _runs(features: Sequence[int]) -> list[tuple[int, int]]:
    """First and last of each run of consecutive features."""
    runs: list[tuple[int, int]] = []
    for feature in features:
        if runs and runs[-1][1] == feature - 1:
            runs[-1] = (runs[-1][0], feature)
        else:
            runs.append((feature, feature))
    return runs


def _join(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat(list(tensors)) if tensors else like[:0]
