"""`placement: auto` on a machine that was measured: of the placements that fit, the one with the shortest predicted step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from rowstead.plan.foretell import foretold
from rowstead.plan.greedy import Memories, decide
from rowstead.spec.errors import RowsteadError
from rowstead.spec.machine import Machine
from rowstead.spec.placement import Placement, PlacementSpec, TablePlacementSpec
from rowstead.spec.run import RunSpec

FRACTIONS = (0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01)
"""Shares of the rows that caches are tried with."""
EQUAL_SHARE = 0.05
"""By how much of the shortest step predictions must differ to count."""


def candidates(memories: Memories) -> dict[str, PlacementSpec]:
    """What is tried, by what it is called: whole tables in fast memory, as many as leave room for caches of the others; or hot rows of all."""
    slower = "cached" if memories.has_gpu else "ssd"
    found: dict[str, PlacementSpec] = {"what is read most per byte in the fastest memory": "auto"}
    for fraction in FRACTIONS:
        found[f"whole tables, and {fraction:.0%} of the rows of the others"] = {
            "*": TablePlacementSpec(cache_fraction=fraction)
        }
        rule = TablePlacementSpec(where=slower, cache_fraction=fraction)  # type: ignore[arg-type]
        found[f"{fraction:.0%} of the rows of every table"] = {"*": rule}
    if memories.has_gpu:
        found["no row in the GPU's memory but those of batches under way"] = {"*": "host"}
    return found


def fitting(
    spec: RunSpec,
    memories: Memories,
    *,
    mean_ids: Sequence[float] | None = None,
    tried: Mapping[str, PlacementSpec] | None = None,
) -> dict[str, Placement]:
    """Those of the candidates that fit, each placement once."""
    found: dict[str, Placement] = {}
    for name, rules in (candidates(memories) if tried is None else tried).items():
        try:
            placement = decide(dataclasses.replace(spec, placement=rules), memories, mean_ids=mean_ids)
        except RowsteadError:
            continue
        if _places(placement) not in map(_places, found.values()):
            found[name] = placement
    return found


def _places(placement: Placement) -> list[tuple[str, float | None]]:
    return [(table.where, table.cache_fraction) for table in placement.tables]


def choice(steps_s: Mapping[str, float], placements: Mapping[str, Placement]) -> str:
    """The shortest predicted step; of those that are as good as equal, the one whose smallest cache is largest.

    Predictions say little of a few per cent, and a larger cache is hurt less where ids are not as they were taken to be.
    """
    least_s = min(steps_s.values())
    equal = [name for name, seconds in steps_s.items() if seconds <= (1 + EQUAL_SHARE) * least_s]
    return max(equal, key=lambda name: (_smallest_cache(placements[name]), -steps_s[name]))


def _smallest_cache(placement: Placement) -> float:
    return min((table.cache_fraction or 0.0 for table in placement.tables if table.where != "device"), default=1.0)


def fastest(
    spec: RunSpec, memories: Memories, machine: Machine, *, mean_ids: Sequence[float] | None = None
) -> Placement | None:
    """The placement that is predicted to be fastest, with the reason in its tables; none where times say nothing of some of them."""
    steps_s: dict[str, float] = {}
    placements = fitting(spec, memories, mean_ids=mean_ids)
    for name, placement in placements.items():
        prediction = foretold(spec, placement, machine)
        if prediction is not None:
            steps_s[name] = prediction.step_s
    if not steps_s:
        return None
    chosen = choice(steps_s, placements)
    why = f"predicted {steps_s[chosen] * 1e3:.3g} ms a step with {chosen}"
    others = sorted((name for name in steps_s if name != chosen), key=lambda name: steps_s[name])
    if others:
        why += f", of {len(steps_s)} placements that fit; the next, {others[0]}, {steps_s[others[0]] * 1e3:.3g} ms"
    best = placements[chosen]
    return dataclasses.replace(best, tables=tuple(dataclasses.replace(table, why=why) for table in best.tables))
