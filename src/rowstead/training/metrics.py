"""Quality of predictions: NE, AUC, log loss, calibration, MSE; in float64, over any number of examples.

Measures within groups are in `ranking_metrics`, those of parts of the set in `segments`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rowstead.data.columns import NO_GROUP
from rowstead.spec.errors import DataError, TrainingError
from rowstead.spec.heads import HEADS, MEASURES, HeadKind, Measure
from rowstead.training.ranking_metrics import MAX_GROUPED_SAMPLES, GroupedExamples, Ranking
from rowstead.training.segments import Segments, SegmentSums

Floats = NDArray[np.float64]

EXACT_AUC_SAMPLES = 20_000_000
"""The AUC is exact up to this many examples; beyond, scores are binned and `auc_error` bounds the error."""
_BIN_BITS = 20
NUM_GROUPS = 15
"""Groups of about equal size in a calibration plot."""
_LOGIT_BINS, _MAX_LOGIT = 800, 10.0


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """The data of a calibration plot: examples grouped by rising prediction."""

    predicted: tuple[float, ...]
    """Mean prediction per group."""
    observed: tuple[float, ...]
    """Mean label per group."""
    weight: tuple[float, ...]
    """Total weight per group: the number of examples unless they are weighted."""


@dataclass(frozen=True, kw_only=True)
class Quality:
    """The measures of one evaluation; None where a measure needs both classes or a teacher and the log has none."""

    num_samples: int
    mse: float
    mean_label: float
    mean_prediction: float
    log_loss: float | None = None
    """None for a label that is no probability."""
    ne: float | None = None
    """Log loss over the log loss of the set's mean label; None if all labels are equal."""
    ne_train_rate: float | None = None
    """Log loss over the log loss of the training split's mean label, which is all that is known before the set is seen."""
    auc: float | None = None
    auc_error: float | None = None
    """Upper bound of the error of `auc`; 0 if it is exact."""
    gauc: float | None = None
    """The AUC within groups, such as users: the mean over groups with both classes, weighted by their examples. None without groups."""
    calibration: float | None = None
    """Mean prediction over mean label."""
    ne_expected: float | None = None
    """NE in expectation under the teacher: without label noise."""
    ne_best: float | None = None
    """The lowest NE that any model can reach on this log in expectation: the teacher's own."""
    ranking: Ranking | None = None
    """How well examples are ranked within groups. None without groups."""
    segments: Segments | None = None
    """NE and calibration by the value of a column. None without one."""
    reliability: Reliability | None = None
    """Predictions against labels, group by group."""
    num_missing: int | None = None
    """Of a task: the examples without its label, which its measures do not count; None with one label."""
    tasks: Mapping[str, Quality] = field(default_factory=dict)
    """Of a model with several labels: the measures of each. The others here are those of the first one."""
    tasks_without_labels: tuple[str, ...] = ()
    """Tasks that are not in `tasks`, since no example has their label."""

    def monitored(self, monitor: Measure | None, head: HeadKind) -> float:
        """The measure that early stopping follows, so that lower is better: AUC as -AUC. MSE where the set has no NE or AUC."""
        entry = MEASURES[monitor or HEADS[head].measure]
        value: float | None = getattr(self, entry.figure)
        if value is None:
            return self.mse
        return -value if entry.higher_is_better else value

    def figures(self) -> dict[str, float]:
        """The measures that are a number, by name; those of a task as `task/name`."""
        figures = {name: value for name, value in vars(self).items() if isinstance(value, (int, float))}
        figures |= self.ranking.figures() if self.ranking is not None else {}
        return figures | self._of_tasks({task: one.figures() for task, one in self.tasks.items()})

    def record_figures(self) -> dict[str, float]:
        """The same, and those of the segments, for a record."""
        figures = self.figures() | (self.segments.figures() if self.segments is not None else {})
        return figures | self._of_tasks({task: one.record_figures() for task, one in self.tasks.items()})

    @staticmethod
    def _of_tasks(figures: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        return {f"{task}/{name}": value for task, own in figures.items() for name, value in own.items()}


class Evaluation:
    """Collects predictions batch by batch and computes their Quality at the end."""

    def __init__(
        self,
        *,
        negative_keep_rate: float = 1.0,
        exact_auc_samples: int = EXACT_AUC_SAMPLES,
        max_grouped: int = MAX_GROUPED_SAMPLES,
    ) -> None:
        self._keep_rate = negative_keep_rate
        self._shift = float(np.log(negative_keep_rate))
        self._exact_auc_samples = exact_auc_samples
        self._kept: list[tuple[NDArray[np.float32], Floats, Floats]] = []
        self._grouped, self._segments = GroupedExamples(max_grouped), SegmentSums()
        self._bins: tuple[Floats, Floats] | None = None
        self.num_samples = 0
        self._num_truths = 0
        names = ("weight", "label", "prediction", "log_loss", "square", "true_weight", "truth", "expected", "best")
        self._sums = dict.fromkeys(names, 0.0)
        self._by_logit = np.zeros((3, _LOGIT_BINS))  # weight, prediction and label

    def add(
        self,
        logits: NDArray[np.float32],
        labels: NDArray[np.float32],
        weights: NDArray[np.float32] | None = None,
        true_p: NDArray[np.float32] | None = None,
        groups: NDArray[np.int64] | None = None,
        segments: NDArray[np.int64] | None = None,
    ) -> None:
        """Add one batch: logits [B] before any correction, labels [B], example weights [B], true_p [B], groups [B], segments [B]."""
        if not np.isfinite(logits).all():
            raise TrainingError(
                "the model's predictions are not finite: training diverged. Train again with lower learning rates, "
                "or set `clip` of the optimizers"
            )
        z = logits.astype(np.float64) + self._shift
        y = labels.astype(np.float64)
        w = np.ones_like(y) if weights is None else weights.astype(np.float64)
        positive, negative = w * y, w * (1 - y) / self._keep_rate
        loss_if_1, loss_if_0 = np.logaddexp(0, -z), np.logaddexp(0, z)
        prediction = np.exp(-loss_if_1)
        sums = self._sums
        sums["weight"] += float((positive + negative).sum())
        sums["label"] += float(positive.sum())
        sums["prediction"] += float((prediction * (positive + negative)).sum())
        sums["log_loss"] += float((positive * loss_if_1 + negative * loss_if_0).sum())
        sums["square"] += float((positive * (1 - prediction) ** 2 + negative * prediction**2).sum())
        if true_p is not None:
            p = np.clip(true_p.astype(np.float64), 1e-12, 1 - 1e-12)
            w = w / (p + (1 - p) * self._keep_rate)  # divided by the probability that the log kept such an example
            sums["true_weight"] += float(w.sum())
            sums["truth"] += float((w * p).sum())
            sums["expected"] += float((w * (p * loss_if_1 + (1 - p) * loss_if_0)).sum())
            sums["best"] += float((w * _entropy(p)).sum())
            self._num_truths += len(y)
        self.num_samples += len(y)
        index = ((np.clip(z, -_MAX_LOGIT, _MAX_LOGIT) + _MAX_LOGIT) * ((_LOGIT_BINS - 1) / (2 * _MAX_LOGIT))).astype(np.int64)
        for row, values in enumerate((positive + negative, prediction * (positive + negative), positive)):
            self._by_logit[row] += np.bincount(index, weights=values, minlength=_LOGIT_BINS)
        scores = logits.astype(np.float32)
        if groups is not None:
            known = groups != NO_GROUP  # examples without a group are not one group
            self._grouped.add(scores[known], positive[known], negative[known], groups[known])
        if segments is not None:
            total = positive + negative
            self._segments.add(segments, total, positive, prediction * total, positive * loss_if_1 + negative * loss_if_0)
        self._keep_for_auc(scores, positive, negative)

    def quality(
        self, train_rate: float | None = None, *, top_k: Sequence[int] = (), segment_column: str = "segment"
    ) -> Quality:
        """The measures over all batches so far.

        `train_rate` is the mean label of the training split, `top_k` the lengths of rankings for recall and NDCG within groups.
        """
        sums, total = self._sums, self._sums["weight"]
        if self.num_samples == 0 or total <= 0:
            raise DataError("there is nothing to evaluate: the evaluation split has no examples of positive weight")
        mean_label = sums["label"] / total
        log_loss = sums["log_loss"] / total
        base = float(_entropy(np.float64(mean_label))) if 0 < mean_label < 1 else 0.0
        mixed = base > 0
        auc, auc_error = self._auc() if mixed else (None, None)
        ranking = self._grouped.measure(top_k, negative_keep_rate=self._keep_rate)
        knows_truth = self._num_truths == self.num_samples and mixed
        true_weight = sums["true_weight"]
        truth_base = float(_entropy(np.float64(sums["truth"] / true_weight))) if knows_truth else 0.0
        return Quality(
            num_samples=self.num_samples,
            log_loss=log_loss,
            mse=sums["square"] / total,
            mean_label=mean_label,
            mean_prediction=sums["prediction"] / total,
            ne=log_loss / base if mixed else None,
            ne_train_rate=None if train_rate is None else log_loss / _cross_entropy(mean_label, train_rate),
            auc=auc,
            auc_error=auc_error,
            gauc=None if ranking is None else ranking.gauc,
            ranking=ranking,
            segments=self._segments.measure(segment_column),
            calibration=sums["prediction"] / sums["label"] if sums["label"] > 0 else None,
            ne_expected=sums["expected"] / true_weight / truth_base if knows_truth else None,
            ne_best=sums["best"] / true_weight / truth_base if knows_truth else None,
            reliability=self._reliability(),
        )

    def _reliability(self) -> Reliability:
        """Merge bins of similar predictions into groups of about equal weight."""
        weight, prediction, label = self._by_logit
        reached = np.cumsum(weight) - weight / 2
        group = np.minimum((reached / weight.sum() * NUM_GROUPS).astype(np.int64), NUM_GROUPS - 1)
        joined = [np.bincount(group, weights=one, minlength=NUM_GROUPS) for one in (weight, prediction, label)]
        kept = joined[0] > 0
        total, predicted, observed = (one[kept] for one in joined)
        return Reliability(
            predicted=tuple((predicted / total).tolist()),
            observed=tuple((observed / total).tolist()),
            weight=tuple(total.tolist()),
        )

    def _keep_for_auc(self, scores: NDArray[np.float32], positive: Floats, negative: Floats) -> None:
        self._kept.append((scores, positive, negative))
        if self._bins is None and self.num_samples > self._exact_auc_samples:
            self._bins = (np.zeros(1 << _BIN_BITS), np.zeros(1 << _BIN_BITS))
        if self._bins is not None:
            for kept_scores, kept_positive, kept_negative in self._kept:
                index = _bin_of(kept_scores)
                self._bins[0][:] += np.bincount(index, weights=kept_positive, minlength=1 << _BIN_BITS)
                self._bins[1][:] += np.bincount(index, weights=kept_negative, minlength=1 << _BIN_BITS)
            self._kept.clear()

    def _auc(self) -> tuple[float, float]:
        """The AUC and a bound of its error."""
        if self._bins is not None:
            positive, negative = self._bins
            ties = 0.5 * float((positive * negative).sum()) / float(positive.sum() * negative.sum())
            return area_under_curve(positive, negative), ties
        scores = np.concatenate([kept[0] for kept in self._kept])
        distinct, index = np.unique(scores, return_inverse=True)
        at_score = [
            np.bincount(index, weights=np.concatenate([kept[which] for kept in self._kept]), minlength=len(distinct))
            for which in (1, 2)
        ]
        return area_under_curve(at_score[0], at_score[1]), 0.0


def area_under_curve(positive: NDArray[Any], negative: NDArray[Any]) -> float:
    """AUC from the weight of positives and negatives at each distinct score, in rising order; ties count half."""
    below = np.cumsum(negative) - negative
    return float((positive * (below + 0.5 * negative)).sum() / (positive.sum() * negative.sum()))


def _cross_entropy(label: float, predicted: float) -> float:
    """Log loss of one prediction for labels with this mean."""
    return float(-(label * np.log(predicted) + (1 - label) * np.log1p(-predicted)))


def _entropy(p: Floats | np.float64) -> Floats | np.float64:
    return -(p * np.log(p) + (1 - p) * np.log1p(-p))


def _bin_of(scores: NDArray[np.float32]) -> NDArray[np.int64]:
    """The bin of each float among 2**20, in the order of the floats."""
    bits = scores.view(np.int32).astype(np.int64)
    ordered = np.where(bits < 0, -(bits & 0x7FFFFFFF), bits) + (1 << 31)
    return ordered >> (32 - _BIN_BITS)
