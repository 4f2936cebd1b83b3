"""What a step asks for is what the model has."""

from __future__ import annotations

import pytest

from rowstead.plan.work import step_work
from rowstead.spec.parse import override, parse
from rowstead.spec.run import RECIPES, RunSpec, load_recipe, recipe_names
from rowstead.spec.yaml_text import read_yaml
from tests.small_runs import small_spec


@pytest.mark.parametrize("name", recipe_names())
def test_parameters_are_those_of_the_dense_net(name: str) -> None:
    from rowstead.nn.encoders import build_encoder
    from rowstead.nn.network import build_network

    spec = load_recipe(name)
    parts = [build_network(spec.model, spec.features, spec.tables)]
    for feature, width in zip(spec.features.expanded_sparse(), spec.network_shape.widths, strict=True):
        if feature.encoder is not None:
            assert feature.max_ids is not None
            parts.append(build_encoder(feature.encoder, width=width, max_ids=feature.max_ids))
    biases_of_down = 0
    if spec.model.interaction.kind == "cross":  # the first of two layers has no bias there
        biases_of_down = spec.model.interaction.cross_layers * spec.model.interaction.cross_rank
    assert step_work(spec).num_parameters - biases_of_down == sum(p.numel() for part in parts for p in part.parameters())


def test_m3_needs_the_481_gb_that_its_recipe_says() -> None:
    assert step_work(load_recipe("m3")).table_bytes == pytest.approx(481e9, rel=0.01)


@pytest.mark.parametrize(
    ("kind", "state"), [("sgd", 0), ("rowwise_adagrad", 4), ("adagrad", 256), ("adam", 512), ("momentum", 256)]
)
def test_state_of_a_row_follows_the_optimizer(kind: str, state: int) -> None:
    plain = override(read_yaml(RECIPES / "m1.yaml"), [f"train.sparse_optimizer.kind={kind}"])
    assert {table.state_bytes for table in step_work(parse(RunSpec, plain)).tables} == {state}


def test_half_width_rows_take_half_the_bytes() -> None:
    plain = override(read_yaml(RECIPES / "m1.yaml"), ["model.row_format=bf16"])
    assert {table.row_bytes for table in step_work(parse(RunSpec, plain)).tables} == {128}


def test_ids_and_flops_of_m1() -> None:
    work = step_work(load_recipe("m1"))
    assert work.ids_per_sample == pytest.approx(840, rel=0.01)
    assert work.flops == pytest.approx(7.6e6, rel=0.05)


@pytest.mark.parametrize(("pairs", "num_products"), [("both", 3 * 3 + 3), ("dense_sparse", 3 * 3), ("sparse_sparse", 3)])
def test_dense_vectors_and_pairs_are_counted_as_the_model_has_them(pairs: str, num_products: int) -> None:
    from rowstead.nn.network import build_network

    spec = small_spec("model.interaction.num_dense_vectors=3", f"model.interaction.pairs={pairs}")
    net, work = build_network(spec.model, spec.features, spec.tables), step_work(spec)
    assert work.num_parameters == sum(p.numel() for p in net.parameters())
    assert (work.bottom[-1].outputs, work.top[0].inputs) == (3 * 8, 3 * 8 + num_products)
    assert (work.network.num_vectors, work.network.pair_flops) == (3 + 3, 2 * 8 * num_products)
