"""What every benchmark shares: provenance, fair timing, and one way to print results."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import string
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import psutil
from rich.console import Console
from rich.table import Table

from rowstead.records.usage import cpu_model

RESULTS = Path(__file__).parent / "results"


class Named(Protocol):
    """Something to measure that can be asked for by name."""

    @property
    def name(self) -> str: ...


ToMeasure = TypeVar("ToMeasure", bound=Named)


def arguments(
    description: str | None, *, devices: Sequence[str] = ("cpu",), with_shapes: bool = False
) -> argparse.ArgumentParser:
    """The options that all benchmarks have; with shapes, also which of them to measure."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller and shorter, for a first look")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--save", action="store_true", help="also write a dated file under benchmarks/results/")
    if len(devices) > 1:
        parser.add_argument("--device", choices=devices, default=devices[0], help="where to measure")
    if with_shapes:
        parser.add_argument("--shapes", metavar="NAME,NAME", help="measure only these shapes, by the names of the table's rows")
    return parser


def chosen(shapes: Sequence[ToMeasure], options: argparse.Namespace, *, num_quick: int = 2) -> list[ToMeasure]:
    """The shapes that were asked for by name; else all of them, or the first few under `--quick`."""
    if options.shapes is None:
        return list(shapes[:num_quick] if options.quick else shapes)
    names = [name.strip() for name in options.shapes.split(",")]
    known = [shape.name for shape in shapes]
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"no shape {', '.join(unknown)}: there are {', '.join(known)}")
    return [shape for shape in shapes if shape.name in names]


def compared(key: str, ratios: Sequence[float]) -> dict[str, float]:
    """Geometric mean and least of some ratios under the summary's names; nothing where there are none."""
    return {f"{key}_geomean": statistics.geometric_mean(ratios), f"{key}_min": min(ratios)} if ratios else {}


def provenance(packages: Sequence[str] = ()) -> dict[str, Any]:
    """Machine, versions and date, as every result file carries them."""
    versions = {"python": platform.python_version()}
    for name in ("numpy", "numba", "torch", *packages):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if module := sys.modules.get(name.replace("-", "_")):  # put on the path without being installed
                versions[name] = str(getattr(module, "__version__", "unknown"))
    machine = {
        "cpu": cpu_model(),
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
    prepare: Callable[[], Any] | None = None,
) -> dict[str, list[float]]:
    """Seconds by `clock` of each of `repeats` rounds, the contenders taking turns, after `warmups` rounds that do not count.

    `prepare` is called before each turn, untimed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in measures}
    for turn in range(warmups + repeats):
        for name, measure in measures.items():
            if prepare is not None:
                prepare()
            start = clock()
            measure()
            if turn >= warmups:
                seconds[name].append(clock() - start)
    return seconds


class OtherLoad:
    """How many cores everybody else used while a block ran: what a figure of a CPU needs beside it to be believed."""

    cores: float

    def __enter__(self) -> OtherLoad:
        self._start = time.perf_counter(), self.of_others()
        return self

    def __exit__(self, *error: object) -> None:
        wall_s, others_s = (
            now - start for now, start in zip((time.perf_counter(), self.of_others()), self._start, strict=True)
        )
        self.cores = max(0.0, others_s / wall_s)

    @staticmethod
    def of_others() -> float:
        """Seconds that all cores were busy so far, or taken by the host, but not with us."""
        all_cores = psutil.cpu_times()
        busy_s = sum(all_cores) - all_cores.idle - getattr(all_cores, "iowait", 0.0)
        return float(busy_s - time.process_time())


def noise_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The noisiest moment of a benchmark on a CPU, for its summary."""
    cores = [row["cores_used_by_others"] for row in rows if "cores_used_by_others" in row]
    return {"cores_used_by_others_max": max(cores)} if cores else {}


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
        lines = _lines(columns, [row for row in rows if tuple(row) == columns], console.width)
        table = Table(*lines[0])
        for line in lines[1:]:
            table.add_row(*line)
        Console(width=max(console.width, _width(lines))).print(table)
    for key, value in summary.items():
        console.print(f"{key}: {_shown(value)}", highlight=False)
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        path = _kept_path(f"{benchmark}-{getattr(options, 'device', 'cpu')}-{result['date']}", result["machine"])
        path.write_text(json.dumps(result, indent=1) + "\n")
    if options.json:
        print(json.dumps(result))


def _kept_path(stem: str, machine: Mapping[str, Any]) -> Path:
    """Where a result is kept: in place of one of the same day and processors; that of another stays, and a letter tells them apart."""

    def processor(of: Mapping[str, Any]) -> list[Any]:
        return [of.get(part) for part in ("gpu", "cpu", "num_cores")]

    for letter in ("", *string.ascii_lowercase[1:]):
        path = RESULTS / f"{stem}{letter}.json"
        if not path.exists() or processor(json.loads(path.read_text())["machine"]) == processor(machine):
            return path
    raise SystemExit(f"too many machines have results of this day: move some of {RESULTS}/{stem}*.json away")


def _lines(columns: Sequence[str], rows: Sequence[Mapping[str, Any]], max_width: int) -> list[list[str]]:
    """Cells of a table with a line for each row, or for each figure where the former is too wide and the latter narrower."""
    lines = [list(columns), *([_shown(row[column]) for column in columns] for row in rows)]
    turned = [list(column) for column in zip(*lines, strict=True)]
    return lines if _width(lines) <= max(max_width, _width(turned)) else turned


def _width(lines: Sequence[Sequence[str]]) -> int:
    """Characters across a table, its frame included."""
    return 1 + sum(max(map(len, column)) + 3 for column in zip(*lines, strict=True))


def _shown(value: Any) -> str:
    if isinstance(value, float) and abs(value) < 1000:
        return f"{value:,.4g}"
    return f"{value:,.0f}" if isinstance(value, (int, float)) else str(value)
