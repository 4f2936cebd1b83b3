"""Rules of the row optimizers: those of torch.optim to the last bits of FP32, and the same in every kernel."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rowstead.kernels import reference
from rowstead.kernels.choose import kernels_for
from rowstead.kernels.layout import layout_of
from rowstead.kernels.row_state import RowState, new_row_state
from rowstead.spec.features import FeaturesSpec, SparseFeatureSpec, tables_of
from rowstead.spec.row_optimizers import ROW_OPTIMIZERS, RowOptimizerName, SparseOptimizerSpec
from rowstead.spec.run import Kernel
from tests.stores.store_contract import layouts, optimizers, sparse_batches

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_ROWS, WIDTH = 5, 20
STEPS = range(1, 6)

every_kernel = pytest.mark.parametrize(("kernel", "device"), [("reference", DEVICE), ("cpu", "cpu"), ("gpu", DEVICE)])


def grad_of(step: int) -> Tensor:
    return torch.randn(NUM_ROWS, WIDTH, generator=torch.Generator().manual_seed(step)) + 1


def train(kernel: Kernel, device: str, optimizer: SparseOptimizerSpec, num_read: int = NUM_ROWS) -> tuple[Tensor, RowState]:
    """A table and its state after updates of its first `num_read` rows, each read once in every step."""
    kernels = kernels_for(kernel, torch.device(device))[1]
    features = FeaturesSpec(sparse=(SparseFeatureSpec(name="f", num_rows=NUM_ROWS),))
    layout = layout_of(features, tables_of(features, width=WIDTH))
    rows = first_rows().to(device)
    state = new_row_state(optimizer.kind, rows)
    ids, offsets = torch.arange(num_read, device=device), torch.arange(num_read + 1, device=device)
    for step in STEPS:
        grad = grad_of(step)[:num_read].to(device)
        kernels.update([rows], [state], layout, ids, offsets, None, grad, optimizer=optimizer, lr=0.1, step=step)
    return rows.cpu(), {name: tensor.cpu() for name, tensor in state.items()}


def first_rows() -> Tensor:
    return torch.randn(NUM_ROWS, WIDTH, generator=torch.Generator().manual_seed(99))


def train_torch(optimizer: torch.optim.Optimizer) -> None:
    (exact,) = optimizer.param_groups[0]["params"]
    for step in STEPS:
        exact.grad = grad_of(step).double()
        optimizer.step()


@every_kernel
def test_moments_of_adam_are_those_of_torch_in_double_precision(kernel: Kernel, device: str) -> None:
    """1 - 0.999 taken in FP32 would be off by more than 1e-5, and so would every row's second moment."""
    optimizer = SparseOptimizerSpec(kind="adam")
    _, state = train(kernel, device, optimizer)
    exact = first_rows().double().requires_grad_()
    theirs = torch.optim.Adam([exact], lr=0.1, betas=(optimizer.beta1, optimizer.beta2), eps=optimizer.eps)
    train_torch(theirs)
    for name, known in (("moment1", "exp_avg"), ("moment2", "exp_avg_sq")):
        torch.testing.assert_close(state[name].double(), theirs.state[exact][known], rtol=1e-6, atol=1e-8)


@every_kernel
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_momentum_is_that_of_torch_where_every_step_reads_every_row(kernel: Kernel, device: str, momentum: float) -> None:
    rows, state = train(kernel, device, SparseOptimizerSpec(kind="momentum", momentum=momentum))
    exact = first_rows().double().requires_grad_()
    theirs = torch.optim.SGD([exact], lr=0.1, momentum=momentum)
    train_torch(theirs)
    torch.testing.assert_close(rows.double(), exact.detach(), rtol=1e-6, atol=1e-6)
    if momentum:
        torch.testing.assert_close(state["velocity"].double(), theirs.state[exact]["momentum_buffer"], rtol=1e-6, atol=1e-6)


@every_kernel
def test_a_decoupled_decay_is_that_of_adamw(kernel: Kernel, device: str) -> None:
    exact = torch.nn.Parameter(first_rows().double())
    train_torch(torch.optim.AdamW([exact], lr=0.1, weight_decay=0.5))
    rows, _ = train(kernel, device, SparseOptimizerSpec(kind="adam", weight_decay=0.5))
    torch.testing.assert_close(rows.double(), exact.detach(), rtol=1e-4, atol=1e-5)


@every_kernel
@pytest.mark.parametrize(
    ("kind", "theirs"), [("sgd", torch.optim.SGD), ("adagrad", torch.optim.Adagrad), ("adam", torch.optim.Adam)]
)
def test_l2_on_rows_is_the_weight_decay_of_torch(
    kernel: Kernel, device: str, kind: RowOptimizerName, theirs: type[torch.optim.Optimizer]
) -> None:
    exact = torch.nn.Parameter(first_rows().double())
    train_torch(theirs([exact], lr=0.1, weight_decay=0.5))  # type: ignore[call-arg]
    rows, _ = train(kernel, device, SparseOptimizerSpec(kind=kind, l2=0.5))
    torch.testing.assert_close(rows.double(), exact.detach(), rtol=1e-4, atol=1e-5)


@every_kernel
@pytest.mark.parametrize("kind", list(ROW_OPTIMIZERS))
def test_a_row_that_no_batch_reads_keeps_its_value_and_its_state(kernel: Kernel, device: str, kind: RowOptimizerName) -> None:
    rows, state = train(kernel, device, SparseOptimizerSpec(kind=kind), num_read=NUM_ROWS - 1)
    assert torch.equal(rows[-1], first_rows()[-1])
    assert not torch.equal(rows[0], first_rows()[0])
    assert all(not tensor[-1].any() and tensor[0].all() for tensor in state.values())


@pytest.mark.parametrize("kind", list(ROW_OPTIMIZERS))
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_cpu_kernels_change_rows_and_state_as_the_reference_does(kind: RowOptimizerName, data: st.DataObject) -> None:
    check_against_reference("cpu", kind, data)


@pytest.mark.skipif(DEVICE == "cuda", reason="compiles every layout")
@pytest.mark.parametrize("kind", list(ROW_OPTIMIZERS))
@settings(max_examples=2, deadline=None)
@given(data=st.data())
def test_gpu_kernels_change_rows_and_state_as_the_reference_does(kind: RowOptimizerName, data: st.DataObject) -> None:
    check_against_reference("gpu", kind, data)


def check_against_reference(kernel: Kernel, kind: RowOptimizerName, data: st.DataObject) -> None:
    layout = data.draw(layouts())
    fractions = st.floats(0, 0.99)
    betas = {"beta1": data.draw(fractions), "beta2": data.draw(fractions), "momentum": data.draw(fractions)}
    optimizer = dataclasses.replace(data.draw(optimizers(kind)), **betas)
    random = torch.Generator().manual_seed(3)
    start = [torch.randn(table.num_rows, table.width, generator=random).double() for table in layout.tables]
    tables = [[rows.clone() for rows in start] for _ in range(2)]
    states = [[new_row_state(kind, rows) for rows in start] for _ in range(2)]
    fast = kernels_for(kernel, torch.device("cpu"))[1]
    for step in (1, 2, 3):
        sparse = data.draw(sparse_batches(layout, weighted=False))
        grad = torch.randn(sparse.num_samples, layout.total_width, generator=random).double()
        for kernels, rows, state in ((fast, tables[0], states[0]), (reference, tables[1], states[1])):
            kernels.update(rows, state, layout, sparse.ids, sparse.offsets, None, grad, optimizer=optimizer, lr=0.1, step=step)
    torch.testing.assert_close(tables[0], tables[1], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(states[0], states[1], rtol=1e-9, atol=1e-12)
