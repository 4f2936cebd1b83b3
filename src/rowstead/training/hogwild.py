"""Hogwild: threads that train one model at once, each on batches of its own, without locks.

Each thread has modules and optimizers of its own over the same memory: parameters and the optimizer's state are shared, while
gradients, and what autograd remembers of parameters, are not. All it runs is serial and leaves Python's lock alone: torch with one
thread, and kernels that do not wake others. Where two threads change a number at once, one change may be lost.
"""

from __future__ import annotations

import contextlib
import copy
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from rowstead.data.batch import Batch
from rowstead.nn.dlrm import DLRM
from rowstead.records.timers import Timers
from rowstead.spec.errors import RowsteadError
from rowstead.spec.phases import Phase
from rowstead.spec.train import TrainSpec
from rowstead.stores.base import EmbeddingStore
from rowstead.training.flat_parameters import flat_of, start_optimizer
from rowstead.training.step import Stepper


class Hogwild:
    """Steppers over the memory of one: the first is the given one, the others are made here.

    `store_of(thread)` gives threads from 1 on a store; left out, all use that of the first, which must be one that threads can share.
    """

    def __init__(self, stepper: Stepper, num_threads: int, *, store_of: Callable[[int], EmbeddingStore] | None = None) -> None:
        store = stepper.model.store
        if num_threads > 1:
            if store_of is None:
                check_store(store)
            flat_of(stepper.model.net)  # before there are others who know where its parameters are
        models = [replica_of(stepper.model, store if store_of is None else store_of(i)) for i in range(1, num_threads)]
        self.workers = [stepper, *(Stepper(m, stepper.spec, total_steps=stepper.total_steps) for m in models)]
        self.stops = threading.Event()
        """Set when a thread of `run` has failed: the others should end."""
        self.share()

    def share(self) -> None:
        """Let all use the first one's parameters and optimizer state; again after it has loaded others."""
        first = self.workers[0]
        start_optimizer(first.optimizer)
        for worker in self.workers[1:]:
            for own, common in zip(worker.model.net.parameters(), first.model.net.parameters(), strict=True):
                own.data = common.data
                worker.optimizer.state[own] = first.optimizer.state.get(common, {})

    def run(self, work: Callable[[int, Stepper], None]) -> None:
        """`work(thread, stepper)` in as many threads as there are steppers; returns when all have ended.

        The first error that one raises is raised here, and `stops` is set as soon as it happens.
        """
        errors: list[BaseException] = []

        def one(place: int) -> None:
            try:
                torch.set_num_threads(1)
                work(place, self.workers[place])
            except BaseException as error:  # noqa: BLE001, RUF100 - raised again by who waits
                errors.append(error)
                self.stops.set()

        self.share()
        self.stops.clear()
        threads = [threading.Thread(target=one, args=(i,), name=f"hogwild-{i}") for i in range(len(self.workers))]
        with _torch_threads_kept():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]


class HogwildStepper(Stepper):
    """A Stepper whose `start` hands a batch to the next thread that is free."""

    def __init__(
        self, model: DLRM, spec: TrainSpec, *, total_steps: int, num_threads: int, timers: Timers | None = None
    ) -> None:
        super().__init__(model, spec, total_steps=total_steps, timers=timers)
        self.steps_ahead = num_threads
        first = Stepper(model, spec, total_steps=total_steps, optimizer=self.optimizer)
        self._hogwild = Hogwild(first, num_threads)
        self._free: queue.SimpleQueue[Stepper] = queue.SimpleQueue()
        for worker in self._hogwild.workers:
            self._free.put(worker)
        self._pool = ThreadPoolExecutor(num_threads, "hogwild", initializer=torch.set_num_threads, initargs=(1,))

    def start(self, batch: Batch, number: int) -> Callable[[], float]:
        """Train on `batch` in one of the threads; what is returned waits for the loss, and raises if it is not finite."""
        future = self._pool.submit(self._one, batch, number)

        def wait() -> float:
            with self.timers.phase(Phase.HOGWILD):
                return future.result()

        return wait

    def _one(self, batch: Batch, number: int) -> float:
        worker = self._free.get()
        try:
            return worker.step(batch, number)
        finally:
            self._free.put(worker)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        super().load_state(tensors)
        self._hogwild.share()


def check_store(store: EmbeddingStore) -> None:
    """Refuse a store that threads cannot look up and update at once."""
    if store.tables and not store.can_share_between_threads:
        raise RowsteadError(
            "train.sync.hogwild_threads: threads can share tables in the memory of a CPU alone, under the CPU kernels: use "
            "`--set device=cpu` and `placement: auto`, or one thread"
        )


def replica_of(model: DLRM, store: EmbeddingStore) -> DLRM:
    """The same model with modules of its own, over another store or the same."""
    other = copy.copy(model)
    other._modules = dict(model._modules)
    other.__dict__.pop("store", None)
    other._modules.pop("store", None)
    other.store = store
    other.net = copy.deepcopy(model.net)
    return other


@contextlib.contextmanager
def _torch_threads_kept() -> Iterator[None]:
    """Leaves the number of torch's threads as it was."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
