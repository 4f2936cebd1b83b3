"""The shared dense parameters, and rounds in which trainers average tensors.

`DenseServerState` is the algorithm: it never blocks, and threads share it under one lock. Members of a round are called back when
it closes, so a server can keep any number of rounds open with one thread. `LocalDenseServer` is the same for trainers that are
threads of one process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rowstead.spec.errors import RowsteadError
from rowstead.training.sync_base import DenseServerUnavailable

ROUND_DEADLINE_S = 5.0
"""Seconds after its first member at which a round closes with the members that have entered."""
PARAMETERS = "parameters"
"""The group whose rounds change the shared parameters."""

RoundCallback = Callable[[Tensor, int], None]
"""Receives the result of a round and its number."""


@dataclass
class _Round:
    number: int
    opened_s: float
    contributions: dict[str, Tensor] = field(default_factory=dict)
    on_close: dict[str, RoundCallback] = field(default_factory=dict)
    momentum: float = 0.0
    lr: float = 1.0
    result: Tensor = field(default_factory=lambda: torch.empty(0))
    """Once it is closed."""

    def notify(self) -> None:
        """Call its members back, outside the lock: a callback may enter the next round."""
        for on_close in self.on_close.values():
            on_close(self.result, self.number)


class DenseServerState:
    """The shared parameters and open rounds.

    A member has joined, or entered a round, and not left; after `set_members`, only those of live trainers count. A round closes
    when all members of its thread wait, in it or in another round: thread k of a trainer averages with thread k of the others. A
    member that missed a round is not waited for until it enters one again.
    """

    def __init__(self, *, deadline_s: float = ROUND_DEADLINE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.parameters: Tensor | None = None
        self.is_stale = False
        """Whether the parameters are from before a restart: the first newer ones replace them."""
        self.last_change: Tensor | None = None
        """Change of the shared parameters by the last round."""
        self.saved: dict[str, Tensor] = {}
        self.num_exchanges = 0
        self.num_rounds = 0
        self.num_partial_rounds = 0
        """Rounds that closed without some live member."""
        self._deadline_s, self._clock = deadline_s, clock
        self._lock = threading.RLock()
        self._rounds: dict[str, _Round] = {}
        self._numbers: dict[str, int] = {}
        """Number of rounds per group."""
        self._joined: set[str] = set()
        self.finished: dict[str, Tensor] = {}
        """Final parameters of members that have finished."""
        self._alive: set[str] | None = None
        self._absent: set[str] = set()
        """Members that missed a round; they are not waited for until they enter one."""

    def locked(self) -> AbstractContextManager[object]:
        return self._lock

    def join(self, name: str, parameters: Tensor) -> Tensor:
        """Return the shared parameters, initialised from these if there are none."""
        with self._lock:
            self._joined.add(name)
            self.finished.pop(name, None)
            if self.parameters is None:
                self.parameters = parameters.detach().clone()
            self._check(parameters)
            return self.parameters.clone()

    def finish(self, name: str, parameters: Tensor) -> None:
        """Add the final parameters of this member, which leaves."""
        with self._lock:
            if self.parameters is not None:
                self._check(parameters)
            self.finished[name] = parameters.detach().clone()
            self.parameters, self.last_change, self.is_stale = _mean(self.finished), None, False
        self.leave(name)

    def leave(self, name: str) -> None:
        """Stop waiting for this member."""
        with self._lock:
            self._joined.discard(name)
        self._close_full()

    def set_members(self, names: Iterable[str]) -> None:
        """Set the live trainers; rounds wait for no others."""
        with self._lock:
            self._alive = set(names)
        self._close_full()

    def pull(self) -> Tensor:
        with self._lock:
            if self.parameters is None:
                raise RowsteadError("there are no shared parameters yet: no trainer has joined")
            return self.parameters.clone()

    def push(self, parameters: Tensor) -> None:
        with self._lock:
            self.parameters, self.is_stale = parameters.detach().clone(), False

    def save(self, name: str, tensor: Tensor) -> None:
        self.saved[name] = tensor.detach().clone()

    def elastic_average(self, local: Tensor, alpha: float) -> Tensor:
        """Move the shared parameters towards `local` by alpha times the difference; returns the change."""
        with self._lock:
            if self.parameters is None or self.is_stale:
                self.parameters, self.is_stale = local.detach().clone(), False
            self._check(local)
            moved = (local - self.parameters).mul_(alpha)
            self.parameters += moved
            self.num_exchanges += 1
            return moved

    def enter_round(
        self, group: str, name: str, tensor: Tensor, on_close: RoundCallback, *, momentum: float = 0.0, lr: float = 1.0
    ) -> None:
        """Enter the open round of a group; `on_close` receives its result, in the thread that closes it.

        Entering a round again replaces the first entry, whose reply was lost.
        """
        with self._lock:
            if group == PARAMETERS:
                if self.parameters is None:
                    self.parameters = tensor.detach().clone()
                self._check(tensor)  # refuse it here: a round that cannot close would block all its members
            self._joined.add(name)
            current = self._rounds.get(group)
            if current is None:
                self._numbers[group] = self._numbers.get(group, 0) + 1
                current = self._rounds[group] = _Round(number=self._numbers[group], opened_s=self._clock())
            other = next(iter(current.contributions.values()), tensor)
            if other.shape != tensor.shape:
                raise RowsteadError(
                    f"`{name}` has {tensor.numel()} values, other members of the round have {other.numel()}: all trainers of a "
                    "fleet must train the same recipe"
                )
            current.contributions[name], current.on_close[name] = tensor.detach().clone(), on_close
            current.momentum, current.lr = momentum, lr
            self._absent.discard(name)
        self._close_full()

    def close_overdue(self) -> None:
        """Close the rounds past their deadline with the members that have entered."""
        with self._lock:
            now = self._clock()
            late = [group for group, round_ in self._rounds.items() if now >= round_.opened_s + self._deadline_s]
            for group in late:
                thread = parse_member(group)[1]
                missing = self._expected(thread) - self._waiting(thread)
                self._absent |= missing
                self.num_partial_rounds += bool(missing)
            closed = [self._close(group) for group in late]
        for round_ in closed:
            round_.notify()

    @property
    def num_waiting(self) -> int:
        with self._lock:
            return sum(len(round_.contributions) for round_ in self._rounds.values())

    def _expected(self, thread: int) -> set[str]:
        """Members that rounds of this thread wait for: those of live trainers."""
        expected = set()
        for name in self._joined - self._absent:
            trainer, own_thread = parse_member(name)
            if own_thread == thread and (self._alive is None or trainer in self._alive):
                expected.add(name)
        return expected

    def _close_full(self) -> None:
        """Close the rounds whose members all wait, in one round or another."""
        closed = []
        with self._lock:
            for thread in {parse_member(group)[1] for group in self._rounds}:
                if self._expected(thread) <= self._waiting(thread):
                    closed += [self._close(group) for group in list(self._rounds) if parse_member(group)[1] == thread]
        for round_ in closed:
            round_.notify()

    def _waiting(self, thread: int) -> set[str]:
        return {
            name for group, round_ in self._rounds.items() if parse_member(group)[1] == thread for name in round_.contributions
        }

    def _close(self, group: str) -> _Round:
        done = self._rounds.pop(group)
        self.num_rounds += 1
        done.result = _mean(done.contributions)
        if group == PARAMETERS:
            done.result = self._apply_round(done.result, done.momentum, done.lr)
        return done

    def _apply_round(self, mean: Tensor, momentum: float, lr: float) -> Tensor:
        """Update the shared parameters with the mean of a round, and return them."""
        assert self.parameters is not None
        if self.is_stale or (momentum == 0 and lr == 1):
            self.parameters, self.last_change, self.is_stale = mean.clone(), None, False
            return mean
        change = (mean - self.parameters).mul_(lr)
        if self.last_change is not None:
            change.add_(self.last_change, alpha=momentum)
        self.parameters, self.last_change = self.parameters + change, change
        return self.parameters.clone()

    def _check(self, tensor: Tensor) -> None:
        assert self.parameters is not None
        if tensor.shape != self.parameters.shape:
            raise RowsteadError(
                f"a trainer has {tensor.numel()} dense parameters, the dense server has {self.parameters.numel()}: all trainers "
                "of a fleet must train the same recipe"
            )
        if not bool(tensor.isfinite().all()):
            raise RowsteadError(
                "a trainer's dense parameters are no longer finite: lower train.dense_optimizer.lr, or set `clip`"
            )


def parse_member(name: str) -> tuple[str, int]:
    """Return the trainer and thread of a member's or group's name: `trainer-3.1` is thread 1 of `trainer-3`."""
    trainer, dot, thread = name.rpartition(".")
    return (trainer, int(thread)) if dot and thread.isdigit() else (name, 0)


def _mean(contributions: Mapping[str, Tensor]) -> Tensor:
    """Mean of the members' tensors, in the order of names, so that it does not depend on their arrival."""
    return torch.stack([contributions[name] for name in sorted(contributions)]).mean(0)


class LocalDenseServer:
    """A `DenseServer` for one member, over a state shared by all threads of this process."""

    def __init__(self, state: DenseServerState, name: str) -> None:
        self._state, self._name = state, name

    def join(self, parameters: Tensor) -> Tensor:
        return self._state.join(self._name, parameters)

    def leave(self) -> None:
        self._state.leave(self._name)

    def finish(self, parameters: Tensor) -> None:
        self._state.finish(self._name, parameters)

    def pull(self) -> Tensor:
        return self._state.pull()

    def push(self, parameters: Tensor) -> None:
        self._state.push(parameters)

    def elastic_average(self, local: Tensor, alpha: float) -> Tensor:
        return self._state.elastic_average(local, alpha)

    def average(self, tensor: Tensor, group: str) -> tuple[Tensor, int]:
        return self._round(group, tensor)

    def average_parameters(self, local: Tensor, *, momentum: float = 0.0, lr: float = 1.0) -> Tensor:
        return self._round(PARAMETERS, local, momentum=momentum, lr=lr)[0]

    def save_state(self, name: str, tensor: Tensor) -> None:
        self._state.save(name, tensor)

    def load_state(self, name: str) -> Tensor | None:
        found = self._state.saved.get(name)
        return None if found is None else found.clone()

    def _round(self, group: str, tensor: Tensor, *, momentum: float = 0.0, lr: float = 1.0) -> tuple[Tensor, int]:
        closed, results = threading.Event(), list[tuple[Tensor, int]]()

        def on_close(result: Tensor, number: int) -> None:
            results.append((result, number))
            closed.set()

        self._state.enter_round(group, self._name, tensor, on_close, momentum=momentum, lr=lr)
        ends_s = time.monotonic() + 10 * ROUND_DEADLINE_S
        while not closed.wait(0.05):
            self._state.close_overdue()
            if time.monotonic() > ends_s:
                raise DenseServerUnavailable("a round did not close in time")
        result, number = results[0]
        return result.clone(), number
