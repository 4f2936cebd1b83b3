"""The number format of the dense arithmetic."""

from __future__ import annotations

import pytest
import torch

from rowstead.training.precision import arithmetic, multiplies_bf16

CPU = torch.device("cpu")
HAS, HAS_NOT = {"avx512_bf16": True}, {"avx2": True, "amx_bf16": False, "avx512_bf16": False}


@pytest.mark.parametrize(("able", "found"), [(HAS, torch.bfloat16), (HAS_NOT, torch.float32)])
def test_bf16_is_fp32_on_a_processor_that_would_only_imitate_it(
    able: dict[str, bool], found: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able, raising=False)
    left = torch.rand(3, 3)
    with arithmetic("bf16", CPU):
        assert (left @ left).dtype == found
    with arithmetic("fp32", CPU):
        assert (left @ left).dtype == torch.float32


def test_a_torch_that_does_not_know_its_processor_is_taken_at_its_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert multiplies_bf16(CPU)
