"""Greedy placement: the tables read most per byte go to the fastest memory, and no capacity is exceeded."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowstead.plan.greedy import (
    GPU_SLOT_BYTES,
    MAP_BYTES,
    RECORD_BYTES,
    SEGMENTS_SHARE,
    SLOT_BYTES,
    STATE_BYTES,
    Memories,
    decide,
)
from rowstead.plan.work import record_bytes
from rowstead.report.placement import placement_text
from rowstead.spec.data import DataSpec, SynthSpec
from rowstead.spec.errors import RowsteadError
from rowstead.spec.features import FeaturesSpec, SparseFeatureSpec
from rowstead.spec.interactions import InteractionSpec
from rowstead.spec.model import ModelSpec
from rowstead.spec.placement import MemorySpec, Placement, PlacementSpec, TablePlacementSpec
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.spec.run import RunSpec
from rowstead.spec.train import TrainSpec

MB = 1_000_000


def spec_of(
    *rows: int, placement: PlacementSpec = "auto", kind: str = "sgd", batch_size: int = 16, folder: str | None = "/data"
) -> RunSpec:
    """Tables t0, t1 … of width 25, so that a row of FP32 has 100 bytes."""
    features = tuple(SparseFeatureSpec(name=f"t{index}", num_rows=count) for index, count in enumerate(rows))
    return RunSpec(
        name="plan",
        data=DataSpec(synth=SynthSpec()),
        features=FeaturesSpec(sparse=features),
        model=ModelSpec(width=25, interaction=InteractionSpec(kind="concat")),
        train=TrainSpec(batch_size=batch_size, sparse_optimizer=SparseOptimizerSpec(kind=kind)),  # type: ignore[arg-type]
        placement=placement,
        memory=MemorySpec(folder=folder),
    )


def on_cpu(host: int, disk: int = 0) -> Memories:
    return Memories(device_bytes=host, host_bytes=host, disk_bytes=disk, folder="/data" if disk else None)


def on_gpu(device: int, host: int, disk: int = 0) -> Memories:
    return Memories(device_bytes=device, host_bytes=host, disk_bytes=disk, folder="/data" if disk else None, has_gpu=True)


def wheres(spec: RunSpec, memories: Memories, **options: object) -> list[str]:
    return [table.where for table in decide(spec, memories, **options).tables]  # type: ignore[arg-type]


def test_planning_needs_no_torch() -> None:
    code = "import sys, rowstead.plan.greedy; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("kind", "row_format", "num_bytes"),
    [
        ("sgd", "fp32", 100),
        ("rowwise_adagrad", "fp32", 104),
        ("adagrad", "bf16", 150),
        ("adam", "fp32", 300),
        ("momentum", "bf16", 150),
    ],
)
def test_a_row_counts_with_its_optimizers_state(kind: str, row_format: str, num_bytes: int) -> None:
    spec = spec_of(10, kind=kind)
    spec = dataclasses.replace(spec, model=dataclasses.replace(spec.model, row_format=row_format))
    assert record_bytes(spec, 25) == num_bytes
    assert record_bytes(spec, 25, trains=False) == 25 * (4 if row_format == "fp32" else 2)


def test_tables_that_fit_go_to_the_device() -> None:
    placement = decide(spec_of(10_000, 20_000), on_cpu(3 * MB))
    assert [(table.where, table.device_bytes, table.why) for table in placement.tables] == [
        ("device", MB, "all fit"),
        ("device", 2 * MB, "all fit"),
    ]
    assert placement_text(placement, has_gpu=False) == "tables: 2 tables, 3.0 MB in system memory (all fit)"


def test_tables_read_most_per_byte_go_to_the_fastest_memory() -> None:
    spec = spec_of(100_000, 100_000, 100_000, folder=None)
    assert wheres(spec, on_gpu(15 * MB, 100 * MB), mean_ids=[1.0, 5.0, 2.0]) == ["cached", "device", "cached"]
    assert wheres(spec, on_gpu(15 * MB, 100 * MB), mean_ids=[9.0, 5.0, 2.0]) == ["device", "cached", "cached"]
    spec = spec_of(100_000, 10_000, 100_000)  # as often read, but of fewer bytes
    assert wheres(spec, on_cpu(6 * MB, 100 * MB), mean_ids=[1.0, 1.0, 1.0]) == ["ssd", "device", "ssd"]


def test_caches_keep_their_capacity_when_tables_move_to_faster_memory() -> None:
    placement = decide(spec_of(100_000, 100_000, folder=None), on_gpu(11 * MB, 100 * MB))
    assert [table.where for table in placement.tables] == ["cached", "cached"]  # one whole and a tenth of the other need 12.0
    placement = decide(spec_of(100_000, 100_000, folder=None), on_gpu(13 * MB, 100 * MB))
    assert [table.where for table in placement.tables] == ["device", "cached"]


def test_tables_are_spread_if_no_single_memory_holds_all() -> None:
    assert wheres(spec_of(100_000, 100_000, folder=None), on_gpu(15 * MB, 11 * MB)) == ["device", "cached"]
    placed = wheres(spec_of(*[100_000] * 4), on_gpu(15 * MB, 15 * MB, 100 * MB))
    assert sorted(placed) == ["cached", "device", "ssd", "ssd"]


def test_caches_shrink_before_a_placement_is_refused() -> None:
    placement = decide(spec_of(100_000, 100_000), on_cpu(3 * MB, 100 * MB))
    assert {(table.where, table.cache_fraction) for table in placement.tables} == {("ssd", 0.05)}
    assert "5% of the rows are cached there, as many as fit" in placement.tables[0].why


def test_a_placement_in_the_recipe_is_kept() -> None:
    placement: PlacementSpec = {"t0": TablePlacementSpec(where="cached", cache_fraction=0.5), "t1": "host", "t2": "ssd"}
    cached, host, ssd, rest = decide(spec_of(*[10_000] * 4, placement=placement), on_gpu(100 * MB, 100 * MB, 100 * MB)).tables
    assert cached.cache_fraction == 0.5
    assert cached.host_bytes == MB
    assert cached.device_bytes == 5_000 * (100 + GPU_SLOT_BYTES) + 10_000 * (MAP_BYTES + STATE_BYTES)
    assert (host.device_bytes, host.host_bytes) == (60 * (100 + GPU_SLOT_BYTES) + 10_000 * (MAP_BYTES + STATE_BYTES), MB)
    assert ssd.host_bytes == 1_000 * (100 + SLOT_BYTES) + 10_000 * (MAP_BYTES + RECORD_BYTES)
    assert ssd.disk_bytes == int((1.5 + SEGMENTS_SHARE) * 10_000 * 112)  # a record with its row id, and spare space
    assert rest.where == "device"
    assert cached.why == "as the recipe says"


def test_without_a_gpu_device_memory_is_host_memory() -> None:
    (table,) = decide(spec_of(10_000, placement={"t0": "host"}), on_cpu(2 * MB)).tables
    assert table.where == "device"
    assert table.why == "no GPU: device memory is host memory"


def test_a_cache_counts_at_least_the_rows_of_the_batches_in_flight() -> None:
    spec = spec_of(100_000, placement={"t0": TablePlacementSpec(where="ssd", cache_fraction=0.01)}, batch_size=20_000)
    (table,) = decide(spec, on_cpu(100 * MB, 100 * MB)).tables
    assert table.host_bytes == 75_000 * (100 + SLOT_BYTES) + 100_000 * (MAP_BYTES + RECORD_BYTES)


def test_processes_shard_all_but_replicated_tables() -> None:
    spec = spec_of(10_000, 10_000, placement={"t1": TablePlacementSpec(shard="replicate")})
    first, copy = decide(spec, on_cpu(100 * MB), world_size=4, shards={"t0": "row", "t1": "table"}).tables
    assert (first.shard, first.device_bytes) == ("row", MB // 4)
    assert (copy.shard, copy.device_bytes) == ("replicate", MB)


def decided(spec: RunSpec, memories: Memories, mean_ids: list[float]) -> Placement | None:
    """The placement, or None if it is refused with remedies."""
    try:
        return decide(spec, memories, mean_ids=mean_ids)
    except RowsteadError as error:
        return None if "  1. " in str(error) else decide(spec, memories, mean_ids=mean_ids)


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.integers(1, 50_000), min_size=1, max_size=8),
    reads=st.lists(st.floats(0.1, 50), min_size=8, max_size=8),
    has_gpu=st.booleans(),
    device=st.integers(0, 10 * MB),
    host=st.integers(0, 10 * MB),
    disk=st.sampled_from([0, 5 * MB, 100 * MB]),
)
def test_a_placement_fits_or_is_refused_with_remedies(
    rows: list[int], reads: list[float], has_gpu: bool, device: int, host: int, disk: int
) -> None:
    folder = "/data" if disk else None
    memories = Memories(device_bytes=device, host_bytes=host, disk_bytes=disk, folder=folder, has_gpu=has_gpu)
    spec = spec_of(*rows)
    if (placement := decided(spec, memories, reads[: len(rows)])) is None:
        assert sum(rows) * 100 > (device if has_gpu else min(device, host))  # else all would fit
        return
    taken = {memory: placement.total_bytes(memory) for memory in ("device", "host", "disk")}  # type: ignore[arg-type]
    assert taken["disk"] <= disk
    if has_gpu:
        assert taken["device"] <= device
        assert taken["host"] <= host
    else:
        assert taken["device"] + taken["host"] <= min(device, host)
    assert all(table.why for table in placement.tables)


def test_tables_that_fit_nowhere_are_refused_with_sizes_and_numbered_remedies() -> None:
    memories = Memories(device_bytes=2 * MB, host_bytes=50 * MB, are_limits=frozenset({"device"}))
    with pytest.raises(RowsteadError) as caught:
        decide(spec_of(10_000, 90_000, kind="adam", folder=None), memories)
    assert str(caught.value).splitlines() == [
        "no placement fits: 2 tables with optimizer state need 30.0 MB (largest: `t1`, 27.0 MB), available: 2.0 MB of system memory "
        "(limit: memory.device). Possible solutions:",
        "  1. raise memory.device",
        "  2. place tables on disk: `--set memory.folder=…`, a folder with 71.9 MB free",
        "  3. reduce all tables: `--set scale=0.06` or less, or lower model.width",
        "  4. reduce optimizer state: train.sparse_optimizer.kind=rowwise_adagrad needs 10.4 MB",
        "  5. store rows in 16 bits: model.row_format=bf16 needs 25.0 MB",
        "  6. increase the number of processes: each stores a shard of the tables",
    ]


def test_a_placement_in_the_recipe_that_does_not_fit_is_refused() -> None:
    with pytest.raises(RowsteadError, match="the placement in the recipe does not fit") as caught:
        decide(spec_of(10_000, 90_000, placement={"*": "device"}), on_gpu(2 * MB, 100 * MB))
    assert "Tables with a fixed placement need 10.0 MB of GPU memory." in str(caught.value)
    assert "use `where: auto` for more tables" in str(caught.value)
    with pytest.raises(RowsteadError, match=r"Tables with a fixed placement need \S+ MB of disk space\. Possible"):
        decide(spec_of(90_000, placement={"*": "ssd"}), on_gpu(2 * MB, 100 * MB))


def test_tables_with_the_same_decision_share_a_line() -> None:
    placement = decide(spec_of(*[100_000] * 5, placement={"t3": "host"}, folder=None), on_gpu(27 * MB, 100 * MB))
    lines = placement_text(placement, has_gpu=True).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["tables", "t0, t1", "t2, t4", "t3", "total"]
    placement = decide(spec_of(*[100_000] * 5, folder=None), on_gpu(19 * MB, 100 * MB))
    assert "t1 … t4 (4 tables)" in placement_text(placement, has_gpu=True)
