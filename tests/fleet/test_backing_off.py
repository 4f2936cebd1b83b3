"""Backpressure of a sparse server that is slowed down tenfold: all roles wait for it, and no memory grows."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rowstead.distributed.launch import INTERRUPTED
from rowstead.fleet.reader import READ_AHEAD_BYTES
from rowstead.spec.fleet import RoleKind
from tests.fleet.disturbed import NUM_SPARSE, NUM_TRAINERS, last_of, samples_of, training
from tests.fleet.test_fleet import address_of, left_behind
from tests.small_runs import small_plain, wait_until

ROLES = f"trainers={NUM_TRAINERS},sparse={NUM_SPARSE},dense=1,readers=1"
ALL: list[tuple[RoleKind, int]] = [("dense", 0), ("reader", 0), ("sparse", 0), ("sparse", 1), ("trainer", 0), ("trainer", 1)]
CYCLE_S = 0.3
NUM_SAMPLES = 12
"""Samples in each half of the slow period; one every half second if the machine is not busy."""
MAX_GROWTH_BYTES = 24 << 20
"""Allowed growth in the second half, for memory allocators."""


def recipe(folder: Path) -> Path:
    """Write a recipe with a log far larger than any queue, batches of about 200 KB, and look-ups of a megabyte each."""
    plain = small_plain()
    plain["data"]["synth"] |= {"num_train_samples": 4_000_000, "num_sparse": 16, "num_ids": 2000, "mean_ids": 5.0}
    plain["features"]["sparse"] = [{"name": "sparse_{i}", "repeat": 16, "num_rows": 2000}]
    plain["model"]["width"] = 32
    plain["train"] = {"batch_size": 512, "sync": {"hogwild_threads": 2, "staleness": 4}}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(plain))
    return path


@contextlib.contextmanager
def slow_down(pid: int) -> Iterator[None]:
    """Let a process run for a tenth of the time."""
    ends = threading.Event()

    def slow() -> None:
        while not ends.is_set():
            os.kill(pid, signal.SIGSTOP)
            ends.wait(0.9 * CYCLE_S)
            os.kill(pid, signal.SIGCONT)
            ends.wait(0.1 * CYCLE_S)

    thread = threading.Thread(target=slow)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()
        os.kill(pid, signal.SIGCONT)


def num_sampled(out: Path) -> int:
    """Minimum number of samples over all roles but the slow one."""
    return min(len(samples_of(out, kind, number).get(0, ())) for kind, number in ALL if (kind, number) != ("sparse", 0))


def rate(samples: list[dict[str, Any]], name: str) -> float:
    """Growth of a total per second."""
    first, last = samples[0], samples[-1]
    return float((last[name] - first[name]) / (last["time_s"] - first["time_s"]))


@pytest.mark.slow
def test_no_memory_grows_without_bound_when_a_sparse_server_is_slowed_tenfold(tmp_path: Path) -> None:
    with training(tmp_path, recipe(tmp_path), ROLES) as fleet:
        out = fleet.out
        fleet.wait_for_steps(100)
        with slow_down(address_of(out, "sparse").pid):
            waited_s = last_of(out, "reader", 0)["waited_for_space_s"]
            wait_until(
                lambda: last_of(out, "reader", 0)["waited_for_space_s"] > waited_s + 1, what="the reader to be well ahead"
            )
            first = {role: len(samples_of(out, *role)[0]) for role in ALL}
            before = num_sampled(out)
            wait_until(lambda: num_sampled(out) >= before + 2 * NUM_SAMPLES, what="samples of all roles")
        slow = {role: samples_of(out, *role)[0][first[role] :] for role in ALL}
        fleet.coordinator.send_signal(signal.SIGINT)
        assert fleet.coordinator.wait(120) == INTERRUPTED, fleet.printed
    assert left_behind(out) == []

    assert rate(slow["sparse", 0], "cpu_s") < 0.4, "it was stopped for most of the time"
    assert all(rate(slow["trainer", number], "num_steps") > 0 for number in range(NUM_TRAINERS)), "they continued, slowly"
    for role, samples in slow.items():
        halves = samples[: len(samples) // 2], samples[len(samples) // 2 :]
        first, second = (max(sample["rss_bytes"] for sample in half) for half in halves)
        assert second <= first + MAX_GROWTH_BYTES, f"{role}: {first:,} bytes of memory, then {second:,}"
    reader = slow["reader", 0]
    assert max(sample["queue_bytes"] for sample in reader) <= 1.1 * READ_AHEAD_BYTES
    assert reader[-1]["num_samples"] < 2_000_000, (
        "half of the log, some 800 MB, is still unread: only the bounds have limited the growth"
    )
