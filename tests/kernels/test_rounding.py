"""Stochastic rounding: unbiased, never further than the next number, and the same bits from every kernel."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rowstead.kernels import reference
from rowstead.kernels.cpu import embedding as cpu
from rowstead.kernels.layout import Layout, layout_of
from rowstead.kernels.rounding import noise, round_to
from rowstead.kernels.row_state import new_row_state
from rowstead.spec.features import FeaturesSpec, SparseFeatureSpec, tables_of
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from tests.stores.store_contract import KINDS, layouts, sparse_batches

FORMATS = (torch.bfloat16, torch.float16)
EVERY_CHANCE = torch.arange(65536)

formats = pytest.mark.parametrize("dtype", FORMATS, ids=["bf16", "fp16"])


def rank_of(values: Tensor) -> Tensor:
    """The number of each 16-bit value when all are counted in rising order; both zeros have the same."""
    bits = values.view(torch.int16).long()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def in_range(dtype: torch.dtype) -> st.SearchStrategy[float]:
    largest = torch.finfo(dtype).max
    small = st.floats(-(2.0**-13), 2.0**-13, width=32)
    return st.one_of(st.floats(-8, 8, width=32), small, st.floats(-float(largest) / 4, float(largest) / 4, width=32))


@formats
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rounding_goes_to_a_neighbour_and_is_right_on_average(dtype: torch.dtype, data: st.DataObject) -> None:
    value = data.draw(in_range(dtype))
    got = round_to(torch.full((65536,), value), EVERY_CHANCE, dtype)
    near = torch.tensor([value]).to(dtype)
    low, high = got.double().min().item(), got.double().max().item()
    finest = 2.0**-39  # a part of FP16's smallest number that 65536 chances cannot tell from nothing
    assert low - finest <= value <= high + finest
    assert int((rank_of(got) - rank_of(near)).abs().max()) <= 1
    assert rank_of(got.max().view(1)) - rank_of(got.min().view(1)) <= 1
    assert math.isclose(got.double().mean().item(), value, rel_tol=1e-12, abs_tol=finest + (high - low) / 2000)


@formats
def test_numbers_of_the_format_stay(dtype: torch.dtype) -> None:
    everything = torch.arange(-32768, 32768).to(torch.int16).view(dtype)
    everything = everything[everything.isfinite()]
    for chance in (0, 1, 40_000, 65_535):
        got = round_to(everything.float(), torch.full((len(everything),), chance), dtype)
        assert torch.equal(got, everything)


def test_what_is_not_finite_stays_and_what_is_too_large_does_not_become_infinite_in_fp16() -> None:
    odd = torch.tensor([math.inf, -math.inf, math.nan, 65519.0, -1e6])
    got = round_to(odd, torch.full((5,), 65535), torch.float16)
    assert got[:2].tolist() == [math.inf, -math.inf]
    assert got[2].isnan()
    assert got[3:].tolist() == [65504.0, -65504.0]


def test_noise_is_even_over_steps_rows_tables_and_elements() -> None:
    over_steps = torch.cat([noise(3, torch.arange(8), 16, step) for step in range(1, 513)]).double()
    assert abs(over_steps.mean().item() - 32767.5) < 4 * 65536 / math.sqrt(12 * over_steps.numel())
    each = (over_steps.view(512, 8, 16).mean(dim=0) - 32767.5).abs().max().item()
    assert each < 5 * 65536 / math.sqrt(12 * 512)
    assert not torch.equal(noise(0, torch.arange(8), 16, 1), noise(1, torch.arange(8), 16, 1))


def single_table(width: int, num_rows: int) -> Layout:
    features = FeaturesSpec(sparse=(SparseFeatureSpec(name="a", num_rows=num_rows),))
    return layout_of(features, tables_of(features, width=width))


@formats
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_cpu_kernels_round_any_number_as_the_reference_does(dtype: torch.dtype, data: st.DataObject) -> None:
    width = data.draw(st.sampled_from([3, 4, 16, 20, 52, 64, 112]))
    numbers = data.draw(st.lists(st.floats(width=32), min_size=width, max_size=width))
    step, row = data.draw(st.integers(1, 2**40)), data.draw(st.integers(0, 8))
    layout = single_table(width, 9)
    results = []
    for kernels in (cpu, reference):
        rows = [torch.zeros(9, width, dtype=dtype)]
        ids, offsets = torch.tensor([row]), torch.tensor([0, 1])
        grad = -torch.tensor([numbers])
        optimizer = SparseOptimizerSpec(kind="sgd")
        kernels.update(rows, [{}], layout, ids, offsets, None, grad, optimizer=optimizer, lr=1.0, step=step)
        results.append(rows[0])
    torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)


@formats
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_cpu_kernels_train_low_precision_rows_as_the_reference_does(dtype: torch.dtype, kind: str, data: st.DataObject) -> None:
    layout = data.draw(layouts())
    weighted = data.draw(st.booleans())
    # Clipped gradients may cancel: a large eps keeps what is left of the order of summing from becoming a whole step.
    optimizer = SparseOptimizerSpec(kind=kind, eps=1e-2, clip=data.draw(st.sampled_from([None, 0.5])))
    one_order = kind == "sgd" and not weighted and optimizer.clip is None and not any(layout.is_mean)
    random = torch.Generator().manual_seed(3)
    rows = [torch.randn(t.num_rows, t.width, generator=random).to(dtype) for t in layout.tables]
    states = [new_row_state(kind, table) for table in rows]
    for step in range(1, 6):
        sparse = data.draw(sparse_batches(layout, weighted))
        weights = None if sparse.weights is None else sparse.weights.float()
        batch = (sparse.ids, sparse.offsets, weights)
        pooled = [kernels.lookup(rows, layout, *batch) for kernels in (cpu, reference)]
        assert pooled[0].dtype == torch.float32
        torch.testing.assert_close(*pooled, rtol=1e-5, atol=1e-5)
        grad = torch.randn(sparse.num_samples, layout.total_width, generator=random)
        before, ours = [table.double() for table in rows], [table.clone() for table in rows]
        our_states = [{name: value.clone() for name, value in state.items()} for state in states]
        cpu.update(ours, our_states, layout, *batch, grad, optimizer=optimizer, lr=0.1, step=step)
        reference.update(rows, states, layout, *batch, grad, optimizer=optimizer, lr=0.1, step=step)
        for old, mine, other in zip(before, ours, rows, strict=True):
            if one_order:
                assert torch.equal(mine, other)
            unit = torch.finfo(dtype).eps * torch.maximum(old.abs(), other.double().abs()) + torch.finfo(dtype).tiny
            assert bool(((mine.double() - other.double()).abs() <= unit).all())


@formats
@pytest.mark.parametrize("kernels", [cpu, reference], ids=["cpu", "reference"])
def test_updates_far_smaller_than_a_row_arrive_on_average(kernels, dtype: torch.dtype) -> None:
    layout = single_table(64, 40)
    rows = [torch.ones(40, 64, dtype=dtype)]
    ids, offsets = torch.arange(40), torch.arange(41)
    optimizer = SparseOptimizerSpec(kind="sgd")
    for step in range(1, 201):
        grad = torch.ones(40, 64)
        kernels.update(rows, [{}], layout, ids, offsets, None, grad, optimizer=optimizer, lr=1e-4, step=step)
    assert abs(rows[0].float().mean().item() - 0.98) < 1e-3  # rounded to nearest, every one of them would still be 1
