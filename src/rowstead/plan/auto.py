"""`placement: auto` on a measured machine: of the placements that fit, the one with the shortest predicted step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from rowstead.plan.greedy import Memories, decide
from rowstead.plan.predict import predict_run
from rowstead.plan.setups import FRACTIONS
from rowstead.spec.errors import RowsteadError
from rowstead.spec.machine import Machine
from rowstead.spec.placement import Placement, PlacementSpec, TablePlacementSpec
from rowstead.spec.run import RunSpec
from rowstead.spec.stores import STORES

AS_FAST = 1.02
"""Placements whose predictions differ by less than this factor count as equally fast."""


def list_candidates(memories: Memories) -> dict[str, PlacementSpec]:
    """Placements to try, by description: whole tables in fast memory with caches for the others, or hot rows of all."""
    slower = [*(["cached"] if memories.has_gpu else []), *(["ssd"] if memories.folder is not None else [])]
    found: dict[str, PlacementSpec] = {"tables with the most reads per byte in the fastest memory": "auto"}
    for fraction in FRACTIONS:
        found[f"whole tables, and caches of {fraction:.0%} for the others"] = {"*": TablePlacementSpec(cache_fraction=fraction)}
        for where in slower:
            behind = f", all rows in {STORES['host' if where == 'cached' else where].title}" if len(slower) > 1 else ""
            rule = TablePlacementSpec(where=where, cache_fraction=fraction)  # type: ignore[arg-type]
            found[f"a cache of {fraction:.0%} for every table{behind}"] = {"*": rule}
    if memories.has_gpu:
        found["all rows in system memory"] = {"*": "host"}
    return found


def list_fitting(
    spec: RunSpec,
    memories: Memories,
    *,
    mean_ids: Sequence[float] | None = None,
    tried: Mapping[str, PlacementSpec] | None = None,
) -> dict[str, Placement]:
    """The candidates that fit; of those with the same whole tables only the one with the largest caches, which is never slower."""
    found: dict[str, Placement] = {}
    for name, rules in (list_candidates(memories) if tried is None else tried).items():
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
    """Whether all tables are in the same stores, and no cache of the first is smaller than that of the second."""
    return all(
        mine.where == its.where and (mine.cache_fraction or 0.0) >= (its.cache_fraction or 0.0)
        for mine, its in zip(one.tables, other.tables, strict=True)
    )


def predict_steps(
    spec: RunSpec, memories: Memories, machine: Machine, *, mean_ids: Sequence[float] | None = None
) -> dict[str, tuple[Placement, float]]:
    """Every placement that fits, with the predicted time of a step; those that the measurements do not cover are left out."""
    found = list_fitting(spec, memories, mean_ids=mean_ids)
    predicted = {name: (placement, predict_run(spec, placement, machine)) for name, placement in found.items()}
    return {name: (placement, one.step_s) for name, (placement, one) in predicted.items() if one is not None}


def choose_fastest(tried: Mapping[str, tuple[Placement, float]]) -> str:
    """The placement with the shortest predicted step; of equally fast ones that with the largest caches, whose prediction is safest."""
    least_s = min(step_s for _, step_s in tried.values())
    as_fast = [name for name, (_, step_s) in tried.items() if step_s <= AS_FAST * least_s]
    return max(as_fast, key=lambda name: (_smallest_fraction(tried[name][0]), -tried[name][1]))


def _smallest_fraction(placement: Placement) -> float:
    """The smallest share of a table's rows that is in fast memory."""
    return min((1.0 if table.where == "device" else table.cache_fraction or 0.0 for table in placement.tables), default=1.0)


def find_fastest_placement(
    spec: RunSpec, memories: Memories, machine: Machine, *, mean_ids: Sequence[float] | None = None
) -> Placement | None:
    """The placement predicted to be fastest, with the reason in its tables; None if the measurements cover none of them."""
    tried = predict_steps(spec, memories, machine, mean_ids=mean_ids)
    if not tried:
        return None
    chosen = choose_fastest(tried)
    best, step_s = tried[chosen]
    why = f"predicted {step_s * 1e3:.3g} ms per step with {chosen}"
    others = sorted((other_s, name) for name, (_, other_s) in tried.items() if name != chosen)
    if others:
        other_s, name = others[0]
        why += f", chosen from {len(tried)} placements that fit; next: {name}, {other_s * 1e3:.3g} ms"
        if other_s < step_s:
            why += " with smaller caches"
    return dataclasses.replace(best, tables=tuple(dataclasses.replace(table, why=why) for table in best.tables))
