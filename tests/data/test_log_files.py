"""A run continues only with the log that it began with."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rowstead.data.footers import Fingerprint, describe_changes
from rowstead.data.log_files import FILE, write_log_files
from rowstead.data.open_log import open_sources
from rowstead.data.synth import write_parquet
from rowstead.fleet.build import load_sources
from rowstead.fleet.coordinator import resume_fleet
from rowstead.fleet.roster import Roster
from rowstead.records.run_folder import RunFolder
from rowstead.run import resume, train
from rowstead.spec.data import SynthSpec
from rowstead.spec.errors import DataError
from rowstead.spec.fleet import FleetSpec
from rowstead.spec.run import RunSpec
from tests.small_runs import RecordingCallback, assert_same_weights, parquet_spec


def write_log(folder: Path, seed: int) -> RunSpec:
    """A log with the same numbers of rows for every seed."""
    synth = SynthSpec(num_train_samples=1280, num_eval_samples=100, num_dense=4, num_sparse=3, num_ids=50, seed=seed)
    write_parquet(synth, folder, rows_per_file=640, rows_per_group=128, overwrite=True)
    return parquet_spec(folder, "train.max_steps=12", "train.checkpoint_every=4")


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A run that was stopped after 5 of 12 steps; its log is in `log`."""
    spec = write_log(tmp_path / "log", seed=1)
    return train(spec, out=tmp_path / "run", callback=RecordingCallback(stop_after=5)).folder


def test_another_log_of_the_same_name_and_length_is_refused(stopped: Path, tmp_path: Path) -> None:
    write_log(tmp_path / "log", seed=2)
    with pytest.raises(DataError, match=r"the log is not the one that .*run was trained on: `.*\.parquet`: it") as refused:
        resume(str(stopped))
    assert "--accept-changed-log" in str(refused.value)
    callback = RecordingCallback()
    assert resume(str(stopped), accept_changed_log=True, callback=callback).outcome.position.step == 12
    assert any(text.startswith("continuing with a changed log: `") for text in callback.messages)
    resume(str(stopped))  # this log is now the run's own


def test_rows_in_another_order_are_another_log(stopped: Path, tmp_path: Path) -> None:
    path = tmp_path / "log" / "train-00001.parquet"
    before = path.stat()
    table = pq.read_table(path)
    pq.write_table(table.take(list(range(table.num_rows))[::-1]), path, row_group_size=128)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(DataError, match=r"train-00001\.parquet`: it"):
        resume(str(stopped))


def test_a_touched_or_copied_log_is_the_same_log(stopped: Path, tmp_path: Path) -> None:
    straight = train(write_log(tmp_path / "other", seed=1), out=tmp_path / "straight").folder
    for path in (tmp_path / "log").iterdir():
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
        os.utime(path, ns=(1, 1))
    assert_same_weights(straight, resume(str(stopped)).folder)


def test_a_log_with_more_files_is_refused(stopped: Path, tmp_path: Path) -> None:
    (tmp_path / "log" / "train-00002.parquet").write_bytes((tmp_path / "log" / "train-00001.parquet").read_bytes())
    with pytest.raises(DataError, match=r"`.*train-00002\.parquet` is new"):
        resume(str(stopped))


def test_a_run_without_fingerprints_gets_them_when_it_is_resumed(stopped: Path) -> None:
    kept = json.loads((stopped / FILE).read_text())
    (stopped / FILE).unlink()
    resume(str(stopped))
    assert json.loads((stopped / FILE).read_text()) == kept
    (stopped / FILE).write_text("[]")
    with pytest.raises(DataError, match=rf"{FILE} cannot be read; remove it"):
        resume(str(stopped))


def test_a_fleet_and_its_readers_refuse_another_log(tmp_path: Path) -> None:
    spec = dataclasses.replace(write_log(tmp_path / "log", seed=1), fleet=FleetSpec())
    folder = RunFolder.create_at(tmp_path / "run")
    folder.write_spec(spec)
    sources = open_sources(spec)
    write_log_files(folder.path, sources)
    roster = Roster(folder.path)
    roster.write((), {"transforms": sources.encoder.transforms.to_plain(), "id_kinds": sources.id_kinds})
    load_sources(spec, roster)
    write_log(tmp_path / "log", seed=2)
    for open_again in (lambda: load_sources(spec, roster), lambda: resume_fleet(str(folder.path))):
        with pytest.raises(DataError, match="the log is not the one that"):
            open_again()


def test_what_differs_is_named_for_the_first_files() -> None:
    before = {f"{n}.parquet": Fingerprint(100, "a", "tag") for n in range(6)}
    now = {
        **before,
        "0.parquet": Fingerprint(120, "b"),
        "1.parquet": Fingerprint(100, "b"),
        "2.parquet": Fingerprint(100, "a", "other"),
        "3.parquet": Fingerprint(100, "a"),
    }
    assert describe_changes(before, now) == (
        "`0.parquet`: it had 100 bytes and now has 120; `1.parquet`: its footer or last rows differ; `2.parquet`: its ETag differs"
    )
    assert describe_changes(before, {}) == "`0.parquet` is missing; `1.parquet` is missing; `2.parquet` is missing; 3 more"
