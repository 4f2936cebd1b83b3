"""One whole run: data, features, model, training; and how a recipe file becomes one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rowstead.spec.data import DataSpec
from rowstead.spec.errors import RowsteadError, SpecError, did_you_mean, require
from rowstead.spec.features import FeaturesSpec, Table, tables_of
from rowstead.spec.fleet import FleetSpec
from rowstead.spec.interactions import INTERACTIONS
from rowstead.spec.model import ModelSpec
from rowstead.spec.networks import make_absolute
from rowstead.spec.parse import override, parse, read_yaml
from rowstead.spec.placement import MemorySpec, PlacementSpec, rules_for
from rowstead.spec.train import TrainSpec

Kernel = Literal["auto", "reference", "cpu", "gpu"]

RECIPES = Path(__file__).parent.parent / "recipes"


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """The complete specification of a run."""

    name: str
    """Name of the run's folder."""
    data: DataSpec
    """Where examples come from."""
    features: FeaturesSpec
    """What the model reads of them."""
    model: ModelSpec = ModelSpec()
    """The architecture."""
    train: TrainSpec = TrainSpec()
    """The training loop."""
    scale: float = 1.0
    """Multiplies every table's hash size, to try a large recipe on a small machine."""
    seed: int = 1
    """Seed of initial weights and shuffling."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train: `auto` takes a CUDA GPU where there is one."""
    kernel: Kernel = "auto"
    """Which embedding kernels run: `auto` takes the fastest for the device, `reference` is plain torch."""
    threads: int | None = None
    """CPU threads of the dense arithmetic and of the CPU kernels; default: the number of usable cores."""
    check_ids: bool = True
    """Check ids and offsets of every batch before the kernels see them."""
    placement: PlacementSpec = "auto"
    """Where the tables live: `auto`, or by table name or pattern such as `user_*`. See [Placement](placement.md)."""
    memory: MemorySpec = MemorySpec()
    """Memory limits for tables, and the folder for those on `ssd`."""
    fleet: FleetSpec | None = None
    """Train with processes of several roles. See [The fleet](fleet.md)."""

    def __post_init__(self) -> None:
        require(_plain_name(self.name), "name", "use letters, digits, `-`, `_` and `.` only, and start with a letter or digit")
        require(0 < self.scale < math.inf, "scale", f"must be above 0 and finite, got {self.scale}")
        require(0 <= self.seed < 2**63, "seed", f"must be from 0 to 2**63 - 1, got {self.seed}")
        require(self.threads is None or self.threads >= 1, "threads", "must be at least 1")
        if self.scale < 1:
            kept = next((f.name for f in self.features.expanded_sparse() if f.hash == "none"), None)
            require(kept is None, "scale", f"shrinks tables, but ids of `{kept}` are rows already (hash: none): use `mix`")
        self._check_placement()
        if self.fleet is not None:
            self._check_fleet(self.fleet)
        kind = self.model.interaction.kind
        if self.model.network == "dlrm" and INTERACTIONS[kind].needs_equal_widths:
            require(
                bool(self.features.dense) or len(self.features.expanded_sparse()) > 1,
                "features",
                f"`interaction: {kind}` needs two vectors, but there is one sparse feature and no dense one: add a feature, or "
                "use `concat`",
            )
            for table in self.tables:
                require(
                    table.width == self.model.width,
                    "features",
                    f"table `{table.name}` has width {table.width}, but `interaction: {kind}` needs every table as wide as "
                    f"model.width, {self.model.width}: remove its width, or use `concat` or `cross`",
                )

    def _check_fleet(self, fleet: FleetSpec) -> None:
        mode = self.train.sync.mode_for(fleet.num_trainers)
        require(
            mode == "none" or fleet.num_dense > 0,
            "fleet.num_dense",
            f"`{mode}` needs a dense server: set dense=1",
        )
        if fleet.tables == "local":
            require(
                self.train.eval_every is None, "train.eval_every", "cannot be combined with `fleet.tables: local`: remove it"
            )
        else:
            require(bool(self.tables), "fleet.tables", "this model has no tables for servers to hold: use `local`")

    def _check_placement(self) -> None:
        try:
            rules = rules_for(self.placement, [table.name for table in self.tables])
        except SpecError as error:
            raise error.within("placement") from None
        on_ssd = next((name for name, rule in rules.items() if rule.where == "ssd"), None)
        require(
            on_ssd is None or self.memory.folder is not None,
            "memory.folder",
            f"table `{on_ssd}` is placed on ssd: name a folder on a fast local disk for its rows",
        )

    @property
    def tables(self) -> tuple[Table, ...]:
        return tables_of(self.features, width=self.model.width, scale=self.scale)


def recipe_names() -> list[str]:
    """Names of the recipes that are shipped."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def find_recipe(name_or_path: str) -> Path:
    """The file of a shipped recipe, or of one of the user's own."""
    path = Path(name_or_path)
    if path.is_file():
        return path
    if name_or_path in recipe_names():
        return RECIPES / f"{name_or_path}.yaml"
    raise RowsteadError(f"no recipe file or shipped recipe `{name_or_path}`: {did_you_mean(name_or_path, recipe_names())}")


def read_recipe(name_or_path: str) -> Any:
    """The plain content of a recipe; the file of a network of the user's own is looked for beside it, too."""
    path = find_recipe(name_or_path)
    plain = read_yaml(path)
    model = plain.get("model") if isinstance(plain, dict) else None
    if isinstance(model, dict) and isinstance(network := model.get("network"), str):
        plain = {**plain, "model": {**model, "network": make_absolute(network, [path.parent])}}
    return plain


def load_recipe(name_or_path: str, overrides: Iterable[str] = ()) -> RunSpec:
    """A recipe by path or shipped name, with `key.path=value` overrides applied."""
    try:
        return parse(RunSpec, override(read_recipe(name_or_path), overrides))
    except SpecError as error:
        raise SpecError("", f"{find_recipe(name_or_path).name}: {error}") from None


def check_moves(overrides: Iterable[str]) -> None:
    """Reject overrides of a resumed run other than its placement and memory limits."""
    for change in overrides:
        if change.partition("=")[0].split(".")[0].strip() not in ("placement", "memory"):
            raise RowsteadError(
                f"`--resume` uses the run's own recipe and settings; remove `--set {change}` (only `placement` and `memory` may change)"
            )


def _plain_name(name: str) -> bool:
    return bool(name) and name[0].isalnum() and all(c.isalnum() or c in "-_." for c in name) and name.isascii()
