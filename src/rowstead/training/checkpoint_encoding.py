"""How rows are written in fewer bytes: as they are, in FP16, or as bytes with a scale and an offset a row."""

from __future__ import annotations

import torch
from torch import Tensor

from rowstead.spec.train import CheckpointFormat

SCALE_BYTES = 8
"""FP32 scale and offset, after the bytes of an `int8` row."""


def stored_as(encoding: CheckpointFormat, dtype: torch.dtype, num_columns: int) -> tuple[torch.dtype, int]:
    """Type and width of the stored rows of `num_columns` numbers."""
    if encoding == "int8":
        return torch.uint8, num_columns + SCALE_BYTES
    return (torch.float16 if encoding == "fp16" else dtype), num_columns


def saves_bytes(encoding: CheckpointFormat, dtype: torch.dtype, num_columns: int) -> bool:
    """Whether rows get smaller at all: narrow ones do not in `int8`, nor 16-bit ones in `fp16`."""
    stored, width = stored_as(encoding, dtype, num_columns)
    return stored.itemsize * width < dtype.itemsize * num_columns


def encode(encoding: CheckpointFormat, rows: Tensor) -> Tensor:
    """Rows [n, D] as they are stored."""
    if encoding == "exact":
        return rows
    if encoding == "fp16":
        limit = torch.finfo(torch.float16).max
        return rows.clamp(-limit, limit).to(torch.float16)
    rows = rows.float()
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    scale = (high / 255 - low / 255).clamp_(min=torch.finfo(torch.float32).tiny)
    codes = ((rows - low) / scale).round_().clamp_(0, 255).to(torch.uint8)
    return torch.cat([codes, torch.cat([scale, low], 1).view(torch.uint8)], 1)


def decode(encoding: CheckpointFormat, stored: Tensor, dtype: torch.dtype) -> Tensor:
    """What `encode` was given, as near as its format comes; [n, D]."""
    if encoding != "int8":
        return stored.to(dtype)
    tails = stored[:, -SCALE_BYTES:].clone(memory_format=torch.contiguous_format)
    scale, low = tails.view(torch.float32).split(1, dim=1)
    return (stored[:, :-SCALE_BYTES].float() * scale + low).to(dtype)
