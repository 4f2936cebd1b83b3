"""What sweeps, searches and quality studies have in common: a name and a recipe; and how their files are found and read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rowstead.spec.bounds import PlainName, Spec
from rowstead.spec.parse import errors_in, find_file, parse
from rowstead.spec.run import RECIPES
from rowstead.spec.yaml_text import read_yaml

SWEEPS = Path(__file__).parent.parent / "sweeps"


@dataclass(frozen=True, kw_only=True)
class StudySpec(Spec):
    """Many runs of one recipe."""

    name: PlainName
    """Name of the study in the run store."""
    recipe: str
    """A recipe file, or the name of a shipped one."""
    set: Mapping[str, Any] = field(default_factory=dict)
    """Recipe changes common to all runs, by dotted key."""


Study = TypeVar("Study", bound=StudySpec)


def load_study(cls: type[Study], name_or_path: str, suffix: str, *folders: Path, **around_recipe: Any) -> Study:
    """Load a study by path or shipped name, or build one around a run's recipe: with `around_recipe`, named `…-{suffix}`.

    A recipe beside the study's file takes precedence over a shipped one, so that the folder can be moved.
    """
    path = find_file(name_or_path, "study or recipe", *folders, RECIPES)
    plain = read_yaml(path)
    if isinstance(plain, Mapping) and ("features" in plain or "base" in plain):  # the recipe of a run
        plain = {"name": f"{plain.get('name', path.stem)}-{suffix}", "recipe": name_or_path, **around_recipe}
    with errors_in(path):
        spec = parse(cls, plain)
    near = path.parent / spec.recipe
    return dataclasses.replace(spec, recipe=str(near)) if near.is_file() else spec
