"""The prediction of a run on a measured machine, and its comparison with the result."""

from __future__ import annotations

from rowstead.plan.predict import Prediction, predict
from rowstead.plan.setup import CachedTable, Setup
from rowstead.plan.work import step_work
from rowstead.spec.machine import Machine
from rowstead.spec.networks import NETWORKS
from rowstead.spec.placement import Placement
from rowstead.spec.record import Record
from rowstead.spec.run import RunSpec
from rowstead.spec.sizes import format_bytes


def predict_run(spec: RunSpec, placement: Placement, machine: Machine) -> Prediction | None:
    """Predict one process of a run on a measured machine; None where its measurements do not cover the run."""
    software = machine.software
    if spec.train.sync.hogwild_threads > 1 or software is None or spec.model.network not in NETWORKS:
        return None
    timings = software.cpu_timings if machine.accelerators is None else software.device_timings
    behind = tuple(
        CachedTable(table=table.name, cache_fraction=table.cache_fraction or 0.0)
        for table in placement.tables
        if table.where != "device"
    )
    measured = ("device", "ssd") if machine.accelerators is None else ("device", "cached", "host")
    unknown = any(table.where not in measured for table in placement.tables)
    if timings is None or unknown or (behind and timings.move_row is None):
        return None
    setup = Setup(placement="device", batch_size=spec.train.batch_size, behind=behind, has_input=False)
    return predict(step_work(spec), machine, software, setup, precision=spec.train.precision)


def comparison_text(prediction: Prediction, measured: Record) -> str | None:
    """One line with predicted and measured throughput; None where nothing was measured."""
    samples_per_s = measured.figures.get("samples_per_s")
    if samples_per_s is None:
        return None
    ratio = prediction.samples_per_s / samples_per_s
    text = f"predicted {prediction.samples_per_s:,.0f} samples/s, measured {samples_per_s:,.0f}: {ratio - 1:+.0%}"
    waited = measured.figures.get("reading_held_up_share", 0.0)
    without = measured.figures.get("alone_samples_per_s")
    if waited > 0.02 and without is not None:
        text += (
            f" (training waited for data {waited:.0%} of the time; without that {prediction.samples_per_s / without - 1:+.0%})"
        )
    peak = measured.figures.get("peak_memory_bytes")
    if prediction.process_bytes is not None and peak is not None:
        text += f"; memory {format_bytes(prediction.process_bytes)}, measured {format_bytes(peak)}"
    return f"{text}; predicted bottleneck: {prediction.bottlenecks[0].resource}"
