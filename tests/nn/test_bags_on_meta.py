"""EmbeddingBags on the meta device have shapes and no memory, and train after they were given memory and rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rowstead.data.batch import Sparse
from rowstead.nn.embedding_bags import EmbeddingBags
from tests.small_bags import NUM_SAMPLES, TABLES, batch


@pytest.mark.parametrize("optimizer", [None, "adam"])
def test_a_look_up_on_the_meta_device_has_the_shape_of_the_real_one(optimizer: Any) -> None:
    sparse = batch(torch.Generator().manual_seed(1))
    for bags in (
        EmbeddingBags(TABLES, device="meta", optimizer=optimizer),
        EmbeddingBags(TABLES, optimizer=optimizer).to("meta"),
    ):
        assert bags.device.type == "meta"
        pooled = bags(sparse.to("meta"))
        assert pooled.values().is_meta
        assert pooled.values().shape == (NUM_SAMPLES, 32)
        assert pooled["tag"].shape == (NUM_SAMPLES, 4)
        assert pooled.values().dtype == torch.float32
        pooled.values().sum().backward()
        with torch.no_grad():
            assert bags(sparse.to("meta")).values().shape == (NUM_SAMPLES, 32)


def test_the_default_device_is_that_of_the_context() -> None:
    with torch.device("meta"):
        bags, here = EmbeddingBags(TABLES, optimizer="sgd"), EmbeddingBags(TABLES, device="cpu")
    assert {rows.device.type for rows in bags.parameters()} == {"meta"}
    assert here.device.type == EmbeddingBags(TABLES).device.type == "cpu"
    assert all(torch.equal(a, b) for a, b in zip(here.parameters(), EmbeddingBags(TABLES).parameters(), strict=True))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("optimizer", [None, "adam"])
def test_with_memory_and_rows_it_trains_like_one_that_never_was_on_meta(optimizer: Any, assign: bool) -> None:
    plain = EmbeddingBags(TABLES, optimizer=optimizer)
    bags = EmbeddingBags(TABLES, device="meta", optimizer=optimizer)
    rows = {name: value.clone() for name, value in plain.state_dict().items()}
    if assign:
        bags.load_state_dict(rows, assign=True)
        bags.requires_grad_(optimizer is None)
    else:
        bags.to_empty(device="cpu")
        bags.load_state_dict(rows)
    for each in (plain, bags):
        steps = None if optimizer else torch.optim.Adam(each.parameters())
        random = torch.Generator().manual_seed(1)
        for _ in range(3):
            sparse: Sparse = batch(random)
            each(sparse).values().square().sum().backward()
            if steps is not None:
                steps.step()
                steps.zero_grad()
    for name, value in plain.state_dict().items():
        assert torch.equal(bags.state_dict()[name], value)
    if optimizer is not None:
        assert all(torch.equal(value, bags.optimizer_state()[name]) for name, value in plain.optimizer_state().items())
