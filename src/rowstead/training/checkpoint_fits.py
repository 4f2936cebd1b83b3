"""Whether a checkpoint fits the spec of a run: its model, the state of the run, and the shape and dtype of every tensor.

Checked before anything is built or loaded from it, so that a checkpoint that does not fit leaves the one before it to be used.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rowstead.data.columns import IdKinds
from rowstead.data.transforms import DenseTransforms
from rowstead.kernels.row_state import compute_dtype
from rowstead.nn.dlrm import build_model_network
from rowstead.nn.network import Network
from rowstead.records.files import is_figure
from rowstead.records.plain_files import is_count, shown
from rowstead.spec.errors import CheckpointError
from rowstead.spec.networks import NETWORKS, parse_network
from rowstead.spec.parse import difference, to_plain
from rowstead.spec.row_optimizers import ROW_OPTIMIZERS
from rowstead.spec.run import RunSpec
from rowstead.spec.train import DENSE_STATE
from rowstead.training.build import ROW_DTYPES
from rowstead.training.checkpoint import Checkpoint
from rowstead.training.checkpoint_files import invalid
from rowstead.training.checkpoint_manifest import MANIFEST, STORE
from rowstead.training.progress import Position

NETWORK_SHA256 = "network_sha256"
"""Key of a checkpoint's architecture: the checksum of the file of a network of the user's own."""

TRAINING_KEYS = ("label", "weight")
"""Keys of a task that do not say what a prediction is; checkpoints of earlier versions have them."""

Expected = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of tensors by name."""


def check_fits(spec: RunSpec, saved: Checkpoint, on_message: Callable[[str], None], *, with_optimizer: bool) -> None:
    """Refuse a checkpoint that this spec's model cannot be loaded from; with its optimizer, that the run cannot continue from."""
    check_same_model(spec, saved, on_message)
    cursor, keys = position_in(saved).cursor, spec.data.log.cursor_keys
    if with_optimizer and cursor is not None and keys and set(cursor) != set(keys):
        raise _invalid(saved, "position.cursor", cursor, f"; this log's has the keys {', '.join(keys)}")
    transforms_in(spec, saved)
    id_kinds_in(spec, saved)
    _check_tensors(spec, saved, with_optimizer=with_optimizer)


def architecture(spec: RunSpec) -> dict[str, Any]:
    """What decides the shapes of a model's tensors and the meaning of its rows, as a checkpoint keeps it."""
    features, model = to_plain(spec.features, defaults=False), to_plain(spec.model, defaults=False)
    facts = {"features": features, "model": model, "scale": spec.scale}
    facts["model"] = model = _without_training(model)
    if spec.model.network in NETWORKS and "options" in model:
        model["options"] = to_plain(spec.model.network_options, defaults=False)  # a later version may have more of them
    network = parse_network(spec.model.network)
    if network.is_file:
        model["network"] = f"{Path(network.source).name}:{network.class_name}"  # the folder may move
        facts[NETWORK_SHA256] = network.read_sha256()
    return facts


def check_same_model(spec: RunSpec, saved: Checkpoint, on_message: Callable[[str], None]) -> None:
    """Refuse a checkpoint whose tensors would not fit this spec, or would mean something else; report a network's file that changed."""
    there, here = dict(_fact(saved, "architecture", dict)), architecture(spec)
    if "model" in there:
        there["model"] = _without_training(there["model"])
    before, now = there.pop(NETWORK_SHA256, None), here.pop(NETWORK_SHA256, None)
    if before is not None and now is not None and before != now:
        file = parse_network(spec.model.network).source
        on_message(f"{file} has changed since {saved.path} was written; continuing with the new code")
    found = difference(there, here)
    if found is not None:
        path, old, new = found
        raise CheckpointError(
            f"{saved.path} is a checkpoint of another model: {shown(path)[1:-1]} is {old} there and {new} in this recipe. "
            "Use the recipe that it was trained with (spec.yaml in its run's folder)"
        )


def _without_training(model: Any) -> Any:
    """The facts of a model without what its tasks only say about training: which column is the label, and the weight of its loss."""
    if not isinstance(model, dict) or not isinstance(tasks := model.get("tasks"), list):
        return model
    kept = (
        {key: value for key, value in task.items() if key not in TRAINING_KEYS} if isinstance(task, dict) else task
        for task in tasks
    )
    return {**model, "tasks": list(kept)}


def position_in(saved: Checkpoint) -> Position:
    """How far the run had come."""
    plain = _fact(saved, "position", dict)
    for key, value in plain.items():
        if not _is_position(key, value):
            raise _invalid(saved, f"position.{key}", value)
    if plain.get("step") != saved.step:
        raise _invalid(saved, "position.step", plain.get("step"), f"; the checkpoint is of step {saved.step}")
    return Position(**plain)


def _is_position(key: str, value: Any) -> bool:
    """Whether a value is one that this field of a Position can have."""
    if key == "cursor":
        return value is None or (isinstance(value, dict) and len(value) <= 16 and all(map(is_count, value.values())))
    if key in ("train_s", "lr_scale", "label_weight", "label_sum"):
        return is_figure(value) and value >= 0
    if key == "best":
        return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value))
    return key in {field.name for field in dataclasses.fields(Position)} and is_count(value)


def transforms_in(spec: RunSpec, saved: Checkpoint) -> DenseTransforms:
    """The dense transforms that were learned on the training split."""
    names = [feature.name for feature in spec.features.expanded_dense()]
    try:
        return DenseTransforms.from_untrusted(_fact(saved, "transforms", dict), names)
    except ValueError as error:
        raise invalid(saved.path, MANIFEST, f"`facts.{str(error)[1:]}") from None


def id_kinds_in(spec: RunSpec, saved: Checkpoint) -> IdKinds:
    """Whether each sparse column held text or integers in training."""
    kinds, columns = _fact(saved, "id_kinds", dict), {str(feature.column) for feature in spec.features.expanded_sparse()}
    for column, kind in kinds.items():
        if column not in columns or kind not in ("text", "integers"):
            raise _invalid(saved, f"id_kinds.{column}", kind)
    return kinds


def _fact(saved: Checkpoint, key: str, kind: type) -> Any:
    value = saved.facts.get(key)
    if not isinstance(value, kind):
        raise _invalid(saved, key, value)
    return value


def _invalid(saved: Checkpoint, key: str, value: object, more: str = "") -> CheckpointError:
    return invalid(saved.path, MANIFEST, f"`facts.{shown(key)[1:-1]}` is {shown(value)}{more}")


# Tensors


def _check_tensors(spec: RunSpec, saved: Checkpoint, *, with_optimizer: bool) -> None:
    expected = _store_tensors(spec, with_optimizer=with_optimizer)
    network = _build_untrained(spec)
    expected |= {f"net.{name}": (tuple(value.shape), value.dtype) for name, value in network.state_dict().items()}
    if with_optimizer:
        expected |= _optimizer_tensors(spec, saved, network)
    for name, (shape, dtype) in expected.items():
        if name not in saved.tensors:
            raise _unfit(saved, name, "is missing", shape, dtype)
        found, found_dtype = saved.tensors.shape(name), saved.tensors.dtype(name)
        # A fleet of FP64, which only tests have, is evaluated in FP32.
        is_fp64 = dtype.is_floating_point and found_dtype == torch.float64
        if found != shape or not (found_dtype == dtype or is_fp64):
            raise _unfit(saved, name, f"has shape {found} of {_code(found_dtype)}", shape, dtype)


def _unfit(saved: Checkpoint, name: str, problem: str, shape: tuple[int, ...], dtype: torch.dtype) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {saved.path} does not match the model: {shown(name)} {problem}, and the recipe needs shape {shape} of "
        f"{_code(dtype)}. Use the recipe that it was trained with, or delete it to use an older one"
    )


def _code(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _store_tensors(spec: RunSpec, *, with_optimizer: bool) -> Expected:
    """What the spec's tables need."""
    rows, expected = ROW_DTYPES[spec.model.row_format], Expected()
    for table in spec.tables:
        expected[f"{STORE}{table.name}.rows"] = (table.num_rows, table.width), rows
        optimizer = ROW_OPTIMIZERS[spec.train.sparse_optimizer.kind]
        for name, columns in optimizer.state_columns(table.width).items() if with_optimizer else ():
            expected[f"{STORE}{table.name}.{name}"] = (table.num_rows, columns), compute_dtype(rows)
    return expected


def _build_untrained(spec: RunSpec) -> Network:
    """The spec's network, to look at its shapes; a built-in one takes no memory."""
    with torch.random.fork_rng(devices=[]), torch.device("meta" if spec.model.network in NETWORKS else "cpu"):
        return build_model_network(spec.model, spec.features, spec.tables)


def _optimizer_tensors(spec: RunSpec, saved: Checkpoint, network: Network) -> Expected:
    """What the dense optimizer needs, of the parameters that the checkpoint has state of: Adam and AdamW keep none of a parameter without gradients."""
    parameters, kind = list(network.parameters()), spec.train.dense_optimizer.kind
    keys = (*DENSE_STATE[kind], "step") if DENSE_STATE[kind] else ()
    names = {f"optimizer.{index}.{key}": index for index in range(len(parameters)) for key in keys}
    found = set[int]()
    for name in saved.tensors:
        if name.startswith("optimizer.") and name not in names:
            raise CheckpointError(
                f"checkpoint {saved.path} does not match the recipe: {shown(name)} is no state of `{kind}` over {len(parameters)} "
                "parameters. Use the recipe that it was trained with, or delete it to use an older one"
            )
        if name in names:
            found.add(names[name])
    if found and kind not in ("adam", "adamw"):
        found = set(range(len(parameters)))
    expected = Expected()
    for index in sorted(found):
        shape, dtype = tuple(parameters[index].shape), parameters[index].dtype
        expected |= {f"optimizer.{index}.{key}": ((), torch.float32) if key == "step" else (shape, dtype) for key in keys}
    return expected
