"""Hogwild: several threads train one model without locks, each on its own batches.

Each thread has its own modules and optimizers over shared memory: parameters and optimizer state are shared, gradients and autograd's
bookkeeping are not. Each step is serial and mostly releases the GIL: torch runs with one thread, and kernels start no others. Where two
threads change a number at once, one change may be lost.
"""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from rowstead.data.batch import Batch
from rowstead.nn.dlrm import DLRM
from rowstead.spec.errors import RowsteadError
from rowstead.spec.phases import Phase
from rowstead.spec.train import TrainSpec
from rowstead.stores.base import EmbeddingStore
from rowstead.training.device import set_threads
from rowstead.training.flat_parameters import flatten_parameters, start_optimizer
from rowstead.training.step import Stepper


class Hogwild:
    """One stepper per thread over shared memory: the given one, and copies of it.

    `store_of(thread)` returns the store of threads from 1 on. Without it all use that of the first, which threads must be able to share.
    """

    def __init__(self, stepper: Stepper, num_threads: int, *, store_of: Callable[[int], EmbeddingStore] | None = None) -> None:
        store = stepper.model.store
        if num_threads > 1:
            if store_of is None and store.tables and not store.can_share_between_threads:
                raise RowsteadError(
                    "train.sync.hogwild_threads: threads can share only tables in CPU memory, with the CPU kernels: use "
                    "`--set device=cpu` and `placement: auto`, or one thread"
                )
            flatten_parameters(stepper.model.net)  # before other threads share them
        models = [replicate_model(stepper.model, store if store_of is None else store_of(i)) for i in range(1, num_threads)]
        self.workers = [stepper, *(Stepper(m, stepper.spec, total_steps=stepper.total_steps) for m in models)]
        self.stops = threading.Event()
        """Set when a thread of `run` has failed: the others should end."""
        self.share()

    def share(self) -> None:
        """Share the first stepper's parameters and optimizer state; call it again after loading others."""
        first = self.workers[0]
        start_optimizer(first.optimizer)
        for worker in self.workers[1:]:
            for own, common in zip(worker.model.net.parameters(), first.model.net.parameters(), strict=True):
                own.data = common.data
                worker.optimizer.state[own] = first.optimizer.state.get(common, {})
            for module, common_module in zip(worker.model.net.modules(), first.model.net.modules(), strict=True):
                module._buffers = common_module._buffers  # running statistics

    def run(self, work: Callable[[int, Stepper], None]) -> None:
        """Run `work(thread, stepper)` in one thread per stepper; returns when all have ended.

        The first error of a thread is raised here; `stops` is set as soon as it happens.
        """
        errors: list[BaseException] = []

        def run_thread(index: int) -> None:
            try:
                torch.set_num_threads(1)
                work(index, self.workers[index])
            except BaseException as error:  # noqa: BLE001, RUF100 - raised again below
                errors.append(error)
                self.stops.set()

        self.share()
        self.stops.clear()
        threads = [threading.Thread(target=run_thread, args=(i,), name=f"hogwild-{i}") for i in range(len(self.workers))]
        with set_threads(1):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]


class HogwildStepper(Stepper):
    """A Stepper that runs each step in the next free thread."""

    def __init__(self, model: DLRM, spec: TrainSpec, *, total_steps: int, num_threads: int) -> None:
        super().__init__(model, spec, total_steps=total_steps)
        self.steps_ahead = num_threads
        first = Stepper(model, spec, total_steps=total_steps, optimizer=self.optimizer)
        self._hogwild = Hogwild(first, num_threads)
        self._free: queue.SimpleQueue[Stepper] = queue.SimpleQueue()
        for worker in self._hogwild.workers:
            self._free.put(worker)
        self._pool = ThreadPoolExecutor(num_threads, "hogwild", initializer=torch.set_num_threads, initargs=(1,))

    def start(self, batch: Batch, number: int) -> Callable[[], float]:
        """Start a step in a thread; the returned function waits for its loss, and raises if that is not finite."""
        future = self._pool.submit(self._run_in_thread, batch, number)

        def wait() -> float:
            with self.timers.phase(Phase.HOGWILD):
                return future.result()

        return wait

    def _run_in_thread(self, batch: Batch, number: int) -> float:
        worker = self._free.get()
        worker.lr_scale = self.lr_scale
        try:
            return worker.step(batch, number)
        finally:
            self._free.put(worker)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        super().load_state(tensors)
        self._hogwild.share()


def replicate_model(model: DLRM, store: EmbeddingStore) -> DLRM:
    """A copy of the model with its own network, over `store`."""
    other = copy.copy(model)
    other._modules = dict(model._modules)
    other.__dict__.pop("store", None)
    other._modules.pop("store", None)
    other.store = store
    other.net = copy.deepcopy(model.net)
    return other
