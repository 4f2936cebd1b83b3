"""Task heads: what a label means, its loss and its measures, and the heads that predict several labels.

A new loss is an entry of `HEADS` and its arithmetic in `nn/heads.py`. A new measure is an entry of `MEASURES` and a field of `Quality` in
`training/metrics.py`; monitors, tables and pages follow from the entry. A new head for several labels is an entry of `TASK_HEADS` and a module in
`nn/heads.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from rowstead.spec.bounds import MAX_LAYER, AboveZero, AtLeastOne, Layers, NotEmpty, PlainName, Spec, up_to
from rowstead.spec.errors import require
from rowstead.spec.network_options import Layer, mlp_layers

HeadKind = Literal["bce", "mse", "regression"]
Measure = Literal["ne", "auc", "logloss", "mse", "gauc"]


@dataclass(frozen=True, kw_only=True)
class MeasureEntry:
    """One measure of an evaluation that early stopping can follow."""

    title: str
    figure: str
    """The field of a Quality, and the name of the figure in records."""
    note: str = ""
    """What is added in tables."""
    higher_is_better: bool = False


MEASURES: dict[Measure, MeasureEntry] = {
    "ne": MeasureEntry(title="NE", figure="ne"),
    "auc": MeasureEntry(title="AUC", figure="auc", higher_is_better=True),
    "gauc": MeasureEntry(title="GAUC", figure="gauc", note="AUC within groups", higher_is_better=True),
    "logloss": MeasureEntry(title="log loss", figure="log_loss"),
    "mse": MeasureEntry(title="MSE", figure="mse"),
}
assert set(MEASURES) == set(get_args(Measure))


@dataclass(frozen=True, kw_only=True)
class HeadEntry:
    """The head of one label, named by its loss."""

    description: str
    """One line for the docs."""
    measure: Measure
    """The measure of an evaluation that early stopping follows by default."""
    is_log_loss: bool
    """Whether the training loss is the log loss, so that it can be stated as NE."""
    is_probability: bool = True
    """Whether it predicts the probability sigmoid(logit) of labels from 0 to 1; else a number, of labels of any size."""

    @property
    def label_range(self) -> tuple[float, float]:
        """Smallest and largest label; the reader refuses others."""
        return LABEL_RANGE if self.is_probability else (-MAX_LABEL, MAX_LABEL)


LABEL_RANGE = (0.0, 1.0)
"""Smallest and largest label of a head that predicts a probability."""
MAX_LABEL = 1e18
"""Of a head that predicts a number: its square is finite in FP32."""

HEADS: dict[HeadKind, HeadEntry] = {
    "bce": HeadEntry(description="binary cross-entropy on log-odds", measure="ne", is_log_loss=True),
    "mse": HeadEntry(description="squared error of the probability", measure="mse", is_log_loss=False),
    "regression": HeadEntry(
        description="squared error of a number of any size, for a task", measure="mse", is_log_loss=False, is_probability=False
    ),
}
assert tuple(HEADS) == get_args(HeadKind)


# Several labels

TaskHeadKind = Literal["shared_bottom", "mmoe", "ple", "esmm"]
HeadWidth = Annotated[AtLeastOne, up_to(MAX_LAYER)]
Experts = Annotated[AtLeastOne, up_to(1000)]
MAX_TASKS = 256
MAX_EXPERTS = 10_000
"""Experts of a head, those of all its levels and tasks together."""


@dataclass(frozen=True, kw_only=True)
class TaskSpec(Spec):
    """One label that the model predicts."""

    name: PlainName
    """Name of the task, in figures and predictions."""
    label: NotEmpty | None = None
    """Label column. Default: the name of the task. A missing label (null) does not count in the loss, nor in measures."""
    loss: HeadKind = "bce"
    """The loss, which also decides what a prediction is: a probability, or with `regression` a number."""
    weight: AboveZero = 1.0
    """What the loss of this task is multiplied by before the losses are added."""

    def __post_init__(self) -> None:
        if self.label is None:
            object.__setattr__(self, "label", self.name)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class TaskHeadSpec(Spec):
    """How the tasks share the model: what is between the network and the predictions of several labels."""

    kind: TaskHeadKind = "shared_bottom"
    """The head; see [Several labels](tasks.md)."""
    width: HeadWidth = 64
    """Numbers that the network hands to the head for each example."""
    experts: Experts = 4
    """Experts of `mmoe`, and of each level of `ple` those that all tasks share."""
    task_experts: Experts = 2
    """With `ple`: experts of each task alone, in each level."""
    levels: Annotated[AtLeastOne, up_to(100)] = 1
    """With `ple`: levels of experts; each but the last one hands numbers to the next."""
    expert: Layers = (64,)
    """Layers of an expert, each with ReLU."""
    tower: Layers = (32,)
    """Hidden layers of the tower of each task; a last layer of 1 is added."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.width > 1, "width", "must be at least 2")
        require(bool(self.expert), "expert", "give at least one layer, such as [64]")

    def layers(self, num_tasks: int) -> tuple[Layer, ...]:
        """The linear layers of the head, for the planner."""
        return TASK_HEADS[self.kind].layers(self, num_tasks)


@dataclass(frozen=True, kw_only=True)
class TaskHeadEntry:
    """A head for several labels."""

    title: str
    description: str
    """One line for the docs."""
    paper: str
    layers: Callable[[TaskHeadSpec, int], tuple[Layer, ...]]
    """Its linear layers for so many tasks."""
    num_experts: Callable[[TaskHeadSpec, int], int] = lambda spec, num_tasks: 0
    """Its experts for so many tasks."""
    is_chain: bool = False
    """Whether the second label can only be where the first one is: two tasks, whose losses are of p(first) and p(first) p(second)."""


def _towers(spec: TaskHeadSpec, num_tasks: int, width: int) -> tuple[Layer, ...]:
    return num_tasks * mlp_layers(width, (*spec.tower, 1))


def _shared_bottom(spec: TaskHeadSpec, num_tasks: int) -> tuple[Layer, ...]:
    return _towers(spec, num_tasks, spec.width)


def _mmoe(spec: TaskHeadSpec, num_tasks: int) -> tuple[Layer, ...]:
    gates = num_tasks * mlp_layers(spec.width, (spec.experts,), has_bias=False)
    experts = spec.experts * mlp_layers(spec.width, spec.expert)
    return (*experts, *gates, *_towers(spec, num_tasks, spec.expert[-1]))


def _ple(spec: TaskHeadSpec, num_tasks: int) -> tuple[Layer, ...]:
    found: list[Layer] = []
    own, shared, width = num_tasks * spec.task_experts, spec.experts, spec.width
    for level in range(spec.levels):
        found += (own + shared) * mlp_layers(width, spec.expert)
        found += num_tasks * mlp_layers(width, (spec.task_experts + shared,), has_bias=False)
        if level < spec.levels - 1:
            found += mlp_layers(width, (own + shared,), has_bias=False)
        width = spec.expert[-1]
    return (*found, *_towers(spec, num_tasks, width))


TASK_HEADS: dict[TaskHeadKind, TaskHeadEntry] = {
    "shared_bottom": TaskHeadEntry(
        title="Shared bottom",
        description="a tower per task over the network",
        paper="Caruana 1997, Machine Learning 28",
        layers=_shared_bottom,
    ),
    "mmoe": TaskHeadEntry(
        title="MMoE",
        description="experts that all tasks share, mixed by a gate per task, under towers",
        paper="Ma et al. 2018, doi:10.1145/3219819.3220007",
        layers=_mmoe,
        num_experts=lambda spec, num_tasks: spec.experts,
    ),
    "ple": TaskHeadEntry(
        title="PLE",
        description="levels of shared experts and experts of each task, mixed by gates, under towers",
        paper="Tang et al. 2020, doi:10.1145/3383313.3412236",
        layers=_ple,
        num_experts=lambda spec, num_tasks: spec.levels * (spec.experts + num_tasks * spec.task_experts),
    ),
    "esmm": TaskHeadEntry(
        title="ESMM",
        description="click, then conversion: two towers, trained on p(click) and p(click) p(conversion) over all impressions",
        paper="Ma et al. 2018, arXiv:1804.07931",
        layers=_shared_bottom,
        is_chain=True,
    ),
}
assert tuple(TASK_HEADS) == get_args(TaskHeadKind)


def check_tasks(tasks: Sequence[TaskSpec], head: TaskHeadSpec | None) -> None:
    """Refuse tasks that do not go together, or with their head."""
    if not tasks:
        require(head is None, "task_head", "applies only to several labels: list them in `model.tasks`")
        return
    require(len(tasks) <= MAX_TASKS, "tasks", f"at most {MAX_TASKS} are allowed")
    names = [task.name for task in tasks]
    twice = next((name for name in names if names.count(name) > 1), None)
    require(twice is None, "tasks", f"two tasks are named `{twice}`: rename one of them")
    num_experts = 0 if head is None else TASK_HEADS[head.kind].num_experts(head, len(tasks))
    require(
        num_experts <= MAX_EXPERTS,
        "task_head",
        f"has {num_experts:,} experts in all its levels, and at most {MAX_EXPERTS:,} are allowed: lower `experts`, `task_experts` or "
        "`levels`",
    )
    if head is not None and TASK_HEADS[head.kind].is_chain:
        are_clicks = len(tasks) == 2 and all(task.loss == "bce" for task in tasks)
        require(
            are_clicks,
            "tasks",
            f"`{head.kind}` needs two tasks with `loss: bce`, the click and then the conversion: list these, or take another `task_head`",
        )
