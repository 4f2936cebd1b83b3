"""`Teacher`: the hidden model that generates the labels of a synthetic log.

Every id of a feature has a vector of K numbers computed from a hash, so the teacher needs no table. A feature's vector p_f is the
sum over the ids of the bag, standardised to mean 0 and deviation 1; the dense columns x are projected to
one number y and K numbers z. Then

    log-odds = bias + [ y + sum_f <a_f, p_f> ] + [ sum_(f,g) <p_f, p_g> + sum_f <p_f, z> + y z_0 ]

with a weight on every term. A linear model can learn only the first bracket; the second needs products. A DLRM with dot
interaction and sum pooling can represent both. Rare ids have little influence: the vector of rank r is scaled by 1 / (1 + r / TAIL),
since ids seen a few times cannot be learned, and a log whose best NE no model can approach cannot rank models.

Letters: R rows, F sparse columns, Fd dense columns, K latent numbers, P pairs.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, uint64
from numpy.typing import NDArray

from rowstead.data import draws
from rowstead.data.draws import at, exponential
from rowstead.data.population import Population
from rowstead.spec.data import ConversionSpec

TAIL = 20.0
"""Rank at which an id has half the influence of the most popular one."""
LIMIT = 12.0
"""Log-odds are clipped to this, so that no FP32 probability is 0 or 1."""
STEPS = 4096
"""Steps of a drifting teacher's rotation."""
_SAMPLE_START = 1 << 62
"""First row of the calibration sample: far beyond any log."""
_SAMPLE_IDS = 6_000_000
"""About this many ids are drawn for calibration."""
_DENSE_SHARE = 0.25
"""Of the linear part's variance, when there are also sparse columns."""
_PRODUCT_SHARES = (0.65, 0.25, 0.10)
"""Of the interaction part's variance: sparse x sparse, dense x sparse, dense x dense."""
_SQRT_3 = 1.7320508075688772

_VARIANT = 1000
"""Between the purposes of a teacher's draws and those of another one."""
_LATENT, _TURNED, _IMPORTANCE, _LINEAR, _DENSE, _DENSE_TURNED = range(100, 106)

Array = NDArray[np.float64]


class Teacher:
    """Computes its weights once from the spec; `pool` and `click_probability` are then pure functions of the rows."""

    def __init__(self, population: Population, variant: int = 0) -> None:
        """Another `variant` has other weights over the same vectors."""
        self.population, self._variant = population, variant
        spec = self.spec = population.spec
        features = range(spec.num_sparse)
        angle = spec.drift * np.pi / 2 * np.arange(STEPS) / (STEPS - 1)
        self._turn = _round_to_fp32(np.stack([np.cos(angle), np.sin(angle)], axis=1))
        self._latent_keys = [draws.key_of(spec.seed, _LATENT, f) for f in features]
        self._turned_keys = [draws.key_of(spec.seed, _TURNED, f) for f in features]
        self._gains = [1.0 / math.sqrt(population.mean_ids[f] * _mean_square_influence(population.knots[f])) for f in features]
        self._dense_maps = np.stack([self._dense_map(_DENSE), self._dense_map(_DENSE_TURNED)])
        self._set_shapes()
        self._calibrate()

    def pool(self, feature: int, ranks: NDArray[np.int64], offsets: NDArray[np.int64], turn: Array, out: Array) -> None:
        """Sum the vectors of the bags' ids into out [R, K], for one feature; turn [R, 2] comes from `turn`."""
        keys = (self._latent_keys[feature], self._turned_keys[feature])
        _pool(*keys, self._gains[feature], TAIL, self.spec.drift > 0, ranks, offsets, turn, out)

    def turn(self, start: int, num_rows: int) -> Array:
        """Cosine and sine [R, 2] of the teacher's rotation at each row."""
        total = self.spec.num_train_samples + self.spec.num_eval_samples + self.spec.num_test_samples
        if self.spec.drift == 0:
            return np.broadcast_to(self._turn[0], (num_rows, 2))
        rows = np.arange(start, start + num_rows)
        return np.asarray(self._turn[np.minimum(rows * (STEPS - 1) // max(total - 1, 1), STEPS - 1)])

    def click_probability(self, pooled: Array, dense: NDArray[np.float32], turn: Array) -> NDArray[np.float32]:
        """True click probability float32 [R] from pooled [F, R, K] and the hidden dense values [R, Fd]."""
        parts = self._parts(pooled, dense, turn)
        return probability(np.asarray(self._bias + self._scales[0] * parts[0] + self._scales[1] * parts[1]))

    def log_odds(self, pooled: Array, dense: NDArray[np.float32], turn: Array) -> Array:
        """Log-odds [R] without the bias."""
        parts = self._parts(pooled, dense, turn)
        return np.asarray(self._scales[0] * parts[0] + self._scales[1] * parts[1])

    def _key(self, purpose: int, number: int | None = None) -> np.uint64:
        """The key of the draws for a purpose."""
        own = purpose + _VARIANT * self._variant
        return draws.key_of(self.spec.seed, own) if number is None else draws.key_of(self.spec.seed, own, number)

    def _parts(self, pooled: Array, dense: NDArray[np.float32], turn: Array) -> Array:
        """The linear and the interaction part before calibration, [2, R]."""
        out = np.empty((2, dense.shape[0]))
        _log_odds_parts(
            pooled,
            dense,
            turn,
            self.spec.drift > 0,
            self._means,
            self._dense_maps,
            self._linear,
            self._pairs,
            self._pair_weights,
            self._components,
            self._cross,
            self._dense_weights,
            out,
        )
        return out

    def _dense_map(self, purpose: int) -> Array:
        """Unit vectors [1 + K, Fd]: the first projects the dense columns to y, the others to z; columns differ in importance."""
        spec = self.spec
        shape = (1 + spec.latent, spec.num_dense)
        signs = 2.0 * draws.uniforms(self._key(purpose), shape[0] * shape[1]).reshape(shape) - 1.0
        order = draws.permutation(self._key(_IMPORTANCE, 1), spec.num_dense)
        return _unit_rows(signs / np.sqrt(1.0 + order))

    def _set_shapes(self) -> None:
        """Choose the pairs and the relative weights of all terms, so that their variances have the wanted shares."""
        spec, count, width = self.spec, self.spec.num_sparse, self.spec.latent
        order = draws.permutation(self._key(_IMPORTANCE, 0), count)
        importance = 1.0 / np.sqrt(1.0 + order)
        self._means = np.zeros((2, count, width))
        directions = 2.0 * draws.uniforms(self._key(_LINEAR), count * width).reshape(count, width) - 1.0
        has_dense = spec.num_dense > 0
        dense_share = (_DENSE_SHARE if count else 1.0) if has_dense else 0.0
        self._linear = _unit_rows(directions) * _unit(importance)[:, None] * math.sqrt(1.0 - dense_share)

        # Few pairs with decreasing weights: a model cannot learn a signal that is spread thinly over many products.
        by_importance = np.argsort(order)
        num_pairs = (count + 2) // 3 if count > 1 else 0
        self._pairs = np.stack([by_importance, np.roll(by_importance, -1)], axis=1)[:num_pairs]
        present = (len(self._pairs) > 0, has_dense and count > 0, has_dense)
        shares = [share if here else 0.0 for share, here in zip(_PRODUCT_SHARES, present, strict=True)]
        falling = 1.0 / (1.0 + np.arange(num_pairs))
        self._pair_weights = _unit(falling) * math.sqrt(shares[0])
        self._cross = _unit(1.0 / (1.0 + order)) * math.sqrt(shares[1])
        self._components = _unit(0.5 ** np.arange(width))
        self._dense_weights = np.array([math.sqrt(dense_share), math.sqrt(shares[2])])

    def _calibrate(self) -> None:
        """Fit means, scales and bias on a fixed sample, so that signal, share and click rate match the spec."""
        spec = self.spec
        rows = int(np.clip(_SAMPLE_IDS // max(1.0, self.population.mean_ids.sum() + spec.num_dense), 512, 32_768))
        pooled = np.zeros((2, spec.num_sparse, rows, spec.latent))
        turns = [np.broadcast_to(np.array(turn), (rows, 2)) for turn in ((1.0, 0.0), (0.0, 1.0))]
        for f in range(spec.num_sparse):
            offsets = self.population.offsets(f, _SAMPLE_START, rows)
            ranks = self.population.ranks(f, _SAMPLE_START, offsets)
            for side in range(2 if spec.drift > 0 else 1):
                self.pool(f, ranks, offsets, turns[side], pooled[side, f])
        self._means = _round_to_fp32(pooled.mean(axis=2))
        linear, products = self._parts(pooled[0], self.population.hidden_dense(_SAMPLE_START, rows), turns[0])
        share = spec.interaction_share if products.std() > 1e-9 else 0.0
        scales = np.array([math.sqrt(1.0 - share), math.sqrt(share)]) / np.maximum([linear.std(), products.std()], 1e-9)
        spread = (scales[0] * linear + scales[1] * products).std()
        self._scales = _round_to_fp32(scales * spec.signal / max(spread, 1e-9))
        log_odds = self._scales[0] * linear + self._scales[1] * products
        self.sample = log_odds
        """Log-odds of the calibration sample, without the bias."""
        self._bias = float(np.float32(_bias_for(log_odds, spec.click_rate)))


class ConversionTeacher:
    """The hidden model of conversions: log-odds that are in part those of the click, and in part those of another teacher."""

    def __init__(self, click: Teacher, spec: ConversionSpec) -> None:
        self._click, self._own = click, Teacher(click.population, variant=1)
        # Of the other teacher only what does not correlate with the click, so that the correlation is the one that is wanted.
        one, other = click.sample - click.sample.mean(), self._own.sample - self._own.sample.mean()
        common = float((one * other).mean()) / max(float((one * one).mean()), 1e-18)
        gains = [
            1 / max(float(one.std()), 1e-9),
            math.sqrt(1.0 - spec.correlation**2) / max(float((other - common * one).std()), 1e-9),
        ]
        shares = np.array([spec.correlation * gains[0] - common * gains[1], gains[1]])
        self._shares = _round_to_fp32(shares * click.spec.signal)
        mixed = self._shares[0] * click.sample + self._shares[1] * self._own.sample
        self._bias = float(np.float32(_bias_for(mixed, spec.rate)))

    def probability(self, pooled: Array, dense: NDArray[np.float32], turn: Array) -> NDArray[np.float32]:
        """True probability float32 [R] that an example converts if it is clicked; arguments as of `Teacher.click_probability`."""
        log_odds = [teacher.log_odds(pooled, dense, turn) for teacher in (self._click, self._own)]
        return probability(np.asarray(self._bias + self._shares[0] * log_odds[0] + self._shares[1] * log_odds[1]))


def probability(log_odds: Array) -> NDArray[np.float32]:
    """Probabilities float32 [R] of log-odds [R]."""
    out = np.empty(log_odds.size, np.float32)
    _sigmoid(log_odds, out)
    return out


def _round_to_fp32(values: Array) -> Array:
    """FP64 values rounded to FP32, which hides differences between machines in the last bits of sums."""
    return np.asarray(values.astype(np.float32).astype(np.float64))


def _unit(vector: NDArray[np.floating]) -> Array:
    """A vector scaled to length 1."""
    return np.asarray(_unit_rows(np.asarray(vector, np.float64)[None])[0])


def _unit_rows(matrix: Array) -> Array:
    """Rows scaled to length 1."""
    return np.asarray(matrix / np.sqrt(np.maximum((matrix * matrix).sum(axis=1, keepdims=True), 1e-30)))


def _mean_square_influence(knots: Array) -> float:
    """Mean of the squared scale of ids, weighted by their frequency."""
    ranks = (knots[1:] + knots[:-1]) / 2 - 1.0
    return float(np.mean((TAIL / (TAIL + ranks)) ** 2))


def _bias_for(log_odds: Array, click_rate: float) -> float:
    """Find the bias that gives log-odds [R] this mean probability, by bisection."""
    low, high = -30.0, 30.0
    out = np.empty(log_odds.size, np.float32)
    for _ in range(40):
        middle = (low + high) / 2
        _sigmoid(log_odds + middle, out)
        low, high = (middle, high) if out.mean(dtype=np.float64) < click_rate else (low, middle)
    return (low + high) / 2


@njit(nogil=True, cache=True)
def _pool(key, turned_key, gain, tail, turning, ranks, offsets, turn, out):  # type: ignore[no-untyped-def]
    """Fill out [R, K] with the sums over each bag of hashed, rank-scaled vectors, each of deviation `gain` * scale."""
    width = out.shape[1]
    step = 2.0 * _SQRT_3 / 65536.0
    mask = uint64(0xFFFF)
    words = (width + 3) // 4
    for r in range(offsets.size - 1):
        for k in range(width):
            out[r, k] = 0.0
        cosine, sine = turn[r, 0], turn[r, 1]
        for i in range(offsets[r], offsets[r + 1]):
            rank = ranks[i]
            influence = gain * step * tail / (tail + rank)
            for w in range(words):
                word = at(key, rank * words + w)
                other = at(turned_key, rank * words + w) if turning else uint64(0)
                for k in range(4 * w, min(4 * w + 4, width)):
                    value = np.float64(word & mask) - 32767.5
                    word >>= uint64(16)
                    if turning:
                        value = cosine * value + sine * (np.float64(other & mask) - 32767.5)
                        other >>= uint64(16)
                    out[r, k] += influence * value


@njit(nogil=True, cache=True)
def _log_odds_parts(  # type: ignore[no-untyped-def]
    pooled, dense, turn, turning, means, dense_maps, linear, pairs, pair_weights, components, cross, dense_weights, out
):
    """Fill out [2, R] with the linear and the interaction part; linear [F, K], means [2, F, K], dense_maps [2, 1 + K, Fd]."""
    num_features, num_rows, width = pooled.shape
    p = np.empty((num_features, width))
    z = np.empty(1 + width)
    for r in range(num_rows):
        for k in range(1 + width):
            total, turned = 0.0, 0.0
            for j in range(dense.shape[1]):
                total += dense_maps[0, k, j] * dense[r, j]
            if turning:
                for j in range(dense.shape[1]):
                    turned += dense_maps[1, k, j] * dense[r, j]
                total = turn[r, 0] * total + turn[r, 1] * turned
            z[k] = total
        plain = dense_weights[0] * z[0]
        product = dense_weights[1] * z[0] * z[1]
        for f in range(num_features):
            dot = 0.0
            for k in range(width):
                p[f, k] = pooled[f, r, k] - turn[r, 0] * means[0, f, k] - turn[r, 1] * means[1, f, k]
                plain += linear[f, k] * p[f, k]
                dot += components[k] * p[f, k] * z[1 + k]
            product += cross[f] * dot
        for i in range(pairs.shape[0]):
            dot = 0.0
            for k in range(width):
                dot += components[k] * p[pairs[i, 0], k] * p[pairs[i, 1], k]
            product += pair_weights[i] * dot
        out[0, r], out[1, r] = plain, product


@njit(nogil=True, cache=True)
def _sigmoid(log_odds, out):  # type: ignore[no-untyped-def]
    """Fill out float32 [R] with probabilities."""
    for r in range(log_odds.size):
        x = min(max(log_odds[r], -LIMIT), LIMIT)
        out[r] = 1.0 / (1.0 + exponential(-x))
