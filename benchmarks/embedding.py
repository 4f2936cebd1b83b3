"""How fast are pooled look-up and look-up + exact row-wise Adagrad over many tables, against FBGEMM and nn.EmbeddingBag?

All contenders pool the same ids of the same tables (FP32, sum) and take turns; ids are drawn anew for each round, as
`rows * u**3` with u even, or evenly where the shape says so. The peer's figure for look-up + update is its forward and its
backward pass with the fused optimizer; that of nn.EmbeddingBag is forward, backward with sparse gradients and SGD. "Floor" is
the bytes of distinct rows, ids and output over the rate at which this machine copies memory. A ratio above 1 means that we
are faster.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import arguments, publish
from rowstead.contracts.batch import Sparse
from rowstead.kernels.layout import layout_of
from rowstead.spec.features import FeaturesSpec, SparseFeatureSpec, tables_of
from rowstead.spec.train import SparseOptimizerSpec
from rowstead.stores.device import DeviceStore


@dataclass(frozen=True)
class Shape:
    name: str
    num_tables: int
    num_rows: int
    width: int
    num_ids: int
    batch_size: int
    evenly: bool = False

    def draw(self, device: str) -> tuple[Tensor, Tensor]:
        """Fresh ids [nnz], feature-major, and offsets [F*B + 1]."""
        num_bags = self.num_tables * self.batch_size
        drawn = torch.rand(num_bags * self.num_ids, device=device, dtype=torch.float64)
        ids = (self.num_rows * (drawn if self.evenly else drawn**3)).long()
        return ids, torch.arange(num_bags + 1, device=device) * self.num_ids

    def floor_bytes(self, ids: Tensor) -> int:
        """Bytes of distinct rows, ids and output of one look-up."""
        table = torch.arange(self.num_tables, device=ids.device).repeat_interleave(self.batch_size * self.num_ids)
        distinct = torch.unique(table * self.num_rows + ids).numel()
        return 4 * self.width * (distinct + self.num_tables * self.batch_size) + 8 * ids.numel()


SHAPES = {
    "cpu": (
        Shape("M1", 30, 100_000, 64, 28, 200),
        Shape("one-hot", 26, 1_000_000, 64, 1, 2048),
        Shape("M2", 13, 2_000_000, 64, 17, 200),
        Shape("M3", 127, 100_000, 64, 49, 200),
    ),
    "cuda": (
        Shape("M1 1600", 30, 1_000_000, 64, 28, 1600),
        Shape("M1 16384", 30, 1_000_000, 64, 28, 16384),
        Shape("M2 3200", 13, 5_000_000, 64, 17, 3200),
        Shape("M3 800", 127, 500_000, 64, 49, 800),
        Shape("MLPerf-like", 26, 1_000_000, 128, 20, 8192),
        Shape("one-hot", 26, 1_000_000, 128, 1, 65536),
        Shape("even ids", 30, 3_000_000, 64, 28, 8192, evenly=True),
    ),
}

QUEUE_CYCLES = 10_000_000
"""For which the GPU waits before a timed call: some milliseconds, in which the host queues all of its launches."""

Work = Callable[[Tensor, Tensor, Tensor], Any]
"""Takes ids, offsets and the gradient [B, sum of widths]."""


def rowstead(shape: Shape, device: str) -> tuple[Work, Work]:
    """Our look-up, and our look-up + update."""
    features = FeaturesSpec(sparse=(SparseFeatureSpec(name="f{i}", repeat=shape.num_tables, num_rows=shape.num_rows),))
    layout = layout_of(features, tables_of(features, width=shape.width))
    store = DeviceStore(layout, SparseOptimizerSpec(kind="rowwise_adagrad", lr=0.01), device=device)

    def look_up(ids: Tensor, offsets: Tensor, grad: Tensor) -> Tensor:
        return store.lookup(Sparse(ids=ids, offsets=offsets, num_features=shape.num_tables))

    def both(ids: Tensor, offsets: Tensor, grad: Tensor) -> None:
        sparse = Sparse(ids=ids, offsets=offsets, num_features=shape.num_tables)
        store.lookup(sparse)
        store.update(sparse, grad, lr=0.01, step=1)

    return look_up, both


def fbgemm(shape: Shape, device: str) -> tuple[Work, Work] | None:
    """FBGEMM's table-batched embedding with its exact row-wise Adagrad; none where it is not installed."""
    try:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )
    except ImportError:
        return None
    on_gpu = device == "cuda"
    place = EmbeddingLocation.DEVICE if on_gpu else EmbeddingLocation.HOST
    compute = ComputeDevice.CUDA if on_gpu else ComputeDevice.CPU
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(shape.num_rows, shape.width, place, compute)] * shape.num_tables,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        pooling_mode=PoolingMode.SUM,
        learning_rate=0.01,
        device=torch.device(device),
    )
    module.init_embedding_weights_uniform(-0.01, 0.01)

    def look_up(ids: Tensor, offsets: Tensor, grad: Tensor) -> Tensor:
        with torch.no_grad():
            return module(ids, offsets)

    def both(ids: Tensor, offsets: Tensor, grad: Tensor) -> None:
        module(ids, offsets).backward(grad)

    return look_up, both


def embedding_bags(shape: Shape, device: str) -> tuple[Work, Work]:
    """nn.EmbeddingBag a table, sparse gradients, plain SGD."""
    bags = torch.nn.ModuleList(
        torch.nn.EmbeddingBag(shape.num_rows, shape.width, mode="sum", sparse=True, include_last_offset=True, device=device)
        for _ in range(shape.num_tables)
    )
    optimizer = torch.optim.SGD(bags.parameters(), lr=0.01)
    each = shape.batch_size * shape.num_ids
    bounds = torch.arange(shape.batch_size + 1, device=device) * shape.num_ids

    def look_up(ids: Tensor, offsets: Tensor, grad: Tensor) -> Tensor:
        return torch.cat([bag(part, bounds) for bag, part in zip(bags, ids.split(each), strict=True)], dim=1)

    def both(ids: Tensor, offsets: Tensor, grad: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        look_up(ids, offsets, grad).backward(grad)
        optimizer.step()

    return look_up, both


def seconds_of(work: Work, arguments: tuple[Tensor, Tensor, Tensor], device: str) -> float:
    """Wall time of one call on a CPU; on a GPU the time between two events there, with the launches queued beforehand."""
    if device == "cpu":
        start = time.perf_counter()
        work(*arguments)
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(QUEUE_CYCLES)
    begin.record()
    work(*arguments)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e-3


def copy_bytes_per_s(device: str) -> float:
    """Bytes read and written each second by a large copy, the best of several."""
    source = torch.ones((1 << 30) // 4 if device == "cuda" else (1 << 28), device=device)
    target = torch.empty_like(source)
    best = min(seconds_of(lambda *_: target.copy_(source), (source, source, source), device) for _ in range(8))
    return 2 * 4 * source.numel() / best


def measure(shape: Shape, device: str, repeats: int, copy_rate: float) -> dict[str, Any]:
    """One row of the table: medians of all contenders on one shape."""
    contenders = {"rowstead": rowstead(shape, device), "fbgemm": fbgemm(shape, device), "torch": embedding_bags(shape, device)}
    seconds: dict[tuple[str, int], list[float]] = {}
    for turn in range(3 + repeats):
        ids, offsets = shape.draw(device)
        grad = torch.randn(shape.batch_size, shape.num_tables * shape.width, device=device) * 1e-3
        for name, works in contenders.items():
            for which, work in enumerate(works or ()):
                taken = seconds_of(work, (ids, offsets, grad), device)
                if turn >= 3:
                    seconds.setdefault((name, which), []).append(taken)
    row: dict[str, Any] = {"shape": shape.name}
    for (name, which), values in seconds.items():
        row[f"{name}_{('lookup', 'both')[which]}_ms"] = 1e3 * statistics.median(values)
    row["floor_ms"] = 1e3 * shape.floor_bytes(ids) / copy_rate
    row["share_of_floor"] = row["floor_ms"] / row["rowstead_lookup_ms"]
    return row


def main() -> None:
    options = arguments(__doc__, devices=("cpu", "cuda")).parse_args()
    device: str = options.device
    copy_rate = copy_bytes_per_s(device)
    shapes = SHAPES[device][:2] if options.quick else SHAPES[device]
    rows = []
    for shape in shapes:
        rows.append(measure(shape, device, 5 if options.quick else 20, copy_rate))
        if device == "cuda":
            torch.cuda.empty_cache()
    summary = {"copy_bytes_per_s": copy_rate}
    for key, peer, which in (
        ("lookup_vs_fbgemm", "fbgemm", "lookup"),
        ("lookup_update_vs_fbgemm", "fbgemm", "both"),
        ("lookup_update_vs_torch", "torch", "both"),
    ):
        ratios = [row[f"{peer}_{which}_ms"] / row[f"rowstead_{which}_ms"] for row in rows if f"{peer}_{which}_ms" in row]
        if ratios:
            summary |= {f"{key}_geomean": statistics.geometric_mean(ratios), f"{key}_min": min(ratios)}
    long_bags = [row["share_of_floor"] for row, shape in zip(rows, shapes, strict=True) if shape.num_ids >= 17]
    summary["lookup_share_of_floor_min"] = min(long_bags)
    missing = [] if "fbgemm_lookup_ms" in rows[0] else ["fbgemm"]
    publish("embedding", rows, summary, options, packages=("fbgemm-gpu", "fbgemm-gpu-cpu", "triton"), missing=missing)


if __name__ == "__main__":
    main()
