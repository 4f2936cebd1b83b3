"""Measures the hardware: sequential memory bandwidth, matmul FLOPS, links, disk and power."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rowstead.spec.machine import Disk, Link, Meter
from rowstead.study.calibration.clock import Clock

COPY_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}
CACHED_BYTES = {"cpu": 1 << 20, "cuda": 16 << 20}
MATMUL_SIZE = {"cpu": 1536, "cuda": 8192}
LINK_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 27)
FILE_BYTES, PIECE_BYTES = 64 << 20, 4096


def measure_copy_bytes_per_s(clock: Clock, num_bytes: int) -> float:
    """Return the bytes read and written per second by a copy."""
    source = torch.ones(num_bytes // 4, device=clock.device)
    target = torch.empty_like(source)
    return 2 * num_bytes / clock.seconds(lambda: target.copy_(source))


def measure_flops_per_s(clock: Clock, precision: str) -> float:
    """Return the FLOPS of a large square matmul."""
    size, dtype = MATMUL_SIZE[clock.device.type], torch.bfloat16 if precision == "bf16" else torch.float32
    left, right = (torch.rand(size, size, device=clock.device).to(dtype) for _ in range(2))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        return 2 * size**3 / clock.seconds(lambda: left @ right)
    finally:
        torch.set_float32_matmul_precision(before)


def cache_bytes(device: torch.device) -> float:
    """Return the size of the last-level cache as the system or the driver reports it, else 0."""
    if device.type == "cuda":
        return float(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            text = path.read_text().strip()
            sizes.append(int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}[text[-1]])
    return float(max(sizes, default=0))


def measure_host_link(device: torch.device, source: str) -> Link:
    """Measure copies of several sizes from pinned host memory to a GPU: latency and bandwidth."""
    return _measure_link(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8).pin_memory(), device, source)


def measure_peer_link(source: str) -> Link:
    """Measure copies of several sizes between two GPUs."""
    make = functools.partial(torch.empty, dtype=torch.uint8, device="cuda:0")
    return _measure_link(make, torch.device("cuda:1"), source)


def _measure_link(make: Callable[[int], torch.Tensor], device: torch.device, source: str) -> Link:
    """Measure copies of what `make` returns for a number of bytes to a GPU."""
    seconds = []
    for num_bytes in LINK_BYTES:
        here, there = make(num_bytes), torch.empty(num_bytes, dtype=torch.uint8, device=device)
        seconds.append(_time_copy(functools.partial(there.copy_, here, non_blocking=True), device))
    bandwidth = (LINK_BYTES[-1] - LINK_BYTES[-2]) / max(seconds[-1] - seconds[-2], 1e-9)
    shown = ", ".join(f"{size:,} bytes {taken * 1e6:.1f} us" for size, taken in zip(LINK_BYTES, seconds, strict=True))
    return Link(bandwidth_bytes_per_s=bandwidth, latency_s=seconds[0], source=f"{source}; {shown}")


def _time_copy(copy: Callable[[], Any], device: torch.device) -> float:
    """Return the median seconds per copy, several copies back to back."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(8):
            copy()
        torch.cuda.synchronize(device)
        times.append((time.perf_counter() - start) / 8)
    return sorted(times)[2]


def fresh_byte_s(clock: Clock, from_bytes: float) -> float:
    """Return the extra seconds per byte of writing to a newly allocated large CPU tensor."""
    num = int(1.25 * from_bytes) // 4
    there = torch.empty(num)
    return max(0.0, clock.seconds(lambda: torch.empty(num).zero_()) - clock.seconds(there.zero_)) / (4 * num)


def measure_disk(folder: Path, source: str) -> Disk | None:
    """Measure reads and writes on a folder's disk, past the page cache where possible; None if the folder is not writable."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".rowstead-disk-") as file:
            block = os.urandom(1 << 20)
            start = time.perf_counter()
            for _ in range(FILE_BYTES >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            write_s = time.perf_counter() - start
            read_s, is_direct = _time_sequential_read(file.name)
            per_s = _random_reads_per_s(file.name)
    except OSError:
        return None
    how = "with O_DIRECT" if is_direct else "through the page cache, which may hold them"
    return Disk(
        read_bytes_per_s=FILE_BYTES / read_s,
        write_bytes_per_s=FILE_BYTES / write_s,
        random_reads_per_s=per_s,
        source=f"{source}; a file of {FILE_BYTES >> 20} MB, reads {how}",
    )


def _open_file(path: str) -> tuple[int, bool]:
    direct = getattr(os, "O_DIRECT", 0)
    try:
        return os.open(path, os.O_RDONLY | direct), bool(direct)
    except OSError:  # not every file system supports O_DIRECT
        return os.open(path, os.O_RDONLY), False


def _time_sequential_read(path: str) -> tuple[float, bool]:
    descriptor, is_direct = _open_file(path)
    buffer = mmap.mmap(-1, 1 << 20)  # aligned, as O_DIRECT requires
    try:
        start = time.perf_counter()
        while os.readv(descriptor, [buffer]):
            pass
        return time.perf_counter() - start, is_direct
    finally:
        os.close(descriptor)


def _random_reads_per_s(path: str, *, num_reads: int = 2048, num_threads: int = 8) -> float:
    """Return the random reads per second with several threads."""
    descriptor, _ = _open_file(path)
    offsets = np.random.default_rng(1).integers(0, FILE_BYTES // PIECE_BYTES, num_reads) * PIECE_BYTES

    def read(some: Any) -> None:
        buffer = mmap.mmap(-1, PIECE_BYTES)
        for offset in some:
            os.preadv(descriptor, [buffer], int(offset))

    try:
        with ThreadPoolExecutor(num_threads) as pool:
            start = time.perf_counter()
            list(pool.map(read, np.array_split(offsets, num_threads)))
            return num_reads / (time.perf_counter() - start)
    finally:
        os.close(descriptor)


def measure_power(device: torch.device, train: Callable[[float], Any], source: str, *, seconds: float = 1.0) -> Meter | None:
    """Measure power when idle and while `train` runs; None if there is no energy counter."""
    joules = _gpu_joules(device) if device.type == "cuda" else _cpu_joules()
    if joules is None:
        return None
    read, what = joules
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    idle = _measure_watts(read, lambda: time.sleep(seconds))
    loaded = _measure_watts(read, lambda: train(seconds))
    if min(idle, loaded) <= 0:
        return None
    return Meter(idle_watts=idle, loaded_watts=loaded, of=what, source=source)


def _measure_watts(read: Callable[[], float], during: Callable[[], Any]) -> float:
    before, start = read(), time.perf_counter()
    during()
    return (read() - before) / (time.perf_counter() - start)


def _gpu_joules(device: torch.device) -> tuple[Callable[[], float], str] | None:
    """Return a reader of a GPU's energy counter, and what it covers."""
    try:
        import pynvml  # type: ignore[import-not-found]

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception:  # noqa: BLE001, RUF100 - no NVML, or no counter
        return None
    return lambda: float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) * 1e-3, "one GPU"


def _cpu_joules() -> tuple[Callable[[], float], str] | None:
    """Return a reader of the CPU energy counters (RAPL), and what it covers, if Linux allows reading them."""
    counters = sorted(Path("/sys/class/powercap").glob("intel-rapl:?/energy_uj"))
    try:
        for counter in counters:
            counter.read_text()
    except OSError:
        return None
    if not counters:
        return None
    return lambda: sum(int(counter.read_text()) for counter in counters) * 1e-6, "processors"


@contextlib.contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Set the number of torch threads within a block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
