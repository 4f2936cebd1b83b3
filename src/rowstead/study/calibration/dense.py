"""Measures the dense part of a step: linear layers by shape, the interaction, and the dense optimizer.

Letters: B examples, K inputs, N outputs, V vectors, D width.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rowstead.kernels.choose import has_triton
from rowstead.kernels.interaction import pairwise_dots
from rowstead.nn.layers import MLP
from rowstead.spec.curve import Curve, CurveAxis
from rowstead.spec.timings import LayerTimes
from rowstead.spec.train import DenseOptimizerSpec
from rowstead.study.calibration.clock import Clock
from rowstead.training.device import dense_precision
from rowstead.training.step import build_dense_optimizer

EXAMPLES = {"cpu": (64, 256, 1024, 4096), "cuda": (256, 1024, 4096, 16384)}
INPUTS, OUTPUTS = (16, 64, 256, 1024, 4096), (1, 16, 64, 256, 1024)
LARGEST_FLOPS = {"cpu": 4e9, "cuda": 3e11}
"""The largest matrix product that is measured; larger ones are assumed to run at its rate."""
INTERACTING = {"cpu": (64, 512, 2048), "cuda": (256, 2048, 16384)}
VECTORS = {"cpu": (5, 17, 65, 129), "cuda": (5, 16, 32, 33, 64, 65, 128)}
WIDTHS = {"cpu": (16, 32, 64, 128), "cuda": (16, 64, 128)}
"""A GPU multiplies tiles of 16, 32 or 64 vectors; one vector more than a full tile can take three times as long. Each pair needs two kernels,
and compiling takes far longer than running: keep the lists short."""
LARGEST_INTERACTION = {"cpu": 1.5e9, "cuda": 1e11}
PARAMETERS = (10_000, 100_000, 1_000_000, 10_000_000)

Measure = Callable[..., tuple[float, ...]]


def measure_layers(clock: Clock, precision: str, *, is_short: bool = False, most_examples: int | None = None) -> LayerTimes:
    """Measure a linear layer with ReLU, forward and backward, in one precision, for batches up to `most_examples`."""
    kind = clock.device.type
    examples = tuple(one for one in EXAMPLES[kind] if most_examples is None or one <= most_examples)
    sizes = (examples[::2], INPUTS[::2], OUTPUTS[::2]) if is_short else (examples, INPUTS, OUTPUTS)

    def measure(num: int, inputs: int, outputs: int) -> tuple[float, float, float]:
        with clock.device:
            layer = MLP(inputs, (outputs,), last_relu=outputs > 1)
        grad = torch.randn(num, outputs, device=clock.device)

        def timed(*, is_first: bool, known_s: float | None = None) -> tuple[float, float]:
            x = torch.randn(num, inputs, device=clock.device, requires_grad=not is_first)

            def forward() -> Tensor:
                layer.zero_grad(set_to_none=True)
                x.grad = None
                with dense_precision(precision, clock.device):
                    return layer(x)

            def back(out: Tensor) -> None:
                with dense_precision(precision, clock.device):  # matmuls read it when they run
                    out.backward(grad.to(out.dtype))

            return clock.forward_and_back(forward, back, forward_s=known_s)

        forward_s, back_s = timed(is_first=False)
        return forward_s, back_s, min(back_s, timed(is_first=True, known_s=forward_s)[1])

    forward, back, back_first = _measure_curves(
        ("examples", "inputs", "outputs"), sizes, measure, lambda b, k, n: 2.0 * b * k * n <= LARGEST_FLOPS[kind]
    )
    return LayerTimes(precision=precision, forward=forward, back=back, back_first=back_first)


def measure_interaction(clock: Clock, precision: str, *, is_short: bool = False) -> tuple[Curve, Curve]:
    """Measure the pairwise dot products, forward and backward, in one precision."""
    kind, step = clock.device.type, 2 if is_short else 1
    sizes = (INTERACTING[kind][::step], VECTORS[kind][::step], WIDTHS[kind][::step])
    forward, back = _measure_curves(
        ("examples", "vectors", "width"),
        sizes,
        _interaction(clock, precision),
        lambda b, v, d: b * v * v * d <= LARGEST_INTERACTION[kind],
    )
    return forward, back


def fp32_interaction_factor(clock: Clock, precision: str) -> float:
    """Return the time of the interaction in FP32 over that in a faster precision, for one shape only: FP32 kernels compile slowly."""
    shape = INTERACTING[clock.device.type][1], VECTORS[clock.device.type][-2], WIDTHS[clock.device.type][0]
    return sum(_interaction(clock, "fp32")(*shape)) / sum(_interaction(clock, precision)(*shape))


def _interaction(clock: Clock, precision: str) -> Measure:
    """Return a function that measures both passes of one shape."""

    def measure(num: int, vectors: int, width: int) -> tuple[float, float]:
        dense = torch.randn(num, width, device=clock.device, requires_grad=True)
        pooled = torch.randn(num, (vectors - 1) * width, device=clock.device, requires_grad=True)
        with dense_precision(precision, clock.device):
            grad = torch.ones_like(pairwise_dots(dense, pooled, width).detach())

        def forward() -> Tensor:
            dense.grad = pooled.grad = None
            with dense_precision(precision, clock.device):
                return pairwise_dots(dense, pooled, width)

        def back(out: Tensor) -> None:
            with dense_precision(precision, clock.device):
                out.backward(grad)

        return clock.forward_and_back(forward, back)

    return measure


def interact_once(num: int, vectors: int, width: int, precision: str, device: torch.device) -> None:
    """Run both passes of one shape, to compile its kernels."""
    dense = torch.randn(num, width, device=device, requires_grad=True)
    pooled = torch.randn(num, (vectors - 1) * width, device=device, requires_grad=True)
    with dense_precision(precision, device):
        out = pairwise_dots(dense, pooled, width)
        out.backward(torch.ones_like(out))


def measure_dense_update(clock: Clock) -> Curve:
    """Measure the dense optimizer over the parameters of a few layers."""

    def measure(num: int) -> tuple[float]:
        side = max(8, round(math.sqrt(num / 4)))
        net = nn.Sequential(*(nn.Linear(side, side) for _ in range(4))).to(clock.device)
        for parameter in net.parameters():
            parameter.grad = torch.randn_like(parameter)
        step = _build_step(net, clock)
        return (clock.seconds(step) * num / sum(parameter.numel() for parameter in net.parameters()),)

    (curve,) = _measure_curves(("parameters",), (PARAMETERS,), measure, lambda n: True)
    return curve


def _build_step(net: nn.Module, clock: Clock) -> Callable[[], Any]:
    spec = DenseOptimizerSpec()
    if not clock.is_cuda or not has_triton():
        return build_dense_optimizer(spec, net).step
    from rowstead.kernels.gpu.dense_optimizer import GpuDenseOptimizer

    optimizer = GpuDenseOptimizer(net.parameters(), spec)
    numbers = torch.tensor(optimizer.numbers(spec.lr, 1), device=clock.device)
    guard, gradients_at = torch.zeros((), device=clock.device), optimizer.gradient_addresses().to(clock.device)
    return lambda: optimizer.step_by(numbers, guard, gradients_at)


def _measure_curves(
    names: Sequence[str], sizes: Sequence[Sequence[int]], measure: Measure, is_measured: Callable[..., bool]
) -> tuple[Curve, ...]:
    """Return the curves of what `measure` returns for each combination of sizes; those that are too large are extrapolated."""
    found: dict[tuple[int, ...], tuple[float, ...]] = {}
    for combination in itertools.product(*sizes):
        if is_measured(*combination):
            found[combination] = measure(*combination)
        else:  # the same rate as at the next smaller size that is known
            smaller = [
                (axis, (*combination[:axis], before, *combination[axis + 1 :]))
                for axis, size in enumerate(combination)
                if (before := max((s for s in sizes[axis] if s < size), default=0)) and sizes[axis].index(size) > 0
            ]
            axis, known = next((axis, known_sizes) for axis, known_sizes in smaller if known_sizes in found)
            found[combination] = tuple(one * combination[axis] / known[axis] for one in found[known])
    axes = tuple(CurveAxis(name=name, sizes=tuple(map(float, each))) for name, each in zip(names, sizes, strict=True))
    return tuple(Curve(axes=axes, seconds=tuple(each)) for each in zip(*found.values(), strict=True))
