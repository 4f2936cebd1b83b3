"""What a run computes on: threads, number formats, and settings that it ignores."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rowstead.spec.errors import RowsteadError
from rowstead.study.trial import run_trial
from rowstead.training.build import ignored_settings
from rowstead.training.device import (
    bf16_fallback,
    check_precision,
    container_cores,
    dense_precision,
    has_bf16,
    physical_cores,
    set_threads,
)
from tests.small_runs import small_spec

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000\n", None), ("200000 100000\n", 2), ("350000 100000\n", 4), ("20000 100000\n", 1), ("", None)],
)
def test_a_containers_quota_limits_the_cores(tmp_path: Path, text: str, cores: int | None) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text(text)
    assert container_cores(quota) == cores


def test_without_containers_nothing_limits_the_cores(tmp_path: Path) -> None:
    assert container_cores(tmp_path / "missing") is None


def test_hardware_threads_of_one_core_count_once(tmp_path: Path) -> None:
    usable = sorted(os.sched_getaffinity(0))
    assert physical_cores(tmp_path) == len(usable), "each is a core of its own where the system does not tell"
    for index, cpu in enumerate(usable):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{index // 2},{index // 2 + 64}\n")
    assert physical_cores(tmp_path) == (len(usable) + 1) // 2


def test_a_run_has_the_threads_that_it_asks_for_and_gives_them_back() -> None:
    before = torch.get_num_threads()
    with set_threads(3):
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == before
    with set_threads():
        assert 1 <= torch.get_num_threads() <= before


@pytest.mark.parametrize("chosen", [None, "active"])
def test_waiting_threads_sleep_unless_the_user_says_otherwise(chosen: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    if chosen:
        environment["OMP_WAIT_POLICY"] = chosen
    code = "import sys, os, rowstead; assert 'torch' not in sys.modules; print(os.environ['OMP_WAIT_POLICY'])"
    shown = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
    assert shown.strip() == (chosen or "passive")


HAS, HAS_NOT = {"avx512_bf16": True}, {"avx2": True, "amx_bf16": False, "avx512_bf16": False}


@pytest.mark.parametrize(("able", "found"), [(HAS, torch.bfloat16), (HAS_NOT, torch.float32)])
def test_bf16_is_fp32_on_a_processor_that_would_emulate_it(
    able: dict[str, bool], found: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able, raising=False)
    left = torch.rand(3, 3)
    with dense_precision("bf16", CPU):
        assert (left @ left).dtype == found
    with dense_precision("fp32", CPU):
        assert (left @ left).dtype == torch.float32


def test_without_torch_s_capabilities_bf16_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert has_bf16(CPU)


@pytest.mark.parametrize(("able", "says"), [({"amx_bf16": False, "avx512_bf16": False}, True), ({"amx_bf16": True}, False)])
def test_bf16_on_a_processor_without_it_is_reported(able: dict[str, bool], says: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able, raising=False)
    assert (bf16_fallback(small_spec("train.precision=bf16"), CPU) is not None) == says
    assert bf16_fallback(small_spec(), CPU) is None


def test_a_study_is_not_given_fp32_in_place_of_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    spec = small_spec("train.precision=bf16", "device=cpu")
    with pytest.raises(RowsteadError, match="no BF16 instructions"):
        check_precision(spec)
    outcome = run_trial(spec, tmp_path / "trial", is_bad=lambda number, ne: False)
    assert outcome.objective is None
    assert "no BF16 instructions" in str(outcome.failure)
    check_precision(small_spec("device=cpu"))


FLEET = "fleet={num_trainers: 2, num_sparse: 1, num_dense: 1, num_readers: 1}"


@pytest.mark.parametrize(
    ("changes", "world_size", "said"),
    [
        ((), 1, None),
        (("train.sync.mode=easgd",), 1, "train.sync.mode=easgd applies only to fleet runs"),
        (("train.sync.mode=allreduce",), 2, None),
        (("train.sync.staleness=2",), 2, "train.sync.staleness=2 applies only to fleet runs"),
        (("train.sync.dense_lr_factor=2",), 1, "train.sync.dense_lr_factor=2.0 applies only to fleet runs"),
        ((FLEET, "train.sync.mode=easgd"), 1, None),
        ((FLEET, "memory.host=1GB"), 1, "memory applies only to tables in trainers"),
        ((FLEET, "placement={'*': device}"), 1, "placement applies only to tables in trainers"),
    ],
)
def test_settings_that_a_run_ignores_are_reported(changes: tuple[str, ...], world_size: int, said: str | None) -> None:
    found = ignored_settings(small_spec(*changes), world_size=world_size)
    assert (found is None) if said is None else (found is not None and said in found)
