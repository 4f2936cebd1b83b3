"""One whole run: data, features, model, training; and how a recipe file becomes one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rowstead.spec.bounds import AboveZero, PlainName, Processes, Seed, Spec
from rowstead.spec.data import DataSpec
from rowstead.spec.errors import RowsteadError, SpecError, did_you_mean, require
from rowstead.spec.features import FeaturesSpec, Table, tables_of
from rowstead.spec.fleet import FleetSpec
from rowstead.spec.heads import HEADS
from rowstead.spec.interactions import INTERACTIONS
from rowstead.spec.model import ModelSpec
from rowstead.spec.network_options import NetworkShape
from rowstead.spec.networks import NETWORKS, BuiltinNetwork, make_absolute
from rowstead.spec.parse import errors_in, find_file, merge, override, parse, shipped_names, to_plain
from rowstead.spec.placement import MemorySpec, PlacementSpec, rules_for
from rowstead.spec.train import TrainSpec
from rowstead.spec.yaml_text import read_yaml

Kernel = Literal["auto", "reference", "cpu", "gpu"]

RECIPES = Path(__file__).parent.parent / "recipes"
MAX_BASES = 20


@dataclass(frozen=True, kw_only=True)
class RunSpec(Spec):
    """The complete specification of a run."""

    name: PlainName
    """Name of the run's folder."""
    data: DataSpec
    """Where examples come from."""
    features: FeaturesSpec
    """What the model reads of them."""
    model: ModelSpec = ModelSpec()
    """The architecture."""
    train: TrainSpec = TrainSpec()
    """The training loop."""
    scale: AboveZero = 1.0
    """Multiplies every table's hash size, to try a large recipe on a small machine; a fleet may follow it, see `fleet.follows_scale`."""
    seed: Seed = 1
    """Seed of initial weights and shuffling."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train: `auto` takes a CUDA GPU where there is one."""
    kernel: Kernel = "auto"
    """Which embedding kernels run: `auto` takes the fastest for the device, `reference` is plain torch."""
    threads: Processes | None = None
    """CPU threads of the dense arithmetic and of the CPU kernels; default: the number of usable physical cores."""
    check_ids: bool = True
    """Check ids and offsets of every batch before the kernels see them."""
    placement: PlacementSpec = "auto"
    """Where the tables live: one of these for all, or rules by table name or pattern such as `user_*`. See [Placement](placement.md)."""
    memory: MemorySpec = MemorySpec()
    """Memory limits for tables, and the folder for those on `ssd`."""
    fleet: FleetSpec | None = None
    """Train with processes of several roles. See [The fleet](fleet.md)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale < 1:
            kept = next((f.name for f in self.features.expanded_sparse() if f.hash == "none"), None)
            require(kept is None, "scale", f"shrinks tables, but ids of `{kept}` are rows already (hash: none): use `mix`")
        self._check_placement()
        self._check_tasks()
        stop = self.train.early_stop
        has_groups = self.data.files is not None and self.data.files.group is not None
        needs_groups = stop is not None and stop.monitor == "gauc"
        require(
            has_groups or not needs_groups,
            "train.early_stop.monitor",
            "`gauc` needs `group` of the log, the column of the groups",
        )
        if self.fleet is not None:
            self._check_fleet(self.fleet)
        if self.model.network in NETWORKS:
            self._check_network(NETWORKS[self.model.network])

    def _check_tasks(self) -> None:
        """Refuse what goes with one label only, or with several only."""
        tasks, stop = self.model.tasks, self.train.early_stop
        followed = None if stop is None else stop.task
        if not tasks:
            require(followed is None, "train.early_stop.task", "applies only to several labels: list them in `model.tasks`")
            return
        names = [task.name for task in tasks]
        unknown = f"there is no task `{followed}`: {did_you_mean(followed or '', names)}"
        require(followed is None or followed in names, "train.early_stop.task", unknown)
        task = tasks[names.index(followed)] if followed is not None else tasks[0]
        monitor = None if stop is None else stop.monitor
        require(
            HEADS[task.loss].is_probability or monitor in (None, "mse"),
            "train.early_stop.monitor",
            f"task `{task.name}` is a regression, which only has `mse`",
        )
        require(self.train.loss == "bce", "train.loss", "does not apply with `model.tasks`: give each task its `loss`")
        require(not self.train.label_smoothing, "train.label_smoothing", "does not apply with `model.tasks`: remove it")
        kept_all = self.data.negative_keep_rate == 1
        require(
            kept_all, "data.negative_keep_rate", "does not apply with `model.tasks`, whose labels do not share negatives: use 1"
        )
        files, synth = self.data.files, self.data.synth
        if files is not None:
            is_default = files.label == "label"
            require(is_default, f"data.{files.kind}.label", "does not apply with `model.tasks`, which name the label columns")
            require(files.true_p is None, f"data.{files.kind}.true_p", "does not apply with `model.tasks`: remove it")
        for task in tasks if synth is not None else ():
            known = synth.labels if synth is not None else ()
            require(
                task.label in known,
                "model.tasks",
                f"the synthetic log has no label `{task.label}`: {did_you_mean(str(task.label), known)}",
            )

    def _check_network(self, entry: BuiltinNetwork) -> None:
        kind, pairs = self.model.interaction.kind, self.model.interaction.pairs
        if "interaction" in entry.reads and INTERACTIONS[kind].needs_equal_widths:
            has_dense, num_sparse = bool(self.features.dense), len(self.features.expanded_sparse())
            require(
                has_dense or num_sparse > 1,
                "features",
                f"`interaction: {kind}` needs two vectors, but there is one sparse feature and no dense one: add a feature, or "
                "use `concat`",
            )
            require(
                has_dense or pairs != "dense_sparse",
                "model.interaction.pairs",
                "`dense_sparse` needs dense features, and there are none: add one, or use `both` or `sparse_sparse`",
            )
            require(
                num_sparse != 1 or pairs != "sparse_sparse",
                "model.interaction.pairs",
                "`sparse_sparse` needs two sparse features, and there is one: add one, or use `both` or `dense_sparse`",
            )
            self._require_equal_widths(f"`interaction: {kind}`", "use `concat` or `cross`")
        if entry.needs_equal_widths:
            self._require_equal_widths(f"`network: {self.model.network}`", "use another network")
        for table in self.tables if entry.has_first_order else ():
            least = f"table `{table.name}` has width 1: the last column of a row is its first-order weight, so give 2 or more"
            require(table.width > 1, "model.width", least)
        try:
            self.model.network_options.check_features(self.network_shape.sparse)
        except SpecError as error:
            raise error.within("model") from None

    def _require_equal_widths(self, what: str, otherwise: str) -> None:
        for table in self.tables:
            require(
                table.width == self.model.width,
                "features",
                f"table `{table.name}` has width {table.width}, but {what} needs every table as wide as model.width, "
                f"{self.model.width}: remove its width, or {otherwise}",
            )

    def _check_fleet(self, fleet: FleetSpec) -> None:
        mode = self.train.sync.mode_for(fleet.num_trainers)
        require(mode == "none" or fleet.num_dense > 0, "fleet.num_dense", f"`{mode}` needs a dense server: set dense=1")
        by_evaluation = self.train.schedule.decay == "plateau"
        require(
            not by_evaluation, "train.schedule.decay", "`plateau` does not apply to a fleet, whose trainers follow the step"
        )
        uses_batch_norm = "batch" in (self.model.bottom_norm, self.model.top_norm)
        require(
            not uses_batch_norm or fleet.tables == "local",
            "model",
            "batch norm does not apply to a fleet, whose trainers see different batches and share only parameters: use `layer`",
        )
        if fleet.tables == "local":
            require(
                self.train.eval_every is None, "train.eval_every", "cannot be combined with `fleet.tables: local`: remove it"
            )
        else:
            require(bool(self.tables), "fleet.tables", "this model has no tables for servers to hold: use `local`")

    def _check_placement(self) -> None:
        names = [table.name for table in self.tables]
        try:
            rules = rules_for(self.placement, names)
        except SpecError as error:
            raise error.within("placement") from None
        if self.memory.folder is None and any(rule.where == "ssd" for rule in rules.values()):
            object.__setattr__(self, "memory", dataclasses.replace(self.memory, folder="."))

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any], overrides: Iterable[str] = ()) -> RunSpec:
        """A spec from a dict with the content of a recipe, `base` included, with `key.path=value` overrides applied."""
        return parse(cls, override(_merge_base(plain, None), overrides))

    def to_dict(self) -> dict[str, Any]:
        """The whole recipe as dicts, lists and plain values, which `from_dict` and YAML take."""
        plain: dict[str, Any] = to_plain(self)
        return plain

    @property
    def scaled_fleet(self) -> FleetSpec | None:
        """The fleet to start: the recipe's, at its scale."""
        return None if self.fleet is None else self.fleet.at_scale(self.scale)

    @functools.cached_property
    def network_shape(self) -> NetworkShape:
        """What the network is built over."""
        sparse = self.features.expanded_sparse()
        width_of = {feature: table.width for table in self.tables for feature in table.features}
        return NetworkShape(
            num_dense=len(self.features.expanded_dense()),
            sparse=tuple(feature.name for feature in sparse),
            widths=tuple(width_of[feature] for feature in range(len(sparse))),
            model=self.model,
        )

    @functools.cached_property
    def tables(self) -> tuple[Table, ...]:
        return tables_of(self.features, width=self.model.width, scale=self.scale)


def recipe_names() -> list[str]:
    """Names of the recipes that are shipped."""
    return shipped_names(RECIPES)


def find_recipe(name_or_path: str) -> Path:
    """The file of a shipped recipe, or of one of the user's own."""
    return find_file(name_or_path, "recipe", RECIPES)


def find_gpu_recipe(name_or_path: str) -> Path | None:
    """The file of a recipe's set-up for GPUs: `m1-gpu.yaml` beside `m1.yaml`; None where there is none."""
    path = find_recipe(name_or_path)
    beside = path.with_name(f"{path.stem}-gpu{path.suffix}")
    return beside if beside.is_file() else None


def read_recipe(name_or_path: str, num_above: int = 0) -> Any:
    """The plain content of a recipe, on top of its `base` if it names one; `num_above` recipes are based on this one.

    That recipe, and the file of a network of the user's own, are looked for beside it, too.
    """
    path = find_recipe(name_or_path)
    plain = _merge_base(read_yaml(path), path, num_above)
    model = plain.get("model") if isinstance(plain, dict) else None
    if isinstance(model, dict) and isinstance(network := model.get("network"), str):
        plain = {**plain, "model": {**model, "network": make_absolute(network, [path.parent])}}
    return plain


def _merge_base(plain: Any, path: Path | None, num_above: int = 0) -> Any:
    """The plain content of a recipe, from the file at `path` if it has one, on top of its `base` if it names one."""
    if not isinstance(plain, Mapping) or "base" not in plain:
        return plain
    require(num_above < MAX_BASES, "base", f"recipes are based on one another, more than {MAX_BASES} in a row or in a circle")
    base, changes = str(plain["base"]), {key: value for key, value in plain.items() if key != "base"}
    near = None if path is None else path.parent / base
    file = near if near is not None and near.is_file() else find_recipe(base)
    require(path is None or not file.samefile(path), "base", "names this recipe itself")
    return merge(read_recipe(str(file), num_above + 1), changes)


def load_recipe(name_or_path: str, overrides: Iterable[str] = ()) -> RunSpec:
    """A recipe by path or shipped name, with `key.path=value` overrides applied."""
    with errors_in(find_recipe(name_or_path)):
        return parse(RunSpec, override(read_recipe(name_or_path), overrides))


def check_moves(overrides: Iterable[str]) -> None:
    """Reject overrides of a resumed run other than its placement and memory limits."""
    for change in overrides:
        if change.partition("=")[0].split(".")[0].strip() not in ("placement", "memory"):
            raise RowsteadError(
                f"`--resume` uses the run's own recipe and settings; remove `--set {change}` (only `placement` and `memory` may change)"
            )
