"""Triton kernels, on a real GPU where there is one and in Triton's interpreter elsewhere; tests/stores drives them too."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowstead.kernels import reference
from rowstead.kernels.layout import layout_of
from rowstead.kernels.row_state import NUM_SCALARS, new_row_state
from rowstead.spec.features import FeaturesSpec, SparseFeatureSpec, tables_of
from rowstead.spec.row_optimizers import ROW_OPTIMIZERS, SparseOptimizerSpec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@settings(max_examples=15 if DEVICE == "cpu" else 200, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([1, 1, 2, 3, 4, 5, 8, 27, 31, 32, 33, 36, 37, 64, 70, 200, 500]), min_size=1, max_size=12),
    seed=st.integers(0, 99),
)
def test_runs_of_equal_ids_are_summed_once_wherever_tiles_and_their_groups_end(lengths: list[int], seed: int) -> None:
    from rowstead.kernels.gpu import embedding as gpu

    with mock.patch.multiple(gpu, TILES_PER_GROUP=4, HEADS_AT_A_TIME=2):  # else no run here would fill a group
        _check_runs(lengths, seed)


def _check_runs(lengths: list[int], seed: int) -> None:
    from rowstead.kernels.gpu import embedding as gpu

    num_rows = len(lengths)
    features = FeaturesSpec(sparse=(SparseFeatureSpec(name="f", num_rows=num_rows),))
    layout = layout_of(features, tables_of(features, width=4))
    random = torch.Generator().manual_seed(seed)
    ids = torch.repeat_interleave(torch.arange(num_rows), torch.tensor(lengths))
    ids = ids[torch.randperm(len(ids), generator=random)]
    middle = int(torch.randint(0, len(ids) + 1, (), generator=random))
    offsets = torch.tensor([0, middle, len(ids)], device=DEVICE)
    grad = torch.randn(2, 4, generator=random, dtype=torch.float64).to(DEVICE)
    ours, theirs = (torch.zeros(num_rows, 4, dtype=torch.float64, device=DEVICE) for _ in range(2))
    # Capacity for more ids than there are must not matter.
    padded = torch.cat([ids, torch.full((seed,), 7)]).to(DEVICE)
    optimizer = SparseOptimizerSpec(kind="sgd")
    scalars = gpu.host_scalars([1.0, *[0.0] * (NUM_SCALARS - 1)], 1, torch.float64).to(DEVICE)
    plan = gpu.plan_update([ours], [{}], layout, padded, offsets, optimizer=optimizer, scalars=scalars)
    gpu.apply_plan(plan, [ours], layout, offsets, None, grad, optimizer=optimizer, scalars=scalars)
    reference.update([theirs], [{}], layout, ids.to(DEVICE), offsets, None, grad, optimizer=optimizer, lr=1.0, step=1)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("loss", [1.0, float("nan")])
def test_only_sums_that_were_made_are_joined(loss: float) -> None:
    """Runs that begin or end with a group of tiles, rows of two widths, and ids that are no rows, which fill groups too."""
    from rowstead.kernels.gpu import embedding as gpu

    lengths, none = ([32, 64, 33, 31, 16, 1], [15, 49, 96]), 70
    features = FeaturesSpec(sparse=tuple(SparseFeatureSpec(name=f"f{width}", num_rows=6, width=width) for width in (3, 4)))
    layout = layout_of(features, tables_of(features, width=4))
    runs = [torch.repeat_interleave(torch.arange(len(some)), torch.tensor(some)) for some in lengths]
    ids = torch.cat([*runs, torch.full((none,), 6)]).to(DEVICE)
    offsets = torch.tensor([0, len(runs[0]), len(ids)], device=DEVICE)
    grad = torch.randn(1, 7, dtype=torch.float64, device=DEVICE)
    tables = [torch.zeros(6, width, dtype=torch.float64, device=DEVICE) for width in (3, 4)]
    optimizer, scalars = (
        SparseOptimizerSpec(kind="sgd"),
        gpu.host_scalars([1.0, *[0.0] * (NUM_SCALARS - 1)], 1, torch.float64).to(DEVICE),
    )

    def unknown(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.full(shape, float("nan"), dtype=dtype, device=device)

    plan = gpu.plan_update(tables, [{}, {}], layout, ids, offsets, optimizer=optimizer, scalars=scalars)
    with mock.patch.multiple(gpu, TILES_PER_GROUP=2, HEADS_AT_A_TIME=2), mock.patch.object(torch, "empty", unknown):
        guard = torch.tensor(loss, device=DEVICE)
        gpu.apply_plan(plan, tables, layout, offsets, None, grad, optimizer=optimizer, scalars=scalars, guard=guard)
    for table, some, part in zip(tables, lengths, grad.split([3, 4], dim=1), strict=True):
        counts = torch.tensor([*some, *[0] * (6 - len(some))], device=DEVICE)[:, None]
        torch.testing.assert_close(table, -counts * part if loss == 1.0 else torch.zeros_like(table))


@pytest.mark.parametrize("kind", list(ROW_OPTIMIZERS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_rows_are_rounded_as_in_the_reference(dtype: torch.dtype, kind: str) -> None:
    from rowstead.kernels.gpu import embedding as gpu

    features = FeaturesSpec(sparse=(SparseFeatureSpec(name="f{i}", repeat=2, num_rows=40),))
    layout = layout_of(features, tables_of(features, width=8))
    random = torch.Generator().manual_seed(1)
    start = [(torch.randn(40, 8, generator=random) * scale).to(dtype) for scale in (1.0, 3e-5)]
    ours, theirs = ([rows.to(DEVICE).clone() for rows in start] for _ in range(2))
    states = [[new_row_state(kind, rows) for rows in tables] for tables in (ours, theirs)]
    optimizer = SparseOptimizerSpec(kind=kind)
    for step in (1, 2, 3):
        ids = torch.cat([torch.randperm(40, generator=random)[:30] for _ in range(2)]).to(DEVICE)
        offsets = torch.arange(0, 61, 10, device=DEVICE)
        grad = torch.randn(3, 16, generator=random).to(DEVICE) * 1e-3
        pooled = gpu.lookup(ours, layout, ids, offsets)
        assert pooled.dtype == torch.float32
        torch.testing.assert_close(pooled, reference.lookup(ours, layout, ids, offsets))
        for kernels, tables, state in ((gpu, ours, states[0]), (reference, theirs, states[1])):
            kernels.update(tables, state, layout, ids, offsets, None, grad, optimizer=optimizer, lr=0.1, step=step)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == dtype
        if kind == "sgd":
            assert torch.equal(mine, other)
        torch.testing.assert_close(mine, other, rtol=2**-6, atol=2**-23)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_that_are_no_rows_are_left_out(dtype: torch.dtype) -> None:
    from rowstead.kernels.gpu import embedding as gpu

    features = FeaturesSpec(sparse=(SparseFeatureSpec(name="f{i}", repeat=2, num_rows=5),))
    layout = layout_of(features, tables_of(features, width=4))
    ours = [torch.randn(5, 4, device=DEVICE) for _ in range(2)]
    theirs = [rows.clone() for rows in ours]
    wrong = torch.tensor([5, 1, -1, 2, 4, 2**31 - 1, 0, 3], dtype=dtype, device=DEVICE)
    right = torch.tensor([1, 2, 4, 0, 3], dtype=dtype, device=DEVICE)
    offsets, others = torch.tensor([0, 4, 8], device=DEVICE), torch.tensor([0, 2, 5], device=DEVICE)
    torch.testing.assert_close(gpu.lookup(ours, layout, wrong, offsets), reference.lookup(theirs, layout, right, others))
    optimizer, grad = SparseOptimizerSpec(kind="sgd"), torch.randn(1, 8, device=DEVICE)
    gpu.update(ours, [{}, {}], layout, wrong, offsets, None, grad, optimizer=optimizer, lr=1.0, step=1)
    reference.update(theirs, [{}, {}], layout, right, others, None, grad, optimizer=optimizer, lr=1.0, step=1)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("is_mean", [False, True])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_pooled_rows_and_gradients_in_bf16_differ_by_their_own_rounding_only(clip: float | None, is_mean: bool) -> None:
    from rowstead.kernels.gpu import embedding as gpu

    pooling = "mean" if is_mean else "sum"
    features = FeaturesSpec(sparse=(SparseFeatureSpec(name="f{i}", repeat=2, num_rows=5, pooling=pooling),))  # type: ignore[arg-type]
    layout = layout_of(features, tables_of(features, width=8))
    random = torch.Generator().manual_seed(3)
    ours = [torch.randn(5, 8, generator=random).to(DEVICE) for _ in range(2)]
    theirs = [rows.clone() for rows in ours]
    states = [[new_row_state("rowwise_adagrad", rows) for rows in tables] for tables in (ours, theirs)]
    ids = torch.randint(0, 5, (90,), generator=random).to(DEVICE)
    offsets = torch.tensor([0, 40, 45, 45, 90], device=DEVICE)
    pooled = gpu.lookup(ours, layout, ids, offsets, dtype=torch.bfloat16)
    exact = gpu.lookup(ours, layout, ids, offsets)
    torch.testing.assert_close(pooled.float(), exact, rtol=2**-7, atol=0)  # the interpreter truncates
    if DEVICE == "cuda":
        assert torch.equal(pooled, exact.bfloat16())
    grad = torch.randn(2, 16, generator=random).bfloat16().to(DEVICE)
    optimizer = SparseOptimizerSpec(kind="rowwise_adagrad", clip=clip)
    for tables, state, each in zip((ours, theirs), states, (grad, grad.float()), strict=True):
        gpu.update(tables, state, layout, ids, offsets, None, each, optimizer=optimizer, lr=0.1, step=1)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
        assert mine.dtype == torch.float32


@pytest.mark.parametrize("kind", list(ROW_OPTIMIZERS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_that_follow_each_other_in_memory_end_at_the_same_bits(dtype: torch.dtype, kind: str) -> None:
    from rowstead.kernels.gpu import embedding as gpu

    sizes, width = [7, 40, 3], 12
    features = FeaturesSpec(sparse=tuple(SparseFeatureSpec(name=f"f{n}", num_rows=n) for n in sizes))
    layout = layout_of(features, tables_of(features, width=width))
    random = torch.Generator().manual_seed(5)
    slab = torch.randn(sum(sizes), width, generator=random).to(DEVICE, dtype)
    contiguous, separate = list(slab.split(sizes)), [rows.clone() for rows in slab.split(sizes)]
    whole = {name: value.split(sizes) for name, value in new_row_state(kind, slab).items()}
    states = [{name: parts[table] for name, parts in whole.items()} for table in range(3)]
    others = [new_row_state(kind, rows) for rows in separate]
    optimizer = SparseOptimizerSpec(kind=kind)  # type: ignore[arg-type]
    scalars = gpu.host_scalars([0.1, 1e-8, 0.1, 0.001, 1.0], 1, torch.float32).to(DEVICE)
    for _ in range(3):
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randint(0, 9, (12,), generator=random).cumsum(0)])
        ids = torch.cat(
            [torch.randint(0, sizes[b // 4], (int(offsets[b + 1] - offsets[b]),), generator=random) for b in range(12)]
        ).to(DEVICE)
        grad = torch.randn(4, 3 * width, generator=random).to(DEVICE)
        for tables, state, expected in ((contiguous, states, True), (separate, others, False)):
            plan = gpu.plan_update(tables, state, layout, ids, offsets.to(DEVICE), optimizer=optimizer, scalars=scalars)
            assert plan.rows_contiguous == expected
            gpu.apply_plan(plan, tables, layout, offsets.to(DEVICE), None, grad, optimizer=optimizer, scalars=scalars)
    for mine, other in zip(
        [*contiguous, *(v for s in states for v in s.values())],
        [*separate, *(v for s in others for v in s.values())],
        strict=True,
    ):
        assert torch.equal(mine, other)


def test_a_run_of_equal_ids_over_many_tiles_is_summed_once() -> None:
    from rowstead.kernels.gpu import embedding as gpu

    features = FeaturesSpec(sparse=(SparseFeatureSpec(name="hot", num_rows=3),))
    layout = layout_of(features, tables_of(features, width=4))
    rows, others = torch.zeros(3, 4, device=DEVICE), torch.zeros(3, 4, device=DEVICE)
    ids = torch.full((3_400,), 1, device=DEVICE)
    ids[:3], ids[-2:] = 0, 2
    offsets = torch.tensor([0, 700, 3_400], device=DEVICE)
    grad = torch.tensor([[1.0, 2, 3, 4], [10, 20, 30, 40]], device=DEVICE)
    for kernels, table in ((gpu, rows), (reference, others)):
        kernels.update(
            [table], [{}], layout, ids, offsets, None, grad, optimizer=SparseOptimizerSpec(kind="sgd"), lr=1.0, step=1
        )
    torch.testing.assert_close(rows, others)
    assert rows[1, 0].item() == -(697 * 1 + 2_698 * 10)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("num_ids", [1, 3, 28])
@pytest.mark.parametrize("width", [4, 8, 12, 16, 32, 48, 64, 128, 200, 512])
@pytest.mark.parametrize("contiguous", [True, False])
def test_every_width_compiles_and_agrees_with_the_reference(contiguous: bool, width: int, num_ids: int) -> None:
    from rowstead.kernels.gpu import embedding as gpu

    features = FeaturesSpec(sparse=(SparseFeatureSpec(name="f{i}", repeat=4, num_rows=200),))
    layout = layout_of(features, tables_of(features, width=width))
    slab = torch.randn(4 * 200, width, device="cuda")
    ours, theirs = (
        [*slab.split(200)] if contiguous else [rows.clone() for rows in slab.split(200)] for contiguous in (contiguous, False)
    )
    whole = new_row_state("rowwise_adagrad", slab)["sum"]
    states = [
        [{"sum": part if contiguous else part.clone()} for part in whole.split(200)] for contiguous in (contiguous, False)
    ]
    lengths = torch.randint(0, 2 * num_ids + 1, (4 * 256,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).cuda()
    ids = (200 * torch.rand(int(lengths.sum()), device="cuda") ** 3).long()
    grad = torch.randn(256, layout.total_width, device="cuda")
    expected = reference.lookup(theirs, layout, ids, offsets)
    torch.testing.assert_close(gpu.lookup(ours, layout, ids, offsets), expected, rtol=1e-5, atol=1e-5)
    for kernels, rows, state in ((gpu, ours, states[0]), (reference, theirs, states[1])):
        kernels.update(rows, state, layout, ids, offsets, None, grad, optimizer=SparseOptimizerSpec(), lr=0.1, step=1)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_tables_of_more_than_two_billion_elements() -> None:
    from rowstead.kernels.gpu import embedding as gpu

    num_rows, width = 36_000_000, 64
    assert num_rows * width > 2**31
    features = FeaturesSpec(sparse=(SparseFeatureSpec(name="f{i}", repeat=2, num_rows=num_rows),))
    layout = layout_of(features, tables_of(features, width=width))
    tables = [torch.zeros(num_rows, width, device="cuda") for _ in range(2)]
    ids = torch.tensor([0, 1, num_rows - 1, 2**31 // width + 5] * 16 + [3, num_rows - 2] * 32, device="cuda")
    offsets = torch.tensor([0, 64, 128], device="cuda")
    grad = torch.randn(1, 2 * width, device="cuda")
    gpu.update(tables, [{}, {}], layout, ids, offsets, None, grad, optimizer=SparseOptimizerSpec(kind="sgd"), lr=1.0, step=1)
    for table, row, count in ((0, num_rows - 1, 16), (0, 2**31 // width + 5, 16), (1, num_rows - 2, 32), (1, 3, 32)):
        expected = -count * grad[0, table * width : (table + 1) * width]
        torch.testing.assert_close(tables[table][row], expected)
    pooled = gpu.lookup(tables, layout, ids, offsets)
    torch.testing.assert_close(
        pooled[0, :width], 16 * tables[0][[0, 1, num_rows - 1, 2**31 // width + 5]].sum(0), rtol=1e-4, atol=1e-4
    )
