"""Pooled look-up and exact fused update on a CUDA GPU, in Triton: all tables in one launch.

An update sorts (table, id) keys, which groups equal ids into runs, plans what to do at each sorted key, and processes the keys
in tiles. Inside a tile a segmented scan sums the gradients of each run, and the sum is applied to the run's row. A run that goes
far beyond its tile leaves one partial sum per tile, and a second, small launch adds those in order. So every sum has one order,
and the result is deterministic, bit for bit.

Nothing here synchronizes with the GPU or depends on the number of ids in the batch: the length of `ids` is a capacity, and the
kernels read the number of ids from `offsets`. So both functions can be captured in a CUDA graph.

Letters: B examples, F features, T tables, N rows, D width, nnz ids.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import triton
from torch import Tensor

from rowstead.kernels.gpu.embedding_kernels import (
    apply_tiles,
    compute_keys,
    join_tiles,
    plan_keys,
    pool,
    scale_ids,
    sum_heads,
)
from rowstead.kernels.layout import Layout
from rowstead.kernels.row_state import RowState, compute_dtype, state_tensors, step_scalars
from rowstead.spec.errors import RowsteadError
from rowstead.spec.row_optimizers import ROW_OPTIMIZERS, RowOptimizerName, SparseOptimizerSpec

IDS_AT_A_TIME = 8
"""Ids of one bag that a look-up reads at once."""
BAGS_OF_ONE = 4
"""Bags that a group of lanes pools at once where bags have one id."""
SHORT_TILE, LONG_TILE, MANY_IDS = 16, 32, 1 << 23
"""Sorted keys per tile, which one group of lanes processes in an update, and the capacity from which tiles are long: short tiles
keep more lanes busy, long ones split fewer runs."""
KEYS_AT_A_TIME = 4
"""Keys of one tile that are processed at once; also how far beyond its tile a run is followed to its end."""
MAX_WIDTH = 2048
"""What fits into a plan and into the lanes of a Triton program."""
REGISTERS = {False: {SHORT_TILE: 80, LONG_TILE: 80}, True: {SHORT_TILE: 96, LONG_TILE: 88}}
"""Most registers per thread in an update, by whether rows are contiguous and by the tile: fewer keep more rows in flight, until they spill."""
JOINED_TILES = 32
"""Tiles that a program searches for split runs: as many as a warp has lanes, since Triton 3.6 miscompiles fewer."""
TILES_PER_GROUP, HEADS_AT_A_TIME = 64, 8
"""For split runs: tiles per group, which is summed on its own where one run fills it, and partial sums that are read at once. The
first is a multiple of the second."""


def summing_order(capacity: int, num_bags: int) -> tuple[int, int]:
    """What the order of sums depends on besides the batch: the ids of a bag that a look-up reads at once, and the keys per tile of an update.

    Capacities for which it is the same give the same bits.
    """
    at_a_time = min(IDS_AT_A_TIME, triton.next_power_of_2(max(1, capacity // max(1, num_bags))))
    return at_a_time, SHORT_TILE if capacity < MANY_IDS else LONG_TILE


def lookup(
    tables: Sequence[Tensor],
    layout: Layout,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`reference.lookup` of tables of one dtype; `ids` may be longer than `offsets` says, and ids out of range are skipped.

    With `dtype` BF16 the sums, which are FP32, are rounded to it.
    """
    on_device = _layout_tensors(layout, ids.device)
    num_bags = offsets.numel() - 1
    num_samples = num_bags // layout.num_features
    dtype = dtype or compute_dtype(tables[0].dtype)
    pooled = torch.empty(num_samples, layout.total_width, dtype=dtype, device=ids.device)
    if not num_samples:
        return pooled
    rows, is_aligned = _table_addresses(tables, ids.device)
    shape = _shape(layout, tables[0].element_size(), is_aligned)
    at_a_time, _ = summing_order(ids.numel(), num_bags)
    warps, streams = _lanes(shape["D"])
    if at_a_time == 1:
        streams *= BAGS_OF_ONE
    pool[(triton.cdiv(num_bags, streams),)](
        ids, offsets, ids if weights is None else weights, pooled, tables[0], rows, *on_device.pooling, num_samples, num_bags,
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
    """`reference.update`; ids out of range are skipped, and `offsets` must cover all of `ids`."""
    dtype = compute_dtype(tables[0].dtype)
    scalars = device_scalars(tuple(step_scalars(optimizer, lr=lr, step=step)), step, dtype, grad.device)
    plan = plan_update(tables, states, layout, ids, offsets, optimizer=optimizer, scalars=scalars, is_full=True)
    apply_plan(plan, tables, layout, offsets, weights, grad, optimizer=optimizer, scalars=scalars)


@dataclass(frozen=True)
class UpdatePlan:
    """The ids of a batch sorted by table and row, and what an update does at each of them."""

    keys: Tensor
    """Rows numbered over all tables, sorted: [nnz or more]."""
    order: Tensor
    """For each key the index of its id in the batch."""
    plans: Tensor
    """For each key the offset of its gradient and flags; see `embedding_kernels.py`."""
    memory: tuple[Tensor, ...]
    """For each key the addresses of its row and of its first and second optimizer state, and the noise that rounds it. Where rows are
    contiguous, the first three are the keys, and the first table's first and second state tensor."""
    rows_contiguous: bool
    """Whether rows and states of all tables follow each other in memory, so that the key gives their address."""
    tile: int
    """Keys per tile."""
    keeps: tuple[object, ...] = ()
    """Other tensors that look-up and update read: a CUDA graph of them must keep these alive."""


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
    """Do the part of an update that needs no gradient; `is_full` says that the batch fills the capacity of `ids`.

    `scalars` is the result of `device_scalars`.
    """
    device, capacity, num_bags = ids.device, ids.numel(), offsets.numel() - 1
    on_device = _layout_tensors(layout, device)
    if is_full:
        keys = torch.empty(capacity, dtype=on_device.key_dtype, device=device)
    else:
        keys = torch.full((capacity,), on_device.no_key, dtype=on_device.key_dtype, device=device)
    bags = torch.empty(capacity, dtype=torch.int32, device=device)
    _, tile = summing_order(capacity, num_bags)
    if not capacity or not num_bags:
        return UpdatePlan(keys, keys, keys, (keys,) * 4, rows_contiguous=False, tile=tile)
    num_samples = num_bags // layout.num_features
    tall, wide = _bags_and_ids(capacity, num_bags)
    compute_keys[(triton.cdiv(num_bags, tall),)](
        ids, offsets, keys, bags, *on_device.naming, num_samples, num_bags,
        NONE=on_device.no_key, BAGS=tall, L=wide, num_warps=4,
    )  # fmt: skip
    keys, order = torch.sort(keys, stable=True)

    rounds, state = tables[0].dtype != scalars.dtype, _state_shapes(optimizer.kind)

    def empty(dtype: torch.dtype, is_used: bool = True) -> Tensor:
        return torch.empty(capacity, dtype=dtype, device=device) if is_used else keys

    at = tuple(
        tuple(tensor.data_ptr() for tensor in tensors) or (0,) * len(tables)
        for tensors in (tables, *state_tensors(optimizer.kind, states))
    )
    are_contiguous = _are_contiguous(layout, at, optimizer.kind, tables[0].element_size(), scalars.element_size())
    if are_contiguous:
        locations = [keys, *states[0].values(), keys, keys][:3]
    else:
        locations = [empty(torch.int64, is_used) for is_used in (True, state["FIRST"] > 0, state["SECOND"] > 0)]
    memory = (*locations, empty(torch.int32, rounds))
    plans, addresses = empty(torch.int64), tuple(_addresses(each, device) for each in at)
    plan_keys[(triton.cdiv(capacity, 512),)](
        keys, order, bags, plans, *memory, *addresses, *on_device.update, offsets, num_samples, num_bags, layout.total_width, scalars,
        tables[0].element_size(),
        **state, ROUNDS=rounds, CONTIGUOUS=are_contiguous, TILE=tile, EXTRA=KEYS_AT_A_TIME, BLOCK=512, NONE=on_device.no_key, num_warps=4,
    )  # fmt: skip
    return UpdatePlan(keys, order, plans, memory, rows_contiguous=are_contiguous, tile=tile, keeps=(on_device, *addresses))


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
    """Do the rest of an update, unless `guard`, one number, is not finite; `grad` may be BF16 where sums are FP32."""
    capacity, num_bags = plan.keys.numel(), offsets.numel() - 1
    if not capacity or not num_bags:
        return
    grad, dtype = grad.contiguous(), compute_dtype(tables[0].dtype)
    factors = _factors(layout, capacity, offsets, weights, grad, optimizer.clip)
    shape = _shape(layout, tables[0].element_size(), _table_addresses(tables, grad.device)[1])
    warps, streams = _lanes(shape["D"])
    num_tiles = triton.cdiv(capacity, plan.tile)
    num_groups = num_tiles // TILES_PER_GROUP
    head = torch.empty(num_tiles + num_groups, shape["D"], dtype=dtype, device=grad.device)
    tail = torch.empty(num_tiles, shape["D"], dtype=dtype, device=grad.device)
    step = (*plan.memory, offsets, num_bags, scalars, scalars if guard is None else guard)
    options = {
        **shape, "KIND": ROW_OPTIMIZERS[optimizer.kind].code, **_state_shapes(optimizer.kind), "ROUNDS": tables[0].dtype != dtype,
        "TILE": plan.tile, "S": streams, "CONTIGUOUS": plan.rows_contiguous, "DECAYS": optimizer.decays, "num_warps": warps,
    }  # fmt: skip
    is_lean = dtype == torch.float32 and not ROW_OPTIMIZERS[optimizer.kind].has_element_state
    apply_tiles[(triton.cdiv(num_tiles, streams),)](
        plan.plans, plan.order, grad if factors is None else factors, grad, head, tail, tables[0], *step,
        FACTORS=factors is not None, **options, EXTRA=KEYS_AT_A_TIME, R=KEYS_AT_A_TIME,
        maxnreg=REGISTERS[plan.rows_contiguous][plan.tile] if is_lean else None,
    )  # fmt: skip
    joining = {"GROUP": TILES_PER_GROUP, "HEADS": HEADS_AT_A_TIME}
    if num_groups:
        sum_heads[(triton.cdiv(num_groups, streams),)](
            plan.keys, head, offsets, num_bags, step[-1], num_tiles, num_groups,
            D=shape["D"], TILE=plan.tile, S=streams, **joining, num_warps=warps,
        )  # fmt: skip
    join_tiles[(triton.cdiv(num_tiles, JOINED_TILES),)](
        plan.keys, plan.plans, head, tail, tables[0], *step, num_tiles, num_groups, **options, TILES=JOINED_TILES, **joining
    )


def _factors(
    layout: Layout, capacity: int, offsets: Tensor, weights: Tensor | None, grad: Tensor, clip: float | None
) -> Tensor | None:
    """For each id the scale of its gradient; None if all are 1."""
    scales = _bag_scales(grad, offsets, layout, clip)
    if weights is None and scales is None:
        return None
    dtype = torch.float32 if grad.dtype == torch.bfloat16 else grad.dtype
    factors = torch.empty(capacity, dtype=dtype, device=grad.device)
    num_bags = offsets.numel() - 1
    tall, wide = _bags_and_ids(capacity, num_bags)
    scale_ids[(triton.cdiv(num_bags, tall),)](
        offsets, factors if weights is None else weights, factors if scales is None else scales, factors, num_bags,
        WEIGHTED=weights is not None, SCALED=scales is not None, BAGS=tall, L=wide, num_warps=4,
    )  # fmt: skip
    return factors


def _bags_and_ids(capacity: int, num_bags: int) -> tuple[int, int]:
    """Bags per program, and ids of each that it processes at once."""
    wide = min(32, triton.next_power_of_2(max(1, capacity // num_bags)))
    return max(1, 512 // wide), wide


@lru_cache(maxsize=64)
def device_scalars(scalars: tuple[float, ...], step: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What an update reads of a step: the optimizer's `scalars`, and for rounding the step as the bits of an int32."""
    return host_scalars(scalars, step, dtype).to(device, non_blocking=True)


def host_scalars(scalars: Sequence[float], step: int, dtype: torch.dtype) -> Tensor:
    """`device_scalars` in host memory."""
    numbers = np.array([*scalars, 0.0], np.float64 if dtype == torch.float64 else np.float32)
    if dtype != torch.float64:  # rows of FP64 are not rounded
        numbers.view(np.int32)[-1] = step & 0x7FFFFFFF
    return torch.from_numpy(numbers)


def _state_shapes(kind: RowOptimizerName) -> dict[str, int]:
    """Shapes of the first and the second state tensor, for the compiler: 0 where there is none, 1 for [N, 1], 2 for [N, D]."""
    shapes = [1 if tensor.is_per_row else 2 for tensor in ROW_OPTIMIZERS[kind].state]
    return dict(zip(("FIRST", "SECOND"), (*shapes, 0, 0), strict=False))


def _lanes(width: int) -> tuple[int, int]:
    """Warps per program, and streams that it processes side by side, where a lane holds 4 elements of a row."""
    warps = max(1, width // 128)
    return warps, 128 * warps // width


@lru_cache(maxsize=64)
def _shape(layout: Layout, itemsize: int, is_aligned: bool) -> dict[str, int]:
    """Widths as compile-time constants: the block size, the width if all tables have the same, and whether rows are aligned."""
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


class _LayoutTensors:
    """A layout as tensors on the device."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        def numbers(values: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(list(values), dtype=dtype, device=device)

        table_of = numbers(layout.table_of)
        widths = numbers([table.width for table in layout.tables])
        bases = [0, *itertools.accumulate(table.num_rows for table in layout.tables)]
        self.key_dtype = torch.int32 if bases[-1] < 2**31 else torch.int64
        self.no_key = torch.iinfo(self.key_dtype).max
        """The key of ids out of range and of unused capacity: it sorts last."""
        limits = numbers([layout.tables[table].num_rows for table in layout.table_of], torch.int64)
        columns = numbers(layout.columns)
        self.pooling = (table_of, widths, columns, numbers([int(mean) for mean in layout.is_mean]), limits)
        self.is_mean = torch.tensor(layout.is_mean, device=device).unsqueeze(1)
        """[F, 1]."""
        feature_base = numbers([bases[table] for table in layout.table_of], torch.int64)  # the key of row 0 of its table
        self.naming = (feature_base, limits)
        self.update = (widths, numbers(bases, torch.int64), table_of, columns)


_layout_tensors = lru_cache(maxsize=64)(_LayoutTensors)


@lru_cache(maxsize=64)
def _are_contiguous(
    layout: Layout, at: tuple[tuple[int, ...], ...], kind: RowOptimizerName, row_size: int, state_size: int
) -> bool:
    """Whether all tables have one width, and tables and each of their states are contiguous in memory; `at` are their addresses."""
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


def _table_addresses(tables: Sequence[Tensor], device: torch.device) -> tuple[Tensor, bool]:
    """Addresses of tables, as a tensor on the GPU, and whether all are multiples of 16 bytes."""
    return _cached_table_addresses(tuple([table.data_ptr() for table in tables]), device)


@lru_cache(maxsize=64)
def _cached_table_addresses(addresses: tuple[int, ...], device: torch.device) -> tuple[Tensor, bool]:
    return _addresses(addresses, device), all(address % 16 == 0 for address in addresses)


@lru_cache(maxsize=256)
def _addresses(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(addresses, dtype=torch.int64, device=device)


def _bag_scales(grad: Tensor, offsets: Tensor, layout: Layout, clip: float | None) -> Tensor | None:
    """The scale of each bag's gradient [F*B]: 1 / length for a mean, and clipping; None if all are 1."""
    if clip is None and not any(layout.is_mean):
        return None
    dtype = torch.float32 if grad.dtype == torch.bfloat16 else grad.dtype
    lengths = offsets.diff().view(layout.num_features, -1).clamp(min=1).to(dtype)
    scales = lengths.reciprocal() if all(layout.is_mean) else torch.ones_like(lengths)
    if any(layout.is_mean) and not all(layout.is_mean):
        is_mean = _layout_tensors(layout, grad.device).is_mean
        scales = torch.where(is_mean, lengths.reciprocal(), scales)
    if clip is not None:
        for feature in range(layout.num_features):
            norm = grad[:, layout.columns[feature] : layout.columns[feature + 1]].norm(dim=1, dtype=dtype)
            scales[feature] *= clip / norm.clamp(min=clip)
    return scales.view(-1)
