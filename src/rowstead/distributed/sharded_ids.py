"""Sends ids to the processes that own their rows.

A batch is cut into the bags of each process. Their ids (int32 where tables allow), weights and lengths (in as many bytes as the
longest needs) go to it as one message; a short header sent ahead gives the sizes.

Letters: B examples of this process, F features, nnz ids, W processes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rowstead.data.batch import Sparse
from rowstead.distributed.process_group import CompletedWork, ProcessGroup, Work
from rowstead.distributed.router import RoutedBags, Router
from rowstead.spec.errors import LostProcessError

_LENGTHS = (None, torch.uint8, torch.int16, torch.int32)
"""Dtypes of lengths by their code; 0 where all bags have one length, which the header contains."""
_WEIGHTS = (None, torch.float32, torch.float64)
_HEADER = 5
"""Numbers of a header: examples, ids, code and value of lengths, code of weights."""


class IdExchange:
    """One batch of every process, sent to the owners of its rows: headers first, at once, then ids."""

    def __init__(self, sparse: Sparse, router: Router, process_group: ProcessGroup) -> None:
        self._group = process_group
        self._shape = len(router.features[process_group.rank]), router.id_dtype
        parts = router.route(sparse)
        self.sent_lengths = [part.lengths for part in parts]
        """Lengths of the bags that this process requests from each: [F, B]."""
        self.received_lengths: list[Tensor] = []
        """Lengths of the bags that each requests from this process: int64 [F, B]."""
        self.received: Sparse | None = None
        """The bags of all processes for this one's pieces, examples in the order of ranks; None before they have arrived."""
        headers = _headers_of(parts, sparse.num_samples)
        messages = [_message(part, router.id_dtype, header) for part, header in zip(parts, headers, strict=True)]
        self._sent: Tensor | None = torch.cat(messages)
        self._sent_sizes = [message.numel() for message in messages]
        self._buffer = torch.empty(0)
        sent = torch.tensor(headers, dtype=torch.int32).flatten()
        self._headers = torch.empty_like(sent)
        sizes = [_HEADER] * process_group.world_size
        self._work: Work = process_group.start_all_to_all(self._headers, sent, sizes, sizes)

    def send(self) -> None:
        """Send the ids, once the headers have arrived."""
        if self._sent is None:
            return
        self._work.wait()
        sizes = [sum(_sections(header, *self._shape)) for header in self._header_rows()]
        self._buffer = self._sent.new_empty(sum(sizes))
        self._work = self._group.start_all_to_all(self._buffer, self._sent, sizes, self._sent_sizes)
        self._sent = None

    def receive(self) -> Sparse:
        """Wait for the others' bags, and lay them out as one batch."""
        self.send()
        if self.received is None:
            self._work.wait()
            parts, offset = [], 0
            for header in self._header_rows():
                sections = _sections(header, *self._shape)
                parts.append(_read(self._buffer[offset : offset + sum(sections)], header, sections, *self._shape))
                offset += sum(sections)
            self.received_lengths = [part.lengths for part in parts]
            self.received = one_batch(parts, self._shape[0])
            self._buffer, self._work = torch.empty(0), CompletedWork()
        return self.received

    def drop(self) -> None:
        """Drop the batch; what was sent is still received, unless its sender was lost."""
        with contextlib.suppress(LostProcessError):
            self._work.wait()

    @property
    def num_samples(self) -> list[int]:
        """Number of examples of each process."""
        return [header[0] for header in self._header_rows()]

    def _header_rows(self) -> list[list[int]]:
        rows: list[list[int]] = self._headers.view(-1, _HEADER).tolist()
        return rows


def _headers_of(parts: Sequence[RoutedBags], num_samples: int) -> list[list[int]]:
    """The header of each part; waits for the device once."""
    ends = [torch.stack(part.lengths.aminmax()) if part.lengths.numel() else part.lengths.new_zeros(2) for part in parts]
    headers = []
    for part, (least, most) in zip(parts, torch.stack(ends).tolist(), strict=True):
        code = 0 if least == most else 1 if most < 2**8 else 2 if most < 2**15 else 3
        weights = 0 if part.weights is None else _WEIGHTS.index(part.weights.dtype)
        headers.append([num_samples, part.ids.numel(), code, most, weights])
    return headers


def _sections(header: Sequence[int], num_features: int, id_type: torch.dtype) -> tuple[int, int, int]:
    """Bytes of ids, weights and lengths in a message, each rounded up to a multiple of 8."""
    num_samples, num_ids, lengths, _, weights = header
    bytes_each = [0 if kind is None else kind.itemsize for kind in (_WEIGHTS[weights], _LENGTHS[lengths])]
    used = (num_ids * id_type.itemsize, num_ids * bytes_each[0], num_features * num_samples * bytes_each[1])
    return tuple(math.ceil(size / 8) * 8 for size in used)  # type: ignore[return-value]


def _message(part: RoutedBags, id_type: torch.dtype, header: Sequence[int]) -> Tensor:
    """A part as a message of bytes."""
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
) -> RoutedBags:
    """Read what `_message` wrote."""
    num_samples, num_ids, lengths_code, constant, weights_code = header
    ids, weights, lengths = message.split(list(sections))
    count = num_features * num_samples
    lengths_type, weights_type = _LENGTHS[lengths_code], _WEIGHTS[weights_code]
    if lengths_type is None:
        read = torch.full((count,), constant, dtype=torch.int64, device=message.device)
    else:
        read = lengths.view(lengths_type)[:count].long()
    return RoutedBags(
        ids=ids.view(id_type)[:num_ids],
        lengths=read.view(num_features, num_samples),
        weights=None if weights_type is None else weights.view(weights_type)[:num_ids],
    )


def one_batch(parts: Sequence[RoutedBags], num_features: int) -> Sparse:
    """The processes' bags as one batch: feature by feature, each in the order of ranks."""
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
