"""Console output of a fleet: a live table of its roles, or plain lines if the output is not a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rowstead.cli.console import PLAIN_EVERY_S, figures_of, quality_line
from rowstead.fleet.fleet_figures import FleetCallback, RoleRow
from rowstead.spec.sizes import format_bytes
from rowstead.training.metrics import Quality
from rowstead.training.progress import Progress

HEADINGS = ("role", "samples/s", "queue", "waiting", "CPU", "memory", "in/s", "out/s", "restarts")


@contextmanager
def fleet_callback(console: Console) -> Iterator[FleetCallback]:
    """Choose the callback for a console."""
    if not console.is_terminal:
        yield PlainFleet(console)
        return
    with Live(console=console, transient=True, refresh_per_second=4) as live:
        yield LiveFleet(live)


def cells(row: RoleRow) -> list[str]:
    """Format the figures of a role; empty where nothing was measured."""
    state = "" if row.state == "ready" else f" ({row.state})"
    return [
        f"{row.name}{state}",
        _shown(row.samples_per_s, ",.0f"),
        _shown(row.queue_depth, ".0f"),
        _shown(row.waiting_share, ".0%"),
        _shown(row.cpu_cores, ".2f"),
        "" if row.rss_bytes is None else format_bytes(int(row.rss_bytes)),
        "" if row.received_bytes_per_s is None else format_bytes(int(row.received_bytes_per_s)),
        "" if row.sent_bytes_per_s is None else format_bytes(int(row.sent_bytes_per_s)),
        str(row.num_restarts) if row.num_restarts else "",
    ]


def role_table(rows: Sequence[RoleRow]) -> Table:
    """Build the table of all roles."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, cells(row)))
    return table


def progress_line(progress: Progress) -> str:
    """Format the progress of training in one line."""
    return f"step {progress.step:,} of {progress.total_steps:,} · {figures_of(progress)}"


class LiveFleet:
    """Shows the table and a progress line, updated in place."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._rows: Sequence[RoleRow] = ()
        self._line = ""

    def on_roles(self, rows: Sequence[RoleRow]) -> None:
        self._rows = rows
        self._show()

    def on_step(self, progress: Progress) -> None:
        self._line = progress_line(progress)
        self._show()

    def on_evaluation(self, step: int, quality: Quality) -> None:
        self.on_message(f"step {step:,}: {quality_line(quality)}")

    def on_message(self, text: str) -> None:
        self._live.console.print(text, soft_wrap=True)

    def _show(self) -> None:
        self._live.update(Group(role_table(self._rows), Text(self._line)))


class PlainFleet:
    """Prints a progress line and a line about the roles every few seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = {"step": time.monotonic(), "roles": time.monotonic()}

    def on_roles(self, rows: Sequence[RoleRow]) -> None:
        if self._is_due("roles"):
            self.on_message(" · ".join(_brief(row) for row in rows))

    def on_step(self, progress: Progress) -> None:
        if self._is_due("step"):
            self.on_message(progress_line(progress))

    def on_evaluation(self, step: int, quality: Quality) -> None:
        self.on_message(f"step {step:,}: {quality_line(quality)}")

    def on_message(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def _is_due(self, what: str) -> bool:
        now = time.monotonic()
        if now - self._shown[what] < PLAIN_EVERY_S:
            return False
        self._shown[what] = now
        return True


def _brief(row: RoleRow) -> str:
    name, samples, _, waiting, cores, *_ = cells(row)
    parts = [
        f"{samples} samples/s" if samples else "",
        f"waiting {waiting}" if waiting else "",
        f"CPU {cores}" if cores else "",
    ]
    return f"{name}: {', '.join(filter(None, parts)) or 'no figures yet'}"


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
