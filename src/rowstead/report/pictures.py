"""Writes charts as image files with Kaleido and a browser; both are optional."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rowstead.report.theme import LIGHT, Chart
from rowstead.spec.errors import RowsteadError, install_command

WIDTH, PIXELS_PER_REM = 900, 16


def write_pictures(charts: Sequence[Chart], folder: Path, *, kind: Literal["svg", "png"] = "svg") -> list[Path]:
    """Write each chart as an SVG or PNG file in the light theme on white."""
    if importlib.util.find_spec("kaleido") is None:
        raise RowsteadError(
            f"writing charts needs Kaleido and Chrome or Chromium: {install_command('pictures')} and install "
            "`chromium`. Without them, open the report and save a chart with its SVG button"
        )
    import kaleido

    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{_file_name(chart.key, index)}.{kind}" for index, chart in enumerate(charts)]
    wanted = [
        {
            "fig": _on_white(chart),
            "path": str(file),
            "opts": {
                "format": kind,
                "width": WIDTH,
                "height": round(chart.height_rem * PIXELS_PER_REM),
                "scale": 2 if kind == "png" else 1,
            },
        }
        for chart, file in zip(charts, files, strict=True)
    ]
    try:
        kaleido.write_fig_from_object_sync(wanted, cancel_on_error=True)
    except Exception as error:  # any error of the browser
        raise RowsteadError(f"the browser could not draw the charts: {error or type(error).__name__}") from None
    return files


def _on_white(chart: Chart) -> dict[str, object]:
    plain = chart.plain(LIGHT)
    plain["layout"] |= {"paper_bgcolor": "#ffffff", "plot_bgcolor": "#ffffff", "margin": {"l": 24, "r": 24, "t": 24, "b": 24}}
    return plain


def _file_name(key: str, index: int) -> str:
    """A unique name that is safe on any file system."""
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in key).strip(".-")[:80]
    return f"{index:02d}-{plain or 'chart'}"
