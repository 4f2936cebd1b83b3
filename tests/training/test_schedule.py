"""The factor of the learning rate: warm-up, then decay to its final share."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowstead.spec.train import ScheduleSpec
from rowstead.training.step import lr_factor


def factors(total_steps: int, **spec: object) -> list[float]:
    schedule = ScheduleSpec(**spec)  # type: ignore[arg-type]
    return [lr_factor(schedule, step, total_steps) for step in range(1, total_steps + 1)]


def test_without_a_schedule_the_factor_is_always_one() -> None:
    assert factors(5) == [1.0] * 5


def test_warm_up_rises_linearly_and_reaches_one_at_its_last_step() -> None:
    assert factors(6, warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])


def test_linear_decay_falls_by_the_same_amount_each_step_to_its_final_share() -> None:
    assert factors(4, decay="linear") == pytest.approx([0.75, 0.5, 0.25, 0])
    assert factors(6, warmup_steps=2, decay="linear", final=0.2) == pytest.approx([0.5, 1, 0.8, 0.6, 0.4, 0.2])


def test_cosine_decay_is_half_way_in_the_middle() -> None:
    assert factors(8, decay="cosine")[3] == pytest.approx(0.5)
    assert factors(8, decay="cosine", final=0.1)[-1] == pytest.approx(0.1)


@given(
    total=st.integers(1, 300),
    warmup=st.integers(0, 400),
    decay=st.sampled_from(["none", "linear", "cosine"]),
    final=st.floats(0, 1),
)
@settings(deadline=None)
def test_any_schedule_rises_then_falls_and_stays_between_0_and_1(total: int, warmup: int, decay: str, final: float) -> None:
    values = factors(total, warmup_steps=warmup, decay=decay, final=final)
    assert all(0 <= value <= 1 + 1e-12 for value in values)
    rising, falling = values[:warmup], values[warmup:]
    assert rising == sorted(rising)
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(falling))
    if falling and decay != "none":
        assert values[-1] == pytest.approx(final)
