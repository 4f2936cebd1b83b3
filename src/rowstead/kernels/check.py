"""Checks a batch before a kernel follows its ids and offsets into memory.

A valid batch takes one pass over ids and offsets; which of them is wrong is found out only if one is.

Letters: B examples, F features, nnz ids in the batch.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from rowstead.kernels.layout import Layout
from rowstead.spec.errors import DataError


def check_sparse(
    layout: Layout,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None = None,
    *,
    num_features: int | None = None,
    device: torch.device | None = None,
) -> None:
    """Raise a DataError unless kernels can follow the batch: types, shapes, offsets that rise, ids inside their tables.

    ids [nnz]; offsets [F*B + 1]; weights [nnz] or None; `num_features` is the batch's F; `device` is that of the rows.
    Without `device` the tensors need only be on the same one. On a GPU this synchronizes once.
    """
    _check_form(layout, ids, offsets, weights, layout.num_features if num_features is None else num_features, device)
    if not layout.num_features:
        return
    num_samples = (offsets.numel() - 1) // layout.num_features
    if not _fits(layout, ids, offsets, num_samples):
        raise DataError(fault_of(layout, ids.cpu().numpy(), offsets.cpu().numpy(), num_samples))


def check_gradient(layout: Layout, offsets: Tensor, grad: Tensor) -> None:
    """Raise a DataError unless `grad` has the shape and the device of what a look-up with `offsets` [F*B + 1] returns."""
    shape = ((offsets.numel() - 1) // max(1, layout.num_features), layout.total_width)
    if grad.shape != shape:
        raise DataError(f"the gradient is {_shape(grad)}, and the look-up of this batch returned {list(shape)}")
    if grad.device != offsets.device:
        raise DataError(f"the gradient is on {grad.device} and the batch on {offsets.device}: move them together")


def _check_form(
    layout: Layout, ids: Tensor, offsets: Tensor, weights: Tensor | None, num_features: int, device: torch.device | None
) -> None:
    """Check dtypes, shapes and devices, which needs no values."""
    if num_features != layout.num_features:
        raise DataError(f"the batch has {num_features} features, and the tables are read by {layout.num_features}")
    if ids.dtype not in (torch.int32, torch.int64):
        raise DataError(f"ids must be int32 or int64, got {_type(ids)}")
    if offsets.dtype != torch.int64:
        raise DataError(f"offsets must be int64, got {_type(offsets)}")
    if weights is not None and not weights.is_floating_point():
        raise DataError(f"weights must be floating point, got {_type(weights)}")
    for name, tensor in (("ids", ids), ("offsets", offsets), ("weights", weights)):
        if tensor is None:
            continue
        if tensor.dim() != 1:
            raise DataError(f"{name} must have one dimension, got {_shape(tensor)}")
        if not tensor.is_contiguous():
            raise DataError(f"{name} must be contiguous: call `.contiguous()` on them first")
        if tensor.device != (device or ids.device):
            raise DataError(f"{name} are on {tensor.device}, but must be on {device or ids.device}: move the batch there")
    if offsets.numel() < 1 or (offsets.numel() - 1) % max(1, num_features):
        raise DataError(
            f"there are {offsets.numel()} offsets, and {num_features} features of B examples need {num_features} * B + 1"
        )
    if weights is not None and weights.numel() != ids.numel():
        raise DataError(f"there are {weights.numel()} weights for {ids.numel()} ids: give one each")


def _fits(layout: Layout, ids: Tensor, offsets: Tensor, num_samples: int) -> bool:
    """Whether kernels can follow ids and offsets, by the quickest way for where they are."""
    if is_functorch_wrapped_tensor(ids):
        return _fits_torch(layout, ids, offsets, num_samples)
    if ids.device.type == "cpu":
        return _fits_numba(layout, ids, offsets, num_samples)
    from rowstead.kernels.choose import has_triton  # which imports this module

    if ids.device.type == "cuda" and has_triton():
        from rowstead.kernels.gpu.check import fits

        return fits(layout, ids, offsets)
    return _fits_torch(layout, ids, offsets, num_samples)


def _fits_numba(layout: Layout, ids: Tensor, offsets: Tensor, num_samples: int) -> bool:
    return bool(_all_fit(ids.numpy(), offsets.numpy(), _last_rows(layout), num_samples))


@numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
def _all_fit(ids, offsets, last_rows, num_samples):  # type: ignore[no-untyped-def]
    """Whether offsets rise from 0 to nnz and each id lies between 0 and its feature's last row [F].

    A number that is too low or too high leaves its sign in `signs`: without branches the loops become vector instructions.
    """
    if offsets[0] != 0 or offsets[-1] != len(ids):
        return False
    signs = np.int64(0)
    for bag in range(len(offsets) - 1):
        signs |= offsets[bag + 1] | (offsets[bag + 1] - offsets[bag])
    if signs < 0:
        return False
    for feature in range(len(last_rows)):
        last = last_rows[feature]
        own = ids[offsets[feature * num_samples] : offsets[(feature + 1) * num_samples]]
        for index in range(len(own)):
            row = np.int64(own[index])
            signs |= row | (last - row)
    return signs >= 0


def _fits_torch(layout: Layout, ids: Tensor, offsets: Tensor, num_samples: int) -> bool:
    """The same on any device, in a few operations and one synchronization."""
    inner = offsets[num_samples:-1:num_samples] if num_samples else offsets.new_zeros(layout.num_features - 1)
    indices = torch.arange(ids.numel(), device=ids.device)
    # Where the offsets are wrong the features are too, but they stay between 0 and F - 1, so nothing is read out of bounds.
    feature = torch.bucketize(indices, inner.contiguous(), out_int32=True, right=True)
    outside = (ids < 0) | (ids > _last_rows_on(layout, ids.device)[feature])
    wrong = (offsets[0] != 0) | (offsets[-1] != ids.numel()) | (offsets[1:] < offsets[:-1]).any() | outside.any()
    return not bool(wrong)


@lru_cache(maxsize=64)
def _last_rows(layout: Layout) -> NDArray[np.int64]:
    """For each feature the last row of its table."""
    return np.array([layout.tables[table].num_rows - 1 for table in layout.table_of], np.int64)


@lru_cache(maxsize=64)
def _last_rows_on(layout: Layout, device: torch.device) -> Tensor:
    return torch.from_numpy(_last_rows(layout)).to(device)


def fault_of(layout: Layout, ids: NDArray[Any], offsets: NDArray[np.int64], num_samples: int) -> str:
    """The first thing that is wrong with an invalid batch."""
    if offsets[0] != 0:
        return f"offsets must start at 0, got {offsets[0]}"
    falls = np.flatnonzero(offsets[1:] < offsets[:-1])
    if len(falls):
        bag = int(falls[0])
        return f"offsets must not fall, but go from {offsets[bag]} to {offsets[bag + 1]} at {_bag(layout, bag, num_samples)}"
    if offsets[-1] != len(ids):
        return f"offsets must end at the number of ids, {len(ids)}, got {offsets[-1]}"
    features = np.repeat(np.arange(layout.num_features), np.diff(offsets[:: max(1, num_samples)])) if len(ids) else ids
    index = int(np.flatnonzero((ids < 0) | (ids > _last_rows(layout)[features]))[0])
    bag = int(np.searchsorted(offsets, index, side="right") - 1)
    table = layout.tables[layout.table_of[bag // num_samples]]
    return (
        f"id {int(ids[index])} of {_bag(layout, bag, num_samples)} is outside its table, whose rows are 0 to "
        f"{table.num_rows - 1}: hash ids to rows first"
    )


def _bag(layout: Layout, bag: int, num_samples: int) -> str:
    feature, example = divmod(bag, num_samples)
    return f"example {example}, feature {feature} (table `{layout.tables[layout.table_of[feature]].name}`)"


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))
