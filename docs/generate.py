"""Writes the pages that follow from something else: docs/configuration.md from the specs, docs/cli.md from `--help`,
docs/api.md from docstrings, docs/performance.md and the figures of README.md from the results of benchmarks.

python -m docs.generate            write them
python -m docs.generate --check    write nothing; exit 1 and name the pages that are stale
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from docs.api_page import api_page
from docs.headlines import headlines
from docs.results import performance_page
from rowstead.cli.app import app
from rowstead.spec.encoders import ENCODERS, EncoderSpec
from rowstead.spec.heads import HEADS, TASK_HEADS, TaskHeadSpec, TaskSpec
from rowstead.spec.interactions import INTERACTIONS, InteractionSpec
from rowstead.spec.model import ModelSpec
from rowstead.spec.networks import NETWORKS
from rowstead.spec.parse import describe_type
from rowstead.spec.placement import TablePlacementSpec
from rowstead.spec.row_optimizers import ROW_OPTIMIZERS, SparseOptimizerSpec
from rowstead.spec.run import RunSpec
from rowstead.spec.stores import IN_RECIPES, STORES
from rowstead.spec.sync import SYNC_MODES, SYNC_RULES, SyncSpec
from rowstead.spec.train import TrainSpec

DOCS = Path(__file__).parent
README = DOCS.parent / "README.md"
FIGURES = re.compile(r"(<!-- figures: .*? -->\n).*?(\n<!-- end of figures -->)", re.DOTALL)
"""The part of the README that follows from the results of benchmarks."""
HELP_WIDTH = 96
"""Columns of the help texts, whatever the terminal."""
NOTE = "<!-- Written by `python -m docs.generate` (`make docs`). Change {source}, not this page. -->"


REGISTRIES: dict[tuple[type, str], Mapping[str, Any]] = {
    (InteractionSpec, "kind"): INTERACTIONS,
    (EncoderSpec, "kind"): ENCODERS,
    (TablePlacementSpec, "where"): {name: STORES[name] for name in IN_RECIPES},
    (ModelSpec, "network"): NETWORKS,
    (TrainSpec, "loss"): HEADS,
    (TaskSpec, "loss"): HEADS,
    (TaskHeadSpec, "kind"): TASK_HEADS,
    (SyncSpec, "mode"): SYNC_MODES,
    (SyncSpec, "rule"): SYNC_RULES,
}
"""Fields whose values are the entries of a registry, each with a description."""


def pages() -> dict[Path, str]:
    """The generated pages as they should be."""
    return {
        DOCS / "configuration.md": configuration_page(),
        DOCS / "cli.md": cli_page(),
        DOCS / "api.md": api_page(
            NOTE.format(source="the docstrings of what src/rowstead/__init__.py lists"), sections_by_class()
        ),
        DOCS / "performance.md": performance_page(NOTE.format(source="docs/results.py or the files under benchmarks/results/")),
        README: FIGURES.sub(lambda found: f"{found[1]}{headlines('')}{found[2]}", README.read_text(encoding="utf-8")),
    }


def sections_by_class() -> dict[str, tuple[str, str]]:
    """The title and anchor of each spec class's first section in configuration.md."""
    found: dict[str, tuple[str, str]] = {}
    for section in sections_of(Section("", RunSpec)):
        found.setdefault(section.spec.__name__, (section.title, section.anchor))
    return found


# configuration.md


@dataclass(frozen=True)
class Section:
    """One spec class and the key under which a recipe has it; the whole recipe has no key."""

    key: str
    spec: type

    @property
    def title(self) -> str:
        return f"`{self.key}`" if self.key else "The whole recipe"

    @property
    def anchor(self) -> str:
        """What GitHub makes of the title."""
        return self.key.replace(".", "") if self.key else "the-whole-recipe"


def configuration_page() -> str:
    sections = list(sections_of(Section("", RunSpec)))
    parts = [
        NOTE.format(source="the docstrings in rowstead/spec/"),
        "# Configuration",
        "A recipe is a YAML file. Every key that it may have is below, section by section; a key that is not here is an error, "
        "and the message names the nearest one. `rowstead recipes` lists the recipes that are shipped, `rowstead recipes NAME` "
        "prints one to start from.",
        "`--set key.path=value` changes one key on the command line, such as `--set train.batch_size=512`. The value is read as "
        "YAML. Items of lists are named by number: `--set features.sparse.0.num_rows=1000`. Where a list is wanted, a single "
        "value stands for a list of one.",
        "`base: NAME` starts from another recipe, a shipped one or a file beside this one; the keys that follow change it. Sections are "
        "merged key by key, lists and values are replaced.",
        "The resolved recipe, with every default written out, is kept as `spec.yaml` in the folder of the run.",
        "\n".join(f"- [{section.title}](#{section.anchor})" for section in sections),
    ]
    parts += [section_text(section, sections) for section in sections]
    return "\n\n".join(parts) + "\n"


def sections_of(section: Section) -> Iterator[Section]:
    """A section and those inside it, in the order of the fields."""
    yield section
    hints = typing.get_type_hints(section.spec)
    for field in dataclasses.fields(section.spec):
        for inner in specs_in(hints[field.name]):
            yield from sections_of(Section(f"{section.key}.{field.name}".lstrip("."), inner))


def specs_in(kind: Any) -> list[type]:
    """The spec classes that an annotated type mentions."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return [kind]
    return [spec for argument in typing.get_args(kind) for spec in specs_in(argument)]


def section_text(section: Section, sections: list[Section]) -> str:
    lines = [f"## {section.title}", "", inspect.cleandoc(section.spec.__doc__ or ""), "", *keys_table(section, sections)]
    if section.spec is SparseOptimizerSpec:
        lines += ["", *row_optimizers_table()]
    if section.spec is ModelSpec:
        lines += ["", *network_options()]
    return "\n".join(lines)


def keys_table(section: Section, sections: list[Section]) -> list[str]:
    lines = ["| key | value | default | meaning |", "|---|---|---|---|"]
    hints, meanings = typing.get_type_hints(section.spec), docstrings_of_fields(section.spec)
    for field in dataclasses.fields(section.spec):
        value = describe_type(hints[field.name])
        for inner in sections:
            if inner.spec in specs_in(hints[field.name]):
                value = value.replace(inner.spec.__name__, f"[section](#{inner.anchor})")
        value = re.sub(r"list of (\[section|whole number|number)", r"list of \1s", value)
        entries = REGISTRIES.get((section.spec, field.name), {})
        listed = "; ".join(f"`{name}`: {entry.description}" for name, entry in entries.items())
        meaning = f"{meanings[field.name]} {listed}." if listed else meanings[field.name]
        cells = (f"`{field.name}`", value, default_of(field), meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def network_options() -> list[str]:
    """The keys of `model.options` for each network that has some."""
    lines = ["### `model.options`", "", "The options of the built-in networks; [Networks](networks.md) says what they do."]
    for name, entry in NETWORKS.items():
        if dataclasses.fields(entry.options):
            lines += ["", f"Of `{name}` ({entry.title}):", "", *keys_table(Section("model.options", entry.options), [])]
    return lines


def row_optimizers_table() -> list[str]:
    lines = [
        "| `kind` | | update of a row with gradient `g` | state per row | reads, besides `lr` and `clip` |",
        "|---|---|---|---|---|",
    ]
    for name, entry in ROW_OPTIMIZERS.items():
        state = ", ".join(f"`{tensor.name}`: 1 number{'' if tensor.is_per_row else ' per element'}" for tensor in entry.state)
        reads = ", ".join(f"`{parameter}`" for parameter in entry.hyper_parameters)
        lines.append(f"| `{name}` | {entry.title} | `{entry.rule}` | {state or 'none'} | {reads or 'nothing'} |")
    return lines


def docstrings_of_fields(spec: type) -> dict[str, str]:
    """The text under each field of a spec class; a field without one is an error."""
    found = {}
    for cls in filter(dataclasses.is_dataclass, reversed(spec.__mro__)):
        (tree,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(cls))).body
        assert isinstance(tree, ast.ClassDef)
        for statement, after in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                found[ast.unparse(statement.target)] = " ".join(str(after.value.value).split())
    missing = [field.name for field in dataclasses.fields(spec) if field.name not in found]  # type: ignore[arg-type]
    if missing:
        raise ValueError(f"{spec.__name__}: no docstring under {', '.join(missing)}")
    return found


def default_of(field: dataclasses.Field[Any]) -> str:
    """A field's default as YAML has it."""
    if field.default is dataclasses.MISSING:
        return "required"
    if dataclasses.is_dataclass(field.default):
        return "its defaults"
    return f"`{yaml_value(field.default)}`"


def yaml_value(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(yaml_value, value))}]"
    if isinstance(value, int) and value >= 10_000:
        return f"{value:_}"
    return str(value).replace("e-0", "e-")


# cli.md


def cli_page() -> str:
    commands = list(commands_of(typer.main.get_command(app), "rowstead", parent=None))
    parts = [
        NOTE.format(source="the commands in src/rowstead/cli/app.py and src/rowstead/cli/data.py"),
        "# The command line",
        "Every command answers `--help`. A mistake prints one message that says what to do, and ends with status 2. Where "
        "output is no terminal, progress is printed as plain lines.",
        "\n".join(f"- [`{name}`](#{name.replace(' ', '-')})" for name, _ in commands),
    ]
    parts += [f"## {name}\n\n```text\n{text}\n```" for name, text in commands]
    return "\n\n".join(parts) + "\n"


def commands_of(command: Any, name: str, *, parent: Any) -> Iterator[tuple[str, str]]:
    """Every command's whole name with its help text, those of a group after the group."""
    context = command.make_context(name, [], parent=parent, resilient_parsing=True, terminal_width=HELP_WIDTH, color=False)
    yield context.command_path, "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    for inner_name, inner in getattr(command, "commands", {}).items():
        yield from commands_of(inner, inner_name, parent=context)


def main(arguments: list[str]) -> int:
    """Write the pages, or with `--check` only say which are stale."""
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if arguments:
            print(f"{path.relative_to(DOCS.parent)} is stale: run `make docs`")
        else:
            path.write_text(pages()[path], encoding="utf-8")
            print(f"wrote {path.relative_to(DOCS.parent)}")
    return 1 if arguments and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
