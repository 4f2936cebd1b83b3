"""The half of `benchmarks.cache` that needs a GPU: whole training steps with rows in system memory.

Models are M1 and M3 with 500,000 rows a table; a cache holds a tenth of the rows. Ids are drawn as `rows * u**3`, and Criteo-like.
Every batch is drawn before and used once by each contender. Contenders take turns in stretches of steps; the first steps of a
stretch warm it up, the others count from the end of the one before, and figures are medians of steps, or of means over 16 steps where
rows come in for up to 8 at a time, so that some steps have more beside them than others.

`rowstead_device` keeps all rows in GPU memory, `rowstead_cached` a tenth, prefetched as `rowstead train` does,
`rowstead_host` none. Rows of batches under way are there besides; where those are more, `kept_share` says how many stay. The peers are FBGEMM's
MANAGED_CACHING with a cache of the same share, and its MANAGED, under the same dense part as in `benchmarks.step`; nothing is prefetched for
them, as by their defaults. The bus time of a step is the larger of the bytes that we brought in and wrote back, over
the rate of a long copy from pinned memory, measured by this command.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from benchmarks.harness import publish
from benchmarks.peers import fbgemm_tables, has_fbgemm
from benchmarks.skews import CriteoLike
from benchmarks.step import Model, PeerNet, of_recipe
from benchmarks.timing import give_back_gpu_memory
from rowstead.data.batch import Batch, Sparse
from rowstead.kernels.layout import layout_of
from rowstead.nn.dlrm import DLRM
from rowstead.stores.backing import RamRows
from rowstead.stores.cached import CachedStore
from rowstead.stores.device import DeviceStore
from rowstead.training.prefetch import prefetch_rows
from rowstead.training.step import Stepper

CACHE_SHARE = 0.1
NUM_ROWS = 500_000
FBGEMM_LOCATIONS = {"caching": "MANAGED_CACHING", "managed": "MANAGED"}
STRETCHES = 2
TWO_SETS = 16
"""Steps within which rows of small batches come in about twice."""
LOSSES_BEHIND = 4
"""Steps by which the host is ahead of the GPU, as in the training loop."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model under one skew of ids."""

    model: Model
    skew: str
    warmups: int
    steps: int
    """That count, in all stretches."""
    steps_a_time: int
    """Of which the mean is one time of the median."""

    @property
    def name(self) -> str:
        return f"{self.model.name} {self.skew}"

    def draw(self) -> Batch:
        batch = self.model.draw("cuda")
        sparse = batch.sparse
        narrow = Sparse(ids=sparse.ids.int(), offsets=sparse.offsets, num_features=sparse.num_features)
        return dataclasses.replace(batch, sparse=narrow)


def cases(quick: bool) -> list[Case]:
    sizes = {"m1": (1600, 16384), "m3": (4096,)}
    found = []
    for name, batches in sizes.items():
        for size in batches:
            cubed = of_recipe(f"{name.upper()} {size}", name, num_rows=NUM_ROWS, batch_size=size)
            skewed = dataclasses.replace(cubed, shape=CriteoLike(**vars(cubed.shape)))
            for skew, model in (("criteo", skewed), ("u3", cubed)):
                # What is worth keeping shows over some dozens of batches; where none is, after a few.
                warmups = 40 if skew == "criteo" or size == 1600 else 8
                steps, at_a_time = (2 * 10 * TWO_SETS, TWO_SETS) if size == 1600 else (24, 1)
                found.append(Case(model=model, skew=skew, warmups=warmups, steps=steps, steps_a_time=at_a_time))
    return found[:2] if quick else found


def bus_bytes_per_s() -> dict[str, float]:
    """Rates of long copies between pinned memory and the GPU."""
    here = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(here, device="cuda")
    rates = {}
    for name, copy in (
        ("in", lambda: there.copy_(here, non_blocking=True)),
        ("out", lambda: here.copy_(there, non_blocking=True)),
    ):
        best = 1e9
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            copy()
            torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
        rates[name] = here.numel() / best
    return rates


def timed(steps: Iterator[None]) -> list[float]:
    """Seconds between the ends of steps that are queued one after the other."""
    ends = []
    for _ in steps:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        ends.append(event)
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e-3 for a, b in pairwise(ends)]


class Ours:
    """A model of ours that trains on prefetched batches."""

    def __init__(self, case: Case, memory: str) -> None:
        spec = case.model.spec()
        self.store = store_of(case, memory)
        with torch.random.fork_rng(devices=[]):
            model = DLRM(spec.model, spec.features, self.store).cuda()
        self.stepper = Stepper(model, spec.train, total_steps=1_000_000)
        self.number = 0

    def run(self, batches: Sequence[Batch]) -> list[float]:
        return timed(self._steps(batches))

    def _steps(self, batches: Sequence[Batch]) -> Iterator[None]:
        losses = []
        for _, batch, _ in prefetch_rows(((batch, batch, {}) for batch in batches), self.store):
            self.number += 1
            losses.append(self.stepper.start(batch, self.number))
            yield
            if len(losses) > LOSSES_BEHIND:
                losses.pop(0)()


def store_of(case: Case, memory: str) -> Any:
    """The tables of a case, in `memory`."""
    spec = case.model.spec()
    layout, optimizer = layout_of(spec.features, spec.tables), spec.train.sparse_optimizer
    if memory == "device":
        return DeviceStore(layout, optimizer, device="cuda", check=False)
    share = CACHE_SHARE if memory == "cached" else 0.0
    num_slots = {table.name: int(share * table.num_rows) for table in spec.tables}
    return CachedStore(
        layout,
        optimizer,
        num_slots=num_slots,
        backing=lambda group: RamRows(group, seed=1, device="cuda"),
        device="cuda",
        check=False,
    )


class Peers:
    """The same over FBGEMM's tables in the memory that it calls by another name."""

    def __init__(self, case: Case, memory: str) -> None:
        shape = case.model.shape
        self.tables = fbgemm_tables(
            shape.num_tables, shape.num_rows, shape.width, "cuda", location=FBGEMM_LOCATIONS[memory], cache_share=CACHE_SHARE
        )
        net = PeerNet(case.model).cuda()
        self.optimizer = torch.optim.Adagrad(net.parameters(), lr=0.01)
        torch.compiler.reset()
        self.net = torch.compile(net, dynamic=False)

    def run(self, batches: Sequence[Batch]) -> list[float]:
        return timed(self._steps(batches))

    def _steps(self, batches: Sequence[Batch]) -> Iterator[None]:
        for batch in batches:
            self.optimizer.zero_grad(set_to_none=True)
            pooled = self.tables(batch.sparse.ids.long(), batch.sparse.offsets)
            self.net(batch.dense, pooled, batch.labels).backward()
            self.optimizer.step()
            yield


def means(values: Sequence[float], count: int) -> list[float]:
    """Of so many one after the other each; what is left at the end does not count."""
    return [statistics.fmean(values[start : start + count]) for start in range(0, len(values) - count + 1, count)]


def measure(case: Case, contenders: Sequence[str], rates: dict[str, float], made: dict[str, Any]) -> dict[str, Any]:
    """One row: seconds per step of each contender, and what crossed the bus for ours; `made` keeps them for another skew."""
    each = case.steps // STRETCHES
    stretches = [[case.draw() for _ in range(case.warmups + each)] for _ in range(STRETCHES)]
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    row: dict[str, Any] = {"shape": case.name, "batch_size": case.model.shape.batch_size}
    moved_in = moved_out = 0
    for stretch in stretches:
        for name in contenders:
            if name not in made:
                kind, _, memory = name.partition("_")
                made[name] = Ours(case, memory) if kind == "rowstead" else Peers(case, memory)
            warmups, store = case.warmups, getattr(made[name], "store", None)
            batches = stretch
            if name in ("fbgemm_managed", "rowstead_host"):  # slow, and nothing to warm up but a compiler
                warmups = 3
                batches = stretch[case.warmups - 3 : case.warmups + max(10, each // 2)]
            if name == "rowstead_cached":
                made[name].run(batches[:warmups])
                before = store.num_rows_in, store.num_rows_out
                taken = made[name].run(batches[warmups - 1 :])
                moved_in += store.num_rows_in - before[0]
                moved_out += store.num_rows_out - before[1]
                seconds[name] += taken[2:]
            else:
                seconds[name] += made[name].run(batches)[warmups - 1 :]
    for name, values in seconds.items():
        row[f"{name}_ms"] = 1e3 * statistics.median(means(values, case.steps_a_time))
    if "rowstead_cached" in contenders:
        row_bytes = 4 * case.model.shape.width  # Adagrad's one number a row stays on the GPU
        steps = STRETCHES * (each + 1)
        row |= {"rows_in_a_step": moved_in / steps, "rows_out_a_step": moved_out / steps}
        row["kept_share"] = made["rowstead_cached"].store.num_kept / sum(table.num_rows for table in case.model.spec().tables)
        row["bus_ms"] = 1e3 * row_bytes * max(moved_in / rates["in"], moved_out / rates["out"]) / steps
        row["over_bus_time"] = row["rowstead_cached_ms"] / row["bus_ms"]
    return row


def rows_on_gpu(quick: bool, contenders: Sequence[str] | None = None) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """All rows and their summary."""
    torch.set_float32_matmul_precision("high")
    rates = bus_bytes_per_s()
    names = list(contenders or ["rowstead_device", "rowstead_cached", "rowstead_host"])
    if contenders is None and has_fbgemm():
        names += ["fbgemm_caching", "fbgemm_managed"]
    rows: list[dict[str, Any]] = []
    made: dict[str, Any] = {}
    before = None
    for case in cases(quick):
        for name in list(made):  # what caches keep follows from the batches they have seen
            if case.model.name != before or name in ("rowstead_cached", "rowstead_host"):
                del made[name]
        before = case.model.name
        gc.collect()
        give_back_gpu_memory()
        rows.append(measure(case, names, rates, made))
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in rows[-1].items()}, flush=True)
    summary = {"bus_in_bytes_per_s": rates["in"], "bus_out_bytes_per_s": rates["out"]}
    return rows, summary | summary_of(rows)


def summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    criteo = [row for row in rows if row["shape"].endswith("criteo")]
    u3 = [row for row in rows if row["shape"].endswith("u3")]

    def ratios(some: Sequence[dict[str, Any]], slow: str, fast: str) -> list[float]:
        return [row[f"{slow}_ms"] / row[f"{fast}_ms"] for row in some if f"{slow}_ms" in row and f"{fast}_ms" in row]

    found = {
        "criteo_vs_device_min": ratios(criteo, "rowstead_device", "rowstead_cached"),
        "criteo_vs_fbgemm_caching_min": ratios(criteo, "fbgemm_caching", "rowstead_cached"),
        "u3_vs_fbgemm_caching_min": ratios(u3, "fbgemm_caching", "rowstead_cached"),
        "host_vs_fbgemm_managed_min": ratios(rows, "fbgemm_managed", "rowstead_host"),
    }
    summary = {key: min(values) for key, values in found.items() if values}
    if over := [row["over_bus_time"] for row in u3 if "over_bus_time" in row]:
        summary["u3_over_bus_time_max"] = max(over)
    return summary


def run(options: argparse.Namespace) -> None:
    """What `python -m benchmarks.cache --device cuda` does."""
    rows, summary = rows_on_gpu(options.quick)
    packages = ("fbgemm-gpu", "triton")
    publish("cache", rows, summary, options, packages=packages, missing=[] if has_fbgemm() else ["fbgemm"])
