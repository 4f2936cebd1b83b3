"""The number format of the dense arithmetic."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def arithmetic(precision: str, device: torch.device) -> Iterator[None]:
    """The number format of the dense arithmetic, for as long as the context lasts; BF16 is FP32 where `multiplies_bf16` says no."""
    before = torch.get_float32_matmul_precision()
    if precision == "tf32":
        torch.set_float32_matmul_precision("high")
    try:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16" and multiplies_bf16(device)):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def multiplies_bf16(device: torch.device) -> bool:
    """Whether it has instructions for BF16, as GPUs are taken to have: without them a CPU imitates it, which takes up to 30 times as long as FP32."""
    if device.type != "cpu" or not hasattr(torch.cpu, "get_capabilities"):
        return True
    able = torch.cpu.get_capabilities()
    return any(able.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))
