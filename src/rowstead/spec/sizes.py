"""Parsing and formatting of sizes in bytes."""

from __future__ import annotations

import math
import re

from rowstead.spec.errors import SpecError

_UNITS = {"": 1, "B": 1, "BYTES": 1}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)}
_UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", start=1)}


def parse_bytes(size: int | str) -> int:
    """Parse a size such as `20GB`, `1.5 TB`, `512MiB` or a plain number; raise a SpecError for anything else."""
    found = re.fullmatch(r"\s*([0-9][0-9_]*\.?[0-9]*(?:[eE][0-9]+)?)\s*([A-Za-z]*)\s*", str(size))
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None or not math.isfinite(float(found[1]) * unit):
        raise SpecError(
            "", f"`{size}` is not a size: write a number of bytes, or one with KB, MB, GB, TB, KiB, MiB, GiB or TiB"
        )
    return round(float(found[1]) * unit)


def format_bytes(num_bytes: float) -> str:
    """A size as text: `1.5 GB`."""
    size = float(num_bytes)
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
