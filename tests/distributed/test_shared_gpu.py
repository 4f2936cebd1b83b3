"""Several processes on one GPU: they exchange through pinned host memory, and train the weights of one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rowstead.distributed.process_group import SingleProcess
from rowstead.spec.run import RunSpec
from rowstead.stores.build import measure_memories
from rowstead.training.device import choose_device
from tests.distributed.sharded_training import Settings, in_processes, trained
from tests.distributed.test_processes import (
    CLIPPED,
    MIX,
    SHARDS,
    assert_same,
    command,
    killed_once,
    run,
    steps_saved,
    weights_in,
)
from tests.small_runs import recipe, small_spec, wait_until

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
STORES = ("device", "cached")


# Without a GPU


def test_collectives_that_are_staged_give_what_others_give(tmp_path: Path) -> None:
    settings: list[Settings] = [{"shards": shards, "num_steps": 6} for shards in SHARDS]
    settings += [{"shards": MIX, "num_steps": 6, "store": "cached", "changes": ["train.wire=bf16"], "dtype": "float32"}]
    plain, staged = (in_processes(2, settings, tmp_path / name, is_staged=name == "staged") for name in ("plain", "staged"))
    for found, expected in zip(staged, plain, strict=True):
        assert_same(found, expected, 0)


@pytest.mark.parametrize(("local_rank", "num_gpus", "index"), [(0, 1, 0), (3, 1, 0), (1, 4, 1), (5, 4, 1)])
def test_processes_share_gpus_in_turn_where_there_are_too_few(
    local_rank: int, num_gpus: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    for name, value in {"RANK": local_rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": 8}.items():
        monkeypatch.setenv(name, str(value))
    assert choose_device(small_spec("device=cuda")) == torch.device("cuda", index)


@pytest.mark.parametrize(("num_processes", "num_gpus", "share"), [(1, 1, 1), (4, 1, 4), (4, 4, 1), (4, 3, 2)])
def test_processes_that_share_a_gpu_divide_its_memory(
    num_processes: int, num_gpus: int, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1_200_000, 2_000_000))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_processes))
    spec: RunSpec = small_spec("device=cuda")
    assert measure_memories(spec, torch.device("cuda", 0)).device_bytes == int(0.9 * (1_200_000 // share))


# On a GPU


@needs_gpu
@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_that_share_a_gpu_end_at_the_weights_of_one(world_size: int, tmp_path: Path) -> None:
    exact: list[Settings] = [
        {"shards": shards, "num_steps": 20, "store": store, "device": "cuda"} for store in STORES for shards in SHARDS
    ]
    adam: list[Settings] = [
        {**exact[0], "shards": MIX, "store": store, "changes": [*CLIPPED, "train.sparse_optimizer.kind=adam"]}
        for store in STORES
    ]
    descent = ["train.dense_optimizer.kind=sgd", "train.sparse_optimizer.kind=sgd"]
    rounded: list[Settings] = [
        {**exact[0], "shards": MIX, "dtype": "float32", "changes": [*descent, f"train.wire={wire}"]}
        for wire in ("bf16", "fp16")
    ]
    found = in_processes(world_size, [*exact, *adam, *rounded], tmp_path)
    plain, clipped, losses = (trained(one[0], SingleProcess()) for one in (exact, adam, rounded))
    for weights in found[: len(exact)]:
        assert_same(weights, plain, 1e-9)
    for weights in found[len(exact) : len(exact) + len(adam)]:
        assert_same(weights, clipped, 1e-9)
    for weights in found[len(exact) + len(adam) :]:
        assert 0 < (weights["losses"] - losses["losses"]).abs().max() < 0.001


PLACEMENT = "{sparse_0: {where: cached, cache_fraction: 0.5, shard: row}, sparse_1: {shard: column}, sparse_2: {shard: table}}"
ON_GPU = ("--device", "cuda", "--set", f"placement={PLACEMENT}")


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-2, atol=1e-3, msg=lambda text, name=name: f"{name}: {text}")


@needs_gpu
def test_a_killed_job_on_a_shared_gpu_ends_near_the_weights_of_one_that_was_left_alone(tmp_path: Path) -> None:
    given = recipe(tmp_path, checkpoint_every=10, max_steps=100)
    killed, alone = tmp_path / "killed", tmp_path / "alone"
    code, said = killed_once(command(given, *ON_GPU, "--processes", 2, "--out", killed), killed)
    assert code == 0, said
    assert "process 1 was killed by SIGKILL: restarting all 2 from the last checkpoint (1 of 3)" in said
    assert "2 processes share a GPU" in said
    left_alone = run(given, *ON_GPU, "--processes", 2, "--out", alone)
    assert left_alone.returncode == 0, left_alone.stderr
    assert_near(weights_in(killed), weights_in(alone))  # a cache fills other slots then, and so sums in another order


@needs_gpu
def test_checkpoints_move_between_numbers_of_processes_on_a_shared_gpu(tmp_path: Path) -> None:
    given, out = recipe(tmp_path, checkpoint_every=10, max_steps=100), tmp_path / "moved"
    first = subprocess.Popen(command(given, *ON_GPU, "--processes", 2, "--out", out), stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: steps_saved(out) >= 10, what="a checkpoint")
        first.terminate()
        first.wait(timeout=120)
    finally:
        first.kill()
    assert 10 <= steps_saved(out) < 100
    resumed = run("--resume", out, "--processes", 4)
    assert resumed.returncode == 0, resumed.stderr
    assert steps_saved(out) == 100
    one = run(given, *ON_GPU, "--out", tmp_path / "one")
    assert one.returncode == 0, one.stderr
    assert_near(weights_in(out), weights_in(tmp_path / "one"))
    scored = subprocess.run(
        [sys.executable, "-m", "rowstead", "evaluate", str(out)], capture_output=True, text=True, timeout=120, check=False
    )
    assert scored.returncode == 0, scored.stderr
