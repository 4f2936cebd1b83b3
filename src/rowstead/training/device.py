"""What a run computes on: the device, its threads, and the number format of the dense layers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from rowstead.spec.errors import RowsteadError
from rowstead.spec.job import is_multi_process
from rowstead.spec.run import RunSpec


def choose_device(spec: RunSpec) -> torch.device:
    """The device that a spec asks for; several processes of a machine use its GPUs in turn, so that some share one if there are too few."""
    has_gpu = torch.cuda.is_available()
    if spec.device == "cuda" and not has_gpu:
        raise RowsteadError("device: cuda, but torch sees no CUDA GPU here: use `--set device=cpu`, or `auto`")
    if spec.device == "cpu" or not has_gpu:
        return torch.device("cpu")
    if not is_multi_process():
        return torch.device("cuda")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())


@contextlib.contextmanager
def set_threads(count: int | None = None) -> Iterator[None]:
    """Set the number of torch's CPU threads within a block; by default one per usable physical core.

    Two hardware threads of a core share its arithmetic and its caches, and one that waits for the others slows the one that works.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count or min(before, physical_cores(), container_cores() or before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def physical_cores(cpus: Path = Path("/sys/devices/system/cpu")) -> int:
    """Physical cores that this process may run on: hardware threads of the same core count once, where the system tells."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    siblings = set()
    for cpu in usable:
        try:
            siblings.add((cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip())
        except OSError:
            siblings.add(str(cpu))
    return len(siblings)


def container_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int | None:
    """The CPU quota of a Linux container in cores, which OpenMP ignores; None without a quota."""
    try:
        allowed, period = quota.read_text().split()
    except (OSError, ValueError):
        return None
    return None if allowed == "max" else max(1, round(int(allowed) / int(period)))


def kernel_text(name: str, device: torch.device) -> str:
    """The kernels' name with what they run on."""
    if name == "gpu" and device.type == "cuda":
        return f"gpu (Triton, {torch.cuda.get_device_name(device)})"
    if " and " in name:
        return " and ".join(kernel_text(one, device) for one in name.split(" and "))
    made_of = {"cpu": "Numba", "gpu": "Triton", "reference": "plain torch"}[name]
    threads = torch.get_num_threads()
    return f"{name} ({made_of}, {threads} thread{'s' if threads > 1 else ''})"


@contextlib.contextmanager
def dense_precision(precision: str, device: torch.device) -> Iterator[None]:
    """Autocast for the dense layers; `bf16` means FP32 on a device without `has_bf16`."""
    before = torch.get_float32_matmul_precision()
    if precision == "tf32":
        torch.set_float32_matmul_precision("high")
    try:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16" and has_bf16(device)):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def has_bf16(device: torch.device) -> bool:
    """Whether the device has BF16 instructions (GPUs are assumed to). A CPU without them emulates BF16, up to 30 times slower than FP32."""
    if device.type != "cpu" or not hasattr(torch.cpu, "get_capabilities"):
        return True
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))


def bf16_fallback(spec: RunSpec, device: torch.device) -> str | None:
    """The warning for a spec that asks for BF16 on a processor without it, if this is one."""
    if spec.train.precision != "bf16" or has_bf16(device):
        return None
    return "this processor has no BF16 instructions: `train.precision: bf16` runs in FP32, which is faster here and at least as exact"


def check_precision(spec: RunSpec) -> None:
    """Refuse a study's run that would not use the precision it asks for: its results would be those of another setting."""
    if (reason := bf16_fallback(spec, choose_device(spec))) is not None:
        raise RowsteadError(f"{reason}. Set train.precision=fp32 in the study, or run it on a machine with BF16")
