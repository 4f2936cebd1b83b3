"""The fused backward pass of a layer with ReLU, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowstead.kernels.mlp_gpu import masked_gradient

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@settings(max_examples=15, deadline=None)
@given(num_samples=st.integers(1, 300), width=st.integers(1, 200), seed=st.integers(0, 9))
def test_gradients_pass_where_relu_did_and_are_summed(num_samples: int, width: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    out = torch.randn(num_samples, width, generator=random).relu().to(DEVICE)
    grad = torch.randn(num_samples, width, generator=random).to(DEVICE)
    masked, of_bias = masked_gradient(grad, out)
    expected = torch.where(out > 0, grad, 0)
    assert torch.equal(masked, expected)
    torch.testing.assert_close(of_bias, expected.sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_layer_is_that_of_plain_torch(dtype: torch.dtype | None) -> None:
    from rowstead.kernels.mlp_gpu import linear_relu

    torch.manual_seed(1)
    linear, x = torch.nn.Linear(155, 96).cuda(), torch.randn(333, 155, device="cuda", requires_grad=True)
    grad = torch.randn(333, 96, device="cuda")
    results = []
    for plain in (False, True):
        x.grad = None
        linear.zero_grad()
        with torch.autocast("cuda", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            out = linear(x).relu() if plain else linear_relu(x, linear.weight, linear.bias)
        out.backward(grad.to(out.dtype))
        results.append([out, x.grad, linear.weight.grad, linear.bias.grad])
    for mine, other in zip(*results, strict=True):
        tolerance = 1e-4 if dtype is None else 3e-2
        assert mine is not None
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance * float(other.abs().max()))
