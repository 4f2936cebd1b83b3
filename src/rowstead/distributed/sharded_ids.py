"""Ids on their way to the processes that keep their rows.

A batch is cut for each process into the bags that concern its pieces. Their ids, as int32 where its tables allow, their weights
and their lengths, in as many bytes as the longest needs, go to it as one message; a few numbers sent ahead say how long it is.

Letters: B examples of this process, F features, nnz ids, W processes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rowstead.data.batch import Sparse
from rowstead.distributed.process_group import ProcessGroup, Work
from rowstead.distributed.sharding import ShardPiece, features_of, is_cut_by_rows, rows_each
from rowstead.kernels.layout import Layout
from rowstead.spec.errors import LostProcessError

_LENGTHS = (None, torch.uint8, torch.int16, torch.int32)
"""Types of lengths by their code; 0 where all bags are of one length, which is told ahead."""
_WEIGHTS = (None, torch.float32, torch.float64)
_HEADER = 5
"""Numbers that are told ahead: examples, ids, code and value of lengths, code of weights."""


@dataclass(frozen=True)
class TablePart:
    """The bags of one process that concern one other."""

    ids: Tensor
    """[nnz], as rows of the pieces."""
    lengths: Tensor
    """int64 [F, B]."""
    weights: Tensor | None
    """[nnz]."""


class IdRouter:
    """Which bags go to which process."""

    def __init__(self, layout: Layout, pieces: Sequence[Sequence[ShardPiece]]) -> None:
        self.layout = layout
        self.features = [features_of(layout, own) for own in pieces]
        """Of each process, in the order in which it answers."""
        self.id_types = [_id_type(own) for own in pieces]
        world_size = len(pieces)
        cut = {piece.table for own in pieces for piece in own if is_cut_by_rows(layout, piece)}
        self.by_rows = [feature for feature, table in enumerate(layout.table_of) if table in cut]
        """Features whose bags are split among the owners of their rows."""
        self._rows_each = [rows_each(layout.tables[layout.table_of[feature]].num_rows, world_size) for feature in self.by_rows]

    def cut(self, sparse: Sparse) -> list[TablePart]:
        """The bags of a batch for each process."""
        num_samples = sparse.num_samples
        lengths = sparse.offsets.diff().view(self.layout.num_features, num_samples)
        bounds = sparse.offsets[::num_samples].tolist() if num_samples else [0] * (self.layout.num_features + 1)
        split = self._split(sparse, lengths, bounds) if self.by_rows else []
        parts = []
        for rank, features in enumerate(self.features):
            num_split = sum(feature in self.by_rows for feature in features)
            whole = features[num_split:]
            runs = [slice(bounds[first], bounds[last + 1]) for first, last in _runs(whole)]
            ids = [sparse.ids[run] for run in runs]
            weights = [] if sparse.weights is None else [sparse.weights[run] for run in runs]
            counts = [lengths if len(whole) == len(lengths) else lengths[whole]] if whole else []
            if num_split:
                part = split[rank]
                ids, counts = [part.ids, *ids], [part.lengths, *counts]
                weights = weights if part.weights is None else [part.weights, *weights]
            parts.append(
                TablePart(
                    ids=_joined(ids, sparse.ids),
                    lengths=_joined(counts, lengths),
                    weights=None if sparse.weights is None else _joined(weights, sparse.weights),
                )
            )
        return parts

    def _split(self, sparse: Sparse, lengths: Tensor, bounds: list[int]) -> list[TablePart]:
        """For each process the bags of `by_rows`, with those ids alone whose rows it keeps."""
        device = sparse.ids.device
        runs = [slice(bounds[first], bounds[last + 1]) for first, last in _runs(self.by_rows)]
        ids = _joined([sparse.ids[run] for run in runs], sparse.ids)
        weights = None if sparse.weights is None else _joined([sparse.weights[run] for run in runs], sparse.weights)
        lengths = lengths[self.by_rows]
        if len(set(self._rows_each)) == 1:
            each: Tensor | int = self._rows_each[0]
        else:
            counts = torch.tensor([bounds[feature + 1] - bounds[feature] for feature in self.by_rows], device=device)
            each = torch.repeat_interleave(torch.tensor(self._rows_each, dtype=ids.dtype, device=device), counts)
        owner = torch.div(ids, each, rounding_mode="floor")
        rows = ids - owner * each
        ends = lengths.flatten().cumsum(0)
        parts = []
        for rank, features in enumerate(self.features):
            is_here = owner == rank
            up_to = torch.cat([ends.new_zeros(1), is_here.cumsum(0)])
            here = up_to[ends].diff(prepend=ends.new_zeros(1)).view(lengths.shape)
            # A table with fewer rows than processes has features that some processes never hear of.
            known = [place for place, feature in enumerate(self.by_rows) if feature in features]
            parts.append(
                TablePart(
                    ids=rows[is_here],
                    lengths=here if len(known) == len(here) else here[known],
                    weights=None if weights is None else weights[is_here],
                )
            )
        return parts


@dataclass(eq=False)
class IdExchange:
    """One batch of every process on its way to the owners of its rows: told ahead, then sent, then arrived."""

    sparse: Sparse
    """Of this process."""
    routes: IdRouter
    process_group: ProcessGroup
    lengths: list[Tensor] = field(default_factory=list)
    """What this process asks of each: int64 [F, B]."""
    asked: list[Tensor] = field(default_factory=list)
    """What each asks of this process: int64 [F, B]."""
    here: Sparse | None = None
    """The bags of all processes for this one's pieces, examples in the order of ranks; none until it has arrived."""
    _waiting: Work | None = None
    _sent: Tensor | None = None
    _sent_sizes: list[int] = field(default_factory=list)
    _received: Tensor | None = None
    _headers: Tensor | None = None

    @classmethod
    def start(cls, sparse: Sparse, routes: IdRouter, process_group: ProcessGroup) -> IdExchange:
        """Cut a batch and tell the others what is coming."""
        asked = cls(sparse, routes, process_group)
        parts = routes.cut(sparse)
        asked.lengths = [part.lengths for part in parts]
        headers = _headers_of(parts, sparse.num_samples)
        messages = [_message(*item) for item in zip(parts, routes.id_types, headers, strict=True)]
        asked._sent = torch.cat(messages)
        asked._sent_sizes = [message.numel() for message in messages]
        sent = torch.tensor(headers, dtype=torch.int32).flatten()
        asked._headers = torch.empty_like(sent)
        sizes = [_HEADER] * process_group.world_size
        asked._waiting = process_group.start_all_to_all(asked._headers, sent, sizes, sizes)
        return asked

    def send(self) -> None:
        """Once every process knows what is coming, let it come."""
        if self._sent is None or self._headers is None or self._waiting is None:
            return
        self._waiting.wait()
        sizes = [sum(_sections(header, *self._shape)) for header in self._told()]
        self._received = self._sent.new_empty(sum(sizes))
        self._waiting = self.process_group.start_all_to_all(self._received, self._sent, sizes, self._sent_sizes)
        self._sent = None

    def arrive(self) -> Sparse:
        """Wait for the others' bags, and lay them out as one batch."""
        self.send()
        if self.here is not None:
            return self.here
        assert self._waiting is not None
        assert self._received is not None
        self._waiting.wait()
        parts, place = [], 0
        for header in self._told():
            sections = _sections(header, *self._shape)
            parts.append(_read(self._received[place : place + sum(sections)], header, sections, *self._shape))
            place += sum(sections)
        self.asked = [part.lengths for part in parts]
        self.here = _one_batch(parts, self._shape[0])
        self._received = self._waiting = None
        return self.here

    def drop(self) -> None:
        """Nobody wants it any more; what is on its way arrives all the same, unless its sender has gone."""
        if self._waiting is not None:
            with contextlib.suppress(LostProcessError):
                self._waiting.wait()

    @property
    def num_samples(self) -> list[int]:
        """Examples of each process."""
        return [header[0] for header in self._told()]

    @property
    def _shape(self) -> tuple[int, torch.dtype]:
        rank = self.process_group.rank
        return len(self.routes.features[rank]), self.routes.id_types[rank]

    def _told(self) -> list[list[int]]:
        assert self._headers is not None
        told: list[list[int]] = self._headers.view(-1, _HEADER).tolist()
        return told


def _headers_of(parts: Sequence[TablePart], num_samples: int) -> list[list[int]]:
    """What is told ahead of each part; one wait for the device in all."""
    ends = [torch.stack(part.lengths.aminmax()) if part.lengths.numel() else part.lengths.new_zeros(2) for part in parts]
    headers = []
    for part, (least, most) in zip(parts, torch.stack(ends).tolist(), strict=True):
        code = 0 if least == most else 1 if most < 2**8 else 2 if most < 2**15 else 3
        weights = 0 if part.weights is None else _WEIGHTS.index(part.weights.dtype)
        headers.append([num_samples, part.ids.numel(), code, most, weights])
    return headers


def _sections(header: Sequence[int], num_features: int, id_type: torch.dtype) -> tuple[int, int, int]:
    """Bytes of ids, weights and lengths in a message, each up to a multiple of 8."""
    num_samples, num_ids, lengths, _, weights = header
    bytes_each = [0 if kind is None else kind.itemsize for kind in (_WEIGHTS[weights], _LENGTHS[lengths])]
    used = (num_ids * id_type.itemsize, num_ids * bytes_each[0], num_features * num_samples * bytes_each[1])
    return tuple(math.ceil(size / 8) * 8 for size in used)  # type: ignore[return-value]


def _message(part: TablePart, id_type: torch.dtype, header: Sequence[int]) -> Tensor:
    """A part as bytes."""
    sections = _sections(header, len(part.lengths), id_type)
    message = torch.empty(sum(sections), dtype=torch.uint8, device=part.ids.device)
    ids, weights, lengths = message.split(sections)
    _fill(ids, part.ids, id_type)
    if part.weights is not None:
        _fill(weights, part.weights, part.weights.dtype)
    if (kind := _LENGTHS[header[2]]) is not None:
        _fill(lengths, part.lengths.flatten(), kind)
    return message


def _fill(section: Tensor, values: Tensor, kind: torch.dtype) -> None:
    section.view(kind)[: values.numel()].copy_(values)


def _read(
    message: Tensor, header: Sequence[int], sections: Sequence[int], num_features: int, id_type: torch.dtype
) -> TablePart:
    """The part that `_message` wrote."""
    num_samples, num_ids, lengths_code, constant, weights_code = header
    ids, weights, lengths = message.split(list(sections))
    count = num_features * num_samples
    lengths_type, weights_type = _LENGTHS[lengths_code], _WEIGHTS[weights_code]
    if lengths_type is None:
        read = torch.full((count,), constant, dtype=torch.int64, device=message.device)
    else:
        read = lengths.view(lengths_type)[:count].long()
    return TablePart(
        ids=ids.view(id_type)[:num_ids],
        lengths=read.view(num_features, num_samples),
        weights=None if weights_type is None else weights.view(weights_type)[:num_ids],
    )


def _one_batch(parts: Sequence[TablePart], num_features: int) -> Sparse:
    """The processes' bags as one batch, feature by feature and inside a feature in the order of ranks."""
    lengths = torch.cat([part.lengths for part in parts], dim=1)
    offsets = torch.cat([lengths.new_zeros(1), lengths.flatten().cumsum(0)])
    counts = torch.stack([part.lengths.sum(dim=1) for part in parts]).tolist()

    def laid_out(tensors: list[Tensor]) -> Tensor:
        if len(tensors) == 1 or num_features == 0:
            return tensors[0]
        cut = [tensor.split(count) for tensor, count in zip(tensors, counts, strict=True)]
        return torch.cat([pieces[feature] for feature in range(num_features) for pieces in cut])

    weights = [part.weights for part in parts if part.weights is not None]
    return Sparse(
        ids=laid_out([part.ids for part in parts]),
        offsets=offsets,
        num_features=num_features,
        weights=laid_out(weights) if weights else None,
    )


def _runs(features: Sequence[int]) -> list[tuple[int, int]]:
    """First and last of each run of features that follow each other."""
    runs: list[tuple[int, int]] = []
    for feature in features:
        if runs and runs[-1][1] == feature - 1:
            runs[-1] = (runs[-1][0], feature)
        else:
            runs.append((feature, feature))
    return runs


def _joined(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat(list(tensors)) if tensors else like[:0]


def _id_type(pieces: Sequence[ShardPiece]) -> torch.dtype:
    return torch.int32 if all(piece.num_rows < 2**31 for piece in pieces) else torch.int64
