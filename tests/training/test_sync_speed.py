"""By default several trainers move the shared model as far per batch as a single trainer moves its own."""

from __future__ import annotations

import dataclasses

import pytest

from rowstead.fleet.dense_server_state import DenseServerState, LocalDenseServer
from rowstead.spec.sync import SYNC_RULES, SyncSpec
from rowstead.spec.train import DenseOptimizerSpec, ScheduleSpec, TrainSpec
from rowstead.training.sync import Shadow, build_policies
from rowstead.training.sync_base import SyncPolicy
from tests.training.bowls import Trainer, together

FAR = 1e6
"""So far away that all gradients on the way are nearly the same."""
PERIOD = 4


@pytest.mark.parametrize("num_trainers", [2, 4])
@pytest.mark.parametrize(
    "sync",
    [
        SyncSpec(mode="allreduce"),
        SyncSpec(mode="easgd"),
        SyncSpec(mode="easgd", alpha=0.5, period=1),
        *(SyncSpec(mode="shadow", rule=rule) for rule in SYNC_RULES),
        SyncSpec(mode="shadow", rule="bmuf", alpha=0.5, block_momentum=0.8, block_lr=0.7),
    ],
    ids=lambda sync: f"{sync.mode} {sync.rule} {sync.alpha}",
)
def test_several_trainers_get_as_far_as_one_with_as_many_batches(sync: SyncSpec, num_trainers: int) -> None:
    if sync.mode == "shadow":
        sync = dataclasses.replace(sync, period=1_000_000)  # exchanges when this test says so
    state, sync = DenseServerState(), sync.resolve(num_trainers)
    trainers = []
    for i in range(num_trainers):
        server = LocalDenseServer(state, f"trainer-{i}")
        (policy,) = build_policies(sync, lambda _, server=server: server, num_trainers=num_trainers)  # type: ignore[misc]
        trainers.append(Trainer(policy, target=[FAR], lr=policy.dense_lr_factor(1) / FAR))

    def run(num_periods: int) -> float:
        """Train, and return how far the shared model has got."""
        for _ in range(num_periods):
            for _ in range(PERIOD):
                if sync.mode == "allreduce":
                    together(*(trainer.step for trainer in trainers))
                else:
                    for trainer in trainers:
                        trainer.step()
            if sync.mode == "shadow":
                together(*(policy.exchange for trainer in trainers if isinstance(policy := trainer.policy, Shadow)))
        return trainers[0].x[0] if sync.mode == "allreduce" else state.pull().item()

    start, end = run(60), run(20)
    together(*(trainer.policy.close for trainer in trainers))
    assert end - start == pytest.approx(20 * PERIOD * num_trainers, rel=0.01), "one trainer moves by 1 per batch"


@pytest.mark.parametrize(("kind", "factor"), [("sgd", 5.0), ("adam", 5.0), ("adagrad", 2.5)])
def test_the_factor_is_that_of_the_optimizer_and_is_applied_once(kind: str, factor: float) -> None:
    dense = DenseOptimizerSpec(kind=kind, lr=0.1)  # type: ignore[arg-type]
    train = TrainSpec(dense_optimizer=dense, sync=SyncSpec(mode="easgd")).resolve_sync(4)
    assert train.sync.dense_lr_factor == pytest.approx(factor)
    assert train.dense_optimizer.lr == 0.1, "the recipe keeps its own"
    assert train.resolve_sync(4) == train
    assert train.with_warmup(1000).dense_optimizer.lr == 0.1, "the policy multiplies it"


def test_the_factor_rises_from_one() -> None:
    def policies(sync: SyncSpec) -> list[SyncPolicy]:
        return build_policies(
            sync, lambda _: LocalDenseServer(DenseServerState(), "trainer-0"), num_trainers=4, total_steps=1000
        )

    (policy,) = policies(SyncSpec(mode="easgd", factor_warmup=0.2).resolve(4))
    assert [policy.dense_lr_factor(step) for step in (0, 100, 200, 1000)] == pytest.approx([1, 3, 5, 5])
    (old,) = policies(SyncSpec(mode="easgd"))
    assert old.dense_lr_factor(1000) == 1, "runs of before there was a factor continue without one"


def test_the_factor_is_bounded_and_a_recipe_may_set_it() -> None:
    assert SyncSpec().resolve(1).dense_lr_factor == 1
    assert SyncSpec().resolve(40).dense_lr_factor == 8
    assert SyncSpec(dense_lr_factor=30).resolve(40).dense_lr_factor == 30


@pytest.mark.parametrize(
    ("threads", "own", "total", "warmup"), [(1, 0, 1200, 0), (2, 0, 1200, 48), (20, 0, 1200, 200), (2, 300, 1200, 300)]
)
def test_threads_warm_up_together(threads: int, own: int, total: int, warmup: int) -> None:
    train = TrainSpec(sync=SyncSpec(hogwild_threads=threads), schedule=ScheduleSpec(warmup_steps=own))
    assert train.resolve_sync(1).with_warmup(total).schedule.warmup_steps == warmup
    assert train.with_warmup(total) == train, "runs of before there was a warm-up continue without one"


def test_a_recipe_may_set_the_warm_up() -> None:
    sync = SyncSpec(warmup_steps=7, hogwild_threads=4)
    assert TrainSpec(sync=sync).resolve_sync(2).with_warmup(1000).schedule.warmup_steps == 7
