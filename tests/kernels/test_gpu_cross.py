"""Fused cross layers against plain torch, on a real GPU where there is one and in Triton's interpreter elsewhere."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from rowstead.kernels.gpu.cross import cross
from rowstead.kernels.gpu.linear import defer_weight_gradients

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def layers_of(num_layers: int, width: int, rank: int) -> nn.ModuleList:
    torch.manual_seed(1)
    down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(num_layers))
    return nn.ModuleList([down, nn.ModuleList(nn.Linear(rank, width) for _ in range(num_layers))]).to(DEVICE)


def plain(start: Tensor, layers: nn.ModuleList) -> Tensor:
    x = start
    for down, up in zip(*layers, strict=True):
        x = start * up(down(x)) + x
    return x


@pytest.mark.parametrize("is_deferred", [False, True])
@pytest.mark.parametrize(("num_samples", "border", "width", "rank"), [(1, 0, 5, 2), (37, 8, 24, 8), (300, 129, 130, 16)])
@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_output_and_gradients_are_those_of_plain_torch(
    num_layers: int, num_samples: int, border: int, width: int, rank: int, is_deferred: bool
) -> None:
    ours = layers_of(num_layers, width, rank)
    theirs = copy.deepcopy(ours).double()
    start = torch.randn(num_samples, width, device=DEVICE, requires_grad=True)
    exact = start.detach().double().requires_grad_()
    grad = torch.randn(num_samples, width, device=DEVICE)
    given = grad.clone()
    parts = (start[:, :border] if border else None), start[:, border:]
    if is_deferred:
        with defer_weight_gradients() as deferred:
            out = cross(*parts, *ours)  # type: ignore[arg-type]
        out.backward(grad)
        assert all(parameter.grad is None for parameter in ours.parameters())
        for give_gradients in deferred:
            give_gradients()
    else:
        out = cross(*parts, *ours)  # type: ignore[arg-type]
        out.backward(grad)
    assert torch.equal(grad, given), "the gradient that was passed in belongs to the caller"
    expected = plain(exact, theirs)
    expected.backward(grad.double())
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(out.double(), expected, **close)
    assert start.grad is not None
    torch.testing.assert_close(start.grad.double(), exact.grad, **close)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(mine.grad.double(), other.grad, rtol=1e-4, atol=1e-3)


def test_bf16_differs_by_its_rounding() -> None:
    ours = layers_of(3, 64, 16)
    theirs = copy.deepcopy(ours).double()
    ours = ours.bfloat16()
    start = torch.randn(200, 64, device=DEVICE).bfloat16().requires_grad_()
    exact = start.detach().double().requires_grad_()
    cross(start[:, :16], start[:, 16:], *ours).float().square().sum().backward()  # type: ignore[arg-type]
    plain(exact, theirs).square().sum().backward()
    assert start.grad is not None
    assert exact.grad is not None
    assert float((start.grad.double() - exact.grad).norm() / exact.grad.norm()) < 0.02
