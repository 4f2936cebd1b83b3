"""A fleet: how many processes of each role train together, where they are started, and how they are restarted."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from rowstead.spec.errors import RowsteadError, SpecError, did_you_mean, require
from rowstead.spec.parse import parse, to_plain

RoleKind = Literal["trainer", "sparse", "dense", "reader"]
KINDS: tuple[RoleKind, ...] = ("sparse", "dense", "reader", "trainer")
"""In start order: servers before their clients."""

_SHORT = {"trainers": "num_trainers", "sparse": "num_sparse", "dense": "num_dense", "readers": "num_readers"}
_EXAMPLE = "trainers=2,sparse=2,dense=1,readers=1"


@dataclass(frozen=True, kw_only=True)
class FleetSpec:
    """Number of processes per role, and how they are started and restarted."""

    num_trainers: int = 1
    """Trainers, each with `train.sync.hogwild_threads` threads; `trainers=` in `--fleet`."""
    num_sparse: int = 1
    """Sparse parameter servers, which hold the tables; `sparse=` in `--fleet`."""
    num_dense: int = 1
    """1: a dense parameter server holds the shared dense parameters. 0: none, for a single trainer; `dense=` in `--fleet`."""
    num_readers: int = 1
    """Readers, each with its share of the log; `readers=` in `--fleet`."""
    tables: Literal["remote", "local"] = "remote"
    """`remote`: tables are in the sparse servers. `local`: the single trainer holds them, as the recipe's `placement` says."""
    start: Literal["here", "manual", "ray"] = "here"
    """`here`: roles are processes of this machine. `manual`: you start them; the command prints what to type. `ray`: roles run on a Ray cluster; needs `rowstead[ray]`. `--fleet` accepts `manual` and `ray` without `start=`."""
    ray_cpus: float = 1.0
    """CPUs that Ray reserves for each server, each reader and each thread of a trainer."""
    snapshot_every_s: float = 30.0
    """Interval of the servers' snapshots; updates since the last one are lost when a server is killed."""
    max_restarts: int = 3
    """Maximum number of restarts of one role in a row; the count starts over after it has run for `healthy_s`."""
    healthy_s: float = 300.0
    """Run time after which the restarts of a role no longer count."""
    start_s: float = 120.0
    """Maximum time until a role is ready."""

    def __post_init__(self) -> None:
        for name in ("num_trainers", "num_readers"):
            require(getattr(self, name) >= 1, name, f"must be at least 1, got {getattr(self, name)}")
        require(
            self.num_dense in (0, 1),
            "num_dense",
            f"must be 0 or 1, got {self.num_dense}: one dense server holds the shared parameters",
        )
        for name in ("snapshot_every_s", "healthy_s", "start_s", "ray_cpus"):
            require(getattr(self, name) > 0, name, f"must be above 0, got {getattr(self, name)}")
        require(self.max_restarts >= 0, "max_restarts", f"must not be negative, got {self.max_restarts}")
        if self.tables == "remote":
            require(self.num_sparse >= 1, "num_sparse", "must be at least 1; only `tables: local` needs no sparse server")
        else:
            require(
                self.num_trainers == 1, "tables", "can be `local` only with one trainer: several trainers need sparse servers"
            )
            require(self.num_sparse == 0, "num_sparse", "must be 0 with `tables: local`, because the trainer holds all tables")

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
