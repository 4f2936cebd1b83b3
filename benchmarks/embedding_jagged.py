"""`EmbeddingBags`, as a user's own model calls it, beside FBGEMM: rows of `benchmarks.embedding` on a GPU.

Both are called eagerly, forward and backward with the fused optimizer, on bags of uneven lengths: each length is even between 0 and twice the
mean. Widths are such as users have, 48 and 100 among them. "As called" (`…_ms`) includes the host's time to launch the work, and ours to check
the batch, which waits for the GPU; `…_device_ms` is the GPU's time alone, without that check.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import rowstead
from benchmarks.harness import compared
from benchmarks.peers import fbgemm_tables_of, has_fbgemm
from benchmarks.timing import give_back_gpu_memory, seconds_as_called, seconds_on_gpu
from rowstead.data.batch import Sparse

CALLS_A_TURN, WARMUPS = 4, 3


@dataclass(frozen=True)
class JaggedShape:
    name: str
    widths: tuple[int, ...]
    num_rows: int
    mean_ids: int
    batch_size: int

    def draw(self) -> Sparse:
        """Fresh ids, drawn as `rows * u**3`."""
        num_bags = len(self.widths) * self.batch_size
        lengths = torch.randint(0, 2 * self.mean_ids + 1, (num_bags,), device="cuda")
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        ids = (self.num_rows * torch.rand(int(offsets[-1]), device="cuda", dtype=torch.float64) ** 3).long()
        return Sparse(ids=ids, offsets=offsets, num_features=len(self.widths))


JAGGED = (
    JaggedShape("jagged M1", (64,) * 30, 1_000_000, 28, 1600),
    JaggedShape("jagged w48", (48,) * 30, 1_000_000, 10, 2048),
    JaggedShape("jagged w100", (100,) * 26, 1_000_000, 10, 2048),
    JaggedShape("jagged 200 tables w32", (32,) * 200, 200_000, 5, 1024),
    JaggedShape("jagged mixed widths", (16, 32, 64, 128) * 6, 1_000_000, 8, 2048),
    JaggedShape("jagged 0 to 2 ids w128", (128,) * 26, 1_000_000, 1, 8192),
    JaggedShape("jagged long w64", (64,) * 16, 1_000_000, 100, 512),
)

Work = Callable[[Sparse, Tensor], None]


def contenders_of(shape: JaggedShape, *, check: bool) -> dict[str, Work]:
    tables = [
        rowstead.BagTable(name=f"t{index}", num_embeddings=shape.num_rows, embedding_dim=width)
        for index, width in enumerate(shape.widths)
    ]
    bags = rowstead.EmbeddingBags(tables, device="cuda", optimizer="rowwise_adagrad", lr=0.01, check=check)
    contenders: dict[str, Work] = {"rowstead": lambda sparse, grad: bags(sparse).values().backward(grad)}
    if has_fbgemm():
        peer = fbgemm_tables_of([shape.num_rows] * len(shape.widths), shape.widths, "cuda")
        contenders["fbgemm"] = lambda sparse, grad: peer(sparse.ids, sparse.offsets).backward(grad)
    return contenders


def measure_jagged(shape: JaggedShape, repeats: int) -> dict[str, Any]:
    """One row: medians of both, in turns of a few calls of which the first does not count."""
    seconds: dict[str, list[float]] = {}
    for way, time, check in (("", partial(seconds_as_called, device="cuda"), True), ("_device", seconds_on_gpu, False)):
        contenders = contenders_of(shape, check=check)
        for turn in range(WARMUPS + repeats):
            draws = [shape.draw() for _ in range(CALLS_A_TURN)]
            grad = torch.randn(shape.batch_size, sum(shape.widths), device="cuda") * 1e-3
            for name in list(contenders)[:: 1 if turn % 2 else -1]:
                taken = [time(partial(contenders[name], sparse, grad)) for sparse in draws]
                if turn >= WARMUPS:
                    seconds.setdefault(f"{name}_both{way}_ms", []).extend(taken[1:])
        del contenders
        give_back_gpu_memory()
    return {"shape": shape.name} | {key: 1e3 * statistics.median(values) for key, values in seconds.items()}


def measure_all_jagged(repeats: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The rows and their keys of the summary."""
    rows = []
    for shape in JAGGED:
        rows.append(measure_jagged(shape, repeats))
        give_back_gpu_memory()
    summary: dict[str, float] = {}
    for key, way in (("embedding_bags_eager_vs_fbgemm", ""), ("embedding_bags_device_vs_fbgemm", "_device")):
        ratios = [row[f"fbgemm_both{way}_ms"] / row[f"rowstead_both{way}_ms"] for row in rows if "fbgemm_both_ms" in row]
        summary |= compared(key, ratios)
    return rows, summary
