"""Timers count every second once, and cost next to nothing."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowstead.records.timers import Timers


class Clock:
    """A clock that only moves when told to."""

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
    with timers.phase("step"):
        clock.tick(1)
        with timers.phase("embedding"):
            clock.tick(2)
            with timers.phase("step"):
                clock.tick(4)
        clock.tick(8)
    clock.tick(5)
    assert timers.totals_s() == pytest.approx({"step": 13, "embedding": 2})
    assert timers.counts() == {"step": 2, "embedding": 1}
    assert timers.elapsed_s() == pytest.approx(20)
    assert timers.shares() == pytest.approx({"step": 0.65, "embedding": 0.1, "other": 0.25})


def test_an_open_phase_counts_up_to_now_and_a_reset_starts_anew(clock: Clock) -> None:
    timers = Timers()
    with timers.phase("a"):
        clock.tick(3)
        assert timers.totals_s() == pytest.approx({"a": 3})
        timers.reset()
        clock.tick(1)
    assert timers.totals_s() == pytest.approx({"a": 1})
    assert timers.shares() == pytest.approx({"a": 1, "other": 0})


def test_a_phase_ends_where_an_exception_leaves_it(clock: Clock) -> None:
    timers = Timers()
    with pytest.raises(ZeroDivisionError), timers.phase("a"), timers.phase("b"):
        clock.tick(1 // 0)
    clock.tick(1)
    assert timers.totals_s() == {"a": 0, "b": 0}


class Told:
    """Keeps what a Timers says."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def begin(self, name: str) -> None:
        self.events.append(f"begin {name}")

    def end(self) -> None:
        self.events.append("end")


def test_an_observer_hears_of_phases_as_they_nest_and_only_while_it_is_there() -> None:
    timers, told = Timers(), Told()
    with timers.phase("before"):
        pass
    timers.observer = told
    with timers.phase("a"), timers.phase("b"):
        pass
    with pytest.raises(ZeroDivisionError), timers.phase("c"):
        raise ZeroDivisionError
    timers.observer = None
    with timers.phase("after"):
        pass
    assert told.events == ["begin a", "begin b", "end", "end", "begin c", "end"]


phase_trees = st.recursive(
    st.just([]), lambda inner: st.lists(st.tuples(st.sampled_from("abc"), inner), max_size=3), max_leaves=12
)


@given(tree=phase_trees)
def test_totals_never_exceed_the_time_elapsed(tree: list) -> None:  # type: ignore[type-arg]
    timers = Timers()

    def walk(level: list) -> None:  # type: ignore[type-arg]
        for name, inner in level:
            with timers.phase(name):
                walk(inner)

    walk(tree)
    assert sum(timers.totals_s().values()) <= timers.elapsed_s()
    assert sum(timers.shares().values()) == pytest.approx(1)


def test_a_phase_costs_less_than_two_microseconds() -> None:
    timers = Timers()
    best_s = float("inf")
    for _ in range(20):
        begin_s = time.perf_counter()
        for _ in range(1000):
            with timers.phase("embedding"):
                pass
        best_s = min(best_s, (time.perf_counter() - begin_s) / 1000)
    assert best_s < 2e-6
