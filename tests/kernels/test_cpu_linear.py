"""Linear layers by oneDNN's products, against plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rowstead.kernels.cpu import linear
from rowstead.nn.layers import MLP

pytestmark = pytest.mark.skipif(not linear.has_product(), reason="needs oneDNN")


@pytest.fixture(autouse=True, params=["small layers too", "large layers"])
def layers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "pays", lambda: True)
    if request.param == "small layers too":
        monkeypatch.setattr(linear, "FEW_WEIGHTS", 1)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of all oneDNN products since."""
    shapes: list[tuple[int, ...]] = []
    real = linear._product

    def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        shapes.append((len(a), len(b)))
        return real(a, b, bias)

    monkeypatch.setattr(linear, "_product", product)
    return shapes


def outcome(mlp: MLP, x: Tensor, *, plain: bool) -> list[Tensor]:
    """Outputs of layers, and the gradients of their parameters and, if required, of x."""
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
def test_layers_agree_with_plain_torch(
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
    monkeypatch.setattr(linear, "MANY_WEIGHTS", 1)
    for ours, theirs in zip(outcome(mlp, x, plain=False), plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("x", [torch.ones(3, 4, dtype=torch.float64), torch.ones(0, 4), torch.ones(3, 0)])
def test_other_inputs_use_torch(x: Tensor, products: list[tuple[int, ...]]) -> None:
    mlp = MLP(x.shape[1], (5,), last_relu=True).to(x.dtype)
    assert mlp(x).shape == (len(x), 5)
    assert not products


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_nan_and_infinity_pass_through(wrong: float) -> None:
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


def test_layers_are_torchs_own_where_onednn_does_not_pay(
    products: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "pays", lambda: False)
    MLP(600, (600,), last_relu=True)(torch.randn(3, 600))
    assert not products


def test_only_large_layers_are_taken(products: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "FEW_WEIGHTS", 40)
    MLP(8, (5, 7), last_relu=True)(torch.randn(3, 8))
    assert products == [(3, 5)]


def test_second_gradients_are_those_of_torch(products: list[tuple[int, ...]]) -> None:
    mlp = MLP(600, (600, 1), last_relu=False)
    x = torch.randn(3, 600, requires_grad=True)

    def second(forward: Callable[[Tensor], Tensor]) -> list[Tensor]:
        mlp.zero_grad(set_to_none=True)
        (grad,) = torch.autograd.grad(forward(x).sum(), x, create_graph=True)
        grad.square().sum().backward()
        return [parameter.grad for parameter in mlp.parameters() if parameter.grad is not None]

    ours = second(mlp)
    assert products
    for a, b in zip(ours, second(lambda given: nn.Sequential.forward(mlp, given)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("capability", "expected"), [("AVX512", True), ("AVX2", False), ("DEFAULT", False)])
def test_onednn_pays_with_avx_512(capability: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # of the fixture that takes it for granted
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert linear.pays.__wrapped__() == expected


def test_a_frozen_layer_gets_no_gradients_and_no_product_for_them(
    products: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "MANY_WEIGHTS", 1)
    mlp, x = MLP(600, (500,), last_relu=True).requires_grad_(False), torch.randn(3, 600, requires_grad=True)
    ours = outcome(mlp, x, plain=False)
    assert products == [(3, 500), (3, 600)]
    assert all(parameter.grad is None for parameter in mlp.parameters())
    for a, b in zip(ours, outcome(mlp, x, plain=True), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_layer_needs_no_bias(products: list[tuple[int, ...]]) -> None:
    mlp, x = MLP(600, (500,), last_relu=True), torch.randn(3, 600, requires_grad=True)
    mlp[0].bias = None
    ours = outcome(mlp, x, plain=False)
    assert products
    for a, b in zip(ours, outcome(mlp, x, plain=True), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


HOOKS: dict[str, Callable[[nn.Module, Callable[..., None]], object]] = {
    "forward": nn.Module.register_forward_hook,
    "forward_pre": nn.Module.register_forward_pre_hook,
    "full_backward": nn.Module.register_full_backward_hook,
    "full_backward_pre": nn.Module.register_full_backward_pre_hook,
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed")
@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("index", [0, 1])
def test_hooks_on_layers_run(kind: str, index: int) -> None:
    mlp, x = MLP(600, (600, 1), last_relu=False), torch.randn(3, 600)
    mlp[1].inplace = False  # torch wants that of backward hooks
    calls = []
    HOOKS[kind](mlp[index], lambda *_: calls.append(kind))
    mlp(x).sum().backward()
    assert calls == [kind]


def test_hooks_on_all_modules_run() -> None:
    mlp, calls = MLP(600, (600, 1), last_relu=False), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: calls.append(module))
    try:
        mlp(torch.randn(3, 600))
    finally:
        handle.remove()
    assert calls == [*mlp, mlp]


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_replaced_layers_are_called() -> None:
    mlp, x = MLP(600, (600, 500), last_relu=False), torch.randn(3, 600)
    plain = mlp(x)
    mlp.append(nn.Dropout(1.0))
    assert mlp(x).count_nonzero() == 0
    doubled = Doubled(600, 500)
    doubled.load_state_dict(mlp[2].state_dict())
    mlp[2] = doubled
    torch.testing.assert_close(mlp.eval()(x), 2 * plain, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_layers_can_be_quantized() -> None:
    mlp, x = MLP(600, (600, 500), last_relu=False), torch.randn(3, 600)
    quantized = torch.ao.quantization.quantize_dynamic(mlp, {nn.Linear})
    assert (quantized(x) - mlp(x)).norm() < 0.1 * mlp(x).norm()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_onednn_is_not_used_when_it_is_turned_off(products: list[tuple[int, ...]]) -> None:
    mlp, x = MLP(600, (600,), last_relu=False), torch.randn(3, 600)
    with torch.backends.mkldnn.flags(enabled=False):
        mlp(x)
    assert not products
    mlp(x)
    assert products


def test_weights_of_another_type_are_refused_as_by_torch() -> None:
    mlp = MLP(600, (600,), last_relu=False).to(torch.bfloat16)
    with pytest.raises(RuntimeError, match="same dtype"):
        mlp(torch.randn(3, 600))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_traced_layers_are_torchs_own() -> None:
    mlp, x = MLP(600, (600,), last_relu=True), torch.randn(3, 600)
    torch.testing.assert_close(torch.jit.trace(mlp, x)(x), mlp(x), rtol=1e-5, atol=1e-5)


def test_layers_under_torch_func_are_torchs_own() -> None:
    mlp, x = MLP(600, (500,), last_relu=True), torch.randn(3, 600)
    of_x = torch.func.grad(lambda given: mlp(given).square().sum())
    of_plain = torch.func.grad(lambda given: nn.Sequential.forward(mlp, given).square().sum())
    assert torch.equal(of_x(x), of_plain(x))
