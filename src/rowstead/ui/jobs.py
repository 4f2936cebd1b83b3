"""What the page's server has done in worker processes: predictions, recipes and reports. `python -m rowstead.ui.jobs` is a worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rowstead.records.run_folder import RunFolder
from rowstead.report.page import report_page
from rowstead.spec.errors import RowsteadError, did_you_mean
from rowstead.spec.parse import parse, to_plain
from rowstead.spec.run import load_recipe, recipe_names
from rowstead.spec.yaml_text import read_text
from rowstead.ui.scenario import Scenario, checked_base, scenario_of, spec_of
from rowstead.ui.whatif import answers
from rowstead.ui.worker import serve_jobs


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


if __name__ == "__main__":
    serve_jobs({"plan": plan, "recipe": recipe, "save": save, "report": report})
