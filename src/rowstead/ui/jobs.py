"""What the page's server has done in worker processes: predictions, recipes and reports. `python -m rowstead.ui.jobs` is a worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rowstead.records.run_folder import RunFolder
from rowstead.report import charts_runs
from rowstead.report.inputs import RunView, gather
from rowstead.report.page import report_page
from rowstead.report.theme import words_of
from rowstead.spec.errors import RowsteadError, did_you_mean
from rowstead.spec.parse import parse, to_plain
from rowstead.spec.run import load_recipe, recipe_names
from rowstead.spec.yaml_text import read_text
from rowstead.ui.scenario import Scenario, checked_base, scenario_of, spec_of
from rowstead.ui.whatif import answers
from rowstead.ui.worker import serve_jobs

MAX_SETTINGS = 40
"""Most settings in a comparison."""
MAX_POINTS = 200
"""Most points of a curve in a comparison."""


def plan(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Predictions for a scenario, line by line."""
    return answers(parse(Scenario, request["scenario"]), checked_base(request["base"]))


def recipe(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A shipped recipe, that of a run, or the text of a file: as the base of a scenario."""
    if isinstance(name := request["name"], str):
        if name not in recipe_names():
            raise RowsteadError(f"unknown recipe `{name}`: {did_you_mean(name, recipe_names())}")
        spec = load_recipe(name)
    elif request["folder"] is not None:
        spec = RunFolder(Path(request["folder"])).read_spec()
    elif isinstance(text := request["text"], str):
        found = checked_base(read_text(text, what="the file"))
        if found is None:
            raise RowsteadError("the file is empty")
        spec = found
    else:
        raise RowsteadError("give a recipe's name, a run's name, or a recipe's text")
    yield {"name": spec.name, "base": to_plain(spec), "scenario": to_plain(scenario_of(spec))}


def save(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The recipe of a scenario, to be saved."""
    yield {"text": recipe_text(parse(Scenario, request["scenario"]), request["base"])}


def recipe_text(scenario: Scenario, base: Any) -> str:
    """The recipe of a scenario as YAML for `rowstead train`."""
    plain = to_plain(spec_of(scenario, checked_base(base)), defaults=False)
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=120)


def report(request: dict[str, Any]) -> Iterator[str]:
    """The page of one run, or of a folder of runs."""
    yield report_page([Path(request["path"])])


def compare(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Runs beside each other: figures, NE over samples, and the settings that differ."""
    views = [gather([folder]).runs[0] for folder in request["folders"]]
    views.sort(key=lambda one: one.ne is None)  # the first is what the others are compared with
    specs = [{} if one.spec is None else dict(_flat(to_plain(one.spec))) for one in views]
    names = [
        name
        for name in dict.fromkeys(name for spec in specs for name in spec)
        if len({str(spec.get(name)) for spec in specs}) > 1
    ]
    settings = [
        {"name": name, "values": [words_of(spec[name])[:80] if name in spec else "" for spec in specs]}
        for name in names[:MAX_SETTINGS]
    ]
    runs = [{"name": one.name, "figures": dict(one.figures), "curve": _curve(one)} for one in views]
    yield {"runs": runs, "settings": settings}


def _curve(run: RunView) -> list[tuple[float, float]]:
    """NE over samples, of evaluations, or of training where there are fewer than two."""
    size = 1 if run.spec is None else run.spec.train.batch_size
    found = [charts_runs.curve(run, kind, "ne", most=MAX_POINTS) for kind in ("evaluation", "train")]
    chosen = found[0] if len(found[0].steps) > 1 else found[1]
    return [(step * size, value) for step, value in zip(chosen.steps, chosen.values, strict=True)]


def _flat(plain: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The settings of a recipe by their dotted names."""
    if isinstance(plain, dict) and plain:
        for key, value in plain.items():
            yield from _flat(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, plain


if __name__ == "__main__":
    serve_jobs({"compare": compare, "plan": plan, "recipe": recipe, "save": save, "report": report})
