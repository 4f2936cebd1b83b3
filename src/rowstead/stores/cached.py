"""Tables larger than the memory in which they are trained: hot rows in slots of fast memory, all rows in a backing behind them.

The training loop prefetches the next batches (`prefetch`). A thread plans them in order: which rows are missing, and which rows are
evicted for them, least frequently used first among those that no coming batch needs. It writes these back, fetches the missing ones,
and maps each id of the batch to the slot of its row. A DeviceStore over the slots then trains. A row is trained only in its slot until
it is written back, so no copy is ever stale.

A batch may need more rows than there are slots: then the cache grows, and stays larger.

Letters: B examples, F features, T tables, N rows, D width, nnz ids.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rowstead.data.batch import Sparse
from rowstead.kernels.check import check_gradient
from rowstead.kernels.layout import Layout
from rowstead.spec.caching import GROWTH, MAX_SET, SET_IDS, SETS_AHEAD, SETS_IN_FLIGHT
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.spec.run import Kernel
from rowstead.stores.backing import Backing, move_rows, move_rows_over_bus, parts_behind
from rowstead.stores.base import EmbeddingStore, GraphRows
from rowstead.stores.cache_slots import CacheSlots, CpuCacheSlots, Moves, plan_set
from rowstead.stores.device import DeviceStore, resolve_device
from rowstead.stores.groups import CacheGroup, IdMapper, group_tables, slots_layout
from rowstead.stores.prefetch_scheduler import PendingBatch, PrefetchScheduler
from rowstead.stores.state import StatePart

SIMILAR = 1.25
"""A batch with up to this many times the ids of another is fetched in sets of the same size."""
EVALUATION_IDS = {"cpu": 1 << 14, "cuda": 1 << 20}
"""About how many ids an evaluation look-up handles at a time, by device, where no more slots are free."""

BackingFor = Callable[[CacheGroup], Backing]


def max_capacity(num_slots: int, num_ids: float) -> float:
    """Slots that a cache may grow to: its own, or what three batches need if all their ids differ."""
    return max(num_slots, GROWTH * SETS_IN_FLIGHT * num_ids)


class CachedStore(EmbeddingStore):
    """An EmbeddingStore over slots in fast memory and a backing.

    `num_slots` gives for each cached table how many of its rows stay in fast memory; other tables are there whole. Tables of one
    width share their slots. `backing` makes what is behind one such group, filled with initial rows.
    """

    def __init__(
        self,
        layout: Layout,
        optimizer: SparseOptimizerSpec | None,
        *,
        num_slots: Mapping[str, int],
        backing: BackingFor,
        seed: int = 1,
        kernel: Kernel = "auto",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        check: bool = True,
    ) -> None:
        super().__init__(layout, check=check)
        self.optimizer, self._device = optimizer, resolve_device(device)
        self._groups = group_tables(layout.tables, num_slots, dtype=dtype, optimizer=optimizer)
        self._mapper = IdMapper(layout, self._groups, self._device)
        is_cuda = self._device.type == "cuda"
        self._plan_set, self._move_rows = plan_set, move_rows
        new_slots: Callable[[int, int], CacheSlots] = CpuCacheSlots
        if is_cuda:
            from rowstead.stores.cache_slots_gpu import GpuCacheSlots, plan_set_on_gpu

            self._plan_set, self._move_rows = plan_set_on_gpu, move_rows_over_bus
            new_slots = functools.partial(GpuCacheSlots, device=self._device)
        # Steps wait for rows, so these streams have a higher priority than all streams of a step.
        self._planning = torch.cuda.Stream(self._device, priority=-3) if is_cuda else None
        self._moving = torch.cuda.Stream(self._device, priority=-3) if is_cuda else None
        with self._on(self._planning):  # allocated there, so that torch reuses this memory only after the plans that read it
            self._slots = [new_slots(group.num_rows, group.num_slots) for group in self._groups]
        self.backings = [backing(group) for group in self._groups]
        fast, self._first_group = slots_layout(layout, self._groups, [group.num_slots for group in self._groups])
        self.resident = DeviceStore(
            fast, optimizer, seed=seed, kernel=kernel, device=device, dtype=dtype, check=False, contiguous=False
        )
        """Trains the rows in fast memory: whole tables, then the slots of each group as one table."""
        self.generation = 0
        """Rises whenever the memory of `resident` has moved."""
        self._max_set = MAX_SET
        """Batches that a GPU fetches together at most."""
        self._max_ids_seen = 0
        """Ids of the batch by which the size of sets was last chosen."""
        self.num_rows_in = self.num_rows_out = 0
        """Rows fetched and written back so far."""
        self._scheduler = PrefetchScheduler(self, moves_block=not is_cuda)

    @property
    def kernel(self) -> str:
        return self.resident.kernel

    @property
    def device(self) -> torch.device:
        return self._device

    def graph_rows(self) -> GraphRows | None:
        return self if self.resident.graph_rows() is not None else None

    def limit_prefetch(self, num_batches: int) -> None:
        self._max_set = num_batches

    def figures(self) -> dict[str, float]:
        return {"num_rows_in": self.num_rows_in, "num_rows_out": self.num_rows_out}

    # Batches

    @property
    def batches_ahead(self) -> int:
        if not self._groups:
            return 0
        # One set more on a GPU: planning waits for what was queued before the prefetch, which must not be the step beside it.
        return self._scheduler.batches_ahead + (self._scheduler.set_size if self._planning is not None else 0)

    @property
    def num_kept(self) -> int:
        """Rows that stay in fast memory at most: the slots, or more where batches in flight needed more at once."""
        return sum(slots.num_kept for slots in self._slots)

    def prefetch(self, sparse: Sparse) -> None:
        if self._groups:
            sparse = self.check_batch(sparse)
            if self._planning is not None and sparse.ids.numel() > SIMILAR * self._max_ids_seen:
                self._max_ids_seen = sparse.ids.numel()
                self._scheduler.set_size, self._scheduler.ahead = self._choose_set_size(sparse)
            self._scheduler.prefetch(sparse, self._record_event())

    def drop_prefetched(self) -> None:
        self.leave()
        self._scheduler.drop(self._record_event())

    def enter(self, sparse: Sparse) -> Sparse:
        """The same batch with ids that are slots of `resident`; its rows stay there until `leave`."""
        self.leave()
        if not self._groups:
            return dataclasses.replace(sparse, checked_for=self.resident.layout)
        batch = self._scheduler.enter(sparse, self._record_event)
        assert batch.in_slots is not None
        if batch.fetched is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(batch.fetched)
            batch.in_slots.ids.record_stream(current)
        return batch.in_slots

    def leave(self) -> None:
        """End training on the batch that was entered last; its work is done, or queued on the current stream."""
        if self._scheduler.current is not None:
            self._scheduler.leave(self._record_event())

    def _record_event(self, stream: Any = None) -> Any:
        """CUDA event after what is queued now on a stream, by default the current one; None on a CPU."""
        if self._planning is None:
            return None
        event = torch.cuda.Event()
        event.record(stream or torch.cuda.current_stream(self._device))
        return event

    @torch.no_grad()
    def _choose_set_size(self, sparse: Sparse) -> tuple[int, int]:
        """How many batches like this one to fetch together, and how many such sets ahead of the one that is trained on.

        All sets in flight must fit the capacity that the planner counted. Their rows stay in slots, so where two sets fit the slots, a
        third would only evict rows that are needed again.

        Depends on the batch only, not on the timing of threads, so that equal runs have equal sets.
        """
        size, needs = min(self._max_set, SET_IDS // max(1, sparse.ids.numel())), []
        for slots, rows in zip(self._slots, self._mapper.split_by_group(self._mapper.rows(sparse)), strict=True):
            if num_rows := rows.unique().numel():
                size = min(size, int(max_capacity(slots.num_slots, rows.numel()) / (SETS_IN_FLIGHT * num_rows)))
                needs.append((num_rows, slots.num_slots))
        size = max(1, size)
        return size, 1 if all(2 * size * num_rows <= num_slots for num_rows, num_slots in needs) else SETS_AHEAD

    # Rows

    @torch.no_grad()
    def plan_rows(self, batches: Sequence[PendingBatch], oldest: int, left: Any) -> Callable[[], None]:
        """Assign slots to the rows of some batches, and map their ids to slots; the returned function moves the rows.

        Rows that batches from `oldest` on use stay; with earlier ones a GPU is done after the event `left`.
        """
        with self._on(self._planning, *(batch.copied for batch in batches)):
            all_moves, mapped = self._plan_set(
                [batch.sparse for batch in batches], self._mapper, self._slots,
                number=batches[-1].number, oldest=oldest, grow=self._grow,
            )  # fmt: skip
            for batch, ids in zip(batches, mapped, strict=True):
                batch.in_slots = dataclasses.replace(batch.sparse, ids=ids, checked_for=self.resident.layout)
            planned = self._record_event(self._planning)

        def move() -> None:
            with self._on(self._moving, planned, left):
                for group, moves in enumerate(all_moves):
                    if self._moving is not None:
                        for tensor in vars(moves).values():
                            tensor.record_stream(self._moving)
                    self._move(group, moves)
                    self.num_rows_in += moves.in_rows.numel()
                    self.num_rows_out += moves.out_rows.numel()
                fetched = self._record_event(self._moving)
                for batch in batches:
                    batch.fetched = fetched

        return torch.no_grad()(move)

    def _move(self, group: int, moves: Moves) -> None:
        """Move rows and optimizer states between a group's slots and its backing."""
        table = self._first_group + group
        parts = [self.resident.weights[table].detach(), *self.resident.row_states[table].values()]
        self._move_rows(parts, moves, self.backings[group])

    def _grow(self) -> None:
        """Resize `resident` if there are more slots than it has memory for."""
        tables = self.resident.tables[self._first_group :]
        if any(slots.capacity > table.num_rows for slots, table in zip(self._slots, tables, strict=True)):
            self._scheduler.grow()

    def resize(self) -> None:
        """Move `resident` to memory for all slots; nothing may be trained on or moved meanwhile."""
        self._synchronize()
        layout, _ = slots_layout(self.layout, self._groups, [slots.capacity for slots in self._slots])
        self.resident.resize(layout)
        self.generation += 1
        self._synchronize()

    def _on(self, stream: Any, *events: Any) -> Any:
        """Context in which work is queued on a stream, after `events`; no-op on a CPU."""
        if stream is None:
            return contextlib.nullcontext()
        for event in events:
            if event is not None:
                stream.wait_event(event)
        return torch.cuda.stream(stream)

    # An EmbeddingStore

    def lookup(self, sparse: Sparse) -> Tensor:
        sparse = self.check_batch(sparse)
        if not self.training:
            return self._evaluate(sparse)
        return self.resident.lookup(self.enter(sparse))

    def update(self, sparse: Sparse, grad: Tensor, *, lr: float, step: int) -> None:
        current = self._scheduler.current
        if current is None or current.sparse.ids is not sparse.ids:
            sparse = self.check_batch(sparse)
            self.enter(sparse)
            current = self._scheduler.current
        if self._check:
            check_gradient(self.layout, sparse.offsets, grad)
        batch = sparse if current is None else current.in_slots
        assert batch is not None
        self.resident.update(batch, grad, lr=lr, step=step)
        self.leave()

    @torch.no_grad()
    def _evaluate(self, sparse: Sparse) -> Tensor:
        """A look-up that leaves the cache as it is: missing rows borrow a slot for its duration."""
        at_a_time = max(EVALUATION_IDS[self._device.type], sum(slots.capacity - slots.num_kept for slots in self._slots))
        num_parts = max(1, min(sparse.num_samples, -(-sparse.ids.numel() // at_a_time)))
        if num_parts > 1:
            borders = [sparse.num_samples * part // num_parts for part in range(num_parts + 1)]
            parts = [sparse.examples(*borders[part : part + 2]) for part in range(num_parts)]
            return torch.cat([self._evaluate(part) for part in parts])
        with self._scheduler.pause(), self._on(self._planning, self._record_event(), self._record_event(self._moving)):
            try:
                pooled = self._lookup_with_borrowed_slots(sparse)
            except BaseException as error:
                self._scheduler.fail(error)
                raise
        if self._planning is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._planning)
            pooled.record_stream(current)
        return pooled

    def _lookup_with_borrowed_slots(self, sparse: Sparse) -> Tensor:
        rows = self._mapper.rows(sparse)
        lent = []
        for group, of_group in enumerate(self._mapper.split_by_group(rows)):
            slots = self._slots[group]
            missing = slots.missing(of_group)
            borrowed = slots.borrow(missing.numel(), temporarily=True)
            slots.slot_of[missing] = borrowed.int()
            self._grow()
            none = missing[:0]
            self._move(group, Moves(missing, borrowed, none, none))
            lent.append((slots, missing, borrowed))
        ids = self._mapper.slots(sparse, rows, [slots.slot_of for slots in self._slots])
        pooled = self.resident.lookup(dataclasses.replace(sparse, ids=ids, checked_for=self.resident.layout))
        for slots, missing, borrowed in lent:
            slots.slot_of[missing] = -1
            slots.give_back(borrowed)
        return pooled

    def rows(self, table: str, ids: Tensor) -> Tensor:
        part = next(part for part in self.parts() if part.name == f"{table}.rows")
        return part.take(ids.cpu()).to(ids.device)

    def parts(self) -> list[StatePart]:
        self._write_back()
        behind = {table.name: (index, first) for index, group in enumerate(self._groups) for table, first in group.tables}
        whole = {part.name: part for part in self.resident.parts()}
        parts: list[StatePart] = []
        for table in self.tables:
            if table.name in behind:
                index, first = behind[table.name]
                group, backing = self._groups[index], self.backings[index]
                parts += parts_behind(table, first, group, backing, before_write=self._empty_slots)
            else:
                parts += [part for name, part in whole.items() if name.rpartition(".")[0] == table.name]
        return parts

    @torch.no_grad()
    def _write_back(self) -> None:
        """Write all rows in slots to the backing; they stay in their slots."""
        self.leave()
        with self._scheduler.pause() as left, self._on(self._planning, left, self._record_event(self._moving)):
            for group, slots in enumerate(self._slots):
                rows, taken = slots.taken()
                none = rows[:0]
                self._move(group, Moves(none, none, rows, taken))
            self._synchronize()

    def _synchronize(self) -> None:
        if self._planning is not None:
            torch.cuda.synchronize(self._device)

    def _empty_slots(self) -> None:
        """Empty the cache: rows in the backing are about to change."""
        self.drop_prefetched()
        with self._scheduler.pause(), self._on(self._planning):
            self._synchronize()
            for slots in self._slots:
                slots.clear()

    def close(self) -> None:
        self.drop_prefetched()
        with self._scheduler.pause(even_failed=True):
            self._synchronize()
            for backing in self.backings:
                backing.close()
