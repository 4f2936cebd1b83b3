"""Figures as image files, drawn by a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from rowstead.report.pictures import write_pictures
from rowstead.report.theme import Chart, axis, layout, lines

FIGURE = Chart(
    key="../a b/<c>",
    title="t",
    words="w",
    traces=[lines("one", [1, 2], [3, 4], 0)],
    layout=layout(axis("x"), axis("y")),
)


@pytest.mark.slow
def test_figures_are_written_as_svg_and_png(tmp_path: Path) -> None:
    (svg,) = write_pictures([FIGURE], tmp_path)
    (png,) = write_pictures([FIGURE], tmp_path, kind="png")
    assert svg.parent == tmp_path
    assert svg.name == "00-a-b--c.svg"
    assert svg.read_text().startswith("<svg")
    assert "#2457c5" in svg.read_text() or "rgb(36, 87, 197)" in svg.read_text()
    assert png.read_bytes().startswith(b"\x89PNG")


def test_without_kaleido_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    from rowstead.spec.errors import RowsteadError

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RowsteadError, match=r"pip install .*\[pictures\]"):
        write_pictures([FIGURE], tmp_path)
