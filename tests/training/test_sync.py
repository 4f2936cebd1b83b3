"""Each policy follows its defining equations, in FP64, on problems with known solutions."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rowstead.fleet.dense_server_state import DenseServerState, LocalDenseServer
from rowstead.spec.errors import SpecError
from rowstead.spec.sync import SyncSpec
from rowstead.training.sync import AllReduce, Easgd, PublishParameters, Shadow, build_policies
from rowstead.training.sync_base import DenseServer, SyncPolicy
from tests.small_runs import wait_until
from tests.training.bowls import Trainer, together


def test_easgd_follows_the_hand_computed_path() -> None:
    state = DenseServerState()
    one, two = (
        Trainer(Easgd(LocalDenseServer(state, f"trainer-{i}"), alpha=0.5, period=1), target=[target])
        for i, target in enumerate((4.0, -4.0))
    )
    # e = (x - c) / 2; x <- x - e - (x_before - target) / 2; c <- c + e, one trainer after the other.
    expected = [(2.0, 0.0, -2.0, 0.0), (2.0, 1.0, -1.5, -0.5), (1.75, 0.75, -1.625, -0.375)]
    for x_one, c_one, x_two, c_two in expected:
        one.step()
        assert (one.x, state.pull().tolist()) == ([x_one], [c_one])
        two.step()
        assert (two.x, state.pull().tolist()) == ([x_two], [c_two])


@settings(deadline=None, max_examples=40)
@given(
    targets=st.lists(st.lists(st.floats(-3, 3), min_size=2, max_size=2), min_size=1, max_size=4),
    turns=st.lists(st.integers(0, 3), max_size=40),
    alpha=st.floats(0.01, 1.0),
    period=st.integers(1, 5),
)
def test_easgd_is_algorithm_1_of_its_paper_in_any_order(
    targets: list[list[float]], turns: list[int], alpha: float, period: int
) -> None:
    state, lr, start = DenseServerState(), 0.3, [0.5, -0.25]
    policies = [Easgd(LocalDenseServer(state, f"trainer-{i}"), alpha=alpha, period=period) for i in range(len(targets))]
    trainers = [Trainer(p, target=t, start=start, lr=lr) for p, t in zip(policies, targets, strict=True)]
    shared = torch.tensor(start, dtype=torch.float64)
    x, clocks = [shared.clone() for _ in targets], [0] * len(targets)
    for turn in turns:
        i = turn % len(targets)
        trainers[i].step()
        before = x[i].clone()
        if clocks[i] % period == 0:
            x[i] = x[i] - alpha * (before - shared)
            shared = shared + alpha * (before - shared)
        x[i] = x[i] - lr * (before - torch.tensor(targets[i], dtype=torch.float64))
        clocks[i] += 1
        torch.testing.assert_close(trainers[i].bowl.x.detach(), x[i], rtol=0, atol=1e-12)
        torch.testing.assert_close(state.pull(), shared, rtol=0, atol=1e-12)


def test_an_easgd_shadow_moves_both_sides_by_the_same_amount() -> None:
    state = DenseServerState()
    state.push(torch.tensor([0.0], dtype=torch.float64))
    policy = Shadow(LocalDenseServer(state, "trainer-0"), rule="easgd", alpha=0.25, period=1_000_000)
    trainer = Trainer(policy, target=[8.0])
    trainer.step()  # x = 4
    policy.exchange()  # e = 1
    assert (trainer.x, state.pull().tolist()) == ([3.0], [1.0])
    policy.exchange()  # e = 0.5
    assert (trainer.x, state.pull().tolist()) == ([2.5], [1.5])
    policy.close()
    assert (trainer.x, state.pull().tolist()) == ([2.5], [2.5]), "the model is that of the only trainer"


def shadows(
    rule: str, *, alpha: float, momentum: float = 0.0, lr: float = 1.0
) -> tuple[DenseServerState, list[Trainer], list[Shadow]]:
    """Two trainers after one step each: x = 4 and -2, shared parameters 0."""
    state = DenseServerState()
    policies = [
        Shadow(LocalDenseServer(state, f"trainer-{i}"), rule=rule, alpha=alpha, period=1_000_000, momentum=momentum, lr=lr)
        for i in range(2)
    ]
    trainers = [Trainer(p, target=[t]) for p, t in zip(policies, (8.0, -4.0), strict=True)]
    for trainer in trainers:
        trainer.step()
    return state, trainers, policies


def test_an_averaging_shadow_moves_trainers_towards_their_mean() -> None:
    state, trainers, policies = shadows("average", alpha=0.5)
    together(*(policy.exchange for policy in policies))  # the mean is 1
    assert [trainer.x for trainer in trainers] == [[2.5], [-0.5]]
    assert state.pull().tolist() == [1.0]
    together(*(policy.exchange for policy in policies))
    assert [trainer.x for trainer in trainers] == [[1.75], [0.25]]
    together(*(policy.close for policy in policies))


def test_a_bmuf_shadow_moves_the_shared_parameters_with_momentum() -> None:
    state, trainers, policies = shadows("bmuf", alpha=1.0, momentum=0.5, lr=0.5)
    # d <- d / 2 + (mean - c) / 2, c <- c + d, x <- c
    together(*(policy.exchange for policy in policies))  # mean 1: d = 0.5
    assert state.pull().tolist() == [0.5]
    assert [trainer.x for trainer in trainers] == [[0.5], [0.5]]
    for trainer in trainers:
        trainer.step()  # 4.25 and -1.75, whose mean is 1.25
    together(*(policy.exchange for policy in policies))  # d = 0.25 + 0.375
    assert state.pull().tolist() == [1.125]
    assert [trainer.x for trainer in trainers] == [[1.125], [1.125]]
    together(*(policy.close for policy in policies))


def test_steps_made_during_an_exchange_are_kept() -> None:
    class Slow(LocalDenseServer):
        def elastic_average(self, local: Tensor, alpha: float) -> Tensor:
            moved = super().elastic_average(local, alpha)
            trainer.step()  # a step during the exchange
            return moved

    state = DenseServerState()
    state.push(torch.tensor([0.0], dtype=torch.float64))
    policy = Shadow(Slow(state, "trainer-0"), rule="easgd", alpha=0.5, period=1_000_000)
    trainer = Trainer(policy, target=[8.0])
    trainer.step()  # x = 4
    policy.exchange()  # e = 2, and meanwhile x = 6
    assert trainer.x == [4.0]


def test_a_shadow_exchanges_in_the_background_without_blocking() -> None:
    held = threading.Event()

    class Held(LocalDenseServer):
        def elastic_average(self, local: Tensor, alpha: float) -> Tensor:
            assert held.wait(60)
            return super().elastic_average(local, alpha)

    state = DenseServerState()
    policy = Shadow(Held(state, "trainer-0"), rule="easgd", alpha=0.5, period=2)
    trainer = Trainer(policy, target=[8.0])
    for _ in range(20):
        trainer.step()
    assert state.num_exchanges == 0, "the server has not answered after 20 steps"
    held.set()
    wait_until(lambda: policy.num_exchanges > 0, what="an exchange in the background")
    before = policy.num_exchanges
    for _ in range(2):
        trainer.step()
    wait_until(lambda: policy.num_exchanges > before, what="another, after 2 more steps")
    policy.close()


def test_every_thread_of_a_trainer_counts_for_its_shadow() -> None:
    state = DenseServerState()
    spec = SyncSpec(mode="shadow", period=4)
    first, second = build_policies(
        spec, lambda thread: LocalDenseServer(state, f"trainer-0.{thread}"), num_trainers=2, num_threads=2
    )
    trainer = Trainer(first, target=[1.0])
    second.begin(trainer.replica)
    for step in range(1, 3):
        first.after_step(step)
        second.after_step(step)
    assert isinstance(first, Shadow)
    wait_until(lambda: first.num_exchanges == 1, what="the exchange after 4 steps of both")
    second.close()
    first.close()


def test_allreduce_of_two_halves_is_one_trainer_with_the_whole() -> None:
    state, lr = DenseServerState(), 0.125
    trainers = [
        Trainer(AllReduce(LocalDenseServer(state, f"trainer-{i}")), target=[t], lr=lr) for i, t in enumerate((3.0, -1.0))
    ]
    whole = Trainer(SyncPolicy(), target=[1.0], lr=lr)  # the mean of both gradients is that of the mean target
    for _ in range(40):  # includes rounds that average the parameters
        together(*(trainer.step for trainer in trainers))
        whole.step()
    for trainer in trainers:
        assert abs(trainer.x[0] - whole.x[0]) < 1e-14
    together(*(trainer.policy.close for trainer in trainers))
    assert abs(state.pull().item() - whole.x[0]) < 1e-14


def test_trainers_with_unequal_numbers_of_steps_finish() -> None:
    state = DenseServerState()
    trainers = [Trainer(AllReduce(LocalDenseServer(state, f"trainer-{i}")), target=[1.0], lr=0.1) for i in range(3)]

    def train(trainer: Trainer, num_steps: int) -> None:
        for _ in range(num_steps):
            trainer.step()
        trainer.policy.close()

    together(*(lambda t=trainer, n=20 + 13 * i: train(t, n) for i, trainer in enumerate(trainers)))  # type: ignore[misc]
    assert state.num_partial_rounds == 0, "no round waited for its deadline"


def test_threads_average_with_the_same_threads_of_others() -> None:
    state = DenseServerState()
    for trainer in range(2):
        for thread in range(2):
            state.join(f"trainer-{trainer}.{thread}", torch.zeros(1))
    results: dict[str, Tensor] = {}

    def average(trainer: int, thread: int) -> None:
        server = LocalDenseServer(state, f"trainer-{trainer}.{thread}")
        results[f"{trainer}.{thread}"], _ = server.average(torch.tensor([float(10 * thread + trainer)]), f"gradients.{thread}")

    together(*(lambda a=a, b=b: average(a, b) for a in range(2) for b in range(2)))  # type: ignore[misc]
    assert {name: value.item() for name, value in results.items()} == {"0.0": 0.5, "1.0": 0.5, "0.1": 10.5, "1.1": 10.5}


@pytest.mark.parametrize(
    ("mode", "rule", "kind"), [("allreduce", "easgd", AllReduce), ("easgd", "easgd", Easgd), ("shadow", "bmuf", Shadow)]
)
def test_a_recipe_chooses_the_policy(mode: str, rule: str, kind: type) -> None:
    def connect(thread: int) -> DenseServer:
        return LocalDenseServer(DenseServerState(), f"trainer-0.{thread}")

    spec = SyncSpec(mode=mode, rule=rule)  # type: ignore[arg-type]
    assert isinstance(build_policies(spec, connect, num_trainers=2)[0], kind)
    assert isinstance(build_policies(spec, connect, num_trainers=1)[0], PublishParameters)


def test_several_trainers_without_synchronisation_are_refused() -> None:
    with pytest.raises(SpecError, match="`none` would give 2 trainers 2 different models"):
        SyncSpec(mode="none").mode_for(2)
    assert SyncSpec().mode_for(2) == "easgd"
    assert SyncSpec(mode="easgd").resolve(4).alpha == pytest.approx(0.225)
