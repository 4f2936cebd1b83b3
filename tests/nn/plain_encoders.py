"""History encoders from their papers' equations, one history and one id at a time: slow and obvious."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from rowstead.spec.encoders import EncoderSpec

Parameters = Mapping[str, Tensor]


def plain_din(p: Parameters, spec: EncoderSpec, rows: Tensor, target: Tensor | None) -> Tensor:
    """rows [l, D] from the oldest, target [D] -> [D]."""
    assert target is not None
    scores = []
    for index, row in enumerate(rows):
        key = row + p["positions"][len(rows) - 1 - index] if spec.positions else row
        x = torch.cat([key, target, key * target])
        for layer in range(len(spec.hidden)):
            x = p[f"layers.{layer}.weight"] @ x + p[f"layers.{layer}.bias"]
            x = torch.where(x > 0, x, p[f"activations.{layer}.weight"] * x)
        last = len(spec.hidden)
        scores.append((p[f"layers.{last}.weight"] @ x + p[f"layers.{last}.bias"])[0])
    if not scores:
        return torch.zeros_like(target)
    weights = torch.softmax(torch.stack(scores), dim=0) if spec.softmax else torch.stack(scores)
    return sum((weight * row for weight, row in zip(weights, rows, strict=True)), torch.zeros_like(target))


def plain_attention(p: Parameters, spec: EncoderSpec, rows: Tensor, target: Tensor | None) -> Tensor:
    """rows [l, D] from the oldest -> [D]."""
    width = rows.shape[1]
    if not len(rows):
        return rows.new_zeros(width)

    def norm(x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(x, (width,), p[f"{name}.weight"], p[f"{name}.bias"])

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    x = rows + p["positions"][: len(rows)].flip(0) if spec.positions else rows
    for layer in range(spec.layers):
        name = f"layers.{layer}"
        y = norm(x, f"{name}.norm")
        queries, (keys, values) = linear(y, f"{name}.query"), linear(y, f"{name}.key_and_value").split(width, dim=1)
        size, found = width // spec.heads, []
        for head in range(spec.heads):
            own = slice(head * size, (head + 1) * size)
            scores = torch.softmax(queries[:, own] @ keys[:, own].T / size**0.5, dim=1)
            found.append(scores @ values[:, own])
        x = x + linear(torch.cat(found, dim=1), f"{name}.out")
        hidden = torch.relu(linear(norm(x, f"{name}.norm_of_mlp"), f"{name}.mlp.0"))
        x = x + linear(hidden, f"{name}.mlp.2")
    return norm(x[-1], "norm")


PLAIN_ENCODERS: dict[str, Callable[[Parameters, EncoderSpec, Tensor, Tensor | None], Tensor]] = {
    "din": plain_din,
    "attention": plain_attention,
}
