"""Damaged files: never a crash, a hang or a traceback, and never wrong rows where pages have checksums."""

from __future__ import annotations

from pathlib import Path

from tests.data import fuzz_csv, fuzz_parquet

NUM_PARQUET_CASES = 480
"""Ten of each file."""
NUM_CSV_CASES = 200


def test_damaged_parquet_is_refused_or_read_right(tmp_path: Path) -> None:
    fuzzer = fuzz_parquet.Fuzzer(tmp_path)
    for case in range(NUM_PARQUET_CASES):
        fuzzer.run(case)
    assert fuzzer.outcomes["refused"] > NUM_PARQUET_CASES // 2
    assert fuzzer.outcomes["right"] > 0


def test_damaged_text_is_refused_or_read_the_same_however_it_is_stored(tmp_path: Path) -> None:
    fuzzer = fuzz_csv.Fuzzer(tmp_path)
    for case in range(NUM_CSV_CASES):
        fuzzer.run(case)
    assert all(fuzzer.outcomes[f"{what}: {how}"] for what in ("text", "compressed") for how in ("read", "refused"))
    assert fuzzer.outcomes["init: a recipe"] > 10
