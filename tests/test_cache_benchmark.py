"""What the benchmark of caches draws and compares; its timings are not tested."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cache_ssd import Round, prefetched, row_of
from benchmarks.skews import CriteoLike, criteo_like_exponent, share_of_hottest
from rowstead.data.batch import Batch, Sparse

SMALL = CriteoLike("small", 3, 3000, 8, 40, 50)


def test_one_row_in_a_hundred_takes_nine_accesses_in_ten() -> None:
    assert share_of_hottest(3000, criteo_like_exponent(3000)) == pytest.approx(0.9, abs=1e-6)
    assert 1.1 < criteo_like_exponent(500_000) < 1.3
    ids = SMALL.draw("cpu").ids.view(3, -1)
    for table in ids:
        counts = torch.bincount(table, minlength=3000).sort(descending=True).values
        assert 0.85 < int(counts[:30].sum()) / table.numel() < 0.95


def test_each_table_has_hot_rows_of_its_own_and_fresh_ids_come_every_time() -> None:
    first, second = SMALL.draw("cpu"), SMALL.draw("cpu")
    assert not torch.equal(first.ids, second.ids)
    hottest = [int(torch.bincount(table).argmax()) for table in first.ids.view(3, -1)]
    assert len(set(hottest)) == 3


def test_ranks_name_every_row_once() -> None:
    parts = [SMALL.of_ranks(start, start + 1000, "cpu").ids.view(3, -1) for start in (0, 1000, 2000)]
    assert torch.equal(torch.cat(parts, dim=1).sort(dim=1).values, torch.arange(3000).expand(3, -1))
    hottest = SMALL.of_ranks(0, 1, "cpu").ids
    assert [int(torch.bincount(table).argmax()) for table in SMALL.draw("cpu").ids.view(3, -1)] == hottest.tolist()


def test_a_store_hears_of_batches_before_they_come() -> None:
    class Listener:
        heard: list[int] = []  # noqa: RUF012

        def prefetch(self, sparse: Sparse) -> None:
            self.heard.append(int(sparse.ids[0]))

    batches = [
        Batch(
            dense=torch.zeros(1, 1),
            sparse=Sparse(ids=torch.tensor([number]), offsets=torch.tensor([0, 1]), num_features=1),
            labels=torch.zeros(1),
        )
        for number in range(6)
    ]
    store = Listener()
    seen = [(int(batch.sparse.ids[0]), len(store.heard)) for batch in prefetched(store, batches, 2)]  # type: ignore[arg-type]
    assert seen == [(0, 3), (1, 4), (2, 5), (3, 6), (4, 6), (5, 6)]


@pytest.mark.parametrize(("ram_s", "ssd_s", "expected"), [(0.01, 0.08, 0.5), (0.06, 0.08, 0.75)])
def test_possible_is_the_lesser_of_memory_and_disk(ram_s: float, ssd_s: float, expected: float) -> None:
    ssd = Round(ssd_s, misses=4000, bytes_read=1e6, bytes_written=1e6, bytes_cleaned=0, device_read_bytes=1e6)
    row = row_of(SMALL, "tables", [Round(ram_s)], [ssd], {"reads_per_s": 100_000})
    assert row["ssd_over_possible"] == pytest.approx(expected)
    assert row["device_read_share"] == 1
