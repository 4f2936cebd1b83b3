"""NE, log loss, AUC, calibration and MSE against formulas that are slow and obvious."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rowstead.data.columns import NO_GROUP
from rowstead.spec.errors import DataError, TrainingError
from rowstead.training.metrics import Evaluation, Quality

Floats = NDArray[np.float32]


def quality_of(
    logits: Floats,
    labels: Floats,
    weights: Floats | None = None,
    true_p: Floats | None = None,
    *,
    cuts: tuple[int, ...] = (),
    **options: float | int,
) -> Quality:
    """The Quality of examples that come in batches cut at `cuts`."""
    evaluation = Evaluation(**options)  # type: ignore[arg-type]
    borders = [0, *sorted(cuts), len(labels)]
    for start, stop in itertools.pairwise(borders):
        part = slice(start, stop)
        evaluation.add(
            logits[part],
            labels[part],
            None if weights is None else weights[part],
            None if true_p is None else true_p[part],
        )
    return evaluation.quality()


def slow_quality(logits: Floats, labels: Floats, weights: Floats) -> dict[str, float]:
    """The definitions, one example and one pair at a time."""
    total = loss = square = predicted = clicked = 0.0
    for z, y, w in zip(logits.tolist(), labels.tolist(), weights.tolist(), strict=True):
        p = 1 / (1 + math.exp(-z))
        total += w
        loss += w * -(y * math.log(p) + (1 - y) * math.log(1 - p))
        square += w * (y * (1 - p) ** 2 + (1 - y) * p**2)
        predicted += w * p
        clicked += w * y
    mean = clicked / total
    won = pairs = 0.0
    for z1, y1, w1 in zip(logits, labels.tolist(), weights.tolist(), strict=True):
        for z0, y0, w0 in zip(logits, labels.tolist(), weights.tolist(), strict=True):
            weight = w1 * y1 * w0 * (1 - y0)
            pairs += weight
            won += weight * (1.0 if z1 > z0 else 0.5 if z1 == z0 else 0.0)
    return {
        "log_loss": loss / total,
        "mse": square / total,
        "mean_label": mean,
        "mean_prediction": predicted / total,
        "ne": loss / total / -(mean * math.log(mean) + (1 - mean) * math.log(1 - mean)),
        "auc": won / pairs,
        "calibration": predicted / clicked,
    }


@st.composite
def _examples(draw: st.DrawFn) -> tuple[Floats, Floats, Floats]:
    """Log-odds with many ties, labels hard or soft, weights; both classes are present."""
    count = draw(st.integers(2, 25))
    logits = draw(st.lists(st.sampled_from([-3.0, -0.5, 0.0, 0.25, 2.0, 7.5]), min_size=count, max_size=count))
    labels = draw(st.lists(st.sampled_from([0.0, 1.0, 0.25, 0.9]), min_size=count, max_size=count))
    weights = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=count, max_size=count))
    labels[0], labels[1], weights[0], weights[1] = 0.0, 1.0, 1.0, 0.5
    arrays = (np.array(values, np.float32) for values in (logits, labels, weights))
    return tuple(arrays)  # type: ignore[return-value]


@given(_examples())
@settings(deadline=None)
def test_every_measure_is_what_its_definition_says(examples: tuple[Floats, Floats, Floats]) -> None:
    logits, labels, weights = examples
    quality = quality_of(logits, labels, weights)
    for name, value in slow_quality(logits, labels, weights).items():
        assert getattr(quality, name) == pytest.approx(value, rel=1e-9), name
    assert quality.num_samples == len(labels)
    assert quality.auc_error == 0


@given(_examples(), st.lists(st.integers(0, 25), max_size=4), st.sampled_from([1.0, 0.1]), st.sampled_from([10**6, 5]))
@settings(deadline=None, max_examples=25)
def test_batches_give_the_same_as_all_at_once(
    examples: tuple[Floats, Floats, Floats], cuts: list[int], keep: float, exact: int
) -> None:
    inside = tuple(min(cut, len(examples[0])) for cut in cuts)
    true_p = np.linspace(0.1, 0.9, len(examples[0]), dtype=np.float32)
    options = {"negative_keep_rate": keep, "exact_auc_samples": exact}
    whole = quality_of(*examples, true_p, **options)
    parts = quality_of(*examples, true_p, cuts=inside, **options)
    assert parts.figures() == pytest.approx(whole.figures(), rel=1e-9)
    assert parts.reliability is not None
    assert whole.reliability is not None
    assert sum(parts.reliability.weight) == pytest.approx(sum(whole.reliability.weight))


@given(_examples())
@settings(deadline=None)
def test_a_weight_of_two_is_the_example_twice(examples: tuple[Floats, Floats, Floats]) -> None:
    logits, labels, weights = examples
    doubled = weights.copy()
    doubled[0] *= 2
    weighted = quality_of(logits, labels, doubled)
    repeated = quality_of(*(np.append(values, values[0]).astype(np.float32) for values in examples))
    for name, value in repeated.figures().items():
        if name != "num_samples":
            assert getattr(weighted, name) == pytest.approx(value, rel=1e-9), name


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0001, 0.01, 1.0, 30.0]))
@settings(deadline=None, max_examples=12)
def test_the_binned_auc_is_within_its_stated_error_of_the_exact_one(seed: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal(3000) * spread - 1).astype(np.float32)
    labels = (rng.random(3000) < 1 / (1 + np.exp(-logits.astype(np.float64)))).astype(np.float32)
    exact = quality_of(logits, labels)
    binned = quality_of(logits, labels, exact_auc_samples=1000, cuts=(700, 1400))
    assert exact.auc is not None
    assert binned.auc is not None
    assert binned.auc_error is not None
    assert abs(binned.auc - exact.auc) <= binned.auc_error + 1e-12
    assert (binned.auc_error > 0) or binned.auc == pytest.approx(exact.auc)
    if spread >= 1:
        assert binned.auc_error < 2e-3


def _teacher_log(num_samples: int = 200_000) -> tuple[Floats, Floats, Floats]:
    """True log-odds, labels drawn from them, true probabilities."""
    rng = np.random.default_rng(3)
    logits = rng.normal(-2, 1.5, num_samples)
    true_p = 1 / (1 + np.exp(-logits))
    labels = rng.random(num_samples) < true_p
    return logits.astype(np.float32), labels.astype(np.float32), true_p.astype(np.float32)


def test_the_teacher_itself_has_the_best_ne_and_is_calibrated() -> None:
    logits, labels, true_p = _teacher_log()
    best = quality_of(logits, labels, None, true_p)
    assert best.ne_expected == pytest.approx(best.ne_best, rel=1e-6)
    assert best.ne == pytest.approx(best.ne_best, rel=0.01)
    assert best.calibration == pytest.approx(1, abs=0.02)
    entropy = -(true_p * np.log(true_p) + (1 - true_p) * np.log1p(-true_p)).astype(np.float64)
    mean = float(true_p.astype(np.float64).mean())
    base = -(mean * math.log(mean) + (1 - mean) * math.log(1 - mean))
    assert best.ne_best == pytest.approx(float(entropy.mean()) / base, rel=1e-5)
    worse = quality_of(logits + np.float32(0.5), labels, None, true_p)
    assert worse.ne_expected > best.ne_best * 1.01  # type: ignore[operator]
    assert worse.ne_best == best.ne_best


def test_a_log_with_down_sampled_negatives_scores_like_the_whole_one() -> None:
    logits, labels, true_p = _teacher_log()
    whole = quality_of(logits, labels, None, true_p)
    keep_rate = 0.1
    kept = (labels == 1) | (np.random.default_rng(5).random(len(labels)) < keep_rate)
    # A model trained on what was kept learns log-odds that are too high by log(1 / keep_rate).
    seen = (logits - math.log(keep_rate)).astype(np.float32)
    corrected = quality_of(seen[kept], labels[kept], None, true_p[kept], negative_keep_rate=keep_rate)
    uncorrected = quality_of(seen[kept], labels[kept], None, true_p[kept])
    assert corrected.calibration == pytest.approx(1, abs=0.02)
    for name in ("ne", "auc", "log_loss", "mse", "mean_label", "ne_expected", "ne_best"):
        assert getattr(corrected, name) == pytest.approx(getattr(whole, name), rel=0.02), name
    assert uncorrected.mean_label > 3 * corrected.mean_label


def test_weights_count_in_the_teacher_s_measures_too() -> None:
    logits, labels, true_p = (values[:500] for values in _teacher_log())
    weights = (np.arange(500) < 200).astype(np.float32)
    weighted = quality_of(logits, labels, weights, true_p)
    first = quality_of(logits[:200], labels[:200], None, true_p[:200])
    assert weighted.ne_best == pytest.approx(first.ne_best)
    assert weighted.ne_expected == pytest.approx(first.ne_expected)


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_where_all_labels_are_equal_ne_and_auc_are_absent(label: float) -> None:
    quality = quality_of(np.array([-1, 0, 2], np.float32), np.full(3, label, np.float32), None, np.full(3, 0.5, np.float32))
    assert quality.ne is None
    assert quality.auc is None
    assert quality.ne_best is None
    assert (quality.calibration is None) == (label == 0)
    assert {"ne", "auc", "auc_error", "ne_best", "ne_expected"}.isdisjoint(quality.figures())
    assert quality.log_loss > 0


def test_teacher_s_measures_are_absent_where_only_some_examples_have_a_truth() -> None:
    evaluation = Evaluation()
    two = np.array([0, 1], np.float32)
    evaluation.add(two, two, None, np.array([0.5, 0.5], np.float32))
    evaluation.add(two, two)
    assert evaluation.quality().ne_best is None


def test_nothing_to_evaluate_is_an_error_that_says_so() -> None:
    nothing = np.zeros(0, np.float32)
    with pytest.raises(DataError, match="nothing to evaluate"):
        Evaluation().quality()
    with pytest.raises(DataError, match="nothing to evaluate"):
        quality_of(nothing, nothing)
    with pytest.raises(DataError, match="positive weight"):
        quality_of(np.ones(3, np.float32), np.ones(3, np.float32), np.zeros(3, np.float32))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_predictions_that_are_not_finite_are_an_error_with_a_remedy(bad: float) -> None:
    with pytest.raises(TrainingError, match="lower learning rates"):
        quality_of(np.array([0, bad], np.float32), np.array([0, 1], np.float32))


def test_extreme_logits_give_finite_measures_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quality = quality_of(np.array([-1e5, 1e5, -1e5], np.float32), np.array([0, 1, 1], np.float32))
    assert quality.log_loss == pytest.approx(1e5 / 3)
    assert quality.mse == pytest.approx(1 / 3)
    assert quality.auc == pytest.approx(0.75)


def test_groups_of_a_calibration_plot_hold_every_example_once_and_the_teacher_lies_on_the_line() -> None:
    rng = np.random.default_rng(1)
    z = rng.normal(-1, 1.5, 60_000).astype(np.float32)
    p = 1 / (1 + np.exp(-z))
    labels = (rng.random(len(z)) < p).astype(np.float32)
    found = quality_of(z, labels, cuts=(100, 30_000)).reliability
    assert found is not None
    assert sum(found.weight) == pytest.approx(len(z))
    assert max(found.weight) < 2 * min(found.weight)
    assert list(found.predicted) == sorted(found.predicted)
    mean = sum(o * w for o, w in zip(found.observed, found.weight, strict=True)) / len(z)
    assert mean == pytest.approx(labels.mean(), rel=1e-6)
    for predicted, observed, weight in zip(found.predicted, found.observed, found.weight, strict=True):
        assert abs(predicted - observed) < 5 * math.sqrt(predicted * (1 - predicted) / weight)


def test_one_example_is_a_group_of_its_own_and_no_figure() -> None:
    quality = quality_of(np.array([0.3], np.float32), np.array([1.0], np.float32))
    assert quality.reliability is not None
    assert quality.reliability.observed == (1.0,)
    assert "reliability" not in quality.figures()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 2), st.integers(0, 1)), min_size=1, max_size=40))
def test_gauc_is_the_weighted_mean_of_the_auc_of_each_group(rows: list[tuple[int, int, int]]) -> None:
    groups, scores, labels = (np.array(column) for column in zip(*rows, strict=True))
    by_group = []
    for group in set(groups.tolist()):
        own = groups == group
        if 0 < labels[own].mean() < 1:
            alone = Evaluation()
            alone.add(scores[own].astype(np.float32), labels[own].astype(np.float32))
            by_group.append((alone.quality().auc, own.sum()))
    evaluation = Evaluation()
    for half in np.array_split(np.arange(len(rows)), 2):
        evaluation.add(scores[half].astype(np.float32), labels[half].astype(np.float32), groups=groups[half])
    found = evaluation.quality().gauc
    if not by_group:
        assert found is None
        return
    assert found == pytest.approx(np.average([auc for auc, _ in by_group], weights=[count for _, count in by_group]))


def test_examples_without_a_group_are_in_no_group() -> None:
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=200).astype(np.float32), (rng.random(200) < 0.5).astype(np.float32)
    groups = rng.integers(0, 5, 200)
    groups[rng.random(200) < 0.6] = NO_GROUP
    known = groups != NO_GROUP
    whole, part = Evaluation(), Evaluation()
    whole.add(logits, labels, groups=groups)
    part.add(logits[known], labels[known], groups=groups[known])
    assert whole.quality(top_k=[3]).ranking == part.quality(top_k=[3]).ranking
