"""Callbacks follow a real run: what each method is given, and when."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import rowstead
from rowstead.records.run_folder import RunFolder
from rowstead.training.progress import Callback
from rowstead.training.progress_bar import LogLines, PlainProgress, ProgressBar, shown_progress
from tests.small_runs import RecordingCallback, small_spec


class Recorder(Callback):
    """Keeps every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def on_start(self, spec: rowstead.RunSpec, folder: Path) -> None:
        self.calls.append(("start", spec, folder))

    def on_step(self, progress: rowstead.Progress) -> None:
        self.calls.append(("step", progress.step, progress.total_steps))

    def on_evaluation(self, step: int, quality: rowstead.Quality) -> None:
        self.calls.append(("evaluation", step, quality.ne))

    def on_checkpoint(self, step: int, folder: Path) -> None:
        assert (folder / "manifest.json").is_file()
        self.calls.append(("checkpoint", step, folder))

    def on_end(self, record: rowstead.Record | None) -> None:
        self.calls.append(("end", record))


def test_a_callback_follows_a_run_from_its_start_to_its_record(tmp_path: Path) -> None:
    recorder, other = Recorder(), RecordingCallback()
    spec = small_spec("train.max_steps=6", "train.eval_every=3", "train.checkpoint_every=4")
    result = rowstead.train(spec, out=tmp_path / "run", callback=[recorder, other])
    first, *rest = recorder.calls
    assert first == ("start", spec, tmp_path / "run")
    assert rest[-1] == ("end", result.record)
    assert [call[1:] for call in rest if call[0] == "step"] == [(step, 6) for step in range(1, 7)]
    assert [call[1] for call in rest if call[0] == "evaluation"] == [3, 6]
    checkpoints = {step: folder for kind, step, folder in (call for call in rest if call[0] == "checkpoint")}
    assert checkpoints == {step: tmp_path / f"run/checkpoints/step-{step:09d}" for step in (4, 6)}
    assert result.quality is not None
    assert rest[-2][0] == "evaluation"
    assert result.record is not None
    assert rest[-2][2] == result.quality.ne == result.record.figures["ne"]
    assert [progress.step for progress in other.steps] == list(range(1, 7))


def test_an_interrupted_run_ends_without_a_record_and_a_resumed_one_starts_again(tmp_path: Path) -> None:
    recorder = Recorder()
    spec = small_spec("train.max_steps=6")
    stopped = rowstead.train(spec, out=tmp_path / "run", callback=[recorder, RecordingCallback(stop_after=2)])
    assert recorder.calls[-1] == ("end", None)
    again = Recorder()
    rowstead.resume(stopped.folder, callback=again)
    assert again.calls[:2] == [("start", spec, tmp_path / "run"), ("step", 3, 6)]


def test_an_error_in_a_callback_ends_the_run_and_is_kept(tmp_path: Path) -> None:
    class Failing(Callback):
        def on_step(self, progress: rowstead.Progress) -> None:
            if progress.step == 2:
                raise LookupError("no such experiment")

    with pytest.raises(LookupError):
        rowstead.train(small_spec(), out=tmp_path / "run", callback=Failing())
    failure = RunFolder(tmp_path / "run").read_failure()
    assert failure is not None
    assert (failure.step, failure.why) == (2, "no such experiment")


def test_what_is_no_callback_is_refused(tmp_path: Path) -> None:
    with pytest.raises(rowstead.RowsteadError, match=r"callback: a function is not one; derive it from `rowstead\.Callback`"):
        rowstead.train(small_spec(), out=tmp_path / "run", callback=[lambda: None])  # type: ignore[list-item]


def test_python_code_gets_a_bar_on_terminals_only_and_else_messages_for_logging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "rowstead"):
        rowstead.train(small_spec("train.max_steps=2"), out=tmp_path / "run")
    assert capsys.readouterr() == ("", "")
    assert any(line.startswith("step 2: NE ") for line in caplog.messages)
    with shown_progress(True) as lines:
        assert isinstance(lines, PlainProgress)
        lines.on_message("to standard error")
    assert capsys.readouterr() == ("", "to standard error\n")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with shown_progress(None) as bar, shown_progress(False) as quiet:
        assert isinstance(bar, ProgressBar)
        assert isinstance(quiet, LogLines)
