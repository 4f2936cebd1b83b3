"""How well examples are ranked within groups, such as users: GAUC, recall at k and NDCG at k."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rowstead.data.hashing import mix_ids

Floats = NDArray[np.float64]

MAX_GROUPED_SAMPLES = 10_000_000
"""Examples that are kept, 28 bytes each; beyond, all examples of a random share of the groups."""
_MAX_HALVINGS = 40
"""So often the share of groups is halved at most: even one group that is larger than memory ends."""


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Means over groups; None where no group has what a measure needs."""

    num_groups: int
    """Groups with a label above 0, over which recall and NDCG are means."""
    group_share: float
    """The share of all groups that were looked at: 1, or less where the set was too long to keep."""
    gauc: float | None
    """The mean AUC of groups with both classes, weighted by their examples."""
    recall: Mapping[int, float]
    """By k: the share of a group's positives among its k highest predictions."""
    ndcg: Mapping[int, float]
    """By k: discounted gain of a group's k highest predictions over that of the best order."""

    def figures(self) -> dict[str, float]:
        """The measures by name."""
        found = {f"{name}_at_{k}": value for name in ("recall", "ndcg") for k, value in getattr(self, name).items()}
        found |= {"num_ranked_groups": self.num_groups} if found else {}
        return found if self.group_share == 1 else {**found, "ranked_group_share": self.group_share}


class GroupedExamples:
    """Collects scored examples with their groups, in bounded memory.

    All examples are kept up to `max_samples`. Beyond, a group stays if the hash of its id ends in so many zero bits, one more each time that
    the limit is reached: a random share of the groups, each with all of its examples, whichever order they come in.
    """

    def __init__(self, max_samples: int = MAX_GROUPED_SAMPLES) -> None:
        self._max_samples, self._halvings, self._num_kept = max_samples, 0, 0
        self._kept: list[tuple[NDArray[np.float32], Floats, Floats, NDArray[np.int64]]] = []

    def add(self, scores: NDArray[np.float32], positive: Floats, negative: Floats, groups: NDArray[np.int64]) -> None:
        """Add a batch [B]: scores, weights as a positive and as a negative, groups."""
        self._keep(scores, positive, negative, groups)
        while self._num_kept > self._max_samples and self._halvings < _MAX_HALVINGS:
            self._halvings += 1
            kept, self._kept, self._num_kept = self._kept, [], 0
            for part in kept:
                self._keep(*part)

    def _keep(self, scores: NDArray[np.float32], positive: Floats, negative: Floats, groups: NDArray[np.int64]) -> None:
        part = (scores, positive, negative, groups)
        if self._halvings:
            chosen = mix_ids(groups) & np.uint64((1 << self._halvings) - 1) == 0
            part = (scores[chosen], positive[chosen], negative[chosen], groups[chosen])
        self._kept.append(part)
        self._num_kept += len(part[0])

    def measure(self, top_k: Sequence[int] = (), *, negative_keep_rate: float = 1.0) -> Ranking | None:
        """The measures of all examples so far; None if there are none. `negative_keep_rate` is that of the weights of negatives."""
        if not self._num_kept:
            return None
        scores, positive, negative, groups = (np.concatenate([part[i] for part in self._kept]) for i in range(4))
        gauc = area_within_groups(scores, positive, negative, groups)
        weight = positive + negative * negative_keep_rate
        counts = weight > 0
        gains = positive[counts] / weight[counts]
        num_groups, recall, ndcg = rank_within_groups(scores[counts], gains, groups[counts], top_k)
        return Ranking(num_groups=num_groups, group_share=0.5**self._halvings, gauc=gauc, recall=recall, ndcg=ndcg)


def rank_within_groups(
    scores: NDArray[np.float32], gains: Floats, groups: NDArray[np.int64], top_k: Sequence[int]
) -> tuple[int, dict[int, float], dict[int, float]]:
    """The number of groups with a gain, and by k the means over them of recall and of NDCG.

    All are [n]. Examples of equal score share their positions: each has the mean gain of them, which is the expectation over their
    orders. Position p, from 0, is discounted by log2(p + 2).
    """
    order = np.lexsort((-scores, groups))
    scores, gains, groups = scores[order], gains[order], groups[order]
    opens_group = np.diff(groups, prepend=groups[:1] - 1) != 0
    group_of = np.cumsum(opens_group) - 1
    first_of = np.flatnonzero(opens_group)
    position = np.arange(len(groups)) - first_of[group_of]
    starts = np.flatnonzero(opens_group | (np.diff(scores, prepend=scores[:1]) != 0))
    num_tied = np.diff(np.append(starts, len(groups)))
    begin, end = position[starts], position[starts] + num_tied
    mean_gain = np.add.reduceat(gains, starts) / num_tied if len(starts) else gains
    total = np.bincount(group_of, weights=gains)
    best = gains[np.lexsort((-gains, group_of))]
    has_gain = total > 0
    recall: dict[int, float] = {}
    ndcg: dict[int, float] = {}
    for k in top_k if has_gain.any() else ():
        discounts = 1 / np.log2(np.arange(k) + 2)
        until = np.concatenate([[0.0], np.cumsum(discounts)])  # of all positions before
        first, last = np.minimum(begin, k), np.minimum(end, k)
        found = np.bincount(group_of[starts], weights=mean_gain * (last - first))
        gained = np.bincount(group_of[starts], weights=mean_gain * (until[last] - until[first]))
        ideal = np.bincount(group_of, weights=best * np.append(discounts, 0.0)[np.minimum(position, k)])
        recall[k] = float((found[has_gain] / total[has_gain]).mean())
        ndcg[k] = float((gained[has_gain] / ideal[has_gain]).mean())
    return int(has_gain.sum()), recall, ndcg


def area_within_groups(
    scores: NDArray[np.float32], positive: Floats, negative: Floats, groups: NDArray[np.int64]
) -> float | None:
    """The mean AUC of groups with positives and negatives, weighted by their total weight; None if there is no such group.

    All are [n]: the score of each example, its weight as a positive and as a negative, its group.
    """
    order = np.lexsort((scores, groups))
    scores, positive, negative, groups = scores[order], positive[order], negative[order], groups[order]
    opens_group = np.diff(groups, prepend=groups[:1] - 1) != 0
    opens = opens_group | (np.diff(scores, prepend=scores[:1]) != 0)
    value_of, starts = np.cumsum(opens) - 1, np.flatnonzero(opens)
    at_value = [np.bincount(value_of, weights=weight) for weight in (positive, negative)]
    group_of = np.cumsum(opens_group[starts]) - 1
    in_group = [np.bincount(group_of, weights=weight) for weight in at_value]
    below = np.cumsum(at_value[1]) - at_value[1]
    below -= (np.cumsum(in_group[1]) - in_group[1])[group_of]  # of the same group
    won = np.bincount(group_of, weights=at_value[0] * (below + 0.5 * at_value[1]))
    pairs = in_group[0] * in_group[1]
    mixed = pairs > 0
    if not mixed.any():
        return None
    return float(np.average(won[mixed] / pairs[mixed], weights=(in_group[0] + in_group[1])[mixed]))
