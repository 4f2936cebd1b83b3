"""Pooled look-up and exact fused update on a CUDA GPU, in Triton: all tables in one launch.

An update sorts (table, id) keys, which puts equal ids side by side, plans what each sorted place does, and walks the places
in tiles. Inside a tile a segmented scan sums the gradients of each run of equal ids, and a run's sum is applied to its row at
once. A run that goes far beyond its tile leaves a partial sum a tile, and a second, small launch adds those up in order. So
every sum has one order, and the result is the same bit for bit each time.

Nothing here waits for the GPU or depends on how many ids the batch holds beyond the length of `ids`, which may be a capacity:
the programs read the number of ids from `offsets`. So both functions can be captured in a CUDA graph.

Letters: B examples, F features, T tables, N rows, D width, nnz ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
from torch import Tensor

from rowstead.kernels.gpu_programs import apply_tiles, join_tiles, name_rows, plan_places, pool
from rowstead.kernels.layout import Layout
from rowstead.kernels.optimizer import KINDS, RowState, numbers_of, state_addresses
from rowstead.spec.train import SparseOptimizerSpec

IDS_AT_A_TIME = 8
"""Of one bag, in a look-up."""
BAGS_OF_ONE = 4
"""Bags that a group of lanes pools side by side where bags hold one id."""
TILE = 32
"""Sorted places that a group of lanes walks in an update."""
PLACES_AT_A_TIME = 4
"""Of one tile; also how far a tile is walked on to end a run."""
JOINED_TILES = 32
HEADS_AT_A_TIME = 4


def lookup(tables: Sequence[Tensor], layout: Layout, ids: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Pooled rows of every feature, side by side: [B, sum of widths].

    tables: T tensors [N, D] of one dtype; ids int32 or int64 [nnz or more], in range; offsets int64 [F*B + 1]; weights like
    ids, or none. Rows in FP16 or BF16 are summed, and returned, in FP32.
    """
    facts = _facts(layout, ids.device)
    num_bags = offsets.numel() - 1
    num_samples = num_bags // layout.num_features
    pooled = torch.empty(num_samples, layout.total_width, dtype=_arithmetic(tables[0].dtype), device=ids.device)
    if not num_samples:
        return pooled
    memory = _addresses(tuple(table.data_ptr() for table in tables), ids.device)
    shape = _Shape.of(layout, tables)
    at_a_time = min(IDS_AT_A_TIME, triton.next_power_of_2(max(1, ids.numel() // num_bags)))
    warps, streams = _lanes(shape["D"])
    if at_a_time == 1:
        streams *= BAGS_OF_ONE
    pool[(triton.cdiv(num_bags, streams),)](
        ids, offsets, ids if weights is None else weights, pooled, tables[0], memory, *facts.pooling, num_samples, num_bags,
        layout.total_width, WEIGHTED=weights is not None, **shape, R=at_a_time, S=streams, num_warps=warps,
    )  # fmt: skip
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
    numbers = device_numbers(tuple(numbers_of(optimizer, lr=lr, step=step)), step, grad.dtype, grad.device)
    update_by(tables, states, layout, ids, offsets, weights, grad, optimizer=optimizer, numbers=numbers, is_full=True)


def update_by(
    tables: Sequence[Tensor],
    states: Sequence[RowState],
    layout: Layout,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    grad: Tensor,
    *,
    optimizer: SparseOptimizerSpec,
    numbers: Tensor,
    is_full: bool = False,
) -> None:
    """`update` with what changes from step to step in memory of the GPU: `numbers` is what `device_numbers` gave.

    `is_full` says that there are as many ids as `ids` has room for.
    """
    num_places = ids.numel()
    if not num_places:
        return
    device, grad = ids.device, grad.contiguous()
    facts = _facts(layout, device)
    num_bags = offsets.numel() - 1
    num_samples = num_bags // layout.num_features
    keys = _keys(num_places, facts.key_dtype, device, is_full=is_full)
    sources = torch.empty(num_places, dtype=torch.int64, device=device)
    scales = _bag_scales(grad, offsets, layout, optimizer.clip)
    has_factors = weights is not None or scales is not None
    factors = torch.empty(num_places, dtype=grad.dtype, device=device) if has_factors else grad
    wide = min(32, triton.next_power_of_2(max(1, num_places // num_bags)))
    tall = max(1, 512 // wide)
    name_rows[(triton.cdiv(num_bags, tall),)](
        ids, offsets, ids if weights is None else weights, grad if scales is None else scales, keys, sources, factors,
        facts.feature_base, *facts.naming, num_samples, num_bags, layout.total_width,
        WEIGHTED=weights is not None, SCALED=scales is not None, BAGS=tall, L=wide, num_warps=4,
    )  # fmt: skip
    keys, order = torch.sort(keys, stable=True)

    kind, rounds = KINDS[optimizer.kind], tables[0].dtype != grad.dtype

    def room(dtype: torch.dtype, is_used: bool) -> Tensor:
        return torch.empty(num_places, dtype=dtype, device=device) if is_used else sources

    plans, rows_at = room(torch.int64, True), room(torch.int64, True)
    firsts_at, seconds_at, noises = room(torch.int64, kind > 0), room(torch.int64, kind == 3), room(torch.int32, rounds)
    firsts, seconds = zip(*(state_addresses(state) for state in states), strict=True)
    found = (rows_at, firsts_at, seconds_at, noises)
    shape = _Shape.of(layout, tables)
    warps, streams = _lanes(shape["D"])
    plan_places[(triton.cdiv(num_places, 512),)](
        keys, order, sources, plans, *found, _addresses(tuple(table.data_ptr() for table in tables), device),
        _addresses(firsts, device), _addresses(seconds, device), *facts.update, offsets, num_bags, numbers,
        tables[0].element_size(), KIND=kind, ROUNDS=rounds, TILE=TILE, EXTRA=PLACES_AT_A_TIME, BLOCK=512, num_warps=4,
    )  # fmt: skip
    num_tiles = triton.cdiv(num_places, TILE)
    head = torch.empty(num_tiles, shape["D"], dtype=grad.dtype, device=device)
    tail = torch.empty_like(head)
    options = {**shape, "KIND": kind, "ROUNDS": rounds, "TILE": TILE}
    apply_tiles[(triton.cdiv(num_tiles, streams),)](
        plans, order, factors, grad, head, tail, tables[0], *found, offsets, num_bags, numbers,
        FACTORS=has_factors, **options, EXTRA=PLACES_AT_A_TIME, R=PLACES_AT_A_TIME, S=streams, num_warps=warps,
    )  # fmt: skip
    join_tiles[(triton.cdiv(num_tiles, JOINED_TILES),)](
        keys, plans, head, tail, tables[0], *found, offsets, num_bags, numbers, **options, TILES=JOINED_TILES,
        S=streams, HEADS=HEADS_AT_A_TIME, num_warps=warps,
    )  # fmt: skip


@lru_cache(maxsize=64)
def device_numbers(numbers: tuple[float, ...], step: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What an update reads of a step: the optimizer's `numbers` and, for rounding, the step as the bits of an int32."""
    return host_numbers(numbers, step, dtype).to(device, non_blocking=True)


def host_numbers(numbers: Sequence[float], step: int, dtype: torch.dtype) -> Tensor:
    """`device_numbers` in the memory of the host."""
    bits = torch.tensor([step & 0x7FFFFFFF], dtype=torch.int32).view(torch.float32).to(dtype)
    return torch.cat([torch.tensor(list(numbers), dtype=dtype), bits])


def _arithmetic(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _lanes(width: int) -> tuple[int, int]:
    """Warps of a program, and streams that are side by side in it, where a lane holds 4 elements of a row."""
    warps = max(1, width // 128)
    return warps, 128 * warps // width


def _keys(count: int, dtype: torch.dtype, device: torch.device, *, is_full: bool) -> Tensor:
    """Room for keys; places without an id sort last."""
    if is_full:
        return torch.empty(count, dtype=dtype, device=device)
    return torch.full((count,), torch.iinfo(dtype).max, dtype=dtype, device=device)


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
        columns = numbers(layout.columns)
        self.pooling = (table_of, widths, columns, numbers([int(mean) for mean in layout.is_mean]))
        self.feature_base = numbers([bases[table] for table in layout.table_of], torch.int64)
        """For each feature the key of row 0 of its table."""
        self.naming = (table_of, columns)
        self.update = (widths, numbers(bases, torch.int64))


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
