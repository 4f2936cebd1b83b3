"""A fleet: how many processes of each role train together, where they are started, and how they are restarted."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from rowstead.spec.bounds import AboveZero, AnyProcesses, Count, Processes, Spec
from rowstead.spec.errors import RowsteadError, SpecError, did_you_mean, require
from rowstead.spec.parse import parse, to_plain

RoleKind = Literal["trainer", "sparse", "dense", "reader"]
KINDS: tuple[RoleKind, ...] = ("sparse", "dense", "reader", "trainer")
"""In start order: servers before their clients."""

_SHORT = {"trainers": "num_trainers", "sparse": "num_sparse", "dense": "num_dense", "readers": "num_readers"}
_EXAMPLE = "trainers=2,sparse=2,dense=1,readers=1"


@dataclass(frozen=True, kw_only=True)
class FleetSpec(Spec):
    """Number of processes per role, and how they are started and restarted."""

    num_trainers: Processes = 1
    """Trainers, each with `train.sync.hogwild_threads` threads; `trainers=` in `--fleet`."""
    num_sparse: AnyProcesses = 1
    """Sparse parameter servers, which hold the tables; none with `tables: local`. `sparse=` in `--fleet`."""
    num_dense: AnyProcesses = 1
    """Dense parameter servers, which hold the shared dense parameters, each an equal share of them. 0: none, for a single trainer; `dense=` in `--fleet`."""
    num_readers: Processes = 1
    """Readers, each with its share of the log; `readers=` in `--fleet`."""
    tables: Literal["remote", "local"] = "remote"
    """`remote`: tables are in the sparse servers. `local`: the single trainer holds them, as the recipe's `placement` says."""
    start: Literal["here", "manual", "ray"] = "here"
    """`here`: roles are processes of this machine. `manual`: you start them; the command prints what to type. `ray`: roles run on a Ray cluster; needs `rowstead[ray]`. `--fleet` accepts `manual` and `ray` without `start=`."""
    ray_cpus: AboveZero = 1.0
    """CPUs that Ray reserves for each server, each reader and each thread of a trainer."""
    snapshot_every_s: AboveZero = 30.0
    """Longest interval of the servers' snapshots; the first are taken sooner. Updates since the last one are lost when a server is killed."""
    max_restarts: Count = 3
    """Maximum number of restarts of one role in a row; the count starts over after it has run for `healthy_s`."""
    healthy_s: AboveZero = 300.0
    """Run time after which the restarts of a role no longer count."""
    start_s: AboveZero = 120.0
    """Maximum time until a role is ready."""
    follows_scale: bool = False
    """Whether `scale` below 1 also reduces trainers, servers and readers: by its square root, down to 2 of those that are several."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tables == "remote":
            require(self.num_sparse >= 1, "num_sparse", "must be at least 1; only `tables: local` needs no sparse server")
        else:
            require(
                self.num_trainers == 1, "tables", "can be `local` only with one trainer: several trainers need sparse servers"
            )
            require(self.num_sparse <= 1, "num_sparse", "must be 0 with `tables: local`, because the trainer holds all tables")
            object.__setattr__(self, "num_sparse", 0)  # also for the default

    def at_scale(self, scale: float) -> FleetSpec:
        """The fleet that a recipe of this scale starts."""
        if not self.follows_scale or scale >= 1:
            return dataclasses.replace(self, follows_scale=False)
        counts = {name: getattr(self, name) for name in _SHORT.values()}
        fewer = {name: max(min(count, 2), round(count * math.sqrt(scale))) for name, count in counts.items()}
        return dataclasses.replace(self, follows_scale=False, **fewer)

    def count(self, kind: RoleKind) -> int:
        """The number of processes of a kind."""
        counts = {"trainer": self.num_trainers, "sparse": self.num_sparse, "dense": self.num_dense, "reader": self.num_readers}
        return counts[kind]

    def roles(self) -> list[tuple[RoleKind, int]]:
        """Every role with its number, in start order."""
        return [(kind, number) for kind in KINDS for number in range(self.count(kind))]


def parse_fleet(text: str, base: FleetSpec | None = None) -> FleetSpec:
    """Parse `trainers=2,sparse=2,dense=1,readers=1`; other values are those of `base`, the recipe's fleet."""
    plain = to_plain(base or FleetSpec())
    known = [field.name for field in dataclasses.fields(FleetSpec)]
    words = [part.strip() for part in text.split(",") if part.strip()]
    if not words:
        raise RowsteadError(f"--fleet is empty: give the number of roles, as in {_EXAMPLE}")
    given: set[str] = set()
    for word in words:
        key, equals, value = (piece.strip() for piece in word.partition("="))
        if not equals and key in ("manual", "ray"):
            key, value = "start", key
        name = _SHORT.get(key, key)
        if name not in known:
            hint = did_you_mean(key, [*_SHORT, *known[4:], "manual", "ray"])
            raise RowsteadError(f"--fleet {text}: unknown role or option `{key}`: {hint} (as in {_EXAMPLE})")
        if not value:
            raise RowsteadError(f"--fleet {text}: `{key}` needs a value, as in {_EXAMPLE}")
        if name in given:
            raise RowsteadError(f"--fleet {text}: `{key}` is given twice")
        given.add(name)
        plain[name] = value
        if name == "tables" and value == "local" and "sparse" not in text:
            plain["num_sparse"] = 0
    try:
        return parse(FleetSpec, plain)
    except SpecError as error:
        raise RowsteadError(f"--fleet {text}: {error}") from None
