"""The parts of a run that the machine decides: threads, and whether BF16 pays."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rowstead.spec.errors import RowsteadError
from rowstead.study.trial import run_trial
from rowstead.training.build import bf16_fallback, check_format, granted_cores, ignored_settings, set_threads
from tests.small_runs import small_spec


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000\n", None), ("200000 100000\n", 2), ("350000 100000\n", 4), ("20000 100000\n", 1), ("", None)],
)
def test_a_containers_quota_limits_the_cores(tmp_path: Path, text: str, cores: int | None) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text(text)
    assert granted_cores(quota) == cores


def test_without_containers_nothing_limits_the_cores(tmp_path: Path) -> None:
    assert granted_cores(tmp_path / "missing") is None


def test_a_run_has_the_threads_that_it_asks_for_and_gives_them_back() -> None:
    before = torch.get_num_threads()
    with set_threads(dataclasses.replace(small_spec(), threads=3)):
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == before
    with set_threads(small_spec()):
        assert 1 <= torch.get_num_threads() <= before


@pytest.mark.parametrize("chosen", [None, "active"])
def test_waiting_threads_sleep_unless_the_user_says_otherwise(chosen: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    if chosen:
        environment["OMP_WAIT_POLICY"] = chosen
    code = "import sys, os, rowstead; assert 'torch' not in sys.modules; print(os.environ['OMP_WAIT_POLICY'])"
    shown = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
    assert shown.strip() == (chosen or "passive")


@pytest.mark.parametrize(("able", "says"), [({"amx_bf16": False, "avx512_bf16": False}, True), ({"amx_bf16": True}, False)])
def test_who_asks_for_bf16_on_a_processor_without_it_is_told(
    able: dict[str, bool], says: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able, raising=False)
    cpu = torch.device("cpu")
    assert (bf16_fallback(small_spec("train.precision=bf16"), cpu) is not None) == says
    assert bf16_fallback(small_spec(), cpu) is None


def test_a_study_is_not_given_fp32_in_place_of_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    spec = small_spec("train.precision=bf16", "device=cpu")
    with pytest.raises(RowsteadError, match="no BF16 instructions"):
        check_format(spec)
    outcome = run_trial(spec, tmp_path / "trial", is_bad=lambda number, ne: False)
    assert outcome.objective is None
    assert "no BF16 instructions" in str(outcome.failure)
    check_format(small_spec("device=cpu"))


FLEET = "fleet={num_trainers: 2, num_sparse: 1, num_dense: 1, num_readers: 1}"


@pytest.mark.parametrize(
    ("changes", "world_size", "said"),
    [
        ((), 1, None),
        (("train.sync.mode=easgd",), 1, "train.sync.mode=easgd, for the trainers of a fleet"),
        (("train.sync.mode=allreduce",), 2, None),
        (("train.sync.staleness=2",), 2, "train.sync.staleness=2, for the trainers of a fleet"),
        ((FLEET, "train.sync.mode=easgd"), 1, None),
        ((FLEET, "memory.host=1GB"), 1, "memory, for tables that a trainer keeps itself"),
        ((FLEET, "placement={'*': device}"), 1, "placement, for tables that a trainer keeps itself"),
    ],
)
def test_who_sets_what_does_nothing_in_a_run_is_told(changes: tuple[str, ...], world_size: int, said: str | None) -> None:
    found = ignored_settings(small_spec(*changes), world_size=world_size)
    assert (found is None) if said is None else (found is not None and said in found)
