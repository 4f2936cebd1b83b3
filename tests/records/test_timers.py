"""Timers count every second once, and cost next to nothing."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowstead.records.timers import Timers
from rowstead.spec.phases import Phase


class Clock:
    """A clock that only moves when observed to."""

    now_ns = 0

    def __call__(self) -> int:
        return Clock.now_ns

    def tick(self, seconds: int) -> None:
        Clock.now_ns += seconds * 10**9


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter_ns", clock)
    return clock


def test_an_inner_phase_pauses_the_outer_one(clock: Clock) -> None:
    timers = Timers()
    with timers.phase(Phase.FORWARD):
        clock.tick(1)
        with timers.phase(Phase.LOOKUP):
            clock.tick(2)
            with timers.phase(Phase.FORWARD):
                clock.tick(4)
        clock.tick(8)
    clock.tick(5)
    assert timers.totals_s() == pytest.approx({Phase.FORWARD: 13, Phase.LOOKUP: 2})
    assert timers.elapsed_s() == pytest.approx(20)


def test_an_open_phase_counts_up_to_now_and_a_reset_sets_totals_to_zero(clock: Clock) -> None:
    timers = Timers()
    with timers.phase(Phase.FORWARD):
        clock.tick(3)
        assert timers.totals_s() == pytest.approx({Phase.FORWARD: 3})
        timers.reset()
        clock.tick(1)
    assert timers.totals_s() == pytest.approx({Phase.FORWARD: 1})


def test_a_phase_ends_where_an_exception_leaves_it(clock: Clock) -> None:
    timers = Timers()
    with pytest.raises(ZeroDivisionError), timers.phase(Phase.FORWARD), timers.phase(Phase.LOOKUP):
        clock.tick(1 // 0)
    clock.tick(1)
    assert timers.totals_s() == {Phase.FORWARD: 0, Phase.LOOKUP: 0}


class RecordingObserver:
    """Keeps the calls of a Timers."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def begin(self, phase: Phase) -> None:
        self.events.append(f"begin {phase.value}")

    def end(self) -> None:
        self.events.append("end")


def test_an_observer_sees_phases_as_they_nest_and_only_while_it_is_set() -> None:
    timers, observed = Timers(), RecordingObserver()
    with timers.phase(Phase.DATA):
        pass
    timers.observer = observed
    with timers.phase(Phase.FORWARD), timers.phase(Phase.LOOKUP):
        pass
    with pytest.raises(ZeroDivisionError), timers.phase(Phase.BACKWARD):
        raise ZeroDivisionError
    timers.observer = None
    with timers.phase(Phase.DATA):
        pass
    assert observed.events == ["begin forward", "begin look-up", "end", "end", "begin backward", "end"]


phase_trees = st.recursive(
    st.just([]), lambda inner: st.lists(st.tuples(st.sampled_from(list(Phase)), inner), max_size=3), max_leaves=12
)


@given(tree=phase_trees)
def test_totals_never_exceed_the_time_elapsed(tree: list) -> None:  # type: ignore[type-arg]
    timers = Timers()

    def walk(level: list) -> None:  # type: ignore[type-arg]
        for phase, inner in level:
            with timers.phase(phase):
                walk(inner)

    walk(tree)
    assert sum(timers.totals_s().values()) <= timers.elapsed_s()


def test_a_phase_costs_less_than_two_microseconds() -> None:
    timers = Timers()
    best_s = float("inf")
    for _ in range(20):
        begin_s = time.perf_counter()
        for _ in range(1000):
            with timers.phase(Phase.LOOKUP):
                pass
        best_s = min(best_s, (time.perf_counter() - begin_s) / 1000)
    assert best_s < 2e-6
