"""What several processes trained, each with its share of the tables, continues with other placements and other numbers of processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rowstead.records.run_folder import RunFolder
from rowstead.training import checkpoint
from rowstead.training.build import build_model
from rowstead.training.step import load_model
from rowstead.training.trained import evaluate, open_run
from tests.distributed.test_processes import run
from tests.small_runs import recipe

STEPS = ("--set", "train.max_steps=25", "--set", "train.checkpoint_every=10", "--set", "train.full_checkpoint_every=3")


@pytest.mark.slow
def test_rows_of_four_processes_are_loaded_by_one_from_disk_and_by_two_table_by_table(tmp_path: Path) -> None:
    given, four = recipe(tmp_path), tmp_path / "four"
    done = run(given, "--processes", 4, "--out", four, *STEPS, "--set", "placement={'*': {where: device, shard: row}}")
    assert done.returncode == 0, done.stderr
    saved = checkpoint.load_latest(four / "checkpoints", pytest.fail)
    assert (saved.step, saved.number, saved.base) == (25, 2, "step-000000010")
    assert len(list(saved.path.glob("shard-000?-*.safetensors"))) == 4
    rows = {name: value for name, value in saved.tensors.items() if name.endswith(".rows")}
    record = RunFolder.open(str(four), tmp_path).read_record()
    assert evaluate(str(four)).figures()["ne"] == pytest.approx(record.figures["ne"], abs=1e-6)

    trained = open_run(str(four))
    batch = next(iter(trained.source().batches(512)))[0]
    predicted = trained.model.predict(batch)

    (tmp_path / "scratch").mkdir()
    on_disk = ("--set", "placement={'*': ssd}", "--set", f"memory.folder={tmp_path / 'scratch'}")
    by_table = ("--processes", 2, "--set", "placement={'*': {where: device, shard: table}}")
    for name, where in (("ssd", on_disk), ("tables", by_table)):
        done = run(given, "--init-from", four, "--out", tmp_path / name, "--set", "train.max_steps=1", *where)
        assert done.returncode == 0, done.stderr
        taken_over = checkpoint.load(tmp_path / name / "checkpoints" / "step-000000000").tensors
        assert all(torch.equal(value, taken_over[table]) for table, value in rows.items()), name
        spec = RunFolder.open(str(tmp_path / name), tmp_path).read_spec()
        model = build_model(spec, torch.device("cpu"), trains=True).eval()  # on disk, where the recipe says so
        load_model(model, taken_over)
        torch.testing.assert_close(model.predict(batch), predicted, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_a_run_of_two_processes_is_resumed_by_one_and_ends_where_one_would(tmp_path: Path) -> None:
    given = recipe(tmp_path)
    two = run(given, "--processes", 2, "--out", tmp_path / "run", *STEPS)
    assert two.returncode == 0, two.stderr
    for path in checkpoint.checkpoints_in(tmp_path / "run" / "checkpoints")[-1:]:
        next(path.glob("*.safetensors")).unlink()  # its last steps are lost
    again = run("--resume", tmp_path / "run")
    assert again.returncode == 0, again.stderr
    assert "is missing; trying the previous one" in again.stdout + again.stderr
    one = run(given, "--out", tmp_path / "one", *STEPS)
    assert one.returncode == 0, one.stderr
    found, expected = (checkpoint.load_latest(tmp_path / name / "checkpoints", pytest.fail) for name in ("run", "one"))
    assert found.step == expected.step == 25
    for name, value in expected.tensors.items():
        torch.testing.assert_close(found.tensors[name], value, atol=1e-4, rtol=1e-4)
