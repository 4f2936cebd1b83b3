"""How ids map to rows: ids per example, distinct rows of a batch, and the hit rate of a cache of hot rows."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rowstead.spec.data import SynthSpec
from rowstead.spec.run import RunSpec

Array = NDArray[np.float64]

NUM_HEAD = 256
"""Ranks with a bin of their own; the others share bins."""
NUM_BINS = 256


@dataclass(frozen=True)
class Popularity:
    """The id distribution of one feature: the number of ids, and the exponent of their Zipf law."""

    num_ids: int
    skew: float


def mean_ids(spec: RunSpec) -> tuple[float, ...]:
    """Mean ids per example of each sparse feature, after truncation; 1 where the log's lengths are unknown."""
    features = spec.features.expanded_sparse()
    synth, interests = spec.data.synth, spec.data.interests
    if interests is not None:
        return tuple(interests.mean_ids(feature.column or feature.name, feature.max_ids) for feature in features)
    if synth is None:
        return tuple(1.0 for _ in features)
    of_column = {f"sparse_{index}": mean for index, mean in enumerate(mean_lengths(synth))}
    means = []
    for feature in features:
        mean = of_column.get(feature.column or feature.name, 1.0)
        cap = min(feature.max_ids or synth.max_ids, synth.max_ids)
        means.append(float(truncated_poisson(mean, cap)) if synth.lengths == "poisson" else float(min(mean, cap)))
    return tuple(means)


def popularities(spec: RunSpec) -> tuple[Popularity, ...]:
    """The id distribution of each sparse feature; uniform over the rows of its table where the log's is unknown."""
    features = spec.features.expanded_sparse()
    synth = spec.data.synth
    if synth is None:
        rows = {index: table.num_rows for table in spec.tables for index in table.features}
        return tuple(Popularity(rows[index], 0.0) for index in range(len(features)))
    counts = synth.num_ids if isinstance(synth.num_ids, tuple) else (synth.num_ids,) * synth.num_sparse
    of_column = {f"sparse_{index}": count for index, count in enumerate(counts)}
    return tuple(Popularity(of_column.get(f.column or f.name, max(counts)), synth.skew) for f in features)


def mean_lengths(synth: SynthSpec) -> Array:
    """Mean ids per example of each column before truncation, as in the synthetic log, but `fixed` lengths are not rounded."""
    count, cap = synth.num_sparse, float(synth.max_ids)
    if isinstance(synth.mean_ids, tuple):
        means = np.minimum(np.array(synth.mean_ids, np.float64), cap)
    else:
        means = _power_law(synth.mean_ids, synth.length_power, count, cap)
        if synth.lengths == "fixed" and synth.length_power > 0:
            means = np.diff(np.rint(np.cumsum(means)), prepend=0.0)  # whole numbers with the same sum
        means = means[_shuffle(synth.seed, count)]
    return means


def _power_law(mean: float, power: float, count: int, cap: float) -> Array:
    """Decreasing numbers proportional to rank^-power, with this mean, none above `cap`."""
    shape = np.arange(1, count + 1, dtype=np.float64) ** -power
    means = np.zeros(count)
    capped = 0
    while capped < count:  # what the cap cuts off is distributed over the others
        means[:capped] = cap
        means[capped:] = max(mean * count - capped * cap, 0.0) * shape[capped:] / shape[capped:].sum()
        if means[capped] <= cap:
            break
        capped += 1
    return np.minimum(means, cap)


_GOLDEN, _WORD, _SHUFFLE = 0x9E3779B97F4A7C15, (1 << 64) - 1, 4


def _shuffle(seed: int, count: int) -> NDArray[np.int64]:
    """The order in which the synthetic log assigns lengths to columns: `data/draws.py` without its compiled parts."""
    key = _mix(_mix(seed) + (_SHUFFLE + 1) * _GOLDEN)
    drawn = [(_mix(key + (index + 1) * _GOLDEN) >> 11) / (1 << 53) for index in range(count)]
    return np.argsort(np.array(drawn), kind="stable")


def _mix(word: int) -> int:
    """SplitMix64's finaliser."""
    word &= _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def truncated_poisson(mean: float, cap: int) -> float:
    """Mean of min(X, cap) for a Poisson variable X."""
    if mean + 10 * math.sqrt(mean) + 10 < cap:
        return mean
    chance, left, total = math.exp(-mean), 1.0, 0.0
    for length in range(cap):
        left -= chance
        total += max(left, 0.0)  # the probability of more than `length`
        chance *= mean / (length + 1)
    return total


@functools.lru_cache(maxsize=512)
def id_bins(popularity: Popularity) -> tuple[Array, Array]:
    """Ids in bins of similar popularity, the most popular first: the number in each, and the probability of one of them."""
    num_ids, skew = popularity.num_ids, popularity.skew
    head = min(num_ids, NUM_HEAD)
    edges = np.arange(1, head + 2, dtype=np.float64)
    if num_ids > head:
        edges = np.concatenate([edges, np.unique(np.rint(np.geomspace(head + 1, num_ids + 1, NUM_BINS + 1)))[1:]])
    counts, logs = np.diff(edges), np.log(edges)
    power = 1 - skew  # the log draws from the density x^-skew, whose integral this is
    masses = np.diff(logs if abs(power) < 1e-9 else np.expm1(power * logs) / power)
    return counts, masses / (counts * masses.sum())


@functools.lru_cache(maxsize=4096)  # many tables are alike
def distinct_ids(popularity: Popularity, num_draws: float) -> float:
    """Expected number of distinct ids in so many draws."""
    counts, chances = id_bins(popularity)
    return float((counts * -np.expm1(num_draws * np.log1p(-np.minimum(chances, 1 - 1e-12)))).sum())


def rows_of_ids(num_ids: float, num_rows: int) -> float:
    """Expected number of distinct rows that so many distinct ids are hashed to."""
    return min(num_ids, num_rows * -math.expm1(num_ids * math.log1p(-1 / num_rows))) if num_rows > 1 else min(num_ids, 1.0)


@functools.lru_cache(maxsize=4096)
def hit_share(popularity: Popularity, num_kept: float) -> float:
    """Share of the accesses that go to the `num_kept` most popular ids: the hit rate of a cache that holds them."""
    counts, chances = id_bins(popularity)
    ends = np.cumsum(counts)
    served = np.clip(num_kept - (ends - counts), 0.0, counts)
    return float(min((served * chances).sum(), 1.0))
