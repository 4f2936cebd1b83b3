"""CPU kernels on batches large enough for threads and for several passes of the sort."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor

from rowstead.kernels import reference
from rowstead.kernels.cpu import embedding as cpu
from rowstead.kernels.cpu.embedding_kernels import NEAR_BYTES
from rowstead.kernels.layout import Layout, layout_of
from rowstead.kernels.row_state import RowState, new_row_state
from rowstead.spec.errors import DataError
from rowstead.spec.features import FeaturesSpec, SparseFeatureSpec, TableSpec, tables_of
from rowstead.spec.row_optimizers import SparseOptimizerSpec

FEATURES = FeaturesSpec(
    sparse=(
        SparseFeatureSpec(name="deep", num_rows=300_000, width=4),
        SparseFeatureSpec(name="small", num_rows=50, pooling="mean"),
        SparseFeatureSpec(name="unread", num_rows=9),
        SparseFeatureSpec(name="left", table="shared"),
        SparseFeatureSpec(name="right", table="shared", pooling="mean"),
    ),
    tables=(TableSpec(name="shared", num_rows=5000),),
)
LAYOUT = layout_of(FEATURES, tables_of(FEATURES, width=12))
NUM_SAMPLES = 200


@contextmanager
def using_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def trained(kernels, threads: int, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[RowState], Tensor]:
    """Rows, states and the last look-up after three updates on the same batches."""
    with using_threads(threads):
        random = torch.Generator().manual_seed(5)
        rows = [torch.randn(t.num_rows, t.width, generator=random).to(dtype) for t in LAYOUT.tables]
        states = [new_row_state("adagrad", table) for table in rows]
        optimizer = SparseOptimizerSpec(kind="adagrad", clip=2.0)
        for step in (1, 2, 3):
            ids, offsets = batch(LAYOUT, random)
            grad = torch.randn(NUM_SAMPLES, LAYOUT.total_width, generator=random)
            pooled = kernels.lookup(rows, LAYOUT, ids, offsets)
            kernels.update(rows, states, LAYOUT, ids, offsets, None, grad, optimizer=optimizer, lr=0.1, step=step)
        return rows, states, pooled


def batch(layout: Layout, random: torch.Generator) -> tuple[Tensor, Tensor]:
    lengths = torch.randint(0, 30, (layout.num_features, NUM_SAMPLES), generator=random)
    lengths[2] = 0
    ids = [
        (layout.tables[table].num_rows * torch.rand(int(lengths[f].sum()), generator=random) ** 3).long()
        for f, table in enumerate(layout.table_of)
    ]
    return torch.cat(ids), torch.cat([torch.zeros(1, dtype=torch.int64), lengths.view(-1).cumsum(0)])


def test_any_number_of_threads_gives_the_same_bits() -> None:
    one, *others = (trained(cpu, threads) for threads in (1, 2, 5))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))
        assert all(torch.equal(a["sum"], b["sum"]) for a, b in zip(one[1], other[1], strict=True))
        assert torch.equal(one[2], other[2])


def test_large_batches_agree_with_the_reference() -> None:
    ours, theirs = trained(cpu, 2), trained(reference, 2)
    for mine, other in zip(ours[0], theirs[0], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[2], theirs[2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrong", [-1, 50])
def test_an_id_outside_its_table_is_named_before_it_is_read(wrong: int) -> None:
    ids, offsets = batch(LAYOUT, torch.Generator().manual_seed(1))
    index = int(offsets[NUM_SAMPLES]) + 7
    ids[index] = wrong
    rows = [torch.zeros(t.num_rows, t.width) for t in LAYOUT.tables]
    with pytest.raises(
        DataError, match=rf"id {wrong} of example \d+, feature 1 \(table `small`\) is outside its table, whose rows are 0 to 49"
    ):
        cpu.lookup(rows, LAYOUT, ids, offsets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_rows_of_any_format_have_the_same_bits_after_any_number_of_threads(dtype: torch.dtype) -> None:
    one, *others = (trained(cpu, threads, dtype) for threads in (1, 2, 5))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))


@pytest.mark.parametrize(("num_samples", "is_far"), [(400, False), (2000, True)])
def test_one_large_table_is_shared_by_threads_with_the_same_result(num_samples: int, is_far: bool) -> None:
    assert (4 * num_samples * 20 > NEAR_BYTES) == is_far  # gradients that have to be asked for ahead
    features = FeaturesSpec(sparse=(SparseFeatureSpec(name="only", num_rows=1000),))
    layout = layout_of(features, tables_of(features, width=20))
    random = torch.Generator().manual_seed(2)
    ids = (1000 * torch.rand(8000, generator=random) ** 3).int()
    offsets = torch.arange(0, 8001, 8000 // num_samples)
    grad = torch.randn(num_samples, 20, generator=random)
    results = []
    for kernels, threads in ((cpu, 1), (cpu, 4), (reference, 1)):
        with using_threads(threads):
            rows = [torch.ones(1000, 20)]
            states = [new_row_state("rowwise_adagrad", rows[0])]
            optimizer = SparseOptimizerSpec(kind="rowwise_adagrad")
            kernels.update(rows, states, layout, ids, offsets, None, grad, optimizer=optimizer, lr=0.1, step=1)
            results.append(rows[0])
    assert torch.equal(results[0], results[1])
    torch.testing.assert_close(results[0], results[2], rtol=1e-5, atol=1e-6)


# Hogwild


def in_threads(*works: Callable[[], None]) -> None:
    with ThreadPoolExecutor(len(works)) as pool:
        for future in [pool.submit(work) for work in works]:
            future.result()


def test_hogwild_threads_on_disjoint_rows_do_not_disturb_each_other() -> None:
    features = FeaturesSpec(sparse=(SparseFeatureSpec(name="a", num_rows=4000),))
    layout = layout_of(features, tables_of(features, width=16))
    optimizer = SparseOptimizerSpec(kind="adagrad")

    def work(rows: list[Tensor], states: list[RowState], parity: int) -> None:
        ids, offsets = torch.arange(parity, 4000, 2), torch.arange(2001)
        grad = torch.randn(2000, 16, generator=torch.Generator().manual_seed(parity))
        for step in range(1, 21):
            cpu.update(rows, states, layout, ids, offsets, None, grad, optimizer=optimizer, lr=0.1, step=step)

    results = []
    for together in (True, False):
        rows, states = [torch.ones(4000, 16)], [{"sum": torch.zeros(4000, 16)}]
        works = [partial(work, rows, states, parity) for parity in (0, 1)]
        with using_threads(1):
            if together:
                in_threads(*works)
            else:
                for one in works:
                    one()
        results.append((rows[0], states[0]["sum"]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_hogwild_threads_on_the_same_rows_lose_few_updates() -> None:
    features = FeaturesSpec(sparse=(SparseFeatureSpec(name="a", num_rows=500),))
    layout = layout_of(features, tables_of(features, width=16))
    rows: list[Tensor] = [torch.zeros(500, 16)]
    optimizer = SparseOptimizerSpec(kind="sgd")
    ids, offsets = torch.arange(500), torch.arange(501)

    def work(order: Tensor) -> None:
        for step in range(1, 201):
            grad = torch.full((500, 16), -1.0)
            cpu.update(rows, [{}], layout, order, offsets, None, grad, optimizer=optimizer, lr=1.0, step=step)

    with using_threads(1):
        in_threads(partial(work, ids), partial(work, ids.flip(0)))
    assert bool(rows[0].isfinite().all())
    assert rows[0].max().item() <= 400
    assert rows[0].mean().item() > 0.6 * 400  # a single thread gives half
