"""Synthetic records and runs for tests of charts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rowstead.records.run_folder import RunFolder
from rowstead.records.store import StoreEntry
from rowstead.report.inputs import RunView, gather
from rowstead.spec.record import Record
from rowstead.spec.run import load_recipe

DATE = "2026-11-15T12:00:00+00:00"


def entry(kind: str = "measured", machine: str | None = None, **options: Any) -> StoreEntry:
    """A store entry; options are fields of the entry or of its record."""
    figures = options.pop("figures", {"samples_per_s": 1000.0})
    record = Record(
        kind=kind,  # type: ignore[arg-type]
        name=options.pop("name", "suite"),
        spec_digest=options.pop("digest", "d"),
        date=DATE,
        machine={} if machine is None else {"name": machine},
        figures=figures,
    )
    return StoreEntry(record=record, id=str(id(record)), **options)


def a_run(
    root: Path,
    name: str = "quickstart",
    *,
    figures: dict[str, float] | None = None,
    machine: dict[str, str | int | float] | None = None,
) -> RunView:
    """A finished quickstart run with these metrics, on this machine."""
    folder = RunFolder.create(root, name)
    folder.write_spec(load_recipe("quickstart"))
    record = Record(
        kind="measured",
        name=name,
        spec_digest="d",
        date=DATE,
        machine=machine or {},
        figures={"num_steps": 10, "samples_per_s": 5e4, **(figures or {})},
    )
    folder.write_record(record)
    return next(run for run in gather([folder.path]).runs)
