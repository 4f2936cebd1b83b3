"""Cuts a batch into requests to the sparse servers, and joins their answers.

Each server gets at most one request per batch. For each table it either pools (it gets ids and lengths of bags, and answers with
pooled vectors) or sends the distinct rows, which the trainer pools. Distinct rows are chosen for a table and a batch where they
take at most three quarters of the bytes of vectors, in both directions, gradients included. An update sends the gradients of the
vectors, or the summed gradients of the distinct rows. `history_router.py` does this for batches with histories.

Letters: B examples, F features, S servers, D width, n ids that go to one server. A slot is the number of a feature on one server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowstead.data.batch import Sparse
from rowstead.distributed import router_kernels as programs
from rowstead.distributed.router import Router
from rowstead.distributed.sharding import features_of, is_cut_by_rows, piece_layout
from rowstead.fleet.partition import Partition
from rowstead.kernels.check import check_gradient
from rowstead.kernels.cpu.thread_team import parallel_for
from rowstead.kernels.layout import Layout
from rowstead.kernels.row_state import compute_dtype

Array = NDArray[Any]

_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}
_NO_SLOTS = np.empty(0, np.int64)


class ServerSlots:
    """The features of one server as slots, in its own order, over its own pieces."""

    def __init__(self, layout: Layout, partition: Partition, server: int) -> None:
        pieces = partition.pieces_of(layout, server)
        self.server = server
        self.layout = piece_layout(layout, pieces)
        """The layout of the server's store."""
        own = features_of(layout, pieces)
        by_table = {piece.table: piece for piece in pieces}
        is_cut = [is_cut_by_rows(layout, by_table[layout.table_of[feature]]) for feature in own]
        self.features = np.array(own, np.int64)
        self.tables = np.array(self.layout.table_of, np.int64)
        self.widths = np.array([stop - start for start, stop in pairwise(self.layout.columns)], np.int64)
        self.targets = np.array([layout.columns[feature] for feature in own], np.int64)
        """First column of each slot in the pooled output."""
        self.is_mean = np.array([layout.is_mean[feature] for feature in own], np.bool_)
        self.is_cut = np.array(is_cut, np.bool_)
        self.table_widths = np.array([table.width for table in self.layout.tables], np.int64)
        self.slots_from = np.cumsum([0] + [len(table.features) for table in self.layout.tables], dtype=np.int64)
        self.slots = np.array([slot for table in self.layout.tables for slot in table.features], np.int64)
        self.every_slot = np.arange(len(own), dtype=np.int64)
        self.is_whole_model = (
            self.layout.columns == layout.columns and not any(is_cut) and own == list(range(layout.num_features))
        )


class ServerRouter(Router):
    """A `Router` to the sparse servers of a partition, which cuts a batch into one request per server.

    With `always_rows` servers send distinct rows and pool nothing, whatever takes fewer bytes.
    """

    def __init__(self, layout: Layout, partition: Partition, dtype: torch.dtype, *, always_rows: bool = False) -> None:
        partition.check(layout.tables)
        super().__init__(layout, [partition.pieces_of(layout, server) for server in range(partition.num_servers)])
        self.dtype = compute_dtype(dtype)
        self.row_dtype = dtype
        self.always_rows = always_rows
        self.servers = [ServerSlots(layout, partition, server) for server in range(partition.num_servers)]
        self.is_joined_mean = self.is_split & np.array(layout.is_mean, np.bool_)
        self.columns = np.array(layout.columns, np.int64)

    def check_gradient(self, sparse: Sparse, grad: Tensor) -> None:
        """Raise a DataError unless `grad` has the shape of what a look-up of the batch returns."""
        check_gradient(self.layout, sparse.offsets, grad)

    def split(self, sparse: Sparse) -> Split:
        """A batch in CPU memory, known to fit the tables, as requests to the servers."""
        num_samples = sparse.num_samples
        ids, offsets = sparse.ids.numpy(), sparse.offsets.numpy()
        weights = np.empty(0, _NUMPY[self.dtype])
        if sparse.weights is not None:
            weights = sparse.weights.detach().to(self.dtype).numpy()
        if len(self.servers) == 1 and self.servers[0].is_whole_model and num_samples:
            used = slice(int(offsets[0]), int(offsets[-1]))  # all ids are rows of that server, in its order
            id_type = np.int32 if self.id_dtype == torch.int32 else np.int64
            cut = [(ids[used].astype(id_type, copy=False), np.diff(offsets).astype(np.int32), weights[used])]
        else:
            cut = self.route_arrays(ids, offsets, weights)
        requests = [
            ServerRequest.of(slots, self, num_samples, *arrays) for slots, arrays in zip(self.servers, cut, strict=True)
        ]
        return Split(router=self, sparse=sparse, requests=requests)


@dataclass(frozen=True, eq=False)
class ServerRequest:
    """What one batch requests from one server."""

    slots: ServerSlots
    num_samples: int
    ids: Array
    """[n], as rows of the server's pieces, by slots."""
    lengths: Array
    """int32 [slots * B]."""
    bounds: Array
    """[slots + 1], where the ids of each slot begin."""
    shares: Array
    """Weights [n], or empty."""
    counts: Array | None
    """[tables]: number of distinct rows, or -1 where the server pools; None where it pools all tables."""
    indices: Array
    """[n]: index of an id's row among the distinct ones, for tables that the server does not pool."""
    pooled: Array
    """Slots that the server pools."""
    own: Array
    """Slots whose distinct rows it sends."""
    sent_ids: Array
    """Ids of the pooled slots, then the distinct rows of each table."""
    sent_lengths: Array
    sent_shares: Array

    @classmethod
    def of(
        cls, slots: ServerSlots, router: ServerRouter, num_samples: int, ids: Array, lengths: Array, shares: Array
    ) -> ServerRequest:
        num_tables = len(slots.table_widths)
        bounds = np.empty(len(slots.features) + 1, np.int64)
        programs.bounds_of(lengths, len(slots.features), num_samples, bounds)
        counts = np.empty(num_tables, np.int64)
        indices, distinct = np.empty(len(ids), np.int32), np.empty(len(ids), ids.dtype)
        used = programs.find_distinct(
            ids, bounds, slots.slots_from, slots.slots, slots.table_widths, num_samples, ids.itemsize,
            router.dtype.itemsize if len(shares) else 0, router.row_dtype.itemsize, router.dtype.itemsize, router.always_rows,
            indices, distinct, counts,
        )  # fmt: skip
        request = (slots, num_samples, ids, lengths, bounds, shares)
        if (counts < 0).all():
            return cls(*request, None, indices, slots.every_slot, _NO_SLOTS, ids, lengths, shares)
        is_pooled = counts[slots.tables] < 0
        pooled, own = np.flatnonzero(is_pooled), np.flatnonzero(~is_pooled)
        num_pooled = int((bounds[pooled + 1] - bounds[pooled]).sum())
        sent_ids = np.empty(num_pooled + used, ids.dtype)
        sent_lengths = np.empty(len(pooled) * num_samples, np.int32)
        sent_shares = np.empty(num_pooled if len(shares) else 0, shares.dtype)
        programs.kept_slots(ids, shares, lengths, bounds, pooled, num_samples, sent_ids, sent_shares, sent_lengths)
        sent_ids[num_pooled:] = distinct[:used]
        return cls(*request, counts, indices, pooled, own, sent_ids, sent_lengths, sent_shares)

    @property
    def is_empty(self) -> bool:
        return not self.num_samples or (not len(self.pooled) and not len(self.sent_ids))

    def message(self) -> tuple[dict[str, Any], list[Tensor]]:
        """The message: facts and tensors, which `fleet/lookup_request.py` reads."""
        facts: dict[str, Any] = {"samples": self.num_samples}
        tensors = [torch.from_numpy(self.sent_ids)]
        if self.counts is not None:
            facts["counts"] = self.counts.tolist()
        if len(self.sent_lengths):
            least, most = int(self.sent_lengths.min()), int(self.sent_lengths.max())
            if least == most:
                facts["length"] = most
            else:
                kind = np.uint8 if most < 2**8 else np.int16 if most < 2**15 else np.int32
                tensors.append(torch.from_numpy(self.sent_lengths.astype(kind, copy=False)))
        if len(self.sent_shares):
            facts["weighted"] = True
            tensors.append(torch.from_numpy(self.sent_shares))
        return facts, tensors

    @cached_property
    def block_columns(self) -> Array:
        """First column of each pooled slot in the server's vectors, and their total width."""
        return np.concatenate([[0], np.cumsum(self.slots.widths[self.pooled])]).astype(np.int64)

    @cached_property
    def row_starts(self) -> Array:
        """For each slot in `own`, where the rows of its table begin in the flat distinct rows."""
        assert self.counts is not None
        sizes = np.maximum(self.counts, 0) * self.slots.table_widths
        return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)[self.slots.tables[self.own]]

    @property
    def num_row_elements(self) -> int:
        return 0 if self.counts is None else int((np.maximum(self.counts, 0) * self.slots.table_widths).sum())


@dataclass(frozen=True, eq=False)
class Split:
    router: ServerRouter
    sparse: Sparse
    requests: list[ServerRequest]
    """One per server."""

    def join(self, answers: Sequence[Sequence[Tensor]]) -> Tensor:
        """The pooled output [B, sum of widths] from each server's vectors and distinct rows."""
        layout, dtype, num_samples = self.router.layout, self.router.dtype, self.sparse.num_samples
        if num_samples and len(self.requests) == 1 and self._is_whole_output(self.requests[0]):
            return answers[0][0]
        whole = torch.empty(num_samples, layout.total_width, dtype=dtype)
        pooled, filled = whole.numpy(), np.zeros(layout.num_features, np.bool_)
        offsets = self.sparse.offsets.numpy()
        divided = self.router.is_joined_mean.copy()
        for request, given in zip(self.requests, answers, strict=True):
            slots, blocks = request.slots, list(given)
            if len(request.pooled) and num_samples:
                features = slots.features[request.pooled]
                _join(request, blocks.pop(0), filled[features], pooled)
                filled[features] = True
            if len(request.own):
                features = slots.features[request.own]
                rows = blocks.pop(0).to(dtype) if request.num_row_elements and num_samples else torch.empty(0, dtype=dtype)
                _pool(request, rows, filled[features], pooled)
                filled[features] = True
                divided[features] |= slots.is_mean[request.own]
        if divided.any():
            features = np.flatnonzero(divided)
            widths = self.router.columns[features + 1] - self.router.columns[features]
            programs.divide_means(offsets, features, self.router.columns[features], widths, num_samples, pooled)
        return whole

    def gradients(self, grad: Tensor, clip: float | None) -> list[list[Tensor]]:
        """For each server the gradients of its vectors and of its distinct rows, from [B, sum of widths]."""
        real = _NUMPY[self.router.dtype]
        grad = grad.detach().contiguous()
        whole, offsets = grad.numpy(), self.sparse.offsets.numpy()
        factors = np.empty(0, real)
        if clip is not None:
            factors = np.empty(self.router.layout.num_features * len(whole), real)
            programs.clip_factors(whole, self.router.columns, clip, factors)
        sent = []
        for request in self.requests:
            tensors: list[Tensor] = []
            if len(request.pooled) and len(whole):
                is_ready = clip is None and self._is_whole_output(request)
                tensors.append(grad if is_ready else _pack_gradients(request, whole, offsets, factors))
            if request.num_row_elements and len(whole):
                tensors.append(_sum_gradients(request, whole, offsets, factors))
            sent.append(tensors)
        return sent

    def _is_whole_output(self, request: ServerRequest) -> bool:
        """Whether the server's vectors are the whole output as they are."""
        return request.counts is None and request.slots.is_whole_model


# The compiled programs, in parallel over slots: each slot has columns of its own.


def _join(request: ServerRequest, vectors: Tensor, filled: Array, pooled: Array) -> None:
    block, columns = vectors.numpy(), request.block_columns[:-1]
    targets, widths = request.slots.targets[request.pooled], request.slots.widths[request.pooled]

    def work(start: int, stop: int) -> None:
        some = slice(start, stop)
        programs.join_vectors(block, columns[some], targets[some], widths[some], filled[some], pooled)

    parallel_for(work, len(widths), num_bytes=block.nbytes)


def _pool(request: ServerRequest, rows: Tensor, filled: Array, pooled: Array) -> None:
    flat, targets, widths = rows.numpy(), request.slots.targets[request.own], request.slots.widths[request.own]

    def work(start: int, stop: int) -> None:
        some = slice(start, stop)
        programs.pool_rows(
            flat, request.row_starts[some], request.own[some], targets[some], widths[some], filled[some], request.bounds, request.lengths,
            request.num_samples, request.indices, request.shares, pooled,
        )  # fmt: skip

    parallel_for(work, len(widths), num_bytes=request.num_samples * int(widths.sum()) * flat.itemsize)


def _pack_gradients(request: ServerRequest, grad: Array, offsets: Array, factors: Array) -> Tensor:
    slots, columns = request.slots, request.block_columns[:-1]
    features, targets, widths = slots.features[request.pooled], slots.targets[request.pooled], slots.widths[request.pooled]
    divides = (slots.is_mean & slots.is_cut)[request.pooled]
    block = np.empty((len(grad), request.block_columns[-1]), grad.dtype)

    def work(start: int, stop: int) -> None:
        some = slice(start, stop)
        programs.pack_gradients(
            grad, offsets, factors, features[some], divides[some], columns[some], targets[some], widths[some], block
        )

    parallel_for(work, len(widths), num_bytes=block.nbytes)
    return torch.from_numpy(block)


def _sum_gradients(request: ServerRequest, grad: Array, offsets: Array, factors: Array) -> Tensor:
    slots, own = request.slots, request.own
    features, tables, is_mean = slots.features[own], slots.tables[own], slots.is_mean[own]
    targets, widths = slots.targets[own], slots.widths[own]
    sums, seen = np.empty(request.num_row_elements, grad.dtype), np.zeros(len(slots.table_widths), np.int64)

    def work(start: int, stop: int) -> None:
        some = slice(start, stop)
        programs.sum_gradients(
            grad, offsets, factors, features[some], is_mean[some], request.row_starts[some], tables[some], own[some], targets[some],
            widths[some], request.bounds, request.lengths, request.indices, request.shares, seen, sums,
        )  # fmt: skip

    has_shared = len(np.unique(tables)) < len(tables)  # then two threads could update the same row
    parallel_for(work, len(widths), num_bytes=0 if has_shared else len(grad) * int(widths.sum()) * grad.itemsize)
    return torch.from_numpy(sums)
