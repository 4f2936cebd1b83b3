"""Rows of a log by where they are: spans of row groups, and parts of decoded ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rowstead.data.block import RawBlock


@dataclass(frozen=True)
class Span:
    """Consecutive rows of one row group."""

    file: int
    group: int
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    def part(self, start: int, stop: int) -> Span:
        """The rows from `start` to `stop` of this span, as far as it has them."""
        return Span(self.file, self.group, self.start + max(start, 0), self.start + min(stop, self.num_rows))


def cut(spans: Sequence[Span], start: int, stop: int) -> list[Span]:
    """The spans of rows `start` to `stop`, counted over all `spans`."""
    parts, at = [], 0
    for span in spans:
        if at < stop and at + span.num_rows > start:
            parts.append(span.part(start - at, stop - at))
        at += span.num_rows
    return parts


def part_of(block: RawBlock, start: int, stop: int) -> RawBlock:
    """Rows `start` to `stop` of a block, without copying ids or dense values."""
    if start == 0 and stop == block.num_rows:
        return block

    def part(values: NDArray[np.float32] | None) -> NDArray[np.float32] | None:
        return None if values is None else values[start:stop]

    return RawBlock(
        dense=block.dense[start:stop],
        ids=tuple(ids[o[start] : o[stop]] for ids, o in zip(block.ids, block.offsets, strict=True)),
        offsets=tuple(o[start : stop + 1] - o[start] for o in block.offsets),
        labels=part(block.labels),
        weights=part(block.weights),
        true_p=part(block.true_p),
    )
