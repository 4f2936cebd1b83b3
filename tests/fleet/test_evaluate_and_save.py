"""Evaluations and checkpoints during training: an unavailable server costs one of them, never the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rowstead.data.open_log import open_sources
from rowstead.fleet.evaluate_and_save import EvaluateAndSave
from rowstead.fleet.fleet_figures import NoFleetProgress
from rowstead.fleet.gathered_model import LocalTablesModel
from rowstead.fleet.rpc_client import ServerUnavailable
from rowstead.records.run_folder import RunFolder
from rowstead.spec.fleet import FleetSpec
from rowstead.spec.parse import override, parse
from rowstead.spec.run import RunSpec
from rowstead.training.progress import Position
from rowstead.training.sync_base import DenseServerUnavailable
from tests.small_runs import small_plain, wait_until


class Model(LocalTablesModel):
    """A model whose servers may be unavailable, and which records the steps at which it was saved."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.problems: list[Exception] = []
        self.saved: list[int] = []

    def gather(self) -> None:
        if self.problems:
            raise self.problems.pop(0)

    def save(self, folder: Path, position: Position, *, keep: int, progress: list[str]) -> Path:
        self.saved.append(position.step)
        return folder


class Messages(NoFleetProgress):
    """Keeps all messages."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_message(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture
def messages() -> Messages:
    return Messages()


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
def evaluate_and_save(
    tmp_path: Path, messages: Messages, events: list[tuple[str, int]], position: Position, model: Model
) -> EvaluateAndSave:
    spec = parse(RunSpec, override(small_plain() | {"fleet": {"num_trainers": 1}}, ["train.checkpoint_every=10"]))
    assert isinstance(spec.fleet, FleetSpec)

    def record(kind: str, step: int, figures: dict[str, Any]) -> None:
        events.append((kind, step))

    return EvaluateAndSave(
        spec,
        RunFolder(tmp_path),
        open_sources(spec),
        model,
        position,
        total_steps=100,
        record=record,
        callback=messages,
        is_saved=False,
    )


def reach(evaluate_and_save: EvaluateAndSave, position: Position, step: int) -> None:
    """Set the step, and wait until what is due there is done."""
    position.step = step
    assert not evaluate_and_save.poll()
    wait_until(lambda: evaluate_and_save.wait(0.01), what="the background")


@pytest.mark.parametrize(
    "problem", [ServerUnavailable("sparse-0 does not answer"), DenseServerUnavailable("the dense server is gone")]
)
def test_a_checkpoint_that_a_server_was_unavailable_for_is_reported_and_the_next_one_is_saved(
    problem: Exception,
    evaluate_and_save: EvaluateAndSave,
    model: Model,
    position: Position,
    messages: Messages,
    events: list[tuple[str, int]],
) -> None:
    model.problems.append(problem)
    reach(evaluate_and_save, position, 12)
    assert messages.texts == [f"step 12: not saved: {problem}"]
    reach(evaluate_and_save, position, 15)
    assert model.saved == [], "the next one is due at 20"
    reach(evaluate_and_save, position, 20)
    assert model.saved == [20]
    assert events == [("missed", 12), ("checkpoint", 20)]


def test_other_errors_are_raised(evaluate_and_save: EvaluateAndSave, model: Model, position: Position) -> None:
    model.problems.append(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        reach(evaluate_and_save, position, 10)


def test_a_step_is_saved_twice_only_if_the_model_has_changed(
    evaluate_and_save: EvaluateAndSave, model: Model, position: Position
) -> None:
    reach(evaluate_and_save, position, 10)
    evaluate_and_save.save()
    assert model.saved == [10]
    evaluate_and_save.save(is_changed=True)
    assert model.saved == [10, 10]
    position.step = 11
    evaluate_and_save.save()
    assert model.saved == [10, 10, 11]
