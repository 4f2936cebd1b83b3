"""Histories: encoders over rows without padding beside padded PyTorch, the memory that they take, and what the order of a history is worth.

    python -m benchmarks.histories --json

Three kinds of rows:

- `speed`: forward and backward of an encoder over the rows of a batch of histories, ours and the same layers written in PyTorch over padded
  histories, which are given as [B, L, D]: padding them is not counted. Lengths have the skew of real logs: 1 to the longest by a power law
  with exponent 1, and one in twenty is empty. Contenders take turns; medians of the processor time of one thread, which other programs on the
  machine disturb least.
- `memory`: the most memory that the tensors of one forward and backward pass take, for the same number of ids in histories of equal length, and
  with one of them very long.
- `quality`: the recipe `din` on its log of drifting interests, with its history encoded, and with the history's rows averaged instead. The
  best NE of a model that sees the order, and that of one which does not, are known.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.harness import OtherLoad, alternate, arguments, noise_of, publish
from rowstead.data.interests import InterestsLog
from rowstead.nn.encoders import AttentionEncoder, DINEncoder, HistoryEncoder, build_encoder
from rowstead.run import train
from rowstead.spec.encoders import EncoderSpec
from rowstead.spec.run import load_recipe

SPECS = {
    "din": EncoderSpec(target="item", hidden=(64,)),
    "attention": EncoderSpec(kind="attention", layers=2, heads=2),
}
MEAN_POOLED = ("features.sparse.1.pooling=mean", "features.sparse.1.encoder=null")


@dataclass(frozen=True)
class Histories:
    """Rows of a batch, from the oldest id of each history, as they are and padded."""

    offsets: Tensor
    rows: Tensor
    target: Tensor
    padded: Tensor
    is_id: Tensor
    grad: Tensor

    @classmethod
    def draw(cls, lengths: Tensor, width: int, *, with_padded: bool = True) -> Histories:
        offsets, longest = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]), int(lengths.max()) if with_padded else 0
        rows = torch.randn(int(offsets[-1]), width)
        is_id = torch.arange(longest - 1, -1, -1) < lengths[:, None]
        padded = torch.zeros(len(lengths), longest, width)
        if with_padded:
            padded[is_id] = rows
        target, grad = torch.randn(len(lengths), width), torch.randn(len(lengths), width)
        return cls(offsets, rows.requires_grad_(), target.requires_grad_(), padded.requires_grad_(), is_id, grad)


def skewed_lengths(num_histories: int, longest: int) -> Tensor:
    lengths = ((longest + 1) ** torch.rand(num_histories)).long()
    lengths[torch.rand(num_histories) < 0.05] = 0
    return lengths


def padded_din(encoder: DINEncoder, histories: Histories) -> Tensor:
    """The same encoder as its equations are usually written in PyTorch: over [B, L, D], with a mask."""
    rows, longest = histories.padded, histories.padded.shape[1]
    assert encoder.positions is not None
    keys = rows + encoder.positions[:longest].flip(0)
    target = histories.target.unsqueeze(1).expand(-1, longest, -1)
    x = torch.cat([keys, target, keys * target], dim=2)
    for layer, activation in zip(encoder.layers, encoder.activations, strict=False):
        x = activation(layer(x))
    scores = encoder.layers[-1](x).squeeze(2).masked_fill(~histories.is_id, 0)
    return torch.einsum("bl,bld->bd", scores, rows)


def padded_attention(encoder: AttentionEncoder, histories: Histories) -> Tensor:
    """Likewise: every layer over all positions, as SASRec's code has it."""
    assert encoder.positions is not None
    x = histories.padded + encoder.positions[: histories.padded.shape[1]].flip(0)
    mask = (histories.is_id | ~histories.is_id.any(dim=1, keepdim=True))[:, None, None, :]
    for layer in encoder.layers:
        y = layer.norm(x)
        keys, values = layer.key_and_value(y).chunk(2, dim=2)
        heads = [one.unflatten(2, (layer.num_heads, -1)).transpose(1, 2) for one in (layer.query(y), keys, values)]
        x = x + layer.out(functional.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2).flatten(2))
        x = x + layer.mlp(layer.norm_of_mlp(x))
    return encoder.norm(x[:, -1]).masked_fill(~histories.is_id[:, -1:], 0)


def jagged(encoder: HistoryEncoder, histories: Histories) -> Tensor:
    target = histories.target if isinstance(encoder, DINEncoder) else None
    vectors: Tensor = encoder(histories.rows, histories.offsets, target)
    return vectors


def padded(encoder: HistoryEncoder, histories: Histories) -> Tensor:
    if isinstance(encoder, DINEncoder):
        return padded_din(encoder, histories)
    assert isinstance(encoder, AttentionEncoder)
    return padded_attention(encoder, histories)


WAYS: dict[str, Callable[[Any, Histories], Tensor]] = {"rowstead": jagged, "padded": padded}


def forward_and_backward(way: str, encoder: HistoryEncoder, histories: Histories) -> Callable[[], None]:
    inputs = [histories.rows if way == "rowstead" else histories.padded, *encoder.parameters()]
    inputs += [histories.target] if isinstance(encoder, DINEncoder) else []

    def run() -> None:
        torch.autograd.grad(WAYS[way](encoder, histories), inputs, histories.grad)

    return run


def measure_speed(kind: str, num_histories: int, longest: int, width: int, repeats: int) -> dict[str, Any]:
    """One row: medians of both, after a check that they compute the same."""
    torch.manual_seed(1)
    encoder = build_encoder(SPECS[kind], width=width, max_ids=longest)
    histories = Histories.draw(skewed_lengths(num_histories, longest), width)
    torch.testing.assert_close(jagged(encoder, histories), padded(encoder, histories), rtol=1e-3, atol=1e-4)
    with OtherLoad() as others:
        works = {way: forward_and_backward(way, encoder, histories) for way in WAYS}
        turns = alternate(works, repeats=repeats, warmups=1, clock=time.process_time)
        seconds = {way: statistics.median(taken) for way, taken in turns.items()}
    return {
        "speed": kind,
        "histories": num_histories,
        "longest": longest,
        "mean_ids": len(histories.rows) / num_histories,
        "width": width,
        **{f"{way}_ms": 1e3 * taken for way, taken in seconds.items()},
        "times_as_fast": seconds["padded"] / seconds["rowstead"],
        "cores_used_by_others": others.cores,
    }


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operators return, for as long as they live; `peak` is the most at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._live: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self._live:
                self._live.add(storage._cdata)
                self._now += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self._now)
        return result

    def _free(self, key: int, num_bytes: int) -> None:
        self._live.discard(key)
        self._now -= num_bytes


def peak_bytes(work: Callable[[], None]) -> int:
    """The most memory that tensors took at one time of what `work` computes."""
    with LiveBytes() as live:
        work()
    return live.peak


def measure_memory(kind: str, width: int, longest: int) -> dict[str, Any]:
    """One row: peaks for 256 histories of 40 ids, and for as many ids of which one history has `longest`."""
    torch.manual_seed(1)
    even, uneven = torch.full((256,), 40), torch.full((256,), 40)
    uneven[0] = longest
    uneven[1:] -= -(-(longest - 40) // 255)
    uneven[-1] += even.sum() - uneven.sum()
    encoder, row = build_encoder(SPECS[kind], width=width, max_ids=longest), {"memory": kind, "ids": int(even.sum())}
    for way in WAYS:
        for name, lengths in (("even", even), ("one_long", uneven)):
            histories = Histories.draw(lengths, width, with_padded=way == "padded")
            row[f"{way}_{name}_bytes"] = peak_bytes(forward_and_backward(way, encoder, histories))
    return row | {f"{way}_growth": row[f"{way}_one_long_bytes"] / row[f"{way}_even_bytes"] for way in WAYS}


def normalised_entropy(p: NDArray[np.floating], labels: NDArray[np.floating]) -> float:
    p, rate = p.astype(np.float64), float(labels.mean(dtype=np.float64))
    loss = -np.mean(labels * np.log(p) + (1 - labels) * np.log1p(-p))
    return float(loss / -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)))


def measure_quality(seed: int) -> dict[str, Any]:
    """One row: NE with the history encoded and averaged, and the share of the known gap between them."""
    found = {}
    for name, others in (("din", ()), ("mean_pooling", MEAN_POOLED)):
        spec = load_recipe("din", [f"seed={seed}", f"data.interests.seed={seed}", "train.checkpoint_every=null", *others])
        with tempfile.TemporaryDirectory() as folder:
            quality = train(spec, out=Path(folder) / "run").quality
        assert quality is not None
        found[name] = quality.ne
        print(f"seed {seed}, {name}: NE {quality.ne:.4f}", file=sys.stderr)
    assert spec.data.interests is not None
    log = InterestsLog(spec.data.interests)
    rows = log.split("eval")
    block = log.rows(rows.start, rows.stop)
    assert block.labels is not None
    assert block.true_p is not None
    best = normalised_entropy(block.true_p, block.labels)
    unordered = normalised_entropy(log.unordered_p(rows.start, rows.stop), block.labels)
    return {
        "quality": f"seed {seed}",
        "best_ne": best,
        "best_ne_without_order": unordered,
        "din_ne": found["din"],
        "mean_pooling_ne": found["mean_pooling"],
        "share_of_gap": (found["mean_pooling"] - found["din"]) / (unordered - best),
    }


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    repeats = 3 if options.quick else 9
    shapes = [(1024, 200, 32)] if options.quick else [(1024, 200, 32), (2048, 100, 16), (512, 1000, 32)]
    rows = [measure_speed(kind, *shape, repeats) for kind in SPECS for shape in shapes]
    rows += [measure_memory(kind, 32, 1000) for kind in SPECS]
    return rows + [measure_quality(seed) for seed in ((1,) if options.quick else (1, 2, 3))]


def summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for kind in SPECS:
        found[f"{kind}_vs_padded_min"] = min(row["times_as_fast"] for row in rows if row.get("speed") == kind)
        found |= {f"{kind}_memory_growth": row["rowstead_growth"] for row in rows if row.get("memory") == kind}
    gaps = [row["share_of_gap"] for row in rows if "quality" in row]
    return found | {"din_share_of_gap_min": min(gaps), "din_share_of_gap_mean": statistics.fmean(gaps)} | noise_of(rows)


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    rows = measure(options)
    publish("histories", rows, summary_of(rows), options)


if __name__ == "__main__":
    main()
