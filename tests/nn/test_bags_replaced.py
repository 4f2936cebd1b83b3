"""Tables that are replaced, by hand or by torch.func.functional_call, are the ones that are read and trained."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize

from rowstead.nn.bag_tables import EmbeddingTable
from rowstead.nn.embedding_bags import EmbeddingBags
from rowstead.nn.embeddings import Embeddings
from rowstead.spec.errors import RowsteadError
from tests.small_bags import TABLES, batch, one_example, two_tables


def other_tables(bags: EmbeddingBags, *, parameters: bool) -> dict[str, Tensor]:
    tables = {
        name: torch.randn(rows.shape, generator=torch.Generator().manual_seed(1)) for name, rows in bags.named_parameters()
    }
    return {name: nn.Parameter(rows, requires_grad=False) for name, rows in tables.items()} if parameters else tables


@pytest.mark.parametrize("parameters", [False, True])
@pytest.mark.parametrize("optimizer", [None, "adagrad"])
def test_functional_call_reads_the_given_tables_and_leaves_the_module_as_it_was(optimizer: Any, parameters: bool) -> None:
    bags = EmbeddingBags(TABLES, optimizer=optimizer)
    sparse = batch(torch.Generator().manual_seed(1))
    given = other_tables(bags, parameters=parameters)
    loaded = EmbeddingBags(TABLES, optimizer=optimizer)
    loaded.load_state_dict(given)
    with torch.no_grad():
        before = bags(sparse).values()
        called = functional_call(bags, given, (sparse,)).values()
        assert torch.equal(called, loaded(sparse).values())
        assert not torch.equal(called, before)
        assert torch.equal(bags(sparse).values(), before)


def test_torch_func_grad_has_the_gradients_of_the_given_tables() -> None:
    bags = EmbeddingBags(TABLES)
    sparse = batch(torch.Generator().manual_seed(1))
    given = other_tables(bags, parameters=False)
    found = torch.func.grad(lambda tables: functional_call(bags, tables, (sparse,)).values().square().sum())(given)
    loaded = EmbeddingBags(TABLES)
    loaded.load_state_dict(given)
    loaded(sparse).values().square().sum().backward()
    for name, rows in loaded.named_parameters():
        torch.testing.assert_close(found[name], rows.grad)


@pytest.mark.parametrize("parameters", [False, True])
def test_a_fused_optimizer_refuses_to_train_tables_that_functional_call_took_away_again(parameters: bool) -> None:
    bags = EmbeddingBags(TABLES, optimizer="sgd", lr=0.1)
    before = copy.deepcopy(bags.state_dict())
    given = other_tables(bags, parameters=parameters)
    kept = {name: rows.clone() for name, rows in given.items()}
    loss = functional_call(bags, given, (batch(torch.Generator().manual_seed(1)),)).values().sum()
    with pytest.raises(RowsteadError, match="no longer those that the look-up read"):
        loss.backward()
    assert all(torch.equal(value, before[name]) for name, value in bags.state_dict().items())
    assert all(torch.equal(value, kept[name]) for name, value in given.items())


@pytest.mark.parametrize("optimizer", [None, "adam"])
def test_a_replaced_parameter_is_read_and_trained(optimizer: Any) -> None:
    bags, loaded = EmbeddingBags(TABLES, optimizer=optimizer), EmbeddingBags(TABLES, optimizer=optimizer)
    random = torch.Generator().manual_seed(2)
    first, second = batch(random), batch(random)
    for each in (bags, loaded):
        each(first).values().square().sum().backward()
    replaced = nn.Parameter(torch.randn(40, 8, generator=random), requires_grad=optimizer is None)
    old = bags.embedding_bags["users"].weight
    kept = old.detach().clone()
    bags.embedding_bags["users"].weight = replaced
    with torch.no_grad():
        loaded.embedding_bags["users"].weight.copy_(replaced)
    assert torch.equal(bags(second).values(), loaded(second).values())
    for each in (bags, loaded):
        each.zero_grad()
        each(second).values().square().sum().backward()
    assert torch.equal(old, kept)
    if optimizer is None:
        torch.testing.assert_close(replaced.grad, loaded.embedding_bags["users"].weight.grad)
    else:
        assert torch.equal(replaced, loaded.embedding_bags["users"].weight)
        assert bags.fused_optimizer().params["embedding_bags.users.weight"] is replaced


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("optimizer", [None, "sgd"])
def test_a_replaced_table_that_kernels_would_misread_is_refused(optimizer: Any, check: bool) -> None:
    for wrong in (torch.ones(2, 4), torch.ones(10, 4, dtype=torch.float16), torch.ones(10, 8)[:, :4]):
        bags = two_tables(optimizer=optimizer, check=check)
        with pytest.raises(RowsteadError, match=r"table `b` is .* must be contiguous torch\.float32"):
            functional_call(bags, {"embedding_bags.b.weight": wrong}, (one_example(),))
        bags.embedding_bags["b"].weight = nn.Parameter(wrong, requires_grad=False)
        with pytest.raises(RowsteadError, match=r"table `b` is .* must be contiguous torch\.float32"):
            bags(one_example())


def test_a_parametrized_table_is_computed_at_every_look_up() -> None:
    class Double(nn.Module):
        def forward(self, rows: Tensor) -> Tensor:
            return 2 * rows

    bags, fused = two_tables(), two_tables(optimizer="sgd")
    plain = bags(one_example()).values().detach()
    for each in (bags, fused):
        for name in ("a", "b"):
            parametrize.register_parametrization(each.embedding_bags[name], "weight", Double())
    pooled = bags(one_example()).values()
    assert torch.equal(pooled, 2 * plain)
    pooled.sum().backward()
    original = bags.embedding_bags["a"].parametrizations.weight.original
    assert torch.equal(original.grad[1], torch.full((4,), 2.0))
    with pytest.raises(RowsteadError, match="no longer those"):
        fused(one_example()).values().sum().backward()


def in_data_parallel(rank: int, folder: str, optimizer: str | None) -> None:
    """One of two processes that train a model inside DistributedDataParallel."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/join", rank=rank, world_size=2)
    try:
        model = nn.Sequential(Values(two_tables(optimizer=optimizer)), nn.Linear(8, 1))
        parallel = nn.parallel.DistributedDataParallel(model)
        with torch.no_grad():
            parallel(one_example())
        if optimizer is None:
            step = torch.optim.SGD(model.parameters(), lr=0.1)
            (parallel(one_example()).sum() * (rank + 1)).backward()
            step.step()
            rows = model[0].bags.embedding_bags["a"].weight.detach()
            others = [torch.empty_like(rows) for _ in range(2)]
            torch.distributed.all_gather(others, rows)
            torch.distributed.barrier()  # neither leaves while the other still reads
            assert torch.equal(*others)
            return
        items = Embeddings(
            [EmbeddingTable(name=name, num_embeddings=10, embedding_dim=4) for name in ("a", "b")], optimizer="sgd"
        )
        in_order = nn.parallel.DistributedDataParallel(nn.Sequential(RowsOfA(items), nn.Linear(4, 1)))
        for trained in (parallel, in_order):
            with pytest.raises(
                RowsteadError, match=r"DistributedDataParallel.*each process would train other tables: leave out"
            ):
                trained(one_example())
    finally:
        torch.distributed.destroy_process_group()


class Values(nn.Module):
    def __init__(self, bags: EmbeddingBags) -> None:
        super().__init__()
        self.bags = bags

    def forward(self, sparse: Any) -> Tensor:
        values: Tensor = self.bags(sparse).values()
        return values


class RowsOfA(nn.Module):
    def __init__(self, embeddings: Embeddings) -> None:
        super().__init__()
        self.embeddings = embeddings

    def forward(self, sparse: Any) -> Tensor:
        values: Tensor = self.embeddings(sparse)["a"].values()
        return values


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [None, "sgd"])
def test_data_parallel_processes_train_the_same_tables_or_none(optimizer: Any, tmp_path: Any) -> None:
    torch.multiprocessing.spawn(in_data_parallel, args=(str(tmp_path), optimizer), nprocs=2)
