"""A profiled run trains the same, and leaves a trace that Perfetto opens and a table that adds up."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from rowstead import run
from rowstead.spec.errors import TrainingError
from rowstead.training import checkpoint, profile
from tests.small_runs import RecordingCallback, small_spec

PHASES = {"waiting for data": 1, "look-up": 2, "forward": 2, "backward": 1, "dense update": 1, "row update": 1}
"""How often each phase is entered in a step: a look-up starts before the first part of the forward pass, and ends after it."""


def profiled(folder: Path, max_steps: int, *overrides: str) -> tuple[run.Result, str]:
    recorder = RecordingCallback()
    spec = small_spec("device=cpu", f"train.max_steps={max_steps}", *overrides)
    result = run.train(spec, out=folder, callback=recorder, profile=True)
    return result, next((text for text in recorder.messages if "profiled" in text or "time of steps" in text), "")


def ranges(folder: Path, name: str) -> list[dict[str, Any]]:
    """The complete events of that name in a trace; what every viewer needs of them is there."""
    trace = json.loads((folder / "trace.json").read_text())
    found = [event for event in trace["traceEvents"] if event.get("name") == name and event["ph"] == "X"]
    for event in found:
        assert event["dur"] >= 0
        assert {"ts", "pid", "tid"} <= set(event)
    return found


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("profile") / "run"
    return folder, profiled(folder, 40)[1]


def test_the_trace_has_every_phase_of_every_step_and_the_readers_work(traced: tuple[Path, str]) -> None:
    folder, _ = traced
    steps = [step for number in range(10, 30) for step in ranges(folder, f"ProfilerStep#{number}")]
    assert len(steps) == 20
    (thread,) = {step["tid"] for step in steps}
    for name, times in PHASES.items():
        found = ranges(folder, name)
        assert len(found) == 20 * times
        assert {event["tid"] for event in found} == {thread}
    assert thread not in {event["tid"] for event in ranges(folder, profile.READING)}
    trace = json.loads((folder / "trace.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    assert names[thread] == "training"
    assert "reader" in names.values()
    assert ranges(folder, "aten::addmm")


def test_the_phases_of_a_step_lie_inside_it_and_leave_no_time_over(traced: tuple[Path, str]) -> None:
    folder, _ = traced
    for number in range(10, 30):
        (step,) = ranges(folder, f"ProfilerStep#{number}")
        inside = [
            event
            for name in PHASES
            for event in ranges(folder, name)
            if step["ts"] <= event["ts"] and event["ts"] + event["dur"] <= step["ts"] + step["dur"]
        ]
        assert len(inside) == sum(PHASES.values())
        assert sum(event["dur"] for event in inside) <= step["dur"]


def test_the_table_adds_up_to_the_step_and_to_the_trace(traced: tuple[Path, str]) -> None:
    folder, text = traced
    rows = {name: float(ms) for name, ms in re.findall(r"^  (\S[\w -]*?)  +([\d.]+) +\d+%$", text, re.MULTILINE)}
    assert "time of steps 11 to 30" in text
    assert set(PHASES) <= set(rows)
    parts = sum(rows[name] for name in (*PHASES, "other"))
    assert parts == pytest.approx(rows["step"], abs=0.01 * (len(PHASES) + 1))
    for name in PHASES:
        traced_ms = sum(event["dur"] for event in ranges(folder, name)) / 20 / 1e3
        # A range begins just after its phase and ends just before: some microseconds apart, more if we are interrupted there.
        assert 0 < traced_ms <= rows[name] + 0.01
    assert re.search(r"reader's thread: [\d.]+ ms per step", text)
    assert f"{folder / 'trace.json'}" in text


def test_a_run_that_ends_inside_the_window_traces_what_there_was(tmp_path: Path) -> None:
    _, text = profiled(tmp_path / "run", 15)
    assert "time of steps 11 to 15" in text
    assert len(ranges(tmp_path / "run", "backward")) == 5
    assert not ranges(tmp_path / "run", "evaluation")


def test_a_run_that_ends_before_the_window_says_so(tmp_path: Path) -> None:
    _, text = profiled(tmp_path / "run", 8)
    assert "nothing was profiled: the first 10 steps are skipped" in text
    assert not (tmp_path / "run" / "trace.json").exists()


def test_profiling_changes_no_weight(tmp_path: Path) -> None:
    profiled(tmp_path / "traced", 40)
    run.train(small_spec("device=cpu", "train.max_steps=40"), out=tmp_path / "plain")
    ours, plain = (checkpoint.load_latest(tmp_path / name / "checkpoints", print).tensors for name in ("traced", "plain"))
    assert set(ours) == set(plain)
    assert all(torch.equal(ours[name], plain[name]) for name in ours)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_its_kernels_are_in_the_trace_and_in_the_table(tmp_path: Path) -> None:
    _, text = profiled(tmp_path / "run", 40, "device=cuda")
    trace = json.loads((tmp_path / "run" / "trace.json").read_text())
    assert any(event.get("cat") == "kernel" and event["dur"] > 0 for event in trace["traceEvents"])
    assert "GPU kernels that took most" in text


def test_a_run_that_fails_leaves_the_profiler_free_for_the_next(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="the loss is"):
        profiled(tmp_path / "fails", 40, "train.dense_optimizer.kind=sgd", "train.dense_optimizer.lr=1e30")
    assert "time of steps 11 to 15" in profiled(tmp_path / "works", 15)[1]
