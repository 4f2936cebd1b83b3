"""Whatever a recipe says, reading it ends soon, with a spec or with an error that is meant for users.

The quick suite tries a few hundred cases. For 100,000: `ROWSTEAD_FUZZ_CASES=100000 python -m pytest tests/spec/test_fuzz.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rowstead.spec.catalogue import MACHINES, SOFTWARE
from rowstead.spec.errors import RowsteadError
from rowstead.spec.machine import Machine
from rowstead.spec.parse import assign, digest, parse, to_plain, to_yaml
from rowstead.spec.quality import QualitySpec
from rowstead.spec.run import RECIPES, RunSpec
from rowstead.spec.software import Software
from rowstead.spec.study import SWEEPS
from rowstead.spec.sweep import SweepSpec
from rowstead.spec.tune import TuneSpec
from rowstead.spec.yaml_text import read_text, read_yaml
from rowstead.ui.scenario import Scenario, checked_base, scenario_of, spec_of
from tests.small_runs import small_plain

NUM_CASES = int(os.environ.get("ROWSTEAD_FUZZ_CASES", "400"))
MAX_S = 2.0
"""Processor time of one case."""

pytestmark = pytest.mark.timeout(max(300, NUM_CASES // 20))


def fuzz(share: float) -> settings:
    """A share of all cases."""
    return settings(max_examples=int(NUM_CASES * share), deadline=None, suppress_health_check=list(HealthCheck))


def dotted_keys(cls: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Every key of a spec with its type; items of lists by index 0, those of mappings by `x`."""
    for field in dataclasses.fields(cls):
        kind = typing.get_type_hints(cls)[field.name]
        yield from _dotted(f"{prefix}{field.name}", kind, depth)


def _dotted(key: str, kind: Any, depth: int) -> Iterator[tuple[str, Any]]:
    yield key, kind
    if depth > 8:
        return
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        yield from dotted_keys(kind, f"{key}.", depth + 1)
    elif origin in (typing.Union, types.UnionType):
        for one in args:
            if one is not type(None):
                yield from list(_dotted(key, one, depth + 1))[1:]
    elif origin is tuple:
        yield from _dotted(f"{key}.0", args[0], depth + 1)
    elif origin is Mapping:
        yield from _dotted(f"{key}.x", args[1], depth + 1)


NUMBERS = (0, 1, -1, 2, 3, 63, 2**31, 2**53 + 1, 10**9, 10**12, 10**15, 2**63 - 1, 2**63, 10**59, 0.5, 1e-300, 1e300, 1e308)
ODD = (
    float("inf"),
    float("-inf"),
    float("nan"),
    None,
    True,
    False,
    "",
    "x",
    "{i}",
    "a{i}",
    "*",
    "[",
    "1e400",
    "nan",
    "-1",
    "5GB",
    "1e307TB",
)
ODD = (
    *ODD,
    "x" * 300,
    "\0",
    "é\ud800".encode("utf-8", "replace").decode(),
    "a/b:C",
    "x.py:Y",
    "../..",
    "sum",
    "auto",
    "2020-01-01",
)
scalars = st.one_of(st.sampled_from(NUMBERS), st.sampled_from(ODD), st.integers(-5, 2**64), st.text(max_size=8))
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(["x", "name", "kind", "1"]), inner, max_size=3)
    ),
    max_leaves=6,
)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Mostly values of the type, with odd ones in between."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(values(one) for one in args))
    if origin is typing.Literal:
        return st.one_of(st.sampled_from(args), anything)
    if origin is tuple:
        return st.one_of(st.lists(values(args[0]), max_size=3), anything)
    if kind is int or kind is float:
        return st.one_of(st.sampled_from(NUMBERS), st.integers(0, 100), scalars)
    return anything


def _kind(cls: Any, *bases: Any) -> tuple[Any, list[Any], list[tuple[str, st.SearchStrategy[Any]]]]:
    return cls, list(bases), [(key, values(kind)) for key, kind in dotted_keys(cls)]


KINDS = [
    _kind(RunSpec, small_plain(), *(one for one in map(read_yaml, sorted(RECIPES.glob("*.yaml"))) if "base" not in one)),
    _kind(Machine, *map(read_yaml, sorted(MACHINES.glob("*.yaml")))),
    _kind(Software, *map(read_yaml, sorted(SOFTWARE.glob("*.yaml")))),
    _kind(SweepSpec, *map(read_yaml, sorted(SWEEPS.glob("*.yaml")))),
    _kind(QualitySpec, *map(read_yaml, sorted((SWEEPS / "quality").glob("*.yaml")))),
    _kind(TuneSpec, {"name": "x", "recipe": "quickstart", "space": [{"keys": ["seed"], "values": [1, 2]}]}),
    _kind(Scenario, {}),
]


@st.composite
def documents(draw: st.DrawFn) -> tuple[Any, Any]:
    """A shipped file, or a part of one, with a few of its keys set to something else."""
    cls, bases, keys = KINDS[draw(st.sampled_from([0, 0, 0, 0, *range(len(KINDS))]))]
    plain = draw(st.sampled_from(bases))
    for _ in range(draw(st.integers(1, 3))):
        key, strategy = draw(st.sampled_from(keys))
        try:
            plain = assign(plain, {key: draw(strategy)})
        except RowsteadError:  # its list is empty, or it is inside a plain value
            continue
    return cls, plain


@contextlib.contextmanager
def soon() -> Iterator[None]:
    """The block ends soon, and if with an error, then with one for users."""
    started, said = time.process_time(), "nothing"
    try:
        yield
    except RowsteadError as error:
        said = str(error)
    assert 0 < len(said) < 2000
    assert time.process_time() - started < MAX_S


def try_to_parse(cls: Any, plain: Any) -> None:
    """Parse, write and read back, and show on the what-if page."""
    spec = parse(cls, plain)
    assert digest(parse(cls, to_plain(spec))) == digest(spec)
    if isinstance(spec, RunSpec) and checked_base(plain) == spec:
        spec_of(scenario_of(spec), spec)


@given(documents())
@fuzz(0.6)
def test_a_document_of_the_specs_own_keys_is_parsed_or_refused(document: tuple[Any, Any]) -> None:
    cls, plain = document
    with soon():
        try_to_parse(cls, plain)


PIECES = (
    *(
        "- ",
        ": ",
        "{",
        "}",
        "[",
        "]",
        ", ",
        "\n",
        "\n  ",
        "&a ",
        "*a",
        "<<",
        "? ",
        "| ",
        "> ",
        "'",
        '"',
        "%",
        "---\n",
        "...\n",
        "#",
        "!",
        "!!int ",
    ),
    *(
        "1e400",
        ".inf",
        ".nan",
        "0x",
        "0b",
        "1:2:3",
        "2020-13-45",
        "2020-01-01",
        "=",
        "~",
        "null",
        "1_0",
        "+",
        "\t",
        "\0",
        "\ufeff",
        "\ud800",
    ),
    *("name", "data", "synth", "features", "sparse", "dense", "repeat", "num_rows", "model", "train", "a", "b", "9" * 80),
)


@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=30).map("".join))
@fuzz(0.25)
def test_any_text_is_read_or_refused(text: str) -> None:
    with soon():
        try_to_parse(RunSpec, read_text(text, what="it"))


SOURCE = to_yaml(small_plain())


@given(st.lists(st.tuples(st.integers(0, len(SOURCE)), st.integers(0, 12), st.sampled_from(PIECES)), min_size=1, max_size=3))
@fuzz(0.15)
def test_a_damaged_recipe_is_parsed_or_refused(cuts: list[tuple[int, int, str]]) -> None:
    text = SOURCE
    for start, length, piece in cuts:
        text = text[:start] + piece + text[start + length :]
    with soon():
        try_to_parse(RunSpec, read_text(text, what="it"))
