"""The number format of the dense arithmetic."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def arithmetic(precision: str, device: torch.device) -> Iterator[None]:
    """The number format of the dense arithmetic, for as long as the context lasts."""
    before = torch.get_float32_matmul_precision()
    if precision == "tf32":
        torch.set_float32_matmul_precision("high")
    try:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
