"""Early stopping depends only on evaluations, and its state survives a checkpoint."""

from __future__ import annotations

import dataclasses

import pytest

from rowstead.spec.train import TrainSpec
from rowstead.training.metrics import Quality
from rowstead.training.progress import EarlyStopping, Position
from tests.small_runs import small_spec


def stopping(position: Position, *overrides: str) -> EarlyStopping:
    return EarlyStopping(
        small_spec("train.eval_every=1", "train.early_stop={patience: 2, min_delta: 0.01}", *overrides).train, position
    )


def quality(ne: float | None, mse: float = 0.5) -> Quality:
    fields = {field.name: 0.0 for field in dataclasses.fields(Quality)} | {"ne": ne, "mse": mse, "reliability": None}
    return Quality(**fields)  # type: ignore[arg-type]


def test_training_stops_after_as_many_evaluations_without_improvement_as_the_patience() -> None:
    position = Position()
    rule = stopping(position)
    assert [rule.observe(quality(ne)) for ne in (0.9, 0.8, 0.795, 0.81)] == [True, True, False, False]
    assert rule.should_stop
    assert (position.best, position.evaluations_since_best) == (0.8, 2)


def test_an_improvement_resets_the_patience() -> None:
    rule = stopping(Position())
    for ne in (0.9, 0.95, 0.85, 0.9):
        rule.observe(quality(ne))
        assert not rule.should_stop


def test_the_state_of_a_saved_position_is_continued() -> None:
    rule = stopping(Position(**vars(Position(best=0.8, evaluations_since_best=1))))
    assert not rule.should_stop
    rule.observe(quality(0.9))
    assert rule.should_stop


@pytest.mark.parametrize(("overrides", "ne"), [(("train.loss=mse",), 0.9), ((), None)])
def test_mse_decides_where_it_is_the_loss_or_ne_is_undefined(overrides: tuple[str, ...], ne: float | None) -> None:
    position = Position()
    stopping(position, *overrides).observe(quality(ne, mse=0.25))
    assert position.best == 0.25


def test_without_a_rule_nothing_is_best_and_nothing_stops() -> None:
    rule = EarlyStopping(TrainSpec(), Position())
    assert not rule.observe(quality(0.5))
    assert not rule.should_stop
