"""Prints a plan: a table, remedies and a text timeline, or plain values for JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.table import Table

from rowstead.plan.choose import Choice, Requirements
from rowstead.plan.predict import Prediction
from rowstead.plan.setup import Setup
from rowstead.report.terminal import build_table, count, print_wide, terminal
from rowstead.report.timeline import slot_text
from rowstead.spec.networks import NETWORKS
from rowstead.spec.parse import to_plain
from rowstead.spec.run import RunSpec
from rowstead.spec.sizes import format_bytes
from rowstead.spec.stores import IN_PLANS, store_title

WIDTH = 48
"""Characters of the timeline."""
OPTIONAL = {"samples/J": "samples_per_j", "samples/J metered": "samples_per_metered_j", "$/billion": "usd_per_billion_samples"}
"""Columns that are shown where a machine has them, by figure of a prediction."""


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A plan to print, as a table or as JSON."""

    name: str
    """Of the recipe."""
    choices: list[Choice]
    num_readers: dict[str, int]
    """By machine; a machine without a network reads from its own disk and has no entry."""
    options: dict[str, Any]
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
        wanted: float | None = self.options["samples_per_s"]
        return wanted is None or best.samples_per_s >= wanted


def print_plan(plan: PlanReport, *, tables: bool, timeline: bool) -> None:
    """Print the table, remedies where the model does not fit, and the optional parts."""
    print_wide(terminal(), _table(plan))
    if any(one.others and one.others[0].fits for one in plan.choices):
        print_wide(terminal(), _placements(plan))
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
    wanted = plan.options["samples_per_s"]
    title = f"{plan.name}: predicted" + (f", for {wanted:,.0f} samples/s" if wanted else "")
    figures = {name: key for name, key in OPTIONAL.items() if any(getattr(one, key) is not None for one in plan.best)}
    rows = [
        [
            best.machine.name,
            placement_title(best),
            servers_text(best.setup, plan.num_readers.get(best.machine.name, 0)),
            f"{best.setup.batch_size:,}" + (f" x {best.setup.num_devices}" if best.setup.num_devices > 1 else ""),
            f"{best.samples_per_s:,.0f}" + ("" if plan.is_enough(best) else " (at most)"),
            *(_figure(getattr(best, key)) for key in figures.values()),
            *(one.resource for one in best.bottlenecks[:2]),
        ]
        for best in sorted(plan.best, key=lambda one: -one.samples_per_s)
    ]
    rows += [[one.machine.name, "does not fit"] for one in plan.choices if one.best is None]
    numbers = ["batch", "samples/s", *figures]
    headings = ["machine", "tables in", "servers", *numbers, "bottleneck", "next"]
    return build_table(headings, rows, title=title, numbers=numbers)


def _placements(plan: PlanReport) -> Table:
    """Speed and step time of every placement that fits, by machine."""
    fitting = {
        one.machine.name: [two for two in (one.best, *one.others) if two is not None and two.fits] for one in plan.choices
    }
    kinds = [kind for kind in IN_PLANS if any(two.setup.placement == kind for some in fitting.values() for two in some)]
    rows = []
    for name, some in fitting.items():
        cells = {two.setup.placement: f"{two.samples_per_s:,.0f} ({two.step_s * 1e3:.3g})" for two in reversed(some)}
        rows += [[name, *(cells.get(kind, "") for kind in kinds)]] if cells else []
    return build_table(["machine", *kinds], rows, title="samples/s by placement (ms per step)", numbers=kinds)


def _figure(number: float | None) -> str:
    """At least three digits; empty if unknown."""
    if number is None:
        return ""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def placement_title(one: Prediction) -> str:
    """Where the tables live."""
    return store_title(one.setup.placement, has_accelerators=one.machine.accelerators is not None)


def servers_text(setup: Setup, num_readers: int = 0) -> str:
    """The servers of a set-up, by role."""
    parts = [count(setup.num_trainers, "trainer")]
    parts += [f"{setup.num_sparse_servers} sparse"] if setup.num_sparse_servers else []
    parts += [f"{setup.num_dense_servers} dense"] if setup.num_dense_servers else []
    return " + ".join([*parts, *([count(num_readers, "reader")] if num_readers else [])])


def network_note(spec: RunSpec) -> str | None:
    """Says that a network of the user's own is predicted as the built-in one; None for a built-in one."""
    if spec.model.network in NETWORKS:
        return None
    return (
        f"The layers of {spec.model.network} are not known here: predictions are for a DLRM with this recipe's `bottom`, `top` and "
        "`interaction` instead. Look-ups, row updates and memory for tables are those of your model."
    )


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
            if plan.options["samples_per_s"] is not None:
                plain["is_enough"] = plan.is_enough(one.best)
        plain["others"] = [
            {"placement": other.setup.placement, "fits": other.fits}
            | (
                {"samples_per_s": other.samples_per_s, "step_s": other.step_s}
                if other.fits
                else {"shortfalls": list(other.shortfalls)}
            )
            for other in one.others
        ]
        machines.append(plain)
    options = {name: value for name, value in plan.options.items() if value is not None}
    result: dict[str, Any] = {"recipe": plan.name, "kind": "predicted", "options": options, "machines": machines}
    if plan.needs is not None:
        result["requirements"] = to_plain(plan.needs)
    if plan.notes:
        result["notes"] = plan.notes
    return result


def say(text: str) -> None:
    """Print a line that the terminal wraps, without color."""
    terminal().print(text, soft_wrap=True)
