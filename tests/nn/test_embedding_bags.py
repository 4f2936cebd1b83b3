"""EmbeddingBags train like nn.EmbeddingBag under torch.optim, and move, copy and load like any module."""

from __future__ import annotations

import copy
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rowstead
from rowstead.data.batch import Sparse, sparse_from_kjt
from rowstead.nn.embedding_bags import EmbeddingBags
from rowstead.spec.errors import DataError
from tests.small_bags import NUM_SAMPLES, TABLES, Plain, assert_same_rows, batch, loss_of, one_example, two_tables

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"))]


def optimizer_of(kind: str, plain: Plain, lr: float) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(plain.parameters(), lr=lr)
    if kind == "adagrad":
        return torch.optim.Adagrad(plain.parameters(), lr=lr, eps=1e-8)
    return torch.optim.SparseAdam(list(plain.parameters()), lr=lr, eps=1e-8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam"])
def test_20_steps_end_where_torch_optim_ends(kind: Any, dtype: torch.dtype, device: str) -> None:
    bags = EmbeddingBags(TABLES, optimizer=kind, lr=0.05, device=device)
    plain = Plain(bags, sparse=kind == "adam")
    optimizer = optimizer_of(kind, plain, 0.05)
    random = torch.Generator().manual_seed(3)
    for step in range(20):
        if step == 10:  # a schedule
            bags.lr = 0.01
            optimizer.param_groups[0]["lr"] = 0.01
        sparse = batch(random, dtype=dtype)
        target = torch.randn(NUM_SAMPLES, 32, generator=random)
        ours = bags(sparse.to(device)).values()
        theirs = plain(sparse)
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-5)
        loss_of(ours, target.to(device)).backward()
        optimizer.zero_grad()
        loss_of(theirs, target).backward()
        optimizer.step()
    assert_same_rows(bags, plain)


def test_rowwise_adagrad_divides_by_the_mean_square_of_each_row() -> None:
    bags = EmbeddingBags(TABLES, optimizer="rowwise_adagrad", lr=0.05)
    plain = Plain(bags)
    sums = {name: torch.zeros(table.weight.shape[0], 1) for name, table in plain.tables.items()}
    random = torch.Generator().manual_seed(4)
    for _ in range(20):
        sparse, target = batch(random), torch.randn(NUM_SAMPLES, 32, generator=random)
        loss_of(bags(sparse).values(), target).backward()
        plain.zero_grad()
        loss_of(plain(sparse), target).backward()
        for name, table in plain.tables.items():
            grad = table.weight.grad
            sums[name] += grad.square().mean(dim=1, keepdim=True)
            table.weight.data -= 0.05 * grad / (sums[name].sqrt() + 1e-8)
    assert_same_rows(bags, plain)


def test_without_an_optimizer_tables_have_ordinary_gradients() -> None:
    bags = EmbeddingBags(TABLES)
    plain = Plain(bags)
    ours, theirs = torch.optim.Adam(bags.parameters(), lr=0.01), torch.optim.Adam(plain.parameters(), lr=0.01)
    random = torch.Generator().manual_seed(5)
    for _ in range(20):
        sparse, target = batch(random), torch.randn(NUM_SAMPLES, 32, generator=random)
        for model, optimizer in ((lambda s: bags(s).values(), ours), (plain, theirs)):
            optimizer.zero_grad()
            loss_of(model(sparse), target).backward()
            optimizer.step()
    assert_same_rows(bags, plain)


def test_several_look_ups_before_one_backward_each_send_their_gradient() -> None:
    bags = EmbeddingBags(TABLES, optimizer="sgd", lr=0.1)
    plain = Plain(bags)
    random = torch.Generator().manual_seed(6)
    one, two = batch(random), batch(random)
    target = torch.randn(NUM_SAMPLES, 32, generator=random)
    (loss_of(bags(one).values(), target) + loss_of(bags(two).values(), target)).backward()
    (loss_of(plain(one), target) + loss_of(plain(two), target)).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_same_rows(bags, plain)
    assert int(bags.optimizer_state()["num_updates"]) == 2


def test_a_look_up_under_no_grad_or_never_sent_back_changes_nothing() -> None:
    bags = EmbeddingBags(TABLES, optimizer="adagrad", lr=0.1)
    before = copy.deepcopy(bags.state_dict())
    sparse = batch(torch.Generator().manual_seed(7))
    with torch.no_grad():
        assert not bags(sparse).values().requires_grad
    assert bags(sparse).values().requires_grad
    assert all(torch.equal(value, before[name]) for name, value in bags.state_dict().items())


def test_a_second_backward_through_one_look_up_is_refused() -> None:
    bags = EmbeddingBags(TABLES, optimizer="sgd", lr=0.1)
    pooled = bags(batch(torch.Generator().manual_seed(8))).values()
    pooled.backward(torch.ones_like(pooled))
    with pytest.raises(RuntimeError, match="second time"):
        pooled.backward(torch.ones_like(pooled))


def test_ids_that_change_before_the_backward_pass_are_noticed() -> None:
    bags = EmbeddingBags(TABLES[:2], optimizer="sgd", lr=0.1)
    sparse = batch(torch.Generator().manual_seed(8))
    pooled = bags(sparse).values()
    sparse.ids.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        pooled.sum().backward()


@pytest.mark.parametrize("optimizer", ["sgd", None])
def test_weights_of_ids_scale_rows_and_have_gradients(optimizer: Any) -> None:
    tables = TABLES[:1]
    bags = EmbeddingBags(tables, is_weighted=True, optimizer=optimizer)
    rows = bags.embedding_bags["users"].weight.detach().clone()
    random = torch.Generator().manual_seed(9)
    sparse = batch(random, weighted=True, features=("user", "friend"))
    assert sparse.weights is not None
    sparse.weights.requires_grad_()
    pooled = bags(sparse).values()
    grad = torch.randn(NUM_SAMPLES, 16, generator=random)
    pooled.backward(grad)
    bag_of = torch.repeat_interleave(torch.arange(2 * NUM_SAMPLES), sparse.offsets.diff())
    of_bags = grad.view(NUM_SAMPLES, 2, 8).transpose(0, 1).reshape(-1, 8)
    wanted = torch.zeros(2 * NUM_SAMPLES, 8).index_add(0, bag_of, rows[sparse.ids] * sparse.weights.detach()[:, None])
    torch.testing.assert_close(pooled.detach(), wanted.view(2, NUM_SAMPLES, 8).transpose(0, 1).reshape(NUM_SAMPLES, 16))
    torch.testing.assert_close(sparse.weights.grad, (rows[sparse.ids] * of_bags[bag_of]).sum(1))


def test_weights_are_ignored_or_wanted_as_the_module_says() -> None:
    random = torch.Generator().manual_seed(9)
    weighted = batch(random, weighted=True)
    bags = EmbeddingBags(TABLES, optimizer="sgd")
    without = Sparse(ids=weighted.ids, offsets=weighted.offsets, num_features=3)
    assert torch.equal(bags(weighted).values(), bags(without).values())
    with pytest.raises(DataError, match="the batch has no weights"):
        EmbeddingBags(TABLES, is_weighted=True)(without)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", [None, "sgd"])
def test_weights_get_gradients_whatever_their_type_and_though_tables_are_frozen(
    optimizer: str | None, dtype: torch.dtype
) -> None:
    bags = two_tables(is_weighted=True, optimizer=optimizer, dtype=dtype).requires_grad_(False)
    weights = torch.tensor([1.0, 2.0], dtype=dtype, requires_grad=True)
    rows = [bags.embedding_bags[name].weight.detach().float().clone() for name in ("a", "b")]
    bags(one_example(weights)).values().sum().backward()
    assert weights.grad is not None
    expected = torch.stack([rows[0][1].sum(), rows[1][2].sum()])
    torch.testing.assert_close(weights.grad.float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", None])
def test_rows_of_half_the_width_give_float32_vectors(dtype: torch.dtype, optimizer: Any) -> None:
    bags = EmbeddingBags(TABLES, dtype=dtype, optimizer=optimizer)
    assert {weight.dtype for weight in bags.state_dict().values()} == {dtype}
    sparse = batch(torch.Generator().manual_seed(10))
    pooled = bags(sparse).values()
    assert pooled.dtype == torch.float32
    torch.testing.assert_close(pooled.detach(), Plain(bags)(sparse).detach(), rtol=0.02, atol=0.02)
    before = bags.embedding_bags["users"].weight.detach().clone()
    pooled.square().sum().backward()
    if optimizer is None:
        assert bags.embedding_bags["users"].weight.grad is not None
    else:
        assert not torch.equal(bags.embedding_bags["users"].weight, before)


def train(bags: EmbeddingBags, seed: int, steps: int = 3) -> None:
    random = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        bags(batch(random)).values().square().sum().backward()


def test_a_copy_and_a_reloaded_module_go_on_the_same_and_leave_the_first_alone() -> None:
    bags = EmbeddingBags(TABLES, optimizer="adam", lr=0.05)
    train(bags, seed=1)
    copied = copy.deepcopy(bags)
    file = io.BytesIO()
    torch.save(bags, file)
    file.seek(0)
    unpickled = torch.load(file, weights_only=False)
    reloaded = EmbeddingBags(TABLES, optimizer="adam", lr=0.05, seed=2)
    reloaded.load_state_dict(bags.state_dict())
    reloaded.load_optimizer_state(bags.optimizer_state())
    assigned = EmbeddingBags(TABLES, optimizer="adam", lr=0.05, seed=2)
    assigned.load_state_dict(copy.deepcopy(bags.state_dict()), assign=True)
    assigned.load_optimizer_state(bags.optimizer_state())
    before = copy.deepcopy(bags.state_dict())
    for other in (copied, unpickled, reloaded, assigned):
        train(other, seed=2)
    assert all(torch.equal(value, before[name]) for name, value in bags.state_dict().items())
    train(bags, seed=2)
    for other in (copied, unpickled, reloaded, assigned):
        for name, value in bags.state_dict().items():
            assert torch.equal(value, other.state_dict()[name])
        for name, value in bags.optimizer_state().items():
            assert torch.equal(value, other.optimizer_state()[name])


def test_to_takes_rows_and_the_optimizer_along() -> None:
    bags = EmbeddingBags(TABLES, optimizer="adagrad", lr=0.05)
    train(bags, seed=1)
    sums = bags.optimizer_state()["users.sum"].double()
    bags.to(torch.float64)
    assert {value.dtype for value in bags.state_dict().values()} == {torch.float64}
    assert torch.equal(bags.optimizer_state()["users.sum"], sums)
    train(bags, seed=2)
    assert not torch.equal(bags.optimizer_state()["users.sum"], sums)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_module_that_is_moved_to_the_gpu_trains_there() -> None:
    here = EmbeddingBags(TABLES, optimizer="adagrad", lr=0.05)
    train(here, seed=1)
    there = copy.deepcopy(here).cuda()
    assert there.kernel == "gpu"
    sparse = batch(torch.Generator().manual_seed(2))
    for bags, moved in ((here, sparse), (there, sparse.to("cuda"))):
        bags(moved).values().square().sum().backward()
    for name, value in here.state_dict().items():
        torch.testing.assert_close(there.state_dict()[name].cpu(), value, rtol=1e-5, atol=1e-5)


def test_a_batch_of_no_examples_has_no_vectors() -> None:
    bags = EmbeddingBags(TABLES[:2], optimizer="sgd")
    empty = Sparse(ids=torch.empty(0, dtype=torch.int64), offsets=torch.zeros(1, dtype=torch.int64), num_features=3)
    pooled = bags(empty).values()
    assert pooled.shape == (0, 20)
    pooled.sum().backward()
    mixed = EmbeddingBags(TABLES, optimizer="sgd")
    assert mixed(empty).values().shape == (0, 32)


def test_inside_a_compiled_model_it_trains_the_same() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags, self.top = EmbeddingBags(TABLES, optimizer="adagrad", lr=0.1), nn.Linear(32, 1)

        def forward(self, sparse: Sparse) -> Tensor:
            return self.top(self.bags(sparse).values().relu())

    model = Model()
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend="eager")
    sparse = batch(torch.Generator().manual_seed(17))
    for _ in range(2):
        compiled(sparse).square().sum().backward()
        plain(sparse).square().sum().backward()
    for name, value in plain.state_dict().items():
        if torch.cuda.is_available():  # the GPU's sum of a linear layer may take another order
            torch.testing.assert_close(model.state_dict()[name], value)
        else:
            assert torch.equal(model.state_dict()[name], value)


def test_what_its_page_shows_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "embedding_bags.md").read_text()
    shown = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(shown, names)
    assert names["pooled"].keys() == ["user", "friend", "tag"]
    assert names["bags"].optimizer_state()["num_updates"] == 1


def test_the_package_has_it() -> None:
    assert rowstead.EmbeddingBags is EmbeddingBags
    assert rowstead.sparse_from_kjt is sparse_from_kjt
