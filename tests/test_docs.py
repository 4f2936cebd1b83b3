"""The documentation says what is so: generated pages are fresh, links lead somewhere, commands and recipes exist."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import rowstead
from docs import generate
from docs.pictures import make
from rowstead.cli.app import app
from rowstead.spec.parse import parse
from rowstead.spec.run import RunSpec, load_recipe, recipe_names

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SHELLS = ("sh", "bash", "shell", "console")
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
ENDS_OF_COMMANDS = {"|", "&&", "||", ";", ">", ">>", "2>", "&"}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    language: str
    text: str


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> list[Block]:
    return [Block(name_of(page), language, text) for _, language, text in FENCE.findall(page.read_text(encoding="utf-8"))]


def prose_of(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def shell_lines(block: Block) -> Iterator[list[str]]:
    """The words of each command in a shell block; lines of output have no `$`, where others have one."""
    lines = block.text.replace("\\\n", " ").splitlines()
    prompted = any(line.lstrip().startswith("$ ") for line in lines)
    for line in lines:
        line = line.strip()
        if prompted and not line.startswith("$ "):
            continue
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while words:
            end = next((place for place, word in enumerate(words) if word in ENDS_OF_COMMANDS), len(words))
            yield words[:end]
            words = words[end + 1 :]


SHELL_COMMANDS = [
    pytest.param(words, id=f"{block.page}: {' '.join(words)}"[:90])
    for block in BLOCKS
    if block.language in SHELLS
    for words in shell_lines(block)
    if words
]


INLINE_COMMANDS = sorted(
    {
        (name_of(page), span)
        for page in PAGES
        if page.name not in ("log.md", "CHANGELOG.md")
        for span in re.findall(r"`((?:rowstead|make|python -m benchmarks\.\w+) [^`\n]+)`", prose_of(page))
    }
)


@pytest.mark.parametrize("path", generate.pages(), ids=lambda path: path.name)
def test_a_generated_page_is_what_the_code_says(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == generate.pages()[path], f"docs/{path.name} is stale: run `make docs`"


def test_the_picture_is_drawn_from_its_figures() -> None:
    figures = yaml.safe_load(make.FIGURES.read_text())
    assert make.PICTURE.read_text() == make.draw(figures), "run `python -m docs.pictures.make`"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"`[^`\n]*`", "", prose_of(page))
    targets = re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r"(?:src|href|srcset)=\"([^\"]+)\"", prose)
    for target in targets:
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{name_of(page)} links to {target}, which is not there"
        if anchor and found.suffix == ".md":
            assert anchor in anchors_of(found), f"{name_of(page)} links to {target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_test_that_is_named_exists(page: Path) -> None:
    for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", prose_of(page)):
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path} has no {name}"


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("words", SHELL_COMMANDS)
def test_a_shown_command_exists_with_its_options(words: list[str]) -> None:
    program, *rest = words
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert all(word in targets or "=" in word for word in rest), words
    elif Path(program).name.startswith("python") and rest[:1] == ["-m"]:
        module = ROOT / rest[1].replace(".", "/")
        ours = rest[1].split(".")[0] in ("rowstead", "docs", "benchmarks", "tests")
        assert not ours or module.with_suffix(".py").exists() or (module / "__main__.py").exists(), words
    elif Path(program).name == "rowstead":
        check_rowstead(rest)


@pytest.mark.parametrize(("page", "span"), INLINE_COMMANDS)
def test_a_command_in_a_sentence_exists_with_its_options(page: str, span: str) -> None:
    """A sentence may leave out the value of the last option."""
    words = [word for word in shlex.split(span.partition(" > ")[0]) if word != "…"]
    if words[0] == "rowstead":
        check_rowstead(words[1:], is_whole=False)
    else:
        test_a_shown_command_exists_with_its_options(words)


def check_rowstead(words: list[str], *, is_whole: bool = True) -> None:
    """Commands and options must be known; what is set in a shipped recipe must be a key of it."""
    command: Any = typer.main.get_command(app)
    name, arguments, settings, recipe = [], [], [], None
    waiting: str | None = None
    for word in words:
        if waiting is not None:
            settings += [word] if waiting == "--set" else []
            recipe = word if waiting == "--recipe" else recipe
            waiting = None
        elif word.startswith("-"):
            option, _, value = word.partition("=")
            known = {one: param for param in command.params for one in (*param.opts, *param.secondary_opts)}
            assert option in {*known, "--help", "-h"}, f"`rowstead {' '.join(name)}` has no option {option}"
            if option in known and not known[option].is_flag and not value:
                waiting = option
        elif hasattr(command, "commands"):
            assert word in command.commands, f"`rowstead {' '.join(name)}` has no command {word}"
            command = command.commands[word]
            name.append(word)
        else:
            arguments.append(word)
    assert waiting is None or not is_whole, f"{waiting} needs a value"
    if name in (["train"], ["recipes"], ["data", "synth"]) and arguments:
        (recipe,) = arguments
    if recipe is not None and not recipe.endswith(".yaml") and not recipe.isupper():
        assert recipe in recipe_names(), f"there is no recipe {recipe}"
    if settings and (recipe is None or recipe in recipe_names()):
        load_recipe(recipe or "quickstart", settings)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_recipe_that_is_named_exists(page: Path) -> None:
    patterns = (
        r"\brecipes? `([\w.-]+)`",
        r"`([\w-]+)` recipe\b",
        r"rowstead recipes ([\w.-]+)",
        r"(?:load_recipe|rowstead\.train)\(\"([\w./-]+)\"",
    )
    text = page.read_text(encoding="utf-8")
    for name in (found for pattern in patterns for found in re.findall(pattern, text)):
        own = name.endswith(".yaml") or name.isupper()
        assert own or name in recipe_names(), f"{name_of(page)} names the recipe `{name}`, which is not shipped"


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "yaml"], ids=lambda b: b.page)
def test_a_shown_recipe_can_be_parsed(block: Block) -> None:
    plain = yaml.safe_load(block.text)
    if isinstance(plain, dict) and {"data", "features"} <= set(plain):
        parse(RunSpec, plain)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "python"], ids=lambda b: b.page)
def test_shown_python_is_python(block: Block) -> None:
    if not block.text.lstrip().startswith(">>>"):
        ast.parse(block.text)


def test_every_section_of_a_recipe_is_a_public_class() -> None:
    sections = generate.sections_by_class()
    assert len(sections) > 15
    assert [name for name in sections if not hasattr(rowstead, name)] == []
