"""Dot products of pairs of each example's vectors, forward and backward, by the kernels of its device.

Letters: B examples, K dense vectors, V vectors in all (dense ones first), D width, P pairs.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rowstead.kernels.choose import has_triton
from rowstead.kernels.cpu import interaction as interaction_cpu
from rowstead.spec.errors import DataError
from rowstead.spec.interactions import Pairs, partner_range

GPU_LIMIT = 256
"""Largest number of vectors, and largest width, of the GPU kernels: one example must fit in a program."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class InteractionKernels(Protocol):
    """The two functions that each device's kernels provide."""

    def forward(self, dense: Tensor | None, pooled: Tensor, width: int, pairs: Pairs, dtype: torch.dtype) -> Tensor: ...

    def backward(
        self, dense: Tensor | None, pooled: Tensor, width: int, pairs: Pairs, grad: Tensor
    ) -> tuple[Tensor | None, Tensor]: ...


def pairwise_dots(dense: Tensor | None, pooled: Tensor, width: int, pairs: Pairs = "both") -> Tensor:
    """The dense vectors, then for each sparse vector its products with the dense ones and with the sparse ones before it: [B, K * D + P].

    dense [B, K * D] or None; pooled [B, (V - K) * D]; `pairs` leaves out the products with sparse or with dense vectors. On a GPU
    the result is padded with columns of zeros, so that the following matrix product runs at full speed.
    """
    kernels = _kernels_for(dense, pooled, width)
    if kernels is None:
        return reference_pairwise_dots(dense, pooled, width, pairs)
    if dense is not None and (len(dense) != len(pooled) or dense.shape[1] < width or dense.shape[1] % width):
        raise DataError(f"dense vectors {tuple(dense.shape)} do not match {len(pooled)} pooled examples of width {width}")
    if pooled.shape[1] % width:
        raise DataError(f"pooled vectors {pooled.shape[1]} wide cannot be split into vectors of width {width}")
    return fused_pairwise_dots(dense, pooled, width, kernels, pairs)


def reference_pairwise_dots(dense: Tensor | None, pooled: Tensor, width: int, pairs: Pairs = "both") -> Tensor:
    """`pairwise_dots` in plain torch, for every dtype and shape, and for tracing."""
    side_by_side = pooled if dense is None else torch.cat([dense, pooled], dim=1)
    vectors, num_dense = side_by_side.unflatten(1, (-1, width)), 0 if dense is None else dense.shape[1] // width
    if pairs == "dense_sparse":
        products = torch.bmm(vectors[:, num_dense:], vectors[:, :num_dense].transpose(1, 2)).flatten(1)
    else:
        low, _ = partner_range(pairs, num_dense, vectors.shape[1])
        vectors, num_dense = vectors[:, low:], num_dense - low
        num_vectors, num_left_out = vectors.shape[1], num_dense * (num_dense - 1) // 2  # those of two dense vectors come first
        row, column = torch.tril_indices(num_vectors, num_vectors, offset=-1, device=pooled.device)
        chosen = (row * num_vectors + column)[num_left_out:]
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, chosen)
    return products if dense is None else torch.cat([dense, products], dim=1)


def fused_pairwise_dots(
    dense: Tensor | None, pooled: Tensor, width: int, kernels: InteractionKernels, pairs: Pairs = "both"
) -> Tensor:
    """`pairwise_dots` by these kernels. Under autocast the result has autocast's dtype; the inputs are not cast."""
    device = pooled.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    else:
        dtype = pooled.dtype if dense is None else torch.promote_types(dense.dtype, pooled.dtype)
    out: Tensor = _PairwiseDots.apply(dense, pooled, (width, pairs), dtype, kernels)
    return out


def _kernels_for(dense: Tensor | None, pooled: Tensor, width: int) -> InteractionKernels | None:
    num_vectors = (pooled.shape[1] + (0 if dense is None else dense.shape[1])) // width
    known = pooled.dtype in _DTYPES and (dense is None or dense.dtype in _DTYPES)
    if torch.compiler.is_compiling() or not known or num_vectors < 2:
        return None
    if pooled.device.type == "cpu":
        return interaction_cpu
    if pooled.device.type == "cuda" and max(num_vectors, width) <= GPU_LIMIT and has_triton():
        from rowstead.kernels.gpu import interaction as interaction_gpu

        return interaction_gpu
    return None


class _PairwiseDots(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        dense: Tensor | None,
        pooled: Tensor,
        shape: tuple[int, Pairs],
        dtype: torch.dtype,
        kernels: InteractionKernels,
    ) -> Tensor:
        ctx.save_for_backward(dense, pooled)
        ctx.shape, ctx.kernels = shape, kernels
        return kernels.forward(dense, pooled, *shape, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.kernels.backward(*ctx.saved_tensors, *ctx.shape, grad), None, None, None
