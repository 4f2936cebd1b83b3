"""The log of drifting interests: its rates are what it says, and no model that does not see the order does better than is said."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowstead.data.encode import Encoder
from rowstead.data.interests import InterestsLog
from rowstead.data.source import Source
from rowstead.data.synth import SynthSource
from rowstead.data.transforms import DenseTransforms
from rowstead.spec.data import InterestsSpec
from rowstead.spec.errors import DataError, SpecError
from rowstead.spec.features import FeaturesSpec, SparseFeatureSpec, tables_of
from tests.data.source_contract import NUM_SAMPLES, SourceContract

SPEC = InterestsSpec(
    num_train_samples=NUM_SAMPLES,
    num_eval_samples=60_000,
    num_items=60,
    num_topics=6,
    max_history=20,
    click_rates=(0.7, 0.1, 0.4),
)
LOG = InterestsLog(SPEC)
EVERY = LOG.rows(0, LOG.num_rows)


class TestInterestsSource(SourceContract):
    @pytest.fixture
    def source(self) -> Source:
        features = FeaturesSpec(sparse=tuple(SparseFeatureSpec(name=name, num_rows=60) for name in LOG.sparse_columns))
        return SynthSource(LOG, Encoder(features, tables_of(features, width=4), DenseTransforms.learn(features)), "train")


def topics_of(row: int) -> tuple[int, list[int]]:
    """The topic of the item, and those of its history."""
    items, history = EVERY.ids
    first, last = EVERY.offsets[1][row : row + 2]
    return int(items[row]) % 6, [int(item) % 6 for item in history[first:last]]


def test_rates_follow_from_the_topic_of_the_item_and_those_of_the_history() -> None:
    assert EVERY.true_p is not None
    unordered = LOG.unordered_p(0, LOG.num_rows)
    for row in range(3000):
        topic, history = topics_of(row)
        assert len(set(history)) <= 2
        assert history == sorted(history, key=history.index)  # one topic after the other
        recent, past = history[-1:] == [topic], topic in history
        assert EVERY.true_p[row] == np.float32(0.7 if recent else 0.1 if past else 0.4)
        known = 0.4 if not past else 0.7 if len(set(history)) == 1 else 0.4
        assert unordered[row] == pytest.approx(known)


def test_neither_order_of_two_topics_is_likelier_however_many_items_each_has() -> None:
    larger, smaller = [], []
    for row in range(LOG.num_rows):
        topic, history = topics_of(row)
        if topic in history and len(set(history)) == 2 and history.count(topic) * 2 != len(history):
            (larger if history.count(topic) * 2 > len(history) else smaller).append(history[-1] == topic)
    for found in (larger, smaller):
        assert len(found) > 1000
        assert np.mean(found) == pytest.approx(0.5, abs=4 * 0.5 / len(found) ** 0.5)


def test_lengths_are_skewed_and_labels_have_the_rates() -> None:
    lengths = np.diff(EVERY.offsets[1])
    assert (lengths == 0).mean() == pytest.approx(0.05, abs=0.005)
    assert lengths.max() == 20
    assert np.median(lengths) < lengths.mean() < 8
    assert EVERY.labels is not None
    assert EVERY.true_p is not None
    for rate in (0.1, 0.4, 0.7):
        assert EVERY.labels[EVERY.true_p == np.float32(rate)].mean() == pytest.approx(rate, abs=0.02)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2000), st.integers(0, 2000))
def test_rows_drawn_separately_are_the_rows_drawn_in_sequence(one: int, other: int) -> None:
    start, stop = min(one, other), max(one, other)
    part = LOG.rows(start, stop, sparse=["history", "item"])
    first, last = EVERY.offsets[1][start], EVERY.offsets[1][stop]
    np.testing.assert_array_equal(part.ids[0], EVERY.ids[1][first:last])
    np.testing.assert_array_equal(part.offsets[0], EVERY.offsets[1][start : stop + 1] - first)
    np.testing.assert_array_equal(part.ids[1], EVERY.ids[0][start:stop])
    np.testing.assert_array_equal(part.labels, EVERY.labels[start:stop])  # type: ignore[index]


def test_an_unknown_column_and_rows_outside_the_log_are_refused() -> None:
    with pytest.raises(DataError, match="did you mean `history`"):
        LOG.rows(0, 1, sparse=["histori"])
    with pytest.raises(DataError, match="out of range"):
        LOG.rows(0, LOG.num_rows + 1)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"num_topics": 2}, "num_topics: must be at least 3"),
        ({"num_items": 1001}, "num_items: must be a multiple of num_topics, 20"),
        ({"click_rates": (0.5, 0.5)}, "click_rates: must be three numbers"),
    ],
)
def test_a_log_that_cannot_be_is_refused(change: dict[str, object], problem: str) -> None:
    with pytest.raises(SpecError) as refused:
        InterestsSpec(**change)  # type: ignore[arg-type]
    assert problem in str(refused.value)
