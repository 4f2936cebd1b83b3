"""Runs by name and by folder: what is missing, damaged or in the way is named."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.cli.commands import Command, assert_refused, changed, parquet_recipe, recipe


def test_a_folder_that_exists_is_refused(rowstead: Command, tmp_path: Path) -> None:
    assert rowstead("train", recipe("train.max_steps=1"), "--out", "here").code == 0
    before = sorted(tmp_path.rglob("*"))
    assert_refused(rowstead("train", recipe("train.max_steps=1"), "--out", "here"), "here already holds a run", "--resume here")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("option", ["--out", "--runs"])
def test_a_folder_that_cannot_be_written_is_named(rowstead: Command, option: str) -> None:
    # In /proc not even root may make a folder.
    assert_refused(rowstead("train", recipe("train.max_steps=1"), option, "/proc/run"), "cannot use /proc/run: ")


@pytest.mark.parametrize("option", ["--out", "--runs"])
def test_a_file_where_a_folder_should_be_is_named(rowstead: Command, option: str) -> None:
    Path("file").write_text("precious")
    assert_refused(rowstead("train", recipe("train.max_steps=1"), option, "file/run"), "cannot use file/run: Not a directory")
    assert Path("file").read_text() == "precious"


@pytest.mark.parametrize("arguments", [("evaluate",), ("train", "--resume"), ("predict", "--out", "p.parquet")])
def test_an_unknown_run_names_the_nearest(rowstead: Command, runs: Path, arguments: tuple[str, ...]) -> None:
    done = rowstead(*arguments, "smal-001", "--runs", str(runs))
    assert done.code == 2
    assert "no run `smal-001`" in done.err
    assert "did you mean `small-001`?" in done.err
    nothing = rowstead(*arguments, "last", "--runs", "empty")
    assert nothing.code == 2
    assert "run `rowstead train` first" in nothing.err


def test_a_folder_that_is_no_run_is_refused(rowstead: Command, tmp_path: Path) -> None:
    assert_refused(rowstead("evaluate", str(tmp_path)), "is not the folder of a run: it has no spec.yaml")


@pytest.mark.parametrize("extra", [("--set", "seed=2"), ("--init-from", "x"), ("--out", "y"), ("quickstart",)])
def test_resume_takes_nothing_else(rowstead: Command, extra: tuple[str, ...]) -> None:
    assert_refused(rowstead("train", "--resume", "last", *extra), "`--resume` uses the run's own recipe and settings; remove")


def test_a_checkpoint_of_another_model_is_refused(rowstead: Command, runs: Path, log: Path) -> None:
    other = parquet_recipe(log, "model.width=4")
    done = rowstead("train", other, "--init-from", str(runs / "small-001"))
    assert_refused(done, "is a checkpoint of another model", "spec.yaml")


def test_a_run_whose_recipe_was_changed_by_hand_is_refused(rowstead: Command, tmp_path: Path) -> None:
    assert rowstead("train", recipe("train.max_steps=1"), "--out", "here").code == 0
    file = tmp_path / "here" / "spec.yaml"
    file.write_text(file.read_text().replace("width: 8", "width: 4"))
    for arguments in (("evaluate", "here"), ("train", "--resume", "here")):
        done = rowstead(*arguments)
        assert done.code == 2
        assert "is a checkpoint of another model" in done.err
    file.write_text("name: [")
    done = rowstead("evaluate", "here")
    assert done.code == 2
    assert "here/spec.yaml is not valid YAML" in done.err


def test_a_damaged_checkpoint_is_named_by_every_command_that_reads_it(rowstead: Command) -> None:
    assert rowstead("train", recipe("train.max_steps=2", "train.checkpoint_every=1"), "--out", "here").code == 0
    shard = Path("here/checkpoints/step-000000002/shard-00000.safetensors")
    os.truncate(shard, 100)
    done = rowstead("evaluate", "here")
    assert done.code == 0
    assert "here/checkpoints/step-000000002 is damaged: shard-00000.safetensors is truncated" in done.out
    resumed = rowstead("train", "--resume", "here")
    assert resumed.code == 0
    assert "step-000000002 is damaged" in resumed.out
    assert "resuming here after step 1" in resumed.out


def test_evaluate_scores_the_run_or_other_files(rowstead: Command, runs: Path, log: Path) -> None:
    own = rowstead("evaluate", "last", "--runs", str(runs))
    assert own.code == 0
    assert "on 200 examples" in own.out
    assert re.search(r"NE +│ [01]\.\d{4}", own.out)
    other = rowstead("evaluate", str(runs / "small-001"), "--data", f"{log}/train-*.parquet")
    assert "on 600 examples" in other.out
    missing = rowstead("evaluate", str(runs / "small-001"), "--data", "nowhere.parquet")
    assert_refused(missing, "nowhere.parquet")


def test_evaluate_shows_what_mattered(rowstead: Command, runs: Path) -> None:
    done = rowstead("evaluate", "last", "--runs", str(runs), "--importance", "--permutations", "2", "--samples", "100")
    assert done.code == 0
    assert "What mattered: NE" in done.out
    assert "of 100 examples, each feature permuted 2 times" in done.out
    assert re.search(r"sparse_0 +sparse +[+-]0\.\d{5} +[+-]0\.\d{5} to [+-]0\.\d{5}", done.out)


def test_evaluate_needs_labels(rowstead: Command, runs: Path, log: Path) -> None:
    bare = changed(log, lambda table: table.drop_columns(["label"]))
    assert_refused(rowstead("evaluate", "last", "--runs", str(runs), "--data", f"{bare}/eval-*.parquet"), "`label`")
    done = rowstead("predict", "last", "--runs", str(runs), "--data", f"{bare}/eval-*.parquet", "--out", "p.parquet")
    assert done.code == 0
    assert pq.read_table("p.parquet").num_rows == 200


def test_predict_refuses_what_it_cannot_write(rowstead: Command, runs: Path) -> None:
    arguments = ("predict", "last", "--runs", str(runs), "--out")
    assert_refused(rowstead(*arguments, "nowhere/p.parquet"), "there is no folder nowhere")
    Path("p.parquet").write_text("precious")
    assert_refused(rowstead(*arguments, "p.parquet"), "p.parquet exists", "--overwrite")
    assert Path("p.parquet").read_text() == "precious"
    assert rowstead(*arguments, "p.parquet", "--overwrite").code == 0
    assert pq.read_table("p.parquet").num_rows == 200


def test_predict_never_replaces_the_log_it_reads(rowstead: Command, runs: Path, log: Path) -> None:
    folder = changed(log, lambda table: table)
    file = next(folder.glob("eval-*.parquet"))
    before = file.read_bytes()
    link = folder / "link.parquet"
    link.symlink_to(file)
    for out in (file, link):
        arguments = ("predict", "last", "--runs", str(runs), "--data", str(file), "--out", str(out), "--overwrite")
        assert_refused(rowstead(*arguments), "a file of the log itself")
    assert file.read_bytes() == before


def test_a_changed_log_is_accepted_only_where_a_run_is_resumed(rowstead: Command) -> None:
    refused = rowstead("train", recipe("train.max_steps=1"), "--accept-changed-log")
    assert_refused(refused, "`--accept-changed-log` applies only to `--resume`")


def test_a_run_that_fails_before_its_first_step_leaves_nothing(rowstead: Command, log: Path, tmp_path: Path) -> None:
    bad = parquet_recipe(log, "train.dense_optimizer.lr=1e30", "train.sparse_optimizer.lr=1e30", "data.parquet.label=dense_0")
    assert_refused(rowstead("train", bad), "dense_0")
    assert not list(Path("runs").glob("*"))


def test_runs_says_which_run_failed_and_why_and_when(rowstead: Command) -> None:
    diverging = recipe("train.dense_optimizer={kind: sgd, lr: 1e30}", "train.max_steps=20")
    failed = rowstead("train", diverging)
    assert failed.code == 2
    listed = rowstead("runs")
    (line,) = [line for line in listed.out.splitlines() if line.strip().startswith("small-001")]
    assert re.search(r"20\d\d-\d\d-\d\dT\d\d:\d\d", line)
    assert failed.err.split(":", 1)[1].split()[0] in line
    assert "unfinished" not in listed.err
    assert rowstead("report").code == 0
    assert "failed after 1 step: the loss is nan" in Path("report.html").read_text()
