"""Fleets of real processes: they train as well as one process, stop cleanly, and recover from kills."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from rowstead.distributed.launch import INTERRUPTED, USER_ERROR
from rowstead.fleet.coordinator import resume_fleet, train_fleet
from rowstead.fleet.restart_policy import STOPPED
from rowstead.fleet.role_usage import UsageReader
from rowstead.fleet.roster import RoleAddress, read_address
from rowstead.records.events import read_events
from rowstead.records.run_folder import RunFolder
from rowstead.run import train
from rowstead.spec.errors import RowsteadError, SpecError
from rowstead.spec.fleet import KINDS, FleetSpec, RoleKind, parse_fleet
from rowstead.training import checkpoint, trained
from tests.fleet.one_process import check_one_trainer, weights_in
from tests.small_runs import recipe, small_spec, wait_until

ROLES = "trainers=2,sparse=2,dense=1,readers=1"


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "rowstead", *map(str, arguments)]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=240)


def left_behind(folder: Path) -> list[str]:
    """Command lines of processes of a run that still exist."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            words = process.cmdline()
            if str(folder) in words and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(words))
    return found


def figures_of(out: Path) -> dict[str, float]:
    figures: dict[str, float] = json.loads((out / "record.json").read_text())["figures"]
    return figures


def test_a_fleet_of_all_roles_trains_as_well_as_one_process_and_leaves_an_ordinary_run_and_no_process(tmp_path: Path) -> None:
    out, more = tmp_path / "fleet", f"data.synth.num_train_samples={400 * 64}"
    settings = ["--set", more, "--set", "train.sync.hogwild_threads=2"]
    done = run("train", recipe(tmp_path), "--fleet", ROLES, *settings, "--out", out)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert left_behind(out) == []
    figures = figures_of(out)
    assert (figures["num_steps"], figures["num_samples"]) == (400, 400 * 64)
    assert (figures["num_restarts"], figures["num_batches_repeated"], figures["num_lost_updates"]) == (0, 0, 0)
    single = train(small_spec(more), out=tmp_path / "single").quality
    assert single is not None
    assert figures["ne"] == pytest.approx(single.ne, rel=0.04)
    quality = trained.evaluate(str(out))
    assert quality.ne == pytest.approx(figures["ne"], rel=1e-5)
    kinds = {event["kind"] for event in read_events(out / "events.jsonl")}
    assert {"checkpoint", "evaluation"} <= kinds
    for kind in KINDS:
        usage = UsageReader(out / "roles" / f"{kind}-0.jsonl")
        usage.read()
        assert usage.last["cpu_s"] > 0
        assert usage.last["rss_bytes"] > 0
        assert figures[f"{kind}_cpu_s"] > 0
    assert figures["trainer_num_bytes_received"] > 0


@pytest.mark.parametrize("num_dense", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 3])
def test_one_trainer_without_staleness_ends_at_the_weights_of_one_process_in_fp64(num_dense: int, tmp_path: Path) -> None:
    spec = small_spec("train.max_steps=40", "train.schedule.warmup_steps=10", "train.schedule.decay=linear")
    check_one_trainer(spec, num_dense, tmp_path)


@pytest.mark.parametrize("pairs", ["both", pytest.param("sparse_sparse", marks=pytest.mark.slow)])
def test_one_trainer_of_dense_vectors_and_pairs_ends_at_the_weights_of_one_process(pairs: str, tmp_path: Path) -> None:
    interaction = ("model.interaction.num_dense_vectors=3", f"model.interaction.pairs={pairs}")
    check_one_trainer(small_spec("train.max_steps=40", *interaction), 1, tmp_path)


@pytest.mark.slow
def test_one_trainer_of_several_labels_ends_at_the_weights_of_one_process(tmp_path: Path) -> None:
    labels = ("data.synth.conversion={}", "model.tasks=[{name: click, label: label}, {name: buy, label: conversion}]")
    head = "model.task_head={kind: mmoe, width: 8, experts: 2, expert: [6], tower: [4]}"
    check_one_trainer(small_spec("train.max_steps=40", *labels, head), 1, tmp_path)


@pytest.mark.parametrize(
    ("fleet", "settings", "message"),
    [
        ("trainers=2,dense=0", [], "fleet.num_dense: `easgd` needs a dense server"),
        ("trainers=2", ["train.sync.mode=none"], "train.sync.mode: `none` would give 2 trainers 2 different models"),
        ("tables=local", ["train.eval_every=10"], "train.eval_every: cannot be combined with `fleet.tables: local`"),
    ],
)
def test_a_recipe_that_a_fleet_cannot_train_is_refused(fleet: str, settings: list[str], message: str) -> None:
    with pytest.raises(SpecError) as refused:
        dataclasses.replace(small_spec(*settings), fleet=parse_fleet(fleet))
    assert message in str(refused.value)


def test_options_that_a_fleet_cannot_have_are_refused_before_anything_starts(tmp_path: Path) -> None:
    done = run("train", recipe(tmp_path), "--fleet", "trainers=2", "--processes", "2", "--out", tmp_path / "run")
    assert done.returncode == USER_ERROR, done.stdout + done.stderr
    assert "`--processes` does not apply to a fleet; remove it" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_role_that_fails_at_start_ends_the_fleet_with_its_message(tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = ["train.dense_optimizer.kind=sgd", "train.dense_optimizer.lr=1e30"]
    changes = [word for setting in settings for word in ("--set", setting)]
    done = run("train", recipe(tmp_path), "--fleet", "trainers=1,dense=0", *changes, "--out", out)
    assert done.returncode == USER_ERROR, done.stdout + done.stderr
    assert "the loss is" in done.stderr
    assert "Traceback" not in done.stderr
    assert left_behind(out) == []
    failure = RunFolder(out).read_failure()
    assert failure is not None
    assert "the loss is" in failure.why


# Faults


@contextlib.contextmanager
def training(tmp_path: Path, *settings: str, fleet: str = ROLES) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A fleet during training: the first trainer has made some steps."""
    out = tmp_path / "fleet"
    changes = [word for setting in settings for word in ("--set", setting)]
    started = command("train", recipe(tmp_path), "--fleet", fleet, *changes, "--out", out)
    coordinator = subprocess.Popen(started, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_until(lambda: steps_of(out, "trainer", 0) > 10, what="some steps")
        yield coordinator, out
    finally:
        coordinator.kill()
        coordinator.communicate()


def steps_of(out: Path, kind: RoleKind, number: int) -> int:
    """Steps in the usage file of a trainer's last incarnation."""
    usage = UsageReader(out / "roles" / f"{kind}-{number}.jsonl")
    usage.read()
    return int(usage.last.get("num_steps", 0))


def address_of(out: Path, kind: RoleKind, number: int = 0) -> RoleAddress:
    found = read_address(out, kind, number)
    assert found is not None
    return found


LONG = f"data.synth.num_train_samples={1500 * 64}"


@pytest.mark.slow
def test_a_fleet_whose_processes_all_get_sigterm_saves_and_can_be_resumed(tmp_path: Path) -> None:
    """As a cluster does it, or Ctrl-C: only the coordinator obeys, and stops the roles in order."""
    with training(tmp_path, LONG) as (coordinator, out):
        for process in (*psutil.Process(coordinator.pid).children(recursive=True), coordinator):
            process.send_signal(signal.SIGTERM)
        output, _ = coordinator.communicate(timeout=120)
    assert coordinator.returncode == 128 + signal.SIGTERM, output
    assert "the checkpoint is saved" in output
    assert not [event for event in read_events(out / "events.jsonl") if event["kind"] in ("restart", "given up")]
    assert f"train --resume {out}" in output
    assert left_behind(out) == []
    stopped_at = checkpoint.load_latest(out / "checkpoints", pytest.fail).step
    assert 10 < stopped_at < 1500
    again = run("train", "--resume", out)
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"resuming {out} after step {stopped_at:,}" in again.stdout
    figures = figures_of(out)
    assert (figures["num_steps"], figures["num_batches_repeated"], figures["num_lost_updates"]) == (1500, 0, 0)
    assert left_behind(out) == []


@pytest.mark.slow
def test_no_role_outlives_a_killed_coordinator_and_the_next_coordinator_waits_for_their_exit(tmp_path: Path) -> None:
    with training(tmp_path, f"data.synth.num_train_samples={600 * 64}") as (coordinator, out):
        pids = [address_of(out, kind).pid for kind in KINDS]
        num_steps = steps_of(out, "trainer", 0)
        coordinator.kill()
        coordinator.wait()
        again = run("train", "--resume", out)  # at once
    assert again.returncode == 0, again.stdout + again.stderr
    said = re.search(
        r"no checkpoint yet: starting at the first step\. (\d+) steps were trained after it and lost", again.stdout
    )
    assert said is not None, again.stdout
    assert num_steps - 2 <= int(said[1]) <= 600, "roles train on until they notice"
    assert figures_of(out)["num_lost_steps"] == int(said[1])
    assert not any(psutil.pid_exists(pid) for pid in pids)
    figures = figures_of(out)
    assert (figures["num_steps"], figures["num_restarts"], figures["num_batches_repeated"]) == (600, 0, 0)
    assert left_behind(out) == []


WITH_LEAVING_TRAINERS = """
import sys
from rowstead.cli.main import command
from rowstead.fleet import coordinator
coordinator.ROLES_MODULE = "tests.fleet.leaving_roles"
command()
"""


@pytest.mark.slow
def test_a_fleet_whose_trainers_leave_before_the_end_is_not_finished_ends_with_an_exit_code_and_can_be_resumed(
    tmp_path: Path,
) -> None:
    out = tmp_path / "fleet"
    words = ["train", recipe(tmp_path), "--set", LONG, "--fleet", "trainers=2,sparse=1", "--out", out]
    ended = subprocess.run(
        [sys.executable, "-c", WITH_LEAVING_TRAINERS, *map(str, words)], capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == USER_ERROR, ended.stdout + ended.stderr
    assert re.search(r"error: all trainers have exited after step [\d,]+ of 1,500", ended.stderr), ended.stderr
    assert f"continue with `rowstead train --resume {out}`" in ended.stderr
    assert not (out / "record.json").exists()
    stopped_at = checkpoint.load_latest(out / "checkpoints", pytest.fail).step
    assert 20 <= stopped_at < 1500
    result = resume_fleet(str(out))
    assert (result.outcome.ending, result.outcome.position.step) == ("finished", 1500)


# Options of a run


@pytest.mark.slow
def test_a_fleet_evaluates_saves_and_stops_early_as_the_recipe_says(tmp_path: Path) -> None:
    settings = ["train.eval_every=100", "train.eval_samples=500", "train.checkpoint_every=150"]
    never_better = ["train.early_stop.patience=1", "train.early_stop.min_delta=10"]
    spec = dataclasses.replace(small_spec(LONG, *settings, *never_better), fleet=parse_fleet(ROLES))
    result = train_fleet(spec, out=tmp_path / "fleet")
    assert result.outcome.ending == "stopped early"
    events = read_events(tmp_path / "fleet" / "events.jsonl")
    evaluations = [event for event in events if event["kind"] == "evaluation"]
    assert len(evaluations) == 3  # the first is the best, the second stops training, the third is of the restored weights
    assert next(event["step"] for event in events if event["kind"] == "checkpoint") >= 150
    best = checkpoint.load_latest(tmp_path / "fleet" / "best", pytest.fail).tensors
    kept = weights_in(tmp_path / "fleet")
    for name in kept:
        if not name.startswith("optimizer."):
            assert torch.equal(kept[name], best[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("num_dense", [1, 3])
def test_a_fleet_can_start_with_the_weights_of_another_run(num_dense: int, tmp_path: Path) -> None:
    train(small_spec(), out=tmp_path / "first")
    still = ["train.max_steps=4", "train.sparse_optimizer.lr=1e-12", "train.dense_optimizer.lr=1e-12"]
    spec = dataclasses.replace(small_spec(*still), fleet=parse_fleet(ROLES.replace("dense=1", f"dense={num_dense}")))
    record = train_fleet(spec, out=tmp_path / "fleet", init_from=str(tmp_path / "first")).record
    assert record is not None
    assert record.figures["samples_per_s"] == pytest.approx(4 * 64 / record.figures["train_s"], rel=0.5), "4 steps are enough"
    before, after = weights_in(tmp_path / "first"), weights_in(tmp_path / "fleet")
    for name, value in before.items():
        if name.startswith("net.") or name.endswith(".rows"):
            torch.testing.assert_close(after[name], value, rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("readers", "saver"),
    [
        (None, "was not saved by a fleet"),
        (['{"share":{},"book":{"next":3}}\n'], "was saved by another version of rowstead"),
    ],
)
def test_a_checkpoint_that_readers_cannot_continue_from_is_refused_with_the_command_that_uses_it(
    readers: list[str] | None, saver: str, tmp_path: Path
) -> None:
    spec, folder = small_spec("train.max_steps=4"), RunFolder(tmp_path / "run")
    train(spec, out=folder.path)
    saved = checkpoint.load_latest(folder.checkpoints, pytest.fail)
    facts = {**saved.facts, "position": {**saved.facts["position"], "step": 5}} | (
        {} if readers is None else {"readers": readers}
    )
    checkpoint.save(folder.checkpoints, 5, {name: saved.tensors[name] for name in saved.tensors}, facts, keep=1)
    folder.write_spec(dataclasses.replace(spec, fleet=FleetSpec()))
    with pytest.raises(RowsteadError, match=saver) as refused:
        resume_fleet(str(folder.path))
    assert f"`rowstead train {folder.path}/spec.yaml --init-from {folder.path}`" in str(refused.value)


@pytest.mark.slow
def test_a_checkpoint_resumes_with_another_number_of_dense_servers(tmp_path: Path) -> None:
    with training(tmp_path, LONG, fleet="trainers=2,sparse=1,dense=2") as (coordinator, out):
        coordinator.send_signal(signal.SIGINT)
        output, _ = coordinator.communicate(timeout=120)
    assert coordinator.returncode == INTERRUPTED, output
    folder = RunFolder(out)
    spec = folder.read_spec()
    assert spec.fleet is not None
    folder.write_spec(dataclasses.replace(spec, fleet=dataclasses.replace(spec.fleet, num_dense=3)))
    again = run("train", "--resume", out)
    assert again.returncode == 0, again.stdout + again.stderr
    assert figures_of(out)["num_steps"] == 1500
    sizes = []
    for number in range(3):
        usage = UsageReader(out / "roles" / f"dense-{number}.jsonl")
        usage.read()
        sizes.append(usage.last["num_parameters"])
    assert sum(sizes) == sum(value.numel() for name, value in weights_in(out).items() if name.startswith("net."))
    assert max(sizes) - min(sizes) <= 1


# Manual launch, local tables


@pytest.mark.slow
def test_manually_started_roles_train_with_keys_in_any_start_order_and_can_be_stopped_by_the_user(tmp_path: Path) -> None:
    out, printed = tmp_path / "fleet", tmp_path / "printed"
    roles = ["--fleet", "manual,trainers=1,sparse=1,dense=0", "--set", LONG]
    started = []

    def start(*arguments: object) -> subprocess.Popen[bytes]:
        with open(printed, "ab") as file:
            started.append(subprocess.Popen(command(*arguments), stdout=file, stderr=subprocess.STDOUT))
        return started[-1]

    try:
        coordinator = start("train", recipe(tmp_path), *roles, "--out", out)
        wait_until(lambda: (out / "fleet.json").exists(), what="the roster")
        assert (out / "roles" / "keys.json").stat().st_mode & 0o077 == 0
        trainer, *_ = [start("role", kind, out, 0) for kind in ("trainer", "reader", "sparse")]
        wait_until(lambda: steps_of(out, "trainer", 0) > 10, what="some steps")
        trainer.send_signal(signal.SIGTERM)
        assert trainer.wait(60) == STOPPED
        request = f"waiting for: rowstead role trainer {out} 0 --incarnation 1"
        wait_until(lambda: request in printed.read_text(), what="the trainer to be asked for again")
        start("role", "trainer", out, 0, "--incarnation", 1)
        codes = [process.wait(240) for process in (coordinator, *started[1:])]
    finally:
        for process in started:
            process.kill()
    assert codes == [0, STOPPED, 0, 0, 0], printed.read_text()
    figures = figures_of(out)
    assert (figures["num_steps"], figures["num_batches_repeated"], figures["num_restarts"]) == (1500, 0, 1)


@pytest.mark.slow
def test_a_single_trainer_can_hold_the_tables_and_resume_from_its_checkpoints(tmp_path: Path) -> None:
    local = "tables=local,trainers=1"
    with training(tmp_path, LONG, "train.checkpoint_every=20", fleet=local) as (coordinator, out):
        wait_until(lambda: bool(checkpoint.checkpoints_in(out / "checkpoints")), what="a checkpoint")
        os.kill(address_of(out, "trainer").pid, signal.SIGKILL)
        output, _ = coordinator.communicate(timeout=120)
    assert coordinator.returncode == USER_ERROR, output
    assert "continue from the last checkpoint with --resume" in output
    assert "is saved" not in output, "the trainer that held the tables was killed"
    again = run("train", "--resume", out)
    assert again.returncode == 0, again.stdout + again.stderr
    single = train(small_spec(LONG), out=tmp_path / "single").quality
    assert single is not None
    assert figures_of(out)["ne"] == pytest.approx(single.ne, rel=0.01)
    assert left_behind(out) == []


@pytest.mark.slow
def test_a_trainer_that_holds_tables_on_ssd_saves_them_before_it_closes_their_files(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    settings = ("train.max_steps=30", 'placement={"*": {where: ssd}}', f"memory.folder={folder}")
    words = [word for setting in settings for word in ("--set", setting)]
    done = run("train", recipe(tmp_path), "--fleet", "trainers=1,readers=1,tables=local", "--out", tmp_path / "run", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert figures_of(tmp_path / "run")["num_steps"] == 30
