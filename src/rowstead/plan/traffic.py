"""How ids fall on rows: ids an example, distinct rows of a batch, and the share of accesses that a cache of hot rows serves."""

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
"""Ranks that are counted one by one; the others are counted in bins."""
NUM_BINS = 256


@dataclass(frozen=True)
class Popularity:
    """The law of one feature's ids: how many there are, and the exponent of their Zipf law."""

    num_ids: int
    skew: float


def mean_ids(spec: RunSpec) -> tuple[float, ...]:
    """Mean ids an example of each sparse feature, after truncation; 1 where the log's own lengths are not known."""
    features = spec.features.expanded_sparse()
    synth = spec.data.synth
    if synth is None:
        return tuple(1.0 for _ in features)
    of_column = {f"sparse_{place}": mean for place, mean in enumerate(_mean_lengths(synth))}
    means = []
    for feature in features:
        mean = of_column.get(feature.column or feature.name, 1.0)
        cap = min(feature.max_ids or synth.max_ids, synth.max_ids)
        means.append(float(truncated_poisson(mean, cap)) if synth.lengths == "poisson" else float(min(mean, cap)))
    return tuple(means)


def popularities(spec: RunSpec) -> tuple[Popularity, ...]:
    """The law of the ids of each sparse feature; even over the rows of its table where the log's own law is not known."""
    features = spec.features.expanded_sparse()
    synth = spec.data.synth
    if synth is None:
        rows = {place: table.num_rows for table in spec.tables for place in table.features}
        return tuple(Popularity(rows[place], 0.0) for place in range(len(features)))
    counts = synth.num_ids if isinstance(synth.num_ids, tuple) else (synth.num_ids,) * synth.num_sparse
    of_column = {f"sparse_{place}": count for place, count in enumerate(counts)}
    return tuple(Popularity(of_column.get(f.column or f.name, max(counts)), synth.skew) for f in features)


def _mean_lengths(synth: SynthSpec) -> Array:
    """Mean ids an example of each column before truncation, as the log that we draw has them; only, `fixed` lengths are not rounded."""
    count, cap = synth.num_sparse, float(synth.max_ids)
    if isinstance(synth.mean_ids, tuple):
        means = np.minimum(np.array(synth.mean_ids, np.float64), cap)
    else:
        means = _power_law(synth.mean_ids, synth.length_power, count, cap)
        if synth.lengths == "fixed" and synth.length_power > 0:
            means = np.diff(np.rint(np.cumsum(means)), prepend=0.0)  # whole numbers with the same sum
        means = means[_shuffled(synth.seed, count)]
    return means


def _power_law(mean: float, power: float, count: int, cap: float) -> Array:
    """Falling numbers proportional to place^-power, of this mean, none above `cap`."""
    shape = np.arange(1, count + 1, dtype=np.float64) ** -power
    means = np.zeros(count)
    capped = 0
    while capped < count:  # what the cap takes from the first goes to the others
        means[:capped] = cap
        means[capped:] = max(mean * count - capped * cap, 0.0) * shape[capped:] / shape[capped:].sum()
        if means[capped] <= cap:
            break
        capped += 1
    return np.minimum(means, cap)


_GOLDEN, _WORD, _SHUFFLE = 0x9E3779B97F4A7C15, (1 << 64) - 1, 4


def _shuffled(seed: int, count: int) -> NDArray[np.int64]:
    """The order in which the log gives lengths to columns: `data/draws.py` without its compiled parts, which planning does not load."""
    key = _mixed(_mixed(seed) + (_SHUFFLE + 1) * _GOLDEN)
    drawn = [(_mixed(key + (place + 1) * _GOLDEN) >> 11) / (1 << 53) for place in range(count)]
    return np.argsort(np.array(drawn), kind="stable")


def _mixed(word: int) -> int:
    """SplitMix64's finaliser."""
    word &= _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def truncated_poisson(mean: float, cap: int) -> float:
    """Mean of a Poisson number of which no more than `cap` count."""
    if mean + 10 * math.sqrt(mean) + 10 < cap:
        return mean
    chance, left, total = math.exp(-mean), 1.0, 0.0
    for length in range(cap):
        left -= chance
        total += max(left, 0.0)  # the chance of more than `length`
        chance *= mean / (length + 1)
    return total


@functools.lru_cache(maxsize=512)
def id_bins(popularity: Popularity) -> tuple[Array, Array]:
    """Ids in bins of like popularity, the most popular first: how many there are in each, and the chance of one of them."""
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
    """How many different ids turn up in so many draws, on average."""
    counts, chances = id_bins(popularity)
    return float((counts * -np.expm1(num_draws * np.log1p(-np.minimum(chances, 1 - 1e-12)))).sum())


def rows_of_ids(num_ids: float, num_rows: int) -> float:
    """On how many different rows of a table so many different ids fall by chance."""
    return min(num_ids, num_rows * -math.expm1(num_ids * math.log1p(-1 / num_rows))) if num_rows > 1 else min(num_ids, 1.0)


@functools.lru_cache(maxsize=4096)
def hit_share(popularity: Popularity, num_kept: float) -> float:
    """Share of the accesses that go to the `num_kept` most popular ids: what a cache that keeps them serves."""
    counts, chances = id_bins(popularity)
    ends = np.cumsum(counts)
    served = np.clip(num_kept - (ends - counts), 0.0, counts)
    return float(min((served * chances).sum(), 1.0))
