"""Task heads: losses of logits against labels, the predictions that logits stand for, and the modules that predict several labels.

Letters: B examples, T tasks, W width of the network's outputs, E width of an expert's output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from rowstead.data.batch import BatchTotals
from rowstead.nn.layers import MLP
from rowstead.spec.heads import HEADS, TASK_HEADS, HeadKind, TaskHeadKind, TaskHeadSpec, TaskSpec
from rowstead.spec.model import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Head:
    """The arithmetic of one entry of `spec.heads.HEADS`. All tensors are [B]."""

    example_loss: Callable[[Tensor, Tensor], Tensor]
    """Logits and labels to the loss of each example."""
    predict: Callable[[Tensor], Tensor]
    """Logits to predictions, in the range of the labels."""

    def loss(self, logits: Tensor, labels: Tensor, weights: Tensor | None, totals: BatchTotals | None = None) -> Tensor:
        """Mean loss over a batch, weighted by example.

        With `totals` these examples are a share of a batch of those totals, and this is their share of its mean.
        """
        each = self.example_loss(logits, labels)
        if totals is not None:
            weighted = each if weights is None else each * weights
            return weighted.sum() / max(totals.weight, torch.finfo(each.dtype).tiny)
        if weights is None:
            return each.mean()
        return (each * weights).sum() / weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")


def _squared_error(logits: Tensor, labels: Tensor) -> Tensor:
    return (torch.sigmoid(logits) - labels).square()


def _squared_distance(numbers: Tensor, labels: Tensor) -> Tensor:
    return (numbers - labels).square()


def _same(numbers: Tensor) -> Tensor:
    return numbers


_HEADS: dict[HeadKind, Head] = {
    "bce": Head(example_loss=_cross_entropy, predict=torch.sigmoid),
    "mse": Head(example_loss=_squared_error, predict=torch.sigmoid),
    "regression": Head(example_loss=_squared_distance, predict=_same),
}
assert _HEADS.keys() == HEADS.keys()


def head_of(kind: HeadKind) -> Head:
    """The head that is trained with this loss."""
    return _HEADS[kind]


class TaskLosses:
    """The losses of several labels, and their predictions. All tensors are [B, T]; a label that is missing is NaN.

    The loss is the sum over tasks of weight times the mean loss over the examples that have the task's label. In a chain (ESMM) the first
    task's label is a click y and the second one's a conversion z of those who clicked: the second loss is the cross-entropy of y z against
    p(y) p(z), over all examples whose click is known, so that no click is no conversion; only a click whose conversion is
    missing does not count.
    """

    def __init__(self, tasks: Sequence[TaskSpec], *, is_chain: bool = False) -> None:
        self.tasks, self.is_chain = tuple(tasks), is_chain
        self._heads = [head_of(task.loss) for task in tasks]

    def loss(self, logits: Tensor, labels: Tensor, weights: Tensor | None, totals: BatchTotals | None = None) -> Tensor:
        """As `Head.loss`."""
        is_known = ~labels.isnan()
        labels = labels.nan_to_num(nan=0.0)
        each = self._example_losses(logits, labels)
        counted = is_known
        if self.is_chain:
            click, conversion = is_known.unbind(1)
            is_known = torch.stack([click, click], dim=1)
            counted = torch.stack([click, click & (conversion | (labels[:, 0] == 0))], dim=1)
        own = torch.ones_like(labels) if weights is None else weights.unsqueeze(1).expand_as(labels)
        sums = torch.where(counted, each * own, 0).sum(dim=0)
        if totals is None:
            of_tasks = torch.where(is_known, own, 0).sum(dim=0).clamp(min=torch.finfo(own.dtype).tiny).unbind()
        else:
            weight_of = totals.task_weights[:1] * 2 if self.is_chain else totals.task_weights
            of_tasks = tuple(own.new_tensor(max(weight, torch.finfo(own.dtype).tiny)) for weight in weight_of)
        parts = zip(self.tasks, sums.unbind(), of_tasks, strict=True)
        return torch.stack([task.weight * total / weight for task, total, weight in parts]).sum()

    def _example_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of each example and task, for labels without NaN."""
        if self.is_chain:
            return torch.stack(chain_losses(logits, labels), dim=1)
        columns = zip(self._heads, logits.unbind(1), labels.unbind(1), strict=True)
        return torch.stack([head.example_loss(*column) for head, *column in columns], dim=1)

    def predict(self, logits: Tensor) -> Tensor:
        """Logits to predictions of each task; of a chain p(click) and p(conversion if clicked)."""
        return torch.stack([head.predict(own) for head, own in zip(self._heads, logits.unbind(1), strict=True)], dim=1)


def chain_losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """ESMM's two losses of each example: the cross-entropy of the click, and that of click and conversion against the product of both."""
    (click, conversion), (y, z) = logits.unbind(1), labels.unbind(1)
    log_both = functional.logsigmoid(click) + functional.logsigmoid(conversion)
    # 1 - p q = (1 - p) + p (1 - q), added in logarithms
    log_not = torch.logaddexp(functional.logsigmoid(-click), functional.logsigmoid(click) + functional.logsigmoid(-conversion))
    return _cross_entropy(click, y), -(y * z * log_both + (1 - y * z) * log_not)


def losses_of(spec: ModelSpec) -> TaskLosses:
    """The losses of a model's tasks."""
    assert spec.task_head is not None
    return TaskLosses(spec.tasks, is_chain=TASK_HEADS[spec.task_head.kind].is_chain)


# Modules that predict several labels: the network's outputs [B, W] to logits [B, T]


class Towers(nn.ModuleList):
    """An MLP for each task: inputs [B, width], one or one per task, to logits [B, T]."""

    def __init__(self, spec: TaskHeadSpec, num_tasks: int, width: int) -> None:
        super().__init__(MLP(width, (*spec.tower, 1), last_relu=False) for _ in range(num_tasks))

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        return torch.cat([tower(x) for tower, x in zip(self, inputs, strict=True)], dim=1)


class SharedBottom(nn.Module):
    """A tower per task over the same numbers; ESMM's too."""

    def __init__(self, spec: TaskHeadSpec, num_tasks: int) -> None:
        super().__init__()
        self.towers = Towers(spec, num_tasks, spec.width)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.towers([x] * len(self.towers))
        return logits


class MMoE(nn.Module):
    """Multi-gate mixture of experts: tower_k(sum over i of g_k(x)_i f_i(x)), where g_k(x) = softmax(W_k x)."""

    def __init__(self, spec: TaskHeadSpec, num_tasks: int) -> None:
        super().__init__()
        self.experts = _experts(spec, spec.width, spec.experts)
        self.gates = nn.ModuleList(nn.Linear(spec.width, spec.experts, bias=False) for _ in range(num_tasks))
        self.towers = Towers(spec, num_tasks, spec.expert[-1])

    def forward(self, x: Tensor) -> Tensor:
        found = _outputs_of(self.experts, x)
        logits: Tensor = self.towers([_mix(gate(x), found) for gate in self.gates])
        return logits


class PLE(nn.Module):
    """Progressive layered extraction: in each level a task mixes its own experts and the shared ones, and the shared part mixes all."""

    def __init__(self, spec: TaskHeadSpec, num_tasks: int) -> None:
        super().__init__()
        widths = [spec.width, *[spec.expert[-1]] * (spec.levels - 1)]
        self.levels = nn.ModuleList(
            ExtractionLevel(spec, num_tasks, width, is_last=level == spec.levels - 1) for level, width in enumerate(widths)
        )
        self.towers = Towers(spec, num_tasks, spec.expert[-1])

    def forward(self, x: Tensor) -> Tensor:
        inputs = [x] * (len(self.towers) + 1)
        for level in self.levels:
            inputs = level(inputs)
        logits: Tensor = self.towers(inputs)
        return logits


class ExtractionLevel(nn.Module):
    """One level of PLE: inputs of each task and of the shared part, all [B, width], to the mixtures of each; the last level has no shared one."""

    def __init__(self, spec: TaskHeadSpec, num_tasks: int, width: int, *, is_last: bool) -> None:
        super().__init__()
        num_own, num_shared = spec.task_experts, spec.experts
        self.own = nn.ModuleList(_experts(spec, width, num_own) for _ in range(num_tasks))
        self.shared = _experts(spec, width, num_shared)
        self.gates = nn.ModuleList(nn.Linear(width, num_own + num_shared, bias=False) for _ in range(num_tasks))
        self.shared_gate = None if is_last else nn.Linear(width, num_tasks * num_own + num_shared, bias=False)

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        *of_tasks, common = inputs
        own = [_outputs_of(group, x) for group, x in zip(self.own, of_tasks, strict=True)]
        shared = _outputs_of(self.shared, common)
        mixed = [
            _mix(gate(x), torch.cat([mine, shared], dim=1)) for gate, x, mine in zip(self.gates, of_tasks, own, strict=True)
        ]
        if self.shared_gate is not None:
            mixed.append(_mix(self.shared_gate(common), torch.cat([*own, shared], dim=1)))
        return mixed


def _experts(spec: TaskHeadSpec, width: int, count: int) -> nn.ModuleList:
    return nn.ModuleList(MLP(width, spec.expert, last_relu=True) for _ in range(count))


def _outputs_of(experts: nn.Module, x: Tensor) -> Tensor:
    """The outputs of all experts of a list for x: [B, experts, E]."""
    assert isinstance(experts, nn.ModuleList)
    return torch.stack([expert(x) for expert in experts], dim=1)


def _mix(gates: Tensor, outputs: Tensor) -> Tensor:
    """The outputs [B, experts, E] weighted by the softmax of gates [B, experts]: [B, E]."""
    return (torch.softmax(gates, dim=1).unsqueeze(2) * outputs).sum(dim=1)


def build_task_head(spec: TaskHeadSpec, num_tasks: int) -> nn.Module:
    """The head of so many tasks with fresh parameters: [B, W] to logits [B, T]."""
    return _TASK_HEADS[spec.kind](spec, num_tasks)


_TASK_HEADS: dict[TaskHeadKind, Callable[[TaskHeadSpec, int], nn.Module]] = {
    "shared_bottom": SharedBottom,
    "mmoe": MMoE,
    "ple": PLE,
    "esmm": SharedBottom,
}
assert _TASK_HEADS.keys() == TASK_HEADS.keys()
