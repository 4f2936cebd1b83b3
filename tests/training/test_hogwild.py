"""Threads that share one model: what each writes all see at once, and a gradient may be older than what it is applied to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rowstead.data.batch import Batch, Sparse
from rowstead.fleet.dense_server_state import DenseServerState, LocalDenseServer
from rowstead.kernels.layout import layout_of
from rowstead.nn.dlrm import DLRM
from rowstead.run import resume, train
from rowstead.spec.errors import RowsteadError
from rowstead.spec.features import DenseFeatureSpec, FeaturesSpec, SparseFeatureSpec, tables_of
from rowstead.spec.model import ModelSpec
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.spec.sync import SyncSpec
from rowstead.spec.train import DenseOptimizerSpec, TrainSpec
from rowstead.stores.device import DeviceStore
from rowstead.training.flat_parameters import Replica, flatten_parameters
from rowstead.training.hogwild import Hogwild, HogwildStepper
from rowstead.training.step import Stepper
from rowstead.training.sync import build_policies
from rowstead.training.sync_base import SyncPolicy
from tests.small_runs import small_spec

FEATURES = FeaturesSpec(
    dense=tuple(DenseFeatureSpec(name=f"d{i}") for i in range(3)),
    sparse=tuple(SparseFeatureSpec(name=f"s{i}", num_rows=20) for i in range(2)),
)
LR = 0.1


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def stepper_of(kind: str = "sgd") -> Stepper:
    """A small model in FP64, always with the same weights."""
    spec = TrainSpec(
        sparse_optimizer=SparseOptimizerSpec(kind="sgd", lr=LR),
        dense_optimizer=DenseOptimizerSpec(kind=kind, lr=LR),  # type: ignore[arg-type]
    )
    torch.manual_seed(1)
    layout = layout_of(FEATURES, tables_of(FEATURES, width=4))
    store = DeviceStore(layout, spec.sparse_optimizer, seed=1, dtype=torch.float64)
    model = DLRM(ModelSpec(width=4, bottom=(8,), top=(8,)), FEATURES, store).double()
    return Stepper(model, spec, total_steps=100)


def batch_of(seed: int, num_samples: int = 16) -> Batch:
    g = torch.Generator().manual_seed(seed)
    dense = torch.randn(num_samples, 3, generator=g, dtype=torch.float64)
    ids = torch.randint(0, 20, (2 * num_samples,), generator=g)
    sparse = Sparse(ids=ids, offsets=torch.arange(2 * num_samples + 1), num_features=2)
    return Batch(dense=dense, sparse=sparse, labels=(dense[:, 0] > 0).double())


def state_of(stepper: Stepper) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in stepper.state().items()}


def change(stepper: Stepper, batch: Batch) -> dict[str, Tensor]:
    """What a step on a batch adds to each tensor, from where the stepper stands; it is left there."""
    before = state_of(stepper)
    stepper.step(batch, 1)
    after = state_of(stepper)
    stepper.load_state(before)
    return {name: after[name] - before[name] for name in before}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam"])
def test_steps_taken_one_after_the_other_are_those_of_one_trainer(kind: str) -> None:
    single, hogwild = stepper_of(kind), Hogwild(stepper_of(kind), 3)
    for number in range(1, 13):
        single.step(batch_of(number), number)
        hogwild.workers[number % 3].step(batch_of(number), number)
    assert_same(state_of(single), state_of(hogwild.workers[0]))
    assert_same(state_of(single), state_of(hogwild.workers[2]))


class Meanwhile(SyncPolicy):
    """Lets something happen between the gradients of a step and its update."""

    def __init__(self, call: object) -> None:
        self._call = call

    def begin(self, replica: Replica) -> None:
        """Nothing to load."""

    def gradients_ready(self, step: int) -> None:
        self._call()  # type: ignore[operator]


def test_a_gradient_is_applied_to_the_parameters_as_other_threads_have_changed_them() -> None:
    """x <- x - lr g1(x0) - lr g2(x0): both gradients were taken before either was applied."""
    one, two = batch_of(1), batch_of(2)
    plain = stepper_of()
    start, by_one, by_two = state_of(plain), change(plain, one), change(plain, two)
    hogwild = Hogwild(stepper_of(), 2)
    order: list[str] = []

    def second() -> None:
        order.append("second")
        hogwild.workers[1].step(two, 1)

    hogwild.workers[0].set_sync_policy(Meanwhile(second))
    hogwild.workers[0].step(one, 1)
    assert order == ["second"]
    found = state_of(hogwild.workers[0])
    assert_same(found, {name: start[name] + by_one[name] + by_two[name] for name in start})


def test_autograd_does_not_mind_that_others_change_what_it_remembers() -> None:
    hogwild = Hogwild(stepper_of("adagrad"), 2)
    first, second = hogwild.workers
    before = state_of(first)

    def meanwhile(*_: object) -> None:
        second.step(batch_of(2), 1)

    handle = first.model.net.register_forward_hook(meanwhile)  # between the forward and the backward pass of the first
    first.step(batch_of(1), 1)
    handle.remove()
    assert all(not torch.equal(before[name], value) for name, value in state_of(first).items() if name.startswith("net."))


def test_threads_with_a_sync_policy_still_share_their_memory() -> None:
    state, hogwild = DenseServerState(), Hogwild(stepper_of("adam"), 2)
    spec = SyncSpec(mode="easgd", period=1, alpha=0.5)
    policies = build_policies(spec, lambda i: LocalDenseServer(state, f"trainer-0.{i}"), num_trainers=2, num_threads=2)
    for worker, policy in zip(hogwild.workers, policies, strict=True):
        worker.set_sync_policy(policy)
    for number in range(1, 7):
        hogwild.workers[number % 2].step(batch_of(number), number)
    one, two = (worker.model.net for worker in hogwild.workers)
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert state.num_exchanges == 6, "every thread exchanges by its own count"
    for policy in policies:
        policy.close()
    assert torch.equal(state.pull(), flatten_parameters(one))


def test_threads_learn_together() -> None:
    hogwild = Hogwild(stepper_of("adagrad"), 2)
    batches = [batch_of(seed, 64) for seed in range(8)]
    losses: list[list[float]] = [[], []]
    met = threading.Barrier(2)

    def work(thread: int, stepper: Stepper) -> None:
        met.wait(60)
        assert torch.get_num_threads() == 1
        for number in range(1, 61):
            losses[thread].append(stepper.step(batches[(number + thread) % 8], number))

    hogwild.run(work)
    for thread in range(2):
        assert sum(losses[thread][-8:]) < 0.5 * sum(losses[thread][:8])


def test_the_error_of_a_thread_is_raised_and_stops_the_others() -> None:
    hogwild = Hogwild(stepper_of(), 2)

    def work(thread: int, stepper: Stepper) -> None:
        if thread == 1:
            raise RowsteadError("thread 1 has had enough")
        assert hogwild.stops.wait(60)

    with pytest.raises(RowsteadError, match="had enough"):
        hogwild.run(work)


def test_a_stepper_of_threads_takes_batches_as_they_come_and_shares_what_it_loads() -> None:
    saved = stepper_of("adam")
    for number in range(1, 4):
        saved.step(batch_of(number), number)
    stepper = stepper_of("adam")
    threads = HogwildStepper(stepper.model, stepper.spec, total_steps=100, num_threads=2)
    threads.load_state(saved.state())
    for number in range(4, 10):  # one at a time, so that the path is known
        saved.step(batch_of(number), number)
        threads.start(batch_of(number), number)()
    assert_same(state_of(saved), state_of(threads))


def test_a_run_with_threads_learns_and_resumes(tmp_path: Path) -> None:
    quality = []
    for threads in (1, 2):
        spec = small_spec(f"train.sync.hogwild_threads={threads}", "train.max_steps=60", "train.checkpoint_every=30")
        found = train(spec, out=tmp_path / f"run{threads}").quality
        assert found is not None
        quality.append(found.ne)
    assert quality[0] is not None
    assert quality[1] is not None
    assert abs(quality[1] / quality[0] - 1) < 0.05
    outcome = resume(str(tmp_path / "run2")).outcome
    assert outcome.position.step == 60


def test_threads_are_refused_where_they_cannot_share_tables() -> None:
    stepper = stepper_of()
    stepper.model.store._kernel_choice = "reference"  # type: ignore[union-attr]
    with pytest.raises(RowsteadError, match="threads can share only tables in CPU memory"):
        Hogwild(stepper, 2)
