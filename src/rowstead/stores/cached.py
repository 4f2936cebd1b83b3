"""Tables larger than the memory in which they are trained: hot rows in places there, all rows in a backing behind them.

Whoever trains says early which batches are coming (`prefetch`). A thread then plans each of them in order: which of its rows
are missing, and which others make room, those first that no coming batch needs and that were used longest ago. It writes
those back, brings the missing ones in, and names each id of the batch by the place of its row. Training itself is a
DeviceStore's over the places. A row is trained in its place alone until it is written back, so nothing is ever stale.

A batch may need more rows than there are places: then there are more from then on, as that memory is taken.

Letters: B examples, F features, T tables, N rows, D width, nnz ids.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rowstead.data.batch import Sparse
from rowstead.kernels.check import check_gradient
from rowstead.kernels.layout import Layout
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.spec.run import Kernel
from rowstead.stores.backing import Backing, parts_behind
from rowstead.stores.base import EmbeddingStore, GraphRows
from rowstead.stores.cache_plans import CachePlan, cache_slots_for, plan_for
from rowstead.stores.cache_slots import GROWTH, Moves
from rowstead.stores.checked import check_batch
from rowstead.stores.device import DeviceStore, numbered
from rowstead.stores.exchange import Exchange, exchange_for
from rowstead.stores.groups import CacheGroup, RowNames, grouped, slots_layout
from rowstead.stores.prefetch_scheduler import AHEAD, PendingBatch, PrefetchScheduler
from rowstead.stores.state import StatePart

SET_IDS, MAX_SET = 1 << 24, 8
"""On a GPU batches are brought in by sets of about so many ids, so that small ones wait for the host less often."""
SETS_UNDER_WAY = AHEAD + 1
LIKE = 1.25
"""How many times as many ids as another a batch may have and still be like it."""
IDS_ASIDE = {"cpu": 1 << 14, "cuda": 1 << 20}
"""About how many ids a look-up that trains nothing takes at a time, by the device, where no more places are free."""

BackingFor = Callable[[CacheGroup], Backing]


def set_room(num_places: int, num_ids: float) -> float:
    """Places that a cache may come to: those that it was given, or what three batches may need if all their ids differ."""
    return max(num_places, GROWTH * SETS_UNDER_WAY * num_ids)


class CachedStore(EmbeddingStore):
    """An EmbeddingStore over places in fast memory and a backing.

    `places` gives for each table that is cached how many of its rows stay in fast memory; other tables are there whole. The
    places of tables of one width are shared. `backing` makes what is behind a group of them, filled with initial rows.
    """

    def __init__(
        self,
        layout: Layout,
        optimizer: SparseOptimizerSpec | None,
        *,
        places: Mapping[str, int],
        backing: BackingFor,
        seed: int = 1,
        kernel: Kernel = "auto",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        check: bool = True,
    ) -> None:
        super().__init__(layout, check=check)
        self.optimizer, self._device = optimizer, numbered(device)
        self._groups = grouped(layout.tables, places, dtype=dtype, optimizer=optimizer)
        self._names = RowNames(layout, self._groups, self._device)
        is_cuda = self._device.type == "cuda"
        # Steps wait for rows, so these go before all streams of a step.
        self._planning = torch.cuda.Stream(self._device, priority=-3) if is_cuda else None
        self._moving = torch.cuda.Stream(self._device, priority=-3) if is_cuda else None
        with self._on(self._planning):  # else memory that a plan still reads might go to others as soon as it is replaced
            self._places = [cache_slots_for(group.num_rows, group.num_places, self._device) for group in self._groups]
        self._backings = [backing(group) for group in self._groups]
        fast, self._first_place = slots_layout(layout, self._groups, [group.num_places for group in self._groups])
        self.resident = DeviceStore(
            fast, optimizer, seed=seed, kernel=kernel, device=device, dtype=dtype, check=False, in_line=False
        )
        """Trains the rows that are in fast memory: whole tables, then the places of each group as one table."""
        self.generation = 0
        """Rises whenever the memory of `resident` has moved."""
        self._max_set = MAX_SET
        """Batches that a GPU brings in at once at most."""
        self._num_ids_known = 0
        """Of the batch for which it was last decided how many are brought in at once."""
        self.num_rows_in = self.num_rows_out = 0
        """Rows that were brought in and written back so far."""
        self._plan: CachePlan = plan_for(self._device)
        self._exchange: Exchange = exchange_for(self._device)
        self._turns = PrefetchScheduler(self, moves_wait=not is_cuda)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> CachedStore:
        """Rows stay where they are when the model around them is moved."""
        return self

    @property
    def kernel(self) -> str:
        return self.resident.kernel

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def backings(self) -> Sequence[Backing]:
        return self._backings

    def graph_rows(self) -> GraphRows | None:
        return self if self.resident.graph_rows() is not None else None

    def limit_prefetch(self, num_batches: int) -> None:
        self._max_set = num_batches

    def figures(self) -> dict[str, float]:
        return {"num_rows_in": self.num_rows_in, "num_rows_out": self.num_rows_out}

    # Batches come and go

    @property
    def batches_ahead(self) -> int:
        """One set more on a GPU: planning waits there for what was queued when a batch was announced, and should not for the step beside it."""
        if not self._groups:
            return 0
        return self._turns.batches_ahead + (self._turns.set_size if self._planning is not None else 0)

    @property
    def num_kept(self) -> int:
        """Rows that stay in fast memory at most: as many as have places, or more where batches under way needed more at once."""
        return sum(places.num_kept for places in self._places)

    def prefetch(self, sparse: Sparse) -> None:
        """Bring in the rows of a batch that comes after all those announced before."""
        if self._groups:
            sparse = self.check_batch(sparse)
            if self._planning is not None and sparse.ids.numel() > LIKE * self._num_ids_known:
                self._num_ids_known = sparse.ids.numel()
                self._turns.set_size, self._turns.ahead = self._sets_like(sparse)
            self._turns.announce(sparse, self._recorded())

    def drop_prefetched(self) -> None:
        self.leave()
        self._turns.drop(self._recorded())

    def enter(self, sparse: Sparse) -> Sparse:
        """The same batch with ids that are places of `resident`, all its rows there until `leave`."""
        self.leave()
        if not self._groups:
            return dataclasses.replace(sparse, checked_for=self.resident.layout)
        coming = self._turns.enter(sparse, self._recorded)
        assert coming.here is not None
        if coming.arrived is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(coming.arrived)
            coming.here.ids.record_stream(current)
        return coming.here

    def leave(self) -> None:
        """Training on the batch that was entered last has ended, or is queued on the current stream."""
        if self._turns.current is not None:
            self._turns.leave(self._recorded())

    def _recorded(self, stream: Any = None) -> Any:
        """CUDA's event after what is queued now on a stream, or by whoever trains."""
        if self._planning is None:
            return None
        event = torch.cuda.Event()
        event.record(stream or torch.cuda.current_stream(self._device))
        return event

    @torch.no_grad()
    def _sets_like(self, sparse: Sparse) -> tuple[int, int]:
        """How many batches like this one are brought in at once, and how many such sets ahead of the one that is trained on.

        A set has no more batches than have room where placement has counted it. Rows of all sets under way stay, so where places
        are enough for two sets, a third would only take places from rows that come back.

        That is decided by a batch alone, and not by what threads have done meanwhile, so that equal runs have equal sets.
        """
        size, needs = min(self._max_set, SET_IDS // max(1, sparse.ids.numel())), []
        for places, rows in zip(self._places, self._names.by_group(self._names.rows(sparse)), strict=True):
            if num_rows := rows.unique().numel():
                size = min(size, int(set_room(places.num_places, rows.numel()) / (SETS_UNDER_WAY * num_rows)))
                needs.append((num_rows, places.num_places))
        size = max(1, size)
        return size, 1 if all(2 * size * num_rows <= num_places for num_rows, num_places in needs) else AHEAD

    # Rows come and go

    @torch.no_grad()
    def plan_rows(self, some: Sequence[PendingBatch], oldest: int, left: Any) -> Callable[[], None]:
        """Give the rows of some batches places, and the batches ids that are places; what is returned moves the rows.

        Rows that batches from `oldest` on use stay; of those before, a GPU is done with the event `left`.
        """
        with self._on(self._planning, *(coming.copied for coming in some)):
            all_moves, named = self._plan(
                [coming.sparse for coming in some], self._names, self._places,
                number=some[-1].number, oldest=oldest, make_room=self._make_room,
            )  # fmt: skip
            for coming, ids in zip(some, named, strict=True):
                coming.here = dataclasses.replace(coming.sparse, ids=ids, checked_for=self.resident.layout)
            planned = self._recorded(self._planning)

        def move() -> None:
            with self._on(self._moving, planned, left):
                for place, moves in enumerate(all_moves):
                    if self._moving is not None:
                        for tensor in vars(moves).values():
                            tensor.record_stream(self._moving)
                    self._move(place, moves)
                arrived = self._recorded(self._moving)
                for coming in some:
                    coming.arrived = arrived

        return torch.no_grad()(move)

    def _move(self, place: int, moves: Moves) -> None:
        self._exchange(self._fast_parts(place), moves, self._backings[place])
        self.num_rows_in += moves.in_rows.numel()
        self.num_rows_out += moves.out_rows.numel()

    def _fast_parts(self, place: int) -> list[Tensor]:
        """Rows and optimizer state of a group's places."""
        table = self._first_place + place
        return [self.resident.weights[table].detach(), *self.resident.row_states[table].values()]

    def _named(self, sparse: Sparse, rows: Tensor) -> Sparse:
        ids = self._names.places(sparse, rows, [places.place_of for places in self._places])
        return dataclasses.replace(sparse, ids=ids, checked_for=self.resident.layout)

    def _make_room(self) -> None:
        """See that there is memory for all places."""
        tables = self.resident.tables[self._first_place :]
        if any(places.capacity > table.num_rows for places, table in zip(self._places, tables, strict=True)):
            self._turns.make_room()

    def resize(self) -> None:
        """Move `resident` to memory for all places there are; nothing may be trained on or moved meanwhile."""
        self._settle()
        layout, _ = slots_layout(self.layout, self._groups, [places.capacity for places in self._places])
        self.resident.resize(layout)
        self.generation += 1
        self._settle()

    def _on(self, stream: Any, *events: Any) -> Any:
        """On a stream, after `events`; on a CPU, just now."""
        if stream is None:
            return contextlib.nullcontext()
        for event in events:
            if event is not None:
                stream.wait_event(event)
        return torch.cuda.stream(stream)

    # An EmbeddingStore

    def lookup(self, sparse: Sparse) -> Tensor:
        if self._check:
            sparse = check_batch(sparse, self.layout, self._device)
        if not self.training:
            return self._lookup_aside(sparse)
        return self.resident.lookup(self.enter(sparse))

    def update(self, sparse: Sparse, grad: Tensor, *, lr: float, step: int) -> None:
        here = self._turns.current
        if here is None or here.sparse.ids is not sparse.ids:
            if self._check:
                sparse = check_batch(sparse, self.layout, self._device)
            self.enter(sparse)
            here = self._turns.current
        if self._check:
            check_gradient(self.layout, sparse.offsets, grad)
        batch = sparse if here is None else here.here
        assert batch is not None
        self.resident.update(batch, grad, lr=lr, step=step)
        self.leave()

    @torch.no_grad()
    def _lookup_aside(self, sparse: Sparse) -> Tensor:
        """A look-up that leaves the places as they are: rows that have none are lent one for its duration."""
        at_a_time = max(IDS_ASIDE[self._device.type], sum(places.capacity - places.num_kept for places in self._places))
        num_parts = max(1, min(sparse.num_samples, -(-sparse.ids.numel() // at_a_time)))
        if num_parts > 1:
            borders = [sparse.num_samples * part // num_parts for part in range(num_parts + 1)]
            parts = [sparse.examples(*borders[part : part + 2]) for part in range(num_parts)]
            return torch.cat([self._lookup_aside(part) for part in parts])
        with self._turns.hold(), self._on(self._planning, self._recorded(), self._recorded(self._moving)):
            try:
                pooled = self._pooled_aside(sparse)
            except BaseException as error:
                self._turns.fail(error)
                raise
        if self._planning is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._planning)
            pooled.record_stream(current)
        return pooled

    def _pooled_aside(self, sparse: Sparse) -> Tensor:
        rows = self._names.rows(sparse)
        lent = []
        for place, names in enumerate(self._names.by_group(rows)):
            places = self._places[place]
            missing = places.missing(names)
            borrowed = places.lend(missing.numel(), is_aside=True)
            places.place_of[missing] = borrowed.int()
            self._make_room()
            none = missing[:0]
            self._exchange(self._fast_parts(place), Moves(missing, borrowed, none, none), self._backings[place])
            lent.append((places, missing, borrowed))
        pooled = self.resident.lookup(self._named(sparse, rows))
        for places, missing, borrowed in lent:
            places.place_of[missing] = -1
            places.give_back(borrowed)
        return pooled

    def rows(self, table: str, ids: Tensor) -> Tensor:
        part = next(part for part in self.parts() if part.name == f"{table}.rows")
        assert part.take is not None
        return part.take(ids.cpu()).to(ids.device)

    def parts(self) -> list[StatePart]:
        self._flush()
        behind = {table.name: (place, first) for place, group in enumerate(self._groups) for table, first in group.tables}
        whole = {part.name: part for part in self.resident.parts()}
        parts: list[StatePart] = []
        for table in self.tables:
            if table.name in behind:
                place, first = behind[table.name]
                parts += parts_behind(
                    table, first, self._groups[place], self._backings[place], before_write=self._forget_places
                )
            else:
                parts += [part for name, part in whole.items() if name.rpartition(".")[0] == table.name]
        return parts

    @torch.no_grad()
    def _flush(self) -> None:
        """Write all rows that have places back, and leave them there."""
        self.leave()
        with self._turns.hold() as left, self._on(self._planning, left, self._recorded(self._moving)):
            for place, places in enumerate(self._places):
                rows, taken = places.taken()
                none = rows[:0]
                self._exchange(self._fast_parts(place), Moves(none, none, rows, taken), self._backings[place])
            self._settle()

    def _settle(self) -> None:
        """Until a GPU has written all that it was told to."""
        if self._planning is not None:
            torch.cuda.synchronize(self._device)

    def _forget_places(self) -> None:
        """Rows behind are about to change: none is in a place any more."""
        self.drop_prefetched()
        with self._turns.hold(), self._on(self._planning):
            self._settle()
            for places in self._places:
                places.clear()

    def close(self) -> None:
        """Give back what is behind the places; the store is of no use afterwards."""
        self.drop_prefetched()
        with self._turns.hold(even_broken=True):
            self._settle()
            for backing in self._backings:
                backing.close()
