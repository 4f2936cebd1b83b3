"""`placement: auto` on a machine that was measured: of the placements that fit, one with the shortest predicted step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from rowstead.plan.greedy import Memories, decide
from rowstead.plan.predict_run import predict_run
from rowstead.spec.errors import RowsteadError
from rowstead.spec.machine import Machine
from rowstead.spec.placement import Placement, PlacementSpec, TablePlacementSpec
from rowstead.spec.run import RunSpec

FRACTIONS = (0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01)
"""Shares of the rows that caches are tried with."""
AS_FAST = 1.02
"""Predictions that are no further apart say nothing of which placement is faster."""


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
    """Those of the candidates that fit; of those with the same whole tables only the one with the largest caches, which is never slower."""
    found: dict[str, Placement] = {}
    for name, rules in (candidates(memories) if tried is None else tried).items():
        try:
            placement = decide(dataclasses.replace(spec, placement=rules), memories, mean_ids=mean_ids)
        except RowsteadError:
            continue
        if any(_covers(other, placement) for other in found.values()):
            continue
        found = {known: other for known, other in found.items() if not _covers(placement, other)}
        found[name] = placement
    return found


def _covers(one: Placement, other: Placement) -> bool:
    """Whether all tables are in the same places, and no cache of the first is smaller than that of the second."""
    return all(
        mine.where == its.where and (mine.cache_fraction or 0.0) >= (its.cache_fraction or 0.0)
        for mine, its in zip(one.tables, other.tables, strict=True)
    )


def predicted_steps(
    spec: RunSpec, memories: Memories, machine: Machine, *, mean_ids: Sequence[float] | None = None
) -> dict[str, tuple[Placement, float]]:
    """Every placement that fits, with the predicted time of a step; without those of which times say nothing."""
    found = fitting(spec, memories, mean_ids=mean_ids)
    foreseen = {name: (placement, predict_run(spec, placement, machine)) for name, placement in found.items()}
    return {name: (placement, one.step_s) for name, (placement, one) in foreseen.items() if one is not None}


def choice(tried: Mapping[str, tuple[Placement, float]]) -> str:
    """The placement with the shortest predicted step; of those as fast the one with the largest caches: it depends least on what is predicted of them."""
    least_s = min(step_s for _, step_s in tried.values())
    as_fast = [name for name, (_, step_s) in tried.items() if step_s <= AS_FAST * least_s]
    return max(as_fast, key=lambda name: (_least_kept(tried[name][0]), -tried[name][1]))


def _least_kept(placement: Placement) -> float:
    """The share of its rows that are in fast memory, of the table of which it is least."""
    return min((1.0 if table.where == "device" else table.cache_fraction or 0.0 for table in placement.tables), default=1.0)


def fastest(
    spec: RunSpec, memories: Memories, machine: Machine, *, mean_ids: Sequence[float] | None = None
) -> Placement | None:
    """The placement that is predicted to be fastest, with the reason in its tables; none where times say nothing of some of them."""
    tried = predicted_steps(spec, memories, machine, mean_ids=mean_ids)
    if not tried:
        return None
    chosen = choice(tried)
    best, step_s = tried[chosen]
    why = f"predicted {step_s * 1e3:.3g} ms a step with {chosen}"
    others = sorted((other_s, name) for name, (_, other_s) in tried.items() if name != chosen)
    if others:
        other_s, name = others[0]
        why += f", of {len(tried)} placements that fit; the next, {name}, {other_s * 1e3:.3g} ms"
        if other_s < step_s:
            why += " with smaller caches"
    return dataclasses.replace(best, tables=tuple(dataclasses.replace(table, why=why) for table in best.tables))
