"""How the rows of coming batches get places, and the batches ids that are places: in system memory, or by a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from rowstead.data.batch import Sparse
from rowstead.stores.cache_slots import CacheSlots, Moves
from rowstead.stores.cache_slots_cpu import CpuCacheSlots
from rowstead.stores.groups import RowNames

ALIGNED_BYTES = 16
"""Of which addresses of tensors are multiples, unless they are parts of others."""


class CachePlan(Protocol):
    """Plans batches up to `number` at once; rows that batches from `oldest` on use stay.

    Returns what has to move for each group, and the ids of each batch as places. `make_room` is called after each group.
    """

    def __call__(
        self,
        batches: Sequence[Sparse],
        names: RowNames,
        groups: Sequence[CacheSlots],
        *,
        number: int,
        oldest: int,
        make_room: Callable[[], None],
    ) -> tuple[list[Moves], list[Tensor]]: ...


def plan_for(device: torch.device) -> CachePlan:
    return plan_in_memory if device.type == "cpu" else plan_by_launches


def cache_slots_for(num_rows: int, num_places: int, device: torch.device) -> CacheSlots:
    """The places that `plan_for` plans with."""
    if device.type == "cpu":
        return CpuCacheSlots(num_rows, num_places)
    from rowstead.stores.cache_slots_gpu import GpuCacheSlots

    return GpuCacheSlots(num_rows, num_places, device)


def plan_in_memory(
    batches: Sequence[Sparse],
    names: RowNames,
    groups: Sequence[CacheSlots],
    *,
    number: int,
    oldest: int,
    make_room: Callable[[], None],
) -> tuple[list[Moves], list[Tensor]]:
    """Ids are named by rows first, which any places take."""
    rows = [names.rows(sparse) for sparse in batches]
    moves = []
    for places, some in zip(groups, names.by_group(rows[0] if len(rows) == 1 else torch.cat(rows)), strict=True):
        moves.append(places.plan(some, number, oldest=oldest))
        make_room()
    place_of = [places.place_of for places in groups]
    return moves, [names.places(sparse, some, place_of) for sparse, some in zip(batches, rows, strict=True)]


def plan_by_launches(
    batches: Sequence[Sparse],
    names: RowNames,
    groups: Sequence[CacheSlots],
    *,
    number: int,
    oldest: int,
    make_room: Callable[[], None],
) -> tuple[list[Moves], list[Tensor]]:
    """Ids are named by places where they have one, all but those that are missing, in the pass that marks them."""
    from rowstead.stores.cache_slots_gpu import GpuCacheSlots

    ids, offsets = joined(batches)
    named, moves = names.blank(ids), []
    launched = list(zip(cast("Sequence[GpuCacheSlots]", groups), names.first_rows, names.starts, strict=True))
    for places, first_rows, start in launched:
        places.begin(number)
        places.mark(ids, offsets, first_rows, start, named)
        moves.append(places.plan_marked(number, oldest=oldest))
        make_room()
    for places, _, start in launched:
        places.name_left(named, start)
    of_each = named.split([sparse.ids.numel() for sparse in batches])
    # Kernels are compiled anew for tensors that begin anywhere.
    return moves, [some if some.data_ptr() % ALIGNED_BYTES == 0 else some.clone() for some in of_each]


def joined(batches: Sequence[Sparse]) -> tuple[Tensor, Tensor]:
    """The ids of all batches one after the other, and for each its offsets, of bags or of features as a whole: a launch for all is cheaper than one for each."""
    some = [sparse for sparse in batches if sparse.ids.numel()]
    if len(some) < 2:
        return (some or batches)[0].ids, (some or batches)[0].offsets
    return torch.cat([sparse.ids for sparse in some]), torch.stack([sparse.offsets[:: sparse.num_samples] for sparse in some])
