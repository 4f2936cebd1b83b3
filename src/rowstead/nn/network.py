"""The contract of a network, and how `model.network` becomes one.

A network turns dense features and pooled embedding rows into one logit per example, or into what the head of several labels reads. Derive one from `Network`, name it in a recipe
as `package.module:Class` or `path/to/file.py:Class`, and it trains like the built-in DLRM.

Letters: B examples, Fd dense features, F sparse features, D width.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import linecache
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from rowstead.nn.heads import build_task_head
from rowstead.spec.errors import RowsteadError, SpecError, did_you_mean
from rowstead.spec.features import FeaturesSpec, Table
from rowstead.spec.model import ModelSpec
from rowstead.spec.network_options import NetworkSpec
from rowstead.spec.networks import NETWORKS, NetworkReference, parse_network, require_file


@dataclass(frozen=True, kw_only=True)
class NetworkInputs:
    """What a network gets to see."""

    dense: tuple[str, ...]
    """Names of the dense features, in the order of the columns of `dense`."""
    sparse: tuple[str, ...]
    """Names of the sparse features, in the order of their vectors in `pooled`."""
    widths: tuple[int, ...]
    """Width of each sparse feature's vector."""
    model: ModelSpec
    """The model section of the recipe."""

    @property
    def num_dense(self) -> int:
        return len(self.dense)

    @property
    def pooled_width(self) -> int:
        """Columns of `pooled`."""
        return sum(self.widths)

    @property
    def num_outputs(self) -> int:
        """Numbers to return for each example: a logit, or with `model.tasks` what their head reads."""
        return self.model.num_outputs


class Network(nn.Module):
    """Base class of networks: define `__init__` and `forward`.

    `forward` may be split in two, so that the first part runs while rows are still being looked up: then define `project` and `join`
    instead. The constructor runs under the recipe's seed. Random numbers that `forward` draws in training are seeded at every step.
    """

    compiles = False
    """Whether training on a GPU compiles the network with torch.compile: faster for most networks, and resumed runs that draw random
    numbers, as for dropout, may not be the same bit for bit."""

    def __init__(self, inputs: NetworkInputs, options: Mapping[str, Any] | NetworkSpec) -> None:
        super().__init__()
        self.inputs = inputs
        self._seed = torch.initial_seed()

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        """Logits [B] of dense features [B, Fd] and pooled rows [B, sum of widths]; with `model.tasks` [B, `inputs.num_outputs`]."""
        return self.join(self.project(dense), pooled)

    def project(self, dense: Tensor) -> Tensor | None:
        """The part that needs no rows: dense features [B, Fd] to a tensor, or None."""
        return dense

    def join(self, projected: Any, pooled: Tensor) -> Tensor:
        """The rest: what `project` returned and pooled rows [B, sum of widths] to logits [B]."""
        return self.forward(projected, pooled)

    def seed_step(self, number: int, rank: int = 0) -> None:
        """Seed torch's random numbers for training step `number`, so that a resumed run draws the same ones."""
        torch.manual_seed(_mix(_mix(self._seed, number), rank))

    def by_feature(self, pooled: Tensor) -> dict[str, Tensor]:
        """Pooled rows as one tensor [B, width of the feature] for each sparse feature, by name."""
        return dict(zip(self.inputs.sparse, pooled.split(self.inputs.widths, dim=1), strict=True))

    def vectors(self, pooled: Tensor) -> Tensor:
        """Pooled rows as [B, F, D]; every table must have the same width D."""
        widths = set(self.inputs.widths)
        if len(widths) > 1:
            raise RowsteadError(
                f"tables have the widths {', '.join(map(str, sorted(widths)))}: use `by_feature`, not `vectors`"
            )
        return pooled.unflatten(1, (len(self.inputs.widths), widths.pop() if widths else 1))


class TaskNetwork(Network):
    """A network under a head for several labels: logits [B, T]."""

    def __init__(self, network: Network, inputs: NetworkInputs) -> None:
        super().__init__(inputs, {})
        spec = inputs.model
        assert spec.task_head is not None
        self.compiles = network.compiles
        self.network = network
        self.head = build_task_head(spec.task_head, len(spec.tasks))

    def project(self, dense: Tensor) -> Tensor | None:
        return self.network.project(dense)

    def join(self, projected: Any, pooled: Tensor) -> Tensor:
        """Logits [B, T]."""
        logits: Tensor = self.head(torch.relu(self.network.join(projected, pooled)))
        return logits

    def seed_step(self, number: int, rank: int = 0) -> None:
        self.network.seed_step(number, rank)


def _mix(seed: int, number: int) -> int:
    """A 63-bit seed for the `number`-th of several uses of a seed."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest(), "little") >> 1


class NetworkOptions(Mapping[str, Any]):
    """`model.options` as a mapping that remembers which keys were asked for: a key that no one asked for is misspelt."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = dict(given)
        self._asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self._asked.add(key)
        return self._given[key]

    def __iter__(self) -> Iterator[str]:
        self._asked.update(self._given)
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)

    def check_all_used(self) -> None:
        """Refuse a key that the network never asked for."""
        for key in self._given:
            if key not in self._asked:
                raise SpecError(
                    f"model.options.{key}", f"the network has no such option: {did_you_mean(key, sorted(self._asked))}"
                )


def build_network(spec: ModelSpec, features: FeaturesSpec, tables: Sequence[Table]) -> Network:
    """The network of a model with fresh parameters, under the head of its tasks; one of the user's own is tried on two examples first."""
    names = features.expanded_sparse()
    width_of = {feature: table.width for table in tables for feature in table.features}
    inputs = NetworkInputs(
        dense=tuple(feature.name for feature in features.expanded_dense()),
        sparse=tuple(feature.name for feature in names),
        widths=tuple(width_of[feature] for feature in range(len(names))),
        model=spec,
    )
    network = _build_network(spec, inputs)
    return TaskNetwork(network, inputs) if spec.tasks else network


def _build_network(spec: ModelSpec, inputs: NetworkInputs) -> Network:
    reference = parse_network(spec.network)
    cls = load_class(reference)
    if spec.network in NETWORKS:
        return cls(inputs, spec.network_options)
    options = NetworkOptions(spec.options or {})
    try:
        network = cls(inputs, options)
    except Exception as error:
        raise _failure(reference, "its constructor raised", error) from error
    options.check_all_used()
    _try(network, inputs, reference)
    return network


def load_class(reference: NetworkReference) -> type[Network]:
    """The class that a reference names; the code of its module runs."""
    module = _load_file(reference) if reference.is_file else _import_module(reference)
    found = getattr(module, reference.class_name, None)
    if found is None:
        classes = [name for name, value in vars(module).items() if _is_network(value) and value is not Network]
        known = did_you_mean(reference.class_name, classes) if classes else "it defines no rowstead.Network"
        raise RowsteadError(f"model.network: {reference.source} has no class `{reference.class_name}`: {known}")
    if not _is_network(found):
        raise RowsteadError(f"model.network: `{reference}` is not a Network: derive the class from rowstead.Network")
    has_join = found.join is not Network.join
    if not has_join and found.forward is Network.forward:
        raise RowsteadError(f"model.network: `{reference}` defines no `forward`")
    if has_join != (found.project is not Network.project):
        raise RowsteadError(f"model.network: `{reference}` defines one of `project` and `join`: define both, or only `forward`")
    network: type[Network] = found
    return network


def _is_network(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Network)


def _load_file(reference: NetworkReference) -> ModuleType:
    file = require_file(reference)
    name = f"rowstead_network_{hashlib.sha256(reference.source.encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    linecache.checkcache(str(file))
    try:
        # Not through the loader: its cached byte code may be older than a file that was edited within a second.
        exec(compile(file.read_bytes(), str(file), "exec"), vars(module))
    except Exception as error:
        raise _failure(reference, "the file raised", error) from error
    return module


def _import_module(reference: NetworkReference) -> ModuleType:
    package = reference.source.partition(".")[0]
    if importlib.util.find_spec(package) is None and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # as `python -m` does
    try:
        return importlib.import_module(reference.source)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{reference.source}.".startswith(f"{error.name}."):
            raise _failure(reference, "the module raised", error) from error
        raise RowsteadError(
            f"model.network: there is no module `{error.name}`: install it, or run where Python finds it, or name a file as "
            f"path/to/file.py:{reference.class_name}"
        ) from None
    except Exception as error:
        raise _failure(reference, "the module raised", error) from error


def _try(network: Network, inputs: NetworkInputs, reference: NetworkReference) -> None:
    """Check the output of `forward`, and of `join` after `project`, on two examples of zeros."""
    if next(network.parameters(), None) is None:
        raise RowsteadError(f"model.network: `{reference}` has no parameters to train")
    frozen = [name for name, parameter in network.named_parameters() if not parameter.requires_grad]
    if frozen:
        raise RowsteadError(
            f"model.network: parameter `{frozen[0]}` of `{reference}` does not require a gradient, and all parameters are "
            "trained: make it a buffer (`register_buffer`)"
        )
    dense, pooled = torch.zeros(2, inputs.num_dense), torch.zeros(2, inputs.pooled_width)
    network.eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            projected = network.project(dense)
            found = {"forward": network(dense, pooled), "join": network.join(projected, pooled)}
        except Exception as error:
            raise _failure(reference, "it raised on two examples of zeros", error) from error
    network.train()
    if projected is not None and not isinstance(projected, Tensor):
        raise RowsteadError(f"model.network: `project` of `{reference}` must return a tensor or None, got {_shown(projected)}")
    wanted = (2,) if inputs.num_outputs == 1 else (2, inputs.num_outputs)
    what = (
        "one logit"
        if inputs.num_outputs == 1
        else f"`inputs.num_outputs` numbers, which `model.tasks` makes {inputs.num_outputs},"
    )
    for name, logits in found.items():
        if not isinstance(logits, Tensor) or logits.shape != wanted or not logits.is_floating_point():
            is_column = isinstance(logits, Tensor) and logits.shape == (2, 1) and wanted == (2,)
            fix = ": add `.squeeze(1)`" if is_column else ""
            raise RowsteadError(
                f"model.network: `{name}` of `{reference}` must return {what} per example, floating point {list(wanted)} for two examples, "
                f"got {_shown(logits)}{fix}"
            )


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"a {type(value).__name__}"


def _failure(reference: NetworkReference, what: str, error: Exception) -> RowsteadError:
    """An error in the user's code, with the line of that code where it happened."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        file, line, text = error.filename, error.lineno or 0, error.text or ""
        why = error.msg
    else:
        frames = traceback.extract_tb(error.__traceback__)
        module = sys.modules.get(reference.source)
        own_file = reference.source if reference.is_file else getattr(module, "__file__", None)
        frame = next((one for one in reversed(frames) if one.filename == own_file), frames[-1])
        file, line, text, why = frame.filename, frame.lineno or 0, frame.line or "", str(error)
    return RowsteadError(
        f"model.network: `{reference}`: {what} {type(error).__name__}: {why}\n  {file}, line {line}: {text.strip()}"
    )
