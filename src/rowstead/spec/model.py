"""The architecture of a model: its network, and the widths of tables and layers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rowstead.spec.bounds import BelowOne, Layers, Spec, Width
from rowstead.spec.errors import SpecError, require
from rowstead.spec.heads import TaskHeadSpec, TaskSpec, check_tasks
from rowstead.spec.interactions import InteractionSpec
from rowstead.spec.network_options import NetworkSpec
from rowstead.spec.networks import NETWORKS, BuiltinNetwork, make_absolute, parse_network
from rowstead.spec.parse import parse, to_plain

Norm = Literal["none", "batch", "layer"]


@dataclass(frozen=True, kw_only=True)
class ModelSpec(Spec):
    """Embedding tables over sparse features, and a network from dense features and pooled rows to one logit, or to a logit per task."""

    width: Width = 16
    """Width of the embedding rows, and of the vectors to which the bottom MLP projects the dense features."""
    bottom: Layers = (64,)
    """Hidden layers of the bottom MLP; a last layer of `interaction.num_dense_vectors` times `width` is added. Only of `dlrm`."""
    top: Layers = (64, 32)
    """Hidden layers of the top MLP, or of the deep part of another network; a last layer of 1 is added."""
    bottom_norm: Norm = "none"
    """Normalisation after each hidden linear layer of the bottom MLP, before its ReLU: over the batch or over the layer's outputs."""
    top_norm: Norm = "none"
    """Normalisation after each hidden linear layer of the top MLP, before its ReLU."""
    bottom_dropout: BelowOne = 0.0
    """In training, the probability that an output of a hidden layer of the bottom MLP is set to 0; the others are scaled up."""
    top_dropout: BelowOne = 0.0
    """In training, the probability that an output of a hidden layer of the top MLP is set to 0; the others are scaled up."""
    interaction: InteractionSpec = InteractionSpec()
    """How features interact. Only of `dlrm`."""
    row_format: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Number format in which embedding rows are kept; their optimizer's state stays FP32 and updates are rounded stochastically."""
    network: str = "dlrm"
    """A built-in network, or a class of yours: `package.module:Class` or `path/to/file.py:Class`. The run executes that code.
    See [Networks](networks.md)."""
    options: Mapping[str, Any] | None = None
    """Options of the network: those of a built-in one are listed in [`model.options`](#modeloptions), those of yours are given to its constructor."""
    tasks: tuple[TaskSpec, ...] = ()
    """Several labels to predict, the most important one first: tables and studies judge a run by it. Default: the log's one label. See
    [Several labels](tasks.md)."""
    task_head: TaskHeadSpec | None = None
    """With `tasks`: how they share the model. Default: a tower per task over the network."""

    @property
    def num_outputs(self) -> int:
        """Numbers that the network returns for each example: a logit, or with tasks what their head reads."""
        return self.task_head.width if self.tasks and self.task_head is not None else 1

    @property
    def dense_width(self) -> int:
        """Width of the bottom MLP's output: that of all dense vectors."""
        return self.interaction.num_dense_vectors * self.width

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "network", make_absolute(self.network))
        parse_network(self.network)
        check_tasks(self.tasks, self.task_head)
        if self.tasks and self.task_head is None:
            object.__setattr__(self, "task_head", TaskHeadSpec())
        if self.network in NETWORKS:
            self._check_options(NETWORKS[self.network])

    def _check_options(self, entry: BuiltinNetwork) -> None:
        reads = " and ".join(", ".join(f"`{key}`" for key in entry.reads).rsplit(", ", 1))
        unused = f"`{self.network}` has no options: set {reads}"
        able = ", ".join(f"`{name}`" for name, other in NETWORKS.items() if other.has_wide_output)
        require(
            not self.tasks or entry.has_wide_output,
            "tasks",
            f"`network: {self.network}` predicts one label only: take one of {able}, or a network of your own",
        )
        require(not self.options or bool(dataclasses.fields(entry.options)), "options", unused)
        self.network_options.check(self)
        object.__setattr__(
            self, "options", to_plain(self.network_options) or None
        )  # with defaults, as a run's spec.yaml has them

    @functools.cached_property
    def network_options(self) -> NetworkSpec:
        """The options of a built-in network."""
        try:
            return parse(NETWORKS[self.network].options, self.options or {})
        except SpecError as error:
            raise error.within("options") from None
