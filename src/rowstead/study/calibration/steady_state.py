"""Builds models whose caches are in the steady state of a long run: full of the hottest rows, over files with all rows written."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rowstead.data.batch import Batch, Sparse
from rowstead.plan.caching import BATCHES_COUNTED
from rowstead.spec.caching import MAX_SET, SETS_IN_FLIGHT
from rowstead.stores.ssd import FileRows
from rowstead.study.calibration.steps import DRAWN_IDS, MAX_BATCHES, Shape, Steps, sample_batches
from rowstead.training.build import build_model
from rowstead.training.step import Stepper

ROWS_AT_A_TIME = 1 << 14
REWRITTEN_SHARE = 0.6
"""Share of the rows written twice: more than the spare capacity of a new file, so that it is compacted from then on."""
STEADY_STATE_STEPS = 16
"""Steps taken before measuring."""
USES_AGAIN = (0, 4, 16)
"""Rows used by at least this many of the last batches are read once more when a cache is filled, so that it ranks them as hotter."""
FIRST, LAST = 3, 2
"""Steps of a turn that do not count: the first were not prefetched, and nothing is prefetched after the last."""


@dataclass(frozen=True)
class SampledBatches:
    """The batches of a model, and its rows by how hot they are after all batches."""

    batches: list[Batch]
    hottest: NDArray[np.int64]
    """[F, N]: the rows of each table, most frequently used in the last batches first, then most recently used first."""
    uses: NDArray[np.int64]
    """[F, N]: how many of the last batches used each row, in the same order."""

    @classmethod
    def of(
        cls, shape: Shape, device: torch.device, *, most_batches: int = MAX_BATCHES, most_ids: int = DRAWN_IDS
    ) -> SampledBatches:
        """Sample batches of a shape whose tables have one feature each."""
        batches = sample_batches(shape, device, most_batches=most_batches, most_ids=most_ids)
        uses, last = torch.zeros(2, shape.num_sparse, shape.num_rows, dtype=torch.int64, device=device)
        for number, batch in enumerate(batches):
            ids = batch.sparse.ids.view(shape.num_sparse, -1)
            if number >= len(batches) - BATCHES_COUNTED:
                uses += torch.zeros_like(uses, dtype=torch.bool).scatter_(1, ids, value=True)
            last.scatter_(1, ids, number + 1)
        order = torch.argsort(uses * (len(batches) + 1) + last, dim=1, descending=True, stable=True)
        return cls(batches, order.cpu().numpy(), uses.gather(1, order).cpu().numpy())

    def fill_batches(self, sparse: Sparse, num_kept: int) -> Iterator[Sparse]:
        """Yield batches that read the `num_kept` hottest rows of each table, colder rows first and hotter rows more often."""
        num_features = len(self.hottest)
        of_feature = sparse.ids.numel() // num_features
        for least in USES_AGAIN:
            count = min(num_kept, int((self.uses >= least).sum(axis=1).max()))
            for stop in range(count, 0, -of_feature):
                ranks = np.arange(stop - of_feature, stop) % max(1, count)
                ids = torch.from_numpy(self.hottest[:, ranks].reshape(-1)).to(sparse.ids.device)
                yield dataclasses.replace(sparse, ids=ids)


def run_to_steady_state(
    shape: Shape,
    device: torch.device,
    *,
    placement: Mapping[str, Any],
    kept_share: float,
    folder: str | Path,
    drawn: SampledBatches,
) -> Steps:
    """Build a model in the steady state of a long run, with rows in files under `folder` and this share of them cached."""
    spec = shape.spec(device.type, placement=placement, memory={"folder": str(folder)})
    model = build_model(spec, device, trains=True)
    store = model.store
    batches = drawn.batches
    if device.type == "cpu":  # drawn ids are always in range
        batches = [
            dataclasses.replace(one, sparse=dataclasses.replace(one.sparse, checked_for=store.layout)) for one in batches
        ]
    steps = Steps(shape, device, Stepper(model, spec.train, total_steps=1_000_000), batches)
    if store.backings and store.batches_ahead:
        for backing in store.backings:
            if isinstance(backing, FileRows):
                _write_all(backing)
        for sparse in drawn.fill_batches(batches[0].sparse, math.ceil(kept_share * shape.num_rows)):
            store.lookup(sparse)
        if device.type == "cuda":  # else all rows just read would count as in flight, and the GPU cache would grow for them
            for batch in batches[-SETS_IN_FLIGHT * MAX_SET :]:
                store.lookup(batch.sparse)
        store.drop_prefetched()
        for _ in steps.take(STEADY_STATE_STEPS):
            pass
    return steps


def mean_step_s(steps: Steps, count: int) -> float:
    """Return the mean seconds of `count` consecutive steps on a CPU."""
    ends = [time.perf_counter() for _ in steps.take(FIRST + count + LAST)]
    return (ends[FIRST - 1 + count] - ends[FIRST - 1]) / count


def _write_all(rows: FileRows) -> None:
    """Write every row in order, then a random part again, as evictions would; the values do not matter."""
    values = [torch.full((ROWS_AT_A_TIME, width), 0.01, dtype=dtype) for dtype, width in rows.columns]
    again = torch.randperm(rows.num_rows, generator=torch.Generator().manual_seed(1))[: int(REWRITTEN_SHARE * rows.num_rows)]
    for some in (*torch.arange(rows.num_rows).split(ROWS_AT_A_TIME), *again.split(ROWS_AT_A_TIME)):
        rows.write(some, [value[: len(some)] for value in values])
