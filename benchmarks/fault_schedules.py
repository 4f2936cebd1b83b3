"""Random schedules of faults, drawn from a seed: what happens to which processes of a run, and when. Nothing here starts a process.

The seed says everything, so a schedule is replayed by its seed. When exactly a fault meets the run depends on the machine all the same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Mode = Literal["single", "processes", "fleet"]
MODES: tuple[Mode, ...] = ("single", "processes", "fleet")

FaultKind = Literal["kill", "stop", "stop and kill", "freeze", "slow", "cut link", "slow link", "full disk"]

MAIN = "main"
"""The process that the user started: the single process, the launcher, or the coordinator of a fleet."""
RANKS = ("rank-0", "rank-1")
FORK_SERVER = "fork server"
DISK = "disk"
STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP")
FLEETS = (
    "trainers=2,sparse=2,dense=1,readers=1",
    "trainers=1,sparse=1,dense=0,readers=2",
    "trainers=1,sparse=2,dense=1,readers=1",
    "trainers=2,sparse=2,dense=2,readers=1",
)
TRAINING = {
    "single": ("", "increments", "ssd"),
    "processes": ("", "increments"),
    "fleet": ("",),
}
"""How a run trains: as the recipe says, with incremental checkpoints, or with tables on disk. Weights must be the same after faults as without."""
NUM_FAULTS: dict[Mode, tuple[int, int]] = {"single": (4, 9), "processes": (4, 8), "fleet": (7, 14)}
"""At least and at most. A fleet survives most of them without a start, so that they cost less time."""
FREEZES_FOR_GOOD = 0.12
"""Share of the freezes of a fleet's roles that nobody ends: the fleet has to find them, which takes 15 s."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    kind: FaultKind
    victims: tuple[str, ...]
    """Names of processes, or `DISK`; a cut or slow link is that of a server to all its clients."""
    at: float
    """The share of the run's steps that are done before it."""
    delay_s: float
    """From then on, or from the last start of the run if that is later."""
    duration_s: float | None = None
    """Of a freeze, a slow time, a cut or a full disk; None for a freeze that nobody ends."""
    signal: str | None = None
    """Of a stop."""

    def describe(self) -> str:
        how = self.kind if self.signal is None else f"{self.kind} by {self.signal}"
        lasts = (
            "" if self.kind in ("kill", "stop") else " for good" if self.duration_s is None else f" for {self.duration_s:.1f} s"
        )
        return f"{how} {'+'.join(self.victims)} at {self.at:.0%}+{self.delay_s:.1f} s{lasts}"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    seed: int
    mode: Mode
    training: str
    """One of `TRAINING`."""
    fleet: str
    """The roles of a fleet, one of `FLEETS`; empty for the other modes."""
    faults: tuple[Fault, ...]
    """By `at`."""

    @property
    def has(self) -> set[FaultKind]:
        return {fault.kind for fault in self.faults}

    def describe(self) -> str:
        what = " ".join(word for word in (self.mode, self.fleet, self.training) if word)
        return f"{what}: {', '.join(fault.describe() for fault in self.faults)}"


def roles_of(fleet: str) -> list[str]:
    """The names of a fleet's roles."""
    counts = dict(part.split("=") for part in fleet.split(","))
    kinds = {"trainer": "trainers", "sparse": "sparse", "dense": "dense", "reader": "readers"}
    return [f"{kind}-{number}" for kind, key in kinds.items() for number in range(int(counts[key]))]


def draw_schedule(seed: int, *, modes: Sequence[Mode] = MODES) -> Schedule:
    """The schedule of a seed; consecutive seeds take the modes in turns."""
    rng = random.Random(seed)
    mode = modes[seed % len(modes)]
    fleet = rng.choice(FLEETS) if mode == "fleet" else ""
    draw = {"single": _single_fault, "processes": _processes_fault, "fleet": _fleet_fault}[mode]
    at, faults = 0.0, []
    count = rng.randint(*NUM_FAULTS[mode])
    for _ in range(count):
        # Some soon after the one before: while the run recovers.
        is_soon = faults and rng.random() < 0.25
        at = at if is_soon else at + rng.uniform(0.2, 1.7) / count
        if at > 0.97:
            break
        faults.append(draw(rng, fleet, round(at, 3), round(rng.uniform(0.0, 3.0 if is_soon else 0.2), 2)))
    if rng.random() < 0.2:  # before the first step, too
        faults.insert(0, draw(rng, fleet, 0.0, round(rng.uniform(0.0, 5.0), 2)))
    return Schedule(seed=seed, mode=mode, training=rng.choice(TRAINING[mode]), fleet=fleet, faults=tuple(faults))


def _lasting(rng: random.Random, longest_s: float) -> float:
    return round(rng.uniform(0.3, longest_s), 1)


def _of_main(rng: random.Random, kind: FaultKind, at: float, delay_s: float) -> Fault:
    signal = rng.choice(STOP_SIGNALS) if kind.startswith("stop") else None
    return Fault(kind=kind, victims=(MAIN,), at=at, delay_s=delay_s, signal=signal, duration_s=_maybe_lasting(rng, kind))


def _maybe_lasting(rng: random.Random, kind: FaultKind) -> float | None:
    """A duration for what has one; for `stop and kill` the time between the two."""
    if kind in ("kill", "stop"):
        return None
    return _lasting(rng, 1.5 if kind == "stop and kill" else 4.0)


def _choice(rng: random.Random, weights: dict[FaultKind, int]) -> FaultKind:
    return rng.choices(list(weights), list(weights.values()))[0]


def _some(rng: random.Random, of: Sequence[str]) -> tuple[str, ...]:
    """One of them in half of the cases, several or all in the others."""
    draw = rng.random()
    if draw < 0.5 or len(of) == 1:
        return (rng.choice(of),)
    return tuple(of) if draw > 0.85 else tuple(sorted(rng.sample(of, rng.randint(2, min(3, len(of))))))


def _single_fault(rng: random.Random, fleet: str, at: float, delay_s: float) -> Fault:
    kind = _choice(rng, {"kill": 4, "stop": 3, "stop and kill": 1, "freeze": 1, "slow": 1, "full disk": 2})
    fault = _of_main(rng, kind, at, delay_s)
    return fault if kind != "full disk" else _full_disk(rng, at, delay_s)


def _processes_fault(rng: random.Random, fleet: str, at: float, delay_s: float) -> Fault:
    kind = _choice(rng, {"kill": 5, "stop": 2, "stop and kill": 1, "freeze": 2, "slow": 1, "cut link": 1, "full disk": 1})
    if kind == "full disk":
        return _full_disk(rng, at, delay_s)
    if kind in ("stop", "stop and kill"):
        return _of_main(rng, kind, at, delay_s)
    if kind == "cut link":
        return Fault(kind=kind, victims=RANKS, at=at, delay_s=delay_s, duration_s=0.0)
    return Fault(kind=kind, victims=_some(rng, (*RANKS, MAIN)), at=at, delay_s=delay_s, duration_s=_maybe_lasting(rng, kind))


def _fleet_fault(rng: random.Random, fleet: str, at: float, delay_s: float) -> Fault:
    roles = roles_of(fleet)
    weights: dict[FaultKind, int] = {"kill": 9, "stop": 2, "stop and kill": 1, "freeze": 4, "slow": 2}
    weights |= {"cut link": 3, "slow link": 2, "full disk": 2}
    kind = _choice(rng, weights)
    if kind == "full disk":
        return _full_disk(rng, at, delay_s)
    if kind == "stop and kill" or (kind == "stop" and rng.random() < 0.7):
        return _of_main(rng, kind, at, delay_s)
    if kind in ("cut link", "slow link"):
        victims = _some(rng, [role for role in roles if not role.startswith("trainer")])
    elif (draw := rng.random()) < 0.70:
        victims = _some(rng, roles)
    elif draw < 0.82:
        victims = (FORK_SERVER,)
    elif draw < 0.93:
        victims = (MAIN,)
    else:
        victims = (MAIN, FORK_SERVER, *roles)
    signal = rng.choice(STOP_SIGNALS) if kind == "stop" else None  # roles and the fork server ignore it
    if signal is not None and MAIN in victims:
        victims = (MAIN,)
    duration_s = _maybe_lasting(rng, kind)
    if kind == "freeze" and MAIN not in victims and len(victims) == 1 and rng.random() < FREEZES_FOR_GOOD:
        duration_s = None
    return Fault(kind=kind, victims=victims, at=at, delay_s=delay_s, duration_s=duration_s, signal=signal)


def _full_disk(rng: random.Random, at: float, delay_s: float) -> Fault:
    return Fault(kind="full disk", victims=(DISK,), at=at, delay_s=delay_s, duration_s=_lasting(rng, 6.0))
