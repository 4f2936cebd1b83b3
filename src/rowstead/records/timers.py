"""Timers: the seconds that a loop spends in each phase, each second counted once."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Protocol

from rowstead.spec.phases import Phase


class PhaseObserver(Protocol):
    """Is called when phases begin and end. Phases nest: `end` is about the last that has begun."""

    def begin(self, phase: Phase) -> None: ...

    def end(self) -> None: ...


class Timers:
    """Adds up the time spent in each phase.

    A phase inside another pauses the outer one, so that the totals never count a second twice and sum to at most the elapsed time.
    A `Timers` belongs to one thread; another thread needs its own.
    """

    def __init__(self) -> None:
        self.observer: PhaseObserver | None = None
        """Called for each phase; set it while no phase is open."""
        self._totals: dict[Phase, PhaseTimer] = {}
        self._open: list[PhaseTimer] = []
        self._mark_ns = self._start_ns = time.perf_counter_ns()

    def phase(self, phase: Phase) -> PhaseTimer:
        """A context manager that counts the time inside it towards `phase`."""
        timer = self._totals.get(phase)
        if timer is None:
            timer = self._totals[phase] = PhaseTimer(self, phase)
        return timer

    def totals_s(self) -> dict[Phase, float]:
        """Seconds in each phase, in the order of first use; an open phase counts up to now."""
        self._charge_open()
        return {phase: timer.total_ns * 1e-9 for phase, timer in self._totals.items()}

    def elapsed_s(self) -> float:
        """Seconds since the start or the last reset."""
        return (time.perf_counter_ns() - self._start_ns) * 1e-9

    def reset(self) -> None:
        """Set all totals to zero; open phases stay open."""
        for timer in self._totals.values():
            timer.total_ns = 0
        self._mark_ns = self._start_ns = time.perf_counter_ns()

    def _charge_open(self) -> None:
        now_ns = time.perf_counter_ns()
        if self._open:
            self._open[-1].total_ns += now_ns - self._mark_ns
        self._mark_ns = now_ns


class PhaseTimer:
    """The total of one phase; entered and left without allocation, as it runs several times in each training step."""

    __slots__ = ("_phase", "_timers", "total_ns")

    def __init__(self, timers: Timers, phase: Phase) -> None:
        self._timers = timers
        self._phase = phase
        self.total_ns = 0

    def __enter__(self) -> None:
        timers = self._timers
        timers._charge_open()
        timers._open.append(self)
        if timers.observer is not None:
            timers.observer.begin(self._phase)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        timers = self._timers
        if timers.observer is not None:
            timers.observer.end()
        timers._charge_open()
        timers._open.pop()
