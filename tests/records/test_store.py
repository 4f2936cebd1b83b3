"""The run store keeps what many processes add, reads what is whole, and counts what is not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowstead.records.run_folder import RunFolder
from rowstead.records.select import compare, condition, export_parquet, find, ordered, selected
from rowstead.records.store import RunStore, StoreEntry, entry_in, line_of
from rowstead.spec.errors import RowsteadError
from rowstead.spec.record import Record
from tests.small_runs import small_spec

HOSTILE = "<script>alert('x')</script> [bold]\x1b[31m\n\t‮ 猫 {} $(reboot) `ls` " + "long " * 50


def entry(name: str = "one", **changes: Any) -> StoreEntry:
    """A measured point of a sweep, of one figure unless others are given."""
    figures = changes.pop("figures", {"samples_per_s": 1000.0})
    record = Record(
        kind=changes.pop("kind", "measured"), name=name, spec_digest="d", date="2026-01-01T00:00:00+00:00", figures=figures
    )
    return StoreEntry(record=record, **{"source": "sweep", "study": "s", "point": "p", **changes})


def test_what_is_added_is_read(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "runs")
    added = entry(axes={"mlp": [64, 64], "batch": 100}, settings={"train.batch_size": 100}, seed=3, failure="no memory")
    store.add(added, entry("two"))
    contents = store.read()
    assert contents.num_bad_lines == 0
    first, second = contents.entries
    assert (first.axes, first.settings, first.seed, first.failure) == (added.axes, added.settings, 3, "no memory")
    assert first.record == added.record
    assert second.record.name == "two"
    assert first.id != second.id
    assert contents.studies == {"s": "sweep"}
    assert len(contents.of(study="s", kind="measured")) == 2
    assert contents.of(source="trial") == ()
    assert [e.point for e in contents.entries] == ["p", "p"]


def test_null_is_a_value_of_an_axis_and_of_a_setting(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.add(entry(axes={"early stop": None, "b": [1, None]}, settings={"train.early_stop": None, "x": {"y": None}}))
    (found,) = store.read().entries
    assert found.axes == {"early stop": None, "b": [1, None]}
    assert found.settings == {"train.early_stop": None, "x": {"y": None}}


def test_what_was_predicted_for_a_run_is_in_the_store_beside_it(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "small")
    run.write_spec(small_spec())
    record = entry("small").record
    run.predicted_file.write_text(json.dumps(vars(record) | {"kind": "predicted"}))
    assert RunStore(tmp_path).read().entries == ()  # before the run has finished it says nothing
    run.write_record(record)
    contents = RunStore(tmp_path).read()
    assert [(one.id, one.record.kind) for one in contents.entries] == [
        ("predicted:small-001", "predicted"),
        ("small-001", "measured"),
    ]
    assert {one.folder for one in contents.entries} == {str(run.path)}
    for name in ("last", "small-001", "small-0", str(run.path)):
        assert find(contents.entries, name).id == "small-001"
    run.predicted_file.write_text("{")
    assert RunStore(tmp_path).read().num_bad_lines == 1


def test_an_empty_root_is_an_empty_store(tmp_path: Path) -> None:
    assert RunStore(tmp_path / "none").read().entries == ()


BROKEN = [
    b"{",
    b"null",
    b"[1]",
    b"\xff\xfe\x00",
    b'{"kind": "measured"}',
    b"[" * 100_000,
    line_of(entry()).encode()[:-10],
    line_of(entry()).replace('"measured"', '"imagined"').encode(),
    line_of(entry()).replace("1000.0", "NaN").encode(),
    line_of(entry()).replace("1000.0", "1e999").encode(),
    line_of(entry()).replace("1000.0", '"many"').encode(),
    line_of(entry()).replace('"sweep"', '["sweep"]').encode(),
    line_of(entry(axes={"a": 1})).replace('{"a": 1}', "7").encode(),
    line_of(entry(seed=7)).replace('"seed": 7', f'"seed": {2**63}').encode(),
    b'{"name": "' + b"x" * (1 << 20) + b'"}',
]


@pytest.mark.parametrize("broken", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_line_is_counted_and_the_others_are_read(tmp_path: Path, broken: bytes) -> None:
    store = RunStore(tmp_path)
    store.add(entry("before"))
    with open(store.file, "ab") as file:
        file.write(broken.rstrip(b"\n") + b"\n")
    store.add(entry("after"))
    contents = store.read()
    assert [e.record.name for e in contents.entries] == ["before", "after"]
    assert contents.num_bad_lines == 1


def test_a_line_that_was_torn_does_not_take_the_next_with_it(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.add(entry("before"))
    with open(store.file, "ab") as file:
        file.write(line_of(entry("torn")).encode()[:40])
    assert store.read().num_bad_lines == 1
    store.add(entry("after"))
    contents = store.read()
    assert [e.record.name for e in contents.entries] == ["before", "after"]
    assert contents.num_bad_lines == 1


texts = st.text(max_size=30)
values = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | texts


@given(
    name=texts,
    axes=st.dictionaries(texts, values.filter(lambda value: value is not None), max_size=4),
    figures=st.dictionaries(texts, st.floats(allow_nan=False, allow_infinity=False), max_size=4),
    failure=st.none() | texts.filter(bool),
)
def test_any_names_and_values_come_back(
    name: str, axes: dict[str, Any], figures: dict[str, float], failure: str | None
) -> None:
    one = entry(name, axes=axes, figures=figures, failure=failure)
    line = line_of(one).encode()
    assert line.count(b"\n") == 1
    found = entry_in(line)
    assert found is not None
    assert (found.record.name, found.axes, found.record.figures, found.failure) == (name, axes, figures, failure)


WRITER = """
import sys
from tests.records.test_store import entry
from rowstead.records.store import RunStore
store = RunStore(sys.argv[1])
for number in range(200):
    store.add(entry(sys.argv[2], axes={"number": number, "padding": "x" * 3000}))
"""


def test_several_processes_add_at_once(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent.parent
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    writers = [subprocess.Popen([*command, name], cwd=root) for name in ("a", "b", "c")]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0, 0]
    contents = RunStore(tmp_path).read()
    assert contents.num_bad_lines == 0
    for name in ("a", "b", "c"):
        assert [e.axes["number"] for e in contents.entries if e.record.name == name] == list(range(200))


def test_finished_runs_are_entries_and_others_are_named(tmp_path: Path) -> None:
    for number, has_record in enumerate((True, False), 1):
        run = RunFolder.create(tmp_path, "small")
        run.write_spec(small_spec(f"seed={number}"))
        if has_record:
            run.write_record(entry("small").record)
    broken = RunFolder.create(tmp_path, "small")
    broken.write_spec(small_spec())
    broken.record_file.write_text("{")
    store = RunStore(tmp_path)
    store.add(entry("point"))
    contents = store.read()
    assert next((e.source, e.id) for e in contents.entries) == ("run", "small-001")
    assert [e.record.name for e in contents.entries] == ["small", "point"]
    assert contents.unfinished == (str(tmp_path / "small-002"),)
    assert contents.num_bad_lines == 1


@pytest.mark.parametrize(
    ("wish", "num_found"),
    [
        ("ne<0.8", 1),
        ("ne<=0.8", 2),
        ("ne>0.8", 0),
        ("source=sweep", 3),
        ("source!=sweep", 0),
        ("batch=100", 1),
        ("batch=1e2", 1),
        ("batch!=100", 2),
        ("train.batch_size>=100", 1),
        ("name~TW", 1),
        ("machine.cpu~xeon", 0),
        ("nothing=1", 0),
        ("mlp=[64, 64]", 1),
    ],
)
def test_conditions(wish: str, num_found: int) -> None:
    entries = [
        entry("one", figures={"ne": 0.7}, axes={"batch": 100}, settings={"train.batch_size": 100}),
        entry("two", figures={"ne": 0.8}, axes={"mlp": [64, 64]}),
        entry("three", figures={}),
    ]
    assert len(selected(entries, [condition(wish)])) == num_found


@pytest.mark.parametrize("wish", ["", "ne", "<3", "ne<many"])
def test_a_condition_that_cannot_be_read_says_how_to_write_it(wish: str) -> None:
    with pytest.raises(RowsteadError, match="--where"):
        condition(wish)


def test_order_puts_what_has_no_figure_last() -> None:
    entries = [entry("none", figures={}), entry("two", figures={"ne": 2.0}), entry("one", figures={"ne": 1.0})]
    assert [e.record.name for e in ordered(entries, "ne")] == ["one", "two", "none"]


def test_a_record_is_found_by_the_beginning_of_its_id(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.add(entry("one"), entry("two"))
    entries = store.read().entries
    assert find(entries, entries[1].id[:8]) is entries[1]
    with pytest.raises(RowsteadError, match="no record"):
        find(entries, "zzz")
    with pytest.raises(RowsteadError, match="empty"):
        find([], "last")


def test_two_runs_are_compared_key_by_key(tmp_path: Path) -> None:
    for batch_size, speed in ((64, 100.0), (128, 150.0)):
        run = RunFolder.create(tmp_path, "small")
        run.write_spec(small_spec(f"train.batch_size={batch_size}"))
        run.write_record(entry("small", figures={"samples_per_s": speed}).record)
    one, other = RunStore(tmp_path).read().entries
    facts, (speed_row,) = compare(one, other)
    assert [(row.name, row.one, row.other) for row in facts] == [("recipe train.batch_size", 64, 128)]
    assert speed_row.ratio == 1.5


def test_hostile_names_are_exported_as_they_are(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.add(entry(HOSTILE, axes={HOSTILE: HOSTILE}, failure=HOSTILE), entry("lone \ud800 surrogate", figures={"ne": 1.0}))
    contents = store.read()
    assert contents.num_bad_lines == 0
    export_parquet(contents.entries, tmp_path / "out.parquet")
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.column("name").to_pylist() == [HOSTILE, "lone ? surrogate"]
    assert json.loads(table.column(f"axes.{HOSTILE}").to_pylist()[0]) == HOSTILE
    assert table.column("figures.ne").to_pylist() == [None, 1.0]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rowstead", "runs", *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def test_the_command_lists_compares_and_exports(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.add(entry(HOSTILE, study=HOSTILE), entry("two", figures={"samples_per_s": 2500.0}))
    with open(store.file, "ab") as file:
        file.write(b"{torn")
    listed = command("--runs", str(tmp_path))
    assert listed.returncode == 0
    assert "2 of 2 records" in listed.stdout
    assert "\x1b" not in listed.stdout
    assert "\\x1b[31m" in listed.stdout or "<script>" in listed.stdout
    assert "1 unreadable line" in listed.stderr
    as_json = command("--runs", str(tmp_path), "--json", "--where", "name=two")
    (line,) = as_json.stdout.splitlines()
    one, two = (e.id for e in store.read().entries)
    assert json.loads(line)["id"] == two
    compared = command("compare", one, two, "--runs", str(tmp_path))
    assert "2.5" in compared.stdout
    out = tmp_path / "out.parquet"
    assert command("export", str(out), "--runs", str(tmp_path), "--where", "name=two").returncode == 0
    assert pq.read_table(out).num_rows == 1
    again = command("export", str(out), "--runs", str(tmp_path))
    assert again.returncode == 2
    assert "--overwrite" in again.stderr


def test_predictions_of_a_plan_are_kept_when_asked_for(tmp_path: Path) -> None:
    plan = [sys.executable, "-m", "rowstead", "plan", "m2", "--keep", str(tmp_path), "--on"]
    for machine in (["bigbasin-32"], ["laptop", "--what-if", "disk.capacity=1e9"]):  # too small for files
        assert subprocess.run([*plan, *machine], capture_output=True, timeout=120, check=False).returncode == 0
    first, second = RunStore(tmp_path).read().of(source="plan", kind="predicted")
    assert first.record.machine["name"] == "bigbasin-32"
    assert first.record.figures["samples_per_s"] > 0
    assert second.failure == "does not fit"
