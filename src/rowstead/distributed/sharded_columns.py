"""Which process the columns of the pooled vectors come from, and where those of their gradients go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rowstead.distributed.sharding import ShardPlan


@dataclass(frozen=True)
class _Run:
    """Columns of the output that come from the same columns of the same blocks, added up."""

    start: int
    stop: int
    sources: tuple[tuple[int, int], ...]
    """For each block that contributes, its number and its first column."""


class PooledColumns:
    """Which columns of the pooled output are in which columns of the blocks that come from each process.

    Blocks are numbered: one per process for each kind of pieces, then one for replicated tables.
    """

    def __init__(self, plan: ShardPlan, features: Sequence[Sequence[Sequence[int]]], copied: Sequence[int]) -> None:
        """features: those of each process for each kind of pieces, in its order; `copied` are those of replicated tables."""
        layout = plan.layout
        self._blocks: list[list[tuple[int, int]]] = []
        """For each block its columns of the output, as ranges, in its own order."""
        for kind in features:
            for rank, answered in enumerate(kind):
                pieces = {piece.table: piece for piece in plan.pieces[rank]}
                ranges = []
                for feature in answered:
                    piece = pieces[layout.table_of[feature]]
                    start = layout.columns[feature] + piece.first_column
                    ranges.append((start, start + piece.width))
                self._blocks.append(ranges)
        if copied:
            self._blocks.append([(layout.columns[feature], layout.columns[feature + 1]) for feature in copied])
        self._firsts: list[int] = [0]
        for kind in features:
            self._firsts.append(self._firsts[-1] + len(kind))
        self._has_copies = bool(copied)
        self._merged = [_merge(ranges) for ranges in self._blocks]
        self._runs = self._find_runs(layout.total_width)

    def join(self, blocks: Sequence[Tensor]) -> Tensor:
        """The pooled output [B, sum of widths] from blocks [B, width]."""
        parts = []
        for run in self._runs:
            width = run.stop - run.start
            shares = [blocks[block][:, first : first + width] for block, first in run.sources]
            part = shares[0]
            for share in shares[1:]:
                part = part + share
            parts.append(part)
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim=1)

    def cut_for_pieces(self, grad: Tensor, kind: int) -> list[Tensor]:
        """The columns of each process's block of one kind, from [B, sum of widths]."""
        return [_select(grad, ranges) for ranges in self._merged[self._firsts[kind] : self._firsts[kind + 1]]]

    def cut_for_copies(self, grad: Tensor) -> Tensor:
        """The columns of replicated tables."""
        return _select(grad, self._merged[-1] if self._has_copies else [])

    def _find_runs(self, width: int) -> list[_Run]:
        sources: list[list[tuple[int, int]]] = [[] for _ in range(width)]
        for block, ranges in enumerate(self._blocks):
            offset = 0
            for start, stop in ranges:
                for column in range(start, stop):
                    sources[column].append((block, offset))
                    offset += 1
        runs: list[_Run] = []
        for column, found in enumerate(sources):
            assert found, f"no process keeps column {column}"
            if runs:
                last = runs[-1]
                length = column - last.start
                if tuple((block, first + length) for block, first in last.sources) == tuple(found):
                    runs[-1] = _Run(last.start, column + 1, last.sources)
                    continue
            runs.append(_Run(column, column + 1, tuple(found)))
        return runs


def _merge(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same columns in as few ranges as possible."""
    merged: list[tuple[int, int]] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged


def _select(grad: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """Some columns of [B, width], concatenated."""
    if not ranges:
        return grad[:, :0]
    views = [grad[:, start:stop] for start, stop in ranges]
    return views[0] if len(views) == 1 else torch.cat(views, dim=1)
