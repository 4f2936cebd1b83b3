"""Real processes: they end where one process ends, stop together, and come back when one of them is killed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

import rowstead
from rowstead.distributed.launch import INTERRUPTED, LOST, USER_ERROR, decide_restart, launch, process_environment
from rowstead.distributed.process_group import SingleProcess
from rowstead.spec.errors import RowsteadError
from rowstead.training import checkpoint
from tests.distributed.sharded_training import Settings, in_processes, trained
from tests.small_runs import recipe, wait_until

MIX = {"one": "table", "shared": "row", "mean": "replicate", "large": "column"}
SHARDS = ("table", "row", "column", "replicate", MIX)
CLIPPED = ["train.sparse_optimizer.clip=0.01", "train.dense_optimizer.clip=0.1"]
REGULAR = [
    "model.bottom_norm=layer",
    "model.top_norm=batch",
    "train.sparse_optimizer={kind: rowwise_adam, lr: 0.01, l2: 0.1, weight_decay: 0.5}",
    "train.dense_optimizer={kind: adamw, lr: 0.01, weight_decay: 0.1}",
    "train.label_smoothing=0.1",
]
SEVERAL_LABELS = [
    "data.synth.conversion={rate: 0.3}",
    "model.tasks=[{name: click, label: label}, {name: buy, label: conversion, weight: 0.5}]",
    "model.task_head={kind: ple, width: 8, experts: 1, task_experts: 2, levels: 2, expert: [6], tower: [4]}",
]
ESMM = [*SEVERAL_LABELS, "model.task_head.kind=esmm"]
DENSE_VECTORS = ["model.interaction.num_dense_vectors=3", "model.interaction.pairs=dense_sparse"]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], within: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name].double(), value.double(), rtol=0, atol=within, msg=lambda m, n=name: f"{n}: {m}")


def test_two_processes_end_at_the_weights_of_one_and_nearly_so_with_16_bits_on_the_wire(tmp_path: Path) -> None:
    exact: list[Settings] = [{"shards": shards, "num_steps": 12} for shards in SHARDS]
    exact += [{"shards": MIX, "num_steps": 12, "changes": [*CLIPPED, "train.sparse_optimizer.kind=adam"]}]
    exact += [{"shards": MIX, "num_steps": 12, "changes": DENSE_VECTORS}]
    exact += [{"shards": shards, "num_steps": 12, "changes": REGULAR} for shards in (MIX, "column")]
    exact += [{"shards": "row", "num_steps": 12, "changes": changes} for changes in (SEVERAL_LABELS, ESMM)]
    # Without Adagrad's first steps, which make a whole step of a gradient that is nearly zero, whichever way it is rounded.
    descent = ["train.dense_optimizer.kind=sgd", "train.sparse_optimizer.kind=sgd"]
    rounded: list[Settings] = [
        {"shards": MIX, "num_steps": 12, "dtype": "float32", "changes": [*descent, f"train.wire={wire}"]}
        for wire in ("bf16", "fp16")
    ]
    found = in_processes(2, [*exact, *rounded], tmp_path)
    plain = trained(exact[0], SingleProcess())
    for weights in found[: len(SHARDS)]:
        assert_same(weights, plain, 1e-9)
    for weights, settings in zip(found[len(SHARDS) : len(exact)], exact[len(SHARDS) :], strict=True):
        assert_same(weights, trained(settings, SingleProcess()), 1e-9)
    losses = trained(rounded[0], SingleProcess())["losses"]
    for weights in found[len(exact) :]:
        assert 0 < (weights["losses"] - losses).abs().max() < 0.001


IN_ANOTHER_ORDER = """
import sys, torch
from rowstead.distributed.process_group import TorchProcessGroup

group = TorchProcessGroup.join(torch.device("cpu"))
dense, rows = torch.full((3,), 1.0 + group.rank), torch.full((3,), 10.0 + group.rank)
starts = [lambda: group.start_all_reduce(dense), lambda: group.start_all_reduce(rows, of_rows=True)]
for work in [start() for start in (starts if group.rank else reversed(starts))]:
    work.wait()
group.close()
sys.exit(dense.tolist() != [3.0] * 3 or rows.tolist() != [21.0] * 3)
"""


def test_sums_of_dense_gradients_and_of_rows_may_start_in_any_order(tmp_path: Path) -> None:
    environments = [process_environment(rank, 2, tmp_path / "rendezvous", 0) for rank in range(2)]
    processes = [subprocess.Popen([sys.executable, "-c", IN_ANOTHER_ORDER], env=each) for each in environments]
    try:
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_hundred_steps_in_any_number_of_processes_end_at_the_weights_of_one(world_size: int, tmp_path: Path) -> None:
    kinds = [[f"train.sparse_optimizer.kind={kind}"] for kind in ("rowwise_adagrad", "adagrad", "adam", "sgd")]
    changes = [*kinds, [*CLIPPED, "train.batch_size=50"], ["train.batch_size=1499"]]
    settings: list[Settings] = [{"shards": shards, "changes": change} for change in changes for shards in SHARDS]
    found = in_processes(world_size, settings, tmp_path)
    for place, change in enumerate(changes):
        expected = trained({"shards": {}, "changes": change}, SingleProcess())
        for number in range(len(SHARDS)):
            assert_same(found[place * len(SHARDS) + number], expected, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_losses_in_fp32_are_those_of_one_process_to_a_ten_thousandth(world_size: int, tmp_path: Path) -> None:
    settings: list[Settings] = [{"shards": shards, "dtype": "float32"} for shards in SHARDS]
    expected = trained(settings[0], SingleProcess())["losses"]
    for found in in_processes(world_size, settings, tmp_path):
        assert (found["losses"] - expected).abs().max() < 1e-4


# Runs


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "rowstead", "train", *map(str, arguments)]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=240)


def weights_in(run: Path) -> dict[str, Tensor]:
    saved = checkpoint.load_latest(run / "checkpoints", pytest.fail)
    return {name: saved.tensors[name] for name in saved.tensors}


def steps_saved(run: Path) -> int:
    found = checkpoint.checkpoints_in(run / "checkpoints")
    return int(found[-1].name.removeprefix("step-")[:9]) if found else 0


def children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes that train; torchrun starts one more that looks after them."""
    return [child for child in psutil.Process(process.pid).children(recursive=True) if "-m" in child.cmdline()]


def killed_once(started: list[str], out: Path) -> tuple[int, str]:
    """Exit code and output of a job of which one process was killed after its second checkpoint, none of it left behind."""
    process = subprocess.Popen(started, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_until(lambda: steps_saved(out) >= 20, what="two checkpoints")
        before = children(process)
        before[-1].kill()
        said, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    assert not [child for child in before if child.is_running()]
    return process.returncode, said


@pytest.mark.slow
def test_a_job_with_a_killed_process_ends_at_the_weights_of_one_that_was_left_alone(tmp_path: Path) -> None:
    given = recipe(tmp_path, checkpoint_every=10, max_steps=200, epochs=2)
    code, said = killed_once(command(given, "--processes", 2, "--out", tmp_path / "killed"), tmp_path / "killed")
    assert code == 0, said
    assert "process 1 was killed by SIGKILL: restarting all 2 from the last checkpoint (1 of 3)" in said
    assert f"resuming {tmp_path / 'killed'} after step" in said
    left_alone = run(given, "--processes", 2, "--out", tmp_path / "alone")
    assert left_alone.returncode == 0, left_alone.stderr
    found, expected = weights_in(tmp_path / "killed"), weights_in(tmp_path / "alone")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.slow
def test_torchrun_brings_back_a_job_by_itself(tmp_path: Path) -> None:
    given = recipe(tmp_path, checkpoint_every=10, max_steps=200, epochs=2)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    started = [*torchrun, "--max-restarts", "3", "-m", "rowstead", "train", str(given), "--out", str(tmp_path / "killed")]
    code, said = killed_once(started, tmp_path / "killed")
    assert code == 0, said
    assert f"resuming {tmp_path / 'killed'} after step" in said
    left_alone = run(given, "--processes", 2, "--out", tmp_path / "alone")
    assert left_alone.returncode == 0, left_alone.stderr
    found, expected = weights_in(tmp_path / "killed"), weights_in(tmp_path / "alone")
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.slow
def test_ctrl_c_saves_once_and_leaves_no_process_behind(tmp_path: Path) -> None:
    given, out = recipe(tmp_path, checkpoint_every=10, epochs=1000), tmp_path / "stopped"
    started = command(given, "--processes", 2, "--out", out)
    process = subprocess.Popen(started, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_until(lambda: steps_saved(out) >= 10, what="a checkpoint")
        before = children(process)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == INTERRUPTED, said
    assert not [child for child in before if child.is_running()]
    assert said.count("the checkpoint is saved") == 1, said
    assert f"train --resume {out} --processes 2" in said
    assert "Traceback" not in said
    step = steps_saved(out)
    assert f"Stopped after step {step:,}" in said


def catches_sigint(process: psutil.Process) -> bool:
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return False
    caught = re.search(r"SigCgt:\s*(\w+)", status)
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGINT - 1) & 1)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_c_while_the_processes_are_starting_prints_no_traceback(tmp_path: Path) -> None:
    started = command(recipe(tmp_path), "--processes", 2, "--out", tmp_path / "stopped")
    with subprocess.Popen(started, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        wait_until(lambda: bool(children(process)), what="a process that starts")
        ranks = children(process)
        while process.poll() is None and not any(map(catches_sigint, ranks)):
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)  # Python has its handler, and rowstead not yet its own
        said, _ = process.communicate(timeout=120)
    assert process.returncode == INTERRUPTED, said
    assert "Traceback" not in said
    assert "KeyboardInterrupt" not in said


@pytest.mark.slow
def test_a_job_that_is_stopped_while_one_process_is_dead_says_what_is_lost(tmp_path: Path) -> None:
    given, out = recipe(tmp_path, checkpoint_every=10, epochs=1000), tmp_path / "stopped"
    started = command(given, "--processes", 2, "--out", out)
    with subprocess.Popen(started, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        wait_until(lambda: steps_saved(out) >= 10, what="a checkpoint")
        ranks = children(process)
        next(rank for rank in ranks if rank.environ().get("RANK") == "1").kill()
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=120)
    assert process.returncode == INTERRUPTED, said
    assert "process 1 was killed by SIGKILL before all had stopped: progress since the last checkpoint is lost" in said
    assert not [rank for rank in ranks if rank.is_running()]


@pytest.mark.slow
def test_no_process_outlives_a_launcher_that_was_killed(tmp_path: Path) -> None:
    given, out = recipe(tmp_path, checkpoint_every=10, epochs=1000), tmp_path / "orphaned"
    process = subprocess.Popen(command(given, "--processes", 2, "--out", out), stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: steps_saved(out) >= 10, what="a checkpoint")
        before = children(process)
        process.kill()
        wait_until(lambda: not any(child.is_running() for child in before), what="the processes to stop")
    finally:
        process.kill()
        for child in before:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


@pytest.mark.slow
def test_two_processes_train_dense_vectors_and_pairs_and_one_evaluates_them(tmp_path: Path) -> None:
    settings = [word for change in DENSE_VECTORS for word in ("--set", change)]
    two = run(recipe(tmp_path, max_steps=20), "--processes", 2, "--out", tmp_path / "run", *settings)
    assert two.returncode == 0, two.stdout + two.stderr
    assert weights_in(tmp_path / "run")["net.bottom.2.weight"].shape == (3 * 8, 16)
    assert 0 < rowstead.evaluate(str(tmp_path / "run")).ne < 1


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_all_with_one_message(tmp_path: Path) -> None:
    given = recipe(tmp_path, loss="bce", dense_optimizer={"kind": "sgd", "lr": 1e30})
    result = run(given, "--processes", 2, "--out", tmp_path / "run")
    said = result.stdout + result.stderr
    assert result.returncode == USER_ERROR, said
    assert said.count("error:") == 1, said
    assert "the loss is" in said
    assert "Traceback" not in said


# Decisions


@pytest.mark.parametrize(
    ("codes", "restarts", "exit_code", "reason"),
    [
        ([0, -9], True, 1, "process 1 was killed by SIGKILL"),
        ([LOST, -9], True, 1, "process 1 was killed by SIGKILL"),
        ([-15, LOST, -9], True, 1, "process 0 was killed by SIGTERM"),
        ([USER_ERROR, USER_ERROR], False, USER_ERROR, None),
        ([LOST, USER_ERROR], False, USER_ERROR, None),
        ([1, LOST], False, 1, None),
        ([LOST, LOST], True, 1, "process 0 lost its connection to the others"),
    ],
)
def test_only_a_killed_process_is_worth_a_restart(
    codes: list[int | None], restarts: bool, exit_code: int, reason: str | None
) -> None:
    decision = decide_restart(codes, restarts_left=1)
    assert (decision.restarts, decision.exit_code, decision.reason) == (restarts, exit_code, reason)
    assert not decide_restart(codes, restarts_left=0).restarts


def test_processes_of_one_machine_stay_on_the_loopback_interface(tmp_path: Path) -> None:
    environ = process_environment(1, 4, tmp_path / "rendezvous", 2, {"HOME": "/home"})
    assert environ["GLOO_SOCKET_IFNAME"].startswith("lo")
    assert (environ["RANK"], environ["WORLD_SIZE"], environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "4", "2")
    assert int(environ["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 4)
    assert "MASTER_PORT" not in environ
    assert environ["HOME"] == "/home"


def test_more_processes_than_the_memory_holds_are_refused_before_any_is_started() -> None:
    with pytest.raises(RowsteadError, match=r"^1,000,000 processes need .* are free: start at most [\d,]+"):
        launch(["train"], 1_000_000, on_message=print)


def test_a_process_whose_launcher_is_gone_when_it_begins_stops(tmp_path: Path) -> None:
    environ = process_environment(0, 1, tmp_path / "rendezvous", 0) | {"ROWSTEAD_LAUNCHER": str(os.getpid() + 1)}
    begins = "from rowstead.distributed.launch import exit_with_launcher; exit_with_launcher(); import time; time.sleep(60)"
    assert subprocess.run([sys.executable, "-c", begins], env=environ, timeout=30, check=False).returncode == -signal.SIGTERM
