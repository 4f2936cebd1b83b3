"""A fleet: how many processes of each role train together, and what becomes of those that fail."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from rowstead.spec.errors import RowsteadError, SpecError, did_you_mean, require
from rowstead.spec.parse import parse, to_plain

RoleKind = Literal["trainer", "sparse", "dense", "reader"]
KINDS: tuple[RoleKind, ...] = ("sparse", "dense", "reader", "trainer")
"""In the order in which they are started: whoever is asked before whoever asks."""

_SHORT = {"trainers": "num_trainers", "sparse": "num_sparse", "dense": "num_dense", "readers": "num_readers"}
_EXAMPLE = "trainers=2,sparse=2,dense=1,readers=1"


@dataclass(frozen=True, kw_only=True)
class FleetSpec:
    """Processes by role, and how they are kept going."""

    num_trainers: int = 1
    """Trainers, each with `train.sync.hogwild_threads` threads; `trainers=` in `--fleet`."""
    num_sparse: int = 1
    """Sparse parameter servers, which keep the tables; `sparse=` in `--fleet`."""
    num_dense: int = 1
    """1: a dense parameter server keeps the centre of the trainers' dense parameters. 0: none, for one trainer; `dense=` in `--fleet`."""
    num_readers: int = 1
    """Readers, each with its share of the log; `readers=` in `--fleet`."""
    tables: Literal["remote", "local"] = "remote"
    """`remote`: tables are in the sparse servers. `local`: where the recipe's `placement` has them, in the memory of the one trainer."""
    start: Literal["here", "by_hand", "ray"] = "here"
    """`here`: the roles are processes of this machine. `by_hand`: the command prints what to type, and waits for them. `ray`: a Ray cluster has them; needs `rowstead[ray]`. In `--fleet` the word alone will do."""
    ray_cpus: float = 1.0
    """CPUs that Ray sets aside for each server, each reader and each thread of a trainer."""
    snapshot_every_s: float = 30.0
    """How often servers write what has changed since: what is newer is lost when one of them is killed."""
    max_restarts: int = 3
    """How often one role may be started again; one that then ran for `healthy_s` has all its restarts back."""
    healthy_s: float = 300.0
    """After so long a start has succeeded for good."""
    start_s: float = 120.0
    """How long a role may take until it is ready."""

    def __post_init__(self) -> None:
        for name in ("num_trainers", "num_readers"):
            require(getattr(self, name) >= 1, name, f"must be at least 1, got {getattr(self, name)}")
        require(self.num_dense in (0, 1), "num_dense", f"must be 0 or 1, got {self.num_dense}: one server keeps the centre")
        for name in ("snapshot_every_s", "healthy_s", "start_s", "ray_cpus"):
            require(getattr(self, name) > 0, name, f"must be above 0, got {getattr(self, name)}")
        require(self.max_restarts >= 0, "max_restarts", f"must not be negative, got {self.max_restarts}")
        if self.tables == "remote":
            require(self.num_sparse >= 1, "num_sparse", "must be at least 1: `tables: local` does without sparse servers")
        else:
            require(
                self.num_trainers == 1, "tables", "can be `local` with one trainer only: several share them in sparse servers"
            )
            require(self.num_sparse == 0, "num_sparse", "must be 0 with `tables: local`, as no table would be in a server")

    def count(self, kind: RoleKind) -> int:
        """How many processes have that role."""
        counts = {"trainer": self.num_trainers, "sparse": self.num_sparse, "dense": self.num_dense, "reader": self.num_readers}
        return counts[kind]

    def roles(self) -> list[tuple[RoleKind, int]]:
        """Every role with its number, in the order in which they are started."""
        return [(kind, number) for kind in KINDS for number in range(self.count(kind))]


def fleet_from(text: str, base: FleetSpec | None = None) -> FleetSpec:
    """A fleet from `trainers=2,sparse=2,dense=1,readers=1`; what it does not name is as in `base`, the recipe's own fleet."""
    plain = to_plain(base or FleetSpec())
    known = [field.name for field in dataclasses.fields(FleetSpec)]
    words = [part.strip() for part in text.split(",") if part.strip()]
    if not words:
        raise RowsteadError(f"--fleet names no role: say how many there are, as in {_EXAMPLE}")
    given: set[str] = set()
    for word in words:
        key, equals, value = (piece.strip() for piece in word.partition("="))
        if not equals and key in ("by_hand", "ray"):
            key, value = "start", key
        name = _SHORT.get(key, key)
        if name not in known:
            hint = did_you_mean(key, [*_SHORT, *known[4:]])
            raise RowsteadError(f"--fleet {text}: `{key}` is no role: {hint} (as in {_EXAMPLE})")
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
