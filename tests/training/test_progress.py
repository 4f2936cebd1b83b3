"""The window of the last steps that a progress line shows."""

from __future__ import annotations

import math

import pytest

from rowstead.training.progress import MovingLoss


def test_the_window_s_ne_is_its_loss_over_the_entropy_of_its_labels() -> None:
    window = MovingLoss()
    window.add(64, 0.5, 0.25)
    window.add(64, 0.7, 0.75)
    assert window.loss == pytest.approx(0.6)
    assert window.ne == pytest.approx(0.6 / math.log(2))


def test_a_step_counts_by_its_weight() -> None:
    window = MovingLoss()
    window.add(300, 0.4, 0.5)
    window.add(100, 0.8, 0.5)
    assert window.loss == pytest.approx(0.5)


def test_old_steps_leave_the_window() -> None:
    window = MovingLoss(num_steps=2)
    for loss in (9.0, 0.4, 0.6):
        window.add(10, loss, 0.5)
    assert window.loss == pytest.approx(0.5)


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_ne_is_absent_while_all_labels_are_equal(label: float) -> None:
    window = MovingLoss()
    window.add(10, 0.3, label)
    assert window.ne is None


def test_an_empty_window_has_no_numbers() -> None:
    assert math.isnan(MovingLoss().loss)
    assert MovingLoss().ne is None
