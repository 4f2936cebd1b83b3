"""Predictions behave as hardware does: more of a resource never hurts, what does not fit says so, figures follow from each other."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowstead.plan.predict import Prediction, build_predicted_record, predict
from rowstead.plan.schedule import Task
from rowstead.plan.setup import Setup, fewest_devices, held, shortfalls, tables_on_devices
from rowstead.plan.setups import possible_placements
from rowstead.plan.work import StepWork, step_work
from rowstead.spec.catalogue import MACHINES, load_machine, load_software, machine_names
from rowstead.spec.errors import RowsteadError
from rowstead.spec.machine import Machine, Meter
from rowstead.spec.parse import digest
from rowstead.spec.run import load_recipe
from rowstead.spec.stores import PlannedStore

machine_of = functools.cache(load_machine)
software_of = functools.cache(load_software)


@functools.cache
def work_of(name: str) -> StepWork:
    return step_work(load_recipe(name))


def on(
    machine: Machine, place: PlannedStore, *, recipe: str = "m1", software: str = "rowstead", batch_size: int = 1600
) -> Prediction:
    remote = {"num_sparse_servers": 4, "server": machine_of("cpu-2s")} if place == "remote" else {}
    setup = Setup(placement=place, batch_size=batch_size, num_devices=machine.num_devices, **remote)  # type: ignore[arg-type]
    return predict(work_of(recipe), machine, software_of(software), setup)


@pytest.mark.parametrize("software", ["rowstead", "operators-2020"])
@pytest.mark.parametrize("place", ["device", "host", "mixed", "remote"])
@pytest.mark.parametrize(
    "change",
    [
        "network.bandwidth=2x",
        "host.memory.bandwidth=2x",
        "host.compute.fp32_flops_per_s=2x",
        "host.num_cores=2x",
        "accelerators.memory.bandwidth=2x",
        "accelerators.compute.fp32_flops_per_s=2x",
        "accelerators.host_link.bandwidth=2x",
        "accelerators.peer_link.bandwidth=2x",
    ],
)
def test_a_faster_part_never_makes_a_step_slower(change: str, place: PlannedStore, software: str) -> None:
    before, after = machine_of("bigbasin-32"), load_machine("bigbasin-32", [change])
    assert on(after, place, software=software).step_s <= on(before, place, software=software).step_s * (1 + 1e-9)


def test_twice_as_fast_a_bottleneck_saves_what_is_said() -> None:
    found = on(machine_of("bigbasin-32"), "host", software="operators-2020")
    first = found.bottlenecks[0]
    assert first.resource == "host memory"
    after = on(load_machine("bigbasin-32", ["host.memory.bandwidth=2x"]), "host", software="operators-2020")
    assert 1 - after.step_s / found.step_s == pytest.approx(first.saved_share, abs=0.1)  # its cache is no faster


@pytest.mark.parametrize("name", machine_names())
def test_every_machine_gets_a_finite_prediction(name: str) -> None:
    found = on(machine_of(name), "device", recipe="quickstart", batch_size=1024)
    assert found.fits
    assert 1e3 < found.samples_per_s < 1e9
    assert found.samples_per_s == pytest.approx(found.setup.num_samples / found.step_s)
    watts = machine_of(name).power
    assert (found.samples_per_j is None) == (watts is None)
    if watts is not None and found.samples_per_j is not None:
        assert found.samples_per_j * watts.nameplate_watts == pytest.approx(found.samples_per_s)


def test_energy_and_cost_are_absent_without_power_and_price() -> None:
    found = on(machine_of("zion"), "device")
    assert found.samples_per_j is None
    assert found.usd_per_billion_samples is None
    assert "samples_per_j" not in found.figures()


def test_parameter_servers_count_in_power() -> None:
    found = on(machine_of("bigbasin-32"), "remote")
    assert found.watts == pytest.approx(3500 + 4 * 480)


@given(st.integers(1, 4096), st.sampled_from(["device", "host", "remote"]))
@settings(max_examples=30, deadline=None)
def test_a_larger_batch_takes_longer_and_holds_more(batch_size: int, place: PlannedStore) -> None:
    machine = machine_of("bigbasin-32")
    one, two = (on(machine, place, batch_size=size) for size in (batch_size, 2 * batch_size))
    assert one.step_s < two.step_s
    assert one.held.device_bytes < two.held.device_bytes


def test_what_does_not_fit_says_where_and_by_how_much() -> None:
    found = on(machine_of("bigbasin-32"), "device", recipe="m3", batch_size=800)
    assert not found.fits
    assert "each accelerator would need" in found.shortfalls[0]
    assert "of its 32.0 GB are usable" in found.shortfalls[0]


def test_tables_are_spread_evenly_over_devices() -> None:
    machine, setup = machine_of("bigbasin-32"), Setup(placement="device", batch_size=1600, num_devices=8)
    needs = held(work_of("m1"), machine, setup)
    assert needs.device_bytes == pytest.approx(work_of("m1").table_bytes / 8, rel=0.05)


def test_mixed_fills_the_devices_first_and_is_no_slower_than_host_memory() -> None:
    machine = machine_of("zion")
    mixed, host = on(machine, "mixed", recipe="m3", batch_size=800), on(machine, "host", recipe="m3", batch_size=800)
    on_devices = sum(table.bytes for table in mixed.trainer.on_devices)
    assert 0.3 < on_devices / mixed.trainer.work.table_bytes < 1
    assert mixed.samples_per_s > host.samples_per_s


def test_as_few_devices_as_hold_the_tables() -> None:
    machine = machine_of("bigbasin-16")
    assert fewest_devices(work_of("quickstart"), machine, 1600) == 1
    assert fewest_devices(work_of("m1"), machine, 1600) == 4
    assert fewest_devices(work_of("m3"), machine, 1600) is None


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"placement": "remote"}, "num_sparse_servers"),
        ({"num_sparse_servers": 2}, "num_sparse_servers"),
        ({"num_dense_servers": 1}, "server"),
        ({"num_dense_servers": -1}, "num_dense_servers"),
        ({"num_dense_servers": 1, "num_trainers": 2, "server": load_machine("cpu-2s")}, "num_dense_servers"),
    ],
)
def test_a_set_up_that_contradicts_itself_is_refused(change: dict[str, object], problem: str) -> None:
    with pytest.raises(RowsteadError, match=problem):
        dataclasses.replace(Setup(placement="device", batch_size=1), **change)  # type: ignore[arg-type]


def test_a_set_up_that_the_machine_cannot_have_is_refused() -> None:
    with pytest.raises(RowsteadError, match="`laptop` has no network"):
        on(machine_of("laptop"), "remote")
    setup = Setup(placement="device", batch_size=1, num_devices=16)
    with pytest.raises(RowsteadError, match="has 8 devices, not 16"):
        predict(work_of("m1"), machine_of("bigbasin-32"), software_of("rowstead"), setup)
    with pytest.raises(RowsteadError, match="cannot train together"):
        predict(
            work_of("m1"),
            machine_of("laptop"),
            software_of("rowstead"),
            dataclasses.replace(setup, num_devices=1, num_trainers=2),
        )
    with pytest.raises(RowsteadError, match="`cpu-2s` has no accelerators"):
        on(machine_of("cpu-2s"), "host")


def test_more_servers_in_step_are_faster_but_not_quite_in_proportion() -> None:
    machine = machine_of("dgx-h100")
    speeds = [
        predict(
            work_of("m3"),
            machine,
            software_of("rowstead"),
            Setup(placement="device", batch_size=800, num_devices=8, num_trainers=num_trainers),
        ).samples_per_s
        for num_trainers in (1, 2, 4)
    ]
    assert speeds[0] < speeds[1] < speeds[2] < 4 * speeds[0]


def test_every_table_has_a_place() -> None:
    work = work_of("m1")
    for place in ("device", "host", "remote", "mixed"):
        found = on(machine_of("bigbasin-32"), place)  # type: ignore[arg-type]
        assert list(found.where()) == [table.name for table in work.tables]
    assert not shortfalls(work, machine_of("bigbasin-32"), Setup(placement="device", batch_size=1600, num_devices=8))


def test_a_prediction_is_a_record_of_its_own_kind() -> None:
    spec = load_recipe("m1")
    record = build_predicted_record(on(machine_of("bigbasin-32"), "device"), spec, date="2026-11-15")
    assert record.kind == "predicted"
    assert record.spec_digest == digest(spec)
    assert record.figures["samples_per_s"] > 0
    assert "usd_per_billion_samples" not in record.figures


def test_cost_follows_from_a_price(tmp_path: Path) -> None:
    file = tmp_path / "rented.yaml"
    file.write_text((MACHINES / "h200.yaml").read_text() + "price: {usd_per_hour: 3.6, source: a test}\n")
    found = on(load_machine(str(file)), "device", recipe="quickstart")
    assert found.usd_per_billion_samples == pytest.approx(0.001 * 1e9 / found.samples_per_s)


@pytest.mark.parametrize("software", ["rowstead", "operators-2020"])
@pytest.mark.parametrize("name", machine_names())
def test_every_place_of_every_machine_has_a_schedule_that_ends(name: str, software: str) -> None:
    machine = machine_of(name)
    for place in possible_placements(machine):
        for num_trainers in (1, 3) if machine.network is not None else (1,):
            setup = Setup(
                placement=place,
                batch_size=512,
                num_devices=machine.num_devices,
                num_trainers=num_trainers,
                num_sparse_servers=2 if place == "remote" else 0,
                num_dense_servers=1 if place == "remote" else 0,
                server=machine_of("cpu-2s") if place == "remote" else None,
            )
            found = predict(work_of("mlperf"), machine, software_of(software), setup)
            assert 0 < found.step_s < 60
            assert max(slot.end_s for slot in found.slots) <= found.step_s * (1 + 1e-9)
            assert found.bottlenecks[0].saved_share >= 0


def together(
    machine: Machine, place: PlannedStore, num_trainers: int, *, software: str = "rowstead", recipe: str = "m1"
) -> Prediction:
    setup = Setup(placement=place, batch_size=1600, num_devices=machine.num_devices, num_trainers=num_trainers, has_input=False)
    return predict(work_of(recipe), machine, software_of(software), setup)


def task_of(found: Prediction, name: str) -> Task:
    return next(task for task in found.tasks if task.name == name)


@pytest.mark.parametrize("place", ["host", "mixed"])
def test_tables_in_the_system_memory_of_several_servers_are_read_over_the_network(place: PlannedStore) -> None:
    slow = load_machine("bigbasin-16", ["network.bandwidth=0.01x", "accelerators.memory.capacity=0.05x"])
    alone, four = together(slow, place, 1), together(slow, place, 4)
    assert four.step_s > 2 * alone.step_s
    pooled_bytes = sum(table.pooled_bytes for table in four.trainer.off_devices)
    assert slow.network is not None
    wire_s = 0.75 * 8 * 1600 * pooled_bytes / slow.network.bandwidth_bytes_per_s
    for what in ("pooled", "gradients"):
        assert task_of(four, f"send host {what}").seconds == pytest.approx(wire_s, rel=0.01)


def test_what_stays_on_a_server_does_not_go_over_the_network_nor_the_rest_over_its_links() -> None:
    machine = machine_of("dgx-h100")
    alone, four = (together(machine, "device", num_trainers) for num_trainers in (1, 4))
    latency_s = machine.accelerators.peer_link.latency_s  # type: ignore[union-attr]
    within = [task_of(one, "exchange pooled").seconds - latency_s for one in (alone, four)]
    assert within[1] == pytest.approx(within[0] / 4)
    assert machine.network is not None
    bytes_out = 0.75 * 8 * 1600 * work_of("m1").pooled_bytes
    sent_s = task_of(four, "send pooled").seconds - 3 * machine.network.latency_s
    assert sent_s == pytest.approx(bytes_out / machine.network.bandwidth_bytes_per_s)


def test_dense_gradients_between_servers_take_cores_and_links_where_the_network_is_not_direct() -> None:
    names = {task.name for task in together(machine_of("bigbasin-32"), "device", 2).tasks}
    assert {
        "copy dense gradients to host",
        "pack dense gradients",
        "all-reduce servers",
        "copy dense gradients to device",
    } <= names
    assert "pack dense gradients" not in {task.name for task in together(machine_of("dgx-h100"), "device", 2).tasks}


def test_a_row_that_all_devices_read_is_updated_once() -> None:
    machine, work = machine_of("dgx-h100"), work_of("m1")
    updates = []
    for num_devices in (1, 8):
        setup = Setup(placement="device", batch_size=1600, num_devices=num_devices)
        found = predict(work, machine, software_of("rowstead"), setup)
        updates.append(task_of(found, "update rows").seconds / found.trainer.imbalance)
    distinct = [sum(table.distinct_rows(1600 * n) for table in work.tables) / n for n in (1, 8)]
    assert distinct[1] < 0.8 * distinct[0]
    assert updates[1] < 0.95 * updates[0]


def test_every_operator_of_a_cpu_step_is_counted_once() -> None:
    work, machine = work_of("m1"), machine_of("cpu-2s")
    software = dataclasses.replace(software_of("operators-2020"), operator_s=1.0)
    found = predict(work, machine, software, Setup(placement="device", batch_size=1))
    counted = software.operators_fixed + software.operators_per_column * work.num_dense / machine.host.num_sockets
    counted += software.operators_per_layer * len(work.layers) + software.operators_per_table * len(work.tables)
    assert found.step_s == pytest.approx(counted + 3, abs=0.5)  # three for the interaction


def test_every_launch_of_a_gpu_step_is_dispatched_once() -> None:
    work, machine = work_of("m1"), machine_of("bigbasin-32")
    software = dataclasses.replace(software_of("operators-2020"), operator_s=1.0)
    found = predict(work, machine, software, Setup(placement="device", batch_size=1))
    counted = software.operators_fixed + software.operators_per_column * work.num_dense / machine.host.num_sockets
    counted += software.operators_per_layer * len(work.layers) + software.operators_per_table * len(work.tables)
    dispatched = sum(task.seconds for task in found.tasks if task.resource == "dispatch")
    assert dispatched == pytest.approx(counted, abs=0.5)


def test_a_program_that_serves_all_devices_puts_a_batch_together_for_each() -> None:
    work, machine = work_of("m1"), machine_of("bigbasin-32")
    alone = dataclasses.replace(software_of("operators-2020"), operator_s=1.0, device_step_s=0.0)
    for software, num_batches in ((alone, 8), (dataclasses.replace(alone, one_dispatcher=False), 1)):
        found = predict(work, machine, software, Setup(placement="device", batch_size=200, num_devices=8))
        assert task_of(found, "assemble batch").seconds == pytest.approx(num_batches * work.num_dense)


@pytest.mark.parametrize(
    ("name", "place", "waits"),
    [
        ("bigbasin-32", "device", False),
        ("bigbasin-32", "host", True),
        ("bigbasin-32", "remote", True),
        ("zion-prototype", "device", True),
    ],
)
def test_launches_go_on_beside_the_devices_unless_the_host_waits_for_what_they_send(
    name: str, place: PlannedStore, waits: bool
) -> None:
    found = on(machine_of(name), place, software="operators-2020")
    launched = next(slot.end_s for slot in found.slots if slot.task.name == "dispatch")
    began = min(slot.start_s for slot in found.slots if slot.task.resource == "device")
    assert (began >= launched) == waits


def test_a_table_elsewhere_is_copied_for_each_device_and_a_remote_one_asked_for_besides() -> None:
    work, machine = work_of("m1"), machine_of("bigbasin-32")
    software = dataclasses.replace(software_of("operators-2020"), operator_s=1.0)
    of_dense = 8 * (software.operators_fixed + software.operators_per_layer * len(work.layers))
    server = {"num_sparse_servers": 4, "server": machine_of("cpu-2s")}
    for place, more, num_operators in (("host", {}, 2), ("remote", server, 4)):
        found = predict(work, machine, software, Setup(placement=place, batch_size=200, num_devices=8, **more))  # type: ignore[arg-type]
        assert task_of(found, "dispatch").seconds == pytest.approx(of_dense + 8 * num_operators * len(work.tables))


def test_a_device_has_the_uplink_that_it_shares_to_itself_while_its_neighbour_is_idle() -> None:
    accelerators = machine_of("bigbasin-32").accelerators
    assert accelerators is not None
    alone = accelerators.host_link.bandwidth_bytes_per_s
    assert [accelerators.host_bytes_per_s(count) for count in (1, 2, 8)] == [alone, alone / 2, alone / 2]
    with pytest.raises(RowsteadError, match="at least 1"):
        load_machine("bigbasin-32", ["accelerators.num_per_uplink=0"])


def test_ids_and_lengths_are_copied_table_by_table_where_each_has_its_operators() -> None:
    machine, work = machine_of("bigbasin-32"), work_of("m1")
    latency_s = machine.accelerators.host_link.latency_s  # type: ignore[union-attr]
    fused, apart = (task_of(on(machine, "device", software=name), "copy batch") for name in ("rowstead", "operators-2020"))
    assert apart.seconds - fused.seconds == pytest.approx(2 * len(work.tables) / 8 * latency_s)


def test_a_mixed_set_up_keeps_whole_tables_and_holds_what_is_left_in_system_memory() -> None:
    machine, work = load_machine("bigbasin-32", ["accelerators.num=1"]), work_of("m1")
    setup = Setup(placement="mixed", batch_size=1600)
    chosen = tables_on_devices(work, machine, setup)
    assert 0 < len(chosen) < len(work.tables)
    needs = held(work, machine, setup)
    rest = work.table_bytes - sum(table.bytes for table in chosen)
    assert needs.host_bytes == pytest.approx(rest + 3 * 1600 * work.input_bytes)
    assert not shortfalls(work, machine, setup)


def test_six_devices_hold_what_four_do_not() -> None:
    machine = load_machine("bigbasin-32", ["accelerators.num=6", "accelerators.memory.capacity=0.33x"])
    assert fewest_devices(work_of("m1"), machine, 1600) == 6


def test_the_servers_network_is_a_resource_of_its_own() -> None:
    setup = Setup(placement="remote", batch_size=800, num_devices=8, num_sparse_servers=2, server=machine_of("cpu-2s"))
    found = predict(work_of("m3"), machine_of("dgx-h100"), software_of("rowstead"), setup)
    more = predict(work_of("m3"), load_machine("dgx-h100", ["network.bandwidth=4x"]), software_of("rowstead"), setup)
    slow = predict(
        work_of("m3"),
        machine_of("dgx-h100"),
        software_of("rowstead"),
        dataclasses.replace(setup, server=load_machine("cpu-2s", ["network.bandwidth=0.1x"])),
    )
    assert slow.bottlenecks[0].resource.startswith("servers' network")
    assert more.step_s == pytest.approx(found.step_s, rel=0.01)


def test_a_meter_of_one_gpu_says_nothing_of_eight() -> None:
    meter = Meter(idle_watts=100, loaded_watts=600, of="one GPU", source="a test")
    machine = dataclasses.replace(machine_of("dgx-h100"), meter=meter)
    eight = on(machine, "device")
    one = predict(work_of("m1"), machine, software_of("rowstead"), Setup(placement="device", batch_size=1600))
    assert eight.metered_watts is None
    assert one.metered_watts == 600
    assert one.figures()["samples_per_metered_j"] == pytest.approx(one.samples_per_s / 600)


def test_tables_of_cpu_servers_are_in_system_memory_in_words_too() -> None:
    alone, four = (together(machine_of("cpu-2s"), "device", num_trainers) for num_trainers in (1, 4))
    assert set(alone.where().values()) == {"system memory"}
    assert {text.split(",")[0] for text in four.where().values()} == {f"server {number}" for number in range(4)}
    assert "device_bytes" not in alone.figures()
    assert "server_bytes" not in alone.figures()


def test_ids_of_tables_that_are_elsewhere_are_not_copied_to_devices() -> None:
    machine, work = machine_of("bigbasin-32"), work_of("m1")
    accelerators = machine.accelerators
    assert accelerators is not None
    for place, ids in (("device", work.ids_per_sample), ("host", 0.0), ("remote", 0.0)):
        copied_s = task_of(on(machine, place), "copy batch").seconds - accelerators.host_link.latency_s  # type: ignore[arg-type]
        num_bytes = 4 * work.num_dense + 4 + (8 * ids + 4 * len(work.tables) if ids else 0)
        assert copied_s == pytest.approx(1600 * num_bytes / accelerators.host_bytes_per_s(8))
