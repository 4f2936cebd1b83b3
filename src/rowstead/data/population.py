"""`Population`: the distributions of ids, bag lengths and dense values of a synthetic log."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rowstead.data import draws
from rowstead.plan.traffic import mean_lengths
from rowstead.spec.data import SynthSpec

_LENGTHS, _RANKS, _IDS, _DENSE = range(4)


class Population:
    """Draws the columns of a log; every method is a pure function of the spec and the rows.

    Letters: R rows from `start` on, F sparse columns, Fd dense columns, nnz ids of one feature in those rows. A rank is an id's
    position in the order of popularity.
    """

    def __init__(self, spec: SynthSpec) -> None:
        self.spec = spec
        self.num_ids = spec.num_ids if isinstance(spec.num_ids, tuple) else (spec.num_ids,) * spec.num_sparse
        means = mean_lengths(spec)
        self.mean_ids = np.clip(np.rint(means), 1.0, float(spec.max_ids)) if spec.lengths == "fixed" else means
        """Mean ids per example [F], float64."""
        knots = {n: draws.zipf_knots(n, spec.skew) for n in sorted(set(self.num_ids))}
        self.knots = [knots[n] for n in self.num_ids]
        features = range(spec.num_sparse)
        self._length_keys = [draws.key_of(spec.seed, _LENGTHS, f) for f in features]
        self._rank_keys = [draws.key_of(spec.seed, _RANKS, f) for f in features]
        self._scrambling = [draws.scrambling(draws.key_of(spec.seed, _IDS, f), self.num_ids[f]) for f in features]
        self._dense_key = draws.key_of(spec.seed, _DENSE)
        self._thresholds = (
            [draws.poisson_thresholds(mean, spec.max_ids) for mean in self.mean_ids] if spec.lengths == "poisson" else []
        )

    def offsets(self, feature: int, start: int, num_rows: int) -> NDArray[np.int64]:
        """Bag offsets of one feature, [R + 1]."""
        if not self._thresholds:
            return np.arange(num_rows + 1) * np.int64(self.mean_ids[feature])
        offsets = np.empty(num_rows + 1, np.int64)
        draws.draw_lengths(self._length_keys[feature], start, self._thresholds[feature], offsets)
        return offsets

    def ranks(self, feature: int, start: int, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """The ranks of the ids in those bags, [nnz]."""
        ranks = np.empty(offsets[-1], np.int64)
        draws.draw_ranks(self._rank_keys[feature], start, self.knots[feature], offsets, ranks)
        return ranks

    def ids(self, feature: int, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """The ids in [0, num_ids) with these ranks, [nnz]; similar ranks have distant ids."""
        ids = np.empty_like(ranks)
        draws.scramble(ranks, *self._scrambling[feature], self.num_ids[feature], ids)
        return ids

    def hidden_dense(self, start: int, num_rows: int) -> NDArray[np.float32]:
        """Dense values for the teacher: mean 0, deviation 1, float32 [R, Fd]."""
        values = np.empty((num_rows, self.spec.num_dense), np.float32)
        draws.draw_dense(self._dense_key, start, values)
        return values

    def shown_dense(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        """Dense values of the log: as `hidden_dense`, with exp applied to the skewed columns, float32 [R, Fd]."""
        if self.spec.num_skewed_dense == 0:
            return hidden
        shown = hidden.copy()
        draws.skew_dense(hidden, self.spec.num_skewed_dense, shown)
        return shown
