"""Prints a plan: a table, remedies and a text timeline, or plain values for JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from rowstead.plan.choose import Choice, Requirements
from rowstead.plan.predict import Prediction
from rowstead.report.terminal import print_wide, terminal
from rowstead.report.timeline import slot_text
from rowstead.spec.parse import to_plain
from rowstead.spec.sizes import format_bytes
from rowstead.spec.stores import store_title

WIDTH = 48
"""Characters of the timeline."""


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A plan to print, as a table or as JSON."""

    name: str
    """Of the recipe."""
    choices: list[Choice]
    num_readers: dict[str, int]
    """By machine; a machine without a network reads from its own disk and has no entry."""
    asked: dict[str, Any]
    """The options that affect the answer; None where one was not given."""
    needs: Requirements | None
    notes: list[str]
    """Notes about the machines, one line per note."""

    @property
    def best(self) -> list[Prediction]:
        """The best set-up of each machine on which the model fits."""
        return [one.best for one in self.choices if one.best is not None]

    def is_enough(self, best: Prediction) -> bool:
        """Whether a set-up reaches the target speed, if there is one."""
        wanted: float | None = self.asked["samples_per_s"]
        return wanted is None or best.samples_per_s >= wanted


def print_plan(plan: PlanReport, *, tables: bool, timeline: bool) -> None:
    """Print the table, remedies where the model does not fit, and the optional parts."""
    print_wide(terminal(), _table(plan))
    for note in plan.notes:
        say(note)
    for one in plan.choices:
        if one.best is None:
            why = one.others[0].shortfalls[0] if one.others else "it has no memory for tables"
            say(f"The model does not fit {one.machine.name}: {why}. Remedies:")
            for number, remedy in enumerate(one.remedies, 1):
                say(f"  {number}. {remedy}")
    for best in plan.best:
        if tables:
            say(f"{best.machine.name}, table by table:")
            for name, where in best.where().items():
                say(f"  {name}: {where}")
        if timeline:
            _print_timeline(best)
    if plan.needs is not None:
        _print_requirements(plan.needs)


def _table(plan: PlanReport) -> Table:
    wanted = plan.asked["samples_per_s"]
    title = f"{plan.name}: predicted" + (f", for {wanted:,.0f} samples/s" if wanted else "")
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    optional = {
        "samples/J": [best.samples_per_j for best in plan.best],
        "samples/J metered": [best.samples_per_metered_j for best in plan.best],
        "$/billion": [best.usd_per_billion_samples for best in plan.best],
    }
    figures = {name: iter(values) for name, values in optional.items() if any(value is not None for value in values)}
    for column in ("machine", "tables in", "servers", "batch", "samples/s", *figures, "bottleneck", "next"):
        table.add_column(column, justify="right" if column in ("batch", "samples/s", *figures) else "left", no_wrap=True)
    rows = [(best, [_figure(next(values)) for values in figures.values()]) for best in plan.best]
    for best, shown in sorted(rows, key=lambda row: -row[0].samples_per_s):
        setup = best.setup
        table.add_row(
            best.machine.name,
            store_title(setup.placement, has_accelerators=best.machine.accelerators is not None),
            _servers(best, plan.num_readers.get(best.machine.name, 0)),
            f"{setup.batch_size:,}" + (f" x {setup.num_devices}" if setup.num_devices > 1 else ""),
            f"{best.samples_per_s:,.0f}" + ("" if plan.is_enough(best) else " (at most)"),
            *shown,
            *[*(one.resource for one in best.bottlenecks), "", ""][:2],
        )
    for one in plan.choices:
        if one.best is None:
            table.add_row(one.machine.name, "does not fit")
    return table


def _figure(number: float | None) -> str:
    """At least three digits; empty if unknown."""
    if number is None:
        return ""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _servers(best: Prediction, num_readers: int) -> str:
    setup = best.setup
    counts = {
        "trainer": setup.num_trainers,
        "sparse": setup.num_sparse_servers,
        "dense": setup.num_dense_servers,
        "reader": num_readers,
    }
    plural = ("trainer", "reader")
    return " + ".join(f"{n} {kind}{'s' if n > 1 and kind in plural else ''}" for kind, n in counts.items() if n)


def _print_timeline(best: Prediction) -> None:
    """One line per task, by time; the phase where it changes."""
    slots = best.slots
    step_s, whole = (max(slot.end_s for slot in some) for some in (slots, [*slots, *best.overlapped]))
    say(f"{best.machine.name}, one step of {step_s * 1e3:.3g} ms, the next {best.step_s * 1e3:.3g} ms later:")
    before = None
    for slot in (*slots, *best.overlapped):
        start, end = round(slot.start_s / whole * WIDTH), round(slot.end_s / whole * WIDTH)
        bar = " " * start + ("░" if slot.task.hidden else "█") * max(1, end - start)
        phase = "" if slot.task.phase is before else slot.task.phase.value
        say(f"  {phase:<16} {slot.task.resource:<21} {bar:<{WIDTH + 1}} {slot_text(slot)}")
        before = slot.task.phase


def _print_requirements(needs: Requirements) -> None:
    say(f"For {needs.samples_per_s:,.0f} samples/s a machine needs at least (at full utilisation):")
    for what, figure in (
        ("memory", format_bytes(needs.memory_bytes)),
        ("memory bandwidth", f"{format_bytes(needs.memory_bytes_per_s)}/s"),
        ("arithmetic", f"{needs.flops_per_s / 1e12:.3g} TFLOP/s"),
        ("network or links between tables and examples, each direction", f"{format_bytes(needs.exchange_bytes_per_s)}/s"),
        ("network for input", f"{format_bytes(needs.input_bytes_per_s)}/s"),
    ):
        say(f"  {what}: {figure}")


def plain_of(plan: PlanReport) -> dict[str, Any]:
    """The plan as plain values for JSON; unknown values and options that were not given are absent."""
    machines = []
    for one in plan.choices:
        plain: dict[str, Any] = {"machine": one.machine.name, "fits": one.best is not None}
        if one.best is None:
            plain["remedies"] = list(one.remedies)
        else:
            plain |= {"software": one.best.software.name, **one.best.figures()}
            if one.machine.name in plan.num_readers:
                plain["num_readers"] = plan.num_readers[one.machine.name]
            plain["tables"] = one.best.where()
            if plan.asked["samples_per_s"] is not None:
                plain["is_enough"] = plan.is_enough(one.best)
        plain["others"] = [
            {"placement": other.setup.placement, "fits": other.fits}
            | ({"samples_per_s": other.samples_per_s} if other.fits else {"shortfalls": list(other.shortfalls)})
            for other in one.others
        ]
        machines.append(plain)
    asked = {name: value for name, value in plan.asked.items() if value is not None}
    result: dict[str, Any] = {"recipe": plan.name, "kind": "predicted", "asked": asked, "machines": machines}
    if plan.needs is not None:
        result["requirements"] = to_plain(plan.needs)
    if plan.notes:
        result["notes"] = plan.notes
    return result


def say(text: str) -> None:
    """Print a line that the terminal wraps, without color."""
    terminal().print(text, soft_wrap=True)
