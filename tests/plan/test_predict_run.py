"""Predictions from measured times: they add up, follow the work, and stand beside what a run came to."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from rowstead.plan.auto import AS_FAST, choose_fastest, find_fastest_placement, list_fitting
from rowstead.plan.caching import build_cache_models
from rowstead.plan.greedy import Memories, decide
from rowstead.plan.predict import Prediction, comparison_text, predict, predict_run
from rowstead.plan.setup import CachedTable, Setup
from rowstead.plan.work import step_work
from rowstead.spec.caching import MAX_SET
from rowstead.spec.catalogue import load_machine, machine_text
from rowstead.spec.parse import parse
from rowstead.spec.placement import MemorySpec, Placement, TablePlacement, TablePlacementSpec
from rowstead.spec.record import Record
from rowstead.spec.run import RunSpec
from tests.measured_machine import curve, measured_machine

MB = 10**6


def spec_of(*, batch_size: int = 256, skew: float = 1.0, num_rows: int = 100_000, bottom: int = 64) -> RunSpec:
    plain = {
        "name": "small",
        "data": {"synth": {"num_dense": 16, "num_sparse": 4, "num_ids": num_rows, "mean_ids": 4, "skew": skew}},
        "features": {
            "dense": [{"name": "dense_{i}", "repeat": 16}],
            "sparse": [{"name": "sparse_{i}", "repeat": 4, "num_rows": num_rows}],
        },
        "model": {"width": 16, "bottom": [bottom], "top": [64]},
        "train": {"batch_size": batch_size},
    }
    return parse(RunSpec, plain)


def step_of(spec: RunSpec, kind: str = "cpu") -> Prediction:
    machine = measured_machine(kind)
    assert machine.software is not None
    setup = Setup(placement="device", batch_size=spec.train.batch_size, has_input=False)
    return predict(step_work(spec), machine, machine.software, setup)


def test_on_a_cpu_a_step_is_the_sum_of_its_parts() -> None:
    found = step_of(spec_of())
    assert found.step_s == pytest.approx(sum(task.seconds for task in found.tasks))
    names = {task.name for task in found.tasks}
    assert {"step overhead", "look up", "bottom MLP forward", "top MLP backward", "update rows", "dense update"} <= names


def test_layers_take_what_was_measured() -> None:
    small, large = step_of(spec_of(bottom=64)), step_of(spec_of(bottom=128))
    more = 256 * 64 * (16 * (2e-11 + 2e-11) + 16 * (2e-11 + 4e-11)) + 1e-9 * (17 + 16) * 64
    assert large.step_s - small.step_s == pytest.approx(more, rel=1e-6)


def test_skewed_ids_are_read_faster_than_even_ones() -> None:
    assert step_of(spec_of(skew=1.3)).step_s < step_of(spec_of(skew=0.0)).step_s


def test_on_a_gpu_the_host_is_hidden_until_it_holds_steps_up() -> None:
    machine, work = measured_machine("cuda"), step_work(spec_of())
    assert machine.software is not None
    setup = Setup(placement="device", batch_size=256, has_input=False)
    quick = predict(work, machine, machine.software, setup)
    slow = predict(work, machine, dataclasses.replace(machine.software, device_step_s=0.01), setup)
    assert quick.bottlenecks[0].resource == "device"
    assert slow.step_s == pytest.approx(0.01)
    assert slow.bottlenecks[0].resource == "dispatch"


def test_an_update_waits_for_its_plan() -> None:
    found = step_of(spec_of(), "cuda")
    ends = {slot.task.name: slot.end_s for slot in found.slots}
    starts = {slot.task.name: slot.start_s for slot in found.slots}
    assert starts["update rows"] >= ends["group ids"]
    assert starts["group ids"] == 0


def test_a_machine_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    machine, file = measured_machine(), tmp_path / "here.yaml"
    file.write_text(machine_text(machine))
    found = load_machine(str(file))
    assert found.software is not None
    assert found.software.cpu_timings == machine.software.cpu_timings  # type: ignore[union-attr]
    assert found.host.num_cores == machine.host.num_cores


def memories(limit: int, *, has_gpu: bool) -> Memories:
    return Memories(
        device_bytes=limit, host_bytes=10_000 * MB if has_gpu else limit, disk_bytes=10_000 * MB, folder="/tmp", has_gpu=has_gpu
    )


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_auto_takes_the_placement_with_the_shortest_predicted_step(kind: str) -> None:
    spec, has_gpu, machine = spec_of(skew=1.3), kind == "cuda", measured_machine(kind)
    room = memories(15 * MB, has_gpu=has_gpu)
    tried = list_fitting(spec, room)
    assert len(tried) > 1
    chosen = find_fastest_placement(spec, room, machine)
    assert chosen is not None
    steps = [found.step_s for one in tried.values() if (found := predict_run(spec, one, machine)) is not None]
    best = predict_run(spec, chosen, machine)
    assert best is not None
    assert min(steps) <= best.step_s <= AS_FAST * min(steps)
    assert "placements that fit; next" in chosen.tables[0].why


def test_of_placements_predicted_as_fast_the_one_with_the_largest_caches_is_chosen() -> None:
    def placement(*shares: float) -> Placement:
        tables = [
            TablePlacement(
                name=f"t{place}",
                where="device" if share == 1 else "ssd",
                shard="table",
                why="",
                cache_fraction=share % 1 or None,
            )
            for place, share in enumerate(shares)
        ]
        return Placement(tables=tuple(tables))

    mixed, small, large, whole = placement(1, 0.1), placement(0.3, 0.3), placement(0.5, 0.5), placement(1, 1)
    assert choose_fastest({"mixed": (mixed, 1.0), "small": (small, 1.01), "large": (large, 1.03)}) == "small"
    assert choose_fastest({"mixed": (mixed, 1.0), "small": (small, 1.01), "large": (large, 1.02)}) == "large"
    assert choose_fastest({"mixed": (mixed, 0.9), "small": (small, 1.01), "large": (large, 1.02)}) == "mixed"
    assert choose_fastest({"large": (large, 1.0), "whole": (whole, 1.02)}) == "whole"
    assert choose_fastest({"slower": (large, 1.01), "faster": (large, 1.0)}) == "faster"


def test_caches_are_as_large_as_fit_where_the_same_tables_are_whole() -> None:
    spec, room = spec_of(skew=1.3), memories(15 * MB, has_gpu=False)
    found = list(list_fitting(spec, room).values())
    assert len(found) > 1
    wheres = [tuple(table.where for table in one.tables) for one in found]
    assert len(set(wheres)) == len(wheres)
    tried = {f"{share}": {"*": TablePlacementSpec(where="ssd", cache_fraction=share)} for share in (0.01, 0.05, 0.02)}
    on_disk = dataclasses.replace(spec, memory=MemorySpec(folder="/tmp"))
    assert list(list_fitting(on_disk, room, tried=tried)) == ["0.05"]


@pytest.mark.parametrize(("share", "waits"), [(0.0, True), (0.0, False), (0.4, True), (0.4, False), (1.0, False)])
def test_rows_that_are_moved_by_the_same_cores_slow_a_step_down_and_are_slowed_down(share: float, waits: bool) -> None:
    machine, spec = measured_machine(), spec_of(skew=0.5)
    assert machine.software is not None
    known = machine.software.cpu_timings
    assert known is not None
    per_row_s = 1e-4 if waits else 1e-7
    timings = dataclasses.replace(
        known, move_row=curve(per_row_s / 68, "record_bytes"), move_read_s=per_row_s, move_share=share, cache_batch_s=1e-3
    )
    work, behind = step_work(spec), tuple(CachedTable(table=f"sparse_{place}", cache_fraction=0.1) for place in range(3))
    setup = Setup(placement="device", batch_size=256, has_input=False)
    software = dataclasses.replace(machine.software, cpu_timings=timings)
    alone_s = predict(work, machine, software, setup).step_s
    found = predict(work, machine, software, dataclasses.replace(setup, behind=behind))
    (group,) = build_cache_models(work.tables, found.setup)
    moved_s = per_row_s * (group.missing_rows + group.num_reads(group.missing_rows))
    own_s = alone_s + 1e-3 + 256 * 3 * 4 * timings.cache_id_s
    assert (moved_s > own_s) == waits
    assert found.step_s == pytest.approx(max(own_s + share * moved_s, moved_s + share * own_s))


def test_the_host_of_a_gpu_plans_sets_of_batches_at_once_where_there_is_room_for_them() -> None:
    machine, spec = measured_machine("cuda"), spec_of(skew=1.0)
    assert machine.software is not None
    assert machine.software.device_timings is not None
    timings = dataclasses.replace(machine.software.device_timings, cache_batch_s=1e-3, cache_set_s=8e-3)
    software, work = dataclasses.replace(machine.software, device_timings=timings), step_work(spec)
    sizes = []
    for share in (0.5, 0.0):
        behind = tuple(CachedTable(table=table.name, cache_fraction=share) for table in work.tables)
        setup = Setup(placement="device", batch_size=256, has_input=False, behind=behind)
        (group,) = build_cache_models(work.tables, setup, in_sets=True)
        found = predict(work, machine, software, setup)
        assert found.bottlenecks[0].resource == "dispatch"
        assert found.step_s == pytest.approx(1e-5 + 1e-3 + 8e-3 / group.set_size)
        sizes.append(group.set_size)
    assert sizes[0] == MAX_SET > sizes[1]


def test_rows_that_a_cache_lacks_hold_a_step_up_when_they_are_many() -> None:
    machine, spec = measured_machine(), spec_of(skew=0.0)
    room = memories(15 * MB, has_gpu=False)
    whole = predict_run(spec, decide(spec, memories(1000 * MB, has_gpu=False)), machine)
    behind = predict_run(spec, decide(spec, room), machine)
    assert whole is not None
    assert behind is not None
    assert behind.step_s > whole.step_s


def test_a_run_is_compared_with_its_prediction() -> None:
    machine, spec = measured_machine(), spec_of()
    prediction = predict_run(spec, decide(spec, memories(1000 * MB, has_gpu=False)), machine)
    assert prediction is not None
    figures = {"samples_per_s": prediction.samples_per_s / 1.1, "peak_memory_bytes": 6e8}
    record = Record(kind="measured", name="small", spec_digest="", date="2026-11-15", machine={}, figures=figures)
    text = comparison_text(prediction, record)
    assert text is not None
    assert "+10%" in text
    assert "memory" in text
    assert comparison_text(prediction, dataclasses.replace(record, figures={})) is None


def test_a_machine_that_was_not_measured_foretells_nothing() -> None:
    spec = spec_of()
    assert predict_run(spec, decide(spec, memories(1000 * MB, has_gpu=False)), load_machine("laptop")) is None


def test_an_interaction_in_fp32_takes_more_than_in_the_format_that_was_measured() -> None:
    machine, work = measured_machine("cuda"), step_work(spec_of())
    assert machine.software is not None
    assert machine.software.device_timings is not None
    timings = dataclasses.replace(machine.software.device_timings, fp32_interaction_factor=3.0)
    software = dataclasses.replace(machine.software, device_timings=timings)
    setup = Setup(placement="device", batch_size=256, has_input=False)
    plain, fast = (predict(work, machine, software, setup, precision=precision) for precision in ("fp32", "tf32"))  # type: ignore[arg-type]
    assert plain.step_s - fast.step_s == pytest.approx(2 * 256 * 5 * 16 * (1e-10 + 2e-10), rel=1e-6)
