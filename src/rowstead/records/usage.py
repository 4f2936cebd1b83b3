"""CPU time, memory and memory traffic of a process, sampled in the background, and facts about its machine."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import os
import platform
import resource
import struct
import sys
import threading
import time
from pathlib import Path

import psutil

PACKAGES = ("rowstead", "torch", "triton", "numpy", "numba", "pyarrow", "safetensors")
"""Packages whose version can change a figure."""

PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}
"""Number of the system call."""
CACHE_LINE_BYTES = 64
PERF, KERNELS = "perf counters of cache misses", "the sizes of rows and layers that kernels read and write"
"""How the memory traffic of a run was counted, in its record."""


def perf_traffic_bytes() -> int | None:
    """Bytes that this process has read from memory since the first call; None where the system does not count cache misses.

    Virtual machines often do not, nor do containers that forbid perf counters.
    """
    counters = _miss_counters()
    return CACHE_LINE_BYTES * sum(int.from_bytes(os.read(one, 8), sys.byteorder) for one in counters) if counters else None


@functools.cache
def _miss_counters() -> tuple[int, ...]:
    """Descriptors of perf counters: misses of the last-level cache by each thread and those that it starts."""
    number = PERF_EVENT_OPEN.get(platform.machine())
    if number is None or platform.system() != "Linux":
        return ()
    hardware, cache_misses, flags = 0, 3, 0b1100010  # with new threads, without kernel and hypervisor
    attributes = struct.pack("=IIQQQQQIIQ", hardware, 64, cache_misses, 0, 0, 0, flags, 0, 0, 0)
    any_cpu, no_group, close_on_exec, call = -1, -1, 8, ctypes.CDLL(None).syscall
    threads = [int(name) for name in os.listdir("/proc/self/task")]
    opened = [call(number, attributes, thread, any_cpu, no_group, close_on_exec) for thread in threads]
    return tuple(one for one in opened if one >= 0)


class UsageSampler:
    """Samples CPU time and memory of this process inside a `with`; one sample costs some tens of microseconds."""

    def __init__(self, interval_s: float = 0.5) -> None:
        self._interval_s = interval_s
        self._process = psutil.Process()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._cpu_shares: list[float] = []
        self._rss_bytes: list[int] = []
        self._thread = threading.Thread(target=self._run, name="rowstead-usage", daemon=True)

    def __enter__(self) -> UsageSampler:
        self._first = self._last = (time.monotonic(), self._cpu_s())
        self._traffic_before = perf_traffic_bytes()
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._sample()

    def figures(self) -> dict[str, float]:
        """Mean and largest use so far; CPU as a share of the cores this process may use."""
        with self._lock:
            wall_s, cpu_s = (last - first for first, last in zip(self._first, self._last, strict=True))
            shares, rss_bytes = list(self._cpu_shares), list(self._rss_bytes)
        figures: dict[str, float] = {}
        if shares and wall_s > 0:
            figures |= {"cpu_s": cpu_s, "cpu_share_mean": cpu_s / wall_s / usable_cores(), "cpu_share_max": max(shares)}
        if self._traffic_before is not None:
            figures["memory_traffic_bytes"] = (perf_traffic_bytes() or 0) - self._traffic_before
        return figures | {
            "rss_mean_bytes": sum(rss_bytes) / len(rss_bytes),
            "rss_max_bytes": max(rss_bytes),
            "peak_memory_bytes": max(peak_memory_bytes() or 0, max(rss_bytes)),
        }

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._sample()

    def _sample(self) -> None:
        now_s, cpu_s, rss_bytes = time.monotonic(), self._cpu_s(), self._process.memory_info().rss
        with self._lock:
            before_s, cpu_before_s = self._last
            self._rss_bytes.append(rss_bytes)
            if now_s - before_s >= min(0.05, self._interval_s):  # CPU time ticks in hundredths of a second
                self._cpu_shares.append((cpu_s - cpu_before_s) / (now_s - before_s) / usable_cores())
                self._last = (now_s, cpu_s)

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system


def peak_memory_bytes() -> int | None:
    """Peak memory of this process, where the system reports it (Linux)."""
    # Not getrusage's ru_maxrss, which a process inherits from the one that started it.
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def usable_cores() -> int:
    """Cores that this process may run on, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_facts(gpu: str | None = None) -> dict[str, str | int | float]:
    """Facts about the machine; the GPU as the caller names it."""
    facts: dict[str, str | int | float] = {
        "cpu": cpu_model(),
        "num_cores": os.cpu_count() or 1,
        "num_usable_cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "os": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "python": platform.python_version(),
    }
    return facts if gpu is None else {**facts, "gpu": gpu}


@functools.cache
def versions() -> dict[str, str]:
    """Versions of the installed packages that can change a figure; read once, as it takes some milliseconds."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def cpu_model(info: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, with its family and model where the name has no number but its clock's: virtual machines hide the rest of it."""
    try:
        lines = info.read_text().splitlines()
    except OSError:
        lines = []
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    name = facts.get("model name") or platform.processor() or platform.machine()
    if any(letter.isdigit() for letter in name.partition("@")[0]) or not {"cpu family", "model"} <= facts.keys():
        return name
    return f"{name} (family {facts['cpu family']}, model {facts['model']})"


def free_host_bytes(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Available system memory, within the limits of a Linux container and of `ulimit -v`."""
    free = psutil.virtual_memory().available
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY:
        free = max(0, min(free, most - psutil.Process().memory_info().vms))
    try:
        limit, taken = ((group / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        return free if limit == "max" else max(0, min(free, int(limit) - int(taken)))
    except (OSError, ValueError):
        return free
