"""A cache when things go wrong: failing reads, ids outside their table, threads that are slower than others."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from rowstead.data.batch import Sparse
from rowstead.kernels.layout import Layout, layout_of
from rowstead.spec.features import FeaturesSpec, SparseFeatureSpec, tables_of
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.stores.backing import RamRows
from rowstead.stores.cached import CachedStore
from rowstead.stores.device import DeviceStore
from rowstead.stores.groups import CacheGroup

OPTIMIZER = SparseOptimizerSpec(kind="rowwise_adagrad")


def layout_with(*names: str) -> Layout:
    features = FeaturesSpec(sparse=tuple(SparseFeatureSpec(name=name, num_rows=300) for name in names))
    return layout_of(features, tables_of(features, width=4))


def batch(layout: Layout, seed: int) -> Sparse:
    ids = torch.randint(0, 300, (20 * layout.num_features,), generator=torch.Generator().manual_seed(seed))
    return Sparse(ids=ids, offsets=torch.arange(ids.numel() + 1), num_features=layout.num_features)


class SlowRows(RamRows):
    """Rows that take a while."""

    def __init__(self, group: CacheGroup, pause_s: float) -> None:
        super().__init__(group, seed=1)
        self._pause_s = pause_s

    def read(self, rows: Tensor, into: Sequence[Tensor], slots: Tensor | None = None) -> None:
        time.sleep(self._pause_s)
        super().read(rows, into, slots)


class FailingRows(RamRows):
    """Rows whose next reads fail."""

    num_failures = 0

    def read(self, rows: Tensor, into: Sequence[Tensor], slots: Tensor | None = None) -> None:
        if self.num_failures and rows.numel():
            self.num_failures -= 1
            raise OSError("the disk failed")
        super().read(rows, into, slots)


def failing_store(layout: Layout) -> tuple[CachedStore, FailingRows]:
    store = CachedStore(layout, OPTIMIZER, num_slots={"a": 30}, backing=lambda group: FailingRows(group, seed=1))
    rows = store.backings[0]
    assert isinstance(rows, FailingRows)
    return store, rows


def test_rows_of_16_bits_behind_a_cache_become_the_same_each_time() -> None:
    layout = layout_with("a", "b")
    batches = [batch(layout, seed) for seed in range(20)]
    states = []
    for pause in (0.0, 0.002):
        store = CachedStore(
            layout,
            OPTIMIZER,
            num_slots={"a": 30, "b": 30},
            backing=lambda group, pause=pause: SlowRows(group, pause),
            dtype=torch.bfloat16,
        )
        for index, sparse in enumerate(batches):
            for coming in batches[index and index + 2 : index + 3]:
                store.prefetch(coming)
            store.update(sparse, torch.full_like(store.lookup(sparse), 0.1), lr=0.05, step=index + 1)
        states.append(store.state())
    assert [name for name in states[0] if not torch.equal(states[0][name], states[1][name])] == []


@pytest.mark.parametrize("trains", [True, False])
def test_a_row_that_failed_to_read_does_not_count_as_cached(trains: bool) -> None:
    layout = layout_with("a")
    store, rows = failing_store(layout)
    store.train(trains)
    rows.num_failures = 1
    with pytest.raises(OSError, match="the disk failed"):
        store.lookup(batch(layout, 1))
    try:
        again = store.lookup(batch(layout, 1))
    except OSError:
        return  # to stay broken is right as well
    assert torch.equal(again, DeviceStore(layout, OPTIMIZER).lookup(batch(layout, 1)))


def test_no_look_up_waits_forever_after_batches_that_failed() -> None:
    layout = layout_with("a")
    store, rows = failing_store(layout)

    def tries() -> None:
        for seed in range(5):
            rows.num_failures = 1
            sparse = batch(layout, seed)
            store.prefetch(sparse)
            with pytest.raises(OSError, match="the disk failed"):
                store.lookup(sparse)
            store.drop_prefetched()

    thread = threading.Thread(target=tries, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


def test_an_id_outside_its_table_is_refused_when_it_is_prefetched() -> None:
    program = """
import torch
from rowstead.spec.errors import DataError
from rowstead.data.batch import Sparse
from tests.stores.test_cached_faults import failing_store, layout_with
store, _ = failing_store(layout_with("a"))
sparse = Sparse(ids=torch.tensor([10**9]), offsets=torch.tensor([0, 1]), num_features=1)
try:
    store.prefetch(sparse)
    store.lookup(sparse)
except DataError:
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr[-500:]
