"""DCNv2's low-rank cross layers on a CUDA GPU, with fused element-wise parts and deferred weight gradients.

A layer is x <- start * (W (V x) + b) + x, and start is two tensors side by side, which are never concatenated. Letters: B examples,
A width of the first tensor, C width of both, K rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rowstead.kernels.gpu.linear import DeferredGradients, add_gradients, current_deferred, parts_of

_ROWS, _COLUMNS = 16, 128
"""Size of the block that is read at a time."""
_LAYER = 3
"""Parameters of a layer: V [K, C], W [C, K], b [C]."""


def cross(first: Tensor | None, second: Tensor, down: Sequence[nn.Linear], up: Sequence[nn.Linear]) -> Tensor:
    """Apply the layers to first [B, A], if any, and second [B, C - A]: `down` are V without bias, `up` are W and b. Returns [B, C]."""
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else second.dtype
    first = second[:, :0] if first is None else first
    parameters = [one for v, w in zip(down, up, strict=True) for one in (v.weight, w.weight, w.bias)]
    with torch.autocast("cuda", enabled=False):
        start = first.to(dtype).contiguous(), second.to(dtype).contiguous()
        out: Tensor = _Cross.apply(*start, current_deferred(), *parameters)
    return out


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor, deferred: DeferredGradients | None, *parameters: Tensor) -> Tensor:
        border = first.shape[1]
        x, saved = None, []
        for at in range(0, len(parameters), _LAYER):
            v, w, b = (parameter.to(second.dtype) for parameter in parameters[at : at + _LAYER])
            if x is None:
                hidden = (first @ v[:, :border].t()).addmm_(second, v[:, border:].t())
            else:
                hidden = x @ v.t()
            product = torch.addmm(b, hidden, w.t())
            after = torch.empty_like(product)
            _combine[_grid(product, _ROWS)](
                first, second, product, product if x is None else x, after, *product.shape, border,
                IS_FIRST=x is None, R=_ROWS, C=_COLUMNS, num_warps=4,
            )  # fmt: skip
            saved += [hidden, product, v, w, *([] if x is None else [x])]
            x = after
        assert x is not None, "there is at least one layer"
        ctx.save_for_backward(first, second, *saved)
        ctx.parameters, ctx.deferred = parameters, deferred
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Detached, else a deferred function would keep the graph of the layer below alive, and vice versa.
        first, second, *saved = (tensor.detach() for tensor in ctx.saved_tensors)
        border, num_layers = first.shape[1], len(ctx.parameters) // _LAYER
        grad, of_first, of_second = grad.contiguous(), torch.empty_like(first), torch.empty_like(second)
        given: list[Tensor | None] = []
        for index in range(num_layers - 1, -1, -1):
            hidden, product, v, w, *inputs = saved[5 * index - 1 :] if index else saved[:4]
            is_last = index == num_layers - 1
            of_product = torch.empty_like(product)
            num_parts, rows_per_part = parts_of(len(product), _ROWS)
            sums = torch.empty(num_parts, product.shape[1], dtype=torch.float32, device=grad.device)
            _combine_backward[_grid(product, rows_per_part)](
                grad, first, second, product, of_first, of_second, of_product, sums, *product.shape, border, rows_per_part,
                ADDS=not is_last, ENDS=index == 0, R=_ROWS, C=_COLUMNS, num_warps=4,
            )  # fmt: skip
            of_hidden = of_product @ w
            if index == 0:
                of_first.addmm_(of_hidden, v[:, :border])
                of_second.addmm_(of_hidden, v[:, border:])
            elif is_last:
                grad = torch.addmm(grad, of_hidden, v)  # the caller's gradient stays as it is
            else:
                grad.addmm_(of_hidden, v)
            layer = ctx.parameters[_LAYER * index : _LAYER * (index + 1)]
            x = inputs[:1] if index else [first, second]

            def gradients(
                x: Sequence[Tensor] = x, hidden: Tensor = hidden, of_hidden: Tensor = of_hidden,
                of_product: Tensor = of_product, sums: Tensor = sums, layer: Any = layer,
            ) -> list[Tensor]:  # fmt: skip
                of_v = torch.cat([of_hidden.t() @ part for part in x], dim=1)
                found = (of_v, of_product.t() @ hidden, sums.sum(0))
                return [gradient.to(parameter.dtype) for gradient, parameter in zip(found, layer, strict=True)]

            if ctx.deferred is None:
                given = [*gradients(), *given]
            else:
                given = [None, None, None, *given]
                ctx.deferred.append(lambda layer=layer, gradients=gradients: add_gradients(layer, gradients()))
        return of_first, of_second, None, *given


def _grid(product: Tensor, rows: int) -> tuple[int, int]:
    """Programs for `rows` examples and a block of columns each."""
    return triton.cdiv(len(product), rows), triton.cdiv(product.shape[1], _COLUMNS)


@triton.jit
def _start(first, second, row, column, on, width, border):  # type: ignore[no-untyped-def]
    """The addresses of both tensors at `row` and `column`, and where each is to be read."""
    in_first = on & (column < border)
    first_at = first + row * border + column
    second_at = second + row * (width - border) + (column - border)
    return first_at, in_first, second_at, on & (column >= border)


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    first, second, product, x, out, num_samples, width, border, IS_FIRST: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """start * product + x for R examples and C columns per program; in the first layer x is start."""
    row = (tl.program_id(0) * R + tl.arange(0, R)[:, None]).to(tl.int64)
    column = tl.program_id(1) * C + tl.arange(0, C)[None, :]
    on = (row < num_samples) & (column < width)
    at = row * width + column
    first_at, in_first, second_at, in_second = _start(first, second, row, column, on, width, border)
    start = tl.load(first_at, mask=in_first, other=0.0).to(tl.float32) + tl.load(second_at, mask=in_second, other=0.0).to(
        tl.float32
    )
    total = start * tl.load(product + at, mask=on, other=0.0).to(tl.float32)
    total += start if IS_FIRST else tl.load(x + at, mask=on, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=on)


@triton.jit
def _combine_backward(  # type: ignore[no-untyped-def]
    grad, first, second, product, of_first, of_second, of_product, sums, num_samples, width, border, rows_per_part,
    ADDS: tl.constexpr, ENDS: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A part of the examples and C columns per program.

    of_product = grad * start, and its sums over the part. of_start = grad * product, added to what is there if ADDS; in the first
    layer (ENDS), where x is start, also grad.
    """
    part = tl.program_id(0)
    column = tl.program_id(1) * C + tl.arange(0, C)[None, :]
    stop = tl.minimum((part + 1) * rows_per_part, num_samples)
    total = tl.zeros([R, C], tl.float32)
    for begin in range(part * rows_per_part, stop, R):
        row = (begin + tl.arange(0, R)[:, None]).to(tl.int64)
        on = (row < stop) & (column < width)
        at = row * width + column
        first_at, in_first, second_at, in_second = _start(first, second, row, column, on, width, border)
        start = tl.load(first_at, mask=in_first, other=0.0).to(tl.float32)
        start += tl.load(second_at, mask=in_second, other=0.0).to(tl.float32)
        g = tl.load(grad + at, mask=on, other=0.0).to(tl.float32)
        of_this = g * start
        of_that = g * tl.load(product + at, mask=on, other=0.0).to(tl.float32)
        if ENDS:
            of_that += g
        first_at, in_first, second_at, in_second = _start(of_first, of_second, row, column, on, width, border)
        if ADDS:
            of_that += tl.load(first_at, mask=in_first, other=0.0).to(tl.float32)
            of_that += tl.load(second_at, mask=in_second, other=0.0).to(tl.float32)
        tl.store(of_product + at, of_this.to(of_product.dtype.element_ty), mask=on)
        tl.store(first_at, of_that.to(of_first.dtype.element_ty), mask=in_first)
        tl.store(second_at, of_that.to(of_second.dtype.element_ty), mask=in_second)
        total += of_this
    tl.store(sums + part * width + column, tl.sum(total, axis=0, keep_dims=True), mask=column < width)
