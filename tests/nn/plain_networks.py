"""The built-in networks once more, written from the equations of their papers, one field, pair or head at a time.

Each takes the parameters of the network by name, the value of each dense feature [B, 1], the pooled rows of each sparse feature [B, D], the
options, and `top`, the hidden layers of `model.top`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Parameters = Mapping[str, Tensor]


def linear(p: Parameters, name: str, x: Tensor) -> Tensor:
    out = x @ p[f"{name}.weight"].T
    return out + p[f"{name}.bias"] if f"{name}.bias" in p else out


def mlp(p: Parameters, name: str, x: Tensor, *, ends_in_relu: bool = False) -> Tensor:
    layers = sorted({int(key[len(name) + 1 :].split(".")[0]) for key in p if key.startswith(f"{name}.")})
    for layer in layers:
        x = linear(p, f"{name}.{layer}", x)
        if ends_in_relu or layer != layers[-1]:
            x = torch.relu(x)
    return x


def layer_norm(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


def fields_of(p: Parameters, dense: list[Tensor], rows: list[Tensor]) -> list[Tensor]:
    return [x * p["fields.dense_vectors"][i] for i, x in enumerate(dense)] + rows


def pairwise(vectors: list[Tensor]) -> Tensor:
    return sum((a * b).sum(1, keepdim=True) for a, b in itertools.combinations(vectors, 2))  # type: ignore[return-value]


def dlrm(p: Parameters, dense: list[Tensor], rows: list[Tensor], options: Any) -> Tensor:
    projected = mlp(p, "bottom", torch.cat(dense, 1), ends_in_relu=True)
    vectors = [projected, *rows]
    products = [(vectors[i] * vectors[j]).sum(1, keepdim=True) for i in range(len(vectors)) for j in range(i)]
    return mlp(p, "top", torch.cat([projected, *products], 1))


def wide_deep(p: Parameters, dense: list[Tensor], rows: list[Tensor], options: Any) -> Tensor:
    wide = sum(p["wide.weight"][0, i] * x for i, x in enumerate(dense)) + sum(row[:, -1:] for row in rows)
    return wide + mlp(p, "deep", torch.cat([*dense, *(row[:, :-1] for row in rows)], 1))


def deepfm(p: Parameters, dense: list[Tensor], rows: list[Tensor], options: Any) -> Tensor:
    fields = fields_of(p, dense, rows)
    vectors = [field[:, :-1] for field in fields]
    first_order = sum(field[:, -1:] for field in fields)
    return first_order + pairwise(vectors) + mlp(p, "deep", torch.cat(vectors, 1))


def xdeepfm(p: Parameters, dense: list[Tensor], rows: list[Tensor], options: Any) -> Tensor:
    fields = fields_of(p, dense, rows)
    vectors = [field[:, :-1] for field in fields]
    maps, sums = vectors, []
    for k, num_maps in enumerate(options.cin):
        weights = p[f"cin.layers.{k}.weight"].view(num_maps, len(maps), len(vectors))
        maps = [
            sum(weights[h, i, j] * maps[i] * vectors[j] for i in range(len(maps)) for j in range(len(vectors)))  # type: ignore[misc]
            for h in range(num_maps)
        ]
        sums += [one.sum(1, keepdim=True) for one in maps]
    first_order = sum(field[:, -1:] for field in fields)
    return first_order + linear(p, "out", torch.cat(sums, 1)) + mlp(p, "deep", torch.cat(vectors, 1))


def autoint(p: Parameters, dense: list[Tensor], rows: list[Tensor], options: Any) -> Tensor:
    fields = first = fields_of(p, dense, rows)
    for layer in range(options.layers):
        query, key, value, residual = (p[f"attention.{layer}.{name}.weight"] for name in ("query", "key", "value", "residual"))
        after = []
        for m in fields:
            heads = []
            for h in range(options.heads):
                part = slice(h * options.head_width, (h + 1) * options.head_width)
                alike = torch.stack([((m @ query[part].T) * (k @ key[part].T)).sum(1).exp() for k in fields], 1)
                alike = alike / alike.sum(1, keepdim=True)
                heads.append(sum(alike[:, i : i + 1] * (k @ value[part].T) for i, k in enumerate(fields)))
            after.append(torch.relu(torch.cat(heads, 1) + m @ residual.T))  # type: ignore[arg-type]
        fields = after
    out = linear(p, "out", torch.cat(fields, 1))
    return out + mlp(p, "deep", torch.cat(first, 1)) if options.deep else out


def dcnv2(p: Parameters, dense: list[Tensor], rows: list[Tensor], options: Any) -> Tensor:
    x0 = x = torch.cat([*dense, *rows], 1)
    for layer in range(options.cross_layers):
        if options.rank is None:
            x = x0 * linear(p, f"cross.layers.{layer}", x) + x
        elif options.experts == 1:
            x = x0 * linear(p, f"cross.up.{layer}", linear(p, f"cross.down.{layer}", x)) + x
        else:
            x = x0 * 0 + x + sum(_expert(p, layer, expert, x0, x, options) for expert in range(options.experts))
    if options.structure == "stacked":
        return mlp(p, "deep", x)
    return linear(p, "out", torch.cat([x, mlp(p, "deep", x0, ends_in_relu=True)], 1))


def _expert(p: Parameters, layer: int, expert: int, x0: Tensor, x: Tensor, options: Any) -> Tensor:
    """G(x) E(x), with E(x) = x0 * (U g(C g(V x)) + b)."""
    part = slice(expert * options.rank, (expert + 1) * options.rank)
    v, c, u = p[f"cross.v.{layer}.weight"][part], p[f"cross.c.{layer}"][expert], p[f"cross.u.{layer}.weight"][:, part]
    gates = (x @ p["cross.gate.weight"].T).exp()
    gate = gates[:, expert : expert + 1] / gates.sum(1, keepdim=True)
    return gate * x0 * (torch.tanh(torch.tanh(x @ v.T) @ c.T) @ u.T + p[f"cross.bias.{layer}"])


def masknet(p: Parameters, dense: list[Tensor], rows: list[Tensor], options: Any) -> Tensor:
    fields = fields_of(p, dense, rows)
    embedding = torch.cat(fields, 1)
    normed = torch.cat([layer_norm(field) * p["norm.gain"][m] + p["norm.bias"][m] for m, field in enumerate(fields)], 1)
    outputs = []
    for block in range(options.blocks):
        name = f"blocks.{block}"
        mask = linear(p, f"{name}.mask.2", torch.relu(linear(p, f"{name}.mask.0", embedding)))
        masked = mask * (outputs[-1] if outputs and options.structure == "stacked" else normed)
        hidden = layer_norm(linear(p, f"{name}.hidden.0", masked)) * p[f"{name}.hidden.1.weight"] + p[f"{name}.hidden.1.bias"]
        outputs.append(torch.relu(hidden))
    return mlp(p, "top", outputs[-1] if options.structure == "stacked" else torch.cat(outputs, 1))


def finalmlp(p: Parameters, dense: list[Tensor], rows: list[Tensor], options: Any) -> Tensor:
    x, streams = torch.cat([*dense, *rows], 1), []
    for name, context in (("first", options.first_context), ("second", options.second_context)):
        gated = x
        if options.gate is not None:
            seen = torch.cat([rows[int(one.removeprefix("sparse_"))] for one in context], 1) if context else None
            given = p[f"{name}_gate.constant"].expand(len(x), -1) if seen is None else seen
            gated = 2 / (1 + torch.exp(-mlp(p, f"{name}_gate.gate", given))) * x
        streams.append(mlp(p, name, gated, ends_in_relu=True))
    total = p["fusion.first.bias"]
    first, second = (stream.chunk(options.heads, 1) for stream in streams)
    w1, w2 = (p[f"fusion.{name}.weight"].chunk(options.heads, 1) for name in ("first", "second"))
    for h in range(options.heads):
        bilinear = ((first[h] @ p["fusion.product"][h]) * second[h]).sum(1, keepdim=True)
        total = total + first[h] @ w1[h].T + second[h] @ w2[h].T + bilinear
    return total


PLAIN: dict[str, Callable[[Parameters, list[Tensor], list[Tensor], Any], Tensor]] = {
    "dlrm": dlrm,
    "wide_deep": wide_deep,
    "deepfm": deepfm,
    "xdeepfm": xdeepfm,
    "autoint": autoint,
    "dcnv2": dcnv2,
    "masknet": masknet,
    "finalmlp": finalmlp,
}
