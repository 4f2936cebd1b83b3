"""Evaluations and checkpoints on the way: a server that is away costs one of them, never the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rowstead.data.open_log import open_sources
from rowstead.fleet.evaluate_and_save import EvaluateAndSave
from rowstead.fleet.gathered_model import TrainersModel
from rowstead.fleet.role_table import NoFleetProgress
from rowstead.fleet.rpc_client import ServerUnavailable
from rowstead.records.run_folder import RunFolder
from rowstead.spec.fleet import FleetSpec
from rowstead.spec.parse import override, parse
from rowstead.spec.run import RunSpec
from rowstead.training.progress import Position
from rowstead.training.sync_base import DenseServerUnavailable
from tests.small_runs import small_plain, wait_until


class Model(TrainersModel):
    """A model whose servers may be away, and which notes of what steps it was saved."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.problems: list[Exception] = []
        self.saved: list[int] = []

    def take(self) -> None:
        if self.problems:
            raise self.problems.pop(0)

    def save(self, folder: Path, position: Position, *, keep: int, progress: list[str]) -> Path:
        self.saved.append(position.step)
        return folder


class Told(NoFleetProgress):
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_message(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def events() -> list[tuple[str, int]]:
    return []


@pytest.fixture
def position() -> Position:
    return Position()


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tmp_path)


@pytest.fixture
def milestones(tmp_path: Path, told: Told, events: list[tuple[str, int]], position: Position, model: Model) -> EvaluateAndSave:
    spec = parse(RunSpec, override(small_plain() | {"fleet": {"num_trainers": 1}}, ["train.checkpoint_every=10"]))
    assert isinstance(spec.fleet, FleetSpec)

    def keep(kind: str, step: int, figures: dict[str, Any]) -> None:
        events.append((kind, step))

    return EvaluateAndSave(
        spec,
        RunFolder(tmp_path),
        open_sources(spec),
        model,
        position,
        total_steps=100,
        keep=keep,
        callback=told,
        is_saved=False,
    )


def reach(milestones: EvaluateAndSave, position: Position, step: int) -> None:
    """Come to a step, and wait until what is due there was made."""
    position.step = step
    assert not milestones.look()
    wait_until(lambda: milestones.wait(0.01), what="the background")


@pytest.mark.parametrize(
    "problem", [ServerUnavailable("sparse-0 does not answer"), DenseServerUnavailable("the dense server is gone")]
)
def test_a_checkpoint_that_no_server_was_there_for_is_told_of_and_the_next_one_is_made(
    problem: Exception, milestones: EvaluateAndSave, model: Model, position: Position, told: Told, events: list[tuple[str, int]]
) -> None:
    model.problems.append(problem)
    reach(milestones, position, 12)
    assert told.texts == [f"step 12: not saved: {problem}"]
    reach(milestones, position, 15)
    assert model.saved == [], "the next one is due at 20"
    reach(milestones, position, 20)
    assert model.saved == [20]
    assert events == [("missed", 12), ("checkpoint", 20)]


def test_a_problem_of_our_own_is_raised(milestones: EvaluateAndSave, model: Model, position: Position) -> None:
    model.problems.append(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        reach(milestones, position, 10)


def test_what_is_saved_already_is_saved_again_only_where_it_has_changed(
    milestones: EvaluateAndSave, model: Model, position: Position
) -> None:
    reach(milestones, position, 10)
    milestones.save()
    assert model.saved == [10]
    milestones.save(is_changed=True)
    assert model.saved == [10, 10]
    position.step = 11
    milestones.save()
    assert model.saved == [10, 10, 11]
