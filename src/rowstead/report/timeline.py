"""A predicted step as a picture: its tasks over time, a line for each resource."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from rowstead.plan.predict import Prediction
from rowstead.plan.schedule import Slot
from rowstead.spec.errors import RowsteadError

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#ff9da6", "#9d755d", "#bab0ac", "#eeca3b")
LINE, LEFT, WIDTH, HEAD = 28, 130, 760, 34
"""Of an SVG, in pixels: a resource's line, the names left of it, its length, and the title above."""


def write_timeline(path: Path, predictions: Sequence[Prediction], *, title: str) -> None:
    """Draw the steps of some machines, one below the other, into an `.html` or `.svg` file."""
    drawn = {".html": timeline_html, ".svg": timeline_svg}.get(path.suffix.lower())
    if drawn is None:
        raise RowsteadError(f"--picture {path}: name an .html or .svg file")
    if not predictions:
        raise RowsteadError("--picture: there is no step to draw, since the model fits none of these machines")
    text = drawn(predictions, title)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RowsteadError(f"--picture: cannot write {path}: {error}") from None


def lines_of(prediction: Prediction) -> dict[str, list[Slot]]:
    """The tasks that take any time, by resource in the order of first use; what runs beside the step comes last."""
    found: dict[str, list[Slot]] = {}
    for slot in (*prediction.slots, *prediction.beside):
        if slot.end_s > slot.start_s:
            found.setdefault(slot.task.resource, []).append(slot)
    return found


def slot_words(slot: Slot) -> str:
    """The name of a task, and that it is no part of the step's path where it is not."""
    return f"{slot.task.name}, beside the step" if slot.task.hidden else slot.task.name


def heading(prediction: Prediction) -> str:
    """One line about a step."""
    return f"{prediction.machine.name}: {prediction.step_s * 1e3:.3g} ms a step, {prediction.samples_per_s:,.0f} samples/s"


def timeline_html(predictions: Sequence[Prediction], title: str) -> str:
    """An interactive figure that works offline."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=len(predictions), cols=1, subplot_titles=[heading(one) for one in predictions])
    height = 0
    for row, prediction in enumerate(predictions, 1):
        lines = lines_of(prediction)
        height += 110 + LINE * len(lines)
        for line, slots in lines.items():
            for place, slot in enumerate(slots):
                figure.add_trace(
                    go.Bar(
                        x=[(slot.end_s - slot.start_s) * 1e3],
                        base=[slot.start_s * 1e3],
                        y=[line],
                        orientation="h",
                        marker_color=COLOURS[place % len(COLOURS)],
                        marker_pattern_shape="/" if slot.task.hidden else "",
                        text=slot_words(slot),
                        hovertext=f"{slot_words(slot)}: {(slot.end_s - slot.start_s) * 1e3:.3g} ms",
                        hoverinfo="text",
                        showlegend=False,
                    ),
                    row=row,
                    col=1,
                )
        figure.update_yaxes(autorange="reversed", row=row, col=1)
        figure.update_xaxes(title_text="ms", row=row, col=1)
    figure.update_layout(title=f"{title}: one predicted step", barmode="overlay", height=height + 60, template="plotly_white")
    return str(figure.to_html(include_plotlyjs=True, full_html=True))


def timeline_svg(predictions: Sequence[Prediction], title: str) -> str:
    """A still picture, drawn by hand so that it needs no browser."""
    parts, top = [], HEAD
    parts.append(f'<text x="8" y="22" font-size="16">{html.escape(title)}: one predicted step</text>')
    for prediction in predictions:
        lines = lines_of(prediction)
        whole = max((slot.end_s for slots in lines.values() for slot in slots), default=1.0)
        parts.append(f'<text x="8" y="{top + 16}" font-size="13">{html.escape(heading(prediction))}</text>')
        top += 24
        for line, slots in lines.items():
            parts.append(f'<text x="{LEFT - 6}" y="{top + 17}" text-anchor="end">{html.escape(line)}</text>')
            for place, slot in enumerate(slots):
                left, width = LEFT + WIDTH * slot.start_s / whole, max(1.0, WIDTH * (slot.end_s - slot.start_s) / whole)
                told = html.escape(f"{slot_words(slot)}: {(slot.end_s - slot.start_s) * 1e3:.3g} ms")
                colour = COLOURS[place % len(COLOURS)]
                filled = f'fill="none" stroke="{colour}" stroke-dasharray="4"' if slot.task.hidden else f'fill="{colour}"'
                parts.append(
                    f'<rect x="{left:.1f}" y="{top + 3}" width="{width:.1f}" height="{LINE - 6}" {filled}><title>{told}</title></rect>'
                )
                if width > 7 * len(slot_words(slot)):
                    ink = colour if slot.task.hidden else "white"
                    name = html.escape(slot_words(slot))
                    parts.append(f'<text x="{left + 4:.1f}" y="{top + 18}" fill="{ink}">{name}</text>')
            top += LINE
        top += 14
    size = f'width="{LEFT + WIDTH + 16}" height="{top}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">{"".join(parts)}</svg>\n'
