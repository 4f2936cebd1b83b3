"""Heads of several labels compute what plain versions of them do, and labels that are missing count for nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from rowstead.data.batch import BatchTotals
from rowstead.nn.heads import TaskLosses, build_task_head, head_of
from rowstead.nn.network import build_network
from rowstead.plan.work import step_work
from rowstead.spec.errors import SpecError
from rowstead.spec.heads import TASK_HEADS, TaskHeadSpec, TaskSpec
from rowstead.spec.networks import NETWORKS
from tests.small_runs import small_spec

TASKS = "[{name: click, label: label}, {name: buy, label: conversion, weight: 0.5}]"
NAN = math.nan


def plain_head(spec: TaskHeadSpec, num_tasks: int, state: dict[str, Tensor], x: Tensor) -> Tensor:
    """The head written out from its paper, with the weights of `state`; logits [B, T]."""

    def mlp(name: str, y: Tensor, *, last_relu: bool) -> Tensor:
        layers = sorted({int(key[len(name) + 1 :].split(".")[0]) for key in state if key.startswith(f"{name}.")})
        for layer in layers:
            y = y @ state[f"{name}.{layer}.weight"].T + state[f"{name}.{layer}.bias"]
            if layer != layers[-1] or last_relu:
                y = y.clamp(min=0)
        return y

    def mixed(gate: Tensor, outputs: list[Tensor]) -> Tensor:
        shares = torch.exp(gate) / torch.exp(gate).sum(dim=1, keepdim=True)
        return sum((shares[:, i : i + 1] * out for i, out in enumerate(outputs)), torch.zeros(()))

    def tower(task: int, y: Tensor) -> Tensor:
        return mlp(f"towers.{task}", y, last_relu=False)

    tasks = range(num_tasks)
    if spec.kind in ("shared_bottom", "esmm"):
        return torch.cat([tower(task, x) for task in tasks], dim=1)
    if spec.kind == "mmoe":
        experts = [mlp(f"experts.{i}", x, last_relu=True) for i in range(spec.experts)]
        return torch.cat([tower(t, mixed(x @ state[f"gates.{t}.weight"].T, experts)) for t in tasks], dim=1)
    of_tasks, common = [x] * num_tasks, x
    for level in range(spec.levels):
        at = f"levels.{level}"
        own = [[mlp(f"{at}.own.{t}.{i}", of_tasks[t], last_relu=True) for i in range(spec.task_experts)] for t in tasks]
        shared = [mlp(f"{at}.shared.{i}", common, last_relu=True) for i in range(spec.experts)]
        if level < spec.levels - 1:
            common_next = mixed(common @ state[f"{at}.shared_gate.weight"].T, [one for group in own for one in group] + shared)
        of_tasks = [mixed(of_tasks[t] @ state[f"{at}.gates.{t}.weight"].T, own[t] + shared) for t in tasks]
        common = common_next if level < spec.levels - 1 else common
    return torch.cat([tower(t, of_tasks[t]) for t in tasks], dim=1)


@pytest.mark.parametrize("kind", TASK_HEADS)
@pytest.mark.parametrize("more", [{}, {"levels": 3, "experts": 1, "expert": (5, 6), "tower": ()}])
def test_a_head_is_its_plain_version_with_its_gradients(kind: str, more: dict[str, Any]) -> None:
    torch.manual_seed(0)
    spec = TaskHeadSpec(kind=kind, width=7, **more)  # type: ignore[arg-type]
    head = build_task_head(spec, 2).double()
    x = torch.randn(9, 7, dtype=torch.float64, requires_grad=True)
    logits = head(x)
    assert logits.shape == (9, 2)
    probe = torch.randn(9, 2, dtype=torch.float64)
    (logits * probe).sum().backward()
    state = {name: value.detach().clone().requires_grad_() for name, value in head.named_parameters()}
    again = x.detach().clone().requires_grad_()
    plain = plain_head(spec, 2, state, again)
    (plain * probe).sum().backward()
    torch.testing.assert_close(logits, plain)
    torch.testing.assert_close(x.grad, again.grad)
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, state[name].grad)


@pytest.mark.parametrize("kind", TASK_HEADS)
@pytest.mark.parametrize("network", [name for name, entry in NETWORKS.items() if entry.has_wide_output])
def test_each_network_takes_each_head_and_the_planner_counts_its_parameters(kind: str, network: str) -> None:
    spec = small_spec(
        f"model.network={network}",
        "data.synth.conversion={}",
        f"model.tasks={TASKS}",
        f"model.task_head={{kind: {kind}, width: 6, expert: [5], tower: [4]}}",
    )
    net = build_network(spec.model, spec.features, spec.tables)
    assert net(torch.randn(3, 4), torch.randn(3, 24)).shape == (3, 2)
    assert step_work(spec).num_parameters == sum(parameter.numel() for parameter in net.parameters())


def tasks(**weights: float) -> tuple[TaskSpec, ...]:
    return tuple(TaskSpec(name=name, weight=weight) for name, weight in weights.items())


def test_the_loss_is_the_weighted_sum_of_the_losses_of_the_tasks() -> None:
    torch.manual_seed(0)
    logits, labels, weights = torch.randn(20, 3), torch.rand(20, 3), torch.rand(20)
    labels[:, 2] *= 100
    specs = (*tasks(a=0.5, b=2.0), TaskSpec(name="c", loss="regression", weight=0.1))
    expected = sum(task.weight * head_of(task.loss).loss(logits[:, i], labels[:, i], weights) for i, task in enumerate(specs))
    torch.testing.assert_close(TaskLosses(specs).loss(logits, labels, weights), expected)
    torch.testing.assert_close(TaskLosses(specs).predict(logits)[:, 2], logits[:, 2])


@pytest.mark.parametrize("weights", [None, torch.tensor([1.0, 2.0, 0.5, 3.0])])
def test_a_missing_label_counts_for_nothing_in_its_task_and_leaves_the_other_one_as_it_is(weights: Tensor | None) -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 2, requires_grad=True)
    labels = torch.tensor([[1.0, NAN], [0.0, 1.0], [NAN, NAN], [1.0, 0.0]])
    TaskLosses(tasks(a=1.0, b=3.0)).loss(logits, labels, weights).backward()
    alone = logits.detach().clone().requires_grad_()
    first, second = torch.tensor([0, 1, 3]), torch.tensor([1, 3])
    bce = functional.binary_cross_entropy_with_logits
    for rows, task, weight in ((first, 0, 1.0), (second, 1, 3.0)):
        each = bce(alone[rows, task], labels[rows, task], reduction="none")
        own = torch.ones(len(rows)) if weights is None else weights[rows]
        (weight * (each * own).sum() / own.sum()).backward()
    torch.testing.assert_close(logits.grad, alone.grad, rtol=1e-6, atol=0)
    assert logits.grad is not None
    assert logits.grad[2].tolist() == [0, 0]
    assert logits.grad[0, 1] == 0


def test_a_task_without_any_label_in_a_batch_has_no_loss_and_no_gradient() -> None:
    logits = torch.randn(3, 2, requires_grad=True)
    labels = torch.tensor([[1.0, NAN], [0.0, NAN], [1.0, NAN]])
    loss = TaskLosses(tasks(a=1.0, b=1.0)).loss(logits, labels, None)
    loss.backward()
    torch.testing.assert_close(loss, head_of("bce").loss(logits[:, 0], labels[:, 0], None))
    assert logits.grad is not None
    assert logits.grad[:, 1].tolist() == [0, 0, 0]


@pytest.mark.parametrize("is_chain", [False, True])
@pytest.mark.parametrize("weights", [None, torch.rand(30)])
def test_shares_of_a_batch_add_up_to_its_loss(is_chain: bool, weights: Tensor | None) -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(30, 2), (torch.rand(30, 2) < 0.4).float()
    labels[torch.rand(30, 2) < 0.3] = NAN
    losses, totals = TaskLosses(tasks(a=1.0, b=0.5), is_chain=is_chain), BatchTotals.of(labels, weights)
    cuts = [slice(0, 7), slice(7, 7), slice(7, 30)]
    parts = [losses.loss(logits[cut], labels[cut], None if weights is None else weights[cut], totals) for cut in cuts]
    torch.testing.assert_close(sum(parts), losses.loss(logits, labels, weights))


def test_esmm_trains_on_clicks_and_on_clicks_that_convert_over_all_impressions() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[1, 1], [1, 0], [0, NAN], [1, NAN], [NAN, NAN]], dtype=torch.float64)
    loss = TaskLosses(tasks(click=1.0, buy=2.0), is_chain=True).loss(logits, labels, None)
    p, q = torch.sigmoid(logits.detach()).T
    click = -(p[0].log() + p[1].log() + (1 - p[2]).log() + p[3].log()) / 4
    both = p * q
    bought = -(both[0].log() + (1 - both[1]).log() + (1 - both[2]).log()) / 4  # the fourth may have converted: nobody knows
    torch.testing.assert_close(loss, click + 2 * bought)
    loss.backward()
    assert logits.grad is not None
    assert logits.grad[2, 1] > 0, "no click is no conversion: it teaches the conversion, too"
    assert logits.grad[3, 1] == 0
    assert logits.grad[4].tolist() == [0, 0]


def test_esmm_stays_finite_where_probabilities_are_0_and_1_in_fp32() -> None:
    logits = torch.tensor([[100.0, 100.0], [-100.0, 100.0], [100.0, -100.0], [-100.0, -100.0]], requires_grad=True)
    for label in ([1.0, 1.0], [0.0, 0.0], [1.0, 0.0]):
        loss = TaskLosses(tasks(click=1.0, buy=1.0), is_chain=True).loss(logits, torch.tensor([label] * 4), None)
        loss.backward()
        assert math.isfinite(loss.item())
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["model.tasks=[{name: a}, {name: a}]"], "model.tasks: two tasks are named `a`"),
        (["model.task_head={kind: mmoe}"], "model.task_head: applies only to several labels"),
        (["model.tasks=[{name: label}]"], None),
        (["model.tasks=[{name: label}]", "model.task_head.kind=esmm"], "model.tasks: `esmm` needs two tasks"),
        (["model.tasks=[{name: buy}]"], "model.tasks: the synthetic log has no label `buy`"),
        (["model.tasks=[{name: label}]", "model.network=deepfm"], "model.tasks: `network: deepfm` predicts one label only"),
        (["model.tasks=[{name: label}]", "train.label_smoothing=0.1"], "train.label_smoothing: does not apply"),
        (["model.tasks=[{name: label}]", "train.loss=mse"], "train.loss: does not apply with `model.tasks`"),
        (["train.loss=regression"], "train.loss: `regression` is the loss of a task"),
        (["train.eval_every=5", "train.early_stop.task=label"], "train.early_stop.task: applies only to several labels"),
        (
            ["model.tasks=[{name: label}]", "train.eval_every=5", "train.early_stop.task=lable"],
            "train.early_stop.task: there is no task `lable`: did you mean `label`",
        ),
        (
            ["model.tasks=[{name: label, loss: regression}]", "train.eval_every=5", "train.early_stop.monitor=auc"],
            "train.early_stop.monitor: task `label` is a regression",
        ),
        (["model.tasks=[{name: label}]", "model.task_head.width=1"], "model.task_head.width: must be at least 2"),
        (
            ["model.tasks=[{name: label}]", "model.task_head={kind: ple, experts: 1000, task_experts: 1000, levels: 6}"],
            "model.task_head: has 12,000 experts in all its levels, and at most 10,000 are allowed",
        ),
        (["model.tasks=[{name: label}]", "model.task_head={kind: ple, experts: 1000, task_experts: 1000, levels: 5}"], None),
    ],
)
def test_what_does_not_go_with_several_labels_is_refused(changes: list[str], message: str | None) -> None:
    if message is None:
        small_spec(*changes)
        return
    with pytest.raises(SpecError) as raised:
        small_spec(*changes)
    assert message in str(raised.value)
