"""Exchanges cost what their topology allows."""

from __future__ import annotations

from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowstead.plan.collective import Fabric, across_servers_s, all_reduce_s, all_to_all_s, fabric_of, hops_of
from rowstead.spec.catalogue import load_machine

TOPOLOGIES = ("ring", "fully_connected", "hybrid_cube_mesh", "switched", "through_host")


def fabric(topology: str) -> Fabric:
    return Fabric(topology, 100e9, 1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_one_device_exchanges_nothing(topology: str) -> None:
    assert all_reduce_s(fabric(topology), 1, 1e9) == all_to_all_s(fabric(topology), 1, 1e9) == 0


def test_hops_of_known_topologies() -> None:
    assert mean(hops_of("switched", 8)) == mean(hops_of("fully_connected", 8)) == 1
    assert mean(hops_of("ring", 8)) == pytest.approx((1 + 2 + 3 + 4 + 3 + 2 + 1) / 7)
    assert mean(hops_of("hybrid_cube_mesh", 8)) == pytest.approx((4 + 2 * 3) / 7)
    assert mean(hops_of("through_host", 8)) == 2


@pytest.mark.parametrize("topology", TOPOLOGIES)
@given(st.integers(2, 64), st.floats(1e3, 1e9))
def test_more_bytes_take_longer_and_nothing_beats_a_switch(topology: str, num_devices: int, num_bytes: float) -> None:
    for cost in (all_reduce_s, all_to_all_s):
        one, two = (cost(fabric(topology), num_devices, num_bytes * k) for k in (1, 2))
        assert two > one >= cost(fabric("switched"), num_devices, num_bytes) * 0.999


def test_an_all_reduce_moves_nearly_twice_the_bytes() -> None:
    assert all_reduce_s(Fabric("switched", 1e9, 0.0), 8, 1e9) == pytest.approx(2 * 7 / 8)


def test_little_is_summed_in_few_rounds() -> None:
    assert all_reduce_s(Fabric("switched", 1e9, 1e-6), 1024, 8) < 2 * 11e-6


def test_a_machine_without_direct_links_goes_through_its_host() -> None:
    accelerators = load_machine("zion-prototype").accelerators
    assert accelerators is not None
    found = fabric_of(accelerators, 8)
    assert found.topology == "through_host"
    assert found.bytes_per_s == accelerators.host_link.bandwidth_bytes_per_s


def test_servers_exchange_all_but_what_stays_at_home() -> None:
    assert across_servers_s(1e9, 0.0, 4, 1e9, reduce=False) == pytest.approx(0.75)
    assert across_servers_s(1e9, 0.0, 4, 1e9, reduce=True) == pytest.approx(1.5)
    assert across_servers_s(1e9, 1.0, 1, 1e9, reduce=True) == 0


def test_links_to_devices_that_are_not_used_stay_idle_unless_there_is_a_switch() -> None:
    mesh, switch = (load_machine(name).accelerators for name in ("bigbasin-32", "dgx-h100"))
    assert mesh is not None
    assert switch is not None
    whole = fabric_of(mesh, 8).bytes_per_s
    assert [fabric_of(mesh, count).bytes_per_s / whole for count in (2, 4, 8)] == pytest.approx([1 / 4, 3 / 4, 1])
    assert fabric_of(switch, 2) == fabric_of(switch, 8)
