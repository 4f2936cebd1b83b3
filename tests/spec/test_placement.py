"""What a recipe may say about where tables live, and what is wrong with it."""

from __future__ import annotations

import pytest
import yaml

from rowstead.spec.errors import SpecError
from rowstead.spec.parse import parse, to_plain
from rowstead.spec.placement import TablePlacementSpec, rules_for
from rowstead.spec.run import RunSpec
from rowstead.spec.sizes import format_bytes, parse_bytes
from rowstead.spec.stores import IN_PLANS, IN_RECIPES, STORES, store_title
from tests.small_runs import small_spec


def problem_of(*assignments: str) -> str:
    with pytest.raises(SpecError) as caught:
        small_spec(*assignments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [("20GB", 20 * 10**9), ("1.5 MB", 1_500_000), ("512MiB", 512 << 20), ("64kb", 64_000), (4096, 4096), ("1e9", 10**9)],
)
def test_sizes_are_numbers_or_text(size: int | str, num_bytes: int) -> None:
    assert parse_bytes(size) == num_bytes
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.05)


@pytest.mark.parametrize("size", ["", "GB", "20XB", "-3GB", "1,5GB", "nan", "inf GB"])
def test_other_text_is_no_size(size: str) -> None:
    with pytest.raises(SpecError, match="is not a size"):
        parse_bytes(size)


def test_the_most_specific_rule_counts_alone() -> None:
    rules = rules_for(
        {
            "*": "host",
            "user_*": TablePlacementSpec(where="cached", cache_fraction=0.2),
            "user_id": TablePlacementSpec(shard="row"),
            "user_??": "ssd",
        },
        ["user_id", "user_ab", "user_name", "item"],
    )
    assert rules["user_id"] == TablePlacementSpec(where="auto", shard="row")
    assert rules["user_ab"].where == "ssd"
    assert rules["user_name"] == TablePlacementSpec(where="cached", cache_fraction=0.2)
    assert rules["item"].where == "host"


def test_auto_leaves_every_table_to_us() -> None:
    assert rules_for("auto", ["a"]) == {"a": TablePlacementSpec()}


def test_one_word_places_all_tables() -> None:
    spec = small_spec("placement=ssd", "memory.folder=rows")
    assert spec.placement == "ssd"
    assert {rule.where for rule in rules_for(spec.placement, ["a", "b"]).values()} == {"ssd"}
    assert parse(RunSpec, yaml.safe_load(yaml.safe_dump(to_plain(spec)))) == spec


@pytest.mark.parametrize(
    "change", ["placement=ssd", "placement.sparse_0=ssd", "placement={'*': {where: ssd, cache_fraction: 0.2}}"]
)
def test_tables_on_ssd_are_in_the_working_folder_unless_another_is_named(change: str) -> None:
    assert small_spec(change).memory.folder == "."
    assert small_spec(change, "memory.folder=rows").memory.folder == "rows"
    assert small_spec().memory.folder is None  # where `auto` uses no disk


def test_a_placement_can_be_set_on_the_command_line_and_comes_back_from_yaml() -> None:
    spec = small_spec("placement.sparse_*.where=cached", "placement.sparse_*.cache_fraction=0.2", "placement.sparse_1=device")
    assert spec.placement == {"sparse_*": TablePlacementSpec(where="cached", cache_fraction=0.2), "sparse_1": "device"}
    assert parse(RunSpec, yaml.safe_load(yaml.safe_dump(to_plain(spec)))) == spec


@pytest.mark.parametrize(
    ("assignments", "problem"),
    [
        (["placement.sprse_1=device"], "placement.sprse_1: matches no table: did you mean `sparse_1`?"),
        (["placement.user_*=device"], "placement.user_*: matches no table: known here: `sparse_0`"),
        (["placement.sparse_*=cachd"], "placement.sparse_*: got 'cachd'; did you mean `cached`?"),
        (["placement.sparse_0.wher=host"], "placement.sparse_0.wher: unknown key: did you mean `where`?"),
        (["placement.sparse_0.shard=rows"], "placement.sparse_0.shard: got 'rows'; did you mean `row`?"),
        (["placement=atuo"], "placement: got 'atuo'; did you mean `auto`?"),
        (["placement=[device]"], "placement: expected mapping of names to"),
        (["placement.sparse_0.cache_fraction=0"], "placement.sparse_0.cache_fraction: must be above 0"),
        (["memory.host=lots"], "memory.host: `lots` is not a size"),
        (["memory.device=0"], "memory.device: must be above 0"),
        (["memory.hots=1GB"], "memory.hots: unknown key: did you mean `host`?"),
        (
            ["placement.sparse_0.where=device", "placement.sparse_0.cache_fraction=0.1"],
            "placement.sparse_0.cache_fraction: a table with `where: device` has no cache",
        ),
        (
            ["placement.sparse_?=device", "placement.?parse_0=host"],
            "placement.?parse_0: table `sparse_0` also matches `sparse_?`",
        ),
    ],
)
def test_what_cannot_be_right_is_refused_by_its_key(assignments: list[str], problem: str) -> None:
    assert problem in problem_of(*assignments)


def test_patterns_that_say_the_same_may_overlap() -> None:
    assert small_spec("placement.sparse_?=device", "placement.?parse_0=device").placement != "auto"


def test_every_kind_of_store_is_in_the_registry_once() -> None:
    assert set(STORES) == {*IN_RECIPES, *IN_PLANS}
    assert all(name == kind.name for name, kind in STORES.items())
    assert store_title("device", has_accelerators=False) == STORES["host"].title
