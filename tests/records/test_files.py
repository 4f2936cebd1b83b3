"""Small files are whole or absent, and JSON lines are strict."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from rowstead.records.files import json_line, write_atomic
from rowstead.records.plain_files import read_plain
from rowstead.spec.sizes import format_bytes


def test_text_and_bytes_replace_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, "first é")
    assert path.read_text(encoding="utf-8") == "first é"
    write_atomic(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_content_and_nothing_else(
    tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")

    def fail(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(OSError, match="no"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_figures_that_were_not_measured_are_left_out_of_json() -> None:
    line = json_line({"a": 1.5, "b": float("nan"), "c": None, "d": {"e": float("inf"), "f": np.float32(0.5)}, "g": [1, "é"]})
    assert line.endswith("\n")
    assert json.loads(line) == {"a": 1.5, "d": {"f": 0.5}, "g": [1, "é"]}


@pytest.mark.parametrize(("num_bytes", "shown"), [(0, "0 bytes"), (999, "999 bytes"), (1500, "1.5 KB"), (2.5e12, "2.5 TB")])
def test_sizes_read_as_a_person_says_them(num_bytes: int, shown: str) -> None:
    assert format_bytes(num_bytes) == shown


def test_reading_a_short_file_takes_no_memory_for_a_long_one(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(b"x" * 1000)
    tracemalloc.start()
    try:
        assert read_plain(tmp_path / "events.jsonl", 1 << 30) == b"x" * 1000
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    with pytest.raises(OSError, match="more than"):
        read_plain(tmp_path / "events.jsonl", 999)
