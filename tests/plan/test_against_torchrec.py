"""Our placement against that of TorchRec's planner, both judged by the time that our cost model predicts for the busiest device."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from rowstead.plan.balance import SPLIT_OVERHEAD, Item, balance
from rowstead.plan.cost import accesses_of, device_processor, table_lookup_s, table_update_s
from rowstead.plan.traffic import Popularity
from rowstead.plan.work import TableWork
from rowstead.spec.catalogue import load_machine, load_software

pytestmark = pytest.mark.slow
NUM_DEVICES, BATCH_SIZE, WIDTH = 8, 1600, 64


def random_tables(rng: np.random.Generator) -> list[TableWork]:
    """Tables of sizes and bag lengths that do not go together, as in production."""
    return [
        TableWork(
            name=f"t{place}",
            num_rows=int(np.clip(rng.lognormal(12, 2), 1000, 2e7)),
            width=WIDTH,
            row_bytes=4 * WIDTH,
            state_bytes=4,
            reads=((float(np.clip(rng.lognormal(2, 1), 1, 200)), Popularity(1_000_000, 1.05)),),
        )
        for place in range(int(rng.integers(10, 40)))
    ]


def items_of(tables: list[TableWork]) -> list[Item]:
    processor, software = device_processor(load_machine("bigbasin-32"), load_software("rowstead")), load_software("rowstead")
    accesses = accesses_of(tables)
    return [
        Item(
            name=table.name,
            costs=(
                table_lookup_s(processor, accesses, table, BATCH_SIZE)
                + table_update_s(processor, accesses, table, BATCH_SIZE, software),
            ),
            num_bytes=table.bytes,
            num_rows=table.num_rows,
        )
        for table in tables
    ]


def planned_by_torchrec(tables: list[TableWork], capacity: float) -> Any:
    """Its plan for the same tables, whole or split by rows."""
    import torch
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints

    configs = [
        EmbeddingBagConfig(name=t.name, embedding_dim=t.width, num_embeddings=t.num_rows, feature_names=[f"f_{t.name}"])
        for t in tables
    ]
    constraints = {
        t.name: ParameterConstraints(sharding_types=["table_wise", "row_wise"], pooling_factors=[t.ids_per_sample])
        for t in tables
    }
    topology = Topology(world_size=NUM_DEVICES, compute_device="cuda", hbm_cap=int(capacity))
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=BATCH_SIZE, constraints=constraints)
    module = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    return planner.plan(module, [EmbeddingBagCollectionSharder()])


def longest_of(plan: Any, items: list[Item]) -> float:
    """The time of its busiest device, split tables costing what ours cost."""
    loads = np.zeros(NUM_DEVICES)
    (shards,) = plan.plan.values()
    for item in items:
        ranks = shards[item.name].ranks
        extra = 1 + SPLIT_OVERHEAD if len(ranks) > 1 else 1.0
        for rank in ranks:
            loads[rank] += item.costs[0] * extra / len(ranks)
    return float(loads.max())


def test_the_busiest_device_is_no_later_than_with_torchrecs_plan() -> None:
    pytest.importorskip("torchrec")
    rng = np.random.default_rng(1)
    capacity, better = 28e9, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(50):
            tables = random_tables(rng)
            items = items_of(tables)
            ours = balance(items, NUM_DEVICES, capacity).max_load
            better.append(ours <= longest_of(planned_by_torchrec(tables, capacity), items) * 1.001)
    assert np.mean(better) >= 0.9
