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

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor

from rowstead.kernels.gpu.embedding_programs import (
    apply_tiles,
    join_tiles,
    name_rows,
    plan_places,
    pool,
    scale_places,
    sum_heads,
)
from rowstead.kernels.layout import Layout
from rowstead.kernels.row_optimizer import RowState, compute_dtype, state_tensors, step_scalars
from rowstead.spec.errors import RowsteadError
from rowstead.spec.row_optimizers import ROW_OPTIMIZERS, RowOptimizerName, SparseOptimizerSpec

IDS_AT_A_TIME = 8
"""Of one bag, in a look-up."""
BAGS_OF_ONE = 4
"""Bags that a group of lanes pools side by side where bags hold one id."""
SHORT_TILE, LONG_TILE, MANY_PLACES = 16, 32, 1 << 23
"""Sorted places that a group of lanes walks in an update: fewer keep more lanes busy, more split fewer runs."""
PLACES_AT_A_TIME = 4
"""Of one tile; also how far a tile is walked on to end a run."""
MAX_WIDTH = 2048
"""A plan has room for it, and a program lanes."""
REGISTERS = {False: {SHORT_TILE: 80, LONG_TILE: 80}, True: {SHORT_TILE: 96, LONG_TILE: 88}}
"""Of a lane in an update at most, by whether rows are in line, and by the tile: fewer let more rows be under way at once, down to where some
registers spill."""
JOINED_TILES = 32
"""That a program looks through for split runs: as many as a warp has lanes, since of fewer Triton 3.6 makes programs that go astray."""
TILES_OF_A_GROUP, HEADS_AT_A_TIME = 64, 8
"""Of runs that are split: tiles that are summed on their own where a run fills them, and sums that are read at once.
The first is a multiple of the second."""


def lookup(tables: Sequence[Tensor], layout: Layout, ids: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Pooled rows of every feature, side by side: [B, sum of widths].

    tables: T tensors [N, D] of one dtype; ids int32 or int64 [nnz or more], those that are no rows are left out; offsets int64 [F*B + 1]; weights like
    ids, or none. Rows in FP16 or BF16 are summed, and returned, in FP32.
    """
    facts = _facts(layout, ids.device)
    num_bags = offsets.numel() - 1
    num_samples = num_bags // layout.num_features
    pooled = torch.empty(num_samples, layout.total_width, dtype=compute_dtype(tables[0].dtype), device=ids.device)
    if not num_samples:
        return pooled
    rows, is_aligned = _placed(tables, ids.device)
    shape = _shape(layout, tables[0].element_size(), is_aligned)
    at_a_time = min(IDS_AT_A_TIME, triton.next_power_of_2(max(1, ids.numel() // num_bags)))
    warps, streams = _lanes(shape["D"])
    if at_a_time == 1:
        streams *= BAGS_OF_ONE
    pool[(triton.cdiv(num_bags, streams),)](
        ids, offsets, ids if weights is None else weights, pooled, tables[0], rows, *facts.pooling, num_samples, num_bags,
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
    """One exact optimizer step on every row that `ids` name, in place; grad [B, sum of widths].

    Ids that are no rows are left out. `offsets` has to cover all of `ids`.
    """
    scalars = device_scalars(tuple(step_scalars(optimizer, lr=lr, step=step)), step, grad.dtype, grad.device)
    plan = plan_update(tables, states, layout, ids, offsets, optimizer=optimizer, scalars=scalars, is_full=True)
    apply_plan(plan, tables, layout, offsets, weights, grad, optimizer=optimizer, scalars=scalars)


@dataclass(frozen=True)
class UpdatePlan:
    """The ids of a batch by table and row, and what an update does at each of them."""

    keys: Tensor
    """Rows counted over all tables, rising [nnz or more]."""
    order: Tensor
    """For each key the place of its id in the batch."""
    plans: Tensor
    """For each key where its gradient is and what becomes of it; gpu_programs says how."""
    memory: tuple[Tensor, ...]
    """For each key where its row and its optimizer's first and second state are, and the noise that rounds it. Where rows are in line, the
    first three are the keys, and the first table's first and second state."""
    rows_in_line: bool
    """Whether rows and states of all tables follow each other in memory, so that the key alone says where they are."""
    tile: int
    """Places that are walked by one group of lanes."""
    keeps: tuple[object, ...] = ()
    """What look-up and update read besides, which a captured graph of them needs as long as it lives."""


def plan_update(
    tables: Sequence[Tensor],
    states: Sequence[RowState],
    layout: Layout,
    ids: Tensor,
    offsets: Tensor,
    *,
    optimizer: SparseOptimizerSpec,
    scalars: Tensor,
    is_full: bool = False,
) -> UpdatePlan:
    """The part of an update that needs no gradient yet; `is_full` says that there are as many ids as `ids` has room for.

    `scalars` is what `device_scalars` gave.
    """
    device, num_places, num_bags = ids.device, ids.numel(), offsets.numel() - 1
    facts = _facts(layout, device)
    if is_full:
        keys = torch.empty(num_places, dtype=facts.key_dtype, device=device)
    else:
        keys = torch.full((num_places,), facts.no_key, dtype=facts.key_dtype, device=device)
    bags = torch.empty(num_places, dtype=torch.int32, device=device)
    tile = SHORT_TILE if num_places < MANY_PLACES else LONG_TILE
    if not num_places or not num_bags:
        return UpdatePlan(keys, keys, keys, (keys,) * 4, rows_in_line=False, tile=tile)
    num_samples = num_bags // layout.num_features
    tall, wide = _bags_and_ids(num_places, num_bags)
    name_rows[(triton.cdiv(num_bags, tall),)](
        ids, offsets, keys, bags, *facts.naming, num_samples, num_bags,
        NONE=facts.no_key, BAGS=tall, L=wide, num_warps=4,
    )  # fmt: skip
    keys, order = torch.sort(keys, stable=True)

    rounds, state = tables[0].dtype != scalars.dtype, _state_shapes(optimizer.kind)

    def room(dtype: torch.dtype, is_used: bool = True) -> Tensor:
        return torch.empty(num_places, dtype=dtype, device=device) if is_used else keys

    at = tuple(
        tuple(tensor.data_ptr() for tensor in tensors) or (0,) * len(tables)
        for tensors in (tables, *state_tensors(optimizer.kind, states))
    )
    in_line = _are_in_line(layout, at, optimizer.kind, tables[0].element_size(), scalars.element_size())
    if in_line:
        places = [keys, *states[0].values(), keys, keys][:3]
    else:
        places = [room(torch.int64, is_used) for is_used in (True, state["FIRST"] > 0, state["SECOND"] > 0)]
    memory = (*places, room(torch.int32, rounds))
    plans, placed = room(torch.int64), tuple(_addresses(addresses, device) for addresses in at)
    plan_places[(triton.cdiv(num_places, 512),)](
        keys, order, bags, plans, *memory, *placed, *facts.update, offsets, num_samples, num_bags, layout.total_width, scalars,
        tables[0].element_size(),
        **state, ROUNDS=rounds, ROWS_IN_LINE=in_line, TILE=tile, EXTRA=PLACES_AT_A_TIME, BLOCK=512, NONE=facts.no_key, num_warps=4,
    )  # fmt: skip
    return UpdatePlan(keys, order, plans, memory, rows_in_line=in_line, tile=tile, keeps=(facts, *placed))


def apply_plan(
    plan: UpdatePlan,
    tables: Sequence[Tensor],
    layout: Layout,
    offsets: Tensor,
    weights: Tensor | None,
    grad: Tensor,
    *,
    optimizer: SparseOptimizerSpec,
    scalars: Tensor,
    guard: Tensor | None = None,
) -> None:
    """The rest of an update. Nothing is updated if `guard`, one number, is not finite."""
    num_places, num_bags = plan.keys.numel(), offsets.numel() - 1
    if not num_places or not num_bags:
        return
    grad = grad.contiguous()
    factors = _factors(layout, num_places, offsets, weights, grad, optimizer.clip)
    shape = _shape(layout, tables[0].element_size(), _placed(tables, grad.device)[1])
    warps, streams = _lanes(shape["D"])
    num_tiles = triton.cdiv(num_places, plan.tile)
    num_groups = num_tiles // TILES_OF_A_GROUP
    head = torch.empty(num_tiles + num_groups, shape["D"], dtype=grad.dtype, device=grad.device)
    tail = torch.empty(num_tiles, shape["D"], dtype=grad.dtype, device=grad.device)
    step = (*plan.memory, offsets, num_bags, scalars, scalars if guard is None else guard)
    options = {
        **shape, "KIND": ROW_OPTIMIZERS[optimizer.kind].code, **_state_shapes(optimizer.kind), "ROUNDS": tables[0].dtype != grad.dtype,
        "TILE": plan.tile, "S": streams, "ROWS_IN_LINE": plan.rows_in_line, "num_warps": warps,
    }  # fmt: skip
    is_lean = grad.dtype == torch.float32 and not ROW_OPTIMIZERS[optimizer.kind].has_element_state
    apply_tiles[(triton.cdiv(num_tiles, streams),)](
        plan.plans, plan.order, grad if factors is None else factors, grad, head, tail, tables[0], *step,
        FACTORS=factors is not None, **options, EXTRA=PLACES_AT_A_TIME, R=PLACES_AT_A_TIME,
        maxnreg=REGISTERS[plan.rows_in_line][plan.tile] if is_lean else None,
    )  # fmt: skip
    joining = {"GROUP": TILES_OF_A_GROUP, "HEADS": HEADS_AT_A_TIME}
    if num_groups:
        sum_heads[(triton.cdiv(num_groups, streams),)](
            plan.keys, head, offsets, num_bags, step[-1], num_tiles, num_groups,
            D=shape["D"], TILE=plan.tile, S=streams, **joining, num_warps=warps,
        )  # fmt: skip
    join_tiles[(triton.cdiv(num_tiles, JOINED_TILES),)](
        plan.keys, plan.plans, head, tail, tables[0], *step, num_tiles, num_groups, **options, TILES=JOINED_TILES, **joining
    )


def _factors(
    layout: Layout, num_places: int, offsets: Tensor, weights: Tensor | None, grad: Tensor, clip: float | None
) -> Tensor | None:
    """For each id what its gradient is multiplied by; none where that is 1 for all."""
    scales = _bag_scales(grad, offsets, layout, clip)
    if weights is None and scales is None:
        return None
    factors = torch.empty(num_places, dtype=grad.dtype, device=grad.device)
    num_bags = offsets.numel() - 1
    tall, wide = _bags_and_ids(num_places, num_bags)
    scale_places[(triton.cdiv(num_bags, tall),)](
        offsets, factors if weights is None else weights, factors if scales is None else scales, factors, num_bags,
        WEIGHTED=weights is not None, SCALED=scales is not None, BAGS=tall, L=wide, num_warps=4,
    )  # fmt: skip
    return factors


def _bags_and_ids(num_places: int, num_bags: int) -> tuple[int, int]:
    """Bags and ids of each that a program takes at a time."""
    wide = min(32, triton.next_power_of_2(max(1, num_places // num_bags)))
    return max(1, 512 // wide), wide


@lru_cache(maxsize=64)
def device_scalars(scalars: tuple[float, ...], step: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What an update reads of a step: the optimizer's `scalars` and, for rounding, the step as the bits of an int32."""
    return host_scalars(scalars, step, dtype).to(device, non_blocking=True)


def host_scalars(scalars: Sequence[float], step: int, dtype: torch.dtype) -> Tensor:
    """`device_scalars` in the memory of the host."""
    bits = torch.tensor([step & 0x7FFFFFFF], dtype=torch.int32).view(torch.float32).to(dtype)
    return torch.cat([torch.tensor(list(scalars), dtype=dtype), bits])


def _state_shapes(kind: RowOptimizerName) -> dict[str, int]:
    """Shapes of the first and the second state tensor, for the compiler: 0 where there is none, 1 for [N, 1], 2 for [N, D]."""
    shapes = [1 if tensor.is_per_row else 2 for tensor in ROW_OPTIMIZERS[kind].state]
    return dict(zip(("FIRST", "SECOND"), (*shapes, 0, 0), strict=False))


def _lanes(width: int) -> tuple[int, int]:
    """Warps of a program, and streams that are side by side in it, where a lane holds 4 elements of a row."""
    warps = max(1, width // 128)
    return warps, 128 * warps // width


@lru_cache(maxsize=64)
def _shape(layout: Layout, itemsize: int, is_aligned: bool) -> dict[str, int]:
    """What the compiler should know about widths: the block, the one width if there is one, and whether rows are aligned."""
    widths = [table.width for table in layout.tables]
    if max(widths) > MAX_WIDTH:
        raise RowsteadError(
            f"rows of {max(widths):,} elements: the GPU kernels take {MAX_WIDTH:,} at most; use `kernel: reference`"
        )
    is_aligned = is_aligned and all(width * itemsize % 16 == 0 for width in widths)
    return {
        "D": triton.next_power_of_2(max(widths)),
        "WIDTH": widths[0] if len(set(widths)) == 1 else 0,
        "ALIGNED": is_aligned,
    }


class _GpuFacts:
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
        self.no_key = torch.iinfo(self.key_dtype).max
        """Of an id that is no row, and of room without an id: it sorts last."""
        limits = numbers([layout.tables[table].num_rows for table in layout.table_of], torch.int64)
        columns = numbers(layout.columns)
        self.pooling = (table_of, widths, columns, numbers([int(mean) for mean in layout.is_mean]), limits)
        feature_base = numbers([bases[table] for table in layout.table_of], torch.int64)  # the key of row 0 of its table
        self.naming = (feature_base, limits)
        self.update = (widths, numbers(bases, torch.int64), table_of, columns)


@lru_cache(maxsize=64)
def _facts(layout: Layout, device: torch.device) -> _GpuFacts:
    return _GpuFacts(layout, device)


@lru_cache(maxsize=64)
def _are_in_line(
    layout: Layout, at: tuple[tuple[int, ...], ...], kind: RowOptimizerName, row_size: int, state_size: int
) -> bool:
    """Whether tables of one width, and each of their states, begin where the one before ends; `at` says where each begins."""
    width = layout.tables[0].width
    if any(table.width != width for table in layout.tables):
        return False
    strides = (width * row_size, *(columns * state_size for columns in ROW_OPTIMIZERS[kind].state_columns(width).values()))
    ends = tuple(itertools.accumulate((table.num_rows for table in layout.tables), initial=0))
    return all(
        address == addresses[0] + end * stride
        for addresses, stride in zip(at, strides, strict=False)
        for address, end in zip(addresses, ends, strict=False)
    )


def _placed(tables: Sequence[Tensor], device: torch.device) -> tuple[Tensor, bool]:
    """Where tables are, in memory of the GPU, and whether all begin at a multiple of 16 bytes."""
    return _placed_at(tuple([table.data_ptr() for table in tables]), device)


@lru_cache(maxsize=64)
def _placed_at(addresses: tuple[int, ...], device: torch.device) -> tuple[Tensor, bool]:
    return _addresses(addresses, device), all(address % 16 == 0 for address in addresses)


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
