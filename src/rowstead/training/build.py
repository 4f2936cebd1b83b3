"""Builds the model of a run from its spec: placement of tables, store, network."""

from __future__ import annotations

import torch

from rowstead.data.row_encoder import RowEncoder
from rowstead.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from rowstead.distributed.sharded_store import ShardedStore
from rowstead.distributed.sharding import ShardPlan, auto_shards, plan_shards
from rowstead.kernels.layout import Layout, layout_of
from rowstead.nn.dlrm import DLRM
from rowstead.spec.placement import MemorySpec, PlacedShard, Placement, rules_for
from rowstead.spec.run import RunSpec
from rowstead.spec.sync import SYNC_MODES
from rowstead.stores.base import EmbeddingStore
from rowstead.stores.build import StoreBuilder, choose_placement, mean_ids_of
from rowstead.stores.histories import HistoryLayout, HistoryStore
from rowstead.training.sharded_step import WIRE_DTYPES

ROW_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Row dtypes by their names in specs."""


def build_model(
    spec: RunSpec,
    device: torch.device,
    *,
    trains: bool,
    encoder: RowEncoder | None = None,
    process_group: ProcessGroup = SINGLE_PROCESS,
    placement: Placement | None = None,
    store: EmbeddingStore | None = None,
) -> DLRM:
    """Build a model with the initial weights of the spec's seed; global random state is left unchanged.

    With a `process_group` the tables are sharded over the processes of its job. `placement` is what `plan_placement` returned. A
    given `store` is used as it is.
    """
    if store is None:
        store = build_store(spec, device, trains=trains, process_group=process_group, placement=placement)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        keep_rate = spec.data.negative_keep_rate
        model = DLRM(spec.model, spec.features, store, head=spec.train.loss, negative_keep_rate=keep_rate, encoder=encoder)
    return model.to(device)


def build_store(
    spec: RunSpec,
    device: torch.device,
    *,
    trains: bool,
    process_group: ProcessGroup = SINGLE_PROCESS,
    placement: Placement | None = None,
) -> EmbeddingStore:
    """Build the tables of a model, each where its placement says."""
    optimizer = spec.train.sparse_optimizer if trains else None
    kernel = spec.kernel if trains else "auto"  # a trained model may be used on another device
    check = spec.check_ids and (device.type == "cpu" or not trains)  # for a GPU the reader checks: no step waits for it
    dtype = ROW_DTYPES[spec.model.row_format]

    placement = placement or plan_placement(spec, device, trains=trains, process_group=process_group)
    make = StoreBuilder(
        spec=spec, placement=placement, device=device, kernel=kernel, dtype=dtype, check=check, rank=process_group.rank
    )

    def build(layout: Layout) -> EmbeddingStore:
        if process_group.world_size == 1 or not layout.tables:
            return make(layout, optimizer)
        return ShardedStore(
            plan_sharding(spec, layout, process_group.world_size),
            optimizer,
            process_group,
            make,
            dtype=dtype,
            device=device,
            wire=WIRE_DTYPES[spec.train.wire],
            check=check,
        )

    layout = layout_of(spec.features, spec.tables)
    if not layout.is_history:
        return build(layout)
    parts = HistoryLayout(layout)
    return HistoryStore(parts, [build(one) for one in parts.stores], check=check)


def plan_placement(
    spec: RunSpec, device: torch.device, *, trains: bool = True, process_group: ProcessGroup = SINGLE_PROCESS
) -> Placement:
    """Choose where each table lives, on this machine and in this process of a job."""
    world_size, kinds = process_group.world_size, dict[str, PlacedShard]() if process_group.world_size > 1 else None
    layout = layout_of(spec.features, spec.tables)
    if kinds is not None:
        for one in HistoryLayout(layout).stores if layout.is_history else [layout]:
            shards = plan_sharding(spec, one, world_size).shards
            kinds |= {table.name: shard for table, shard in zip(one.tables, shards, strict=True)}
    return choose_placement(spec, device, trains=trains, world_size=world_size, shards=kinds)


def plan_sharding(spec: RunSpec, layout: Layout, world_size: int) -> ShardPlan:
    """How the tables are sharded over `world_size` processes: as the recipe says, else the way that sends least."""
    rules = rules_for(spec.placement, [table.name for table in spec.tables])
    names = {table.name for table in layout.tables}
    row_bytes = ROW_DTYPES[spec.model.row_format].itemsize
    shards = auto_shards(layout, world_size, batch_size=spec.train.batch_size, row_bytes=row_bytes)
    shards |= {name: rule.shard for name, rule in rules.items() if rule.shard != "auto" and name in names}
    return plan_shards(layout, shards, world_size, lookups=expected_lookups(spec, layout))


def expected_lookups(spec: RunSpec, layout: Layout) -> dict[str, float] | None:
    """Expected ids per example and table; None unless the log is synthetic."""
    means = mean_ids_of(spec)
    if means is None:
        return None
    names = {table.name for table in layout.tables}
    return {table.name: float(sum(means[f] for f in table.features)) for table in spec.tables if table.name in names}


def ignored_settings(spec: RunSpec, *, world_size: int = 1) -> str | None:
    """The warning about settings that this run ignores, if there are any."""
    sync = spec.train.sync
    if spec.fleet is None:
        is_ignored = {
            f"train.sync.mode={sync.mode}": SYNC_MODES[sync.mode].rule is not None
            or (SYNC_MODES[sync.mode].every_step and world_size == 1),
            f"train.sync.staleness={sync.staleness}": sync.staleness > 0,
            f"train.sync.dense_lr_factor={sync.dense_lr_factor}": sync.dense_lr_factor is not None,
        }
        scope = "fleet runs (`--fleet trainers=2,…`)"
    else:
        is_remote = spec.fleet.tables == "remote"
        is_ignored = {"placement": is_remote and spec.placement != "auto", "memory": is_remote and spec.memory != MemorySpec()}
        scope = "tables in trainers (`--fleet tables=local,…`); these are in sparse servers"
    names = [name for name, is_set in is_ignored.items() if is_set]
    return f"ignored: {', '.join(names)} applies only to {scope}" if names else None
