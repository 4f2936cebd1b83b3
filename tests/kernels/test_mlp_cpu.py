"""Linear layers by oneDNN's products, against plain torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rowstead.kernels import mlp_cpu
from rowstead.model.layers import MLP

pytestmark = pytest.mark.skipif(not mlp_cpu.takes(torch.ones(1, 1)), reason="needs oneDNN")


@pytest.fixture(autouse=True, params=["small layers too", "large layers"])
def layers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "small layers too":
        monkeypatch.setattr(mlp_cpu, "FEW_WEIGHTS", 1)


def outcome(mlp: MLP, x: Tensor, *, plain: bool) -> list[Tensor]:
    """What layers give, and the gradients of their parameters and of x if it wants one."""
    mlp.zero_grad(set_to_none=True)
    given = x.detach().requires_grad_(x.requires_grad)
    out = nn.Sequential.forward(mlp, given[:, : mlp[0].in_features]) if plain else mlp(given)
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    grads = [parameter.grad for parameter in mlp.parameters()]
    return [part.detach().clone() for part in (out, *grads, given.grad) if part is not None]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_samples=st.integers(1, 40),
    in_width=st.integers(1, 70),
    widths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    last_relu=st.booleans(),
    too_many=st.integers(0, 3),
    wants_grad=st.booleans(),
)
def test_layers_are_what_plain_torch_makes_of_them(
    num_samples: int, in_width: int, widths: list[int], last_relu: bool, too_many: int, wants_grad: bool
) -> None:
    torch.manual_seed(num_samples)
    mlp = MLP(in_width, widths, last_relu=last_relu)
    x = torch.randn(num_samples, in_width + too_many)
    x[:, in_width:] = 0
    x.requires_grad_(wants_grad)
    for ours, theirs in zip(outcome(mlp, x, plain=False), outcome(mlp, x, plain=True), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_gradients_of_many_weights_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    mlp, x = MLP(30, (20, 10), last_relu=True), torch.randn(9, 30, requires_grad=True)
    plain = outcome(mlp, x, plain=True)
    monkeypatch.setattr(mlp_cpu, "MANY_WEIGHTS", 1)
    for ours, theirs in zip(outcome(mlp, x, plain=False), plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("x", [torch.ones(3, 4, dtype=torch.float64), torch.ones(0, 4), torch.ones(3, 0)])
def test_what_onednn_does_not_take_goes_the_plain_way(x: Tensor) -> None:
    assert not mlp_cpu.takes(x)
    mlp = MLP(x.shape[1], (5, 2), last_relu=False).to(x.dtype)
    assert mlp(x).shape == (len(x), 2)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_no_number_does_not_get_lost(wrong: float) -> None:
    torch.manual_seed(1)
    mlp, x = MLP(8, (32, 32), last_relu=True), torch.randn(4, 8)
    x[1, 2] = wrong
    out = mlp(x)
    assert not out[1].isfinite().all()
    assert out[[0, 2, 3]].isfinite().all()


def test_autocast_has_its_own_products() -> None:
    mlp, x = MLP(8, (8, 4), last_relu=False), torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert mlp(x).dtype == torch.bfloat16
    assert mlp(x).dtype == torch.float32


def test_the_same_input_gives_the_same_bits() -> None:
    mlp, x = MLP(700, (500, 64), last_relu=True), torch.randn(200, 700, requires_grad=True)
    first, *others = (outcome(mlp, x, plain=False) for _ in range(4))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
