"""The pieces of some tables over all processes: how pooled vectors reach whoever asked, and gradients whoever keeps the rows.

Letters: B examples of one process, F features, D width, W processes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from rowstead.data.batch import Sparse
from rowstead.distributed.process_group import ProcessGroup, Work
from rowstead.distributed.router import Router
from rowstead.distributed.sharded_ids import IdExchange
from rowstead.distributed.sharding import ShardPiece, piece_layout
from rowstead.kernels.layout import Layout
from rowstead.stores.base import EmbeddingStore

FULL_SHARE = 0.95
"""Share of bags with ids from which on vectors of empty bags are sent as well, rather than left out."""


class Pieces:
    """This process's pieces in a local store, and the other processes as far as they concern it.

    `make` makes the local store from its layout; a process may have no piece. Vectors travel in `wire`, if that is not their
    own type. A store that is updated with other batches than it looks up hears of none in advance.
    """

    def __init__(
        self,
        layout: Layout,
        pieces: Sequence[Sequence[ShardPiece]],
        process_group: ProcessGroup,
        make: Callable[[Layout], EmbeddingStore],
        *,
        dtype: torch.dtype,
        device: torch.device,
        wire: torch.dtype | None,
        is_updated_as_looked_up: bool = True,
    ) -> None:
        self.process_group = process_group
        self._announces = is_updated_as_looked_up
        self.routes = Router(layout, pieces)
        self.layouts = [piece_layout(layout, own) for own in pieces]
        """Of every process."""
        self.own = pieces[process_group.rank]
        self.layout = self.layouts[process_group.rank]
        self.store = make(self.layout) if self.layout.tables else None
        self.dtype, self.device, self.wire = dtype, device, wire or dtype
        self._shapes = [_Shape.of(each, device) for each in self.layouts]
        self._blocks: dict[IdExchange, tuple[_Blocks, _Blocks]] = {}
        """Of the batch that was looked up last."""

    def start(self, sparse: Sparse) -> IdExchange:
        """Begin to send a batch's ids to the owners of their rows."""
        return IdExchange.start(sparse, self.routes, self.process_group)

    def prefetch(self, asked: IdExchange) -> None:
        """Tell the local store of a batch that is coming, once its ids are here."""
        here = self._arrived(asked)
        if self.store is not None and self._announces:
            self.store.prefetch(here)

    def start_lookup(self, asked: IdExchange) -> Callable[[], list[Tensor]]:
        """Pool what everybody asks of this process and begin to send it; what is returned waits for the answers of all.

        They are [B, width of that process's features], one a process.
        """
        here = self._arrived(asked)
        if self.store is not None:
            pooled = self.store.lookup(here)
        else:
            pooled = torch.zeros(sum(asked.num_samples), 0, dtype=self.dtype, device=self.device)
        answers, questions = self._vectors(asked)
        sent = answers.pack(pooled.split(asked.num_samples), self.wire)
        received, waiting = self._exchange(sent, answers.sizes, questions.sizes)

        def wait() -> list[Tensor]:
            waiting.wait()
            return questions.unpack(received, self.dtype)

        return wait

    def start_update(self, asked: IdExchange, gradients: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Begin to send gradients, one of the shape of each answer, to the owners; what is returned waits for those of all.

        They are [B of all processes, width of this one's features].
        """
        answers, questions = self._vectors(asked)
        scale = 1.0
        if self.wire == torch.float16:
            # A mean over the batch leaves each example a small gradient, and FP16 has no smaller ones: a power of two is exact.
            scale = 2.0 ** round(math.log2(max(1, sum(asked.num_samples))))
            gradients = [gradient * scale for gradient in gradients]
        sent = questions.pack(gradients, self.wire)
        received, waiting = self._exchange(sent, questions.sizes, answers.sizes)

        def wait() -> Tensor:
            waiting.wait()
            parts = answers.unpack(received, self.dtype)
            whole = parts[0] if len(parts) == 1 else answers.together(received, self.dtype, parts)
            return whole if scale == 1.0 else whole / scale

        return wait

    def _exchange(self, sent: Tensor, sent_sizes: list[int], received_sizes: list[int]) -> tuple[Tensor, Work]:
        received = sent.new_empty(sum(received_sizes))
        return received, self.process_group.start_all_to_all(received, sent, received_sizes, sent_sizes)

    def _arrived(self, asked: IdExchange) -> Sparse:
        """The bags for this process's pieces; whoever asked for them has checked them."""
        here = asked.arrive()
        if here.checked_for is None:
            here = asked.here = dataclasses.replace(here, checked_for=self.layout)
        return here

    def _vectors(self, asked: IdExchange) -> tuple[_Blocks, _Blocks]:
        """What this process answers to each, and what it gets from each."""
        if asked not in self._blocks:
            self._blocks.clear()
            own = self._shapes[self.process_group.rank]
            answers = _Blocks([own] * self.process_group.world_size, asked.asked)
            self._blocks[asked] = answers, _Blocks(self._shapes, asked.lengths)
        return self._blocks[asked]


@dataclass(frozen=True)
class _Shape:
    """The vectors of one process's features, as units of equal width."""

    width: int
    unit: int
    units_of: Tensor
    """For each unit of a row the feature that it belongs to, int64."""
    widths: tuple[int, ...]
    """Of the features."""

    @classmethod
    def of(cls, layout: Layout, device: torch.device) -> _Shape:
        widths = tuple(stop - start for start, stop in pairwise(layout.columns))
        unit = math.gcd(*widths) if widths else 1
        counts = torch.tensor([width // unit for width in widths], dtype=torch.int64)
        features = torch.repeat_interleave(torch.arange(len(widths)), counts)
        return cls(layout.total_width, max(1, unit), features.to(device), widths)


class _Blocks:
    """Vectors between this process and each other one, [B, width] a process, those of empty bags left out where many are.

    Both ends know the lengths of the bags, and so which vectors to expect.
    """

    def __init__(self, shapes: Sequence[_Shape], lengths: Sequence[Tensor]) -> None:
        """lengths: for each process int64 [F, B]."""
        self._shapes = shapes
        self._num_samples = [each.shape[1] for each in lengths]
        self._filled: list[Tensor | None] = []
        self.sizes: list[int] = []
        """Elements of each block on the wire."""
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

    @property
    def is_full(self) -> bool:
        """Whether nothing is left out."""
        return all(filled is None for filled in self._filled)

    def pack(self, blocks: Sequence[Tensor], wire: torch.dtype) -> Tensor:
        """The vectors [B, width] for each process, one after the other."""
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

    def together(self, flat: Tensor, dtype: torch.dtype, blocks: Sequence[Tensor]) -> Tensor:
        """`blocks`, which `unpack` gave and which are of one width, below each other; not copied if they already are."""
        if self.is_full:
            return flat.to(dtype).view(sum(self._num_samples), self._shapes[0].width)
        return torch.cat(list(blocks))
