"""Fifty steps of our DLRM and of a plain, independent one in torch give the same losses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rowstead.data.batch import Batch, Sparse
from rowstead.kernels.layout import layout_of
from rowstead.nn.dlrm import DLRM
from rowstead.spec.features import DenseFeatureSpec, FeaturesSpec, SparseFeatureSpec, TableSpec, tables_of
from rowstead.spec.interactions import InteractionSpec
from rowstead.spec.model import ModelSpec
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.spec.train import DenseOptimizerSpec, TrainSpec
from rowstead.stores.device import DeviceStore
from rowstead.training.step import Stepper

WIDTH = 8
NUM_SAMPLES = 32
FEATURES = FeaturesSpec(
    dense=(DenseFeatureSpec(name="d{i}", repeat=5),),
    sparse=(
        SparseFeatureSpec(name="one", num_rows=40),
        SparseFeatureSpec(name="many", num_rows=60, pooling="mean"),
        SparseFeatureSpec(name="left", table="shared"),
        SparseFeatureSpec(name="right", table="shared"),
    ),
    tables=(TableSpec(name="shared", num_rows=30),),
)


class PlainDLRM(nn.Module):
    """A DLRM written independently, from the paper, over nn.EmbeddingBag."""

    def __init__(self, interaction: InteractionSpec, sparse: bool, model: ModelSpec | None = None) -> None:
        super().__init__()
        model = model or ModelSpec()
        self.bags = nn.ModuleList(
            [
                nn.EmbeddingBag(40, WIDTH, mode="sum", sparse=sparse, include_last_offset=True),
                nn.EmbeddingBag(60, WIDTH, mode="mean", sparse=sparse, include_last_offset=True),
                nn.EmbeddingBag(30, WIDTH, mode="sum", sparse=sparse, include_last_offset=True),
            ]
        )
        self.interaction, count = interaction, interaction.num_dense_vectors
        hidden = hidden_layer(5, 16, model.bottom_norm, model.bottom_dropout)
        self.bottom = nn.Sequential(*hidden, nn.Linear(16, count * WIDTH), nn.ReLU())
        width = (count + 4) * WIDTH
        if interaction.kind == "dot":
            width = count * WIDTH + {"both": 4 * count + 6, "dense_sparse": 4 * count, "sparse_sparse": 6}[interaction.pairs]
        if interaction.kind == "cross":
            self.v = nn.ModuleList(nn.Linear(width, 6, bias=False) for _ in range(2))
            self.w = nn.ModuleList(nn.Linear(6, width) for _ in range(2))
        self.top = nn.Sequential(*hidden_layer(width, 12, model.top_norm, model.top_dropout), nn.Linear(12, 1))

    def forward(self, dense: torch.Tensor, per_feature: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        projected = self.bottom(dense)
        vectors = [self.bags[bag](*per_feature[f]) for f, bag in enumerate((0, 1, 2, 2))]
        if self.interaction.kind == "dot":
            of_dense = projected.split(WIDTH, dim=1) if self.interaction.pairs != "sparse_sparse" else ()
            of_sparse = vectors if self.interaction.pairs != "dense_sparse" else []
            partners = [[*of_dense, *of_sparse[:i]] for i in range(4)]
            products = [(vectors[i] * other).sum(1, keepdim=True) for i in range(4) for other in partners[i]]
            x = torch.cat([projected, *products], dim=1)
        else:
            x = torch.cat([projected, *vectors], dim=1)
        if self.interaction.kind == "cross":
            x0 = x
            for v, w in zip(self.v, self.w, strict=True):
                x = x0 * w(v(x)) + x
        return self.top(x)[:, 0]


def hidden_layer(in_width: int, width: int, norm: str, dropout: float) -> list[nn.Module]:
    norms = {"none": [], "batch": [nn.BatchNorm1d(width)], "layer": [nn.LayerNorm(width)]}
    return [nn.Linear(in_width, width), *norms[norm], nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]


class RowwiseAdagrad:
    """Row-wise Adagrad over dense gradients, by its definition."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, eps: float) -> None:
        self.parameters, self.lr, self.eps = parameters, lr, eps
        self.sums = [torch.zeros(p.shape[0]) for p in parameters]

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for p, total in zip(self.parameters, self.sums, strict=True):
            assert p.grad is not None
            total += p.grad.pow(2).mean(1)
            p -= self.lr * p.grad / (total.sqrt() + self.eps)[:, None]


def random_batch(rng: np.random.Generator) -> tuple[Batch, list[tuple[torch.Tensor, torch.Tensor]]]:
    rows = (40, 60, 30, 30)
    lengths = [rng.integers(1, 2, NUM_SAMPLES), *(rng.integers(0, 6, NUM_SAMPLES) for _ in range(3))]
    ids = [rng.integers(0, r, n.sum()) for r, n in zip(rows, lengths, strict=True)]
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    sparse = Sparse(ids=torch.from_numpy(np.concatenate(ids)), offsets=torch.from_numpy(offsets), num_features=4)
    per_feature = [
        (torch.from_numpy(i), torch.from_numpy(np.concatenate([[0], np.cumsum(n)]))) for i, n in zip(ids, lengths, strict=True)
    ]
    dense = torch.from_numpy(rng.normal(size=(NUM_SAMPLES, 5)).astype(np.float32))
    labels = torch.from_numpy(rng.integers(0, 2, NUM_SAMPLES).astype(np.float32))
    return Batch(dense=dense, sparse=sparse, labels=labels), per_feature


def row_optimizer(kind: str, parameters: list[nn.Parameter], lr: float) -> object:
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=lr)
    if kind == "adagrad":
        return torch.optim.Adagrad(parameters, lr=lr, eps=1e-8)
    if kind == "adam":
        return torch.optim.SparseAdam(parameters, lr=lr)
    return RowwiseAdagrad(parameters, lr, 1e-8)


@pytest.mark.parametrize("interaction", ["concat", "dot", "cross"])
@pytest.mark.parametrize("dense_kind", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("sparse_kind", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_fifty_steps_give_the_losses_of_plain_torch(interaction: str, dense_kind: str, sparse_kind: str) -> None:
    check_fifty_steps(InteractionSpec(kind=interaction, cross_layers=2, cross_rank=6), dense_kind, sparse_kind)


@pytest.mark.parametrize("kind", ["concat", "dot", "cross"])
@pytest.mark.parametrize("pairs", ["both", "dense_sparse", "sparse_sparse"])
def test_fifty_steps_with_three_dense_vectors_give_the_losses_of_plain_torch(kind: str, pairs: str) -> None:
    interaction = InteractionSpec(kind=kind, num_dense_vectors=3, pairs=pairs, cross_layers=2, cross_rank=6)
    check_fifty_steps(interaction, "adam", "rowwise_adagrad")


@pytest.mark.parametrize(
    ("bottom_norm", "top_norm", "bottom_dropout", "top_dropout"),
    [("batch", "batch", 0.0, 0.0), ("layer", "layer", 0.0, 0.0), ("none", "none", 0.4, 0.2), ("layer", "batch", 0.2, 0.4)],
)
def test_fifty_steps_with_norms_and_dropout_give_the_losses_of_plain_torch(
    bottom_norm: str, top_norm: str, bottom_dropout: float, top_dropout: float
) -> None:
    options = {"bottom_norm": bottom_norm, "top_norm": top_norm, "bottom_dropout": bottom_dropout, "top_dropout": top_dropout}
    check_fifty_steps(InteractionSpec(), "adam", "rowwise_adagrad", model=options)


@pytest.mark.parametrize("sparse_kind", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("rows", [{"l2": 0.1}, {"weight_decay": 0.5}, {"l2": 0.1, "weight_decay": 0.5}])
def test_fifty_steps_with_decays_of_rows_give_the_losses_of_plain_torch(sparse_kind: str, rows: dict[str, float]) -> None:
    check_fifty_steps(InteractionSpec(), "adam", sparse_kind, rows=rows)


@pytest.mark.parametrize("dense_kind", ["sgd", "adam", "adamw"])
def test_fifty_steps_with_weight_decay_and_smooth_labels_give_the_losses_of_plain_torch(dense_kind: str) -> None:
    check_fifty_steps(InteractionSpec(), dense_kind, "adagrad", weight_decay=0.1, label_smoothing=0.2)


def check_fifty_steps(
    interaction: InteractionSpec,
    dense_kind: str,
    sparse_kind: str,
    *,
    model: dict[str, Any] | None = None,
    rows: dict[str, float] | None = None,
    weight_decay: float = 0.0,
    label_smoothing: float = 0.0,
) -> None:
    torch.manual_seed(7)
    tables = tables_of(FEATURES, width=WIDTH)
    spec = ModelSpec(width=WIDTH, bottom=(16,), top=(12,), interaction=interaction, **(model or {}))
    train = TrainSpec(
        sparse_optimizer=SparseOptimizerSpec(kind=sparse_kind, lr=0.02, **(rows or {})),
        dense_optimizer=DenseOptimizerSpec(kind=dense_kind, lr=0.01, weight_decay=weight_decay),
        label_smoothing=label_smoothing,
    )
    decay = train.sparse_optimizer
    store = DeviceStore(layout_of(FEATURES, tables), train.sparse_optimizer)
    ours = Stepper(DLRM(spec, FEATURES, store), train, total_steps=50)
    plain = PlainDLRM(interaction, sparse=sparse_kind == "adam", model=spec)
    copy_weights(ours.model, plain)
    of_rows = list(plain.bags.parameters())
    others = [p for name, p in plain.named_parameters() if not name.startswith("bags")]
    optimizers = [
        row_optimizer(sparse_kind, of_rows, 0.02),
        {
            "sgd": lambda: torch.optim.SGD(others, lr=0.01, weight_decay=weight_decay),
            "adagrad": lambda: torch.optim.Adagrad(others, lr=0.01, eps=1e-8, weight_decay=weight_decay),
            "adam": lambda: torch.optim.Adam(others, lr=0.01, weight_decay=weight_decay),
            "adamw": lambda: torch.optim.AdamW(others, lr=0.01, weight_decay=weight_decay),
        }[dense_kind](),
    ]
    rng = np.random.default_rng(3)
    for number in range(1, 51):
        batch, per_feature = random_batch(rng)
        ours.model.net.seed_step(number)  # both draw the same dropout
        labels = (1 - label_smoothing) * batch.labels + label_smoothing / 2
        loss = nn.functional.binary_cross_entropy_with_logits(plain(batch.dense, per_feature), labels)
        for optimizer in optimizers:
            optimizer.zero_grad()
        read = [torch.cat([per_feature[f][0] for f in features]).unique() for features in ((0,), (1,), (2, 3))]
        before = [bag.weight[ids] for bag, ids in zip(plain.bags, read, strict=True)]
        penalty = decay.l2 / 2 * sum(rows.square().sum() for rows in before)
        (loss + penalty if decay.l2 else loss).backward()
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for bag, ids, rows_before in zip(plain.bags, read, before, strict=True):
                bag.weight[ids] -= 0.02 * decay.weight_decay * rows_before
        assert ours.step(batch, number) == pytest.approx(loss.item(), abs=1e-5), f"step {number}"


@torch.no_grad()
def copy_weights(ours: DLRM, plain: PlainDLRM) -> None:
    for bag, rows in zip(plain.bags, ours.store.weights, strict=True):
        bag.weight.copy_(rows)
    plain.bottom.load_state_dict(ours.net.bottom.state_dict())
    plain.top.load_state_dict(ours.net.top.state_dict())
    if plain.interaction.kind == "cross":
        plain.v.load_state_dict(ours.net.interaction.down.state_dict())
        plain.w.load_state_dict(ours.net.interaction.up.state_dict())
