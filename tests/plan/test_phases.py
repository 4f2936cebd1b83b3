"""The tasks of every predicted step belong to the phases of `spec.phases`, and follow each other in that order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rowstead.plan.predict import Prediction, predict
from rowstead.plan.setup import Setup
from rowstead.plan.setups import possible_placements
from rowstead.plan.work import step_work
from rowstead.spec.catalogue import load_machine, load_software, machine_names
from rowstead.spec.phases import STEP, Phase
from rowstead.spec.run import load_recipe
from tests.plan.test_colocated import fleet, shared_machine
from tests.plan.test_colocated import spec_of as fleet_spec
from tests.plan.test_predict_run import spec_of, step_of

ORDER = {phase: number for number, phase in enumerate(STEP)}


def assert_phases(found: Prediction) -> None:
    assert all(task.phase in STEP for task in found.tasks)
    named = {task.name: task for task in found.tasks if not task.hidden}
    for task in named.values():
        for before in (named[name] for name in task.after if name in named):
            assert is_in_order(before.phase, task.phase), f"{before.name} ({before.phase}) before {task.name} ({task.phase})"


def is_in_order(before: Phase, after: Phase) -> bool:
    """By the list; but pooled vectors are exchanged before the forward pass, and a sync may come before the updates."""
    if before is Phase.EXCHANGE and after is Phase.FORWARD:
        return True
    return before is Phase.SYNC or ORDER[before] <= ORDER[after]


def predictions(name: str) -> Iterator[Prediction]:
    """Every placement on one machine, on one server and on several where it has a network."""
    machine, helper = load_machine(name), load_machine("cpu-2s")
    for placement in possible_placements(machine):
        for num_trainers in (1, 2) if machine.network is not None else (1,):
            remote = placement == "remote"
            setup = Setup(
                placement=placement,
                batch_size=256,
                num_devices=machine.num_devices,
                num_trainers=num_trainers,
                num_sparse_servers=2 if remote else 0,
                num_dense_servers=1 if remote else 0,
                server=helper if remote else None,
            )
            for software in ("rowstead", "operators-2020"):
                yield predict(step_work(load_recipe("m1")), machine, load_software(software), setup)


@pytest.mark.parametrize("name", machine_names())
def test_every_task_of_every_placement_has_a_phase_of_the_step_in_its_order(name: str) -> None:
    for found in predictions(name):
        assert_phases(found)
        phases = {Phase.LOOKUP, Phase.FORWARD, Phase.BACKWARD, Phase.DENSE_UPDATE, Phase.ROW_UPDATE}
        assert phases <= {task.phase for task in found.tasks}


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_measured_machine_has_the_same_phases(kind: str) -> None:
    assert_phases(step_of(spec_of(), kind))


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_fleet_on_shared_cores_has_the_same_phases(staleness: int) -> None:
    found = fleet(shared_machine(), fleet_spec(), trainers=2, staleness=staleness)
    assert_phases(found)
    assert Phase.SYNC in {task.phase for task in found.tasks}


def test_the_phases_of_a_step_on_one_cpu_add_up_to_it() -> None:
    found = step_of(spec_of())
    assert sum(found.phases.values()) == pytest.approx(found.step_s)
    assert list(found.phases) == [phase for phase in STEP if phase in found.phases]


def test_the_timeline_names_the_phase_of_every_task() -> None:
    (found, *_) = predictions("dgx-h100")
    assert {slot["phase"] for slot in found.timeline} <= {phase.value for phase in STEP}
