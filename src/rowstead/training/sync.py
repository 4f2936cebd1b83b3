"""Synchronisation policies of trainers: none, all-reduce, EASGD, or a shadow thread.

Letters, as in docs/synchronisation.md: x a trainer's parameters, c the shared ones, g gradients, p trainers, tau the period.
When the dense server is unavailable, a policy continues without it, and exchanges again when it is back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from rowstead.spec.sync import SYNC_MODES, SYNC_RULES, SyncMode, SyncRule, SyncSpec
from rowstead.training.flat_parameters import Replica
from rowstead.training.sync_base import DenseServer, DenseServerUnavailable, SyncPolicy

OPTIMIZER = "optimizer"
"""Name under which the dense optimizer's state is saved on the dense server."""
SAVE_STATE_EVERY = 16
"""Exchanges after which a trainer saves its optimizer state on the dense server, for trainers that start later."""
AVERAGE_EVERY = 16
"""Rounds of gradients after which parameters are averaged too."""


def build_policies(
    spec: SyncSpec, connect: Callable[[int], DenseServer], *, num_trainers: int, num_threads: int = 1, total_steps: int = 0
) -> list[SyncPolicy]:
    """Return a policy per thread of one trainer; `connect(thread)` returns the dense server's client of that thread.

    `total_steps` are those of all trainers together.
    """
    resolved = spec.resolve(num_trainers)
    policies = _POLICIES[resolved.mode].build(resolved, connect, num_threads)
    for policy in policies:
        policy.factor = spec.dense_lr_factor or 1.0  # a run of an older version has none, and continues as it began
        policy.factor_steps = spec.factor_warmup * total_steps
    return policies


class _SyncWithServer(SyncPolicy):
    """Base of the policies with a dense server: how a trainer joins, and that it continues without the server."""

    def __init__(self, server: DenseServer, *, thread: int = 0) -> None:
        self._server, self._thread = server, thread
        self._replica: Replica | None = None
        self._has_joined = False
        self._exchanges_to_save = 1

    @classmethod
    def build(cls, spec: SyncSpec, connect: Callable[[int], DenseServer], num_threads: int) -> list[SyncPolicy]:
        """Return a policy per thread; the spec is resolved."""
        return [cls(connect(i), thread=i) for i in range(num_threads)]

    @property
    def replica(self) -> Replica:
        assert self._replica is not None, "call begin before the first step"
        return self._replica

    def begin(self, replica: Replica) -> None:
        """Load the shared parameters, and the optimizer state that another trainer has saved."""
        self._replica = replica
        self._try(lambda: None)

    def _join(self) -> None:
        common = self._server.join(self._local())
        self._has_joined = True
        if self._thread == 0:  # the other threads share these parameters
            with torch.no_grad():
                self.replica.parameters.copy_(common)
            if (state := self._server.load_state(OPTIMIZER)) is not None:
                self.replica.set_optimizer_state(state)

    def _count_exchange(self) -> None:
        """Count an exchange, and every `SAVE_STATE_EVERY` exchanges save the optimizer state."""
        self.num_exchanges += 1
        self._exchanges_to_save -= 1
        if self._thread == 0 and self._exchanges_to_save <= 0:
            self._exchanges_to_save = SAVE_STATE_EVERY
            self._save_state()

    def _save_state(self) -> None:
        state = self.replica.optimizer_state()
        if state.numel():
            self._server.save_state(OPTIMIZER, state)

    def _local(self) -> Tensor:
        """Return a copy of the parameters on the CPU."""
        return self.replica.parameters.detach().to("cpu", copy=True)

    def _add(self, change: Tensor) -> None:
        """Add to the parameters, in place and without a lock."""
        with torch.no_grad():
            self.replica.parameters.add_(change.to(self.replica.parameters.device))

    def _try(self, exchange: Callable[[], None]) -> None:
        """Exchange as a member; count a missed exchange if the dense server is unavailable."""
        try:
            if not self._has_joined:
                self._join()
            exchange()
        except DenseServerUnavailable:
            self.num_missed += 1

    def close(self) -> None:
        """Send the final parameters: the shared model becomes the mean of those of all trainers."""
        self._try(self._finish if self._thread == 0 else self._server.leave)

    def _finish(self) -> None:
        self._save_state()
        self._server.finish(self._local())


class PublishParameters(_SyncWithServer):
    """Policy of a single trainer: push its parameters every `period` steps and at the end."""

    def __init__(self, server: DenseServer, *, period: int) -> None:
        super().__init__(server)
        self._period = period
        self._num_steps = 0
        """Of this thread: step numbers may go to other threads, or come in any order."""

    @classmethod
    def build(cls, spec: SyncSpec, connect: Callable[[int], DenseServer], num_threads: int) -> list[SyncPolicy]:
        period = max(1, SAVE_STATE_EVERY * spec.period // num_threads)  # one thread counts for all
        return [cls(connect(0), period=period), *(SyncPolicy() for _ in range(num_threads - 1))]

    def after_step(self, step: int) -> None:
        self._num_steps += 1
        if self._num_steps % self._period == 0:
            self._try(self._push)

    def _push(self) -> None:
        self._server.push(self._local())
        self._save_state()
        self.num_exchanges += 1


class AllReduce(_SyncWithServer):
    """All-reduce: every step uses the mean of all trainers' gradients, g <- mean over i of g_i.

    Thread k of a trainer averages with thread k of the others. Every `AVERAGE_EVERY` rounds the parameters are averaged too,
    which only changes those of members that have missed a round.
    """

    def __init__(self, server: DenseServer, *, thread: int = 0) -> None:
        super().__init__(server, thread=thread)
        self._round = 0

    def gradients_ready(self, step: int) -> None:
        self._round = 0
        self._try(self._average_gradients)

    def after_step(self, step: int) -> None:
        if self._thread == 0 and self._round and self._round % AVERAGE_EVERY == 0:  # the same for all members of this round
            self._try(self._average_parameters)

    def pause(self) -> None:
        """Leave; entering a round makes it a member again."""
        self._try(self._server.leave)

    def _average_gradients(self) -> None:
        own = self.replica.gradients().to("cpu")
        mean, self._round = self._server.average(own, f"gradients.{self._thread}")
        self.replica.set_gradients(mean)

    def _average_parameters(self) -> None:
        own = self._local()
        self._add(self._server.average_parameters(own).sub_(own))
        self._count_exchange()


class Easgd(_SyncWithServer):
    """Asynchronous elastic averaging: every tau steps e = alpha (x - c), x <- x - e, c <- c + e, then the step.

    The gradient of that step is the one at x before the exchange, as in Zhang, Choromanska and LeCun, algorithm 1.
    """

    def __init__(self, server: DenseServer, *, alpha: float, period: int, thread: int = 0) -> None:
        super().__init__(server, thread=thread)
        self._alpha, self._period = alpha, period
        self._num_steps = 0

    @classmethod
    def build(cls, spec: SyncSpec, connect: Callable[[int], DenseServer], num_threads: int) -> list[SyncPolicy]:
        assert spec.alpha is not None
        return [cls(connect(i), alpha=spec.alpha, period=spec.period, thread=i) for i in range(num_threads)]

    def gradients_ready(self, step: int) -> None:
        if self._num_steps % self._period == 0:
            self._try(self._exchange)
        self._num_steps += 1

    def _exchange(self) -> None:
        self._add(self._server.elastic_average(self._local(), self._alpha).neg_())
        self._count_exchange()


class Shadow(_SyncWithServer):
    """Synchronises in a background thread, without blocking training.

    Every `period` steps the thread reads x, exchanges it, and adds the resulting difference to the current x, so that steps made
    meanwhile are kept. With rule `easgd`: x <- x - e, c <- c + e, e = alpha (x - c). With `average` and `bmuf`:
    x <- x + alpha (c' - x), where c' are the shared parameters after a round of all trainers.
    """

    def __init__(
        self, server: DenseServer, *, rule: SyncRule, alpha: float, period: int, momentum: float = 0.0, lr: float = 1.0
    ) -> None:
        super().__init__(server)
        self._rule, self._alpha, self._period, self._momentum, self._lr = rule, alpha, period, momentum, lr
        self._steps = 0
        self._ends = self._is_paused = False
        self._condition = threading.Condition()
        self._shadow_thread: threading.Thread | None = None
        self._error: Exception | None = None

    @classmethod
    def build(cls, spec: SyncSpec, connect: Callable[[int], DenseServer], num_threads: int) -> list[SyncPolicy]:
        assert spec.alpha is not None
        assert spec.block_momentum is not None
        has_momentum = SYNC_RULES[spec.rule].has_momentum
        first = cls(
            connect(0),
            rule=spec.rule,
            alpha=spec.alpha,
            period=spec.period,
            momentum=spec.block_momentum if has_momentum else 0.0,
            lr=spec.block_lr if has_momentum else 1.0,
        )
        return [first, *(_ShadowThread(first) for _ in range(num_threads - 1))]

    def begin(self, replica: Replica) -> None:
        super().begin(replica)
        self._shadow_thread = threading.Thread(target=self._run, name="shadow", daemon=True)
        self._shadow_thread.start()

    def after_step(self, step: int) -> None:
        with self._condition:
            self._steps += 1
            if self._steps >= self._period:
                self._condition.notify()
        if self._error is not None:
            raise self._error

    def pause(self) -> None:
        """Leave, if others would wait for this trainer in a round."""
        with self._condition:
            self._is_paused = SYNC_RULES[self._rule].needs_round
            self._condition.notify()

    def close(self) -> None:
        with self._condition:
            self._ends = True
            self._condition.notify()
        if self._shadow_thread is not None:
            self._shadow_thread.join()
        super().close()
        if self._error is not None:
            raise self._error

    def exchange(self) -> None:
        """Synchronise once."""

        def exchange() -> None:
            own = self._local()
            if SYNC_RULES[self._rule].needs_round:
                common = self._server.average_parameters(own, momentum=self._momentum, lr=self._lr)
                change = common.sub_(own).mul_(self._alpha)
            else:
                change = self._server.elastic_average(own, self._alpha).neg_()
            self._add(change)
            self._count_exchange()

        self._try(exchange)

    def _run(self) -> None:
        torch.set_num_threads(1)
        try:
            while True:
                with self._condition:
                    self._condition.wait_for(lambda: self._ends or self._is_paused or self._steps >= self._period)
                    if self._ends:
                        return
                    is_paused, self._is_paused, self._steps = self._is_paused, False, 0
                if is_paused:
                    self._try(self._server.leave)
                else:
                    self.exchange()
        except Exception as error:  # noqa: BLE001, RUF100 - raised by the next step
            self._error = error


class _ShadowThread(SyncPolicy):
    """Counts the steps of another thread towards the period of a shadow."""

    def __init__(self, shadow: Shadow) -> None:
        self._shadow = shadow

    def after_step(self, step: int) -> None:
        self._shadow.after_step(step)

    def pause(self) -> None:
        self._shadow.pause()


_POLICIES: dict[SyncMode, type[_SyncWithServer]] = {
    "none": PublishParameters,
    "allreduce": AllReduce,
    "easgd": Easgd,
    "shadow": Shadow,
}
assert set(_POLICIES) == set(SYNC_MODES) - {"auto"}
