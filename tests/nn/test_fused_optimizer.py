"""The fused optimizer is a torch.optim.Optimizer: schedulers set its learning rate, and its state continues training bit for bit."""

from __future__ import annotations

import copy
import importlib.util
import io
from typing import Any, get_args

import pytest
import torch

from rowstead.nn.embedding_bags import EmbeddingBags
from rowstead.nn.fused_optimizer import FusedOptimizer
from rowstead.spec.errors import CheckpointError, RowsteadError
from rowstead.spec.row_optimizers import RowOptimizerName
from tests.small_bags import TABLES, batch

NAMES = [f"embedding_bags.{table.name}.weight" for table in TABLES]


def train(bags: EmbeddingBags, seed: int, steps: int = 3) -> None:
    random = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        bags(batch(random)).values().square().sum().backward()


def assert_same_bits(one: EmbeddingBags, two: EmbeddingBags) -> None:
    for mine, other in ((one.state_dict(), two.state_dict()), (one.optimizer_state(), two.optimizer_state())):
        assert mine.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in mine.items())


def test_a_scheduler_sets_the_learning_rate_of_the_next_backward_pass() -> None:
    bags, by_hand = EmbeddingBags(TABLES, optimizer="sgd", lr=0.4), EmbeddingBags(TABLES, optimizer="sgd", lr=0.4)
    optimizer = bags.fused_optimizer()
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert bags.fused_optimizer() is optimizer
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for step in range(3):
        by_hand.lr = 0.4 * 0.5**step
        assert bags.lr == optimizer.param_groups[0]["lr"] == by_hand.lr
        for each in (bags, by_hand):
            train(each, seed=step, steps=1)
        rows = copy.deepcopy(bags.state_dict())
        optimizer.step()
        optimizer.zero_grad()
        assert all(torch.equal(value, rows[name]) for name, value in bags.state_dict().items())
        scheduler.step()
    assert_same_bits(bags, by_hand)
    bags.lr = 0.25
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_a_learning_rate_that_is_no_number_is_refused_before_any_row_changes() -> None:
    bags = EmbeddingBags(TABLES, optimizer="sgd")
    before = copy.deepcopy(bags.state_dict())
    bags.fused_optimizer().param_groups[0]["lr"] = float("nan")
    with pytest.raises(ValueError, match="lr must be at least 0 and finite"):
        train(bags, seed=1, steps=1)
    assert all(torch.equal(value, before[name]) for name, value in bags.state_dict().items())


@pytest.mark.parametrize("kind", get_args(RowOptimizerName))
def test_training_continues_bit_for_bit_from_the_state_of_rows_by_name(kind: Any) -> None:
    bags, resumed = EmbeddingBags(TABLES, optimizer=kind, lr=0.1), EmbeddingBags(TABLES, optimizer=kind, lr=0.9, seed=2)
    train(bags, seed=1)
    bags.lr = 0.05
    file = io.BytesIO()
    torch.save({"rows": bags.state_dict(), "optimizer": bags.fused_optimizer().state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    assert list(saved["optimizer"]["state"]) == NAMES
    assert {int(state["num_updates"]) for state in saved["optimizer"]["state"].values()} == {3}
    assert saved["optimizer"]["param_groups"][0]["params"] == NAMES
    resumed.load_state_dict(saved["rows"])
    resumed.fused_optimizer().load_state_dict(saved["optimizer"])
    assert resumed.lr == 0.05
    for each in (bags, resumed):
        train(each, seed=2)
    assert_same_bits(bags, resumed)


def test_copies_moves_and_pickles_have_an_optimizer_of_their_own() -> None:
    bags = EmbeddingBags(TABLES, optimizer="adam")
    torch.optim.lr_scheduler.ExponentialLR(bags.fused_optimizer(), gamma=0.9)  # replaces `step` by a local function
    train(bags, seed=1)
    lr = bags.lr
    file = io.BytesIO()
    torch.save(bags, file)
    file.seek(0)
    for other in (copy.deepcopy(bags), torch.load(file, weights_only=False)):
        assert isinstance(other.fused_optimizer(), FusedOptimizer)
        other.fused_optimizer().param_groups[0]["lr"] = 0.5
        assert other.lr == 0.5
        assert bags.lr == lr
        train(other, seed=2)
        assert list(other.fused_optimizer().params.values()) == list(other.parameters())
        assert int(other.fused_optimizer().state_dict()["state"][NAMES[0]]["num_updates"]) == 6
        assert torch.equal(
            other.fused_optimizer().state_dict()["state"][NAMES[0]]["moment1"], other.optimizer_state()["users.moment1"]
        )
    assert int(bags.optimizer_state()["num_updates"]) == 3
    bags.to(torch.float64)
    train(bags, seed=2, steps=1)
    state = bags.fused_optimizer().state[bags.embedding_bags["users"].weight]
    assert state["moment1"].dtype == torch.float64
    assert torch.equal(state["moment1"], bags.optimizer_state()["users.moment1"])


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    bags = EmbeddingBags(TABLES, optimizer="adagrad")
    train(bags, seed=1)
    before, optimizer = copy.deepcopy(bags.optimizer_state()), bags.fused_optimizer()
    few = EmbeddingBags(TABLES[:2], optimizer="adagrad").fused_optimizer().state_dict()
    with pytest.raises(CheckpointError, match=r"no state of `embedding_bags\.again\.weight`"):
        optimizer.load_state_dict(few)
    with pytest.raises(CheckpointError, match="has moment1, moment2, num_updates, but this optimizer has num_updates, sum"):
        optimizer.load_state_dict(EmbeddingBags(TABLES, optimizer="adam").fused_optimizer().state_dict())
    with pytest.raises(CheckpointError, match=r"`sum` of `embedding_bags\.users\.weight` is \[40, 1\], but must be \[40, 8\]"):
        optimizer.load_state_dict(EmbeddingBags(TABLES, optimizer="rowwise_adagrad").fused_optimizer().state_dict())
    assert all(torch.equal(value, before[name]) for name, value in bags.optimizer_state().items())
    with pytest.raises(RowsteadError, match="no other parameters"):
        optimizer.add_param_group({"params": [torch.zeros(1)]})
    with pytest.raises(RowsteadError, match="no optimizer is fused"):
        EmbeddingBags(TABLES).fused_optimizer()


@pytest.mark.skipif(importlib.util.find_spec("torchrec") is None, reason="TorchRec is not installed")
def test_torchrec_combines_it_with_the_optimizer_of_dense_parameters() -> None:
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

    def model() -> tuple[EmbeddingBags, torch.nn.Linear, Any]:
        bags, top = EmbeddingBags(TABLES, optimizer="adam"), torch.nn.Linear(32, 1)
        dense = KeyedOptimizerWrapper(dict(top.named_parameters()), lambda params: torch.optim.Adagrad(params, lr=0.1))
        return bags, top, CombinedOptimizer([("bags", bags.fused_optimizer()), ("top", dense)])

    bags, top, combined = model()
    combined.zero_grad()
    top(bags(batch(torch.Generator().manual_seed(1))).values()).sum().backward()
    combined.step()
    saved = copy.deepcopy(combined.state_dict())
    assert list(saved["state"]) == [*[f"bags.{name}" for name in NAMES], "top.weight", "top.bias"]
    other, _, again = model()
    again.load_state_dict(saved)
    other.load_state_dict(bags.state_dict())
    for each in (bags, other):
        train(each, seed=2)
    assert_same_bits(bags, other)
