"""The pieces of some tables over all processes: exchanges ids, pooled vectors and their gradients with their owners.

Letters: B examples of one process, F features, D width, W processes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from rowstead.data.batch import Sparse
from rowstead.distributed.process_group import ProcessGroup, Work
from rowstead.distributed.router import Router
from rowstead.distributed.sharded_ids import IdExchange
from rowstead.distributed.sharding import ShardPiece, piece_layout
from rowstead.kernels.layout import Layout
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.stores.base import EmbeddingStore
from rowstead.stores.snapshot import Snapshot
from rowstead.stores.state import StatePart

FULL_SHARE = 0.95
"""Share of non-empty bags above which the vectors of empty bags are sent as well."""

Make = Callable[[Layout, SparseOptimizerSpec | None], EmbeddingStore]
"""Builds the local store of a process's pieces."""


class Pieces:
    """This process's pieces in a local store, and its exchanges with the other processes.

    A process may have no piece. `wire` is the dtype of vectors on the wire.
    """

    def __init__(
        self,
        layout: Layout,
        pieces: Sequence[Sequence[ShardPiece]],
        process_group: ProcessGroup,
        make: Make,
        optimizer: SparseOptimizerSpec | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
        wire: torch.dtype | None,
    ) -> None:
        self.process_group = process_group
        self.router = Router(layout, pieces)
        self.pieces = pieces
        """The pieces of all processes."""
        layouts = [piece_layout(layout, own) for own in pieces]
        self.layout = layouts[process_group.rank]
        self.store = make(self.layout, optimizer) if self.layout.tables else None
        self.dtype, self.device, self.wire = dtype, device, wire or dtype
        self._shapes = [_Shape(each, device) for each in layouts]
        self._blocks: dict[IdExchange, tuple[_Blocks, _Blocks]] = {}
        """For the batch that was looked up last."""

    def prefetch(self, exchange: IdExchange) -> None:
        """Prefetch a batch in the local store, once its ids have arrived."""
        here = self.receive(exchange)
        if self.store is not None:
            self.store.prefetch(here)

    def start_lookup(self, exchange: IdExchange) -> Callable[[], list[Tensor]]:
        """Pool what all processes request from this one and start to send it; the returned function waits for all answers.

        They are [B, width of that process's features], one per process.
        """
        here = self.receive(exchange)
        if self.store is not None:
            pooled = self.store.lookup(here)
        else:
            pooled = torch.zeros(sum(exchange.num_samples), 0, dtype=self.dtype, device=self.device)
        answers, requests = self._vectors(exchange)
        sent = answers.pack(pooled.split(exchange.num_samples), self.wire)
        received, waiting = self._exchange(sent, answers.sizes, requests.sizes)

        def wait() -> list[Tensor]:
            waiting.wait()
            return requests.unpack(received, self.dtype)

        return wait

    def start_update(self, exchange: IdExchange, gradients: Sequence[Tensor]) -> Callable[[float, int], None]:
        """Start to send gradients, one of the shape of each answer, to the owners; the returned function waits and applies them."""
        here = self.receive(exchange)
        answers, requests = self._vectors(exchange)
        scale = 1.0
        if self.wire == torch.float16:
            # A mean over the batch leaves each example a small gradient, which FP16 would flush to zero; a power of two is exact.
            scale = 2.0 ** round(math.log2(max(1, sum(exchange.num_samples))))
            gradients = [gradient * scale for gradient in gradients]
        sent = requests.pack(gradients, self.wire)
        received, waiting = self._exchange(sent, requests.sizes, answers.sizes)

        def apply(lr: float, step: int) -> None:
            waiting.wait()
            grad = answers.concatenate(received, self.dtype)
            self.update(here, grad if scale == 1.0 else grad / scale, lr=lr, step=step)

        return apply

    def update(self, here: Sparse, grad: Tensor, *, lr: float, step: int) -> None:
        """Apply gradients [B of all processes, width of this one's features] of bags for this process's pieces."""
        if self.store is not None:
            self.store.update(here, grad, lr=lr, step=step)

    def receive(self, exchange: IdExchange) -> Sparse:
        """The bags for this process's pieces; the sender has checked them."""
        received = exchange.receive()
        if received.checked_for is None:
            received = exchange.received = dataclasses.replace(received, checked_for=self.layout)
        return received

    def parts(self) -> list[StatePart]:
        """The state of the local store, as pieces of the whole tensors."""
        return [] if self.store is None else [self._part_of_whole(part) for part in self.store.parts()]

    def snapshot(self) -> Snapshot | None:
        """The same parts as of now; see `EmbeddingStore.snapshot`."""
        found = Snapshot(parts=[]) if self.store is None else self.store.snapshot()
        return found and dataclasses.replace(found, parts=[self._part_of_whole(part) for part in found.parts])

    def _part_of_whole(self, part: StatePart) -> StatePart:
        table = next(table for table in self.layout.tables if table.name == part.name.rpartition(".")[0])
        is_per_element = part.shape[1] == table.width  # else it has one column for the whole row
        return dataclasses.replace(
            part,
            shape=(table.whole_shape[0], table.whole_shape[1] if is_per_element else part.shape[1]),
            first_row=part.first_row + table.first_row,
            first_column=part.first_column + (table.first_column if is_per_element else 0),
        )

    def _exchange(self, sent: Tensor, sent_sizes: list[int], received_sizes: list[int]) -> tuple[Tensor, Work]:
        received = sent.new_empty(sum(received_sizes))
        return received, self.process_group.start_all_to_all(received, sent, received_sizes, sent_sizes)

    def _vectors(self, exchange: IdExchange) -> tuple[_Blocks, _Blocks]:
        """What this process sends to each as answers, and what it receives from each."""
        if exchange not in self._blocks:
            self._blocks.clear()
            own = self._shapes[self.process_group.rank]
            answers = _Blocks([own] * self.process_group.world_size, exchange.received_lengths)
            self._blocks[exchange] = answers, _Blocks(self._shapes, exchange.sent_lengths)
        return self._blocks[exchange]


class _Shape:
    """The vectors of one process's features, as units of equal width."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.width = layout.total_width
        self.widths = [stop - start for start, stop in pairwise(layout.columns)]
        self.unit = max(1, math.gcd(*self.widths))
        counts = torch.tensor([width // self.unit for width in self.widths], dtype=torch.int64)
        self.units_of = torch.repeat_interleave(torch.arange(len(self.widths)), counts).to(device)
        """The feature of each unit of a row, int64."""


class _Blocks:
    """Vectors between this process and each other, [B, width] per process, without those of empty bags where there are many.

    Both ends know the lengths of the bags, and so which vectors to expect.
    """

    def __init__(self, shapes: Sequence[_Shape], lengths: Sequence[Tensor]) -> None:
        """lengths: [F, B] for each process."""
        self._shapes = shapes
        self._num_samples = [each.shape[1] for each in lengths]
        self._filled: list[Tensor | None] = []
        self.sizes: list[int] = []
        """Number of elements of each block on the wire."""
        has_ids = [each > 0 for each in lengths]
        counts = [filled.sum(dim=1) for filled in has_ids]
        flat = torch.cat(counts).tolist()
        for shape, filled in zip(shapes, has_ids, strict=True):
            own, flat = flat[: len(shape.widths)], flat[len(shape.widths) :]
            size = sum(count * width for count, width in zip(own, shape.widths, strict=True))
            full = filled.shape[1] * shape.width
            if size >= FULL_SHARE * full:
                self._filled.append(None)
                self.sizes.append(full)
            else:
                self._filled.append(filled.t().index_select(1, shape.units_of).flatten().nonzero().squeeze(1))
                self.sizes.append(size)

    def pack(self, blocks: Sequence[Tensor], wire: torch.dtype) -> Tensor:
        """The vectors [B, width] for each process, concatenated."""
        flat = []
        for block, shape, filled in zip(blocks, self._shapes, self._filled, strict=True):
            if filled is not None:
                block = block.reshape(-1, shape.unit).index_select(0, filled)
            flat.append(block.to(wire).flatten())
        return flat[0] if len(flat) == 1 else torch.cat(flat)

    def unpack(self, flat: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """The vectors [B, width] from each process; zeros where a bag is empty."""
        blocks = []
        for part, shape, filled, count in zip(
            flat.split(self.sizes), self._shapes, self._filled, self._num_samples, strict=True
        ):
            if filled is None:
                blocks.append(part.to(dtype).view(count, shape.width))
                continue
            units = torch.zeros(count * len(shape.units_of), shape.unit, dtype=dtype, device=flat.device)
            units.index_copy_(0, filled, part.to(dtype).view(-1, shape.unit))
            blocks.append(units.view(count, shape.width))
        return blocks

    def concatenate(self, flat: Tensor, dtype: torch.dtype) -> Tensor:
        """`unpack` for blocks of one width, concatenated; without a copy if all vectors were sent."""
        if all(filled is None for filled in self._filled):
            return flat.to(dtype).view(sum(self._num_samples), self._shapes[0].width)
        return torch.cat(self.unpack(flat, dtype))
