"""Segments against an evaluation of each alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss

from rowstead.training.metrics import Evaluation
from rowstead.training.segments import OTHER, SegmentSums


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.floats(-4, 4, width=32), st.integers(0, 1)), min_size=1, max_size=60))
def test_a_segment_is_the_evaluation_of_its_examples_alone(rows: list[tuple[int, float, int]]) -> None:
    codes, logits, labels = (np.array(column) for column in zip(*rows, strict=True))
    logits, labels = logits.astype(np.float32), labels.astype(np.float32)
    together = Evaluation(negative_keep_rate=0.5)
    for part in np.array_split(np.arange(len(rows)), 3):
        together.add(logits[part], labels[part], segments=codes[part])
    found = together.quality(segment_column="country").segments
    assert found is not None
    assert found.column == "country"
    assert found.num_values == len(set(codes.tolist()))
    assert [row.weight for row in found.rows] == sorted((row.weight for row in found.rows), reverse=True)
    for code, row in zip(found.codes, found.rows, strict=True):
        alone = Evaluation(negative_keep_rate=0.5)
        alone.add(logits[codes == code], labels[codes == code])
        quality = alone.quality()
        assert row.name == str(code)
        assert row.log_loss == pytest.approx(quality.log_loss)
        for measure in ("ne", "calibration"):
            expected = getattr(quality, measure)
            assert getattr(row, measure) == (None if expected is None else pytest.approx(expected))


def test_a_segments_log_loss_is_scikit_learns() -> None:
    random = np.random.default_rng(3)
    logits, codes = random.normal(size=2000).astype(np.float32), random.integers(0, 4, 2000)
    labels = random.integers(0, 2, 2000).astype(np.float32)
    evaluation = Evaluation()
    evaluation.add(logits, labels, segments=codes)
    found = evaluation.quality().segments
    assert found is not None
    for code, row in zip(found.codes, found.rows, strict=True):
        own = codes == code
        assert row.log_loss == pytest.approx(log_loss(labels[own], 1 / (1 + np.exp(-logits[own].astype(float)))), rel=1e-6)


def add(sums: SegmentSums, codes: list[int]) -> None:
    ones = np.ones(len(codes))
    sums.add(np.array(codes), ones, 0.25 * ones, 0.5 * ones, ones)


def test_rare_values_are_one_row() -> None:
    sums = SegmentSums()
    add(sums, [value for value in range(30) for _ in range(30 - value)])
    found = sums.measure("city", max_rows=5)
    assert found is not None
    assert [row.name for row in found.rows] == ["0", "1", "2", "3", OTHER]
    assert found.rows[-1].weight == sum(30 - value for value in range(4, 30))
    assert found.rows[-1].calibration == 2
    assert found.num_values == 30
    assert f"calibration(city={OTHER})" in found.figures()


def test_values_beyond_the_limit_are_with_the_others_and_those_before_stay_exact() -> None:
    sums = SegmentSums(max_counted=3)
    add(sums, [5, 1])
    add(sums, [9, 7, 5, 8, 9])  # of the new ones the first to appear is counted
    add(sums, [7, 1, 9])
    found = sums.measure("city")
    assert found is not None
    assert {row.name: row.weight for row in found.rows} == {"9": 3, "5": 2, "1": 2, OTHER: 3}


def test_all_values_are_shown_where_they_fit() -> None:
    sums = SegmentSums()
    add(sums, [3, 3, 4])
    found = sums.measure("city", max_rows=2)
    assert found is not None
    assert [row.name for row in found.with_names({3: "Oslo"}).rows] == ["Oslo", "4"]
    assert SegmentSums().measure("city") is None
