"""Does training on a CPU get faster with more cores, and does it stop where it would get slower?

The step of M1, M2 and M3 (100,000 rows a table, batches in memory already) with 1, 2, 4, … threads up to the cores of this machine, in turns, and
with as many as `rowstead train` takes by default. `default_over_best_max` is the worst ratio of the default's time to that of the best number
of threads. Hogwild: M1 at 200 with 1, 2, 4, … threads; `hogwild_A_over_B` is the throughput with A threads, all cores, over that with B, half of them.
`num_physical_cores` is what the system says; two hardware threads of one core share its arithmetic. Figures are medians.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.harness import OtherLoad, arguments, noise_of, publish
from benchmarks.step import Model, of_recipe
from rowstead.data.batch import Batch
from rowstead.training.build import build_model
from rowstead.training.device import physical_cores, set_threads
from rowstead.training.hogwild import Hogwild
from rowstead.training.step import Stepper

SIZES = (200, 1600)
ROUNDS, STEPS_A_ROUND, NUM_BATCHES = 5, 3, 4
HOGWILD_STEPS_A_THREAD, HOGWILD_ROUNDS = 12, 5


def thread_counts() -> list[int]:
    """Powers of two below the number of cores, that number, and the default."""
    cores = os.cpu_count() or 1
    with set_threads():
        default = torch.get_num_threads()
    return sorted({*itertools.takewhile(lambda count: count < cores, (1 << power for power in range(32))), cores, default})


def stepper_of(model: Model) -> Stepper:
    spec = model.spec()
    return Stepper(build_model(spec, torch.device("cpu"), trains=True), spec.train, total_steps=1_000_000)


def measure_steps(model: Model, counts: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """A row for each number of threads."""
    stepper, numbers = stepper_of(model), itertools.count(1)
    batches: Iterator[Batch] = itertools.cycle([model.draw("cpu") for _ in range(NUM_BATCHES)])
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    with OtherLoad() as load:
        for turn in range(rounds + 1):
            for count in counts:
                with set_threads(count):
                    for step in range(STEPS_A_ROUND + 1):
                        start = time.perf_counter()
                        stepper.step(next(batches), next(numbers))
                        if turn and step:  # the first round, and the first step after a change, warm up
                            seconds[count].append(time.perf_counter() - start)
    with set_threads():
        default = torch.get_num_threads()
    return [
        {
            "shape": model.name,
            "threads": count,
            "step_ms": 1e3 * statistics.median(seconds[count]),
            "is_default": count == default,
            "cores_used_by_others": max(0.0, load.cores),
        }
        for count in counts
    ]


def measure_hogwild(counts: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """A row for each number of Hogwild threads."""
    model = of_recipe("M1 200", "m1", num_rows=100_000, batch_size=200)
    first, numbers = stepper_of(model), itertools.count(1)
    batches = [model.draw("cpu") for _ in range(24)]
    contenders = {count: Hogwild(first, count) for count in counts}
    rates: dict[int, list[float]] = {count: [] for count in counts}
    for turn in range(rounds + 1):
        for count, hogwild in contenders.items():
            left, num_steps = itertools.count(), HOGWILD_STEPS_A_THREAD * count

            def work(thread: int, stepper: Stepper, left: Iterator[int] = left, num_steps: int = num_steps) -> None:
                while next(left) < num_steps:
                    number = next(numbers)
                    stepper.step(batches[number % len(batches)], number)

            start = time.perf_counter()
            hogwild.run(work)
            if turn:
                rates[count].append(num_steps * model.shape.batch_size / (time.perf_counter() - start))
    return [{"shape": "Hogwild M1 200", "threads": count, "samples_per_s": statistics.median(rates[count])} for count in counts]


def main() -> None:
    torch.set_flush_denormal(True)  # the same batches again and again leave gradients too small for normal numbers
    options = arguments(__doc__).parse_args()
    counts = thread_counts()
    rounds = 2 if options.quick else ROUNDS
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for recipe in ("m1", "m2", "m3"):
        for size in SIZES[:1] if options.quick else SIZES:
            model = of_recipe(f"{recipe.upper()} {size}", recipe, num_rows=100_000, batch_size=size)
            found = measure_steps(model, counts, rounds)
            default = next(row["step_ms"] for row in found if row["is_default"])
            ratios[model.name] = default / min(row["step_ms"] for row in found)
            rows += found
    hogwild = measure_hogwild(counts, rounds if options.quick else HOGWILD_ROUNDS)
    rates = {row["threads"]: row["samples_per_s"] for row in hogwild}
    rows += hogwild
    summary: dict[str, float] = {"default_over_best_max": max(ratios.values()), "num_physical_cores": physical_cores()}
    cores = counts[-1]
    if cores // 2 in rates:
        summary[f"hogwild_{cores}_over_{cores // 2}"] = rates[cores] / rates[cores // 2]
    publish("cores", rows, summary | noise_of(rows), options)


if __name__ == "__main__":
    main()
