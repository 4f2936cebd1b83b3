"""GAUC, recall and NDCG within groups against scikit-learn and plain versions, one group at a time."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.metrics import ndcg_score, roc_auc_score

from rowstead.training.metrics import Evaluation
from rowstead.training.ranking_metrics import GroupedExamples, Ranking

TOP_K = (1, 2, 3, 10)


def ranking_of(
    scores: NDArray[np.float32], labels: NDArray[np.float64], groups: NDArray[np.int64], *, max_samples: int = 10**6
) -> Ranking:
    examples = GroupedExamples(max_samples)
    for part in np.array_split(np.arange(len(scores)), 3):
        examples.add(scores[part], labels[part], 1 - labels[part], groups[part])
    found = examples.measure(TOP_K)
    assert found is not None
    return found


def recall_of_all_orders(scores: NDArray[np.float32], labels: NDArray[np.float64], k: int) -> float:
    """The mean of recall over all orders of examples that do not rank a lower score first."""
    recalls = [
        labels[list(order[:k])].sum() / labels.sum()
        for order in itertools.permutations(range(len(scores)))
        if (np.diff(scores[list(order)]) <= 0).all()
    ]
    return float(np.mean(recalls))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 2), st.sampled_from([0.0, 0.0, 1.0, 0.5])), min_size=1, max_size=40)
)
def test_ndcg_is_scikit_learns_of_each_group_with_ties(rows: list[tuple[int, int, float]]) -> None:
    groups, scores, labels = (np.array(column) for column in zip(*rows, strict=True))
    found = ranking_of(scores.astype(np.float32), labels, groups)
    by_k: dict[int, list[float]] = {k: [] for k in TOP_K}
    for group in set(groups.tolist()):
        own = groups == group
        if labels[own].sum() == 0:
            continue
        for k in TOP_K:
            # scikit-learn refuses a ranking of one; its NDCG is 1
            ndcg = ndcg_score(labels[own][None], scores[own][None].astype(float), k=k) if own.sum() > 1 else 1.0
            by_k[k].append(ndcg)
    assert found.num_groups == len(by_k[1])
    assert found.ndcg == {k: pytest.approx(np.mean(values)) for k, values in by_k.items() if values}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 1), st.integers(0, 1)), min_size=1, max_size=9))
def test_recall_is_the_mean_over_all_orders_of_equal_scores(rows: list[tuple[int, int, int]]) -> None:
    groups, scores, labels = (np.array(column) for column in zip(*rows, strict=True))
    found = ranking_of(scores.astype(np.float32), labels.astype(float), groups)
    own = [groups == group for group in set(groups.tolist())]
    for k in TOP_K:
        recalls = [recall_of_all_orders(scores[o], labels[o].astype(float), k) for o in own if labels[o].sum() and o.sum() < 8]
        if len(recalls) == found.num_groups and recalls:
            assert found.recall[k] == pytest.approx(np.mean(recalls))


def test_gauc_is_scikit_learns_auc_weighted_by_the_examples_of_each_group() -> None:
    random = np.random.default_rng(1)
    groups, scores = random.integers(0, 200, 5000), random.normal(size=5000).round(1).astype(np.float32)
    labels = (random.random(5000) < 1 / (1 + np.exp(-scores))).astype(float)
    aucs = []
    for group in set(groups.tolist()):
        own = groups == group
        if 0 < labels[own].mean() < 1:
            aucs.append((roc_auc_score(labels[own], scores[own]), own.sum()))
    found = ranking_of(scores, labels, groups)
    assert found.gauc == pytest.approx(np.average([auc for auc, _ in aucs], weights=[count for _, count in aucs]))


def test_examples_of_weight_0_are_not_ranked_and_downsampled_negatives_keep_their_gain() -> None:
    logits = np.array([3.0, 2.0, 1.0], np.float32)
    labels, weights = np.array([1.0, 0.0, 1.0], np.float32), np.array([0.0, 2.0, 5.0], np.float32)
    evaluation = Evaluation(negative_keep_rate=0.25)
    evaluation.add(logits, labels, weights, groups=np.zeros(3, np.int64))
    ranking = evaluation.quality(top_k=(1, 2)).ranking
    assert ranking is not None
    assert ranking.recall == {1: 0.0, 2: 1.0}
    assert ranking.ndcg == {1: 0.0, 2: pytest.approx(1 / math.log2(3))}


def test_a_long_set_keeps_a_random_share_of_its_groups_whole() -> None:
    random = np.random.default_rng(2)
    groups = random.integers(0, 2000, 60_000)
    labels = (random.random(60_000) < 0.3).astype(float)
    scores = (random.normal(size=60_000) + labels).astype(np.float32)
    everything, part = ranking_of(scores, labels, groups), ranking_of(scores, labels, groups, max_samples=20_000)
    assert everything.group_share == 1
    assert part.group_share == 0.25
    assert 350 < part.num_groups < 650
    assert part.recall[3] == pytest.approx(everything.recall[3], abs=0.02)
    assert part.gauc == pytest.approx(everything.gauc, abs=0.02)
    assert "ranked_group_share" in part.figures()
    assert "ranked_group_share" not in everything.figures()
    # the same groups, whichever order their examples come in
    order = random.permutation(60_000)
    again = ranking_of(scores[order], labels[order], groups[order], max_samples=20_000)
    assert again.ndcg == {k: pytest.approx(value, rel=1e-12) for k, value in part.ndcg.items()}


def test_one_group_that_is_longer_than_the_limit_leaves_no_ranking_and_no_warning() -> None:
    examples = GroupedExamples(10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        examples.add(np.zeros(50, np.float32), np.ones(50), np.zeros(50), np.full(50, 7))
        assert examples.measure((10,)) is None


def test_groups_without_a_positive_leave_no_recall() -> None:
    found = ranking_of(np.zeros(4, np.float32), np.zeros(4), np.arange(4))
    assert (found.recall, found.ndcg, found.gauc, found.figures()) == ({}, {}, None, {})
