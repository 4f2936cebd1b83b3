"""Pooled look-up and exact fused update on a CUDA GPU, in Triton: all tables in one launch.

An update sorts (table, id) keys, which puts equal ids side by side, and walks the sorted places in tiles. Inside a tile a
segmented scan sums the gradients of each run of equal ids. A run that ends where it began, inside one tile, is applied at
once; one that crosses a border leaves a partial sum a tile, and a second, small launch adds those up in order. So every sum
has one order, and the result is the same bit for bit each time.

Letters: B examples, F features, T tables, N rows, D width, nnz ids, R places a tile, P tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
from torch import Tensor

from rowstead.kernels.gpu_programs import apply_tiles, join_tiles, name_rows, pool_bags, pool_ids
from rowstead.kernels.layout import Layout
from rowstead.kernels.optimizer import KINDS, RowState, numbers_of, state_addresses
from rowstead.spec.train import SparseOptimizerSpec

SHORT_BAG = 4
"""Mean ids a bag up to which a program pools several bags rather than several ids of one."""


def lookup(tables: Sequence[Tensor], layout: Layout, ids: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Pooled rows of every feature, side by side: [B, sum of widths].

    tables: T tensors [N, D] of one dtype; ids int32 or int64 [nnz], in range; offsets int64 [F*B + 1]; weights [nnz] or none.
    """
    facts = _facts(layout, ids.device)
    num_bags = offsets.numel() - 1
    num_samples = num_bags // layout.num_features
    pooled = torch.empty(num_samples, layout.total_width, dtype=tables[0].dtype, device=ids.device)
    if not num_samples:
        return pooled
    rows = _addresses(tuple(table.data_ptr() for table in tables), ids.device)
    mean = ids.numel() / num_bags
    shape = _Shape.of(layout, tables)
    common = (ids, offsets, ids if weights is None else weights, pooled, rows, *facts.pooling, num_samples, num_bags)
    options = {"WEIGHTED": weights is not None, **shape}
    if mean <= SHORT_BAG:
        bags = max(1, 1024 // shape["D"])
        pool_bags[(triton.cdiv(num_bags, bags),)](*common, layout.total_width, **options, BAGS=bags, num_warps=4)
    else:
        step = min(32, triton.next_power_of_2(int(mean)))
        pool_ids[(num_bags,)](*common, layout.total_width, **options, L=step, num_warps=1)
    return pooled


def update(
    tables: Sequence[Tensor],
    states: Sequence[RowState],
    layout: Layout,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    grad: Tensor,
    *,
    optimizer: SparseOptimizerSpec,
    lr: float,
    step: int,
) -> None:
    """One exact optimizer step on every row that `ids` name, in place; grad [B, sum of widths]. Ids must be in range."""
    num_ids = ids.numel()
    if not num_ids:
        return
    device, grad = ids.device, grad.contiguous()
    facts = _facts(layout, device)
    num_bags = offsets.numel() - 1
    num_samples = num_bags // layout.num_features
    keys = torch.empty(num_ids, dtype=facts.key_dtype, device=device)
    bags = torch.empty(num_ids, dtype=torch.int32, device=device)
    wide = min(32, triton.next_power_of_2(max(1, num_ids // num_bags)))
    tall = max(1, 256 // wide)
    name_rows[(triton.cdiv(num_bags, tall),)](
        ids, offsets, keys, bags, facts.row_base, num_samples, num_bags, BAGS=tall, L=wide, num_warps=4
    )
    keys, order = torch.sort(keys, stable=True)

    shape = _Shape.of(layout, tables)
    tile = max(4, min(32, 1024 // shape["D"]))
    num_tiles = triton.cdiv(num_ids, tile)
    head = torch.empty(num_tiles, shape["D"], dtype=grad.dtype, device=device)
    tail = torch.empty_like(head)
    scales = _bag_scales(grad, offsets, layout, optimizer.clip)
    firsts, seconds = zip(*(state_addresses(state) for state in states), strict=True)
    memory = (
        _addresses(tuple(table.data_ptr() for table in tables), device),
        _addresses(firsts, device),
        _addresses(seconds, device),
    )
    numbers = torch.tensor(numbers_of(optimizer, lr=lr, step=step), dtype=grad.dtype, device=device)
    options = {**shape, "KIND": KINDS[optimizer.kind], "R": tile}
    apply_tiles[(num_tiles,)](
        keys, order, bags, grad, ids if weights is None else weights, keys if scales is None else scales, head, tail,
        *memory, *facts.update, num_samples, num_ids, layout.total_width, numbers,
        WEIGHTED=weights is not None, SCALED=scales is not None, **options, num_warps=1,
    )  # fmt: skip
    join_tiles[(triton.cdiv(num_tiles, 32),)](
        keys, order, bags, head, tail, *memory, *facts.update, num_samples, num_ids, num_tiles, numbers,
        **options, TILES=32, num_warps=1,
    )  # fmt: skip


class _Shape:
    """What the compiler should know about widths: the block, the one width if there is one, and whether rows are aligned."""

    @staticmethod
    @lru_cache(maxsize=64)
    def _of(widths: tuple[int, ...], itemsize: int, aligned: bool) -> dict[str, int]:
        same = len(set(widths)) == 1
        quad = all(width * itemsize % 16 == 0 for width in widths) and aligned
        return {"D": triton.next_power_of_2(max(widths)), "WIDTH": widths[0] if same else 0, "ALIGNED": quad}

    @classmethod
    def of(cls, layout: Layout, tables: Sequence[Tensor]) -> dict[str, int]:
        aligned = all(table.data_ptr() % 16 == 0 for table in tables)
        return cls._of(tuple(table.width for table in layout.tables), tables[0].element_size(), aligned)


class _Facts:
    """A layout as tensors on the device."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        def numbers(values: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(list(values), dtype=dtype, device=device)

        table_of = numbers(layout.table_of)
        widths = numbers([table.width for table in layout.tables])
        bases = [0]
        for table in layout.tables:
            bases.append(bases[-1] + table.num_rows)
        self.key_dtype = torch.int32 if bases[-1] < 2**31 else torch.int64
        self.row_base = numbers([bases[table] for table in layout.table_of], torch.int64)
        """For each feature the key of row 0 of its table."""
        columns = numbers(layout.columns)
        self.pooling = (table_of, widths, columns, numbers([int(mean) for mean in layout.is_mean]))
        self.update = (table_of, widths, columns, self.row_base)


@lru_cache(maxsize=64)
def _facts(layout: Layout, device: torch.device) -> _Facts:
    return _Facts(layout, device)


@lru_cache(maxsize=256)
def _addresses(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(addresses, dtype=torch.int64, device=device)


def _bag_scales(grad: Tensor, offsets: Tensor, layout: Layout, clip: float | None) -> Tensor | None:
    """What the gradient of each bag is multiplied by [F*B]: its mean's share and its clipping; none when all are 1."""
    if clip is None and not any(layout.is_mean):
        return None
    lengths = offsets.diff().view(layout.num_features, -1).clamp(min=1).to(grad.dtype)
    scales = torch.ones_like(lengths)
    for feature in range(layout.num_features):
        if layout.is_mean[feature]:
            scales[feature] /= lengths[feature]
        if clip is not None:
            norm = grad[:, layout.columns[feature] : layout.columns[feature + 1]].norm(dim=1)
            scales[feature] *= clip / norm.clamp(min=clip)
    return scales.view(-1)
