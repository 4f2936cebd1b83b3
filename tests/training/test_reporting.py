"""A reporter writes events and scalars, and passes everything on to its callback."""

from __future__ import annotations

from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from rowstead.records.events import read_events
from rowstead.report.charts_tables import feature_sizes
from rowstead.report.inputs import gather
from rowstead.run import train
from rowstead.training.progress import Progress, RunReporter
from tests.small_runs import RecordingCallback, parquet_spec, written_log


def progress(step: int) -> Progress:
    return Progress(step=step, total_steps=20, num_samples=64 * step, loss=0.5, samples_per_s=1.0, waiting_share=0.0)


def test_steps_are_passed_on_and_logged_once_per_interval_even_if_some_are_not_seen(tmp_path: Path) -> None:
    callback = RecordingCallback()
    reporter = RunReporter(tmp_path, callback, log_every=5)
    for step in (1, 4, 6, 9, 10, 10, 11, 20):
        reporter.on_step(progress(step))
    reporter.close()
    assert [one.step for one in callback.steps] == [1, 4, 6, 9, 10, 10, 11, 20]
    assert [event["step"] for event in read_events(tmp_path / "events.jsonl")] == [6, 10, 20]


def test_a_resumed_run_supersedes_later_events(tmp_path: Path) -> None:
    for resumed_step, steps in ((None, (5, 10)), (5, (10,))):
        reporter = RunReporter(tmp_path, RecordingCallback(), log_every=5, resumed_step=resumed_step)
        for step in steps:
            reporter.on_step(progress(step))
        reporter.close()
    found = [(event["kind"], event["step"]) for event in read_events(tmp_path / "events.jsonl")]
    assert found == [("train", 5), ("resumed", 5), ("train", 10)]


def test_without_a_folder_nothing_is_written(tmp_path: Path) -> None:
    callback = RecordingCallback()
    reporter = RunReporter(None, callback, log_every=1)
    reporter.on_step(progress(1))
    reporter.on_message("hello")
    reporter.close()
    assert callback.messages == ["hello"]
    assert list(tmp_path.iterdir()) == []


def test_lengths_of_bags_in_the_report_are_those_of_the_log(tmp_path: Path) -> None:
    log = written_log(tmp_path / "log")
    train(parquet_spec(log, "train.log_every=1"), out=tmp_path / "run")
    table = pq.read_table(sorted(log.glob("train-*.parquet")))
    columns = [name for name in table.column_names if name.startswith("sparse_")]
    means = [pc.mean(pc.list_value_length(table[name])).as_py() for name in columns]
    assert max(means) > 1.3
    (run,) = gather([tmp_path / "run"]).runs
    assert run.mean_ids == pytest.approx(means, rel=1e-6)
    shown = feature_sizes(run.spec, run.mean_ids)
    assert shown.ids == run.mean_ids
