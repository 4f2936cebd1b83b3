"""Where the time goes: named phases of a loop, each second counted once."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Protocol


class PhaseObserver(Protocol):
    """Is told when phases begin and end, inner ones inside outer ones; `end` is about the last that has begun."""

    def begin(self, name: str) -> None: ...

    def end(self) -> None: ...


class Timers:
    """Adds up the time spent in named phases.

    A phase inside another pauses the outer one, so the totals never count a second twice and sum to at most the time
    elapsed. A `Timers` belongs to one thread; another thread needs its own.
    """

    def __init__(self) -> None:
        self.observer: PhaseObserver | None = None
        """Told of each phase from then on; set while no phase is open."""
        self._phases: dict[str, _Phase] = {}
        self._open: list[_Phase] = []
        self._mark_ns = self._start_ns = time.perf_counter_ns()

    def phase(self, name: str) -> _Phase:
        """A context manager that counts the time inside it towards `name`."""
        phase = self._phases.get(name)
        if phase is None:
            phase = self._phases[name] = _Phase(self, name)
        return phase

    def totals_s(self) -> dict[str, float]:
        """Seconds in each phase, in the order of first use; a phase still open counts up to now."""
        self._charge_open()
        return {name: phase.total_ns * 1e-9 for name, phase in self._phases.items()}

    def counts(self) -> dict[str, int]:
        """How often each phase was entered."""
        return {name: phase.count for name, phase in self._phases.items()}

    def elapsed_s(self) -> float:
        """Seconds since the start or the last reset."""
        return (time.perf_counter_ns() - self._start_ns) * 1e-9

    def shares(self) -> dict[str, float]:
        """Share of the elapsed time in each phase, and the rest as `other`; they sum to 1."""
        totals = self.totals_s()
        elapsed = max(self.elapsed_s(), sum(totals.values()), 1e-9)
        shares = {name: total / elapsed for name, total in totals.items()}
        return {**shares, "other": max(0.0, 1.0 - sum(shares.values()))}

    def reset(self) -> None:
        """Start counting anew; phases that are open go on."""
        for phase in self._phases.values():
            phase.total_ns = phase.count = 0
        self._mark_ns = self._start_ns = time.perf_counter_ns()

    def _charge_open(self) -> None:
        now_ns = time.perf_counter_ns()
        if self._open:
            self._open[-1].total_ns += now_ns - self._mark_ns
        self._mark_ns = now_ns


class _Phase:
    """One name's total; entered and left with no allocation, as it sits in the training step."""

    __slots__ = ("_name", "_timers", "count", "total_ns")

    def __init__(self, timers: Timers, name: str) -> None:
        self._timers = timers
        self._name = name
        self.total_ns = 0
        self.count = 0

    def __enter__(self) -> None:
        timers = self._timers
        timers._charge_open()
        timers._open.append(self)
        self.count += 1
        if timers.observer is not None:
            timers.observer.begin(self._name)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        timers = self._timers
        if timers.observer is not None:
            timers.observer.end()
        timers._charge_open()
        timers._open.pop()
