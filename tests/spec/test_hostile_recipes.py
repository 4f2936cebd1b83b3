"""Recipes that would take for ever, or all memory, are refused at once, with the key and the bound."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rowstead.records.run_folder import RunFolder
from rowstead.spec.axis import axis_from
from rowstead.spec.bounds import MAX_ENTRIES, MAX_FEATURES
from rowstead.spec.catalogue import load_machine, load_software
from rowstead.spec.errors import RowsteadError, SpecError
from rowstead.spec.parse import assign, override, parse, settings_from, to_plain
from rowstead.spec.placement import TablePlacementSpec
from rowstead.spec.run import RunSpec, load_recipe
from rowstead.spec.sweep import SweepSpec, load_sweep
from rowstead.spec.yaml_text import MAX_CHARACTERS, MAX_KEYS, MAX_NODES
from tests.small_runs import small_plain

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGE_BOMB = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{k: {{<<: [{', '.join([f'*{before}'] * 10)}]}}, {name}: 1}}\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
TEXTS = {
    "alias bomb": (BOMB, "line 6: f[3]: more than 500,000 values, counting each as often as aliases repeat it"),
    "merge bomb": (MERGE_BOMB, "more than 500,000 values"),
    "alias of itself": ("a: &a [1, *a]", "line 1: a[1]: the alias `*a` is inside of what it refers to"),
    "many keys": (
        "train:\n" + "".join(f"  k{i}: 1\n" for i in range(60_000)),
        "train.k10000: a mapping has more than 10,000 keys",
    ),
    "many values": ("a: [" + "1," * 600_000 + "]", "a[499997]: more than 500,000 values"),
    "nested lists": ("[" * 5000 + "]" * 5000, "nested more than 50 levels deep"),
    "nested mappings": ("{a: " * 5000 + "1" + "}" * 5000, "a.a.a.a.a.a…: nested more than 50 levels deep"),
    "nested block lists": ("- " * 5000 + "1", "nested more than 50 levels deep"),
    "nested by aliases": (
        "a: &a " + "[" * 30 + "]" * 30 + "\nb: " + "[" * 30 + "*a" + "]" * 30,
        "nested more than 50 levels deep",
    ),
    "long text": ("# " + "x" * MAX_CHARACTERS, f"longer than {MAX_CHARACTERS:,} characters"),
    "tags": ("a: !!timestamp x", "a: the tag `tag:yaml.org,2002:timestamp` is not supported"),
    "python": ("a: !!python/object/apply:os.system [ls]", "is not supported"),
    "tag directives": ("".join(f"%TAG !a{i}! x\n" for i in range(500_000)), "%TAG is not supported"),
    "long number": ("a: " + "9" * 4000, "is out of range"),
    "long hexadecimal number": ("a: 0x" + "f" * 1_000_000, "is out of range"),
    "sexagesimal number": ("a: 1" + ":59" * 100_000, "is out of range"),
    "infinity": ("a: 1.0e+400", "the number `1.0e+400` is out of range"),
}


@contextmanager
def at_once() -> Iterator[None]:
    """At most two seconds of processor time: a second, and as much again for caches that other work has emptied."""
    started = time.process_time()
    yield
    assert time.process_time() - started < 2


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_that_would_take_long_to_build_is_refused_at_once(name: str, tmp_path: Path) -> None:
    text, says = TEXTS[name]
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with at_once(), pytest.raises(SpecError) as caught:
        load_recipe(str(file))
    assert says in str(caught.value)
    assert "mine.yaml" in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("load", [load_sweep, load_machine, load_software, load_recipe])
def test_every_kind_of_file_is_read_under_the_same_bounds(load: object, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(BOMB)
    with at_once(), pytest.raises(SpecError, match="more than 500,000 values"):
        load(str(file))  # type: ignore[operator]


def test_values_on_the_command_line_are_read_under_the_same_bounds() -> None:
    with at_once(), pytest.raises(SpecError, match=r"the value in `train=.*nested more than 50 levels deep"):
        settings_from(["train=" + "[" * 5000])
    with at_once(), pytest.raises(RowsteadError, match="nested more than 50 levels deep"):
        axis_from("train.batch_size=" + "[" * 5000)
    with at_once(), pytest.raises(SpecError, match=r"a\.a\.a.*has 5,000 parts, and recipes are at most 50 levels deep"):
        assign(small_plain(), {".".join("a" * 5000): 1})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("features.sparse.0.num_rows=9223372036854775808", "features.sparse[0].num_rows: whole numbers go up to 2**63 - 1"),
        (
            "features.sparse.0.num_rows=9223372036854775807",
            "num_rows: must be at most 1,000,000,000,000, got 9,223,372,036,854,775,807",
        ),
        ("features.sparse.0.num_rows=1e400", "features.sparse[0].num_rows: numbers go up to 1.8e+308, got '1e400'"),
        (
            "features.sparse.0.repeat=1_000_000_000_000",
            "features.sparse[0].repeat: must be at most 50,000, got 1,000,000,000,000",
        ),
        ("features.dense.0.repeat=1e12", "features.dense[0].repeat: must be at most 50,000"),
        ("features.dense.0.name=" + "a{i}" * 100_000, "features.dense[0].name: must not be longer than 200"),
        (
            "features.dense=[" + "{name: 'a{i}', repeat: 40000}, {name: 'b{i}', repeat: 40000}]",
            "features.dense: at most 50,000 features are allowed, got 80,000",
        ),
        (
            "features.dense=[" + "{name: a}, " * 10_001 + "]",
            "features: has 10,002 entries, and at most 8,000 are allowed: write alike features as one",
        ),
        ("data.synth.num_eval_samples=1_000_000_000_000_000", "data.synth.num_eval_samples: must be at most 1,000,000,000"),
        ("data.synth.num_sparse=1_000_000_000_000", "data.synth.num_sparse: must be at most 50,000"),
        ("data.synth.latent=1_000_000_000_000", "data.synth.latent: must be at most 1,024"),
        ("scale=1e300", "scale: makes table `sparse_0` 5"),
        ("scale=1e400", "scale: numbers go up to 1.8e+308"),
        ("scale=.inf", "scale: must be above 0 and finite, got inf"),
        ("train.dense_optimizer.lr=1e400", "train.dense_optimizer.lr: numbers go up to 1.8e+308"),
        ("train.batch_size=1_000_000_000_000", "train.batch_size: must be at most 100,000,000"),
        ("train.sync.hogwild_threads=1_000_000", "train.sync.hogwild_threads: must be at most 4,096"),
        ("model.width=1_000_000_000", "model.width: must be at most 65,536"),
        ("model.top=[1_000_000_000_000]", "model.top: must be from 1 to 1,048,576"),
        ("model.interaction={kind: cross, cross_layers: 1_000_000_000}", "cross_layers: must be at most 1,000"),
        ("model.interaction.num_dense_vectors=1_000_000_000", "num_dense_vectors: must be at most 10,000"),
        ("fleet.num_trainers=1_000_000_000_000", "fleet.num_trainers: must be at most 4,096"),
        ("memory.host=1e308TB", "memory.host: `1e308TB` is not a size"),
        ("placement={" + ", ".join(f"'{i}*': host" for i in range(9_000)) + "}", "placement.0*: matches no table"),
        ("name=" + "x" * 300, "name: must not be longer than 200"),
        ("threads=1_000_000", "threads: must be at most 4,096"),
        ("x" * 100_000 + "=1", "unknown key"),
        ("model.options={a: 2020-01-01}", "model.options.a: expected text or a number, got '2020-01-01': put it into quotes"),
    ],
)
def test_a_setting_beyond_its_bound_is_refused_at_once_with_its_key(change: str, says: str) -> None:
    with at_once(), pytest.raises(SpecError) as caught:
        parse(RunSpec, override(small_plain(), [change]))
    assert says in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_patterns_times_tables_are_bounded() -> None:
    plain = override(small_plain(), ["features.sparse.0.repeat=50000", "data.synth.num_sparse=50000", "data.synth.num_ids=50"])
    plain["placement"] = {f"sparse_{i}*": "host" for i in range(30)}
    with pytest.raises(SpecError, match="placement: has 30 patterns, and at most 20 are allowed with 50,000 tables"):
        parse(RunSpec, plain)


def test_a_sweep_of_too_many_points_is_refused_at_once() -> None:
    axes = [{"keys": [key], "values": list(range(1, 1001))} for key in ("seed", "train.batch_size", "train.epochs")]
    with (
        at_once(),
        pytest.raises(SpecError, match="grid: has 1,000,000,000 combinations of values, and at most 100,000 are allowed"),
    ):
        parse(SweepSpec, {"name": "x", "recipe": "quickstart", "grid": axes})
    fleet = {"machine": "h200", "num_trainers": 10**12}
    with at_once(), pytest.raises(SpecError, match=r"machines\[0\]\.num_trainers: must be at most 4,096"):
        parse(SweepSpec, {"name": "x", "recipe": "quickstart", "grid": axes[:1], "machines": [fleet]})


def test_recipes_that_are_based_on_one_another_are_refused(tmp_path: Path) -> None:
    for name, base in (("a", "b.yaml"), ("b", "a.yaml")):
        (tmp_path / f"{name}.yaml").write_text(f"base: {base}\n")
    with (
        at_once(),
        pytest.raises(SpecError, match="base: recipes are based on one another, more than 20 in a row or in a circle"),
    ):
        load_recipe(str(tmp_path / "a.yaml"))
    with pytest.raises(RowsteadError, match="File name too long"):
        load_recipe("x" * 5000)


def test_the_largest_recipe_that_is_allowed_can_be_read_from_its_run(tmp_path: Path) -> None:
    """A run writes its recipe out with all defaults, and is resumed from that."""
    plain = small_plain()
    plain["features"]["sparse"] = [{"name": f"a rather long name of a feature {i}", "num_rows": 10} for i in range(100)]
    plain["features"]["dense"] = [{"name": f"another rather long name of a feature {i}"} for i in range(100)]
    folder = RunFolder.create(tmp_path, "large")
    folder.write_spec(spec := parse(RunSpec, plain))
    assert folder.read_spec() == spec
    per_entry = num_nodes(to_plain(spec.features.sparse)) / 100  # these have the most fields
    rules = MAX_KEYS * num_nodes({"x": to_plain(TablePlacementSpec())})
    assert (
        MAX_ENTRIES * per_entry + 3 * MAX_FEATURES + rules < MAX_NODES
    )  # with hash_sizes, num_ids and mean_ids of each feature
    assert folder.spec_file.stat().st_size / 100 * MAX_ENTRIES < MAX_CHARACTERS


def num_nodes(plain: Any) -> int:
    if isinstance(plain, dict):
        return 1 + len(plain) + sum(map(num_nodes, plain.values()))
    return 1 + sum(map(num_nodes, plain)) if isinstance(plain, (list, tuple)) else 1


def test_a_bomb_is_refused_in_little_memory(tmp_path: Path) -> None:
    (tmp_path / "bomb.yaml").write_text(BOMB)
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)); sys.argv[1:] = ['train', 'bomb.yaml']; "
    code += "from rowstead.cli.main import command; command()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: bomb.yaml: ")
    assert "more than 500,000 values" in done.stderr
