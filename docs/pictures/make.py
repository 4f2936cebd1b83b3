"""Draws docs/pictures/quickstart.svg: how a quickstart run nears the best possible NE, and where logistic regression ends.

python -m docs.pictures.make RUN      measure (a finished quickstart run's folder; trains logistic regression), then draw
python -m docs.pictures.make          draw again from quickstart.json

The NE shown while training is of predictions made before each update, over the last 100 steps, so no example counts that was
already trained on. Logistic regression, the peer of benchmarks/quality.py, reads the same batches.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FIGURES = HERE / "quickstart.json"
PICTURE = HERE / "quickstart.svg"

Curve = list[tuple[int, float]]
"""Steps and NE."""


def measure(run: Path) -> dict[str, Any]:
    """The curves of a run and of logistic regression on the same batches."""
    from rowstead.records.events import read_events

    events = read_events(run / "events.jsonl")
    evaluations = [event for event in events if event["kind"] == "evaluation"]
    logistic, logistic_final = logistic_regression()
    return {
        "dlrm": [(event["step"], round(event["ne"], 4)) for event in events if event["kind"] == "train"],
        "dlrm_final": round(evaluations[-1]["ne"], 4),
        "logistic": logistic,
        "logistic_final": logistic_final,
        "best": round(evaluations[-1]["ne_best"], 4),
    }


def logistic_regression(lr: float = 0.01) -> tuple[Curve, float]:
    """NE while training on the quickstart's log, and on its evaluation split at the end."""
    import torch
    from torch.nn.functional import binary_cross_entropy_with_logits

    from benchmarks.quality import LogisticRegression
    from rowstead.data.open_log import open_sources
    from rowstead.spec.run import load_recipe
    from rowstead.training.metrics import Evaluation
    from rowstead.training.progress import MovingLoss

    spec = load_recipe("quickstart")
    sources = open_sources(spec)
    model = LogisticRegression(len(spec.features.expanded_dense()), [table.num_rows for table in spec.tables])
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    total_steps = -(-sources.train.num_samples // spec.train.batch_size)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=total_steps)
    window, curve = MovingLoss(), []
    for step, (batch, _) in enumerate(sources.train.batches(spec.train.batch_size), start=1):
        assert batch.labels is not None
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(model(batch), batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        window.add(batch.num_samples, loss.item(), float(batch.labels.mean()))
        if step % spec.train.log_every == 0 and window.ne is not None:
            curve.append((step, round(window.ne, 4)))
    evaluation = Evaluation()
    with torch.no_grad():
        for batch, _ in sources.eval.batches(8192):
            assert batch.labels is not None
            evaluation.add(model(batch).numpy(), batch.labels.numpy())
    final = evaluation.quality().ne
    assert final is not None
    return curve, round(final, 4)


STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #57606a; }
  .title { font-size: 15px; font-weight: 600; fill: #1f2328; }
  .grid { stroke: #d0d7de; stroke-width: 1; }
  .line { fill: none; stroke-width: 2.5; stroke-linejoin: round; }
  .dlrm { stroke: #0969da; } .of-dlrm { fill: #0969da; }
  .logistic { stroke: #bc4c00; } .of-logistic { fill: #bc4c00; }
  .best { stroke: #1a7f37; stroke-width: 2; stroke-dasharray: 6 4; } .of-best { fill: #1a7f37; }
  .name { font-weight: 600; }
  @media (prefers-color-scheme: dark) {
    text { fill: #9198a1; } .title { fill: #f0f6fc; } .grid { stroke: #30363d; }
    .dlrm { stroke: #4493f8; } .of-dlrm { fill: #4493f8; }
    .logistic { stroke: #f0883e; } .of-logistic { fill: #f0883e; }
    .best { stroke: #3fb950; } .of-best { fill: #3fb950; }
  }
"""


def draw(figures: dict[str, Any]) -> str:
    """The picture as SVG, legible on light and on dark pages."""
    width, height = 780, 380
    left, right, top, bottom = 58, 590, 56, 330
    last = max(step for step, _ in figures["dlrm"])
    low, high = 0.74, 0.90

    def x(step: float) -> float:
        return left + (right - left) * step / last

    def y(ne: float) -> float:
        return top + (bottom - top) * (high - ne) / (high - low)

    def line(curve: Curve, kind: str) -> str:
        shown = " ".join(f"{x(step):.1f},{y(ne):.1f}" for step, ne in curve if ne <= high)
        return f'<polyline class="line {kind}" points="{shown}"/>'

    def name(ne: float, kind: str, text: str, value: float) -> str:
        return (
            f'<text class="name of-{kind}" x="{right + 12}" y="{y(ne) - 3:.1f}">{text}</text>'
            f'<text class="of-{kind}" x="{right + 12}" y="{y(ne) + 13:.1f}">NE {value:.4f} held out</text>'
        )

    parts = [
        f'<text class="title" x="{left - 40}" y="26">Quickstart: normalized entropy while training (lower is better)</text>'
    ]
    for ne in (0.74, 0.78, 0.82, 0.86, 0.90):
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y(ne):.1f}" y2="{y(ne):.1f}"/>')
        parts.append(f'<text x="{left - 8}" y="{y(ne) + 4:.1f}" text-anchor="end">{ne:.2f}</text>')
    steps = range(0, last + 1, 200)
    parts += [f'<text x="{x(step):.1f}" y="{bottom + 20}" text-anchor="middle">{step:,}</text>' for step in steps]
    parts.append(f'<text x="{(left + right) / 2}" y="{bottom + 42}" text-anchor="middle">steps of 2,048 examples</text>')
    best = y(figures["best"])
    parts.append(f'<line class="best" x1="{left}" x2="{right}" y1="{best:.1f}" y2="{best:.1f}"/>')
    parts += [line(figures["logistic"], "logistic"), line(figures["dlrm"], "dlrm")]
    parts.append(name(figures["logistic_final"], "logistic", "logistic regression", figures["logistic_final"]))
    parts.append(name(figures["dlrm_final"] + 0.008, "dlrm", "DLRM", figures["dlrm_final"]))
    parts.append(f'<text class="name of-best" x="{right + 12}" y="{best + 14:.1f}">best possible {figures["best"]:.4f}</text>')
    about = "NE over training steps: logistic regression, DLRM, and the best possible on this log"
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{about}">\n<style>{STYLE}</style>\n{body}\n</svg>\n'
    )


def main(arguments: list[str]) -> int:
    """Measure where a run is given, and draw."""
    if len(arguments) > 1:
        print(__doc__, file=sys.stderr)
        return 2
    if arguments:
        FIGURES.write_text(json.dumps(measure(Path(arguments[0]))) + "\n")
    PICTURE.write_text(draw(json.loads(FIGURES.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
