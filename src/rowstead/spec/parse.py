"""YAML to frozen specs: unknown keys and wrong types are errors that name the key; overrides by dotted key."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import numbers
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from rowstead.spec.errors import RowsteadError, SpecError, did_you_mean, shorten
from rowstead.spec.yaml_text import MAX_DEPTH, read_text

T = TypeVar("T")
MAX_INT = 2**63 - 1


class _OutOfRangeError(SpecError):
    """A number that no field can take."""


def parse(cls: type[T], value: Any) -> T:
    """Parse plain YAML content as an instance of the spec class `cls`."""
    if not isinstance(value, Mapping):
        raise SpecError("", f"expected a mapping of keys, got {_shown(value)}")
    hints = _hints(cls)  # type: ignore[arg-type]
    known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key in value:
        if key not in known:
            raise SpecError(str(key), f"unknown key: {did_you_mean(str(key), known)}")
    arguments = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name in value:
            arguments[field.name] = _convert_within(field.name, hints[field.name], value[field.name])
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise SpecError(field.name, "is required and has no default")
    return cls(**arguments)


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _convert(kind: Any, value: Any) -> Any:
    """Convert a value to the annotated type `kind`, or raise a SpecError that names the expected type."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:  # a value for a key of another spec, which checks it
        return _convert_plain(value)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(args, value)
    if origin is typing.Literal:
        if value in args:
            return value
        raise SpecError("", f"got {_shown(value)}; {did_you_mean(str(value), map(str, args))}")
    if origin is tuple:
        items = value if isinstance(value, (list, tuple)) else [value]
        return tuple(_convert_within(f"[{index}]", args[0], item) for index, item in enumerate(items))
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise SpecError("", f"expected {describe_type(kind)}, got {_shown(value)}")
        return {str(key): _convert_within(str(key), args[1], item) for key, item in value.items()}
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return value if isinstance(value, kind) else parse(kind, value)
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and (number := _number(value)) is not None and number % 1 == 0:
        if not -MAX_INT <= number <= MAX_INT:
            raise _OutOfRangeError("", f"whole numbers go up to 2**63 - 1, got {_shown(value)}")
        return int(number)
    if kind is float and (number := _number(value)) is not None and not math.isnan(number):
        return float(number)
    if kind is str and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value)
    raise SpecError("", f"expected {describe_type(kind)}, got {_shown(value)}")


def _convert_plain(value: Any) -> Any:
    """A value that JSON can hold; dates, which YAML has besides, are refused."""
    if isinstance(value, Mapping):
        return {str(key): _convert_within(str(key), Any, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_convert_within(f"[{index}]", Any, item) for index, item in enumerate(value)]
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise SpecError("", f"expected text or a number, got {_shown(str(value))}: put it into quotes")


def _convert_within(key: str, kind: Any, value: Any) -> Any:
    try:
        return _convert(kind, value)
    except SpecError as error:
        raise error.within(key) from None


def _convert_union(kinds: tuple[Any, ...], value: Any) -> Any:
    if value is None and type(None) in kinds:
        return None
    with_keys = [kind for kind in kinds if dataclasses.is_dataclass(kind) or typing.get_origin(kind) is Mapping]
    for kind in kinds:
        if typing.get_origin(kind) is tuple and not isinstance(value, (list, tuple)):
            continue  # a single value stays a single value if that is allowed
        if kind is not type(None) and kind not in with_keys:
            try:
                return _convert(kind, value)
            except _OutOfRangeError:
                raise
            except SpecError:
                continue
    words = [kind for kind in kinds if typing.get_origin(kind) is typing.Literal]
    if len(with_keys) == 1:
        return _convert(words[0] if words and isinstance(value, str) else with_keys[0], value)
    wanted = " or ".join(describe_type(kind) for kind in kinds)
    raise SpecError("", f"expected {wanted}, got {_shown(value)}")


def _number(value: Any) -> int | float | None:
    """A number, including those that YAML 1.1 reads as text, such as `1e-3`; None for other values."""
    is_infinite = False
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return None
        is_infinite = math.isinf(number) and "inf" not in value.lower()
    elif isinstance(value, numbers.Real) and not isinstance(value, bool):  # NumPy's numbers are, too
        number = int(value) if isinstance(value, numbers.Integral) else float(value)
        is_infinite = isinstance(number, int) and abs(number) > sys.float_info.max
    else:
        return None
    if is_infinite:
        raise _OutOfRangeError("", f"numbers go up to {sys.float_info.max:.2g}, got {_shown(value)}")
    return number


def describe_type(kind: Any) -> str:
    """A type in words."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is type(None):
        return "nothing (null)"
    if kind is Any:
        return "anything"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe_type(a) for a in args)
    if origin is typing.Literal:
        return " or ".join(f"`{a}`" for a in args)
    if origin is tuple:
        return f"list of {describe_type(args[0])}"
    if origin is Mapping:
        return f"mapping of names to {describe_type(args[1])}"
    names = {int: "whole number", float: "number", str: "text", bool: "true or false"}
    return names.get(kind, getattr(kind, "__name__", str(kind)))


def _shown(value: Any) -> str:
    return shorten(repr(value[:60] if isinstance(value, str) else value))


def to_plain(spec: Any, *, defaults: bool = True) -> Any:
    """A spec as plain dicts and lists, ready for YAML or JSON; `parse` reads it back to an equal spec.

    Without `defaults`, fields at their defaults are left out: equal for a spec of an older version with fewer fields.
    """
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        values = {
            f.name: getattr(spec, f.name) for f in dataclasses.fields(spec) if defaults or getattr(spec, f.name) != f.default
        }
        return to_plain(values, defaults=defaults)
    if isinstance(spec, (list, tuple)):
        return [to_plain(item, defaults=defaults) for item in spec]
    if isinstance(spec, Mapping):
        return {key: to_plain(item, defaults=defaults) for key, item in spec.items()}
    return spec


def merge(base: Any, changes: Any) -> Any:
    """`base` with changes; mappings are merged key by key, anything else is replaced."""
    if not isinstance(base, Mapping) or not isinstance(changes, Mapping):
        return changes
    return {**base, **{key: merge(base.get(key), value) for key, value in changes.items()}}


def difference(one: Any, other: Any, path: str = "") -> tuple[str, str, str] | None:
    """The first difference between two plain values: its dotted path and both values as text; None if they are equal."""
    if one == other:
        return None
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in sorted({*one, *other}):
            found = difference(one.get(key), other.get(key), f"{path}.{key}" if path else str(key))
            if found is not None:
                return found
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            found = difference(left, right, f"{path}[{index}]")
            if found is not None:
                return found
    missing = "the default"
    return path, missing if one is None else _shown(one), missing if other is None else _shown(other)


def digest(spec: Any) -> str:
    """A short fingerprint of a spec; equal specs have equal digests on every machine."""
    text = json.dumps(to_plain(spec), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def shipped_names(*folders: Path) -> list[str]:
    """Names of the YAML files in folders of the package."""
    return [name for folder in folders for name in sorted(path.stem for path in folder.glob("*.yaml"))]


def find_file(name_or_path: str, what: str, *folders: Path) -> Path:
    """The file of the user, or the shipped one of that name in one of the folders."""
    shipped = [folder / f"{name_or_path}.yaml" for folder in folders if name_or_path in shipped_names(folder)]
    try:
        path = next((path for path in (Path(name_or_path), *shipped) if path.is_file()), None)
    except OSError as error:  # such as a name that is too long
        raise RowsteadError(f"no {what} `{shorten(name_or_path)}`: {error.strerror}") from None
    if path is None:
        near = did_you_mean(name_or_path, shipped_names(*folders))
        raise RowsteadError(f"no {what} `{shorten(name_or_path)}`, shipped or as a file: {near}")
    return path


@contextlib.contextmanager
def errors_in(path: Path, hint: str = "") -> Iterator[None]:
    """Name the file in SpecErrors of the block."""
    try:
        yield
    except SpecError as error:
        raise SpecError("", f"{path.name}: {error}{hint}") from None


def to_yaml(spec: Any) -> str:
    """A spec as the text of a YAML file."""
    return yaml.safe_dump(to_plain(spec), sort_keys=False, allow_unicode=True)


def settings_from(assignments: Iterable[str]) -> dict[str, Any]:
    """Parse `key.path=value` assignments of the command line; values are YAML."""
    found = {}
    for text in assignments:
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            raise SpecError("", f"cannot read `{shorten(text)}`: write it as key.path=value")
        found[key.strip()] = read_text(value, what=f"the value in `{shorten(text)}`")
    return found


def override(plain: Any, assignments: Iterable[str]) -> Any:
    """Apply `key.path=value` assignments to `plain`; list items are addressed by index."""
    return assign(plain, settings_from(assignments))


def assign(plain: Any, settings: Mapping[str, Any]) -> Any:
    """Set values by dotted key."""
    for key, value in settings.items():
        keys = key.split(".")
        if len(keys) > MAX_DEPTH:
            raise SpecError(shorten(key), f"has {len(keys):,} parts, and recipes are at most {MAX_DEPTH} levels deep")
        plain = _assign(plain, keys, to_plain(value), key)
    return plain


def _assign(node: Any, keys: list[str], value: Any, whole: str) -> Any:
    if not keys:
        return value
    first, rest = keys[0], keys[1:]
    if isinstance(node, list):
        if not (first.isascii() and first.isdigit()) or int(first) >= len(node):
            hint = f"use 0 to {len(node) - 1}" if node else "give the whole list, as [...]"
            raise SpecError(whole, f"`{first}` is not an index of a list of {len(node)}: {hint}")
        index = int(first)
        return [*node[:index], _assign(node[index], rest, value, whole), *node[index + 1 :]]
    if node is None:
        node = {}
    if not isinstance(node, Mapping):
        raise SpecError(whole, f"`{first}` is inside a plain value and cannot be set")
    return {**node, first: _assign(node.get(first), rest, value, whole)}
