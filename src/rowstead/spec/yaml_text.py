"""Reads YAML: the only loader of the package. A text that would take long to build, or much memory, is refused before it is built."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from rowstead.spec.errors import SpecError

MAX_CHARACTERS = 16_000_000
MAX_NODES = 500_000
"""Values and keys, each as often as aliases repeat it. A spec within the bounds of its fields has fewer when it is written out."""
MAX_KEYS = 10_000
"""Keys of one mapping."""
MAX_DEPTH = 50
MAX_NUMBER_LENGTH = 60
"""Characters of a number: longer ones take time that grows with the square of their length."""

_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's, which is ten times as fast, where PyYAML was built with it."""


def read_yaml(path: Path) -> Any:
    """Read a YAML file; an error includes the line number."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except (OSError, ValueError) as error:
        raise SpecError("", f"cannot read {path}: {error}") from None
    return read_text(text, what=str(path))


def read_text(text: str, *, what: str) -> Any:
    """Read YAML text; an error includes the line number."""
    if len(text) > MAX_CHARACTERS:
        raise SpecError("", f"{what} is longer than {MAX_CHARACTERS:,} characters")
    try:
        if re.search(r"^%TAG", text, re.MULTILINE):  # libyaml compares each with all before it
            raise yaml.YAMLError("%TAG is not supported: remove it")
        _SizeCheck(what).run(text)
        return yaml.load(text, Loader=_Loader)  # noqa: S506, RUF100 - it is a SafeLoader
    except SpecError:
        raise
    except (yaml.YAMLError, ValueError) as error:
        raise SpecError("", f"{what} is not valid YAML: {error}") from None


@dataclass
class _Collection:
    """A list or mapping whose end has not been read yet."""

    is_mapping: bool
    anchor: str | None
    num_before: int
    """Nodes before it."""
    key: str = ""
    """The key that is being read."""
    num_items: int = 0
    """Items of a list; keys and values of a mapping."""
    height: int = 1
    """Levels in it so far."""

    def add(self, height: int) -> None:
        """Count an item that has been read."""
        self.num_items += 1
        self.height = max(self.height, 1 + height)


class _SizeCheck:
    """Refuses a text of too many nodes or levels; follows the parser's events and builds nothing."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._stack: list[_Collection] = []
        self._anchors: dict[str, tuple[int, int] | None] = {}
        """Nodes and levels of what has an anchor; None while it is being read."""
        self._num_nodes = 0

    def run(self, text: str) -> None:
        for event in yaml.parse(text, Loader=_SafeLoader):
            if isinstance(event, yaml.CollectionEndEvent):
                self._end_collection()
            elif isinstance(event, yaml.NodeEvent):
                self._add_node(event)

    def _add_node(self, event: Any) -> None:
        stack = self._stack
        if stack and stack[-1].is_mapping and stack[-1].num_items % 2 == 0:
            stack[-1].key = event.value[:40] if isinstance(event, yaml.ScalarEvent) else "?"
            if stack[-1].num_items == 2 * MAX_KEYS:
                self._refuse(event, f"a mapping has more than {MAX_KEYS:,} keys")
        num_nodes, height = self._measure(event)
        if self._num_nodes + num_nodes > MAX_NODES:
            self._refuse(event, f"more than {MAX_NODES:,} values, counting each as often as aliases repeat it")
        if len(stack) + height > MAX_DEPTH:
            self._refuse(event, f"nested more than {MAX_DEPTH} levels deep")
        if isinstance(event, yaml.CollectionStartEvent):
            stack.append(_Collection(isinstance(event, yaml.MappingStartEvent), event.anchor, self._num_nodes))
        elif stack:
            stack[-1].add(height)
        self._num_nodes += num_nodes

    def _measure(self, event: Any) -> tuple[int, int]:
        """Nodes and levels of a scalar or an alias, or those that a collection begins with."""
        if isinstance(event, yaml.AliasEvent):
            known = self._anchors.get(event.anchor or "", (1, 0))  # the loader refuses an alias of nothing
            if known is None:
                self._refuse(event, f"the alias `*{event.anchor}` is inside of what it refers to")
            return known
        if event.tag is not None:
            self._refuse(event, f"the tag `{event.tag}` is not supported: remove it")
        is_scalar = isinstance(event, yaml.ScalarEvent)
        if event.anchor is not None:
            self._anchors[event.anchor] = (1, 0) if is_scalar else None
        return 1, 0 if is_scalar else 1

    def _end_collection(self) -> None:
        ended = self._stack.pop()
        if ended.anchor is not None:
            self._anchors[ended.anchor] = (self._num_nodes - ended.num_before, ended.height)
        if self._stack:
            self._stack[-1].add(ended.height)

    def _refuse(self, event: Any, problem: str) -> NoReturn:
        keys = [f".{one.key}" if one.is_mapping else f"[{one.num_items}]" for one in self._stack]
        key = "".join(keys[:6]).removeprefix(".") + ("…" if len(keys) > 6 else "")
        location = f"{self._what}, line {event.start_mark.line + 1}"
        raise SpecError("", f"{location}: {key}: {problem}" if key else f"{location}: {problem}")


class _Loader(_SafeLoader):  # type: ignore[misc]
    """A SafeLoader that rejects duplicate keys, of which plain YAML silently keeps the last, and numbers out of range."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in keys:
                    raise yaml.constructor.ConstructorError(None, None, f"key `{key.value}` is given twice", key.start_mark)
                keys.add(key.value)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """An int or float of bounded length that does not overflow."""
        text = node.value
        is_float = node.tag.endswith("float")
        long = len(text) > MAX_NUMBER_LENGTH
        number = 0 if long else self.construct_yaml_float(node) if is_float else self.construct_yaml_int(node)
        if long or (is_float and math.isinf(number) and "inf" not in text.lower()):
            raise yaml.constructor.ConstructorError(
                None, None, f"the number `{text[:MAX_NUMBER_LENGTH]}` is out of range", node.start_mark
            )
        return number


for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.construct_number)
