"""CPU and memory use of a process, sampled in the background, and facts about its machine."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import threading
import time
from pathlib import Path

import psutil

PACKAGES = ("rowstead", "torch", "triton", "numpy", "numba", "pyarrow", "safetensors")
"""Packages whose version can change a figure."""


class UsageSampler:
    """Samples CPU time and memory of this process between `start` and `stop`, or inside a `with`.

    `figures` may be called at any time, also after `stop`. One sample costs some tens of microseconds.
    """

    def __init__(self, interval_s: float = 0.5) -> None:
        if interval_s <= 0:
            raise ValueError(f"interval_s must be above 0, got {interval_s}")
        self._interval_s = interval_s
        self._process = psutil.Process()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> UsageSampler:
        """Start sampling; earlier samples are dropped."""
        if self._thread is not None:
            raise RuntimeError("the sampler is already running")
        self._ended = threading.Event()
        self._cpu_shares: list[float] = []
        self._rss_bytes: list[int] = []
        self._first = self._last = (time.monotonic(), self._cpu_s())
        self._sample()
        self._thread = threading.Thread(target=self._run, name="rowstead-usage", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Take a last sample and stop; a no-op when not running."""
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None
            self._sample()

    def __enter__(self) -> UsageSampler:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def figures(self) -> dict[str, float]:
        """Mean and largest use so far; CPU as a share of the cores this process may use. Empty before `start`."""
        if not hasattr(self, "_first"):
            return {}
        with self._lock:
            wall_s, cpu_s = (last - first for first, last in zip(self._first, self._last, strict=True))
            shares, rss_bytes = list(self._cpu_shares), list(self._rss_bytes)
        figures: dict[str, float] = {}
        if shares and wall_s > 0:
            figures |= {"cpu_s": cpu_s, "cpu_share_mean": cpu_s / wall_s / usable_cores(), "cpu_share_max": max(shares)}
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
    return _status_bytes("VmHWM")


def _status_bytes(key: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)


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


def versions() -> dict[str, str]:
    """Versions of the installed packages that can change a figure."""
    return dict(_versions())


@functools.cache
def _versions() -> dict[str, str]:
    """Read once: it takes some milliseconds, and what a process runs does not change."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
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
    """Available system memory, within the limit of a Linux container."""
    free = psutil.virtual_memory().available
    try:
        limit, taken = ((group / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        return free if limit == "max" else max(0, min(free, int(limit) - int(taken)))
    except (OSError, ValueError):
        return free
