"""Console output of a fleet: rows from usage samples, and rows as text."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from rowstead.cli.fleet_console import LiveFleet, PlainFleet, cells, fleet_callback, role_table
from rowstead.fleet.fleet_figures import RoleRow, role_row
from rowstead.fleet.role_usage import UsageReader
from rowstead.training.progress import Progress

SAMPLES = [
    {"time_s": 100.0, "incarnation": 0, "num_samples": 0, "waiting_s": 0.0, "cpu_s": 1.0, "rss_bytes": 5_000_000},
    {
        "time_s": 102.0,
        "incarnation": 0,
        "num_samples": 3000,
        "waiting_s": 1.0,
        "cpu_s": 2.5,
        "rss_bytes": 6_000_000,
        "queue_depth": 8,
        "num_bytes_sent": 10,
    },
]


def read_usage(folder: Path) -> UsageReader:
    path = folder / "trainer-0.jsonl"
    path.write_text("".join(json.dumps(sample) + "\n" for sample in SAMPLES))
    usage = UsageReader(path)
    usage.read()
    return usage


def test_a_row_has_rates_between_the_last_two_samples_and_nothing_that_was_not_measured(tmp_path: Path) -> None:
    row = role_row("trainer-0", "ready", read_usage(tmp_path), num_threads=2)
    assert (row.samples_per_s, row.waiting_share, row.cpu_cores) == (1500.0, 0.25, 0.75)
    assert (row.queue_depth, row.rss_bytes) == (8, 6_000_000)
    assert (row.sent_bytes_per_s, row.received_bytes_per_s) == (None, None)
    assert cells(row) == ["trainer-0", "1,500", "8", "25%", "0.75", "6.0 MB", "", "", ""]


def test_the_row_of_a_role_that_is_not_ready_shows_its_state(tmp_path: Path) -> None:
    row = role_row("sparse-1", "restarting", UsageReader(tmp_path / "none"), num_restarts=2)
    assert cells(row) == ["sparse-1 (restarting)", "", "", "", "", "", "", "", "2"]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_fleet_is_shown_on_a_terminal_and_elsewhere(is_terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=120)
    rows = [RoleRow(name="reader-0", state="ready", samples_per_s=12.0)]
    with fleet_callback(console) as callback:
        assert isinstance(callback, LiveFleet if is_terminal else PlainFleet)
        callback.on_roles(rows)
        callback.on_step(Progress(step=3, total_steps=9, num_samples=30, loss=0.5, samples_per_s=12.0, waiting_share=0.0))
        callback.on_message("hello")
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert "hello" in output
    if is_terminal:
        assert "reader-0" in output
        assert "step 3 of 9" in output
    table = Console(file=io.StringIO(), width=120)
    table.print(role_table(rows))
    assert "samples/s" in table.file.getvalue()  # type: ignore[attr-defined]
