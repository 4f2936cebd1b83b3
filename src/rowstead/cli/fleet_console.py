"""Console output of a fleet: a live table of its roles, or plain lines if the output is not a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rowstead.fleet.fleet_figures import FleetCallback, RoleRow
from rowstead.report.terminal import build_table
from rowstead.spec.sizes import format_bytes
from rowstead.training.progress import Progress
from rowstead.training.progress_bar import PLAIN_EVERY_S, ConsoleLines, Throttle, progress_line

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
    sizes = (row.rss_bytes, row.received_bytes_per_s, row.sent_bytes_per_s)
    return [
        f"{row.name}{state}",
        _shown(row.samples_per_s, ",.0f"),
        _shown(row.queue_depth, ".0f"),
        _shown(row.waiting_share, ".0%"),
        _shown(row.cpu_cores, ".2f"),
        *("" if size is None else format_bytes(int(size)) for size in sizes),
        str(row.num_restarts) if row.num_restarts else "",
    ]


def role_table(rows: Sequence[RoleRow]) -> Table:
    """Build the table of all roles."""
    return build_table(HEADINGS, map(cells, rows), numbers=HEADINGS[1:])


class LiveFleet(ConsoleLines, FleetCallback):
    """Shows the table and a progress line, updated in place."""

    def __init__(self, live: Live) -> None:
        super().__init__(live.console)
        self._live = live
        self._rows: Sequence[RoleRow] = ()
        self._line = ""

    def on_roles(self, rows: Sequence[RoleRow]) -> None:
        self._rows = rows
        self._show()

    def on_step(self, progress: Progress) -> None:
        self._line = progress_line(progress)
        self._show()

    def _show(self) -> None:
        self._live.update(Group(role_table(self._rows), Text(self._line)))


class PlainFleet(ConsoleLines, FleetCallback):
    """Prints a progress line and a line about the roles every few seconds."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._steps, self._roles = Throttle(PLAIN_EVERY_S), Throttle(PLAIN_EVERY_S)

    def on_roles(self, rows: Sequence[RoleRow]) -> None:
        if self._roles.is_due():
            self.on_message(" · ".join(_brief(row) for row in rows))

    def on_step(self, progress: Progress) -> None:
        if self._steps.is_due():
            self.on_message(progress_line(progress))


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
