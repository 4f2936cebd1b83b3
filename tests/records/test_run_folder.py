"""A run's folder is made once, found again, and trained into by one process at a time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rowstead.records.run_folder import RunFolder, runs_in
from rowstead.spec.data import DataSpec, ParquetSpec, SynthSpec
from rowstead.spec.errors import RowsteadError
from rowstead.spec.features import DenseFeatureSpec, FeaturesSpec, SparseFeatureSpec
from rowstead.spec.parse import digest
from rowstead.spec.record import Record
from rowstead.spec.run import RunSpec


def some_spec(name: str = "quick") -> RunSpec:
    return RunSpec(
        name=name,
        data=DataSpec(synth=SynthSpec(num_dense=1, num_sparse=1, num_ids=(7,))),
        features=FeaturesSpec(
            dense=(DenseFeatureSpec(name="dense_0", missing="mean", clip=(-1e-9, 1e30)),),
            sparse=(SparseFeatureSpec(name="sparse_0", num_rows=10),),
        ),
    )


def test_what_a_killed_process_left_half_deleted_is_removed_before_the_next_one_trains(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "quick")
    left = [
        run.path / folder / name for folder in ("checkpoints", "best") for name in (".tmp-drop-step-000000125", ".tmp-save-7-9")
    ]
    for path in (*left, run.path / "checkpoints" / "step-000000200"):
        path.mkdir(parents=True)
        (path / "shard").write_bytes(b"rows")
    with run.lock():
        assert not any(path.exists() for path in left)
        assert (run.path / "checkpoints" / "step-000000200" / "shard").exists()


def run_in(root: Path, name: str = "quick", written_s: float | None = None) -> RunFolder:
    run = RunFolder.create(root, name)
    run.write_spec(some_spec())
    if written_s is not None:
        os.utime(run.spec_file, (written_s, written_s))
    return run


def test_numbers_go_up_and_gaps_are_not_filled(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "runs"
    assert [RunFolder.create(root, "quick").name for _ in range(2)] == ["quick-001", "quick-002"]
    (root / "quick-001").rmdir()
    (root / "quick-1234").mkdir()
    (root / "quick-slow-007").mkdir()
    assert RunFolder.create(root, "quick").name == "quick-1235"
    assert RunFolder.create(root, "quick-slow").name == "quick-slow-008"


def create_some(root: Path) -> list[str]:
    return [RunFolder.create(root, "quick").name for _ in range(20)]


def test_processes_that_start_at_once_get_folders_of_their_own(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        names = [name for some in pool.map(create_some, [tmp_path] * 4, chunksize=1) for name in some]
    assert len(set(names)) == 80


def test_a_folder_asked_for_must_be_new_or_empty(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert RunFolder.create_at(tmp_path / "empty").path == tmp_path / "empty"
    assert RunFolder.create_at(tmp_path / "a" / "new").path.is_dir()
    run = run_in(tmp_path)
    with pytest.raises(RowsteadError, match=r"already holds a run: choose another --out, or .*--resume"):
        RunFolder.create_at(run.path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("")
    with pytest.raises(RowsteadError, match="not empty: choose another --out"):
        RunFolder.create_at(tmp_path / "full")
    with pytest.raises(RowsteadError, match="File exists"):
        RunFolder.create_at(tmp_path / "full" / "thesis.txt")


def test_a_run_is_found_by_path_name_and_as_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = run_in(tmp_path / "runs", written_s=2000), run_in(tmp_path / "runs", written_s=1000)
    monkeypatch.chdir(tmp_path)
    assert RunFolder.open(second.path, "elsewhere") == second
    assert RunFolder.open("runs/quick-002", "elsewhere").path.samefile(second.path)
    assert RunFolder.open("quick-002", "runs").path.samefile(second.path)
    assert RunFolder.open("last", "runs").path.samefile(first.path)
    second.events_file.write_text("")  # it was resumed just now
    assert RunFolder.open("last", "runs").path.samefile(second.path)
    assert [run.name for run in runs_in(tmp_path / "runs")] == ["quick-001", "quick-002"]


def test_a_run_that_is_not_there_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(RowsteadError, match="no run under"):
        RunFolder.open("last", tmp_path / "runs")
    with pytest.raises(RowsteadError, match="run `rowstead train` first"):
        RunFolder.open("quick-001", tmp_path / "runs")
    run_in(tmp_path / "runs")
    with pytest.raises(RowsteadError, match="did you mean `quick-001`"):
        RunFolder.open("quikc-001", tmp_path / "runs")
    with pytest.raises(RowsteadError, match=r"not the folder of a run: it has no spec\.yaml"):
        RunFolder.open(tmp_path, tmp_path / "runs")


@pytest.mark.parametrize("data", [None, DataSpec(parquet=ParquetSpec(train=("a.parquet", "é*.parquet")))])
def test_the_recipe_comes_back_equal(tmp_path: Path, data: DataSpec | None) -> None:
    spec = some_spec("123")
    if data is not None:
        spec = RunSpec(name=spec.name, data=data, features=spec.features)
    run = RunFolder.create(tmp_path, spec.name)
    run.write_spec(spec)
    assert run.read_spec() == spec
    assert digest(run.read_spec()) == digest(spec)


def test_a_recipe_that_was_broken_by_hand_is_named(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    run.spec_file.write_text(run.spec_file.read_text().replace("seed:", "sed:"))
    with pytest.raises(RowsteadError, match=r"spec\.yaml: .*unknown key.*seed"):
        run.read_spec()


def test_a_record_comes_back_equal_without_what_was_not_measured(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "quick")
    with pytest.raises(RowsteadError, match="has not finished"):
        run.read_record()
    facts = {"name": "quick", "spec_digest": "ab", "date": "2024-05-01", "machine": {"cpu": "x", "num_cores": 2}}
    run.write_record(Record(kind="measured", **facts, figures={"ne": 0.8, "power_w": float("nan")}))  # type: ignore[arg-type]
    assert run.read_record() == Record(kind="measured", **facts, figures={"ne": 0.8})  # type: ignore[arg-type]
    assert run.record_file.read_text().count("\n") == 1
    for broken in ("{", '{"kind": "measured"}', "[]"):
        run.record_file.write_text(broken)
        with pytest.raises(RowsteadError, match=r"record\.json cannot be read"):
            run.read_record()


HOLD = """
import sys
from pathlib import Path
from rowstead.records.run_folder import RunFolder
with RunFolder(Path(sys.argv[1])).lock():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_lock_keeps_a_second_process_out_and_goes_with_the_first(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "quick")
    command = [sys.executable, "-c", HOLD, str(run.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RowsteadError, match=f"trained by process {holder.pid}: wait"), run.lock():
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with run.lock(), pytest.raises(RowsteadError, match=f"process {os.getpid()}"), run.lock():
        pass
    with run.lock():
        pass


def test_an_error_inside_the_lock_rises_unchanged(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "quick")
    with pytest.raises(BlockingIOError, match="mine"), run.lock():
        raise BlockingIOError("mine")
