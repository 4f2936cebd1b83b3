"""Trainers that start late, leave, or lose the dense server: training continues, and the model includes all of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rowstead.fleet.dense_server_state import DenseServerState, LocalDenseServer
from rowstead.spec.sync import SyncSpec
from rowstead.training.flat_parameters import Replica
from rowstead.training.sync import OPTIMIZER, SAVE_STATE_EVERY, Easgd, PublishParameters, build_policies
from rowstead.training.sync_base import DenseServerUnavailable
from tests.training.bowls import Bowl, Trainer, together


def test_a_late_trainer_loads_the_shared_parameters() -> None:
    state = DenseServerState()
    first = Trainer(Easgd(LocalDenseServer(state, "trainer-0"), alpha=0.5, period=1), target=[4.0])
    for _ in range(5):
        first.step()
    later = Trainer(Easgd(LocalDenseServer(state, "trainer-1"), alpha=0.5, period=1), target=[4.0], start=[100.0])
    assert later.x == state.pull().tolist() != [100.0]


def test_adam_state_carries_over_to_another_trainer() -> None:
    modules = [Bowl([1.0], [0.0]), Bowl([1.0], [0.0])]
    adam = [torch.optim.Adam(module.parameters(), lr=0.1) for module in modules]
    for _ in range(3):
        adam[0].zero_grad()
        modules[0]().backward()  # type: ignore[no-untyped-call]
        adam[0].step()
    server = LocalDenseServer(DenseServerState(), "trainer-0")
    PublishParameters(server, period=1).begin(Replica(modules[0], adam[0]))
    server.save_state(OPTIMIZER, Replica(modules[0], adam[0]).optimizer_state())
    PublishParameters(server, period=1).begin(Replica(modules[1], adam[1]))
    for module, optimizer in zip(modules, adam, strict=True):
        optimizer.zero_grad()
        module().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert modules[0].x.item() == modules[1].x.item()


class Flaky(LocalDenseServer):
    """A dense server that can be unavailable."""

    is_unavailable = False

    def elastic_average(self, local: Tensor, alpha: float) -> Tensor:
        if self.is_unavailable:
            raise DenseServerUnavailable("gone")
        return super().elastic_average(local, alpha)

    def join(self, parameters: Tensor) -> Tensor:
        if self.is_unavailable:
            raise DenseServerUnavailable("gone")
        return super().join(parameters)


def test_a_trainer_continues_while_the_server_is_unavailable_and_reconnects() -> None:
    state = DenseServerState()
    server = Flaky(state, "trainer-0")
    policy = Easgd(server, alpha=0.5, period=1)
    trainer = Trainer(policy, target=[8.0])
    trainer.step()
    server.is_unavailable = True
    before = trainer.x[0]
    trainer.step()
    assert trainer.x == [before - 0.5 * (before - 8.0)], "a plain step"
    assert policy.num_missed == 1
    server.is_unavailable = False
    trainer.step()
    assert policy.num_exchanges == 2
    assert state.pull().item() != 0.0


def test_a_trainer_that_could_not_join_joins_when_it_can() -> None:
    state = DenseServerState()
    state.push(torch.tensor([7.0], dtype=torch.float64))
    server = Flaky(state, "trainer-0")
    server.is_unavailable = True
    trainer = Trainer(Easgd(server, alpha=0.5, period=1), target=[7.0], start=[100.0])
    assert trainer.x == [100.0]
    server.is_unavailable = False
    trainer.step()
    assert abs(trainer.x[0]) < 50, "it has loaded the shared parameters before sending its own"
    assert state.pull().tolist() == [7.0]


def test_the_model_is_the_mean_of_the_final_parameters() -> None:
    state = DenseServerState()
    trainers = [
        Trainer(Easgd(LocalDenseServer(state, f"trainer-{i}"), alpha=0.1, period=3), target=[t])
        for i, t in enumerate((4.0, 1.0, 7.0))
    ]
    for trainer in trainers:
        for _ in range(5):
            trainer.step()
    for trainer in trainers[:2]:
        trainer.policy.close()
    assert state.pull().item() == pytest.approx((trainers[0].x[0] + trainers[1].x[0]) / 2, abs=1e-15)
    again = Trainer(Easgd(LocalDenseServer(state, "trainer-1"), alpha=0.1, period=3), target=[1.0])  # restarted
    again.policy.close()
    trainers[2].policy.close()
    assert state.pull().item() == pytest.approx((trainers[0].x[0] + again.x[0] + trainers[2].x[0]) / 3, abs=1e-15)


def test_one_trainer_publishes_its_parameters_whatever_the_step_numbers_of_its_threads() -> None:
    state = DenseServerState()
    spec = SyncSpec(period=1)
    policy, _ = build_policies(spec, lambda _: LocalDenseServer(state, "trainer-0.0"), num_trainers=1, num_threads=2)
    trainer = Trainer(policy, target=[1.0])
    for step in range(1, 2 * SAVE_STATE_EVERY, 2):  # the other thread has the even steps
        policy.after_step(step)
        if step < SAVE_STATE_EVERY:
            trainer.bowl.x.data.fill_(float(step))
    assert isinstance(policy, PublishParameters)
    assert policy.num_exchanges == 2
    assert state.pull().tolist() == [SAVE_STATE_EVERY - 1]


def test_one_trainer_publishes_its_exact_parameters() -> None:
    state = DenseServerState()
    (policy,) = build_policies(SyncSpec(), lambda _: LocalDenseServer(state, "trainer-0"), num_trainers=1)
    trainer = Trainer(policy, target=[0.7, 0.1], start=[0.0, 0.0], lr=0.3)
    for _ in range(7):
        trainer.step()
    policy.close()
    assert state.pull().tolist() == trainer.x


@pytest.mark.parametrize(
    "spec",
    [
        SyncSpec(mode="allreduce"),
        SyncSpec(mode="shadow", rule="average", period=1),
        SyncSpec(mode="shadow", rule="bmuf", period=1),
    ],
    ids=["allreduce", "average", "bmuf"],
)
def test_rounds_do_not_wait_for_a_paused_trainer(spec: SyncSpec) -> None:
    state = DenseServerState(deadline_s=600.0)
    policies = [
        build_policies(spec, lambda _, i=i: LocalDenseServer(state, f"trainer-{i}.0"), num_trainers=2)[0] for i in range(2)
    ]  # type: ignore[misc]
    busy, idle = (Trainer(policy, target=[1.0], lr=0.1) for policy in policies)
    together(busy.step, idle.step)
    policies[1].pause()

    def go_on() -> None:
        for _ in range(5):
            busy.step()
        policies[0].close()

    together(go_on)  # a round of one, without waiting for the deadline
    before = state.num_rounds
    together(idle.step)
    policies[1].close()
    assert state.num_partial_rounds == 0
    assert spec.mode != "allreduce" or state.num_rounds == before + 1, "it is a member again, in a round of one"
