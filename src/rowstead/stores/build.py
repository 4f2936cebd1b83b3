"""Placement of a run's tables: the memory that is free, the placement that is chosen, and the stores that are built for it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rowstead.data.population import Population
from rowstead.kernels.layout import Layout
from rowstead.plan.auto import find_fastest_placement
from rowstead.plan.greedy import Memories, decide
from rowstead.records.usage import free_host_bytes
from rowstead.spec.catalogue import calibrated_machine, calibrated_path
from rowstead.spec.errors import RowsteadError
from rowstead.spec.machine import Machine
from rowstead.spec.placement import MemorySpec, PlacedShard, Placement
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.spec.run import Kernel, RunSpec
from rowstead.spec.stores import IN_RECIPES
from rowstead.stores.backing import RamRows
from rowstead.stores.base import EmbeddingStore
from rowstead.stores.cached import CachedStore
from rowstead.stores.device import DeviceStore
from rowstead.stores.groups import CacheGroup
from rowstead.stores.host import HostStore
from rowstead.stores.mixed import MixedStore, select_tables
from rowstead.stores.scratch import InUseError
from rowstead.stores.ssd import FileRows, initial_rows_of

KEPT_FREE = 0.1
"""Share of free memory that tables leave to everything else, unless a recipe sets a limit."""


def choose_placement(
    spec: RunSpec,
    device: torch.device,
    *,
    trains: bool = True,
    world_size: int = 1,
    shards: dict[str, PlacedShard] | None = None,
) -> Placement:
    """Choose where the tables of a run live on this machine; raises a RowsteadError with remedies if they do not fit.

    A model that only predicts is placed by the memory of this machine; the recipe's placement is for training.
    """
    if not trains:
        folder = spec.memory.folder
        is_usable = folder is not None and Path(folder).is_dir() and os.access(folder, os.W_OK | os.X_OK)
        spec = dataclasses.replace(spec, placement="auto", memory=MemorySpec(folder=folder if is_usable else None))
    mean_ids, memories = mean_ids_of(spec), measure_memories(spec, device)
    placement = decide(spec, memories, mean_ids=mean_ids, trains=trains, world_size=world_size, shards=shards)
    is_open = trains and world_size == 1 and spec.placement == "auto" and any(one.where != "device" for one in placement.tables)
    machine = measured_machine(device) if is_open else None
    return (find_fastest_placement(spec, memories, machine, mean_ids=mean_ids) if machine is not None else None) or placement


def measured_machine(device: torch.device) -> Machine | None:
    """This machine as `rowstead calibrate` measured it with this number of threads; None if it did not."""
    with contextlib.suppress(RowsteadError):
        machine = calibrated_machine(device.type)
        return machine if machine is not None and _has_these_threads(machine, device) else None
    return None


def unused_machine_warning(device: torch.device) -> str | None:
    """A warning that the machine file does not apply to this run; None if it does, or if there is none."""
    path, num_threads = calibrated_path(device.type), torch.get_num_threads()
    try:
        machine = calibrated_machine(device.type)
    except RowsteadError as error:
        return f"the machine file is not used: {' '.join(str(error).split())}"
    if machine is None:
        what = "a machine without a GPU" if device.type == "cuda" else "a machine with a GPU"
        unused = f"the machine file {path} is not used: it describes {what}, and this run is on {device.type}"
        return unused if path.is_file() else None
    if _has_these_threads(machine, device):
        return None
    return (
        f"the machine file {path} is not used: it was measured with {machine.host.num_cores} CPU threads, and this run has "
        f"{num_threads}: set threads={machine.host.num_cores}, or run `rowstead calibrate --threads {num_threads}`"
    )


def _has_these_threads(machine: Machine, device: torch.device) -> bool:
    """Whether a machine was measured with our number of CPU threads; on a GPU they matter little."""
    return device.type == "cuda" or machine.host.num_cores == torch.get_num_threads()


def measure_memories(spec: RunSpec, device: torch.device) -> Memories:
    """What this process may use of each memory: the recipe's limits, or most of what is free."""
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    has_gpu = device.type == "cuda"
    host = _less_margin(free_host_bytes() // sharing)
    on_device = host
    if has_gpu:
        on_device = _less_margin(torch.cuda.mem_get_info(device)[0] // math.ceil(sharing / torch.cuda.device_count()))
    disk = _less_margin(_free_disk_bytes(spec.memory.folder) // sharing) if spec.memory.folder is not None else 0
    limits = {name: spec.memory.limit_bytes(name) for name in ("device", "host", "disk")}
    return Memories(
        device_bytes=limits["device"] or on_device,
        host_bytes=limits["host"] or host,
        disk_bytes=limits["disk"] or disk,
        folder=spec.memory.folder,
        has_gpu=has_gpu,
        are_limits=frozenset(name for name, limit in limits.items() if limit is not None),
    )


def _less_margin(num_bytes: int) -> int:
    return int((1 - KEPT_FREE) * num_bytes)


def _free_disk_bytes(folder: str) -> int:
    """Free bytes on the disk of a folder, which must exist and be writable."""
    if not Path(folder).is_dir():
        raise RowsteadError(f"memory.folder: `{folder}` does not exist: create it (`mkdir -p {folder}`), or choose another")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RowsteadError(f"memory.folder: `{folder}` is not writable: change its permissions, or choose another folder")
    return shutil.disk_usage(folder).free


def mean_ids_of(spec: RunSpec) -> Sequence[float] | None:
    """Mean ids per example of each sparse feature of a generated log; None for files."""
    if (interests := spec.data.interests) is not None:
        return [interests.mean_ids(str(f.column), f.max_ids) for f in spec.features.expanded_sparse()]
    if spec.data.synth is None:
        return None
    means = {f"sparse_{index}": float(mean) for index, mean in enumerate(Population(spec.data.synth).mean_ids)}
    return [min(means.get(str(f.column), 1.0), f.max_ids or math.inf) for f in spec.features.expanded_sparse()]


@dataclass(frozen=True, kw_only=True)
class StoreBuilder:
    """Builds stores for the tables of a run, or for a process's pieces of them."""

    spec: RunSpec
    placement: Placement
    device: torch.device
    kernel: Kernel
    dtype: torch.dtype
    check: bool
    rank: int = 0

    def __call__(self, layout: Layout, optimizer: SparseOptimizerSpec | None) -> EmbeddingStore:
        """Build one store for all tables of `layout`, as placed; without an optimizer it only answers look-ups."""
        of = {kind: [t.name for t in layout.tables if self.placement.of(t.name).where == kind] for kind in IN_RECIPES}
        if self.device.type == "cpu" and of["ssd"] and not of["cached"]:
            of["ssd"], of["device"] = of["device"] + of["ssd"], []  # one CachedStore can hold whole tables, too
        shares: list[tuple[list[str], Callable[[Layout, SparseOptimizerSpec | None], EmbeddingStore]]] = [
            (of["device"] + of["cached"] + of["host"], self._fast),
            (of["ssd"], self._on_disk),
        ]
        stores = [
            make(layout if len(names) == len(layout.tables) else select_tables(layout, names), optimizer)
            for names, make in shares
            if names
        ]
        if not stores:
            return self._fast(layout, optimizer)
        return stores[0] if len(stores) == 1 else MixedStore(layout, stores, check=self.check)

    def _fast(self, layout: Layout, optimizer: SparseOptimizerSpec | None) -> EmbeddingStore:
        """Tables that the device trains: whole in its memory, cached there, or there only for the batches in flight."""
        options = self._options(self.device)
        num_slots = self._num_slots(layout, "cached")
        if self.device.type == "cuda":
            num_slots |= dict.fromkeys(self._num_slots(layout, "host"), 1)
        if num_slots:
            return CachedStore(layout, optimizer, num_slots=num_slots, backing=self._ram_rows, **options)
        return DeviceStore(layout, optimizer, **options)

    def _on_disk(self, layout: Layout, optimizer: SparseOptimizerSpec | None) -> EmbeddingStore:
        """Tables in files; with a GPU, the CPU pools their rows."""
        num_slots, cpu = self._num_slots(layout, "ssd"), torch.device("cpu")
        rows = CachedStore(layout, optimizer, num_slots=num_slots, backing=self._file_rows, **self._options(cpu))
        return rows if self.device.type == "cpu" else HostStore(rows, self.device, check=self.check)

    def _options(self, device: torch.device) -> dict[str, Any]:
        kernel = self.kernel if device == self.device else "auto"
        return {"seed": self.spec.seed, "kernel": kernel, "device": device, "dtype": self.dtype, "check": self.check}

    def _num_slots(self, layout: Layout, where: str) -> dict[str, int]:
        """For each table placed there, how many of its rows stay in fast memory."""
        return {
            table.name: max(1, math.ceil((self.placement.of(table.name).cache_fraction or 0) * table.num_rows))
            for table in layout.tables
            if self.placement.of(table.name).where == where
        }

    def _ram_rows(self, group: CacheGroup) -> RamRows:
        return RamRows(group, seed=self.spec.seed, device=self.device)

    def _file_rows(self, group: CacheGroup) -> FileRows:
        assert self.placement.folder is not None
        name, initial = f"{self.spec.name[:100]}-{self.rank}-width-{group.width}", initial_rows_of(group, seed=self.spec.seed)
        for ending in itertools.chain([""], (f"-{number}" for number in itertools.count(2))):
            with contextlib.suppress(InUseError):  # by another run of this name; a file that a killed run left is reused
                path = Path(self.placement.folder) / f"{name}{ending}.rows"
                return FileRows(path, group.num_rows, group.columns, initial=initial)
        raise AssertionError("names do not end")
