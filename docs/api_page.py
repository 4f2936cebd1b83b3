"""docs/api.md: the public names of the package, with their signatures and docstrings."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import rowstead

GROUPS: dict[str, tuple[str, ...]] = {
    "Train": ("train", "resume", "first_recipe", "Result"),
    "Use a model": ("load", "evaluate", "importance", "Importances", "predict", "DLRM", "nearest"),
    "Follow a run": ("Callback", "Progress", "Quality", "Record"),
    "Recipes": ("load_recipe", "RunSpec"),
    "Serve": ("export", "load_exported", "Exported"),
    "Errors": ("RowsteadError",),
    "Networks of your own": ("Network", "NetworkInputs"),
    "Embedding tables under any PyTorch model": (
        "EmbeddingBags",
        "BagTable",
        "PooledFeatures",
        "Embeddings",
        "EmbeddingTable",
        "JaggedRows",
        "FusedOptimizer",
        "fuse_embedding_optimizer",
    ),
    "Batches": ("Batch", "Sparse", "sparse_from_kjt", "kjt_from_sparse"),
}
ABOUT = {
    "Networks of your own": "[Networks](networks.md) explains them.",
    "Embedding tables under any PyTorch model": "[EmbeddingBags](embedding_bags.md) explains them.",
    "Serve": "[Serving](serving.md) explains what is in the folder.",
    "Follow a run": "[The tutorial](tutorial_python.md#follow-a-run) has callbacks for MLflow and Weights & Biases.",
}
MEMBERS = {
    "RunSpec": ("from_dict", "to_dict"),
    "DLRM": ("predict", "encode", "embeddings", "row_of", "nearest"),
    "Exported": ("predict",),
    "Quality": ("figures",),
}
"""Of these classes only these members are for users."""
RETURNED = ("Result", "Progress", "Quality", "Record", "DLRM", "Exported", "RunSpec")
"""Classes whose objects users get, or make in another way."""
WIDTH = 110


def api_page(note: str, spec_sections: dict[str, tuple[str, str]]) -> str:
    """The page; `spec_sections` has the title and anchor of each spec class's section in configuration.md."""
    grouped = {name for names in GROUPS.values() for name in names}
    specs = [name for name in rowstead.__all__ if name.endswith("Spec") and name not in grouped]
    if missing := set(rowstead.__all__) - grouped - set(specs):
        raise ValueError(f"docs/api_page.py has no group for {', '.join(sorted(missing))}")
    parts = [
        note,
        "# The Python API",
        "Every public name is an attribute of `rowstead`; each is imported at its first use, so `import rowstead` is quick. "
        "[The tutorial](tutorial_python.md) shows the most common ones at work.",
        "\n".join(
            f"- [{title}](#{_anchor(title)}): {', '.join(f'`{name}`' for name in names)}" for title, names in GROUPS.items()
        ),
    ]
    for title, names in GROUPS.items():
        parts.append(f"## {title}")
        if title in ABOUT:
            parts.append(ABOUT[title])
        for name in names:
            parts += _entry(name, getattr(rowstead, name))
        if title == "Recipes":
            parts += ["### Parts of a recipe", _spec_table(specs, spec_sections)]
    return "\n\n".join(parts) + "\n"


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _spec_table(specs: list[str], sections: dict[str, tuple[str, str]]) -> str:
    """The classes of a recipe's sections: fields are keyword arguments with the names and defaults of the keys."""
    lines = [
        "Each section of a recipe is a frozen dataclass. Its fields are the keys of the section, given by name; `dataclasses.replace` "
        "changes a copy.",
        "",
        "| class | section of a recipe | |",
        "|---|---|---|",
    ]
    for name in specs:
        title, anchor = sections[name]
        about = inspect.cleandoc(getattr(rowstead, name).__doc__ or "").split("\n\n")[0].replace("\n", " ")
        lines.append(f"| `{name}` | [{title}](configuration.md#{anchor}) | {about} |".replace(" | |", " | |"))
    return "\n".join(lines)


def _entry(name: str, thing: Any) -> Iterator[str]:
    yield f"### `{name}`"
    if not inspect.isclass(thing):
        yield _signature(f"rowstead.{name}", thing)
        yield _text(thing, name)
        return
    is_made = dataclasses.is_dataclass(thing) or "__init__" in vars(thing)
    if is_made and name not in RETURNED:
        yield _signature(f"rowstead.{name}", thing)
    yield _text(thing, name)
    if dataclasses.is_dataclass(thing) and name != "RunSpec":
        yield _fields(thing)
    for member in _members(name, thing):
        value = inspect.getattr_static(thing, member)
        if isinstance(value, property):
            yield f"`{member}`: {_text(value, f'{name}.{member}')}"
        else:
            yield _signature(
                f"{name}.{member}" if isinstance(value, (classmethod, staticmethod)) else member, getattr(thing, member)
            )
            yield _text(value, f"{name}.{member}")


def _members(name: str, thing: type) -> Iterator[str]:
    if name in MEMBERS:
        yield from MEMBERS[name]
        return
    ours = (cls for cls in thing.__mro__ if cls.__module__.split(".")[0] == "rowstead")
    for member in dict.fromkeys(member for cls in ours for member in vars(cls)):
        value = inspect.getattr_static(thing, member)
        is_callable = isinstance(value, (property, classmethod, staticmethod)) or inspect.isfunction(value)
        if is_callable and not member.startswith("_") and value.__doc__:
            yield member


def _signature(name: str, thing: Any) -> str:
    signature = inspect.signature(thing)
    listed, keyword = [], False
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword:
            listed, keyword = [*listed, "*"], True
        has_default = parameter.default is not parameter.empty
        default = f" = {_shown(parameter.default)}" if has_default else ""
        listed.append(f"{parameter.name}: {parameter.annotation}{default}")
    end = (
        "" if inspect.isclass(thing) or signature.return_annotation is signature.empty else f" -> {signature.return_annotation}"
    )
    line = f"{name}({', '.join(listed)}){end}"
    if len(line) > WIDTH:
        line = "\n".join([f"{name}(", *(f"    {parameter}," for parameter in listed), f"){end}"])
    return f"```text\n{line}\n```"


def _shown(default: Any) -> str:
    return f"{default:_}" if isinstance(default, int) and not isinstance(default, bool) else repr(default)


def _text(thing: Any, name: str) -> str:
    text = inspect.getdoc(thing)
    if not text:
        raise ValueError(f"{name} has no docstring")
    return text


def _fields(thing: type) -> str:
    """The fields of a dataclass, with what is said under each."""
    meanings: dict[str, str] = {}
    for cls in reversed(thing.__mro__):
        if not dataclasses.is_dataclass(cls):
            continue
        (tree,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(cls))).body
        assert isinstance(tree, ast.ClassDef)
        for statement, after in zip(tree.body, [*tree.body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign):
                is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                meanings[ast.unparse(statement.target)] = " ".join(str(after.value.value).split()) if is_text else ""  # type: ignore[union-attr]
    lines = ["| field | type | |", "|---|---|---|"]
    for field in dataclasses.fields(thing):  # type: ignore[arg-type]
        kind = str(field.type).replace("|", "\\|")
        lines.append(f"| `{field.name}` | `{kind}` | {meanings.get(field.name, '')} |")
    return "\n".join(lines)
