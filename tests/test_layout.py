"""The package is laid out as docs/architecture.md says: one name for one thing, files of one idea, the field's words."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "rowstead"
MODULES = sorted(PACKAGE.rglob("*.py"))
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
MAX_LINES = 420
WANTED = {
    "row optimizer": 5,
    "interaction": 3,
    "built-in network": 4,
    "network of one's own": 0,
    "history encoder": 2,
    "task head": 4,
    "data source": 3,
    "option of `train`": 2,
    "sync policy": 3,
    "machine": 1,
    "chart": 3,
    "checkpoint format": 3,
}
"""The most files that a change may touch in the package."""


def test_no_class_name_is_defined_twice() -> None:
    defined = defaultdict(list)
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                defined[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: paths for name, paths in defined.items() if len(paths) > 1} == {}


def test_no_module_is_longer_than_one_idea() -> None:
    lengths = {str(path.relative_to(PACKAGE)): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_two_modules_stand_at_the_top_level() -> None:
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py", "run.py"}


def test_the_picture_has_every_package() -> None:
    picture = PAGE.split("src/rowstead/\n", 1)[1].split("```", 1)[0]
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert set(re.findall(r"\b([a-z]+)/", picture)) - {"cpu", "gpu", "calibration"} == packages


def test_paths_in_the_page_exist() -> None:
    paths = re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py|run\.py)`", PAGE)
    assert len(paths) > 40
    assert [path for path in paths if not (PACKAGE / path).exists() and not (ROOT / path).exists()] == []


@pytest.mark.parametrize("change", WANTED)
def test_a_change_touches_no_more_files_than_wanted(change: str) -> None:
    section = PAGE.split("## Twelve changes", 1)[1].split("\n## ", 1)[0]
    (row,) = [line.split("|") for line in section.splitlines() if line.startswith(f"| {change} |")]
    files, count = row[2], int(row[3])
    named = re.findall(r"`(?:[a-z_]+/)*[a-z_]+\.py`|a (?:module|YAML file) in", files)
    assert count == len(named), files
    assert count <= WANTED[change]


def test_words_that_were_replaced_do_not_come_back() -> None:
    old = re.compile(r"\b(nursery|handouts?|heeded|reckon(ed)?|foretold|nobody to think of|is no role)\b", re.IGNORECASE)
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.name != "log.md"]
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in [*MODULES, *pages, ROOT / "README.md"]
        for match in old.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []
