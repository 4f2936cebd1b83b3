"""The planner knows what the trainer knows: caches, files, shards, wire formats and sync modes of a recipe."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowstead.plan.choose import choose
from rowstead.plan.predict import Prediction, predict
from rowstead.plan.recipe_fleet import choose_for_recipe
from rowstead.plan.setup import CachedTable, Setup
from rowstead.plan.work import step_work
from rowstead.spec.catalogue import load_machine, load_software, machine_names
from rowstead.spec.errors import RowsteadError
from rowstead.spec.run import RunSpec, load_recipe

CPU = load_machine("cpu-2s")


def plan(recipe: RunSpec, machine: str) -> dict[str, Prediction]:
    """The best set-up of each placement that fits."""
    found = choose(recipe, load_machine(machine), load_software("rowstead"), server=CPU)
    return {one.setup.placement: one for one in (found.best, *found.others) if one is not None and one.fits}


def with_caches(machine: str, where: Any, fraction: float, *, recipe: str = "m1", batch_size: int = 1600) -> Prediction:
    work, there = step_work(load_recipe(recipe)), load_machine(machine)
    behind = tuple(CachedTable(table=table.name, cache_fraction=fraction, where=where) for table in work.tables)
    setup = Setup(placement=where, batch_size=batch_size, num_devices=there.num_devices, behind=behind)
    return predict(work, there, load_software("rowstead"), setup)


def test_m3_is_proposed_cached_on_ssd_and_on_parameter_servers_with_times() -> None:
    m3 = load_recipe("m3")
    found = {name: plan(m3, name) for name in ("h200", "zionex", "dgx-h100")}
    assert "ssd" in found["h200"]
    assert {"cached", "remote"} <= set(found["zionex"])
    assert {"device", "ssd", "remote"} <= set(found["dgx-h100"])
    for some in found.values():
        assert all(0 < one.step_s < 60 for one in some.values())
    on_ssd = found["h200"]["ssd"]
    assert on_ssd.bottlenecks[0].resource == "disk"
    assert 0 < on_ssd.held.disk_bytes < 3.84e12


def test_device_memory_is_no_slower_than_a_cache_and_a_cache_no_slower_than_files() -> None:
    found = plan(load_recipe("m1"), "dgx-h100")
    assert found["device"].samples_per_s >= found["cached"].samples_per_s >= found["ssd"].samples_per_s


@settings(max_examples=20, deadline=None)
@given(
    some=st.tuples(st.floats(0.001, 1), st.floats(0.001, 1)).map(sorted),
    case=st.sampled_from([("h200", "cached"), ("zion", "cached"), ("h200", "ssd"), ("laptop", "ssd")]),
)
def test_a_larger_cache_is_never_slower_and_takes_more_memory(some: list[float], case: tuple[str, str]) -> None:
    small, large = (with_caches(*case, fraction, recipe="m2", batch_size=64) for fraction in some)
    assert large.step_s <= small.step_s * (1 + 1e-6)
    assert large.held.device_bytes + large.held.host_bytes >= small.held.device_bytes + small.held.host_bytes


@pytest.mark.parametrize("change", ["disk.read=2x", "disk.write=2x", "disk.random_reads=2x"])
@pytest.mark.parametrize("name", ["h200", "laptop"])
def test_a_faster_disk_is_never_slower(name: str, change: str) -> None:
    work = step_work(load_recipe("m1"))
    behind = tuple(CachedTable(table=table.name, cache_fraction=0.05, where="ssd") for table in work.tables)
    setup = Setup(placement="ssd", batch_size=400, behind=behind)
    slow, fast = (predict(work, load_machine(name, some), load_software("rowstead"), setup) for some in ([], [change]))
    assert fast.step_s <= slow.step_s


@pytest.mark.parametrize("name", ["dgx-h100", "zion", "zion-ring", "zion-prototype", "bigbasin-32"])
def test_a_narrower_wire_sends_half_the_bytes_and_is_never_slower(name: str) -> None:
    spec = load_recipe("m1")
    wide, narrow = (
        plan(dataclasses.replace(spec, train=dataclasses.replace(spec.train, wire=wire)), name)["device"]
        for wire in ("fp32", "bf16")
    )
    assert (wide.setup.wire, narrow.setup.wire) == ("fp32", "bf16")
    assert narrow.trainer.exchanged_bytes == wide.trainer.exchanged_bytes / 2
    assert narrow.trainer.reduced_bytes == wide.trainer.reduced_bytes / 2
    assert narrow.step_s <= wide.step_s


def test_what_a_recipe_says_about_tables_is_planned() -> None:
    spec = load_recipe("m1", ["memory.folder=.", "placement.*.where=ssd", "placement.*.cache_fraction=0.2"])
    found = plan(spec, "h200")
    assert set(found) == {"ssd"}
    assert {one.cache_fraction for one in found["ssd"].setup.behind} == {0.2}
    assert "files on SSD, cache of 20%" in found["ssd"].where()["sparse_0"]
    mixed = plan(load_recipe("m1", ["placement.sparse_0=cached", "placement.sparse_1.shard=replicate"]), "dgx-h100")["cached"]
    assert [one.table for one in mixed.setup.behind] == ["sparse_0"]
    assert mixed.setup.shards == (("sparse_1", "replicate"),)


def test_every_sharding_has_its_bytes() -> None:
    work, machine = step_work(load_recipe("m1")), load_machine("dgx-h100")

    def of(shard: Any) -> Prediction:
        shards = tuple((table.name, shard) for table in work.tables)
        return predict(
            work, machine, load_software("rowstead"), Setup(placement="device", batch_size=1600, num_devices=8, shards=shards)
        )

    table, row, column, replicate = (of(shard).trainer for shard in ("table", "row", "column", "replicate"))
    assert table.exchanged_bytes == column.exchanged_bytes == work.pooled_bytes
    assert table.exchanged_bytes < row.exchanged_bytes <= 8 * table.exchanged_bytes
    assert replicate.exchanged_bytes == 0
    assert replicate.reduced_bytes > table.reduced_bytes
    assert of("replicate").held.device_bytes > 7 * of("table").held.device_bytes


def fleet(**changes: Any) -> Prediction:
    setup = Setup(
        placement="remote",
        batch_size=200,
        num_trainers=4,
        num_sparse_servers=8,
        num_dense_servers=1,
        server=CPU,
        **changes,
    )
    return predict(step_work(load_recipe("m1")), CPU, load_software("rowstead"), setup)


def test_sync_in_the_background_is_no_slower_and_in_every_step_no_faster() -> None:
    shadow, easgd, allreduce = (fleet(sync=mode, sync_every=4).step_s for mode in ("shadow", "easgd", "allreduce"))
    assert shadow <= easgd <= allreduce
    assert shadow < allreduce


@settings(max_examples=20, deadline=None)
@given(st.tuples(st.integers(1, 100), st.integers(1, 100)).map(sorted))
def test_averaging_less_often_is_never_slower(periods: list[int]) -> None:
    often, seldom = (fleet(sync_every=period) for period in periods)
    assert seldom.step_s <= often.step_s


def test_sync_threads_and_staleness_of_a_recipe_are_planned() -> None:
    changes = ["train.sync.mode=shadow", "train.sync.period=7", "train.sync.hogwild_threads=2", "train.sync.staleness=1"]
    setup = plan(load_recipe("m1", changes), "cpu-2s")["remote"].setup
    assert (setup.sync, setup.sync_every, setup.in_flight) == ("shadow", 7, 4)


def test_remedies_name_caches_and_files() -> None:
    small = choose(load_recipe("m3"), load_machine("laptop", ["disk.capacity=1e9"]), load_software("rowstead"), server=CPU)
    assert small.best is None
    assert any("keep all rows in files on SSD" in one for one in small.remedies)
    without = dataclasses.replace(load_machine("bigbasin-16"), network=None)
    found = choose(load_recipe("m3"), without, load_software("rowstead"), server=CPU)
    assert found.best is None
    assert any("keep all rows in system memory and 1% of them in a cache" in one for one in found.remedies)


def test_a_ring_is_shipped_and_can_be_asked_for() -> None:
    assert "zion-ring" in machine_names()
    ring = load_machine("zion", ["accelerators.peer_link.topology=ring"])
    assert ring.accelerators is not None
    assert ring.accelerators.peer_link is not None
    assert ring.accelerators.peer_link.topology == "ring"
    shipped = load_machine("zion-ring").accelerators
    assert shipped is not None
    assert shipped.peer_link is not None
    assert shipped.peer_link.bandwidth_bytes_per_s == ring.accelerators.peer_link.bandwidth_bytes_per_s
    m1 = load_recipe("m1")
    found = {name: plan(m1, name)["device"] for name in ("zion", "zion-ring")}
    assert found["zion"].samples_per_s > found["zion-ring"].samples_per_s
    through_host = load_machine("zion", ["accelerators.peer_link.topology=through_host"]).accelerators
    assert through_host is not None
    assert through_host.peer_link is not None
    assert through_host.peer_link.bandwidth_bytes_per_s is None
    with pytest.raises(RowsteadError, match="topology"):
        load_machine("zion", ["accelerators.peer_link.topology=star"])


def test_a_framework_without_caches_is_planned_without_them() -> None:
    found = choose(load_recipe("m3"), load_machine("zionex"), load_software("operators-2020"), server=CPU)
    assert not {"cached", "ssd"} & {one.setup.placement for one in (found.best, *found.others) if one is not None}


def test_the_fleet_of_a_recipe_is_planned_with_its_sync() -> None:
    spec = load_recipe("m1", ["train.sync.mode=shadow", "train.sync.period=9", "train.sync.staleness=1"])
    best = choose_for_recipe(spec, CPU, load_software("rowstead"), server=CPU).best
    assert best is not None
    assert spec.fleet is not None
    assert (best.setup.num_trainers, best.setup.num_sparse_servers) == (spec.fleet.num_trainers, spec.fleet.num_sparse)
    assert (best.setup.sync, best.setup.sync_every, best.setup.in_flight) == ("shadow", 9, 2)
