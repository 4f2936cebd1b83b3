"""The GPU's dense optimizer against torch.optim, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rowstead.kernels.gpu.dense_optimizer import GpuDenseOptimizer
from rowstead.spec.train import DenseOptimizerSpec
from rowstead.training.step import build_dense_optimizer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(70, 40), nn.ReLU(), nn.Linear(40, 1)).to(DEVICE)


def set_gradients(module: nn.Module, step: int) -> None:
    random = torch.Generator().manual_seed(step)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=random).to(DEVICE)


def take_step(optimizer: GpuDenseOptimizer, lr: float, step: int, loss: float = 1.0) -> None:
    numbers, guard = torch.tensor(optimizer.numbers(lr, step)).to(DEVICE), torch.tensor(loss).to(DEVICE)
    optimizer.step_by(numbers, guard, optimizer.gradient_addresses().to(DEVICE))
    optimizer.count_step(step)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam", "adamw"])
def test_steps_and_state_are_those_of_torch(kind: str, weight_decay: float) -> None:
    spec = DenseOptimizerSpec(kind=kind, lr=0.05, weight_decay=weight_decay)  # type: ignore[arg-type]
    ours, theirs = net(), net()
    optimizer, plain = GpuDenseOptimizer(ours.parameters(), spec), build_dense_optimizer(spec, theirs)
    for step in range(1, 4):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        lr = spec.lr / step
        take_step(optimizer, lr, step)
        plain.param_groups[0]["lr"] = lr
        plain.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    own, given = optimizer.state_dict()["state"], plain.state_dict()["state"]
    for index, entry in given.items():
        for name, value in entry.items():
            if value is not None:
                torch.testing.assert_close(own[index][name].cpu(), value.cpu(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam", "adamw"])
def test_bf16_copies_give_gradients_and_follow_the_parameters(kind: str) -> None:
    spec = DenseOptimizerSpec(kind=kind, lr=0.05, weight_decay=0.1)  # type: ignore[arg-type]
    ours, theirs = net(), net()
    copies = copy.deepcopy(ours).bfloat16()
    optimizer = GpuDenseOptimizer(ours.parameters(), spec, copies.parameters())
    plain = GpuDenseOptimizer(theirs.parameters(), spec)
    for step in range(1, 4):
        set_gradients(theirs, step)
        for mine, other in zip(copies.parameters(), theirs.parameters(), strict=True):
            assert other.grad is not None
            mine.grad = other.grad.bfloat16()
            other.grad = mine.grad.float()
        take_step(optimizer, spec.lr, step)
        take_step(plain, spec.lr, step)
    for mine, other, low in zip(ours.parameters(), theirs.parameters(), copies.parameters(), strict=True):
        assert torch.equal(mine, other)
        torch.testing.assert_close(low.float(), mine, rtol=2**-7, atol=0)
    with torch.no_grad():
        next(ours.parameters()).fill_(3.0)
    optimizer.refresh_copies()
    assert torch.equal(next(copies.parameters()), torch.full((40, 70), 3.0, device=DEVICE, dtype=torch.bfloat16))


def test_the_state_of_torch_can_be_taken_over() -> None:
    spec = DenseOptimizerSpec(kind="adam", lr=0.05)
    theirs = net()
    plain = build_dense_optimizer(spec, theirs)
    set_gradients(theirs, 1)
    plain.step()
    ours = copy.deepcopy(theirs)
    optimizer = GpuDenseOptimizer(ours.parameters(), spec)
    state = copy.deepcopy(plain.state_dict()["state"])
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    set_gradients(theirs, 2)
    plain.step()
    set_gradients(ours, 2)
    take_step(optimizer, spec.lr, 2)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_a_loss_that_is_not_finite_changes_nothing() -> None:
    module = net()
    optimizer = GpuDenseOptimizer(module.parameters(), DenseOptimizerSpec(kind="adagrad"))
    before = copy.deepcopy([*module.parameters(), *(entry["sum"] for entry in optimizer.state.values())])
    set_gradients(module, 1)
    for loss in (float("nan"), float("inf")):
        take_step(optimizer, 0.1, 1, loss)
    after = [*module.parameters(), *(entry["sum"] for entry in optimizer.state.values())]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
