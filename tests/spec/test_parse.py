"""YAML becomes specs, or an error that names the key and what to write instead."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowstead.spec.errors import SpecError, did_you_mean
from rowstead.spec.features import DenseFeatureSpec, FeaturesSpec
from rowstead.spec.model import ModelSpec
from rowstead.spec.parse import digest, override, parse, to_plain
from rowstead.spec.row_optimizers import ROW_OPTIMIZERS
from rowstead.spec.run import RunSpec, load_recipe, recipe_names
from rowstead.spec.train import TrainSpec
from rowstead.spec.yaml_text import read_yaml
from tests.small_runs import small_plain


def problem_of(plain: Any, cls: type = RunSpec) -> SpecError:
    with pytest.raises(SpecError) as caught:
        parse(cls, plain)
    return caught.value


def changed(*assignments: str) -> Any:
    return override(small_plain(), assignments)


@pytest.mark.parametrize(
    ("assignment", "path", "nearest"),
    [
        ("train.bach_size=1", "train.bach_size", "batch_size"),
        ("trian.batch_size=1", "trian", "train"),
        ("data.synth.num_dens=1", "data.synth.num_dens", "num_dense"),
        ("model.interaction.cros_layers=1", "model.interaction.cros_layers", "cross_layers"),
        ("features.sparse.0.num_row=1", "features.sparse[0].num_row", "num_rows"),
        ("train.sparse_optimizer.learning_rat=1", "train.sparse_optimizer.learning_rat", None),
    ],
)
def test_an_unknown_key_is_refused_by_its_path_and_the_nearest_is_named(
    assignment: str, path: str, nearest: str | None
) -> None:
    error = problem_of(changed(assignment))
    assert error.path == path
    assert "unknown key" in error.problem
    assert (f"did you mean `{nearest}`?" if nearest else "known here: `kind`, `lr`") in error.problem


def _with_a_typo(name: str, place: int) -> str:
    place %= len(name)
    return name[:place] + name[place + 1 :]


@given(cls=st.sampled_from([TrainSpec, ModelSpec, DenseFeatureSpec]), place=st.integers(0, 40), data=st.data())
@settings(deadline=None)
def test_any_key_with_a_letter_missing_is_never_swallowed(cls: type, place: int, data: st.DataObject) -> None:
    known = sorted(cls.__dataclass_fields__)
    key = _with_a_typo(data.draw(st.sampled_from([name for name in known if len(name) > 3])), place)
    if key not in known:
        assert f"{key}: unknown key" in str(problem_of({key: 1}, cls))


@pytest.mark.parametrize(
    ("assignment", "path", "says"),
    [
        ("train.batch_size=many", "train.batch_size", "expected whole number, got 'many'"),
        ("train.batch_size=1.5", "train.batch_size", "expected whole number, got 1.5"),
        ("train.batch_size=true", "train.batch_size", "expected whole number, got True"),
        ("train.batch_size=", "train.batch_size", "expected whole number, got None"),
        ("train.batch_size=.inf", "train.batch_size", "expected whole number, got inf"),
        ("train.schedule=cosine", "train.schedule", "expected a mapping of keys, got 'cosine'"),
        ("train.schedule.decay=cosin", "train.schedule.decay", "did you mean `cosine`?"),
        ("train.max_steps=soon", "train.max_steps", "expected whole number or nothing (null), got 'soon'"),
        ("train.dense_optimizer.lr=fast", "train.dense_optimizer.lr", "expected number, got 'fast'"),
        ("train.dense_optimizer.lr=.nan", "train.dense_optimizer.lr", "expected number, got nan"),
        ("model.top=[8, wide]", "model.top[1]", "expected whole number, got 'wide'"),
        ("model=[1, 2]", "model", "expected a mapping of keys"),
        ("features.dense.0.log=very", "features.dense[0].log", "expected true or false, got 'very'"),
        ("features.dense.0.missing=median", "features.dense[0].missing", "expected number or `mean` or nothing (null)"),
        ("name=[a]", "name", "expected text"),
        ("data.synth.num_ids=[1, x, 3]", "data.synth.num_ids", "expected whole number or list of whole number"),
    ],
)
def test_a_wrong_type_is_named_by_its_path(assignment: str, path: str, says: str) -> None:
    error = problem_of(changed(assignment))
    assert error.path == path
    assert says in error.problem


@pytest.mark.parametrize("missing", ["name", "data", "features"])
def test_a_required_key_that_is_left_out_is_named(missing: str) -> None:
    plain = small_plain()
    del plain[missing]
    assert str(problem_of(plain)) == f"{missing}: is required and has no default"


@pytest.mark.parametrize("plain", [None, [], "text", 3])
def test_a_recipe_that_is_no_mapping_is_refused(plain: Any) -> None:
    assert "expected a mapping of keys" in str(problem_of(plain))


def test_numbers_that_yaml_reads_as_text_are_numbers() -> None:
    spec = parse(RunSpec, changed("train.dense_optimizer.lr=1e-3", "train.batch_size=1e2", "train.max_steps=2_000"))
    assert spec.train.dense_optimizer.lr == 1e-3
    assert spec.train.batch_size == 100
    assert spec.train.max_steps == 2000


def test_a_lone_value_stands_for_a_list_of_one() -> None:
    assert parse(ModelSpec, {"top": 32}).top == (32,)
    one = parse(FeaturesSpec, {"dense": {"name": "x"}})
    assert one.dense == (DenseFeatureSpec(name="x"),)


def test_overrides_reach_into_mappings_and_lists_and_leave_the_original_alone() -> None:
    plain = small_plain()
    before = small_plain()
    after = override(plain, ["features.sparse.0.num_rows=7", "model.interaction.kind=concat", "train.schedule.decay=linear"])
    assert plain == before
    spec = parse(RunSpec, after)
    assert spec.features.sparse[0].num_rows == 7
    assert spec.model.interaction.kind == "concat"
    assert spec.train.schedule.decay == "linear"


def test_later_overrides_win_and_a_value_may_hold_an_equals_sign() -> None:
    assert override({"a": 1}, ["a=2", "a=3"]) == {"a": 3}
    assert override({}, ["a.b=x=y"]) == {"a": {"b": "x=y"}}
    assert override(None, ["a=[1, 2]"]) == {"a": [1, 2]}


@pytest.mark.parametrize(
    ("assignment", "says"),
    [
        ("train.batch_size", "write it as key.path=value"),
        ("=5", "write it as key.path=value"),
        ("", "write it as key.path=value"),
        ("seed={", "the value in"),
        ("seed=2020-13-45", "the value in"),
        ("features.sparse.9.num_rows=1", "`9` is not an index of a list of 1: use 0 to 0"),
        ("features.sparse.-1.num_rows=1", "`-1` is not an index of a list of 1"),
        ("features.sparse.first.num_rows=1", "`first` is not an index of a list of 1"),
        ("features.sparse.²=1", "`²` is not an index of a list of 1"),
        ("features.tables.0.name=x", "`0` is not an index of a list of 0: give the whole list"),
        ("name.value=1", "`value` is inside a plain value and cannot be set"),
        ("a: b: c=1", "unknown key"),
    ],
)
def test_an_override_that_makes_no_sense_is_refused(assignment: str, says: str) -> None:
    plain = small_plain()
    plain["features"]["tables"] = []
    with pytest.raises(SpecError, match=re.escape(says)):
        parse(RunSpec, override(plain, [assignment]))


@given(st.text(max_size=30))
@settings(deadline=None)
def test_no_text_after_set_ends_in_anything_but_a_spec_or_a_spec_error(text: str) -> None:
    for assignment in (text, f"train.batch_size={text}", f"features.sparse.{text}=1"):
        with contextlib.suppress(SpecError):
            parse(RunSpec, override(small_plain(), [assignment]))


@pytest.mark.parametrize("name", recipe_names())
def test_a_shipped_recipe_survives_being_written_and_read_back(name: str) -> None:
    spec = load_recipe(name)
    assert parse(RunSpec, to_plain(spec)) == spec


_finite = st.floats(-1e6, 1e6, allow_nan=False)


@st.composite
def _specs(draw: st.DrawFn) -> RunSpec:
    """Valid specs, as random as the plain values allow."""
    plain = small_plain()
    plain["seed"] = draw(st.integers(0, 2**63 - 1))
    plain["scale"] = draw(st.floats(1e-3, 10))
    plain["device"] = draw(st.sampled_from(["auto", "cpu", "cuda"]))
    plain["model"] = {
        "width": draw(st.integers(1, 64)),
        "bottom": draw(st.lists(st.integers(1, 64), max_size=3)),
        "top": draw(st.lists(st.integers(1, 64), max_size=3)),
        "interaction": {"kind": draw(st.sampled_from(["dot", "concat", "cross"]))},
    }
    low, high = sorted(draw(st.tuples(_finite, _finite).filter(lambda pair: pair[0] != pair[1])))
    plain["features"]["dense"] = [
        {"name": "a", "clip": draw(st.sampled_from([[low, high], [low, float("inf")], None])), "log": draw(st.booleans())},
        {"name": "b_{i}", "repeat": draw(st.integers(1, 9)), "missing": draw(st.sampled_from(["mean", 0, 1.5, None]))},
    ]
    plain["train"]["sparse_optimizer"] = {
        "kind": draw(st.sampled_from(list(ROW_OPTIMIZERS))),
        "lr": draw(st.floats(1e-9, 1e3)),
        "clip": draw(st.none() | st.floats(1e-3, 1e3)),
    }
    plain["train"]["eval_every"] = draw(st.integers(1, 100))
    plain["train"]["early_stop"] = draw(st.sampled_from([None, {"patience": 2}]))
    return parse(RunSpec, plain)


@given(_specs())
@settings(deadline=None)
def test_any_spec_survives_being_written_and_read_back(spec: RunSpec) -> None:
    again = parse(RunSpec, to_plain(spec))
    assert again == spec
    assert digest(again) == digest(spec)


def test_the_digest_tells_specs_apart_and_does_not_depend_on_the_order_of_keys() -> None:
    plain = small_plain()
    backwards = dict(reversed(plain.items()))
    assert digest(parse(RunSpec, plain)) == digest(parse(RunSpec, backwards))
    assert digest(parse(RunSpec, changed("seed=2"))) != digest(parse(RunSpec, plain))


def test_the_digest_is_the_same_on_every_machine() -> None:
    assert digest({"model": to_plain(ModelSpec()), "list": [1, 2.5, None, "x"]}) == "29a2151019ead9a4"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [1, 2", "line"),
        ("a: 1\nb: \t- c", "line"),
        ("when: 2020-13-45", "month"),
        ("train: {batch_size: 1}\nseed: 2\ntrain: {epochs: 2}", "key `train` is given twice"),
    ],
)
def test_a_file_that_is_no_yaml_is_named_with_the_place(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match=says) as caught:
        read_yaml(path)
    assert str(path) in str(caught.value)


def test_yaml_merge_keys_may_be_overridden(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\n")
    assert read_yaml(path)["b"] == {"x": 1, "y": 3}


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(SpecError, match=r"cannot read .*mine\.yaml"):
        read_yaml(path)


def test_did_you_mean_lists_what_is_known_when_nothing_is_near() -> None:
    assert did_you_mean("zzz", ["alpha", "beta"]) == "known here: `alpha`, `beta`"
    assert did_you_mean("zzz", []) == "nothing is known here"
    assert did_you_mean("zzz", [f"name_{i}" for i in range(30)]).endswith("…")
