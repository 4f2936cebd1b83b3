"""Machines are data: the catalogue reads, numbers have sources, and what cannot be right is refused with its field named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rowstead.spec.catalogue import MACHINES, SOFTWARE, load_machine, load_software, machine_names
from rowstead.spec.errors import RowsteadError
from rowstead.spec.machine import Machine
from rowstead.spec.parse import parse, shipped_names, to_plain

BIG_BASIN = MACHINES / "bigbasin-32.yaml"
METER = {"idle_watts": 100.0, "of": "all of it", "source": "a test"}


def plain() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(BIG_BASIN.read_text())
    return found


def changed(path: str, value: Any) -> dict[str, Any]:
    """Big Basin with one key set, or removed with `...`."""
    machine = plain()
    *parents, last = path.split(".")
    node = machine
    for key in parents:
        node = node[key]
    if value is ...:
        del node[last]
    else:
        node[last] = value
    return machine


@pytest.mark.parametrize("name", machine_names())
def test_a_shipped_machine_reads_and_is_named_as_its_file(name: str) -> None:
    machine = load_machine(name)
    assert machine.name == name
    assert parse(Machine, to_plain(machine)) == machine


@pytest.mark.parametrize("name", machine_names())
def test_every_block_of_numbers_has_a_source(name: str) -> None:
    def check(node: Any) -> None:
        if isinstance(node, dict):
            numbers = [
                k for k, v in node.items() if isinstance(v, float) and k not in ("core_share", "piece_bytes", "bytes_per_s")
            ]
            assert not numbers or node.get("source"), f"{name}: {numbers} have no source"
            for value in node.values():
                check(value)

    check(to_plain(load_machine(name)))


def test_the_catalogue_has_the_studys_platforms_and_modern_ones() -> None:
    wanted = {"cpu-2s", "bigbasin-16", "bigbasin-32", "zion-prototype", "zion", "zionex", "dgx-a100", "dgx-h100", "dgx-h200"}
    assert wanted | {"h200", "laptop"} <= set(machine_names())


@pytest.mark.parametrize("name", shipped_names(SOFTWARE))
def test_shipped_software_reads(name: str) -> None:
    assert load_software(name).name == name


def test_an_unknown_machine_names_the_nearest() -> None:
    with pytest.raises(RowsteadError, match=r"no machine `bigbasin-23`.*did you mean `bigbasin-32`"):
        load_machine("bigbasin-23")


def test_unknown_software_names_what_there_is() -> None:
    with pytest.raises(RowsteadError, match=r"no software `rowsted`.*did you mean `rowstead`"):
        load_software("rowsted")


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("network.bandwidth_bytes_per_s", 0, "network.bandwidth_bytes_per_s: must be above 0"),
        ("host.memory.bandwidth_bytes_per_s", -1, "host.memory.bandwidth_bytes_per_s: must be above 0"),
        ("host.memory.capacity_bytes", ..., "host.memory.capacity_bytes: is required"),
        ("host.memory.source", " ", "host.memory.source: say where"),
        ("host.memory.random", [], "host.memory.random: give at least one"),
        ("host.memory.random", [{"piece_bytes": 64, "bytes_per_s": 1e15}], "cannot be faster than sequential"),
        ("host.num_cores", 1, "host.num_cores: must be at least one a socket"),
        ("accelerators.peer_link", ..., "accelerators.peer_link: is required with 8 accelerators"),
        ("accelerators.peer_link.topology", "through_host", "has no links of its own"),
        ("accelerators.peer_link.bandwidth_bytes_per_s", ..., "is required for `hybrid_cube_mesh`"),
        ("accelerators.peer_link.topology", "rong", "did you mean `ring`"),
        ("accelerators.num", 0, "accelerators.num: must be at least 1"),
        ("power.nameplate_watts", 0, "power.nameplate_watts: must be above 0"),
        ("networck", {}, "did you mean `network`"),
        ("host.memory.cache_bytes", 1e15, "host.memory.cache_bytes: must not be negative, nor above capacity_bytes"),
        ("accelerators.num", 16, "a hybrid cube mesh joins up to 8"),
        ("meter", METER | {"loaded_watts": 50}, "meter.loaded_watts: must not be below idle_watts"),
        ("meter", METER | {"loaded_watts": 1e5}, "more than the nameplate's 3500"),
    ],
)
def test_what_cannot_be_right_is_refused_by_field(path: str, value: Any, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(changed(path, value)))
    with pytest.raises(RowsteadError) as caught:
        load_machine(str(file))
    assert problem in str(caught.value)
    assert "mine.yaml" in str(caught.value)


def test_what_if_multiplies_or_sets_a_field_by_the_beginning_of_its_name() -> None:
    before, after = (
        load_machine("bigbasin-32"),
        load_machine("bigbasin-32", ["machine.network.bandwidth=4x", "host.num_cores=64"]),
    )
    assert before.network is not None
    assert after.network is not None
    assert after.network.bandwidth_bytes_per_s == 4 * before.network.bandwidth_bytes_per_s
    assert after.host.num_cores == 64


@pytest.mark.parametrize("change", ["accelerators.num=4", "host.num_sockets=4"])
def test_the_power_of_a_server_with_other_numbers_of_parts_is_not_known_unless_it_is_given(change: str) -> None:
    before = load_machine("dgx-h200")
    assert before.power is not None
    assert load_machine("dgx-h200", [change]).power is None
    given = load_machine("dgx-h200", ["power.nameplate=2x", change]).power
    assert given is not None
    assert given.nameplate_watts == 2 * before.power.nameplate_watts
    assert load_machine("dgx-h200", [change.split("=")[0] + "=1x"]) == before


def test_what_if_makes_memory_faster_at_random_too() -> None:
    before, after = load_machine("cpu-2s"), load_machine("cpu-2s", ["host.memory.bandwidth=2x"])
    assert after.host.memory.random_bytes_per_s(256) == pytest.approx(2 * before.host.memory.random_bytes_per_s(256))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("network.bandwith=4x", "did you mean"),
        ("network=4x", "is not a number and cannot be changed: name one of its fields, bandwidth_bytes_per_s"),
        ("price.usd=2x", "no such part"),
        ("network.bandwidth=fast", "give a factor such as 4x"),
        ("network.bandwidth", "write it as"),
        ("network.bandwidth=0x", "must be above 0"),
    ],
)
def test_a_what_if_that_cannot_be_read_says_why(change: str, problem: str) -> None:
    with pytest.raises(RowsteadError, match=problem):
        load_machine("bigbasin-32", [change])


@given(st.floats(1, 1e6), st.floats(1, 1e6))
def test_larger_pieces_are_served_no_slower_and_within_the_given_rates(one: float, other: float) -> None:
    memory = load_machine_once().host.memory
    small, large = memory.random_bytes_per_s(min(one, other)), memory.random_bytes_per_s(max(one, other))
    assert memory.random[0].bytes_per_s * 0.999 <= small <= large * 1.001 <= memory.random[-1].bytes_per_s * 1.002


_LOADED: list[Machine] = []


def load_machine_once() -> Machine:
    if not _LOADED:
        _LOADED.append(load_machine("cpu-2s"))
    return _LOADED[0]


def test_memory_moves_whole_lines() -> None:
    memory = load_machine_once().host.memory
    assert [memory.lines(size) for size in (1, 64, 65, 256)] == [64, 64, 128, 256]


def test_more_cores_do_more_arithmetic() -> None:
    before, after = load_machine("cpu-2s"), load_machine("cpu-2s", ["host.num_cores=10"])
    assert after.host.compute.fp32_flops_per_s == pytest.approx(before.host.compute.fp32_flops_per_s / 4)
