"""How do samples per second grow or fall with batch size, ids per bag, width of rows and number of tables?

Each axis leaves all else as in M1 (30 tables, rows of 64, 28 ids a bag, its MLPs; batches of 200 and 100,000 rows a table on a
CPU, 1600 and 1,000,000 on a GPU). Two figures a point: look-up + row-wise Adagrad as called, and the whole training step,
measured as in benchmarks.embedding and benchmarks.step. Beside each stands the limit that their floors set: the least bytes
over the measured rate of copying; for the whole step operations too, over the rate of a large matrix product. `--save` also draws
docs/pictures/growth-DEVICE-AXIS.svg.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.embedding import rowstead
from benchmarks.harness import OtherLoad, arguments, chosen, noise_of, publish
from benchmarks.step import NUM_BATCHES, Model, Rates, of_recipe, seconds_alone, seconds_back_to_back, steps_of
from benchmarks.timing import give_back_gpu_memory, seconds_as_called, settle_cpu
from rowstead.nn.dlrm import DLRM
from rowstead.training.build import build_model
from rowstead.training.step import Stepper

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
ROUNDS, QUICK_ROUNDS, WARMUPS = 11, 3, 2


@dataclass(frozen=True)
class Axis:
    name: str
    field: str
    """Of Shape, which the axis changes."""
    title: str
    values: tuple[int, ...]

    def models(self, base: Model) -> list[Model]:
        changes: list[dict[str, Any]] = [{self.field: value} for value in self.values]
        return [dataclasses.replace(base, shape=dataclasses.replace(base.shape, **change)) for change in changes]


BASE = {
    "cpu": of_recipe("M1", "m1", num_rows=100_000, batch_size=200),
    "cuda": of_recipe("M1", "m1", num_rows=1_000_000, batch_size=1600),
}

VALUES = {
    "cpu": {
        "batch": (50, 100, 200, 400, 800, 1600, 3200),
        "ids": (1, 2, 4, 8, 16, 32, 64, 128),
        "width": (16, 32, 64, 128, 256),
        "tables": (4, 8, 16, 32, 64, 128),
    },
    # Fewer where each value has kernels of its own, which take seconds to compile.
    "cuda": {
        "batch": (200, 400, 800, 1600, 3200, 6400, 12800, 25600),
        "ids": (1, 4, 16, 32, 64, 128),
        "width": (16, 64, 128, 256),
        "tables": (4, 16, 32, 128),
    },
}
AXES = {
    device: (
        Axis("batch", "batch_size", "examples a batch", values["batch"]),
        Axis("ids", "num_ids", "ids a bag", values["ids"]),
        Axis("width", "width", "width of a row", values["width"]),
        Axis("tables", "num_tables", "tables", values["tables"]),
    )
    for device, values in VALUES.items()
}


def measure_axis(axis: Axis, device: str, rates: Rates, rounds: int) -> list[dict[str, Any]]:
    """The rows of one axis; tables are made anew only where their number or width changes."""
    rows, built, made_for = [], None, None
    for value, model in zip(axis.values, axis.models(BASE[device]), strict=True):
        if built is None or made_for != (model.shape.num_tables, model.shape.width):
            built = None  # frees its tables before the next are made
            give_back_gpu_memory()
            built = build_model(model.spec(), torch.device(device), trains=True)
            made_for = model.shape.num_tables, model.shape.width
        rows.append({"axis": axis.name, "value": value, **measure(model, built, device, rates, rounds)})
        give_back_gpu_memory()  # graphs of this point hold their own
    return rows


def measure(model: Model, built: DLRM, device: str, rates: Rates, rounds: int) -> dict[str, float]:
    """Samples per second at one point, ours and at the floor."""
    size, shape = model.shape.batch_size, model.shape
    with OtherLoad() as others:
        embedding_s = embedding_seconds(model, built, device, rounds)
        steps = {"rowstead": steps_of(Stepper(built, model.spec().train, total_steps=1_000_000))}
        batches = [model.draw(device) for _ in range(NUM_BATCHES if device == "cuda" else 1)]
        taken = seconds_back_to_back(steps, batches, rounds) if device == "cuda" else seconds_alone(model, steps, rounds)
    floor_s = shape.both_bytes(batches[0].sparse) / rates.copy_bytes_per_s
    row = {
        "embedding_samples_per_s": size / embedding_s,
        "embedding_floor_samples_per_s": size / floor_s,
        "step_samples_per_s": size / taken["rowstead"],
        "step_floor_samples_per_s": size / rates.least_s(model, batches[0]),
    }
    return row | ({"cores_used_by_others": others.cores} if device == "cpu" else {})


def embedding_seconds(model: Model, built: DLRM, device: str, rounds: int) -> float:
    """Median seconds of look-up + update, with fresh ids each time."""
    seconds, contender = [], rowstead(built.store)
    for _ in range(WARMUPS + rounds):
        sparse = model.shape.draw(device)
        grad = torch.randn(model.shape.batch_size, model.shape.num_tables * model.shape.width, device=device) * 1e-3
        if device == "cpu":
            settle_cpu()
        seconds.append(seconds_as_called(partial(contender.both, sparse, grad), device))
    return statistics.median(seconds[WARMUPS:])


STYLE = """
  text { font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #57606a; }
  .title { font-size: 15px; font-weight: 600; fill: #1f2328; } .panel { font-size: 13px; font-weight: 600; fill: #1f2328; }
  .grid { stroke: #d0d7de; stroke-width: 1; }
  .line { fill: none; stroke-width: 2.5; stroke-linejoin: round; }
  .ours { stroke: #0969da; } .of-ours { fill: #0969da; font-weight: 600; }
  .floor { stroke: #1a7f37; stroke-width: 2; stroke-dasharray: 6 4; } .of-floor { fill: #1a7f37; font-weight: 600; }
  @media (prefers-color-scheme: dark) {
    text { fill: #9198a1; } .title, .panel { fill: #f0f6fc; } .grid { stroke: #30363d; }
    .ours { stroke: #4493f8; } .of-ours { fill: #4493f8; } .floor { stroke: #3fb950; } .of-floor { fill: #3fb950; }
  }
"""
WIDTH, HEIGHT, TOP, BOTTOM, PANEL = 820, 380, 84, 318, 300

Panel = tuple[str, str, list[float], list[float]]
"""Its title, what limits it, and samples per second: ours and at the limit."""


def draw(axis: Axis, rows: Sequence[dict[str, Any]], where: str) -> str:
    """One axis as SVG on log scales: look-up + update on the left, the whole step on the right."""
    panels: list[Panel] = [
        (title, limit, [row[f"{kind}_samples_per_s"] for row in rows], [row[f"{kind}_floor_samples_per_s"] for row in rows])
        for kind, title, limit in (
            ("embedding", "look-up + row-wise Adagrad", "memory bandwidth"),
            ("step", "whole training step", "bandwidth and arithmetic"),
        )
    ]
    body = [f'<text class="title" x="20" y="26">M1 over {axis.title}: samples per second on {where}, log scales</text>']
    for index, panel in enumerate(panels):
        body += _panel(axis, panel, left=76 + index * (PANEL + 110))
    about = f"Samples per second over {axis.title}, ours and the limit: look-up with update, and the whole training step"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{about}">\n<style>{STYLE}</style>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _panel(axis: Axis, panel: Panel, left: int) -> list[str]:
    title, limit, ours, floor = panel
    right, values = left + PANEL, axis.values
    ticks = log_ticks(min(ours + floor), max(ours + floor))

    def x(value: float) -> float:
        return left + PANEL * math.log(value / values[0]) / math.log(values[-1] / values[0])

    def y(rate: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * math.log(rate / ticks[0]) / math.log(ticks[-1] / ticks[0])

    def line(rates: Sequence[float], kind: str) -> str:
        points = " ".join(f"{x(value):.1f},{y(rate):.1f}" for value, rate in zip(values, rates, strict=True))
        return f'<polyline class="line {kind}" points="{points}"/>'

    body = [
        f'<text class="panel" x="{left}" y="{TOP - 30}">{title}</text>',
        f'<text class="of-ours" x="{left}" y="{TOP - 12}">rowstead</text>',
        f'<text class="of-floor" x="{left + 70}" y="{TOP - 12}">limit: {limit}</text>',
    ]
    for tick in ticks:
        body.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        body.append(f'<text x="{left - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{_short(tick)}</text>')
    body += [f'<text x="{x(v):.1f}" y="{BOTTOM + 18}" text-anchor="middle">{_short(v)}</text>' for v in values]
    body.append(f'<text x="{(left + right) / 2}" y="{BOTTOM + 40}" text-anchor="middle">{axis.title}</text>')
    return [*body, line(floor, "floor"), line(ours, "ours")]


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten; powers alone over a long range) from below `low` to above `high`."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 5) if last - first <= 3 else (1,)
    ticks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    start = max(index for index, tick in enumerate(ticks) if tick <= low)
    end = min(index for index, tick in enumerate(ticks) if tick >= high and index > start)
    return ticks[start : end + 1]


def _short(rate: float) -> str:
    """A number as 500, 20k or 3M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if rate >= size:
            return f"{rate / size:g}{unit}"
    return f"{rate:g}"


def main() -> None:
    options = arguments(__doc__, devices=("cpu", "cuda"), with_shapes=True).parse_args()
    device: str = options.device
    if device == "cuda":
        torch.set_float32_matmul_precision("high")
    rates = Rates.of(device)
    where = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} CPU cores"
    rows: list[dict[str, Any]] = []
    for axis in chosen(AXES[device], options):
        of_axis = measure_axis(axis, device, rates, QUICK_ROUNDS if options.quick else ROUNDS)
        rows += of_axis
        if options.save:
            (PICTURES / f"growth-{device}-{axis.name}.svg").write_text(draw(axis, of_axis, where))
    summary = {"copy_bytes_per_s": rates.copy_bytes_per_s, "operations_per_s_fp32": rates.operations_per_s["fp32"]}
    publish("growth", rows, summary | noise_of(rows), options, packages=("triton",))


if __name__ == "__main__":
    main()
