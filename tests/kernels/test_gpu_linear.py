"""The fused backward pass of a layer with ReLU, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from rowstead.kernels.gpu.linear import defer_weight_gradients, linear, masked_gradient

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@settings(max_examples=15, deadline=None)
@given(num_samples=st.integers(1, 300), width=st.integers(1, 200), seed=st.integers(0, 9))
def test_gradients_pass_where_relu_did_and_are_summed(num_samples: int, width: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    out = torch.randn(num_samples, width, generator=random).relu().to(DEVICE)
    grad = torch.randn(num_samples, width, generator=random).to(DEVICE)
    masked, parts = masked_gradient(grad, out)
    expected = torch.where(out > 0, grad, 0)
    assert torch.equal(masked, expected)
    torch.testing.assert_close(parts.sum(0), expected.sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("is_deferred", [True, False])
@pytest.mark.parametrize(("width", "num_extra"), [(96, 0), (96, 5), (1, 0)])
def test_a_layer_agrees_with_plain_torch(
    width: int, num_extra: int, is_deferred: bool, relu: bool, dtype: torch.dtype | None
) -> None:
    if dtype is not None and DEVICE == "cpu":
        pytest.skip("autocast is the GPU's")
    torch.manual_seed(1)
    layer, x = torch.nn.Linear(155, width).to(DEVICE), torch.randn(333, 155, device=DEVICE, requires_grad=True)
    grad = torch.randn(333, width, device=DEVICE)
    results = []
    for plain in (False, True):
        x.grad = None
        layer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=dtype is not None):
            if (
                plain
            ):  # as wide: products of another shape are rounded in another way, and ReLU may differ where they are near 0
                out = functional.linear(*(functional.pad(part, (0, num_extra)) for part in (x, layer.weight)), layer.bias)
                out = out.relu() if relu else out
                out.backward(grad.to(out.dtype))
            else:
                with defer_weight_gradients() if is_deferred else contextlib.nullcontext([]) as later:
                    out = linear(functional.pad(x, (0, num_extra)), layer, relu=relu)
                out.backward(grad.to(out.dtype))
                assert (layer.weight.grad is None) == (layer.bias.grad is None) == is_deferred == bool(later)
                for give_gradients in later:
                    give_gradients()
        results.append([out, x.grad, layer.weight.grad, layer.bias.grad])
    for mine, other in zip(*results, strict=True):
        tolerance = 1e-4 if dtype is None else 3e-2
        assert mine is not None
        assert mine.is_contiguous()
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance * float(other.detach().abs().max()))
