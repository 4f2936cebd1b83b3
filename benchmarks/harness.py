"""What every benchmark shares: provenance, fair timing, and one way to print results."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


def arguments(description: str | None, *, devices: Sequence[str] = ("cpu",)) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller and shorter, for a first look")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--save", action="store_true", help="also write a dated file under benchmarks/results/")
    if len(devices) > 1:
        parser.add_argument("--device", choices=devices, default=devices[0], help="where to measure")
    return parser


def provenance(packages: Sequence[str] = ()) -> dict[str, Any]:
    """Machine, versions and date, as every result file carries them."""
    versions = {"python": platform.python_version()}
    for name in ("numpy", "numba", "torch", *packages):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    machine = {
        "cpu": _cpu_name(),
        "num_cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.machine()}",
    }
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        machine["gpu"] = sys.modules["torch"].cuda.get_device_name()
    return {
        "machine": machine,
        "versions": versions,
        "date": datetime.date.today().isoformat(),
    }


def alternate(
    measures: Mapping[str, Callable[[], Any]],
    *,
    repeats: int,
    warmups: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds by `clock` of each of `repeats` rounds, the contenders taking turns, after `warmups` rounds that do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in measures}
    for turn in range(warmups + repeats):
        for name, measure in measures.items():
            start = clock()
            measure()
            if turn >= warmups:
                seconds[name].append(clock() - start)
    return seconds


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def publish(
    benchmark: str,
    rows: Sequence[Mapping[str, Any]],
    summary: Mapping[str, float],
    options: argparse.Namespace,
    *,
    packages: Sequence[str] = (),
    missing: Sequence[str] = (),
) -> None:
    """Print tables for people, one for each kind of row, and JSON where it is asked for, as the last line."""
    result: dict[str, Any] = {"benchmark": benchmark, **provenance(packages), "quick": options.quick}
    result |= {"rows": list(rows), "summary": dict(summary)}
    if missing:
        result["missing"] = list(missing)
    console = Console()
    where = result["machine"].get("gpu", result["machine"]["cpu"])
    console.print(f"{benchmark} on {where}, {result['date']}", highlight=False)
    for columns in dict.fromkeys(tuple(row) for row in rows):
        table = Table(*columns)
        for row in rows:
            if tuple(row) == columns:
                table.add_row(*(_shown(row[column]) for column in columns))
        console.print(table)
    for key, value in summary.items():
        console.print(f"{key}: {_shown(value)}", highlight=False)
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{benchmark}-{getattr(options, 'device', 'cpu')}-{result['date']}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
    if options.json:
        print(json.dumps(result))


def _shown(value: Any) -> str:
    if isinstance(value, float) and abs(value) < 1000:
        return f"{value:,.4g}"
    return f"{value:,.0f}" if isinstance(value, (int, float)) else str(value)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
