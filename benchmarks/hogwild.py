"""How much faster do 2 Hogwild threads train than 1, and what keeps them from being twice as fast?

M1 with 100,000 rows a table and batches of 200, on batches that are in memory already: look-up, forward, loss, backward, dense and row
update, each thread with batches of its own, over the same rows and parameters, without locks. "1 torch thread" and "2 torch threads" are the
Stepper of `rowstead train` without Hogwild. Contenders take turns; figures are medians over the rounds. `cores_used_by_others` says
how quiet the machine was: the speed-up counts only where it is near 0.

`lock_share` is, from above, the share of a thread's time on a core in which it held Python's lock: all but the time inside calls that let
go of it (our compiled kernels, torch's linear layers, backward pass and optimizer), measured around each call. Two threads share one
lock, so that they cannot be more than 1 / lock_share times as fast as one.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness import OtherLoad, arguments, noise_of, publish
from benchmarks.step import of_recipe
from rowstead.data.batch import Batch
from rowstead.kernels.cpu import embedding as cpu
from rowstead.kernels.cpu import interaction as interaction_cpu
from rowstead.spec.phases import Phase
from rowstead.training.build import build_model
from rowstead.training.hogwild import Hogwild
from rowstead.training.step import Stepper

NUM_BATCHES = 24
ROUNDS, QUICK_ROUNDS = 15, 3
STEPS, QUICK_STEPS = 48, 12
"""Of all threads together, a round."""


class Contenders:
    """One model, trained by 1 or 2 threads in turn."""

    def __init__(self, num_threads: int) -> None:
        model = of_recipe("M1", "m1", num_rows=100_000, batch_size=200)
        self.batches: list[Batch] = [model.draw("cpu") for _ in range(NUM_BATCHES)]
        self.batch_size, self.num_threads = model.shape.batch_size, num_threads
        spec = model.spec()
        first = Stepper(build_model(spec, torch.device("cpu"), trains=True), spec.train, total_steps=1_000_000)
        self.all_threads = Hogwild(first, num_threads)
        self.one_thread = Hogwild(Stepper(first.model, spec.train, total_steps=1_000_000), 1)
        self._numbers = itertools.count(1)

    def hogwild(self, hogwild: Hogwild, num_steps: int) -> list[float]:
        """Some steps, shared by the threads as they get free; returns how many seconds each computed on a core."""
        left, cpu_s = itertools.count(), list[float]()

        def work(thread: int, stepper: Stepper) -> None:
            start = time.thread_time()
            while next(left) < num_steps:
                number = next(self._numbers)
                stepper.step(self.batches[number % NUM_BATCHES], number)
            cpu_s.append(time.thread_time() - start)

        hogwild.run(work)
        return cpu_s

    def plain(self, torch_threads: int, num_steps: int) -> None:
        """The same steps one after another."""
        before = torch.get_num_threads()
        torch.set_num_threads(torch_threads)
        stepper = self.one_thread.workers[0]
        for _ in range(num_steps):
            number = next(self._numbers)
            stepper.step(self.batches[number % NUM_BATCHES], number)
        torch.set_num_threads(before)


def measure(contenders: Contenders, *, rounds: int, num_steps: int) -> list[dict[str, Any]]:
    """A row for each contender."""
    calls: dict[str, Callable[[], Any]] = {
        "1 torch thread": lambda: contenders.plain(1, num_steps),
        "2 torch threads": lambda: contenders.plain(2, num_steps),
        "1 Hogwild thread": lambda: contenders.hogwild(contenders.one_thread, num_steps),
        f"{contenders.num_threads} Hogwild threads": lambda: contenders.hogwild(contenders.all_threads, num_steps),
    }
    wall_s: dict[str, list[float]] = {name: [] for name in calls}
    others: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            with OtherLoad() as load:
                call()
            if turn:  # the first warms up
                wall_s[name].append(time.perf_counter() - start)
                others[name].append(load.cores)
    return [
        {
            "threads": name,
            "samples_per_s": num_steps * contenders.batch_size / statistics.median(wall_s[name]),
            "step_ms": 1e3 * statistics.median(wall_s[name]) / num_steps,
            "cores_used_by_others": statistics.median(others[name]),
        }
        for name in calls
    ]


class LockWatch:
    """Tells phase by phase how long the thread that makes steps is on a core, and how long of that inside calls that let go of
    Python's lock."""

    def __init__(self) -> None:
        self.cpu_s: dict[str, float] = {}
        self.free_s: dict[str, float] = {}
        self._phase = ""
        self._since_s = 0.0

    def begin(self, phase: Phase) -> None:
        self._phase, self._since_s = phase.value, time.thread_time()

    def end(self) -> None:
        self.cpu_s[self._phase] = self.cpu_s.get(self._phase, 0.0) + time.thread_time() - self._since_s

    def counted(self, call: Callable[..., Any], sign: int) -> Callable[..., Any]:
        """The same call, whose time counts as free of the lock (1), or not (-1) inside one that does."""

        def inner(*args: Any, **more: Any) -> Any:
            start = time.thread_time()
            try:
                return call(*args, **more)
            finally:
                self.free_s[self._phase] = self.free_s.get(self._phase, 0.0) + sign * (time.thread_time() - start)

        return inner


def lock_rows(contenders: Contenders, num_steps: int) -> list[dict[str, Any]]:
    """A row for each phase of a step, and one for all, with the share of its time in which the thread may have held Python's lock."""
    free: list[tuple[Any, str, int]] = [
        (cpu, "pool_bags", 1),
        (cpu, "update_tables", 1),
        (interaction_cpu, "_multiply", 1),
        (interaction_cpu, "backward", -1),  # Python inside the backward pass,
        (interaction_cpu, "_spread", 1),  # but for its kernel
        (torch.nn.functional, "linear", 1),
        (torch.Tensor, "backward", 1),
        (torch, "_fused_adagrad_", 1),
    ]
    stepper, watch = contenders.one_thread.workers[0], LockWatch()
    originals = [getattr(owner, name) for owner, name, _ in free]
    stepper.timers.observer = watch
    try:
        for (owner, name, sign), original in zip(free, originals, strict=True):
            setattr(owner, name, watch.counted(original, sign))
        contenders.plain(1, num_steps)
    finally:
        for (owner, name, _), original in zip(free, originals, strict=True):
            setattr(owner, name, original)
        stepper.timers.observer = None
    rows = [_lock_row(name, watch.cpu_s[name], watch.free_s.get(name, 0.0), num_steps) for name in watch.cpu_s]
    return [*rows, _lock_row("whole step", sum(watch.cpu_s.values()), sum(watch.free_s.values()), num_steps)]


def _lock_row(phase: str, cpu_s: float, free_s: float, num_steps: int) -> dict[str, Any]:
    return {"phase": phase, "cpu_ms": 1e3 * cpu_s / num_steps, "lock_share": 1 - free_s / cpu_s}


def main() -> None:
    # The same batches again and again leave gradients too small for normal numbers, and those slow a processor down.
    torch.set_flush_denormal(True)
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    contenders = Contenders(num_threads=2)
    rounds, num_steps = (QUICK_ROUNDS, QUICK_STEPS) if options.quick else (ROUNDS, STEPS)
    rows = measure(contenders, rounds=rounds, num_steps=num_steps)
    locks = lock_rows(contenders, num_steps)
    speed = {row["threads"]: row["samples_per_s"] for row in rows}
    summary = {
        "hogwild_2_threads_speedup": speed["2 Hogwild threads"] / speed["1 Hogwild thread"],
        "hogwild_over_2_torch_threads": speed["2 Hogwild threads"] / speed["2 torch threads"],
        "lock_share": locks[-1]["lock_share"],
        **noise_of(rows),
    }
    publish("hogwild", [*rows, *locks], summary, options)


if __name__ == "__main__":
    main()
