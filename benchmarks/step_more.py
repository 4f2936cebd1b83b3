"""Models of `benchmarks.step` beside M1 to M3, on a GPU: MLPerf's DCNv2, and M1 with batches whose number of ids varies.

DCNv2 has MLPerf's 26 tables of width 128 with at most 4 million rows each, as many ids per feature as MLPerf has, and its low-rank
cross network. Both sides multiply in the same precision: in BF16 the peer runs under autocast, which is how TorchRec's users do it.
Jagged M1 draws for every batch a mean length between 11.7 and 70 ids, so that the number of ids varies sixfold and hardly any number
comes twice; every round has new batches.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.peers import fbgemm_tables, fbgemm_tables_of, has_fbgemm
from benchmarks.production import read_shape
from benchmarks.step import (
    GPU_ROUNDS,
    NUM_BATCHES,
    QUICK_ROUNDS,
    WARMUPS,
    Model,
    PeerNet,
    Step,
    in_turn,
    of_recipe,
    plain_mlp,
    seconds_back_to_back,
)
from benchmarks.timing import give_back_gpu_memory
from rowstead.data.batch import Batch, Sparse
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.spec.run import RunSpec
from rowstead.training.build import build_model
from rowstead.training.cuda_graph_step import CudaGraphExecution
from rowstead.training.step import Stepper

MOST_ROWS = 4_000_000
DCNV2_SIZES = (8192, 32768)
JAGGED_SIZES, JAGGED_MEANS, JAGGED_BATCHES = (256, 1600), (11.7, 70.0), 32


def dcnv2_spec(batch_size: int, precision: str) -> RunSpec:
    """The run that `rowstead train mlperf` would make of it, with smaller tables."""
    spec = read_shape("mlperf")
    sparse = tuple(dataclasses.replace(feature, num_rows=min(MOST_ROWS, feature.num_rows)) for feature in spec.features.sparse)
    optimizer = SparseOptimizerSpec(kind="rowwise_adagrad", lr=0.01)
    train = dataclasses.replace(spec.train, batch_size=batch_size, sparse_optimizer=optimizer, precision=precision)
    return dataclasses.replace(spec, features=dataclasses.replace(spec.features, sparse=sparse), train=train)


def draw_bags(rows: Sequence[int], lengths: Tensor, batch_size: int) -> Sparse:
    """Ids drawn as `rows * u**3` for bags of these lengths [F*B]."""
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    limits = torch.tensor(rows, dtype=torch.float64, device=lengths.device).repeat_interleave(batch_size)
    drawn = torch.rand(int(offsets[-1]), dtype=torch.float64, device=lengths.device) ** 3
    ids = (limits.repeat_interleave(lengths) * drawn).long()
    return Sparse(ids=ids, offsets=offsets, num_features=len(rows))


def draw_batch(sparse: Sparse, num_dense: int) -> Batch:
    size, device = sparse.num_samples, sparse.ids.device
    labels = (torch.rand(size, device=device) < 0.3).float()
    return Batch(dense=torch.randn(size, num_dense, device=device), sparse=sparse, labels=labels)


class PeerDcn(nn.Module):
    """DCNv2 as TorchRec's DLRM_DCN has it: bottom MLP, low-rank cross layers over everything, top MLP; to the loss."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__()
        model, num_sparse = spec.model, len(spec.features.expanded_sparse())
        width = model.width * (num_sparse + 1)
        rank, layers = model.interaction.cross_rank, model.interaction.cross_layers
        self.bottom = plain_mlp([len(spec.features.expanded_dense()), *model.bottom, model.width], last_relu=True)
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(rank, width) for _ in range(layers))
        self.top = plain_mlp([width, *model.top, 1], last_relu=False)

    def forward(self, dense: Tensor, pooled: Tensor, labels: Tensor) -> Tensor:
        start = torch.cat((self.bottom(dense), pooled), dim=1)
        x = start
        for down, up in zip(self.down, self.up, strict=True):
            x = start * up(down(x)) + x
        return binary_cross_entropy_with_logits(self.top(x).squeeze(1).float(), labels)


def peer_step(net: nn.Module, tables: Any, precision: str) -> Step:
    """FBGEMM's tables under a network that torch.compile has compiled, with torch's Adagrad."""
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.01)
    torch.compiler.reset()
    forward = torch.compile(net, dynamic=False)

    def step(batch: Batch) -> None:
        optimizer.zero_grad(set_to_none=True)
        pooled = tables(batch.sparse.ids, batch.sparse.offsets)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = forward(batch.dense, pooled, batch.labels)
        loss.backward()
        optimizer.step()

    return step


def stepper_of(spec: RunSpec) -> Stepper:
    return Stepper(build_model(spec, torch.device("cuda"), trains=True), spec.train, total_steps=1_000_000)


def step_of(stepper: Stepper) -> Step:
    """Its step with numbers that go on."""
    number = 0

    def step(batch: Batch) -> None:
        nonlocal number
        number += 1
        stepper.start(batch, number)

    return step


def row_of(name: str, precision: str, batch_size: int, seconds: Mapping[str, float]) -> dict[str, Any]:
    row: dict[str, Any] = {"shape": name, "precision": precision, "batch_size": batch_size}
    row |= {f"{contender}_ms": 1e3 * value for contender, value in seconds.items()}
    return row | {"samples_per_s": batch_size / seconds["rowstead"]}


def measure_dcnv2(batch_size: int, precision: str, quick: bool) -> dict[str, Any]:
    """One row: DCNv2 in this batch size and precision, ours beside FBGEMM with torch.compile."""
    spec = dcnv2_spec(batch_size, precision)
    rows = [feature.num_rows for feature in spec.features.expanded_sparse()]
    assert spec.data.synth is not None
    means = torch.tensor(spec.data.synth.mean_ids, dtype=torch.int64, device="cuda")
    lengths = means.repeat_interleave(batch_size)
    batches = [
        draw_batch(draw_bags(rows, lengths, batch_size), len(spec.features.expanded_dense())) for _ in range(NUM_BATCHES)
    ]
    steps = {"rowstead": step_of(stepper_of(spec))}
    if has_fbgemm():
        net, tables = PeerDcn(spec).cuda(), fbgemm_tables_of(rows, [spec.model.width] * len(rows), "cuda")
        steps["fbgemm"] = peer_step(net, tables, precision)
    seconds = seconds_back_to_back(steps, batches, QUICK_ROUNDS if quick else GPU_ROUNDS)
    return row_of(f"DCNv2 {batch_size}", precision, batch_size, seconds)


def draw_jagged(model: Model, batch_size: int) -> Batch:
    """A batch of M1 with a mean length of its own."""
    least, most = JAGGED_MEANS
    mean = least * (most / least) ** float(torch.rand(()))
    lengths = (2 * mean * torch.rand(model.shape.num_tables * batch_size, device="cuda")).round().long()
    sparse = draw_bags([model.shape.num_rows] * model.shape.num_tables, lengths, batch_size)
    return draw_batch(sparse, model.num_dense)


def seconds_of_new_batches(steps: Mapping[str, Step], draw: Callable[[], Batch], rounds: int) -> dict[str, float]:
    """Median over rounds of the seconds of a step; all contenders get the same new batches in each round."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(WARMUPS + rounds):
        batches = [draw() for _ in range(JAGGED_BATCHES)]
        for name, step in in_turn(steps, turn):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for batch in batches:
                step(batch)
            torch.cuda.synchronize()
            if turn >= WARMUPS:
                seconds[name].append((time.perf_counter() - start) / len(batches))
    return {name: statistics.median(values) for name, values in seconds.items()}


def measure_jagged(batch_size: int, quick: bool) -> dict[str, Any]:
    """One row: M1 with batches whose number of ids varies sixfold."""
    model = of_recipe(f"M1 jagged {batch_size}", "m1", num_rows=1_000_000, batch_size=batch_size)
    stepper = stepper_of(model.spec())
    steps = {"rowstead": step_of(stepper)}
    if has_fbgemm():
        shape = model.shape
        tables = fbgemm_tables(shape.num_tables, shape.num_rows, shape.width, "cuda")
        steps["fbgemm"] = peer_step(PeerNet(model).cuda(), tables, "fp32")
    seconds = seconds_of_new_batches(steps, lambda: draw_jagged(model, batch_size), QUICK_ROUNDS if quick else GPU_ROUNDS)
    run = stepper.execution
    assert isinstance(run, CudaGraphExecution)
    return row_of(model.name, "fp32", batch_size, seconds) | {"share_replayed": run.num_replayed / run.num_steps}


def measure_more(quick: bool) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The rows, and their keys of the summary: FBGEMM's time over ours, and the least share of steps that replayed a graph."""
    rows, summary = [], {}
    for size in DCNV2_SIZES:
        for precision in ("fp32", "bf16"):
            rows.append(measure_dcnv2(size, precision, quick))
            give_back_gpu_memory()
            if "fbgemm_ms" in rows[-1]:
                name = "tf32" if precision == "fp32" else precision
                summary[f"dcnv2_{size}_{name}_vs_fbgemm"] = rows[-1]["fbgemm_ms"] / rows[-1]["rowstead_ms"]
    for size in JAGGED_SIZES:
        rows.append(measure_jagged(size, quick))
        give_back_gpu_memory()
        if "fbgemm_ms" in rows[-1]:
            summary[f"jagged_m1_{size}_vs_fbgemm"] = rows[-1]["fbgemm_ms"] / rows[-1]["rowstead_ms"]
    summary["jagged_share_replayed_min"] = min(row["share_replayed"] for row in rows if "share_replayed" in row)
    return rows, summary
