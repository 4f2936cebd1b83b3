"""What trainers do about each other: nothing, all-reduce, EASGD, or a shadow thread.

Letters, as in docs/synchronisation.md: x a trainer's parameters, c the centre's, g gradients, p trainers, tau the period.
A centre that is gone stops nobody: each policy goes on alone and exchanges again when the centre is back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from rowstead.spec.sync import SyncSpec
from rowstead.training.sync_base import DenseServer, DenseServerUnavailable, Replica

OPTIMIZER = "optimizer"
"""Name under which the state of the dense optimizer is kept at the centre."""
KEEP_EVERY = 16
"""Exchanges after which a trainer leaves the state of its optimizer with the centre, for trainers that come later."""
REPAIR_EVERY = 16
"""Rounds of gradients after which parameters are averaged too."""


def policies_for(
    spec: SyncSpec, centre_of: Callable[[int], DenseServer], *, num_trainers: int, num_threads: int = 1
) -> list[Unsynchronised]:
    """A policy for each thread of one trainer; `centre_of(thread)` gives that thread's own view of the centre."""
    mode, alpha = spec.mode_for(num_trainers), spec.alpha_for(num_trainers)
    if mode == "allreduce":
        return [AllReduce(centre_of(i), thread=i) for i in range(num_threads)]
    if mode == "easgd":
        return [Easgd(centre_of(i), alpha=alpha, period=spec.period, thread=i) for i in range(num_threads)]
    if mode == "shadow":
        first = Shadow(
            centre_of(0),
            rule=spec.rule,
            alpha=alpha,
            period=spec.period,
            momentum=spec.block_momentum_for(num_trainers) if spec.rule == "bmuf" else 0.0,
            lr=spec.block_lr if spec.rule == "bmuf" else 1.0,
        )
        return [first, *(first.counting() for _ in range(num_threads - 1))]
    period = max(1, KEEP_EVERY * spec.period // num_threads)  # one thread counts for all
    return [PublishParameters(centre_of(0), period=period), *(Unsynchronised() for _ in range(num_threads - 1))]


class Unsynchronised:
    """The policy of who has nobody to think of."""

    def begin(self, replica: Replica) -> None:
        """Nothing to take over."""

    def gradients_ready(self, step: int) -> None:
        """Gradients are the trainer's own."""

    def after_step(self, step: int) -> None:
        """Nobody to tell."""

    def rest(self) -> None:
        """There is nothing to train on for now: nobody should wait for this one."""

    def close(self) -> None:
        """Nobody to tell."""


class _WithDenseServer(Unsynchronised):
    """What the policies with a centre have in common: how a trainer begins, and that it goes on when the centre is gone."""

    def __init__(self, centre: DenseServer, *, thread: int = 0) -> None:
        self._centre, self._thread = centre, thread
        self._replica: Replica | None = None
        self._has_joined = False
        self._exchanges_to_keep = 1
        self.num_exchanges = 0
        self.num_alone = 0
        """Exchanges that did not happen since the centre was gone."""

    @property
    def replica(self) -> Replica:
        assert self._replica is not None, "begin comes before the first step"
        return self._replica

    def begin(self, replica: Replica) -> None:
        """Take over the centre's parameters, and the optimizer's state that another trainer has left there."""
        self._replica = replica
        self._attempt(lambda: None)

    def _join(self) -> None:
        common = self._centre.join(self._local())
        self._has_joined = True
        if self._thread == 0:  # the others share these parameters
            with torch.no_grad():
                self.replica.parameters.copy_(common)
            if (state := self._centre.kept(OPTIMIZER)) is not None:
                self.replica.set_optimizer_state(state)

    def _exchanged(self) -> None:
        """Count an exchange, and now and then leave the optimizer's state with the centre."""
        self.num_exchanges += 1
        self._exchanges_to_keep -= 1
        if self._thread == 0 and self._exchanges_to_keep <= 0:
            self._exchanges_to_keep = KEEP_EVERY
            self._keep()

    def _keep(self) -> None:
        state = self.replica.optimizer_state()
        if state.numel():
            self._centre.keep(OPTIMIZER, state)

    def _local(self) -> Tensor:
        """The parameters as they are now, on the CPU."""
        return self.replica.parameters.detach().to("cpu", copy=True)

    def _add(self, change: Tensor) -> None:
        """Add to the parameters, in place and without a lock."""
        with torch.no_grad():
            self.replica.parameters.add_(change.to(self.replica.parameters.device))

    def _attempt(self, exchange: Callable[[], None]) -> None:
        """Exchange something, as a member; go on without if the centre is gone."""
        try:
            if not self._has_joined:
                self._join()
            exchange()
        except DenseServerUnavailable:
            self.num_alone += 1

    def close(self) -> None:
        """Hand over the last parameters: the common model becomes the mean of those of all trainers."""

        def finish() -> None:
            if self._thread == 0:
                self._keep()
                self._centre.finish(self._local())
            else:
                self._centre.leave()

        self._attempt(finish)


class PublishParameters(_WithDenseServer):
    """One trainer: the centre only keeps what it has learned, every `period` steps and at the end."""

    def __init__(self, centre: DenseServer, *, period: int) -> None:
        super().__init__(centre)
        self._period = period
        self._num_steps = 0
        """Of this thread: numbers of steps may go to others, or come in any order."""

    def after_step(self, step: int) -> None:
        self._num_steps += 1
        if self._num_steps % self._period == 0:
            self._give()

    def _give(self) -> None:
        def give() -> None:
            self._centre.give(self._local())
            self._keep()
            self.num_exchanges += 1

        self._attempt(give)


class AllReduce(_WithDenseServer):
    """Every step with the mean of all trainers' gradients: g <- mean over i of g_i.

    Thread k of a trainer averages with thread k of the others. Now and then parameters are averaged too: it changes nothing but
    for those who came too late for a round.
    """

    def __init__(self, centre: DenseServer, *, thread: int = 0) -> None:
        super().__init__(centre, thread=thread)
        self._round = 0

    def gradients_ready(self, step: int) -> None:
        def average() -> None:
            own = self.replica.gradients().to("cpu")
            mean, self._round = self._centre.average(own, f"gradients.{self._thread}")
            self.replica.set_gradients(mean)

        self._round = 0
        self._attempt(average)

    def after_step(self, step: int) -> None:
        if self._thread == 0 and self._round and self._round % REPAIR_EVERY == 0:  # so for all that were in this round
            self._blend()

    def rest(self) -> None:
        """Leave; who comes to a round is a member again."""
        self._attempt(self._centre.leave)

    def _blend(self) -> None:
        def blend() -> None:
            own = self._local()
            self._add(self._centre.blend(own).sub_(own))
            self._exchanged()

        self._attempt(blend)


class Easgd(_WithDenseServer):
    """Asynchronous elastic averaging: every tau steps e = alpha (x - c), x <- x - e, c <- c + e, then the step.

    The gradient of that step is the one at x before the exchange, as in the algorithm of Zhang, Choromanska and LeCun.
    """

    def __init__(self, centre: DenseServer, *, alpha: float, period: int, thread: int = 0) -> None:
        super().__init__(centre, thread=thread)
        self._alpha, self._period = alpha, period
        self._num_steps = 0

    def gradients_ready(self, step: int) -> None:
        if self._num_steps % self._period == 0:
            self._exchange()
        self._num_steps += 1

    def _exchange(self) -> None:
        def exchange() -> None:
            self._add(self._centre.elastic(self._local(), self._alpha).neg_())
            self._exchanged()

        self._attempt(exchange)


class Shadow(_WithDenseServer):
    """Synchronisation by a thread of its own, which trains nothing and stops nobody.

    As soon as `period` steps have been made since the last time, it reads x, exchanges it, and adds what comes of it to x as it
    is by then, so that steps made meanwhile stay. With rule `easgd`: x <- x - e, c <- c + e, e = alpha (x - c). With `average`
    and `bmuf`: x <- x + alpha (c' - x), c' the centre after a round of all trainers.
    """

    def __init__(
        self, centre: DenseServer, *, rule: str, alpha: float, period: int, momentum: float = 0.0, lr: float = 1.0
    ) -> None:
        super().__init__(centre)
        self._rule, self._alpha, self._period, self._momentum, self._lr = rule, alpha, period, momentum, lr
        self._steps = 0
        self._ends = self._rests = False
        self._changed = threading.Condition()
        self._thread_of_its_own: threading.Thread | None = None
        self._error: Exception | None = None

    def begin(self, replica: Replica) -> None:
        super().begin(replica)
        self._thread_of_its_own = threading.Thread(target=self._run, name="shadow", daemon=True)
        self._thread_of_its_own.start()

    def after_step(self, step: int) -> None:
        with self._changed:
            self._steps += 1
            if self._steps >= self._period:
                self._changed.notify()
        if self._error is not None:
            raise self._error

    def rest(self) -> None:
        """Leave, where others would wait for this one in a round."""
        with self._changed:
            self._rests = self._rule != "easgd"
            self._changed.notify()

    def counting(self) -> _Counting:
        """The policy of another thread of the same trainer, whose steps count too."""
        return _Counting(self)

    def close(self) -> None:
        with self._changed:
            self._ends = True
            self._changed.notify()
        if self._thread_of_its_own is not None:
            self._thread_of_its_own.join()
        super().close()
        if self._error is not None:
            raise self._error

    def exchange(self) -> None:
        """One synchronisation."""

        def exchange() -> None:
            own = self._local()
            if self._rule == "easgd":
                change = self._centre.elastic(own, self._alpha).neg_()
            else:
                common = self._centre.blend(own, momentum=self._momentum, lr=self._lr)
                change = common.sub_(own).mul_(self._alpha)
            self._add(change)
            self._exchanged()

        self._attempt(exchange)

    def _run(self) -> None:
        torch.set_num_threads(1)
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._ends or self._rests or self._steps >= self._period)
                    if self._ends:
                        return
                    rests, self._rests, self._steps = self._rests, False, 0
                if rests:
                    self._attempt(self._centre.leave)
                else:
                    self.exchange()
        except Exception as error:  # noqa: BLE001, RUF100 - raised by the next step
            self._error = error


class _Counting(Unsynchronised):
    """Counts the steps of one more thread towards those of a shadow."""

    def __init__(self, shadow: Shadow) -> None:
        self._shadow = shadow

    def after_step(self, step: int) -> None:
        self._shadow.after_step(step)

    def rest(self) -> None:
        self._shadow.rest()
