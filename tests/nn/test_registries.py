"""The registries of interactions, networks and heads agree with the modules behind them."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest
import torch

from rowstead.nn import layers
from rowstead.nn.heads import head_of
from rowstead.nn.network import build_network, load_class
from rowstead.plan.work import step_work
from rowstead.spec.heads import HEADS
from rowstead.spec.interactions import INTERACTIONS, Interaction, InteractionInputs, InteractionSpec, Pairs
from rowstead.spec.networks import NETWORKS, parse_network
from tests.small_runs import small_spec


@pytest.mark.parametrize("pairs", get_args(Pairs))
@pytest.mark.parametrize("kind", INTERACTIONS)
@pytest.mark.parametrize("num_dense", [0, 1, 3])
def test_an_interaction_is_as_wide_as_the_registry_says_and_has_its_layers(kind: str, num_dense: int, pairs: Pairs) -> None:
    spec = InteractionSpec(kind=kind, pairs=pairs, cross_layers=2, cross_rank=3)  # type: ignore[arg-type]
    inputs, entry = InteractionInputs(width=4, dense_width=4 * num_dense, pooled_width=12), INTERACTIONS[spec.kind]
    module = getattr(layers, entry.layer)(inputs, spec)
    out = module(torch.randn(5, 4 * num_dense) if num_dense else None, torch.randn(5, 12))
    assert out.shape == (5, entry.out_width(inputs, spec))
    found = [(one.in_features, one.out_features) for one in module.modules() if isinstance(one, torch.nn.Linear)]
    assert sorted(found) == sorted(entry.layers(inputs, spec))


def test_an_interaction_needs_an_entry_and_a_module_and_planner_and_network_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    class Maximum(torch.nn.Module):
        def __init__(self, inputs: InteractionInputs, spec: InteractionSpec) -> None:
            super().__init__()
            self.width = inputs.width

        def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
            return torch.maximum(dense, pooled.unflatten(1, (-1, self.width)).amax(dim=1))

    entry = Interaction(
        title="maximum",
        description="the largest element of all vectors",
        layer="Maximum",
        out_width=lambda inputs, spec: inputs.width,
        flops=lambda inputs, spec: float(inputs.total_width),
    )
    monkeypatch.setitem(INTERACTIONS, "maximum", entry)  # type: ignore[misc]
    monkeypatch.setattr(layers, "Maximum", Maximum, raising=False)
    spec = small_spec()
    interaction = dataclasses.replace(spec.model.interaction, kind="maximum")  # type: ignore[arg-type]
    spec = dataclasses.replace(spec, model=dataclasses.replace(spec.model, interaction=interaction))
    net = build_network(spec.model, spec.features, spec.tables)
    assert net(torch.randn(3, 4), torch.randn(3, 24)).shape == (3,)
    work = step_work(spec)
    assert (work.top[0].inputs, work.network.pair_flops) == (8, 32.0)
    assert work.num_parameters == sum(parameter.numel() for parameter in net.parameters())


@pytest.mark.parametrize("name", NETWORKS)
def test_a_built_in_network_is_a_class_that_can_be_loaded(name: str) -> None:
    assert load_class(parse_network(name)).__name__ == parse_network(name).class_name


@pytest.mark.parametrize("kind", HEADS)
def test_predictions_of_a_head_are_in_the_range_of_its_labels_and_right_ones_cost_least(kind: str) -> None:
    head, (low, high) = head_of(kind), HEADS[kind].label_range  # type: ignore[arg-type, index]
    logits = torch.linspace(-30, 30, 13)
    predictions = head.predict(logits)
    assert low <= float(predictions.min()) <= float(predictions.max()) <= high
    labels = torch.full_like(logits, min(high, 30))
    assert float(head.loss(logits[-1:], labels[:1], None)) < 1e-6 < float(head.loss(logits[:1], labels[:1], None))
