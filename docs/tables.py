"""What benchmarks measured, read from the files under benchmarks/results/, and as tables of a page."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"

Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], str]]


def latest_file(benchmark: str, device: str) -> Path | None:
    """The file of the last result."""
    return max(RESULTS.glob(f"{benchmark}-{device}-*.json"), default=None)


def latest(benchmark: str, device: str) -> dict[str, Any] | None:
    file = latest_file(benchmark, device)
    result: dict[str, Any] | None = json.loads(file.read_text()) if file is not None else None
    return result


def of_each_machine(benchmark: str, device: str) -> list[dict[str, Any]]:
    """The last result of each processor or GPU, the newest first."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(RESULTS.glob(f"{benchmark}-{device}-*.json")):
        result = json.loads(file.read_text())
        name = result["machine"].get("gpu", result["machine"]["cpu"])
        found.pop(name, None)
        found[name] = result
    return list(reversed(found.values()))


def where(result: Mapping[str, Any], benchmark: str, device: str | None = None) -> str:
    """The command that measured a result, and what it ran on; some commands know of one device alone."""
    machine, versions = result["machine"], result["versions"]
    name = machine.get("gpu", f"{machine['num_cores']} cores of {machine['cpu']}")
    used = ", ".join(f"{package} {version}" for package, version in versions.items() if package != "python")
    command = f"python -m benchmarks.{benchmark}" + (f" --device {device}" if device else "")
    return f"`{command} --json` on {name}, {result['date']} ({used}):"


def table(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    lines = ["| " + " | ".join(title for title, _ in columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(value(row) for _, value in columns) + " |" for row in rows]
    return "\n".join(lines)


def word(key: str) -> Callable[[Row], str]:
    return lambda row: str(row[key])


def number(key: str, form: str = ",.0f", *, times: float = 1.0, unit: str = "", may_lack: bool = False) -> Callable[[Row], str]:
    """A figure of a row as text; nothing where the row lacks it and may."""
    return lambda row: "" if may_lack and key not in row else f"{times * row[key]:{form}}{unit}"


def share(key: str, *, may_lack: bool = False) -> Callable[[Row], str]:
    return number(key, ".0f", times=100, unit=" %", may_lack=may_lack)


def model(row: Row) -> str:
    return f"{row['shape'].split()[0]}, {row['batch_size']:,}"


def ms(*keys: str) -> Callable[[Row], str]:
    return lambda row: " / ".join(f"{row[key]:.3g}" if row[key] < 100 else f"{row[key]:.0f}" for key in keys)


def ratios(summary: Mapping[str, float], names: Mapping[str, str]) -> str:
    lines = []
    for key, text in names.items():
        if f"{key}_geomean" in summary:
            lines.append(f"- {text}: {summary[f'{key}_geomean']:.2f} in geometric mean, {summary[f'{key}_min']:.2f} at least")
    return "\n".join(lines)
