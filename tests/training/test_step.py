"""One training step: losses, weights, clipping, precision, and losses that are not finite."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rowstead.data.batch import Batch, Sparse
from rowstead.kernels.layout import layout_of
from rowstead.nn.dlrm import DLRM
from rowstead.nn.heads import head_of
from rowstead.spec.errors import CheckpointError, TrainingError
from rowstead.spec.features import DenseFeatureSpec, FeaturesSpec, SparseFeatureSpec, tables_of
from rowstead.spec.interactions import InteractionSpec
from rowstead.spec.model import ModelSpec
from rowstead.spec.row_optimizers import ROW_OPTIMIZERS, SparseOptimizerSpec
from rowstead.spec.train import DenseOptimizerSpec, ScheduleSpec, TrainSpec
from rowstead.stores.device import DeviceStore
from rowstead.training.step import Stepper

WIDTH, NUM_DENSE, NUM_SPARSE, NUM_ROWS = 4, 3, 2, 20
PLAIN = TrainSpec(
    sparse_optimizer=SparseOptimizerSpec(kind="sgd", lr=0.1), dense_optimizer=DenseOptimizerSpec(kind="sgd", lr=0.1)
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """So small a model is only slower with more, much so where other tests run beside it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def stepper_of(
    spec: TrainSpec = PLAIN, *, num_dense: int = NUM_DENSE, num_sparse: int = NUM_SPARSE, kind: str = "dot"
) -> Stepper:
    features = FeaturesSpec(
        dense=tuple(DenseFeatureSpec(name=f"d{i}") for i in range(num_dense)),
        sparse=tuple(SparseFeatureSpec(name=f"s{i}", num_rows=NUM_ROWS) for i in range(num_sparse)),
    )
    model = ModelSpec(width=WIDTH, bottom=(8,), top=(8,), interaction=InteractionSpec(kind=kind, cross_rank=4))  # type: ignore[arg-type]
    torch.manual_seed(1)
    optimizer = spec.sparse_optimizer
    store = DeviceStore(layout_of(features, tables_of(features, width=WIDTH)), optimizer, seed=1)
    return Stepper(DLRM(model, features, store), spec, total_steps=100)


def batch_of(
    num_samples: int = 16, *, seed: int = 0, num_dense: int = NUM_DENSE, num_sparse: int = NUM_SPARSE, **more: Tensor
) -> Batch:
    """Examples with one id per feature, whose label follows from the first dense value or id."""
    g = torch.Generator().manual_seed(seed)
    dense = torch.randn(num_samples, num_dense, generator=g)
    ids = torch.randint(0, NUM_ROWS, (num_sparse * num_samples,), generator=g)
    signal = dense[:, 0] > 0 if num_dense else ids[:num_samples] % 2 == 0
    sparse = Sparse(ids=ids, offsets=torch.arange(num_sparse * num_samples + 1), num_features=num_sparse)
    return Batch(dense=dense, sparse=sparse, labels=signal.float(), **more)


def select(batch: Batch, indices: list[int]) -> Batch:
    """Some examples of a batch with one id per feature."""
    index = torch.tensor(indices)
    ids = batch.sparse.ids.view(batch.sparse.num_features, -1)[:, index].reshape(-1)
    sparse = dataclasses.replace(batch.sparse, ids=ids, offsets=torch.arange(len(ids) + 1))
    assert batch.labels is not None
    return Batch(dense=batch.dense[index], sparse=sparse, labels=batch.labels[index])


def weights_of(stepper: Stepper) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in stepper.state().items()}


def test_loss_is_the_mean_over_examples_by_weight() -> None:
    logits, labels = torch.tensor([0.0, 2.0, -1.0]), torch.tensor([1.0, 0.0, 0.25])
    p = torch.sigmoid(logits)
    bce = -(labels * p.log() + (1 - labels) * (1 - p).log())
    weights = torch.tensor([1.0, 0.0, 3.0])
    assert head_of("bce").loss(logits, labels, None).item() == pytest.approx(bce.mean().item())
    assert head_of("bce").loss(logits, labels, weights).item() == pytest.approx(((bce[0] + 3 * bce[2]) / 4).item())
    assert head_of("mse").loss(logits, labels, None).item() == pytest.approx(((p - labels) ** 2).mean().item())
    assert head_of("bce").loss(logits, labels, torch.zeros(3)).item() == 0


@pytest.mark.parametrize("loss", ["bce", "mse"])
def test_an_example_of_weight_two_is_the_same_as_the_example_twice(loss: str) -> None:
    spec = dataclasses.replace(PLAIN, loss=loss)
    batch = batch_of(3)
    weighted, repeated = stepper_of(spec), stepper_of(spec)
    one = weighted.step(dataclasses.replace(batch, weights=torch.tensor([2.0, 1.0, 1.0])), 1)
    two = repeated.step(select(batch, [0, 0, 1, 2]), 1)
    assert one == pytest.approx(two, rel=1e-6)
    for name, value in weights_of(weighted).items():
        torch.testing.assert_close(value, weights_of(repeated)[name], rtol=1e-5, atol=1e-7)


def test_an_example_of_weight_zero_changes_nothing() -> None:
    batch = batch_of(4)
    weighted, without = stepper_of(), stepper_of()
    weighted.step(dataclasses.replace(batch, weights=torch.tensor([1.0, 1.0, 1.0, 0.0])), 1)
    without.step(select(batch, [0, 1, 2]), 1)
    for name, value in weights_of(weighted).items():
        torch.testing.assert_close(value, weights_of(without)[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("loss", ["bce", "mse"])
def test_training_lowers_the_loss(loss: str) -> None:
    stepper = stepper_of(dataclasses.replace(PLAIN, loss=loss))
    losses = [stepper.step(batch_of(64), step) for step in range(1, 101)]
    assert losses[-1] < 0.7 * losses[0]


def test_dense_gradients_are_scaled_down_to_the_largest_global_norm() -> None:
    batch, clip = batch_of(), 0.01
    before = weights_of(stepper_of())

    def moved(spec: TrainSpec) -> Tensor:
        stepper = stepper_of(spec)
        stepper.step(batch, 1)
        after = weights_of(stepper)
        return torch.cat([(after[name] - before[name]).flatten() for name in before if name.startswith("net.")])

    free = moved(PLAIN)
    clipped = moved(dataclasses.replace(PLAIN, dense_optimizer=dataclasses.replace(PLAIN.dense_optimizer, clip=clip)))
    assert free.norm() > 2 * clip * 0.1
    assert clipped.norm().item() == pytest.approx(clip * 0.1, rel=1e-3)
    torch.testing.assert_close(clipped / clipped.norm(), free / free.norm(), rtol=1e-2, atol=1e-4)


def test_a_pooled_gradient_is_scaled_down_to_the_largest_norm() -> None:
    clip = 1e-3
    batch = select(batch_of(), [0])
    before = weights_of(stepper_of())
    spec = dataclasses.replace(PLAIN, sparse_optimizer=dataclasses.replace(PLAIN.sparse_optimizer, clip=clip))
    stepper = stepper_of(spec)
    stepper.step(batch, 1)
    after = weights_of(stepper)
    for table in ("s0", "s1"):
        moved = (after[f"store.{table}.rows"] - before[f"store.{table}.rows"]).norm(dim=1)
        assert moved.max().item() == pytest.approx(clip * 0.1, rel=1e-2)
        assert (moved > 0).sum() == 1


def test_a_clip_that_nothing_reaches_changes_nothing() -> None:
    spec = TrainSpec(
        sparse_optimizer=dataclasses.replace(PLAIN.sparse_optimizer, clip=1e6),
        dense_optimizer=dataclasses.replace(PLAIN.dense_optimizer, clip=1e6),
    )
    clipped, free = stepper_of(spec), stepper_of()
    for stepper in (clipped, free):
        stepper.step(batch_of(), 1)
    for name, value in weights_of(clipped).items():
        torch.testing.assert_close(value, weights_of(free)[name])


def test_warm_up_makes_the_first_step_smaller_for_rows_and_for_dense_parameters() -> None:
    batch = batch_of()
    before = weights_of(stepper_of())
    full, warming = stepper_of(), stepper_of(dataclasses.replace(PLAIN, schedule=ScheduleSpec(warmup_steps=4)))
    full.step(batch, 1)
    warming.step(batch, 1)
    for name in before:
        step = weights_of(full)[name] - before[name]
        torch.testing.assert_close(weights_of(warming)[name] - before[name], step / 4, rtol=1e-3, atol=1e-6)


def test_bf16_trains_to_about_the_loss_of_fp32_and_keeps_parameters_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)  # else it is FP32
    spec = TrainSpec(sparse_optimizer=SparseOptimizerSpec(lr=0.1), dense_optimizer=DenseOptimizerSpec(kind="adam", lr=0.03))
    losses: dict[str, float] = {}
    for precision in ("fp32", "bf16"):
        stepper = stepper_of(dataclasses.replace(spec, precision=precision))
        recent = [stepper.step(batch_of(64, seed=step), step) for step in range(1, 81)][-20:]
        losses[precision] = sum(recent) / len(recent)
        assert all(value.dtype in (torch.float32, torch.int64) for value in stepper.state().values())
    assert losses["fp32"] < 0.3
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.1, abs=0.01)
    assert losses["bf16"] != losses["fp32"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_names_the_step_and_changes_nothing(bad: float) -> None:
    spec = TrainSpec(sparse_optimizer=SparseOptimizerSpec(kind="adam"), dense_optimizer=DenseOptimizerSpec(kind="adam"))
    stepper = stepper_of(spec)
    stepper.step(batch_of(), 1)
    before = weights_of(stepper)
    batch = batch_of(seed=2)
    batch.dense[3, 1] = bad
    with pytest.raises(TrainingError, match="at step 7, which updated no parameters") as caught:
        stepper.step(batch, 7)
    assert "train.dense_optimizer.lr" in str(caught.value)
    after = weights_of(stepper)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    stepper.step(batch_of(seed=2), 7)


@pytest.mark.parametrize("kind", ["dot", "concat", "cross"])
@pytest.mark.parametrize(("num_dense", "num_sparse"), [(0, 2), (3, 0)])
def test_a_model_trains_without_dense_or_without_sparse_features(kind: str, num_dense: int, num_sparse: int) -> None:
    shape: dict[str, Any] = {"num_dense": num_dense, "num_sparse": num_sparse}
    spec = dataclasses.replace(PLAIN, sparse_optimizer=SparseOptimizerSpec(lr=0.3), dense_optimizer=DenseOptimizerSpec(lr=0.1))
    stepper = stepper_of(spec, **shape, kind=kind)
    losses = [stepper.step(batch_of(64, **shape), step) for step in range(1, 101)]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("sparse", list(ROW_OPTIMIZERS))
@pytest.mark.parametrize("dense", ["sgd", "adagrad", "adam"])
def test_after_loading_its_state_a_stepper_continues_bit_for_bit(sparse: str, dense: str) -> None:
    spec = TrainSpec(sparse_optimizer=SparseOptimizerSpec(kind=sparse), dense_optimizer=DenseOptimizerSpec(kind=dense))  # type: ignore[arg-type]
    straight, resumed = stepper_of(spec), stepper_of(spec)
    for step in range(1, 4):
        straight.step(batch_of(seed=step), step)
    resumed.load_state(weights_of(straight))
    for step in range(4, 7):
        assert straight.step(batch_of(seed=step), step) == resumed.step(batch_of(seed=step), step)
    after = weights_of(resumed)
    assert all(torch.equal(value, after[name]) for name, value in weights_of(straight).items())


def test_the_state_of_another_model_is_refused_and_named() -> None:
    with pytest.raises(CheckpointError, match=r"`.*weight` has shape .* in the model and .* in the checkpoint"):
        stepper_of().load_state(weights_of(stepper_of(num_dense=5)))
    state = weights_of(stepper_of())
    del state["store.s0.rows"]
    with pytest.raises(CheckpointError, match=r"no `s0\.rows`"):
        stepper_of().load_state(state)
