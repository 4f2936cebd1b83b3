"""Measures look-ups and updates of rows, by the bytes of a row and by the bytes of the memory range that holds the rows.

Letters: D width, L ids of a bag.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rowstead.kernels.choose import kernels_for
from rowstead.kernels.cpu.memory import advise_huge_pages
from rowstead.kernels.layout import Layout
from rowstead.kernels.row_state import RowState, new_row_state, step_scalars
from rowstead.spec.curve import Curve, CurveAxis
from rowstead.spec.features import Table
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.study.calibration.clock import Clock

WIDTHS = {"cpu": (16, 64, 128, 256), "cuda": (16, 64, 128)}
"""On a GPU each width compiles several kernels."""
WITHIN_BYTES = {
    "cpu": (1 << 20, 8 << 20, 32 << 20, 128 << 20, 512 << 20, 2 << 30),
    "cuda": (8 << 20, 32 << 20, 128 << 20, 1 << 30, 16 << 30),
}
NUM_IDS = {"cpu": 1 << 15, "cuda": 1 << 21}
"""Ids per call: so many that its fixed time is negligible."""
POOL = {"cpu": 1 << 20, "cuda": 1 << 21}
"""Ids drawn in advance; each call on a CPU uses other ones."""
LONG_BAG, UPDATED_BAG = 16, 4
HOT_ROWS = {"cpu": 64, "cuda": 4096}
"""Few enough for the fastest cache, and on a GPU enough that no kernel program reduces most of the partial sums."""
PLANNED_IDS = (1 << 12, 1 << 15, 1 << 18, 1 << 21, 1 << 23)
BAG_BYTES = {"cpu": 4 << 20, "cuda": 1 << 28}
"""Most pooled bytes of a call that measures bags: on a CPU few enough that the allocator reuses their memory."""
LEAST_S = 1e-12
OPTIMIZER = SparseOptimizerSpec()


class RowBenchmark:
    """Rows of one width within a part of a larger memory, and batches of their ids."""

    def __init__(self, clock: Clock, memory: Tensor, width: int, within_bytes: int) -> None:
        self._clock = clock
        num_rows = within_bytes // (4 * width)
        self.num_rows, self.width = num_rows, width
        self.table = memory[: num_rows * width].view(num_rows, width)
        self.layout = Layout(
            tables=(Table(name="rows", num_rows=num_rows, width=width, features=(0,)),),
            table_of=(0,),
            columns=(0, width),
            is_mean=(False,),
        )
        self.kernels: Any = kernels_for("auto", clock.device)[1]
        self._rng = torch.Generator(clock.device).manual_seed(1)
        self._turn = 0

    def batches(
        self, num_ids: int, bag: int, *, num_rows: int | None = None, are_distinct: bool = False
    ) -> Callable[[], tuple[Tensor, Tensor]]:
        """Return a function that gives ids and offsets of the next batch; on a GPU always the same one, so that a graph can replay it."""
        device, most = self._clock.device, num_rows or self.num_rows
        num_pool = max(POOL[device.type], num_ids)
        if are_distinct:
            pool = torch.cat([self._draw_distinct(most, num_ids) for _ in range(max(1, min(8, num_pool // num_ids)))])
        else:
            pool = self._draw(most, num_pool)
        pool = pool.int() if self._clock.is_cuda else pool  # as in training
        offsets = torch.arange(0, num_ids + 1, bag, device=device)
        num_batches = len(pool) // num_ids

        def batch() -> tuple[Tensor, Tensor]:
            if not self._clock.is_cuda:
                self._turn += 1
            first = self._turn % num_batches * num_ids
            return pool[first : first + num_ids], offsets

        return batch

    def _draw(self, num_rows: int, num_ids: int) -> Tensor:
        return torch.randint(num_rows, (num_ids,), generator=self._rng, device=self._clock.device)

    def _draw_distinct(self, num_rows: int, num_ids: int) -> Tensor:
        """Draw distinct rows in random order."""
        known = None if num_rows < 4 * num_ids else self._draw(num_rows, 2 * num_ids).unique()
        order = torch.randperm(num_rows if known is None else len(known), generator=self._rng, device=self._clock.device)
        return order[:num_ids] if known is None else known[order[:num_ids]]

    def lookup_s(self, num_ids: int, bag: int) -> float:
        """Return the seconds of a look-up."""
        batch = self.batches(num_ids, bag)
        return self._clock.seconds(lambda: self.kernels.lookup([self.table], self.layout, *batch()))

    def update_s(self, num_ids: int, *, num_rows: int | None = None, are_distinct: bool = False) -> float:
        """Return the seconds of an update; on a GPU only of the part that needs gradients."""
        num_ids = num_ids // UPDATED_BAG * UPDATED_BAG
        batch = self.batches(num_ids, UPDATED_BAG, num_rows=num_rows, are_distinct=are_distinct)
        states = [new_row_state(OPTIMIZER.kind, self.table)]
        grad = torch.full((num_ids // UPDATED_BAG, self.width), 1e-3, device=self._clock.device)
        if not self._clock.is_cuda:
            options = {"optimizer": OPTIMIZER, "lr": 0.01, "step": 1}
            return self._clock.seconds(
                lambda: self.kernels.update([self.table], states, self.layout, *batch(), None, grad, **options)
            )
        ids, offsets = batch()
        plan, numbers = self._plan_update(states, ids, offsets)
        return self._clock.seconds(
            lambda: self.kernels.apply_plan(
                plan, [self.table], self.layout, offsets, None, grad, optimizer=OPTIMIZER, scalars=numbers
            )
        )

    def plan_s(self, num_ids: int) -> float:
        """Return the seconds of planning an update, which a GPU does before there is a gradient."""
        ids, offsets = self.batches(num_ids, UPDATED_BAG)()
        states = [new_row_state(OPTIMIZER.kind, self.table)]
        return self._clock.seconds(lambda: self._plan_update(states, ids, offsets))

    def _plan_update(self, states: list[RowState], ids: Tensor, offsets: Tensor) -> tuple[Any, Tensor]:
        from rowstead.kernels.gpu.embedding import device_scalars

        numbers = device_scalars(tuple(step_scalars(OPTIMIZER, lr=0.01, step=1)), 1, torch.float32, self._clock.device)
        plan = self.kernels.plan_update([self.table], states, self.layout, ids, offsets, optimizer=OPTIMIZER, scalars=numbers)
        return plan, numbers


def measure_rows(clock: Clock, free_bytes: int, *, is_short: bool = False) -> dict[str, Any]:
    """Measure look-ups and updates, within at most a third of the free memory; returns the fields of `Timings` about rows."""
    kind = clock.device.type
    within = [one for one in WITHIN_BYTES[kind] if 3 * one <= free_bytes] or [WITHIN_BYTES[kind][0]]
    within = within[::2] if is_short else within
    widths = WIDTHS[kind][::2] if is_short else WIDTHS[kind]
    memory = advise_huge_pages(torch.empty(within[-1] // 4, device=clock.device)).zero_()
    num_ids = NUM_IDS[kind]
    small = RowBenchmark(clock, memory, widths[0], within[0])
    lookup_call_s, update_call_s = small.lookup_s(64, LONG_BAG), small.update_s(64)

    read, updated, bags, ids = [], [], [], []
    for width in widths:
        rows = RowBenchmark(clock, memory, width, within[0])
        in_cache_s = (rows.lookup_s(num_ids, LONG_BAG) - lookup_call_s) / num_ids
        num_bags = min(num_ids, BAG_BYTES[kind] // (4 * width))
        of_one_s = (rows.lookup_s(num_bags, 1) - lookup_call_s) / num_bags
        bag_s = max(LEAST_S, (of_one_s - in_cache_s) / (1 - 1 / LONG_BAG))
        bags.append(bag_s)
        ids.append(
            max(LEAST_S, (rows.update_s(num_ids, num_rows=min(HOT_ROWS[kind], rows.num_rows)) - update_call_s) / num_ids)
        )
    for some in within:
        for index, width in enumerate(widths):
            rows = RowBenchmark(clock, memory, width, some)
            looked_s = (rows.lookup_s(num_ids, LONG_BAG) - lookup_call_s) / num_ids
            read.append(max(LEAST_S, looked_s - bags[index] / LONG_BAG))
            num = min(num_ids, rows.num_rows)
            updated_s = (rows.update_s(num, are_distinct=True) - update_call_s) / num
            updated.append(max(LEAST_S, updated_s - ids[index]))
    plan = None
    if clock.is_cuda:
        rows = RowBenchmark(clock, memory, 64, within[-1])
        planned = PLANNED_IDS[::2] if is_short else PLANNED_IDS
        axis = CurveAxis(name="ids", sizes=tuple(map(float, planned)))
        plan = Curve(axes=(axis,), seconds=tuple(rows.plan_s(num) for num in planned))
    by_row = CurveAxis(name="row_bytes", sizes=tuple(4.0 * width for width in widths))
    by_range = (CurveAxis(name="within_bytes", sizes=tuple(map(float, within)), grows=False), by_row)
    return {
        "read_row": Curve(axes=by_range, seconds=tuple(read)),
        "bag": Curve(axes=(by_row,), seconds=tuple(bags)),
        "lookup_call_s": lookup_call_s,
        "update_row": Curve(axes=by_range, seconds=tuple(updated)),
        "update_id": Curve(axes=(by_row,), seconds=tuple(ids)),
        "update_call_s": update_call_s,
        "plan": plan,
    }
