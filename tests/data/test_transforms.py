"""Dense transforms against plain float64 formulas, and the rule for bad rows against its words."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rowstead.data.block import RawBlock
from rowstead.data.transforms import DenseTransforms, RowRule
from rowstead.spec.errors import DataError
from rowstead.spec.features import DenseFeatureSpec, FeaturesSpec

VALUES = st.floats(-1e6, 1e6, width=32)


@st.composite
def dense_specs(draw):
    clip = sorted(draw(st.lists(VALUES, min_size=2, max_size=2, unique=True)))
    return DenseFeatureSpec(
        name="x",
        clip=tuple(clip) if draw(st.booleans()) else None,
        log=draw(st.booleans()),
        missing=draw(st.one_of(st.none(), st.just("mean"), VALUES)),
        standardise=draw(st.booleans()),
    )


def block_of(columns, labels=None, weights=None):
    dense = np.ascontiguousarray(np.array(columns, np.float32).T)
    as_floats = [None if x is None else np.array(x, np.float32) for x in (labels, weights)]
    return RawBlock(dense=dense, ids=(), offsets=(), labels=as_floats[0], weights=as_floats[1])


def expected(spec, values):
    """The formulas of the spec's docstrings, value by value."""

    def clip_and_log(x):
        x = min(max(x, spec.clip[0]), spec.clip[1]) if spec.clip else x
        return math.copysign(math.log1p(abs(x)), x) if spec.log else x

    present = [clip_and_log(x) for x in values if not math.isnan(x)]
    mean = float(np.mean(present)) if present else 0.0
    std = float(np.std(present)) if present else 0.0
    is_constant = std <= 1e-12 * abs(mean) or std < np.finfo(np.float32).tiny
    std = 1.0 if is_constant else std
    fill = mean if spec.missing == "mean" else math.nan if spec.missing is None else clip_and_log(spec.missing)
    out = [fill if math.isnan(x) else clip_and_log(x) for x in values]
    return [(x - mean) / std if spec.standardise else x for x in out], mean, std


@given(dense_specs(), st.lists(st.one_of(st.just(math.nan), VALUES), min_size=1, max_size=30), st.integers(1, 5))
def test_transforms_follow_their_formulas(spec, values, num_blocks):
    features = FeaturesSpec(dense=(spec,))
    blocks = [block_of([part]) for part in np.array_split(np.array(values, np.float32), num_blocks)]
    transforms = DenseTransforms.learn(features, blocks)
    wanted, mean, std = expected(spec, values)
    got = transforms.apply(block_of([values]).dense)[:, 0]
    assert got.dtype == np.float32
    # The learned mean is stored in float32: near it, what is left of the difference carries that rounding. So does a small deviation.
    spread = abs(mean) / std if spec.standardise else abs(mean)
    np.testing.assert_allclose(got, wanted, rtol=2e-5 + 1e-7 * spread, atol=1e-5 + 2e-6 * spread)


def test_statistics_of_large_numbers_are_stable():
    rng = np.random.default_rng(0)
    values = (1e6 + rng.standard_normal((20, 1000))).astype(np.float32)
    features = FeaturesSpec(dense=(DenseFeatureSpec(name="x", standardise=True),))
    transforms = DenseTransforms.learn(features, (block_of([row]) for row in values))
    assert transforms.scale[0] == pytest.approx(1 / values.astype(np.float64).std(), rel=1e-5)


def test_a_constant_column_has_standard_deviation_1():
    features = FeaturesSpec(dense=(DenseFeatureSpec(name="x", standardise=True), DenseFeatureSpec(name="y", standardise=True)))
    transforms = DenseTransforms.learn(features, [block_of([[0.1] * 1000, [math.nan] * 1000])] * 3)
    assert transforms.scale.tolist() == [1.0, 1.0]
    assert transforms.shift.tolist() == [np.float32(0.1), 0.0]


def test_statistics_leave_out_what_is_not_finite():
    features = FeaturesSpec(dense=(DenseFeatureSpec(name="x", missing="mean"),))
    transforms = DenseTransforms.learn(features, [block_of([[1, math.inf, math.nan, 3]])])
    assert transforms.fill.tolist() == [2.0]


def test_features_without_transforms_pass_through_untouched():
    features = FeaturesSpec(dense=(DenseFeatureSpec(name="x"),))

    def no_blocks():
        raise AssertionError("no statistics are needed")
        yield

    transforms = DenseTransforms.learn(features, no_blocks())
    dense = block_of([[1, 2]]).dense
    assert transforms.is_identity
    assert transforms.apply(dense) is dense


def test_apply_leaves_its_input_alone():
    transforms = DenseTransforms.learn(FeaturesSpec(dense=(DenseFeatureSpec(name="x", log=True),)))
    dense = block_of([[1, -2]]).dense
    got = transforms.apply(dense)
    assert dense[:, 0].tolist() == [1, -2]
    np.testing.assert_allclose(got[:, 0], [math.log(2), -math.log(3)], rtol=1e-6)


@example([DenseFeatureSpec(name="x", clip=(0.0, 1.401298464324817e-45), standardise=True)], [0.0, 1.0])
@given(st.lists(dense_specs(), min_size=1, max_size=4), st.lists(VALUES, min_size=2, max_size=5))
def test_transforms_survive_json(specs, values):
    named = tuple(DenseFeatureSpec(**{**vars(s), "name": f"x{i}"}) for i, s in enumerate(specs))
    block = block_of([values] * len(named))
    transforms = DenseTransforms.learn(FeaturesSpec(dense=named), [block])
    again = DenseTransforms.from_plain(json.loads(json.dumps(transforms.to_plain(), allow_nan=False)))
    assert again.names == transforms.names
    np.testing.assert_array_equal(again.apply(block.dense), transforms.apply(block.dense))


def test_another_number_of_columns_is_refused():
    transforms = DenseTransforms.learn(FeaturesSpec(dense=(DenseFeatureSpec(name="x", log=True),)))
    with pytest.raises(DataError, match="got 2 dense columns, but the model has 1"):
        transforms.apply(np.zeros((1, 2), np.float32))


RULE = RowRule(
    FeaturesSpec(
        dense=(
            DenseFeatureSpec(name="plain", column="p"),
            DenseFeatureSpec(name="filled", missing=0.0),
            DenseFeatureSpec(name="clipped", clip=(-1, 1)),
        )
    ),
    label="click",
    weight="w",
)


@pytest.mark.parametrize(
    ("changed", "column", "problem"),
    [
        ({"p": math.nan}, "p", "missing"),
        ({"p": math.inf}, "p", "set the feature's `clip"),
        ({"p": -math.inf}, "p", "set the feature's `clip"),
        ({"filled": math.inf}, "filled", "set the feature's `clip"),
        ({"clipped": math.nan}, "clipped", "missing"),
        ({"click": 1.5}, "click", "between 0 and 1"),
        ({"click": -0.1}, "click", "between 0 and 1"),
        ({"click": math.nan}, "click", "between 0 and 1"),
        ({"w": -1.0}, "w", "weight"),
        ({"w": math.inf}, "w", "weight"),
        ({"w": math.nan}, "w", "weight"),
        ({"filled": math.nan}, None, None),
        ({"clipped": math.inf}, None, None),
        ({"clipped": -math.inf}, None, None),
        ({"click": 0.5}, None, None),
        ({"w": 0.0}, None, None),
    ],
)
def test_the_rule_for_bad_rows(changed, column, problem):
    good = {"p": 1.0, "filled": 1.0, "clipped": 1.0, "click": 1.0, "w": 1.0}
    rows = [good, good | changed, good]
    columns = {name: [row[name] for row in rows] for name in good}
    bad = RULE.check(block_of([columns["p"], columns["filled"], columns["clipped"]], columns["click"], columns["w"]))
    if column is None:
        assert bad is None
    else:
        assert (bad.mask.tolist(), bad.row) == ([False, True, False], 1)
        assert f"column `{column}`" in bad.problem
        assert "has a missing value" in bad.problem or f"contains {np.float32(changed[column])};" in bad.problem
        assert problem in bad.problem
