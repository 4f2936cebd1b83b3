"""Moves rows between places in fast memory and the backing behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rowstead.stores.backing import Backing, RamRows
from rowstead.stores.cache_slots import Moves

Exchange = Callable[[Sequence[Tensor], Moves, Backing], None]
"""Writes back what is in `moves.out_places` of rows and states [P, …], then fills `moves.in_places` from the backing."""


def exchange_for(device: torch.device) -> Exchange:
    return exchange_over_bus if device.type == "cuda" else exchange_in_memory


def exchange_in_memory(parts: Sequence[Tensor], moves: Moves, backing: Backing) -> None:
    """Places in system memory, over any backing."""
    backing.write(moves.out_rows, parts, moves.out_places)
    backing.read(moves.in_rows, parts, moves.in_places)


def exchange_over_bus(parts: Sequence[Tensor], moves: Moves, backing: Backing) -> None:
    """Places in the memory of a GPU, over rows in system memory: queued on the current stream, nothing waits."""
    from rowstead.kernels.gpu.cache import swap_rows

    assert isinstance(backing, RamRows), "a GPU reaches rows in system memory alone"
    for part, (behind, over_bus) in zip(parts, backing.seen, strict=True):
        swap_rows(part, behind, moves.in_rows, moves.in_places, moves.out_rows, moves.out_places, over_bus=over_bus)
