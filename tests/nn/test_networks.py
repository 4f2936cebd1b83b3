"""Every built-in network equals its paper's equations, does what every network does, and is what the planner thinks.

A new entry of the registry gets these tests by itself; it needs a plain version in `tests/nn/plain_networks.py`.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import rowstead
from rowstead.distributed.process_group import SingleProcess
from rowstead.fleet.coordinator import train_fleet
from rowstead.nn.deepfm import pair_products
from rowstead.nn.network import Network, build_network
from rowstead.plan.predict import predict
from rowstead.plan.setup import Setup
from rowstead.plan.work import step_work
from rowstead.run import resume, train
from rowstead.spec.catalogue import load_machine, load_software
from rowstead.spec.errors import SpecError
from rowstead.spec.fleet import FleetSpec
from rowstead.spec.networks import NETWORKS
from rowstead.spec.run import RunSpec, load_recipe
from rowstead.training.checkpoint_fits import architecture
from tests.distributed.sharded_training import Settings, in_processes, trained
from tests.nn.plain_networks import PLAIN
from tests.small_runs import RecordingCallback, assert_same_weights, figures_of, parquet_spec, small_spec, written_log

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "xdeepfm": [{"cin": [3, 2]}],
    "autoint": [{"layers": 2, "head_width": 3}, {"deep": False, "heads": 1}],
    "dcnv2": [
        {"cross_layers": 2},
        {"structure": "stacked", "cross_layers": 2},
        {"rank": 3},
        {"structure": "stacked", "rank": 3, "experts": 2},
    ],
    "masknet": [{"blocks": 2, "block_width": 6}, {"structure": "stacked", "blocks": 2, "block_width": 6, "reduction": 0.5}],
    "finalmlp": [
        {"second": [8], "heads": 2},
        {"gate": [5], "first_context": ["sparse_1"], "second_context": ["sparse_0", "sparse_2"]},
    ],
}
"""Options beside the defaults, by network."""
CASES = [pytest.param(name, {}, id=name) for name in NETWORKS]
CASES += [
    pytest.param(name, options, id="-".join([name, *(str(value) for value in options.values())]))
    for name, several in OPTIONS.items()
    for options in several
]
EACH = pytest.mark.parametrize(("name", "options"), CASES)
EVERY = pytest.mark.parametrize("name", NETWORKS)
PAGE = Path(__file__).parents[2] / "docs" / "networks.md"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def spec_of(name: str, options: dict[str, Any] | None = None, *overrides: str) -> RunSpec:
    plain = f"model.options={options}".replace("'", "").replace("True", "true").replace("False", "false") if options else ""
    return small_spec(f"model.network={name}", *([plain] if plain else []), *overrides)


def network_of(spec: RunSpec) -> Network:
    return build_network(spec.model, spec.features, spec.tables)


@EACH
def test_logits_and_gradients_are_those_of_the_papers_equations(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(3)
    spec = spec_of(name, options)
    net = network_of(spec).double()
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.3)
    dense = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    pooled = torch.randn(5, 24, dtype=torch.float64, requires_grad=True)
    inputs = [dense, pooled, *net.parameters()]
    found = net(dense, pooled)
    assert found.shape == (5,)
    plain = PLAIN[name](
        dict(net.named_parameters()), list(dense.split(1, 1)), list(pooled.split(8, 1)), spec.model.network_options
    )
    torch.testing.assert_close(found, plain.squeeze(1), rtol=1e-10, atol=1e-10)
    weights = torch.randn(5, dtype=torch.float64)
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), inputs),
        torch.autograd.grad((plain.squeeze(1) * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


def test_products_of_all_pairs_by_squares_are_those_of_a_loop_over_pairs() -> None:
    vectors = torch.randn(3, 6, 4, dtype=torch.float64)
    expected = sum((vectors[:, i] * vectors[:, j]).sum(1) for i, j in itertools.combinations(range(6), 2))
    torch.testing.assert_close(pair_products(vectors), expected)


@EACH
@pytest.mark.parametrize("missing", ["nothing", "dense", "sparse", "nothing, with norms"])
def test_the_planner_counts_the_parameters_of_the_network(name: str, options: dict[str, Any], missing: str) -> None:
    without = [f"features.{missing}=[]", f"data.synth.num_{missing}=0"] if missing in ("dense", "sparse") else []
    without += ["model.top_norm=batch", "model.bottom_norm=layer", "model.top_dropout=0.1"] if "norms" in missing else []
    if missing == "sparse" and (name == "wide_deep" or "first_context" in options):
        with pytest.raises(SpecError, match="sparse feature"):
            spec_of(name, options, *without)
        return
    spec = spec_of(name, options, *without)
    net, work = network_of(spec), step_work(spec)
    assert work.num_parameters == sum(parameter.numel() for parameter in net.parameters())
    num_dense, num_pooled = (0 if missing == "dense" else 4), (0 if missing == "sparse" else 24)
    assert net(torch.randn(3, num_dense), torch.randn(3, num_pooled)).shape == (3,)


@EACH
def test_the_planner_counts_the_products_of_the_network(name: str, options: dict[str, Any]) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    spec = spec_of(name, options)
    net, work = network_of(spec).requires_grad_(False), step_work(spec).network
    if spec.model.network == "dlrm":
        pytest.skip("its dot products have kernels of their own, which torch does not count")
    few, many = 4, 1000  # what is computed once for the whole batch does not count
    with FlopCounterMode(display=False) as at_few:
        net(torch.randn(few, 4), torch.randn(few, 24))
    with FlopCounterMode(display=False) as at_many:
        net(torch.randn(many, 4), torch.randn(many, 24))
    found = (at_many.get_total_flops() - at_few.get_total_flops()) / (many - few)
    assert found == work.product_flops + sum(layer.forward_flops for layer in (*work.bottom, *work.top))


@EVERY
def test_the_planner_predicts_it_on_every_kind_of_machine_and_more_work_takes_longer(name: str) -> None:
    software = load_software("rowstead")
    for machine in (load_machine("cpu-2s"), load_machine("dgx-h100")):
        few, many = (
            predict(
                step_work(spec_of(name, None, f"model.top={top}")),
                machine,
                software,
                Setup(placement="device", batch_size=4096),
            )
            for top in ("[16]", "[2048, 2048]")
        )
        assert 0 < few.step_s < many.step_s


@EVERY
def test_a_run_resumes_bit_for_bit_and_evaluate_predict_and_export_agree(name: str, tmp_path: Path) -> None:
    log = written_log(tmp_path / "log")
    spec = parquet_spec(log, f"model.network={name}", "train.max_steps=12", "train.batch_size=600")
    straight = train(spec, out=tmp_path / "straight")
    train(spec, out=tmp_path / "stopped", callback=RecordingCallback(stop_after=6))
    ended = resume(str(tmp_path / "stopped"))
    assert_same_weights(straight.folder, ended.folder)
    run = str(ended.folder)
    assert rowstead.evaluate(run).figures() == figures_of(straight)
    rowstead.predict(run, tmp_path / "run.parquet")
    p = pq.read_table(tmp_path / "run.parquet").column("p").to_numpy()
    rowstead.export(run, tmp_path / "exported")
    rows = pq.read_table(sorted(log.glob("eval-*.parquet")))
    np.testing.assert_allclose(rowstead.load_exported(tmp_path / "exported").predict(rows), p, rtol=0, atol=1e-6)
    one = rowstead.load_exported(tmp_path / "exported").predict(rows.slice(0, 1))
    np.testing.assert_allclose(one, p[:1], rtol=0, atol=1e-6)


@EVERY
def test_it_learns(name: str, tmp_path: Path) -> None:
    spec = spec_of(name, None, "train.dense_optimizer={kind: adam, lr: 0.01}", "train.epochs=2")
    assert figures_of(train(spec, out=tmp_path / "run"))["ne"] < 0.98


@pytest.mark.slow
def test_two_processes_end_at_the_weights_of_one(tmp_path: Path) -> None:
    shards = {"one": "table", "shared": "row", "mean": "replicate", "large": "column"}
    settings: list[Settings] = [
        {"shards": shards, "num_steps": 4, "changes": [f"model.network={name}", "train.sparse_optimizer.clip=0.01"]}
        for name in NETWORKS
    ]
    for one, weights in zip(settings, in_processes(2, settings, tmp_path), strict=True):
        alone = trained(one, SingleProcess())
        assert weights.keys() == alone.keys()
        for key, value in alone.items():
            torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-9, msg=lambda m, n=f"{one} {key}": f"{n}: {m}")


@pytest.mark.slow
@EVERY
def test_a_fleet_trains_it(name: str, tmp_path: Path) -> None:
    fleet = FleetSpec(num_trainers=2, num_sparse=2, num_dense=1, num_readers=1)
    result = train_fleet(dataclasses.replace(spec_of(name, None, "train.max_steps=2"), fleet=fleet), out=tmp_path / "fleet")
    assert result.outcome.position.step == 2
    rowstead.evaluate(str(tmp_path / "fleet"))


@needs_gpu
@EVERY
def test_steps_as_cuda_graphs_are_those_one_by_one(name: str, tmp_path: Path) -> None:
    found = {}
    for graphs in (True, False):
        callback = RecordingCallback()
        spec = spec_of(name, None, "device=cuda", "train.max_steps=60", f"train.cuda_graphs={str(graphs).lower()}")
        found[graphs] = figures_of(train(spec, out=tmp_path / str(graphs), callback=callback))["log_loss"]
        assert [text for text in callback.messages if "CUDA graph" in text or "torch.compile failed" in text] == []
    assert found[True] == pytest.approx(found[False], rel=1e-3)


@needs_gpu
@EVERY
def test_in_bf16_on_a_gpu_it_learns_nearly_as_well_as_in_fp32_on_a_cpu(name: str, tmp_path: Path) -> None:
    found = {}
    for device, precision in (("cuda", "bf16"), ("cpu", "fp32")):
        spec = spec_of(name, None, f"device={device}", f"train.precision={precision}", "train.epochs=2")
        found[device] = figures_of(train(spec, out=tmp_path / device))["log_loss"]
    assert found["cuda"] == pytest.approx(found["cpu"], rel=0.02)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["network=dcnv2", "options={cros_layers: 2}"], "model.options.cros_layers: unknown key: did you mean `cross_layers`?"),
        (["network=dcnv2", "options={cross_layers: 0}"], "model.options.cross_layers: must be at least 1, got 0"),
        (["network=dcnv2", "options={experts: 4}"], "model.options.experts: experts are of low rank: set `rank`, too"),
        (["network=dcnv2", "top=[]"], "model.top: a `parallel` structure needs a hidden layer here"),
        (["network=masknet", "options={reduction: 1000}"], "model.options.reduction: must be at most 100, got 1,000"),
        (["network=masknet", "options={structure: serial}"], "model.options.structure: got 'serial'"),
        (["network=xdeepfm", "options={cin: []}"], "model.options.cin: give the feature maps of at least one layer"),
        (["network=finalmlp", "options={heads: 3}"], "model.options.heads: 3 heads do not divide 16, the last width of `top`"),
        (
            ["network=finalmlp", "options={first_context: [sparse_9]}"],
            "model.options.first_context: no sparse feature `sparse_9`: did you mean `sparse_",
        ),
        (["network=deepfm", "options={rank: 3}"], "model.options: `deepfm` has no options: set `top`"),
        (
            ["network=deepfm", "width=1"],
            "model.width: table `sparse_0` has width 1: the last column of a row is its first-order weight",
        ),
    ],
)
def test_options_that_cannot_be_are_refused_with_what_to_do(overrides: list[str], problem: str) -> None:
    with pytest.raises(SpecError) as found:
        small_spec(*(f"model.{one}" for one in overrides))
    assert problem in str(found.value)


@pytest.mark.parametrize("name", [name for name, entry in NETWORKS.items() if entry.needs_equal_widths])
def test_a_network_of_vectors_needs_tables_of_one_width(name: str) -> None:
    with pytest.raises(SpecError, match=f"has width 4, but `network: {name}` needs every table as wide as model.width, 8"):
        small_spec(f"model.network={name}", "features.sparse.0.width=4")


def test_a_checkpoint_knows_the_options_that_differ_from_the_defaults() -> None:
    default, same = (spec_of("dcnv2", options) for options in (None, {"cross_layers": 3}))
    assert default.model.options == same.model.options
    assert default.model.options is not None
    assert default.model.options["structure"] == "parallel"
    assert architecture(default)["model"]["options"] == {}
    assert architecture(spec_of("dcnv2", {"cross_layers": 2}))["model"]["options"] == {"cross_layers": 2}


@EVERY
def test_it_has_a_recipe_and_stands_in_the_page_with_its_paper(name: str) -> None:
    entry = NETWORKS[name]
    assert load_recipe("quickstart" if name == "dlrm" else name).model.network == name
    table = PAGE.read_text(encoding="utf-8").split("## Built-in networks", 1)[1].partition("\n\nAll but")[0]
    (row,) = [line for line in table.splitlines() if line.startswith(f"| `{name}`")]
    authors, _, arxiv = entry.paper.partition(", ")
    assert entry.description.split(":")[0] in row
    assert authors in row
    assert f"https://arxiv.org/abs/{arxiv.removeprefix('arXiv:')}" in row
    docstring = importlib.import_module(entry.module.partition(":")[0]).__doc__
    assert name == "dlrm" or (docstring is not None and arxiv in docstring)
