"""A predicted step as a picture: its tasks over time, one line per resource, colored by phase."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from rowstead.plan.predict import Prediction
from rowstead.plan.schedule import Slot
from rowstead.report.html import Section, page_of
from rowstead.report.theme import Chart, axis, horizontal_bars, row_per_name
from rowstead.spec.errors import RowsteadError
from rowstead.spec.phases import STEP, Phase

COLORS = (
    *("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2"),
    *("#ff9da6", "#9d755d", "#bab0ac", "#eeca3b", "#79706e"),
)
"""One per phase of a step."""
LINE, LEFT, WIDTH, TOP = 28, 130, 760, 34
"""Pixels of an SVG: height of a resource's line, width of the names left of it, its length, and height of the title."""


def write_timeline(path: Path, predictions: Sequence[Prediction], *, title: str) -> None:
    """Draw the steps of several machines, one below the other, into an `.html` or `.svg` file."""
    drawn = {".html": timeline_html, ".svg": timeline_svg}.get(path.suffix.lower())
    if drawn is None:
        raise RowsteadError(f"--picture {path}: use a name that ends in .html or .svg")
    if not predictions:
        raise RowsteadError("--picture: nothing to draw, the model fits none of these machines")
    text = drawn(predictions, title)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RowsteadError(f"--picture: cannot write {path}: {error}") from None


def lines_of(prediction: Prediction) -> dict[str, list[Slot]]:
    """The tasks with a duration above 0, by resource in the order of first use; overlapped tasks come last."""
    found: dict[str, list[Slot]] = {}
    for slot in (*prediction.slots, *prediction.overlapped):
        if slot.end_s > slot.start_s:
            found.setdefault(slot.task.resource, []).append(slot)
    return found


def slot_text(slot: Slot) -> str:
    """The name of a task, marked if it overlaps with other steps."""
    return f"{slot.task.name} (overlapped)" if slot.task.hidden else slot.task.name


def hover_text(slot: Slot) -> str:
    """Phase, name and duration of a task."""
    return f"{slot.task.phase.value}: {slot_text(slot)}, {(slot.end_s - slot.start_s) * 1e3:.3g} ms"


def phase_color(phase: Phase) -> str:
    return COLORS[STEP.index(phase)]


def phases_of(predictions: Sequence[Prediction]) -> list[Phase]:
    """The phases that occur in these timelines, in order."""
    found = {slot.task.phase for one in predictions for slots in lines_of(one).values() for slot in slots}
    return [phase for phase in STEP if phase in found]


def heading(prediction: Prediction) -> str:
    """One line about a step."""
    return f"{prediction.machine.name}: {prediction.step_s * 1e3:.3g} ms per step, {prediction.samples_per_s:,.0f} samples/s"


def draw_timeline(prediction: Prediction) -> Chart:
    """One step on one machine: a row per resource, a color per phase."""
    lines, traces = lines_of(prediction), []
    for phase in phases_of([prediction]):
        slots = [slot for of in lines.values() for slot in of if slot.task.phase is phase]
        pattern = {"shape": ["/" if slot.task.hidden else "" for slot in slots]}
        traces.append(
            horizontal_bars(
                phase.value,
                [1e3 * (slot.end_s - slot.start_s) for slot in slots],
                [slot.task.resource for slot in slots],
                0,
                base=[1e3 * slot.start_s for slot in slots],
                text=[slot_text(slot) for slot in slots],
                hovertext=[hover_text(slot) for slot in slots],
                textposition="inside",
                hoverinfo="text",
                marker={"color": phase_color(phase), "pattern": pattern},
            )
        )
    rows = row_per_name(axis("milliseconds"), 2 + len(lines), barmode="overlay")
    rows["layout"]["yaxis"] |= {"categoryorder": "array", "categoryarray": list(lines)}
    return Chart(key=prediction.machine.name, title=heading(prediction), words="", traces=traces, **rows)


def timeline_html(predictions: Sequence[Prediction], title: str) -> str:
    """A page with one section per machine."""
    sections = [Section(key=one.machine.name, title=one.machine.name, charts=[draw_timeline(one)]) for one in predictions]
    return page_of(f"{title}: one predicted step", "", sections)


def timeline_svg(predictions: Sequence[Prediction], title: str) -> str:
    """A static picture."""
    parts, top = [], TOP
    parts.append(f'<text x="8" y="22" font-size="16">{html.escape(title)}: one predicted step</text>')
    left = 8
    for phase in phases_of(predictions):
        parts.append(f'<rect x="{left}" y="{top + 2}" width="12" height="12" fill="{phase_color(phase)}"/>')
        parts.append(f'<text x="{left + 16}" y="{top + 12}">{phase.value}</text>')
        left += 30 + 7 * len(phase.value)
    top += 24
    for prediction in predictions:
        lines = lines_of(prediction)
        whole = max((slot.end_s for slots in lines.values() for slot in slots), default=1.0)
        parts.append(f'<text x="8" y="{top + 16}" font-size="13">{html.escape(heading(prediction))}</text>')
        top += 24
        for line, slots in lines.items():
            parts.append(f'<text x="{LEFT - 6}" y="{top + 17}" text-anchor="end">{html.escape(line)}</text>')
            for slot in slots:
                start, width = LEFT + WIDTH * slot.start_s / whole, max(1.0, WIDTH * (slot.end_s - slot.start_s) / whole)
                hint, color = html.escape(hover_text(slot)), phase_color(slot.task.phase)
                filled = f'fill="none" stroke="{color}" stroke-dasharray="4"' if slot.task.hidden else f'fill="{color}"'
                parts.append(
                    f'<rect x="{start:.1f}" y="{top + 3}" width="{width:.1f}" height="{LINE - 6}" {filled}><title>{hint}</title></rect>'
                )
                if width > 7 * len(slot_text(slot)):
                    ink = color if slot.task.hidden else "white"
                    name = html.escape(slot_text(slot))
                    parts.append(f'<text x="{start + 4:.1f}" y="{top + 18}" fill="{ink}">{name}</text>')
            top += LINE
        top += 14
    size = f'width="{LEFT + WIDTH + 16}" height="{top}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">{"".join(parts)}</svg>\n'
