"""How fast are pooled look-up and look-up + exact row-wise Adagrad over many tables, against FBGEMM and nn.EmbeddingBag?

All contenders pool the same ids of tables of the same size (FP32, sum) and take turns, in an order that changes; ids are drawn
anew for each round, as `rows * u**3` with u even, or evenly where the shape says so. The peer's figure for look-up + update is
its forward and its backward pass with the fused optimizer; that of nn.EmbeddingBag is forward, backward with sparse gradients
and SGD. Figures are medians.

On a GPU every call is timed in two ways. "As called" (`…_ms`): the GPU is idle when the call begins, so the host's time to
launch its kernels counts, each side as its training loop runs it: `rowstead` copies ids into memory of its own and replays a
CUDA graph, as the steps of `rowstead train` do, and FBGEMM is called eagerly, as TorchRec does. `rowstead_eager` is our store
called eagerly, and `fbgemm_graph` FBGEMM copied into and replayed in the same way, which TorchRec does not do. No gradient is
copied by anybody: in a step the network's backward pass leaves it where the update reads it.
"Device only" (`…_device_ms`): eager calls, the GPU held back until all launches are queued, so only its own time counts.
Summary keys are of times as called; those with `_eager` and `_graph` have both sides called in that way, those with `_device`
are of device time. `benchmarks/embedding_jagged.py` adds `EmbeddingBags`, called eagerly on bags of uneven lengths.

On a CPU caches are emptied before each call and threads come to rest, so rows come from memory and nobody is slowed by
another's threads. There the two peers train the same tables, for want of memory. Before that each contender has looked the
same ids up once, untimed: the host of a virtual machine may have taken pages away to see which are used (rows then came at up
to twenty times their usual time), and whoever is first to touch them would pay for all. `cores_used_by_others` says how quiet the
machine was: where cores are shared, OpenMP's threads, and so the peers, stall for up to seconds. Ratios count only where it is
near 0.

"Floor" is the bytes of distinct rows, ids and output of a look-up over the rate at which this machine copies memory.
`share_of_bandwidth_lookup` is the floor over our time, device only on a GPU; for `share_of_bandwidth_both` distinct rows and
their state are read once and written once, ids are read, the output is written and its gradient read. A ratio above 1 means
that we are faster.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import torch
from torch import Tensor

from benchmarks.harness import OtherLoad, arguments, chosen, compared, noise_of, publish
from benchmarks.peers import EmbeddingBags, fbgemm_tables, has_fbgemm
from benchmarks.timing import copy_bytes_per_s, give_back_gpu_memory, seconds_as_called, seconds_on_gpu, settle_cpu
from rowstead.data.batch import Sparse
from rowstead.kernels.layout import layout_of
from rowstead.kernels.row_state import step_scalars
from rowstead.spec.features import FeaturesSpec, SparseFeatureSpec, tables_of
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.stores.base import EmbeddingStore
from rowstead.stores.device import DeviceStore

CALLS_A_TURN = 3
WARMUPS = 3
LONG_BAG = 17
"""Ids from which on a bag's look-up should near the floor."""


@dataclass(frozen=True)
class Shape:
    name: str
    num_tables: int
    num_rows: int
    width: int
    num_ids: int
    batch_size: int
    evenly: bool = False

    @property
    def table_bytes(self) -> int:
        """FP32 rows of all tables."""
        return 4 * self.num_tables * self.num_rows * self.width

    @property
    def output_bytes(self) -> int:
        """One pooled vector a bag."""
        return 4 * self.num_tables * self.batch_size * self.width

    def draw(self, device: str) -> Sparse:
        """Fresh ids for one batch."""
        num_bags = self.num_tables * self.batch_size
        drawn = torch.rand(num_bags * self.num_ids, device=device, dtype=torch.float64)
        ids = (self.num_rows * (drawn if self.evenly else drawn**3)).long()
        offsets = torch.arange(num_bags + 1, device=device) * self.num_ids
        return Sparse(ids=ids, offsets=offsets, num_features=self.num_tables)

    def gradient(self, device: str) -> Tensor:
        """Of the output [B, sum of widths]."""
        return torch.randn(self.batch_size, self.num_tables * self.width, device=device) * 1e-3

    def distinct_rows(self, sparse: Sparse) -> int:
        """How many rows of all tables a batch reads."""
        table = torch.arange(self.num_tables, device=sparse.ids.device).repeat_interleave(self.batch_size * self.num_ids)
        return torch.unique(table * self.num_rows + sparse.ids).numel()

    def lookup_bytes(self, sparse: Sparse) -> int:
        """The least that a look-up moves: distinct rows, ids and output."""
        return 4 * self.width * self.distinct_rows(sparse) + 8 * sparse.ids.numel() + self.output_bytes

    def both_bytes(self, sparse: Sparse) -> int:
        """The least that look-up + update move: distinct rows and their state both ways, ids, output and gradient."""
        return 2 * 4 * (self.width + 1) * self.distinct_rows(sparse) + 8 * sparse.ids.numel() + 2 * self.output_bytes


SHAPES = {
    "cpu": (
        Shape("M1", 30, 100_000, 64, 28, 200),
        Shape("one-hot", 26, 1_000_000, 64, 1, 2048),
        Shape("M2", 13, 1_300_000, 64, 17, 200),
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

Work = Callable[[Sparse, Tensor], Any]
"""Takes ids and the gradient [B, sum of widths]."""


@dataclass(frozen=True)
class Contender:
    lookup: Work
    both: Work


def store_of(shape: Shape, device: str) -> DeviceStore:
    """Our tables, as training has them."""
    features = FeaturesSpec(sparse=(SparseFeatureSpec(name="f{i}", repeat=shape.num_tables, num_rows=shape.num_rows),))
    layout = layout_of(features, tables_of(features, width=shape.width))
    return DeviceStore(layout, SparseOptimizerSpec(kind="rowwise_adagrad", lr=0.01), device=device, check=device == "cpu")


def rowstead(store: EmbeddingStore) -> Contender:
    """Our store, as a step uses it."""

    def both(sparse: Sparse, grad: Tensor) -> None:
        store.lookup(sparse)
        store.update(sparse, grad, lr=0.01, step=1)

    return Contender(lookup=lambda sparse, grad: store.lookup(sparse), both=both)


class Replayed:
    """A call that was captured in a CUDA graph over memory of its own, into which ids are copied first.

    The gradient is one that was there at capture: in a captured step the backward pass before it writes it to the same address.
    """

    def __init__(self, call: Work, sparse: Sparse, grad: Tensor, ids_dtype: torch.dtype) -> None:
        self._sparse = dataclasses.replace(sparse, ids=sparse.ids.to(ids_dtype, copy=True), offsets=sparse.offsets.clone())
        self._grad, stream = grad, torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUPS):
                call(self._sparse, self._grad)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self._keeps = call(self._sparse, self._grad)

    def __call__(self, sparse: Sparse, grad: Tensor) -> None:
        self._sparse.ids.copy_(sparse.ids)
        self._sparse.offsets.copy_(sparse.offsets)
        self._graph.replay()


def replayed(contender: Contender, shape: Shape, ids_dtype: torch.dtype) -> Contender:
    """The same, replayed."""
    sparse, grad = shape.draw("cuda"), shape.gradient("cuda")
    return Contender(
        lookup=Replayed(contender.lookup, sparse, grad, ids_dtype), both=Replayed(contender.both, sparse, grad, ids_dtype)
    )


def as_a_step_runs_it(store: DeviceStore) -> Contender:
    """Our store as the captured steps of `rowstead train` call it: another stream plans the update beside the look-up."""
    from rowstead.kernels.gpu.embedding import device_scalars  # needs Triton

    assert store.optimizer is not None
    numbers = device_scalars(tuple(step_scalars(store.optimizer, lr=0.01, step=1)), 1, torch.float32, store.weights[0].device)
    aside, guard = torch.cuda.Stream(), torch.zeros(1, device="cuda")

    def both(sparse: Sparse, grad: Tensor) -> object:
        current = torch.cuda.current_stream()
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            plan = store.plan_update(sparse, scalars=numbers)
        pooled = store.lookup_unchecked(sparse)
        current.wait_stream(aside)
        store.apply_plan(plan, sparse, grad, scalars=numbers, guard=guard)
        return pooled, plan

    return Contender(lookup=lambda sparse, grad: store.lookup_unchecked(sparse), both=both)


def fbgemm(module: Any) -> Contender:
    """FBGEMM's table-batched embedding with its exact row-wise Adagrad."""

    def lookup(sparse: Sparse, grad: Tensor) -> Tensor:
        with torch.no_grad():
            pooled: Tensor = module(sparse.ids, sparse.offsets)
        return pooled

    def both(sparse: Sparse, grad: Tensor) -> None:
        module(sparse.ids, sparse.offsets).backward(grad)

    return Contender(lookup=lookup, both=both)


def embedding_bags(bags: EmbeddingBags) -> Contender:
    """nn.EmbeddingBag a table, plain SGD."""
    optimizer = torch.optim.SGD(bags.parameters(), lr=0.01)

    def lookup(sparse: Sparse, grad: Tensor) -> Tensor:
        with torch.no_grad():
            pooled: Tensor = bags(sparse)
        return pooled

    def both(sparse: Sparse, grad: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        bags(sparse).backward(grad)
        optimizer.step()

    return Contender(lookup=lookup, both=both)


def contenders_on(shape: Shape, device: str) -> dict[str, Contender]:
    """All that can run here, by name; on a CPU the peers share their tables."""
    needs_bytes, free_bytes = 2 * shape.table_bytes, psutil.virtual_memory().available
    if device == "cpu" and needs_bytes > free_bytes:
        raise SystemExit(
            f"{shape.name} needs {needs_bytes:.2g} bytes, and {free_bytes:.2g} are free: leave it out by `--shapes`"
        )
    store = store_of(shape, device)
    contenders = {"rowstead": rowstead(store)}
    if device == "cuda":
        contenders["rowstead_eager"] = contenders["rowstead"]
        contenders["rowstead"] = replayed(as_a_step_runs_it(store), shape, torch.int32)
    size, tables = (shape.num_tables, shape.num_rows, shape.width), None
    if has_fbgemm():
        module = fbgemm_tables(*size, device)
        contenders["fbgemm"] = fbgemm(module)
        if device == "cuda":
            contenders["fbgemm_graph"] = replayed(contenders["fbgemm"], shape, torch.int64)
        tables = module.split_embedding_weights() if device == "cpu" else None
    return contenders | {"torch": embedding_bags(EmbeddingBags(*size, device, tables))}


def seconds_of(shape: Shape, contenders: dict[str, Contender], device: str, repeats: int) -> dict[str, list[float]]:
    """Seconds of every round by `{contender}_{lookup|both}`, on a GPU also by `…_device`, of eager calls.

    Contenders take turns. On a GPU a turn is some calls in a row, each on ids of its own, of which the first does not count:
    the host's part of a call is several times slower when it has run something else in between, which no training loop does.
    """
    seconds: dict[str, list[float]] = {}
    on_device = {name: contenders.get(f"{name}_eager", one) for name, one in contenders.items() if "_" not in name}
    for turn in range(WARMUPS + repeats):
        draws = [shape.draw(device) for _ in range(CALLS_A_TURN if device == "cuda" else 1)]
        grad = shape.gradient(device)
        if device == "cpu":
            for one in contenders.values():
                one.lookup(draws[0], grad)
        for way, some in {"": contenders, "_device": on_device}.items() if device == "cuda" else (("", contenders),):
            names = list(some)
            for which in ("lookup", "both"):
                for offset in range(len(names)):
                    name = names[(turn + offset) % len(names)]
                    if device == "cpu":
                        settle_cpu()
                    calls = [partial(getattr(some[name], which), sparse, grad) for sparse in draws]
                    taken = [seconds_on_gpu(call) if way else seconds_as_called(call, device) for call in calls]
                    if turn >= WARMUPS:
                        seconds.setdefault(f"{name}_{which}{way}", []).extend(taken[1:] or taken)
    return seconds


def measure(shape: Shape, device: str, repeats: int, copy_rate: float) -> dict[str, Any]:
    """One row of the table: medians of all contenders on one shape."""
    contenders = contenders_on(shape, device)
    with OtherLoad() as others:
        seconds = seconds_of(shape, contenders, device, repeats)
    row: dict[str, Any] = {"shape": shape.name, "table_gb": shape.table_bytes / 1e9}
    row |= {f"{key}_ms": 1e3 * statistics.median(values) for key, values in seconds.items()}
    sparse = shape.draw(device)
    row["floor_ms"] = 1e3 * shape.lookup_bytes(sparse) / copy_rate
    way = "_device" if device == "cuda" else ""
    row["share_of_bandwidth_lookup"] = row["floor_ms"] / row[f"rowstead_lookup{way}_ms"]
    row["share_of_bandwidth_both"] = 1e3 * shape.both_bytes(sparse) / copy_rate / row[f"rowstead_both{way}_ms"]
    if device == "cpu":
        row["cores_used_by_others"] = others.cores
    return row


def summary_of(rows: Sequence[dict[str, Any]], shapes: Sequence[Shape]) -> dict[str, float]:
    """Ratios over all shapes, and how near look-ups of long bags come to the floor."""
    summary: dict[str, float] = {}
    for way in ("", "_eager", "_graph", "_device"):
        for key, peer, which in (
            ("lookup_vs_fbgemm", "fbgemm", "lookup"),
            ("lookup_update_vs_fbgemm", "fbgemm", "both"),
            ("lookup_update_vs_torch", "torch", "both"),
        ):
            ours, theirs = f"rowstead_{which}_ms", f"{peer}_{which}_ms"
            if way == "_eager":
                ours = f"rowstead_eager_{which}_ms"
            elif way == "_graph":
                theirs = f"{peer}_graph_{which}_ms"
            elif way == "_device":
                ours, theirs = (name.replace("_ms", "_device_ms") for name in (ours, theirs))
            summary |= compared(f"{key}{way}", [row[theirs] / row[ours] for row in rows if {ours, theirs} <= row.keys()])
    long_bags = [row for row, shape in zip(rows, shapes, strict=True) if shape.num_ids >= LONG_BAG]
    if long_bags:
        summary["lookup_share_of_floor_min"] = min(row["share_of_bandwidth_lookup"] for row in long_bags)
    return summary


def main() -> None:
    options = arguments(__doc__, devices=("cpu", "cuda"), with_shapes=True).parse_args()
    device: str = options.device
    copy_rate = copy_bytes_per_s(device)
    shapes = chosen(SHAPES[device], options)
    rows = []
    for shape in shapes:
        rows.append(measure(shape, device, 5 if options.quick else 20, copy_rate))
        give_back_gpu_memory()
    summary = {"copy_bytes_per_s": copy_rate, **summary_of(rows, shapes)}
    if device == "cuda" and options.shapes is None:
        from benchmarks.embedding_jagged import measure_all_jagged

        more, keys = measure_all_jagged(5 if options.quick else 20)
        rows, summary = rows + more, summary | keys
    summary |= noise_of(rows)
    missing = [] if has_fbgemm() else ["fbgemm"]
    publish("embedding", rows, summary, options, packages=("fbgemm-gpu", "fbgemm-gpu-cpu", "triton"), missing=missing)


if __name__ == "__main__":
    main()
