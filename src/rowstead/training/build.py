"""The parts of a run, made from its spec: splits of the log, the model, the device and its threads."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from rowstead.data.batch import Batch
from rowstead.data.block import RawBlock
from rowstead.data.columns import IdKinds
from rowstead.data.encode import Encoder
from rowstead.data.parquet import ParquetLog
from rowstead.data.parquet_source import ParquetSource
from rowstead.data.source import Source
from rowstead.data.synth import SynthLog, SynthSource
from rowstead.data.transforms import DenseTransforms
from rowstead.distributed.process_group import ProcessGroup, SingleProcess
from rowstead.distributed.sharded_store import ShardedStore
from rowstead.distributed.sharding import auto_shards, plan_shards
from rowstead.kernels.layout import Layout, layout_of
from rowstead.nn.dlrm import DLRM
from rowstead.spec.data import ParquetSpec
from rowstead.spec.errors import RowsteadError
from rowstead.spec.job import is_one_of_many
from rowstead.spec.placement import MemorySpec, Placement, Shard, rules_for
from rowstead.spec.run import RunSpec
from rowstead.stores.base import EmbeddingStore
from rowstead.stores.build import StoreBuilder, choose_placement, mean_ids_of
from rowstead.stores.checked import check_source
from rowstead.training.precision import multiplies_bf16
from rowstead.training.sharded_step import WIRE_DTYPES

ROW_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Formats of rows by the names that specs have for them."""


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The two splits of a log, ready to be read for one model."""

    train: Source
    eval: Source
    encoder: Encoder
    id_kinds: dict[str, str]
    """Whether each sparse column holds text or integers."""


def device_of(spec: RunSpec) -> torch.device:
    """The device that a spec asks for; of several processes on a machine each has a GPU of its own."""
    has_gpu = torch.cuda.is_available()
    if spec.device == "cuda" and not has_gpu:
        raise RowsteadError("device: cuda, but torch sees no CUDA GPU here: use `--set device=cpu`, or `auto`")
    if spec.device == "cpu" or not has_gpu:
        return torch.device("cpu")
    if not is_one_of_many():
        return torch.device("cuda")
    place, num_gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if place >= num_gpus:
        raise RowsteadError(
            f"process {place} of this machine has no GPU to itself: there are {num_gpus}. Start as many processes as there are "
            "GPUs, or train on the CPU with `--set device=cpu`"
        )
    return torch.device("cuda", place)


def open_sources(spec: RunSpec, transforms: DenseTransforms | None = None, id_kinds: IdKinds | None = None) -> Sources:
    """Both splits of a spec's log; dense transforms are learned on the training split unless they are given.

    `id_kinds` is what a model that is trained further has seen so far: a log of other kinds is refused.
    """
    train_log = Log(spec, "train", id_kinds)
    eval_log = Log(spec, "eval", train_log.id_kinds)
    if transforms is None:
        transforms = DenseTransforms.learn(spec.features, train_log.dense_blocks(spec.data.statistics_rows))
    encoder = Encoder(spec.features, spec.tables, transforms)
    sources = (log.source(encoder) for log in (train_log, eval_log))
    return Sources(train=next(sources), eval=next(sources), encoder=encoder, id_kinds=train_log.id_kinds)


def share_sources(sources: Sources, process_group: ProcessGroup) -> Sources:
    """The same training split, of each batch the share of this process."""
    if isinstance(process_group, SingleProcess):
        return sources
    return dataclasses.replace(sources, train=sources.train.local_share(process_group.rank, process_group.world_size))


def check_sources(sources: Sources, layout: Layout) -> Sources:
    """The same splits, each batch checked against the tables by the thread that reads it."""
    train, evaluation = (check_source(source, layout) for source in (sources.train, sources.eval))
    return dataclasses.replace(sources, train=train, eval=evaluation)


def raw_blocks(spec: RunSpec, data: list[str] | None = None, max_rows: int | None = None) -> Iterator[RawBlock]:
    """Rows of a spec's training split as they were written, or of other Parquet files with its features."""
    if data is not None:
        return ParquetLog(files_like(spec, data), spec.features, split="all").raw_blocks(max_rows)
    if spec.data.parquet is not None:
        return ParquetLog(spec.data.parquet, spec.features, split="train").raw_blocks(max_rows)
    assert spec.data.synth is not None
    untouched = Encoder(spec.features, spec.tables, DenseTransforms.learn(spec.features, []))
    return SynthSource(SynthLog(spec.data.synth), untouched, "train").raw_blocks(max_rows)


def files_like(spec: RunSpec, data: Sequence[str]) -> ParquetSpec:
    """Other Parquet files, to be read as a spec reads its own."""
    if spec.data.parquet is None:
        return ParquetSpec(train=tuple(data))
    return dataclasses.replace(spec.data.parquet, train=tuple(data))


class Log:
    """One split of a spec's log, synthetic or in files."""

    def __init__(self, spec: RunSpec, split: Literal["train", "eval"], id_kinds: IdKinds | None = None) -> None:
        self._spec, self._split = spec, split
        self._synth = SynthLog(spec.data.synth) if spec.data.synth is not None else None
        self._parquet = None
        self.id_kinds = {str(feature.column): "integers" for feature in spec.features.expanded_sparse()}
        if spec.data.parquet is not None:
            self._parquet = ParquetLog(spec.data.parquet, spec.features, split=split, id_kinds=id_kinds)
            self.id_kinds = {**(id_kinds or {}), **self._parquet.id_kinds}

    def dense_blocks(self, max_rows: int) -> Iterator[RawBlock]:
        """Rows to learn dense transforms from."""
        features = self._spec.features
        if not any(feature.needs_statistics for feature in features.expanded_dense()):
            return iter(())
        if self._spec.data.parquet is not None:
            dense_only = dataclasses.replace(features, sparse=(), tables=())
            log = ParquetLog(self._spec.data.parquet, dense_only, split=self._split, with_labels=False)
            return log.raw_blocks(max_rows)
        assert self._synth is not None
        columns = [str(feature.column) for feature in features.expanded_dense()]
        return self._synth.dense_blocks(columns, self._split, max_rows)

    def source(self, encoder: Encoder) -> Source:
        if self._parquet is not None:
            return ParquetSource(self._parquet, encoder, seed=self._spec.seed, shuffle=self._split == "train")
        assert self._synth is not None
        return SynthSource(self._synth, encoder, self._split)


def build_model(
    spec: RunSpec,
    device: torch.device,
    *,
    trains: bool,
    encode: Callable[[Mapping[str, Any]], Batch] | None = None,
    process_group: ProcessGroup | None = None,
    placement: Placement | None = None,
    store: EmbeddingStore | None = None,
) -> DLRM:
    """A model with the initial weights of the spec's seed, without touching anybody's random state.

    With a `process_group` the tables are shared by all processes of its job. `placement` is what `plan_placement` gave. With a `store` the
    tables are there already.
    """
    if store is None:
        store = build_store(spec, device, trains=trains, process_group=process_group, placement=placement)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        keep_rate = spec.data.negative_keep_rate
        model = DLRM(spec.model, spec.features, store, head=spec.train.loss, negative_keep_rate=keep_rate, encode=encode)
    return model.to(device)


def build_store(
    spec: RunSpec,
    device: torch.device,
    *,
    trains: bool,
    process_group: ProcessGroup | None = None,
    placement: Placement | None = None,
) -> EmbeddingStore:
    """The tables of a model, each where its placement has it."""
    optimizer = spec.train.sparse_optimizer if trains else None
    kernel = spec.kernel if trains else "auto"  # a trained model may be used on another device
    check = spec.check_ids and (device.type == "cpu" or not trains)  # a step on a GPU waits for nothing: `check_sources`
    dtype = ROW_DTYPES[spec.model.row_format]

    placement = placement or plan_placement(spec, device, trains=trains, process_group=process_group)
    rank = 0 if process_group is None else process_group.rank
    make = StoreBuilder(spec=spec, placement=placement, device=device, kernel=kernel, dtype=dtype, check=check, rank=rank)

    layout = layout_of(spec.features, spec.tables)
    if process_group is None or isinstance(process_group, SingleProcess) or not layout.tables:
        return make(layout, optimizer)
    return ShardedStore(
        layout,
        optimizer,
        shards_of(spec, layout, process_group.world_size),
        process_group,
        make,
        dtype=dtype,
        device=device,
        wire=WIRE_DTYPES[spec.train.wire],
        check=check,
        lookups=expected_lookups(spec, layout),
    )


def plan_placement(
    spec: RunSpec, device: torch.device, *, trains: bool = True, process_group: ProcessGroup | None = None
) -> Placement:
    """Where the tables go, on this machine and in this process of a job."""
    world_size = 1 if process_group is None else process_group.world_size
    layout, kinds = layout_of(spec.features, spec.tables), None
    if world_size > 1:
        shards = plan_shards(
            layout, shards_of(spec, layout, world_size), world_size, lookups=expected_lookups(spec, layout)
        ).shards
        kinds = {table.name: shard for table, shard in zip(layout.tables, shards, strict=True)}
    return choose_placement(spec, device, trains=trains, world_size=world_size, shards=kinds)


def shards_of(spec: RunSpec, layout: Layout, world_size: int) -> dict[str, Shard]:
    """How `world_size` processes share each table: what the recipe says, and where it says nothing, what sends least."""
    rules = rules_for(spec.placement, [table.name for table in layout.tables])
    row_bytes = ROW_DTYPES[spec.model.row_format].itemsize
    chosen = auto_shards(layout, world_size, batch_size=spec.train.batch_size, row_bytes=row_bytes)
    return chosen | {name: rule.shard for name, rule in rules.items() if rule.shard != "auto"}


def expected_lookups(spec: RunSpec, layout: Layout) -> dict[str, float] | None:
    """Ids per example that each table is read with, where the log is one that we draw ourselves."""
    means = mean_ids_of(spec)
    return None if means is None else {table.name: float(sum(means[f] for f in table.features)) for table in layout.tables}


def ignored_settings(spec: RunSpec, *, world_size: int = 1) -> str | None:
    """What to tell a user of settings that do nothing in this run; none if all do something."""
    sync = spec.train.sync
    if spec.fleet is None:
        idle = {
            f"train.sync.mode={sync.mode}": sync.mode in ("easgd", "shadow") or (sync.mode == "allreduce" and world_size == 1),
            f"train.sync.staleness={sync.staleness}": sync.staleness > 0,
        }
        why = "for the trainers of a fleet (`--fleet trainers=2,…`)"
    else:
        is_remote = spec.fleet.tables == "remote"
        idle = {"placement": is_remote and spec.placement != "auto", "memory": is_remote and spec.memory != MemorySpec()}
        why = "for tables that a trainer keeps itself (`--fleet tables=local,…`): these are kept by sparse servers"
    names = [name for name, is_idle in idle.items() if is_idle]
    return f"not heeded here: {', '.join(names)}, {why}" if names else None


def bf16_fallback(spec: RunSpec, device: torch.device) -> str | None:
    """What to tell a user who asks for BF16 on a processor that has FP32 alone; none to all others."""
    if spec.train.precision != "bf16" or multiplies_bf16(device):
        return None
    return "this processor has no BF16 instructions: `train.precision: bf16` is FP32 here, which is faster and no less exact"


def check_format(spec: RunSpec) -> None:
    """Refuse a run of a study that would be in another number format than its settings say: it would be compared with itself."""
    if (reason := bf16_fallback(spec, device_of(spec))) is not None:
        raise RowsteadError(f"{reason}. Set train.precision=fp32 in a study, or run it where there is BF16")


def shown_kernel(name: str, device: torch.device) -> str:
    """The kernels that run, with what they run on."""
    if name == "gpu" and device.type == "cuda":
        return f"gpu (Triton, {torch.cuda.get_device_name(device)})"
    if " and " in name:
        return " and ".join(shown_kernel(one, device) for one in name.split(" and "))
    made_of = {"cpu": "Numba", "gpu": "Triton", "reference": "plain torch"}[name]
    threads = torch.get_num_threads()
    return f"{name} ({made_of}, {threads} thread{'s' if threads > 1 else ''})"


@contextlib.contextmanager
def set_threads(spec: RunSpec) -> Iterator[None]:
    """Torch's CPU threads as the spec asks, or one a core that we may use, for as long as the run lasts."""
    before = torch.get_num_threads()
    torch.set_num_threads(spec.threads or min(before, granted_cores() or before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def granted_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int | None:
    """Cores that a Linux container may keep busy, which OpenMP does not ask for; none where nothing limits them."""
    try:
        busy, period = quota.read_text().split()
    except (OSError, ValueError):
        return None
    return None if busy == "max" else max(1, round(int(busy) / int(period)))
