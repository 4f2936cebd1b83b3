"""torch.compile and torch.export take EmbeddingBags whole, and compiled training ends at the bits of eager training."""

from __future__ import annotations

import copy
import gc
import importlib.util
import io
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.func import functional_call

from rowstead.data.batch import Sparse, kjt_from_sparse
from rowstead.nn.embedding_bags import EmbeddingBags
from rowstead.spec.errors import DataError, RowsteadError
from tests.small_bags import NUM_SAMPLES, TABLES, Plain, batch

needs_torchrec = pytest.mark.skipif(importlib.util.find_spec("torchrec") is None, reason="TorchRec is not installed")
inductor = pytest.param(
    "inductor",
    marks=[pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")],
)


class Model(nn.Module):
    """Two look-ups of the same ids, and one of others, with gradients that compilers compute exactly."""

    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.bags = EmbeddingBags(TABLES, **more)

    def forward(self, sparse: Any, other: Any) -> Tensor:
        one, again, two = self.bags(sparse).values(), self.bags(sparse).values(), self.bags(other).values()
        return (one * 2 - again).square().sum() + two.square().sum()


def train(model: Any, optimizer: torch.optim.Optimizer | None, steps: int = 20) -> None:
    random = torch.Generator().manual_seed(1)
    for _ in range(steps):
        model(batch(random), batch(random)).backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()


@pytest.fixture(autouse=True)
def _compile_anew() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize("backend", ["aot_eager", inductor])
@pytest.mark.parametrize("kind", ["adam", pytest.param("rowwise_adagrad", marks=pytest.mark.slow)])
def test_20_compiled_steps_end_at_the_bits_of_20_eager_steps(kind: Any, backend: str) -> None:
    eager = Model(optimizer=kind, lr=0.05)
    compiled = copy.deepcopy(eager)
    train(eager, None)
    train(torch.compile(compiled, backend=backend, fullgraph=True), None)
    assert int(compiled.bags.optimizer_state()["num_updates"]) == 60
    for name, value in eager.state_dict().items():
        assert torch.equal(compiled.state_dict()[name], value)
    for name, value in eager.bags.optimizer_state().items():
        assert torch.equal(compiled.bags.optimizer_state()[name], value)


@pytest.mark.parametrize("backend", ["aot_eager", inductor])
def test_without_an_optimizer_compiled_steps_have_the_gradients_of_eager_steps(backend: str) -> None:
    eager = Model()
    compiled = copy.deepcopy(eager)
    train(eager, torch.optim.SGD(eager.parameters(), lr=0.01))
    train(torch.compile(compiled, backend=backend, fullgraph=True), torch.optim.SGD(compiled.parameters(), lr=0.01))
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(compiled.state_dict()[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [None, "sgd"])
def test_compiled_weights_of_ids_have_their_gradients(optimizer: Any) -> None:
    found = []
    for wrap in (lambda model: model, lambda model: torch.compile(model, backend="aot_eager", fullgraph=True)):
        bags = EmbeddingBags(TABLES, is_weighted=True, optimizer=optimizer)
        sparse = batch(torch.Generator().manual_seed(1), weighted=True)
        assert sparse.weights is not None
        sparse.weights.requires_grad_()
        wrap(lambda given, bags=bags: bags(given).values().square().sum())(sparse).backward()
        found.append(sparse.weights.grad)
    torch.testing.assert_close(*found)


@pytest.mark.slow
def test_a_schedule_and_other_batches_compile_nothing_anew() -> None:
    bags = EmbeddingBags(TABLES, optimizer="sgd")
    eager = copy.deepcopy(bags)
    counter = CompileCounter()
    compiled = torch.compile(lambda sparse: bags(sparse).values().square().sum(), backend=counter, fullgraph=True, dynamic=True)
    random = torch.Generator().manual_seed(1)
    for step in range(6):
        sparse = batch(random)
        bags.lr = eager.lr = 0.1 / (step + 1)
        compiled(sparse).backward()
        eager(sparse).values().square().sum().backward()
    assert counter.frame_count == 1
    for name, value in eager.state_dict().items():
        assert torch.equal(bags.state_dict()[name], value)


def test_compiled_code_refuses_what_eager_code_refuses() -> None:
    bags, unfused = EmbeddingBags(TABLES, optimizer="sgd"), EmbeddingBags(TABLES)
    sparse = batch(torch.Generator().manual_seed(1))
    given = {name: torch.ones_like(rows) for name, rows in bags.named_parameters()}

    def call(module: EmbeddingBags, sparse: Sparse) -> Tensor:
        values: Tensor = functional_call(module, given, (sparse,)).values()
        return values

    compiled = torch.compile(call, backend="aot_eager")
    assert torch.equal(compiled(unfused, sparse), call(unfused, sparse))
    before = copy.deepcopy(bags.state_dict())
    with pytest.raises(RowsteadError, match="no longer those that the look-up read"):
        compiled(bags, sparse).sum().backward()
    assert all(torch.equal(value, before[name]) for name, value in bags.state_dict().items())
    bad = Sparse(ids=sparse.ids + 1000, offsets=sparse.offsets, num_features=3)
    for module in (bags, unfused):
        with pytest.raises(DataError, match="outside its table"):
            torch.compile(lambda given, module=module: module(given).values(), backend="aot_eager", fullgraph=True)(bad)


@pytest.mark.slow
@needs_torchrec
def test_a_keyed_jagged_tensor_in_another_order_is_compiled() -> None:
    bags = EmbeddingBags(TABLES, optimizer="adagrad")
    eager = copy.deepcopy(bags)
    order = ("tag", "friend", "user")
    compiled = torch.compile(lambda keyed: bags(keyed).values().square().sum(), backend="aot_eager", fullgraph=True)
    random = torch.Generator().manual_seed(1)
    for _ in range(3):
        sparse = batch(random, features=order)
        compiled(kjt_from_sparse(sparse, order)).backward()
        eager(kjt_from_sparse(sparse, order)).values().square().sum().backward()
    for name, value in eager.state_dict().items():
        assert torch.equal(bags.state_dict()[name], value)


@pytest.mark.parametrize("optimizer", [None, "sgd"])
def test_an_exported_program_has_the_rows_and_needs_no_module(optimizer: Any) -> None:
    bags = EmbeddingBags(TABLES, optimizer=optimizer)
    plain = Plain(bags)
    random = torch.Generator().manual_seed(1)
    auto = torch.export.Dim.AUTO
    shapes = {"features": [{0: auto}, {0: auto}, None]}
    program = torch.export.export(bags, (batch(random),), dynamic_shapes=shapes)
    file = io.BytesIO()
    torch.export.save(program, file)
    del bags, program
    gc.collect()
    file.seek(0)
    loaded = torch.export.load(file).module()
    sparse = batch(random)
    pooled = loaded(sparse)
    torch.testing.assert_close(pooled.values(), plain(sparse))
    assert pooled["tag"].shape == (NUM_SAMPLES, 4)
    two = Sparse(ids=torch.tensor([1, 2, 3]), offsets=torch.tensor([0, 1, 1, 2, 2, 3, 3]), num_features=3)
    assert loaded(two).values().shape == (2, 32)
