"""What `fuse_embedding_optimizer` takes; test_bags_like_torchrec.py has what it does to models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rowstead
from rowstead.nn.embedding_bags import EmbeddingBags
from rowstead.spec.errors import RowsteadError
from tests.small_bags import TABLES


def test_an_optimizer_that_cannot_be_fused_is_named() -> None:
    fuse = rowstead.fuse_embedding_optimizer
    for optimizer, kwargs, says in (
        (torch.optim.LBFGS, {}, "cannot fuse LBFGS: use one of sgd"),
        (torch.optim.SGD, {"weight_decay": 0.1}, "weight_decay=0.1: a fused SGD has only lr, momentum"),
        (torch.optim.SGD, {"larning_rate": 0.1}, "SGD has no argument `larning_rate`"),
        ("sgd", {"lr": 0.1}, "optimizer_kwargs are those of a class"),
        ("sdg", {}, "optimizer='sdg'"),
    ):
        with pytest.raises(RowsteadError, match=says):
            fuse(EmbeddingBags(TABLES), optimizer, kwargs)  # type: ignore[arg-type]
    found: Any = fuse(EmbeddingBags(TABLES), torch.optim.Adam, {"betas": (0.8, 0.9), "weight_decay": 0.0})
    assert (found.optimizer.kind, found.optimizer.beta1, found.optimizer.beta2, found.lr) == ("adam", 0.8, 0.9, 0.001)
    found = fuse(EmbeddingBags(TABLES), torch.optim.SGD, {"lr": 0.1, "momentum": 0.5})
    assert (found.optimizer.kind, found.optimizer.momentum) == ("momentum", 0.5)
