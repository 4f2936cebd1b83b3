"""The figures of the README are those of the files that it links, which are the newest of their kind."""

from __future__ import annotations

import json
import re
from pathlib import Path

from docs import tables

ROOT = Path(__file__).parent.parent
ROW = re.compile(
    r"^\| [^|]+ \| ([^|]+) \| [^|]+ \| \[`python -m benchmarks\.(\w+)(?: --device (\w+))?`\]\(([^)]+)\) \|$", re.MULTILINE
)


def test_each_figure_is_in_the_file_that_is_linked_and_no_newer_one_exists() -> None:
    rows = ROW.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(rows) == 5
    for measured, benchmark, device, path in rows:
        assert (ROOT / "benchmarks" / f"{benchmark}.py").exists()
        assert (ROOT / path) == tables.latest_file(benchmark, device or "cpu"), (
            f"{path} is not the newest result: run `make docs`"
        )
        result = json.loads((ROOT / path).read_text())
        assert not result["quick"]
        figures = re.findall(r"\d+(?:\.\d+)?", measured)
        assert len(figures) in (1, 2)
        for figure in figures:
            decimals = len(figure.partition(".")[2])
            found = {f"{value:.{decimals}f}" for value in result["summary"].values()}
            assert figure in found, f"{figure} is not in the summary of {path}"
