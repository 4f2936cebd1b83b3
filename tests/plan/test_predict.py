"""Predictions behave as hardware does: more of a resource never hurts, what does not fit says so, figures follow from each other."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowstead.plan.choose import places_of
from rowstead.plan.predict import Prediction, predict, record_of
from rowstead.plan.setup import Place, Setup, fewest_devices, held, shortfalls
from rowstead.plan.work import StepWork, step_work
from rowstead.spec.catalogue import MACHINES, load_machine, load_software, machine_names
from rowstead.spec.errors import RowsteadError
from rowstead.spec.machine import Machine
from rowstead.spec.parse import digest
from rowstead.spec.run import load_recipe

machine_of = functools.cache(load_machine)
software_of = functools.cache(load_software)


@functools.cache
def work_of(name: str) -> StepWork:
    return step_work(load_recipe(name))


def on(machine: Machine, place: Place, *, recipe: str = "m1", software: str = "rowstead", batch_size: int = 1600) -> Prediction:
    remote = {"num_sparse_servers": 4, "server": machine_of("cpu-2s")} if place == "remote" else {}
    setup = Setup(place=place, batch_size=batch_size, num_devices=machine.num_devices, **remote)  # type: ignore[arg-type]
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
def test_a_faster_part_never_makes_a_step_slower(change: str, place: Place, software: str) -> None:
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
def test_a_larger_batch_takes_longer_and_holds_more(batch_size: int, place: Place) -> None:
    machine = machine_of("bigbasin-32")
    one, two = (on(machine, place, batch_size=size) for size in (batch_size, 2 * batch_size))
    assert one.step_s < two.step_s
    assert one.held.device_bytes < two.held.device_bytes


def test_what_does_not_fit_says_where_and_by_how_much() -> None:
    found = on(machine_of("bigbasin-32"), "device", recipe="m3", batch_size=800)
    assert not found.fits
    assert "each accelerator would hold" in found.shortfalls[0]
    assert "of its 32.0 GB are usable" in found.shortfalls[0]


def test_tables_are_spread_evenly_over_devices() -> None:
    machine, setup = machine_of("bigbasin-32"), Setup(place="device", batch_size=1600, num_devices=8)
    needs = held(work_of("m1"), machine, setup)
    assert needs.device_bytes == pytest.approx(work_of("m1").table_bytes / 8, rel=0.05)


def test_mixed_fills_the_devices_first_and_is_no_slower_than_host_memory() -> None:
    machine = machine_of("zion")
    mixed, host = on(machine, "mixed", recipe="m3", batch_size=800), on(machine, "host", recipe="m3", batch_size=800)
    assert 0.3 < mixed.held.device_table_share < 1
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
        ({"place": "remote"}, "num_sparse_servers"),
        ({"num_sparse_servers": 2}, "num_sparse_servers"),
        ({"num_dense_servers": 1}, "server"),
    ],
)
def test_a_set_up_that_contradicts_itself_is_refused(change: dict[str, object], problem: str) -> None:
    with pytest.raises(RowsteadError, match=problem):
        dataclasses.replace(Setup(place="device", batch_size=1), **change)  # type: ignore[arg-type]


def test_a_set_up_that_the_machine_cannot_have_is_refused() -> None:
    with pytest.raises(RowsteadError, match="`laptop` has no network"):
        on(machine_of("laptop"), "remote")
    setup = Setup(place="device", batch_size=1, num_devices=16)
    with pytest.raises(RowsteadError, match="has 8 devices, not 16"):
        predict(work_of("m1"), machine_of("bigbasin-32"), software_of("rowstead"), setup)


def test_more_servers_in_step_are_faster_but_not_quite_in_proportion() -> None:
    machine = machine_of("dgx-h100")
    speeds = [
        predict(
            work_of("m3"),
            machine,
            software_of("rowstead"),
            Setup(place="device", batch_size=800, num_devices=8, num_trainers=num_trainers),
        ).samples_per_s
        for num_trainers in (1, 2, 4)
    ]
    assert speeds[0] < speeds[1] < speeds[2] < 4 * speeds[0]


def test_every_table_has_a_place() -> None:
    work = work_of("m1")
    for place in ("device", "host", "remote", "mixed"):
        found = on(machine_of("bigbasin-32"), place)  # type: ignore[arg-type]
        assert list(found.where()) == [table.name for table in work.tables]
    assert not shortfalls(work, machine_of("bigbasin-32"), Setup(place="device", batch_size=1600, num_devices=8))


def test_a_prediction_is_a_record_of_its_own_kind() -> None:
    spec = load_recipe("m1")
    record = record_of(on(machine_of("bigbasin-32"), "device"), spec, date="2026-11-15")
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
    for place in places_of(machine):
        for num_trainers in (1, 3) if machine.network is not None else (1,):
            setup = Setup(
                place=place,
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
