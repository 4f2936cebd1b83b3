"""Cuts a batch with histories into one request per sparse server, and joins their answers.

A history is looked up as bags of one id each (`stores/histories.py`). Each part of a `HistoryLayout` has a router of its own. That of a table
with histories always asks for distinct rows, so that a row that many ids name is sent once, and so is the sum of its gradients. What the
parts ask of one server is joined to one request, in which the bags are those of pooled features. So servers know nothing of histories.

Letters: B examples, T tables of a server, D width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowstead.data.batch import Sparse
from rowstead.fleet.partition import Partition
from rowstead.fleet.router import ServerRequest, ServerRouter, Split
from rowstead.kernels.layout import Layout
from rowstead.spec.errors import DataError
from rowstead.stores.histories import HistoryLayout

Home = tuple[int, int]
"""Where a table of a server is: the part, and its index among the tables that the server has of this part."""


class HistoryRouter:
    """A router to the sparse servers of a partition for a layout with histories."""

    def __init__(self, layout: Layout, partition: Partition, dtype: torch.dtype) -> None:
        partition.check(layout.tables)
        self._layout = HistoryLayout(layout)
        self._routers = [
            ServerRouter(part, partition.of_tables(part.tables), dtype, always_rows=part is not self._layout.pooled)
            for part in self._layout.stores
        ]
        part_of = {table.name: part for part, one in enumerate(self._layout.stores) for table in one.tables}
        self._homes: list[list[Home]] = []
        """For each server those of its tables."""
        for pieces in partition.servers:
            num_tables, homes = Counter[int](), list[Home]()
            for part in (part_of[piece.table] for piece in pieces):
                homes.append((part, num_tables[part]))
                num_tables[part] += 1
            self._homes.append(homes)

    def check_gradient(self, sparse: Sparse, grad: Tensor) -> None:
        """Raise a DataError unless `grad` has the shape of what a look-up of the batch returns."""
        size = sum(count * width for count, width in self._layout.shapes(sparse))
        if grad.shape != (size,):
            raise DataError(f"the gradient is {list(grad.shape)}, and the look-up of this batch returned [{size}]")

    def split(self, sparse: Sparse) -> HistorySplit:
        """A batch in CPU memory, known to fit the tables, as requests to the servers."""
        splits = [router.split(part) for router, part in zip(self._routers, self._layout.split(sparse), strict=True)]
        requests = [
            JoinedRequest.of([split.requests[server] for split in splits], homes, sparse.num_samples, self._layout)
            for server, homes in enumerate(self._homes)
        ]
        return HistorySplit(layout=self._layout, sparse=sparse, splits=splits, requests=requests)


@dataclass(frozen=True, eq=False)
class JoinedRequest:
    """What all parts of one batch request from one server."""

    parts: list[ServerRequest]
    homes: list[Home]
    num_samples: int
    pooled: ServerRequest | None
    """The part without histories, if there is one: of it the server may pool tables."""
    counts: list[int]
    """[T]: number of distinct rows, or -1 where the server pools."""
    sent_ids: NDArray[Any]
    """Ids of the pooled slots, then the distinct rows of each table."""

    @classmethod
    def of(cls, parts: list[ServerRequest], homes: list[Home], num_samples: int, layout: HistoryLayout) -> JoinedRequest:
        of_bags, of_rows, counts = [], [], []
        for request in parts:
            each = np.full(len(request.slots.table_widths), -1) if request.counts is None else request.counts
            num_rows = np.maximum(each, 0)
            first = len(request.sent_ids) - int(num_rows.sum())
            of_bags.append(request.sent_ids[:first])
            of_rows.append(np.split(request.sent_ids[first:], np.cumsum(num_rows)[:-1]))
            counts.append(each)
        return cls(
            parts=parts,
            homes=homes,
            num_samples=num_samples,
            pooled=None if layout.pooled is None else parts[0],
            counts=[int(counts[part][table]) for part, table in homes],
            sent_ids=np.concatenate([*of_bags, *(of_rows[part][table] for part, table in homes)]),
        )

    @property
    def is_empty(self) -> bool:
        return not self.num_samples or (not self._has_vectors and not len(self.sent_ids))

    def message(self) -> tuple[dict[str, Any], list[Tensor]]:
        """The message, as that of a `ServerRequest`."""
        facts, tensors = ({}, []) if self.pooled is None else self.pooled.message()
        facts |= {"samples": self.num_samples, "counts": self.counts}
        return facts, [torch.from_numpy(self.sent_ids), *tensors[1:]]

    def divide(self, answer: Sequence[Tensor]) -> list[list[Tensor]]:
        """The server's vectors and distinct rows as answers to each part."""
        left, answers = list(answer), [list[Tensor]() for _ in self.parts]
        if self._has_vectors:
            answers[0].append(left.pop(0))
        if sum(self._row_sizes):
            blocks = left.pop(0).split(self._row_sizes)
            for part, request in enumerate(self.parts):
                own = [block for home, block in zip(self.homes, blocks, strict=True) if home[0] == part]
                answers[part] += [torch.cat(own)] if request.num_row_elements else []
        return answers

    def join_gradients(self, gradients: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """The gradients of each part's vectors and distinct rows as those of the joined request."""
        joined = [gradients[0][0]] if self._has_vectors else []
        rows = dict[Home, Tensor]()
        for part, request in enumerate(self.parts):
            if request.num_row_elements:
                sizes = [size for home, size in zip(self.homes, self._row_sizes, strict=True) if home[0] == part]
                rows |= {(part, table): block for table, block in enumerate(gradients[part][-1].split(sizes))}
        if rows:
            joined.append(torch.cat([rows[home] for home in self.homes if home in rows]))
        return joined

    @property
    def _has_vectors(self) -> bool:
        return self.pooled is not None and len(self.pooled.pooled) > 0 and self.num_samples > 0

    @property
    def _row_sizes(self) -> list[int]:
        """[T]: numbers in the distinct rows of each table."""
        widths = [int(self.parts[part].slots.table_widths[table]) for part, table in self.homes]
        return [max(count, 0) * width for count, width in zip(self.counts, widths, strict=True)]


@dataclass(frozen=True, eq=False)
class HistorySplit:
    """A batch with histories, split over the servers."""

    layout: HistoryLayout
    sparse: Sparse
    splits: list[Split]
    """One per part."""
    requests: list[JoinedRequest]
    """One per server."""

    def join(self, answers: Sequence[Sequence[Tensor]]) -> Tensor:
        """What a look-up returns, flat, from each server's vectors and distinct rows."""
        divided = [request.divide(answer) for request, answer in zip(self.requests, answers, strict=True)]
        found = [split.join([parts[index] for parts in divided]) for index, split in enumerate(self.splits)]
        return torch.cat([each.flatten() for each in found])

    def gradients(self, grad: Tensor, clip: float | None) -> list[list[Tensor]]:
        """For each server the gradients of its vectors and of its distinct rows, from the flat one."""
        shapes = self.layout.shapes(self.sparse)
        own = [part.view(shape) for part, shape in zip(grad.split([n * d for n, d in shapes]), shapes, strict=True)]
        parts = [split.gradients(part, clip) for split, part in zip(self.splits, own, strict=True)]
        return [request.join_gradients([part[server] for part in parts]) for server, request in enumerate(self.requests)]
