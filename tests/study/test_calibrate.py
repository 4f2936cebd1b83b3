"""Calibration writes a machine file that `plan` and `train` read, and its fit recovers the costs of a step."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from rowstead.cli.app import app
from rowstead.plan.cost import host_processor
from rowstead.plan.predict import predict
from rowstead.plan.setup import Setup, process_bytes
from rowstead.plan.traffic import Popularity, distinct_ids
from rowstead.plan.work import step_work
from rowstead.run import train
from rowstead.spec.catalogue import HERE, MACHINE_VARIABLE, calibrated_machine, load_machine, load_software, machine_text
from rowstead.spec.curve import Curve
from rowstead.spec.errors import RowsteadError
from rowstead.spec.phases import Phase
from rowstead.spec.run import RunSpec
from rowstead.spec.timings import InStep
from rowstead.study.calibration import dense, rows
from rowstead.study.calibration.calibrate import TINY, _measure_timings, whole_shapes
from rowstead.study.calibration.clock import Clock
from rowstead.study.calibration.dense import measure_interaction, measure_layers
from rowstead.study.calibration.fit import fit_timings, predict_parts, take_shorter
from rowstead.study.calibration.footprint import measure_base_bytes, measure_peak_bytes
from rowstead.study.calibration.steps import Shape, Steps, StepTime, sample_batches
from rowstead.training.progress import Callback
from tests.measured_machine import measured_machine

SHAPES = [
    Shape(num_dense=16, num_sparse=4, batch_size=64, num_rows=1000, width=16, mean_ids=2, skew=1.0, bottom=(32,), top=(32,)),
    Shape(num_dense=64, num_sparse=2, batch_size=256, num_rows=1000, width=32, mean_ids=1, skew=0.0, bottom=(64,), top=(64,)),
    Shape(num_dense=16, num_sparse=16, batch_size=128, num_rows=9000, width=64, mean_ids=8, skew=0.5, bottom=(32,), top=(32,)),
    Shape(
        num_dense=256, num_sparse=8, batch_size=512, num_rows=5000, width=16, mean_ids=4, skew=1.2, bottom=(256,), top=(128,)
    ),
]
CPU = torch.device("cpu")


@pytest.mark.parametrize("has_phases", [True, False])
def test_the_fit_recovers_the_factors_of_the_steps(has_phases: bool) -> None:
    machine = measured_machine()
    assert machine.software is not None
    processor = host_processor(machine, machine.software)
    assert processor.timings is not None
    byte_s = 1e-9 if has_phases else 0.0
    wanted = dataclasses.replace(
        processor.timings,
        dense=InStep(fixed_s=1e-3, factor=1.2, byte_s=byte_s),
        lookup=InStep(factor=1.5, fixed_s=1e-4 if has_phases else 0.0),
        update=InStep(factor=0.8, byte_s=byte_s),
    )
    made = dataclasses.replace(processor, timings=wanted)
    times = []
    for shape in SHAPES:
        parts = predict_parts(shape, made, machine.software)
        phases = {
            Phase.FORWARD: parts.dense_s / 3,
            Phase.BACKWARD: 2 * parts.dense_s / 3 + wanted.dense.fixed_s,
            Phase.LOOKUP: parts.lookup_s,
            Phase.DENSE_UPDATE: parts.dense_update_s,
            Phase.ROW_UPDATE: parts.update_s,
        }
        step_s = sum(vars(parts).values()) + wanted.dense.fixed_s
        times.append(StepTime(step_s=step_s, spread=0.0, phases_s=phases if has_phases else {}))
    found = fit_timings(processor.timings, processor, machine.software, SHAPES, times)
    for shape, time in zip(SHAPES, times, strict=True):
        changed = dataclasses.replace(machine.software, cpu_timings=found)
        setup = Setup(placement="device", batch_size=shape.batch_size, has_input=False)
        step_s = predict(step_work(shape.spec("cpu")), machine, changed, setup).step_s
        assert step_s == pytest.approx(time.step_s, rel=0.05)
    if has_phases:
        assert found.lookup.factor == pytest.approx(1.5, rel=0.1)
        assert found.update.factor == pytest.approx(0.8, rel=0.1)
        assert found.dense.byte_s == pytest.approx(byte_s, rel=0.3)


def test_uncertain_steps_are_predicted_too_long_as_often_as_too_short() -> None:
    machine, rng = measured_machine(), np.random.default_rng(0)
    assert machine.software is not None
    processor = host_processor(machine, machine.software)
    assert processor.timings is not None
    shapes, times = SHAPES * 25, []
    for shape in shapes:
        parts = predict_parts(shape, processor, machine.software)
        seconds = {Phase.FORWARD: parts.dense_s / 3, Phase.BACKWARD: 2 * parts.dense_s / 3, Phase.LOOKUP: parts.lookup_s}
        seconds |= {Phase.DENSE_UPDATE: parts.dense_update_s, Phase.ROW_UPDATE: parts.update_s}
        phases = {name: value * rng.lognormal(sigma=0.3) for name, value in seconds.items()}
        times.append(StepTime(step_s=sum(phases.values()), spread=0.0, phases_s=phases))
    found = dataclasses.replace(processor, timings=fit_timings(processor.timings, processor, machine.software, shapes, times))
    assert found.timings is not None
    ratios = [
        (sum(vars(predict_parts(shape, found, machine.software)).values()) + found.timings.dense.fixed_s) / time.step_s
        for shape, time in zip(shapes, times, strict=True)
    ]
    assert statistics.median(ratios) == pytest.approx(1.0, abs=0.03)


def test_the_shorter_time_of_two_measurements_is_taken() -> None:
    timings = measured_machine().software.cpu_timings  # type: ignore[union-attr]
    assert timings is not None
    slower = dataclasses.replace(
        timings,
        layers=tuple(dataclasses.replace(one, forward=_times(one.forward, 2.0)) for one in timings.layers),
        dense_update=_times(timings.dense_update, 0.5),
        update_call_s=3 * timings.update_call_s,
    )
    for both in (take_shorter(timings, slower), take_shorter(slower, timings)):
        assert both == dataclasses.replace(timings, dense_update=slower.dense_update)


def _times(curve: Curve, factor: float) -> Curve:
    return dataclasses.replace(curve, seconds=tuple(factor * one for one in curve.seconds))


def test_sampled_ids_are_as_distinct_as_the_id_distribution_predicts() -> None:
    shape = dataclasses.replace(SHAPES[2], batch_size=1024)
    sparse = sample_batches(shape, CPU)[0].sparse
    ids = sparse.ids.view(shape.num_sparse, -1)
    found = sum(len(one.unique()) for one in ids) / shape.num_sparse
    assert found == pytest.approx(distinct_ids(Popularity(9000, 0.5), 1024 * 8), rel=0.03)


def test_steps_are_timed_by_phase() -> None:
    time = Steps.of(SHAPES[0], CPU).measure(0.0)
    assert set(time.phases_s) == {Phase.LOOKUP, Phase.FORWARD, Phase.BACKWARD, Phase.DENSE_UPDATE, Phase.ROW_UPDATE}
    assert 0 < time.step_s < 10


def test_a_larger_layer_takes_longer() -> None:
    times = measure_layers(Clock(CPU, budget_s=0.0, least_calls=3), "fp32", is_short=True)
    assert times.forward.at(1024, 4096, 1024) > 10 * times.forward.at(64, 256, 64)
    assert times.back.at(1024, 4096, 1024) > times.back_first.at(1024, 4096, 1024) * 0.99


def test_the_environment_variable_selects_the_machine_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "machine.yaml"
    monkeypatch.setenv(MACHINE_VARIABLE, str(file))
    with pytest.raises(RowsteadError, match="run `rowstead calibrate`"):
        calibrated_machine("cpu")
    file.write_text(machine_text(measured_machine()))
    assert calibrated_machine("cpu") is not None
    assert calibrated_machine("cuda") is None
    assert load_machine(HERE).software is not None


def test_without_a_machine_file_this_machine_is_not_calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MACHINE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert calibrated_machine("cpu") is None
    with pytest.raises(RowsteadError, match="is not calibrated"):
        load_machine(HERE)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--device", "gpu"], "`auto`, `cpu` or `cuda`"),
        (["--threads", "0"], "at least 1"),
        (["--folder", "/no/such/folder"], "no folder"),
    ],
)
def test_mistakes_say_what_to_do(words: list[str], problem: str) -> None:
    done = CliRunner().invoke(app, ["calibrate", *words])
    assert isinstance(done.exception, RowsteadError)
    assert problem in str(done.exception)


@pytest.mark.parametrize(
    "where", ["/proc/machine.yaml", "/dev/null/folder/machine.yaml", "n" * 300], ids=["locked", "file", "long"]
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rowstead.study.calibration.calibrate.calibrate", lambda *_, **__: pytest.fail("it was measured"))
    done = CliRunner().invoke(app, ["calibrate", "--device", "cpu", "--out", str(tmp_path / where)])
    assert isinstance(done.exception, RowsteadError)
    assert "cannot write" in str(done.exception)
    assert not list(tmp_path.iterdir())


def small_run(shape: Shape = SHAPES[0], **more: Any) -> RunSpec:
    spec = shape.spec("cpu", threads=1, **more)
    assert spec.data.synth is not None
    synth = dataclasses.replace(spec.data.synth, num_train_samples=512, num_eval_samples=64)
    return dataclasses.replace(spec, data=dataclasses.replace(spec.data, synth=synth))


class Listener(Callback):
    """Keeps all messages."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def on_message(self, text: str) -> None:
        self.messages.append(text)


def test_a_run_keeps_its_prediction_and_says_how_far_it_was_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, listener = tmp_path / "machine.yaml", Listener()
    file.write_text(machine_text(measured_machine(num_cores=1)))
    monkeypatch.setenv(MACHINE_VARIABLE, str(file))
    result = train(small_run(), out=tmp_path / "run", callback=listener)
    predicted = json.loads((result.folder / "predicted.json").read_text())
    assert predicted["kind"] == "predicted"
    assert result.record is not None
    assert predicted["spec_digest"] == result.record.spec_digest
    assert any(message.startswith("predicted ") and "measured" in message for message in listener.messages)


def test_a_machine_measured_with_other_threads_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text(machine_text(measured_machine(num_cores=64)))
    monkeypatch.setenv(MACHINE_VARIABLE, str(file))
    result = train(small_run(), out=tmp_path / "run")
    assert not (result.folder / "predicted.json").exists()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            machine_text(measured_machine(num_cores=64)),
            "it was measured with 64 CPU threads, and this run has 1: set threads=64",
        ),
        (machine_text(measured_machine("cuda")), "it describes a machine with a GPU, and this run is on cpu"),
        ("name: [", "is not valid YAML"),
        ("name: here", "is required"),
        (None, "where there is no file: run `rowstead calibrate`, or unset it"),
    ],
    ids=["threads", "gpu", "yaml", "fields", "missing"],
)
def test_a_run_says_why_the_machine_file_that_was_named_is_not_used(
    text: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, listener = tmp_path / "machine.yaml", Listener()
    if text is not None:
        file.write_text(text)
    monkeypatch.setenv(MACHINE_VARIABLE, str(file))
    train(small_run(), out=tmp_path / "run", callback=listener)
    (line,) = (message for message in listener.messages if "is not used" in message)
    assert why in line
    assert file.name in line
    assert "\n" not in line


def test_a_run_says_nothing_of_machine_files_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    listener = Listener()
    train(small_run(), out=tmp_path / "run", callback=listener)
    assert not any("machine file" in message for message in listener.messages)


def test_auto_placement_uses_predicted_times_on_a_calibrated_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, listener = tmp_path / "machine.yaml", Listener()
    file.write_text(machine_text(measured_machine(num_cores=1)))
    monkeypatch.setenv(MACHINE_VARIABLE, str(file))
    shape = dataclasses.replace(SHAPES[0], num_rows=20_000)
    spec = small_run(shape, memory={"host": 3_000_000, "folder": str(tmp_path)})
    train(spec, out=tmp_path / "run", callback=listener)
    assert any("ms per step" in message for message in listener.messages), listener.messages


class Recorder(Clock):
    """A clock that records the matmul precision of the backward pass, and measures nothing."""

    def forward_and_back(self, forward: Any, back: Any, *, forward_s: float | None = None) -> tuple[float, float]:
        out = forward()
        out.register_hook(lambda grad: formats.append(torch.get_float32_matmul_precision()))
        back(out)
        return 1e-6, 1e-6


formats: list[str] = []


@pytest.mark.parametrize("measure", [measure_layers, measure_interaction])
def test_a_backward_pass_is_measured_in_the_precision_of_training(measure: Callable[..., Any]) -> None:
    formats.clear()
    measure(Recorder(CPU), "tf32", is_short=True)
    assert set(formats) == {"high"}
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("is_short", [True, False])
def test_whole_steps_on_a_gpu_need_no_kernels_that_the_parts_have_not_compiled(is_short: bool) -> None:
    shapes = [TINY, *whole_shapes(torch.device("cuda"), is_short=is_short)]
    assert {shape.num_sparse + 1 for shape in shapes} <= set(dense.VECTORS["cuda"])
    assert {shape.width for shape in shapes} <= set(dense.WIDTHS["cuda"])
    assert set(dense.WIDTHS["cuda"]) <= set(rows.WIDTHS["cuda"])
    assert {shape.precision for shape in shapes} == {"tf32"}
    assert len(dense.VECTORS["cuda"]) * len(dense.WIDTHS["cuda"]) <= 21  # about 1.5 s to compile each


def test_calibration_reports_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "EXAMPLES", {"cpu": (16,)})
    monkeypatch.setattr(dense, "INTERACTING", {"cpu": (16,)})
    monkeypatch.setattr(dense, "PARAMETERS", (1000,))
    monkeypatch.setattr(rows, "WITHIN_BYTES", {"cpu": (1 << 16,)})
    messages: list[str] = []
    _measure_timings(CPU, is_short=True, on_message=messages.append)
    assert messages == ["linear layers, fp32", "interaction", "dense optimizer", "row lookup and update"]


@pytest.mark.slow
def test_plan_and_train_use_a_calibrated_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "here.yaml"
    done = CliRunner().invoke(app, ["calibrate", "--quick", "--device", "cpu", "--threads", "1", "--out", str(file)])
    assert done.exit_code == 0, done.output + str(done.exception)
    monkeypatch.setenv(MACHINE_VARIABLE, str(file))
    planned = CliRunner().invoke(app, ["plan", "quickstart", "--on", "here", "--json"])
    assert planned.exit_code == 0, planned.output + str(planned.exception)
    (machine,) = json.loads(planned.stdout)["machines"]
    assert machine["samples_per_s"] > 0
    out = tmp_path / "run"
    words = [
        "train",
        "quickstart",
        "--set",
        "train.max_steps=20",
        "--set",
        "threads=1",
        "--set",
        "device=cpu",
        "--out",
        str(out),
    ]
    trained = CliRunner().invoke(app, words)
    assert trained.exit_code == 0, trained.output + str(trained.exception)
    predicted, measured = (json.loads((out / name).read_text()) for name in ("predicted.json", "record.json"))
    assert predicted["kind"] == "predicted"
    assert predicted["spec_digest"] == measured["spec_digest"]
    assert predicted["figures"]["samples_per_s"] > 0


def memory_shapes() -> list[Shape]:
    """Ten models whose memory is dominated by tables, by activations or by batches."""
    sizes = [
        (13, 4, 256, 1_000, 16, 1, (64,), (64,)),
        (64, 8, 1024, 200_000, 64, 4, (256,), (256,)),
        (64, 8, 1024, 400_000, 64, 4, (256,), (256,)),
        (1024, 16, 2048, 50_000, 32, 8, (1024, 512), (1024, 512)),
        (64, 32, 4096, 20_000, 64, 8, (128,), (128,)),
        (256, 8, 512, 300_000, 64, 2, (512,), (512,)),
        (512, 4, 512, 10_000, 16, 1, (2048, 2048), (2048, 2048)),
        (64, 64, 512, 20_000, 32, 4, (128,), (256,)),
        (128, 4, 8192, 100_000, 16, 2, (256,), (256,)),
        (16, 2, 256, 3_000_000, 32, 1, (32,), (32,)),
    ]
    return [
        Shape(num_dense=a, num_sparse=b, batch_size=c, num_rows=d, width=e, mean_ids=f, skew=1.0, bottom=g, top=h)
        for a, b, c, d, e, f, g, h in sizes
    ]


NUM_PEAKS = 3
"""The number of batches in memory depends on timing: the median of this many runs is the measured peak."""


@pytest.mark.statistical
@pytest.mark.timeout(1800)
def test_predicted_memory_is_within_5_percent_of_the_median_of_three_measured_peaks() -> None:
    software = dataclasses.replace(load_software("rowstead"), base_bytes=measure_base_bytes(1))
    off = {}
    for shape in memory_shapes():
        spec = shape.spec("cpu", threads=1)
        assert spec.data.synth is not None
        synth = dataclasses.replace(spec.data.synth, num_train_samples=12 * shape.batch_size, num_eval_samples=shape.batch_size)
        spec = dataclasses.replace(spec, data=dataclasses.replace(spec.data, synth=synth))
        peaks = [measure_peak_bytes(spec) for _ in range(NUM_PEAKS)]
        off[shape] = process_bytes(step_work(spec), software, shape.batch_size) / statistics.median(peaks) - 1
    assert max(map(abs, off.values())) <= 0.05, off
