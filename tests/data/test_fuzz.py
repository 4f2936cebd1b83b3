"""Damaged files: never a crash, a hang or a traceback, and never wrong rows where pages have checksums."""

from __future__ import annotations

from pathlib import Path

from tests.data.fuzz_parquet import Fuzzer

NUM_CASES = 480
"""Ten of each file."""


def test_damaged_files_are_refused_or_read_right(tmp_path: Path) -> None:
    fuzzer = Fuzzer(tmp_path)
    for case in range(NUM_CASES):
        fuzzer.run(case)
    assert fuzzer.outcomes["refused"] > NUM_CASES // 2
    assert fuzzer.outcomes["right"] > 0
