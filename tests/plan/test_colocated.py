"""Fleets whose processes share one machine's cores: what one waits for, what goes on beside it, and what all of them take together."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowstead.distributed.router_kernels import find_distinct
from rowstead.plan.colocated import sends_rows
from rowstead.plan.predict import Prediction, predict
from rowstead.plan.setup import Setup
from rowstead.plan.traffic import Popularity
from rowstead.plan.work import TableWork, step_work
from rowstead.spec.catalogue import load_machine, machine_text
from rowstead.spec.errors import RowsteadError, SpecError
from rowstead.spec.machine import Machine
from rowstead.spec.parse import parse
from rowstead.spec.phases import Phase
from rowstead.spec.run import RunSpec, load_recipe
from tests.measured_machine import measured_machine, shared_machine, sharing

ASKING, ANSWERING = sharing().asking, sharing().answering


def spec_of(*, batch_size: int = 256, mean_ids: int = 4, skew: float = 0.0, bottom: int = 64) -> RunSpec:
    plain = {
        "name": "small",
        "data": {"synth": {"num_dense": 16, "num_sparse": 4, "num_ids": 100_000, "mean_ids": mean_ids, "skew": skew}},
        "features": {
            "dense": [{"name": "dense_{i}", "repeat": 16}],
            "sparse": [{"name": "sparse_{i}", "repeat": 4, "num_rows": 100_000, "hash": "modulo"}],
        },
        "model": {"width": 16, "bottom": [bottom], "top": [64]},
        "train": {"batch_size": batch_size},
    }
    return parse(RunSpec, plain)


def fleet(machine: Machine, spec: RunSpec, *, trainers: int = 1, sparse: int = 1, staleness: int = 0) -> Prediction:
    assert machine.software is not None
    setup = Setup(
        placement="remote",
        batch_size=spec.train.batch_size,
        num_trainers=trainers,
        num_sparse_servers=sparse,
        num_dense_servers=int(trainers > 1),
        in_flight=1 + staleness,
        sync_every=4,
        on_one_machine=True,
    )
    return predict(step_work(spec), machine, machine.software, setup)


def seconds_of(found: Prediction) -> dict[str, float]:
    return {task.name: task.seconds for task in found.tasks}


def test_an_exact_step_waits_for_everything_but_the_partitioning_that_overlaps_with_the_update() -> None:
    found = fleet(shared_machine(), spec_of())
    seconds = seconds_of(found)
    assert seconds["apply gradients"] > seconds["partition ids"]
    overlapped = {"partition ids", *(task.name for task in found.tasks if task.hidden)}
    assert found.step_s == pytest.approx(sum(taken for name, taken in seconds.items() if name not in overlapped))


def test_with_staleness_a_step_takes_as_long_as_its_busiest_process() -> None:
    found = fleet(shared_machine(num_cores=8), spec_of(bottom=4096), staleness=1)
    own_s = sum(task.seconds for task in found.tasks if task.resource == "trainer")
    assert found.step_s == pytest.approx(own_s)
    assert found.step_s < fleet(shared_machine(num_cores=8), spec_of(bottom=4096)).step_s
    assert found.bottlenecks[0].resource == "trainer"


def test_no_more_is_done_than_the_cores_can() -> None:
    for trainers in (1, 2, 4):
        found = fleet(shared_machine(), spec_of(), trainers=trainers, sparse=2, staleness=2)
        assert found.step_s >= sum(task.seconds for task in found.tasks if task.resource == "shared cores") > 0
    assert found.bottlenecks[0].resource == "shared cores"
    assert found.samples_per_s == pytest.approx(4 * 256 / found.step_s)


def test_threads_wait_for_cores_where_one_step_alone_takes_as_long_as_all_cores() -> None:
    """Far from that, a step takes what its own processes take, or what all cores do."""
    found = {cores: fleet(shared_machine(num_cores=cores), spec_of(), trainers=2) for cores in (1, 2, 64)}
    work_s, alone_s = found[1].step_s, found[64].step_s
    assert alone_s < work_s < 2.2 * alone_s  # so that two cores need about as long as one step alone
    longer = max(alone_s, work_s / 2)
    assert 1.05 * longer < found[2].step_s < 2**0.25 * longer * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(
    trainers=st.integers(1, 4),
    sparse=st.integers(1, 3),
    staleness=st.integers(0, 2),
    crowding=st.floats(1.0, 3.0),
    cores=st.integers(1, 16),
)
def test_busy_neighbours_make_no_step_shorter(trainers: int, sparse: int, staleness: int, crowding: float, cores: int) -> None:
    quiet, crowded = (
        fleet(shared_machine(crowding=one, num_cores=cores), spec_of(), trainers=trainers, sparse=sparse, staleness=staleness)
        for one in (1.0, crowding)
    )
    assert quiet.step_s <= crowded.step_s * (1 + 1e-9)
    assert crowded.step_s <= crowding * quiet.step_s * (1 + 1e-9)


def test_where_rows_repeat_the_trainer_pools_and_all_in_all_nothing_is_saved() -> None:
    """As was measured: what other threads do for vectors, the trainer's does for rows."""
    even, skewed = (fleet(shared_machine(num_cores=64), spec_of(mean_ids=1, skew=skew)) for skew in (0.0, 1.3))
    vectors = 256 * 4 * 16 * 4
    assert seconds_of(even)["merge replies"] == pytest.approx(vectors * ASKING.byte_s, rel=1e-3)
    assert seconds_of(skewed)["merge replies"] == pytest.approx(vectors * (ASKING.byte_s + ANSWERING.byte_s), rel=1e-3)
    assert seconds_of(skewed)["serve"] < seconds_of(even)["serve"]


def test_servers_share_the_rows_and_each_is_asked() -> None:
    one, two = (seconds_of(fleet(shared_machine(num_cores=64), spec_of(batch_size=2048), sparse=count)) for count in (1, 2))
    assert two["serve"] < 0.7 * one["serve"]
    assert two["send requests"] == pytest.approx(2 * one["send requests"], rel=1e-3)


def test_a_machine_that_was_not_measured_so_is_refused() -> None:
    machine = measured_machine("cpu")
    assert machine.software is not None
    with pytest.raises(RowsteadError, match="has no measurements of processes that share its cores"):
        fleet(dataclasses.replace(machine, software=dataclasses.replace(machine.software, sharing=None)), spec_of())
    with pytest.raises(SpecError, match="on_one_machine"):
        Setup(placement="device", batch_size=1, on_one_machine=True)


def test_what_was_measured_survives_the_machine_file(tmp_path: object) -> None:
    machine, path = shared_machine(crowding=1.25), f"{tmp_path}/here.yaml"
    with open(path, "w") as file:
        file.write(machine_text(machine))
    found = load_machine(path).software
    assert found is not None
    assert found.sharing == sharing(crowding=1.25)


def test_a_file_without_what_this_version_measures_says_how_to_mend_it(tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    lines = machine_text(shared_machine()).splitlines()
    path.write_text("\n".join(line for line in lines if "averaging" not in line))
    with pytest.raises(SpecError, match=r"averaging: is required.*run `rowstead calibrate` again"):
        load_machine(str(path))


@pytest.mark.parametrize("num_rows", [20, 200, 400, 600, 800, 1200, 2000, 5000])
def test_rows_travel_in_the_plan_where_they_do_in_the_fleet(num_rows: int) -> None:
    """Even ids, 32 of a bag: by ids and vectors of 512 examples, up to about 750 different rows do."""
    batch_size, mean_ids, width = 512, 32, 16
    table = TableWork(
        name="t",
        num_rows=num_rows,
        width=width,
        row_bytes=4 * width,
        state_bytes=4,
        reads=((mean_ids, Popularity(num_rows, 0.0)),),
        is_hashed=False,
    )
    ids = np.random.default_rng(1).integers(0, num_rows, batch_size * mean_ids).astype(np.int32)
    counts = np.zeros(1, np.int64)
    find_distinct(
        ids, np.array([0, len(ids)]), np.array([0, 1]), np.array([0]), np.array([width]), batch_size, 4, 0, 4, 4, False,
        np.empty(len(ids), np.int32), np.empty(len(ids), np.int32), counts,
    )  # fmt: skip
    assert sends_rows(table, batch_size) == (counts[0] >= 0)


def test_processes_of_one_machine_share_its_cores_and_pay_for_what_they_exchange() -> None:
    work = step_work(load_recipe("quickstart"))
    machine = shared_machine(num_cores=2)
    assert machine.software is not None

    def speed(num_processes: int, machine: Machine = machine) -> float:
        setup = Setup(
            placement="device",
            batch_size=2048 // num_processes,
            num_trainers=num_processes,
            has_input=False,
            on_one_machine=True,
        )
        assert machine.software is not None
        return predict(work, machine, machine.software, setup).samples_per_s

    assert speed(4) < speed(2)  # more of a batch is exchanged, and no core is added
    slow = shared_machine(num_cores=2, crowding=1.5)
    assert speed(2, slow) == pytest.approx(speed(2) / 1.5)
    prediction = predict(
        work, machine, machine.software, Setup(placement="device", batch_size=1024, num_trainers=2, on_one_machine=True)
    )
    assert Phase.EXCHANGE in prediction.phases
