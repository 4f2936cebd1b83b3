"""Evaluations and checkpoints during training: an unavailable server costs one of them, never the run."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from rowstead.data.open_log import open_sources
from rowstead.data.source import Source
from rowstead.fleet.batch_assignments import AssignmentLog, Holder
from rowstead.fleet.evaluate_and_save import EvaluateAndSave, position_in_logs
from rowstead.fleet.fleet_figures import FleetCallback
from rowstead.fleet.gathered_model import LocalTablesModel
from rowstead.fleet.rpc_client import ServerUnavailable
from rowstead.records.events import read_events
from rowstead.records.run_folder import RunFolder
from rowstead.spec.fleet import FleetSpec
from rowstead.spec.parse import override, parse
from rowstead.spec.run import RunSpec
from rowstead.training.metrics import Quality
from rowstead.training.progress import Position, RunReporter
from rowstead.training.sync_base import DenseServerUnavailable
from tests.small_runs import small_plain, wait_until


class Model(LocalTablesModel):
    """A model whose servers may be unavailable, and which records the steps at which it was saved."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.problems: list[Exception] = []
        self.saved: list[int] = []
        self.saved_to: list[str] = []
        self.nes: list[float] = []

    def gather(self, *, is_training: bool = False) -> None:
        if self.problems:
            raise self.problems.pop(0)

    def save(self, folder: Path, position: Position, *, keep: int, progress: list[str]) -> Path:
        self.saved.append(position.step)
        self.saved_to.append(folder.name)
        return folder

    def evaluate(self, source: Source, max_samples: int | None) -> Quality:
        return Quality(num_samples=1, log_loss=0.5, mse=0.1, mean_label=0.3, mean_prediction=0.3, ne=self.nes.pop(0))


class Messages(FleetCallback):
    """Keeps all messages."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_message(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture
def messages() -> Messages:
    return Messages()


@pytest.fixture
def position() -> Position:
    return Position()


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tmp_path)


def build(folder: Path, model: Model, position: Position, messages: Messages, *settings: str) -> EvaluateAndSave:
    spec = parse(RunSpec, override(small_plain() | {"fleet": {"num_trainers": 1}}, list(settings)))
    assert isinstance(spec.fleet, FleetSpec)
    return EvaluateAndSave(
        spec,
        RunFolder(folder),
        open_sources(spec),
        model,
        position,
        total_steps=100,
        reporter=RunReporter(folder, messages, log_every=10),
        is_saved=False,
    )


@pytest.fixture
def evaluate_and_save(tmp_path: Path, messages: Messages, position: Position, model: Model) -> EvaluateAndSave:
    return build(tmp_path, model, position, messages, "train.checkpoint_every=10")


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
    tmp_path: Path,
) -> None:
    model.problems.append(problem)
    reach(evaluate_and_save, position, 12)
    assert messages.texts == [f"step 12: not saved: {problem}"]
    reach(evaluate_and_save, position, 15)
    assert model.saved == [], "the next one is due at 20"
    reach(evaluate_and_save, position, 20)
    assert model.saved == [20]
    events = read_events(tmp_path / "events.jsonl")
    assert [(event["kind"], event["step"]) for event in events] == [("missed", 12), ("checkpoint", 20)]


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


def test_an_evaluation_without_improvement_ends_the_patience_and_the_best_model_is_kept(
    model: Model, position: Position, messages: Messages, tmp_path: Path
) -> None:
    settings = ("train.eval_every=10", "train.early_stop.patience=1")
    evaluate_and_save = build(tmp_path, model, position, messages, *settings)
    model.nes = [0.9, 0.8, 0.85]
    reach(evaluate_and_save, position, 10)
    reach(evaluate_and_save, position, 20)
    assert (position.best, position.evaluations_since_best) == (0.8, 0)
    assert (model.saved, model.saved_to) == ([10, 20], ["best", "best"])
    position.step = 30
    evaluate_and_save.poll()
    wait_until(evaluate_and_save.poll, what="the decision to stop")
    assert model.saved == [10, 20]


def test_the_position_of_a_checkpoint_is_that_of_its_assignment_logs(tmp_path: Path) -> None:
    """What trainers have reported is older: a resume would count batches as lost that are in the checkpoint."""
    log = AssignmentLog(tmp_path / "reader-0.progress", {"reader": 0})
    with contextlib.closing(log):
        holder = Holder("trainer-0", 1)
        numbers = [log.assignments.assign_next(holder, 64, {}) for _ in range(4)]
        log.assignments.acknowledge(holder, 1, numbers[3:], numbers[:3])
        log.flush()
    found = position_in_logs(Position(step=1, num_samples=64, train_s=2.5), [(tmp_path / "reader-0.progress").read_text()])
    assert (found.step, found.num_samples, found.train_s) == (3, 192, 2.5)
    before = Position(step=1, num_samples=64)
    assert position_in_logs(before, [""]) == before, "without logs there is only what trainers have reported"
