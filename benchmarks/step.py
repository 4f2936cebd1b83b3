"""How long does one training step of M1, M2 and M3 take, against the same model over FBGEMM and in plain PyTorch?

A step is look-up, forward, loss, backward, Adagrad for the dense part and row-wise Adagrad for the rows. Rows are 64 wide, bags
have the recipe's mean number of ids and are summed, ids are drawn as `rows * u**3` with u even; all contenders train on the same batches and
take turns. Ours is the Stepper of `rowstead train`. The peers have MLPs of the same widths and the interaction of TorchRec's
DLRM (concatenate, multiply, index the pairs), and torch.optim.Adagrad as it comes: "fbgemm" over FBGEMM's tables with exact
row-wise Adagrad, "torch" over one nn.EmbeddingBag a table with sparse gradients and SGD.

On a CPU every step is timed alone, with batches of 200 and tables of 100,000 rows, in FP32; rows with `bf16` are ours under
`train.precision: bf16`, on processors that have it. `cores_used_by_others` says how quiet the machine was: where cores are shared, OpenMP's threads stall
for up to seconds, so ratios count only where it is near 0.

On a GPU ("as called") steps run back to back between two synchronisations, on batches that are in its memory already; both
sides multiply in TF32, and `benchmarks/step_more.py` adds DCNv2, also in BF16, and jagged batches; "fbgemm" is with torch.compile over the dense part and the loss, "fbgemm_eager" without. Joules are the
GPU's own, by its energy counter, where pynvml is installed. Figures are medians.

`share_of_roofline` is the least possible time over ours: the larger of bytes over the rate at which this machine copies memory
and operations over the rate of a large matrix product, both measured by this command. Bytes: distinct rows with their state,
and dense parameters with theirs, read and written once; ids; pooled vectors and every activation, once forward and once
backward. Operations: MLPs and pairs, forward and backward. A ratio above 1 means that we are faster.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.embedding import Shape
from benchmarks.harness import OtherLoad, arguments, chosen, compared, noise_of, publish
from benchmarks.peers import EmbeddingBags, fbgemm_tables, has_fbgemm
from benchmarks.production import read_shape
from benchmarks.timing import copy_bytes_per_s, give_back_gpu_memory, operations_per_s, seconds_as_called
from rowstead.data.batch import Batch
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.spec.run import RunSpec
from rowstead.training.build import build_model
from rowstead.training.device import has_bf16 as device_has_bf16
from rowstead.training.step import Stepper

Precision = Literal["fp32", "bf16"]
Step = Callable[[Batch], Any]

WARMUPS, QUICK_ROUNDS = 3, 5
CPU_ROUNDS = 25
GPU_ROUNDS, STEPS_A_ROUND, NUM_BATCHES = 20, 16, 8
"""On a GPU: rounds that count, steps back to back in each, and batches that they take in turn."""
ENERGY_S = 1.5
"""How long a contender runs while its joules are counted, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A recipe with tables and batches of another size."""

    recipe: str
    shape: Shape
    paper_batch: bool | None = None
    """On a GPU whether the batch size is that of the paper, or a larger one."""

    @property
    def name(self) -> str:
        return self.shape.name

    def spec(self, precision: Precision = "fp32") -> RunSpec:
        """The run that `rowstead train` would make of it."""
        spec, shape = read_shape(self.recipe), self.shape
        sparse = dataclasses.replace(spec.features.sparse[0], repeat=shape.num_tables, num_rows=shape.num_rows, pooling="sum")
        optimizer = SparseOptimizerSpec(kind="rowwise_adagrad", lr=0.01)
        return dataclasses.replace(
            spec,
            features=dataclasses.replace(spec.features, sparse=(sparse,)),
            model=dataclasses.replace(spec.model, width=shape.width),
            train=dataclasses.replace(spec.train, batch_size=shape.batch_size, sparse_optimizer=optimizer, precision=precision),
        )

    def draw(self, device: str) -> Batch:
        """A fresh batch."""
        size = self.shape.batch_size
        dense = torch.randn(size, self.num_dense, device=device)
        labels = (torch.rand(size, device=device) < 0.3).float()
        return Batch(dense=dense, sparse=self.shape.draw(device), labels=labels)

    @property
    def num_dense(self) -> int:
        return len(read_shape(self.recipe).features.expanded_dense())

    @property
    def num_vectors(self) -> int:
        """How many vectors interact."""
        return self.shape.num_tables + 1

    @property
    def num_pairs(self) -> int:
        return self.num_vectors * (self.num_vectors - 1) // 2

    def widths(self) -> tuple[list[int], list[int]]:
        """Widths from input to output of the bottom and of the top MLP."""
        model, width = read_shape(self.recipe).model, self.shape.width
        return [self.num_dense, *model.bottom, width], [width + self.num_pairs, *model.top, 1]

    def operations(self) -> int:
        """Multiplications and additions of one step; the first layer needs no gradient of its input."""
        bottom, top = self.widths()
        layers = [a * b for widths in (bottom, top) for a, b in pairwise(widths)]
        pairs = self.num_pairs * self.shape.width
        return 2 * self.shape.batch_size * (3 * sum(layers) - bottom[0] * bottom[1] + 3 * pairs)

    def least_bytes(self, batch: Batch) -> int:
        """The least that one step moves."""
        bottom, top = self.widths()
        parameters = sum((a + 1) * b for widths in (bottom, top) for a, b in pairwise(widths))
        activations = 2 * (sum(bottom[1:]) + sum(top)) + bottom[0]
        return self.shape.both_bytes(batch.sparse) + 4 * (2 * 2 * parameters + self.shape.batch_size * activations)


def of_recipe(name: str, recipe: str, *, num_rows: int, batch_size: int, paper_batch: bool | None = None) -> Model:
    """A recipe's model with rows of 64 and as many ids in every bag as it has on average."""
    spec = read_shape(recipe)
    assert spec.data.synth is not None
    num_ids = spec.data.synth.mean_ids
    assert isinstance(num_ids, (int, float)), "these recipes have one mean for all features"
    shape = Shape(name, len(spec.features.expanded_sparse()), num_rows, 64, int(num_ids), batch_size)
    return Model(recipe=recipe, shape=shape, paper_batch=paper_batch)


def models_for(device: str) -> list[Model]:
    """What is measured on a device."""
    if device == "cpu":
        return [of_recipe(name.upper(), name, num_rows=100_000, batch_size=200) for name in ("m1", "m2", "m3")]
    sizes = {"m1": (1_000_000, 1600, 16384), "m2": (1_000_000, 3200, 16384), "m3": (500_000, 800, 4096)}
    return [
        of_recipe(f"{name.upper()} {size}", name, num_rows=num_rows, batch_size=size, paper_batch=size == paper)
        for name, (num_rows, paper, large) in sizes.items()
        for size in (paper, large)
    ]


def steps_of(stepper: Stepper) -> Step:
    """Its step with numbers that go on."""
    number = 0

    def step(batch: Batch) -> None:
        nonlocal number
        number += 1
        stepper.start(batch, number)

    return step


def rowstead_steps(model: Model, device: str, precisions: Sequence[Precision]) -> dict[str, Step]:
    """Our step in each precision, over the same tables."""
    built = build_model(model.spec(), torch.device(device), trains=True)
    return {
        "rowstead" if precision == "fp32" else f"rowstead_{precision}": steps_of(
            Stepper(built, model.spec(precision).train, total_steps=1_000_000)
        )
        for precision in precisions
    }


def plain_mlp(widths: Sequence[int], *, last_relu: bool) -> nn.Sequential:
    """Linear layers with ReLU between them, and after the last one only if asked for."""
    layers: list[nn.Module] = []
    for in_width, out_width in pairwise(widths):
        layers += [nn.Linear(in_width, out_width), nn.ReLU()]
    return nn.Sequential(*(layers if last_relu else layers[:-1]))


class PeerNet(nn.Module):
    """The dense part as TorchRec's DLRM has it: dense features [B, Fd], pooled rows [B, F*D] and labels [B] to the loss."""

    pairs: Tensor

    def __init__(self, model: Model) -> None:
        super().__init__()
        bottom, top = model.widths()
        self.width = model.shape.width
        self.bottom = plain_mlp(bottom, last_relu=True)
        self.top = plain_mlp(top, last_relu=False)
        num_vectors = model.num_vectors
        self.register_buffer("pairs", torch.tril_indices(num_vectors, num_vectors, offset=-1), persistent=False)

    def forward(self, dense: Tensor, pooled: Tensor, labels: Tensor) -> Tensor:
        projected = self.bottom(dense)
        vectors = torch.cat((projected.unsqueeze(1), pooled.unflatten(1, (-1, self.width))), dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        log_odds = self.top(torch.cat((projected, products), dim=1))
        return binary_cross_entropy_with_logits(log_odds.squeeze(1), labels)


def fbgemm_steps(model: Model, device: str) -> dict[str, Step]:
    """The peer over FBGEMM's tables; on a GPU compiled and eager, over the same parameters."""
    shape = model.shape
    tables = fbgemm_tables(shape.num_tables, shape.num_rows, shape.width, device)
    net = PeerNet(model).to(device)
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.01)

    def step_with(forward: Callable[..., Tensor]) -> Step:
        def step(batch: Batch) -> None:
            optimizer.zero_grad(set_to_none=True)
            forward(batch.dense, tables(batch.sparse.ids, batch.sparse.offsets), batch.labels).backward()
            optimizer.step()

        return step

    if device == "cpu":
        return {"fbgemm": step_with(net)}
    torch.compiler.reset()  # every shape is compiled for itself, else torch makes one slower program for all of them
    return {"fbgemm": step_with(torch.compile(net, dynamic=False)), "fbgemm_eager": step_with(net)}


def torch_step(model: Model, device: str) -> Step:
    """The peer over nn.EmbeddingBag with sparse gradients and SGD."""
    shape = model.shape
    bags = EmbeddingBags(shape.num_tables, shape.num_rows, shape.width, device)
    net = PeerNet(model).to(device)
    optimizers = torch.optim.Adagrad(net.parameters(), lr=0.01), torch.optim.SGD(bags.parameters(), lr=0.01)

    def step(batch: Batch) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        net(batch.dense, bags(batch.sparse), batch.labels).backward()
        for optimizer in optimizers:
            optimizer.step()

    return step


def has_bf16(device: str) -> bool:
    """Whether products in BF16 are worth measuring."""
    return device_has_bf16(torch.device(device))


def steps_on(model: Model, device: str) -> dict[str, Step]:
    """All contenders that can run here, by name."""
    steps = rowstead_steps(model, device, ("fp32", "bf16") if device == "cpu" and has_bf16(device) else ("fp32",))
    if has_fbgemm():
        steps |= fbgemm_steps(model, device)
    return steps if device == "cuda" else steps | {"torch": torch_step(model, device)}


def in_turn(steps: Mapping[str, Step], turn: int) -> Iterator[tuple[str, Step]]:
    """The contenders, a different one first each time."""
    names = list(steps)
    return ((name, steps[name]) for name in names[turn % len(names) :] + names[: turn % len(names)])


def seconds_alone(model: Model, steps: Mapping[str, Step], rounds: int) -> dict[str, float]:
    """Median seconds of a step on a CPU, each timed alone, on a fresh batch in every round."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(WARMUPS + rounds):
        batch = model.draw("cpu")
        for name, step in in_turn(steps, turn):
            taken = seconds_as_called(partial(step, batch), "cpu")
            if turn >= WARMUPS:
                seconds[name].append(taken)
    return {name: statistics.median(values) for name, values in seconds.items()}


def seconds_back_to_back(steps: Mapping[str, Step], batches: Sequence[Batch], rounds: int) -> dict[str, float]:
    """Median over rounds of the seconds of a step on a GPU, among some back to back."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(WARMUPS + rounds):
        for name, step in in_turn(steps, turn):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for number in range(STEPS_A_ROUND):
                step(batches[number % len(batches)])
            torch.cuda.synchronize()
            if turn >= WARMUPS:
                seconds[name].append((time.perf_counter() - start) / STEPS_A_ROUND)
    return {name: statistics.median(values) for name, values in seconds.items()}


def energy_counter() -> Callable[[], float] | None:
    """Joules that the GPU has used so far; none where it cannot be asked."""
    try:
        import pynvml  # type: ignore[import-not-found]
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError:
        return None
    return lambda: float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) * 1e-3


def joules_per_1000_samples(step: Step, batches: Sequence[Batch], joules: Callable[[], float]) -> float:
    """What the GPU uses while a contender trains for a while."""
    samples = 0
    torch.cuda.synchronize()
    start, before = time.perf_counter(), joules()
    while time.perf_counter() - start < ENERGY_S:
        for batch in batches:
            step(batch)
            samples += batch.num_samples
        torch.cuda.synchronize()
    return 1e3 * (joules() - before) / samples


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What this machine can do at best."""

    copy_bytes_per_s: float
    operations_per_s: Mapping[Precision, float]

    @staticmethod
    def of(device: str) -> Rates:
        operations: dict[Precision, float] = {"fp32": operations_per_s(device)}
        if has_bf16(device):
            operations["bf16"] = operations_per_s(device, torch.bfloat16)
        return Rates(copy_bytes_per_s=copy_bytes_per_s(device), operations_per_s=operations)

    def least_s(self, model: Model, batch: Batch, precision: Precision = "fp32") -> float:
        """The roofline's time of one step; BF16 may fall back to FP32 where that is faster."""
        rates = self.operations_per_s
        operations_per_s = rates["fp32"] if precision == "fp32" else max(rates.values())
        return max(model.least_bytes(batch) / self.copy_bytes_per_s, model.operations() / operations_per_s)


def measure(model: Model, device: str, rates: Rates, quick: bool) -> list[dict[str, Any]]:
    """The rows of one model: all contenders, and on a CPU ours in BF16."""
    steps, size = steps_on(model, device), model.shape.batch_size
    batches = [model.draw(device) for _ in range(NUM_BATCHES if device == "cuda" else 1)]
    figures: dict[str, Any] = {}
    if device == "cuda":
        seconds = seconds_back_to_back(steps, batches, QUICK_ROUNDS if quick else GPU_ROUNDS)
        if joules := energy_counter():
            figures = {
                f"{name}_joules_per_1000_samples": joules_per_1000_samples(step, batches, joules)
                for name, step in steps.items()
            }
            figures["joules_per_1000_samples"] = figures.pop("rowstead_joules_per_1000_samples")
    else:
        with OtherLoad() as others:
            seconds = seconds_alone(model, steps, QUICK_ROUNDS if quick else CPU_ROUNDS)
        figures["cores_used_by_others"] = others.cores
    rows = []
    for name, precision in (("rowstead", "fp32"), ("rowstead_bf16", "bf16")):
        if name not in seconds:
            continue
        taken = seconds.pop(name)
        row: dict[str, Any] = {"shape": model.name, "precision": precision, "batch_size": size, "rowstead_ms": 1e3 * taken}
        if precision == "fp32":
            row |= {f"{peer}_ms": 1e3 * value for peer, value in seconds.items() if not peer.startswith("rowstead")}
        row["samples_per_s"] = size / taken
        row["share_of_roofline"] = rates.least_s(model, batches[0], precision) / taken  # type: ignore[arg-type]
        rows.append(row | (figures if precision == "fp32" else {}))
    return rows


def summary_of(rows: Sequence[dict[str, Any]], models: Sequence[Model]) -> dict[str, float]:
    """Ratios over all models, and on a GPU apart for the paper's batch sizes and for large ones."""
    by_name = {row["shape"]: row for row in rows if row["precision"] == "fp32"}

    def ratios(peer: str, some: Sequence[Model] = models) -> list[float]:
        picked = [by_name[model.name] for model in some]
        return [row[f"{peer}_ms"] / row["rowstead_ms"] for row in picked if f"{peer}_ms" in row]

    summary: dict[str, float] = {}
    for peer in ("fbgemm", "fbgemm_eager", "torch"):
        summary |= compared(f"step_vs_{peer}", ratios(peer))
    for name, recipes in (("m1_m2", ("m1", "m2")), ("m3", ("m3",))):
        if found := ratios("fbgemm", [model for model in models if model.paper_batch and model.recipe in recipes]):
            summary[f"step_vs_fbgemm_paper_batch_min_{name}"] = min(found)
    large = [model for model in models if model.paper_batch is False]
    summary |= compared("step_vs_fbgemm_large_batch", ratios("fbgemm", large))
    return summary


def main() -> None:
    options = arguments(__doc__, devices=("cpu", "cuda"), with_shapes=True).parse_args()
    device: str = options.device
    if device == "cuda":
        torch.set_float32_matmul_precision("high")
    rates = Rates.of(device)
    models = chosen(models_for(device), options)
    rows = []
    for model in models:
        rows += measure(model, device, rates, options.quick)
        give_back_gpu_memory()
    summary = {"copy_bytes_per_s": rates.copy_bytes_per_s}
    summary |= {f"operations_per_s_{precision}": rate for precision, rate in rates.operations_per_s.items()}
    summary |= summary_of(rows, models)
    if device == "cuda" and options.shapes is None:
        from benchmarks.step_more import measure_more

        more, keys = measure_more(options.quick)
        rows, summary = rows + more, summary | keys
    summary |= noise_of(rows)
    missing = [name for name, is_there in (("fbgemm", has_fbgemm()), ("bf16", has_bf16(device))) if not is_there]
    packages = ("fbgemm-gpu", "fbgemm-gpu-cpu", "triton")
    publish("step", rows, summary, options, packages=packages, missing=missing)


if __name__ == "__main__":
    main()
