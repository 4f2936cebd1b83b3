"""Loss and NE over the last steps, as a progress line shows them."""

from __future__ import annotations

import math

import pytest

from rowstead.training.progress import MovingLoss


def test_ne_is_the_loss_over_the_entropy_of_the_labels() -> None:
    moving = MovingLoss()
    moving.add(64, 0.5, 0.25)
    moving.add(64, 0.7, 0.75)
    assert moving.loss == pytest.approx(0.6)
    assert moving.ne == pytest.approx(0.6 / math.log(2))


def test_a_step_counts_by_its_weight() -> None:
    moving = MovingLoss()
    moving.add(300, 0.4, 0.5)
    moving.add(100, 0.8, 0.5)
    assert moving.loss == pytest.approx(0.5)


def test_old_steps_do_not_count() -> None:
    moving = MovingLoss(num_steps=2)
    for loss in (9.0, 0.4, 0.6):
        moving.add(10, loss, 0.5)
    assert moving.loss == pytest.approx(0.5)


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_ne_is_absent_while_all_labels_are_equal(label: float) -> None:
    moving = MovingLoss()
    moving.add(10, 0.3, label)
    assert moving.ne is None


def test_without_steps_there_is_no_loss_and_no_ne() -> None:
    assert math.isnan(MovingLoss().loss)
    assert MovingLoss().ne is None
