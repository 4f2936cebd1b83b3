"""Quality of the predictions of several labels: each task's measures over the examples that have its label."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from rowstead.nn.heads import Head, head_of
from rowstead.spec.errors import DataError, TrainingError
from rowstead.spec.heads import HEADS, TaskSpec
from rowstead.training.metrics import EXACT_AUC_SAMPLES, Evaluation, Quality
from rowstead.training.ranking_metrics import MAX_GROUPED_SAMPLES

Floats = NDArray[np.float32]


class TaskEvaluation:
    """Collects predictions of several labels batch by batch and computes their Quality at the end."""

    def __init__(self, tasks: Sequence[TaskSpec], *, is_chain: bool = False) -> None:
        """With `is_chain` the second task is measured where the first label is above 0: elsewhere its label says nothing of it."""
        self._tasks, self._is_chain = tuple(tasks), is_chain
        limits = {"exact_auc_samples": EXACT_AUC_SAMPLES // len(tasks), "max_grouped": MAX_GROUPED_SAMPLES // len(tasks)}
        self._evaluations = [
            Evaluation(**limits) if HEADS[task.loss].is_probability else NumberEvaluation(head_of(task.loss)) for task in tasks
        ]
        self.num_samples = 0

    def add(
        self,
        logits: Floats,
        labels: Floats,
        weights: Floats | None = None,
        true_p: Floats | None = None,
        groups: NDArray[np.int64] | None = None,
        segments: NDArray[np.int64] | None = None,
    ) -> None:
        """Add one batch: logits, labels and true_p [B, T], NaN where a label is missing; example weights, groups and segments [B]."""
        for index, evaluation in enumerate(self._evaluations):
            has_label = ~np.isnan(labels[:, index])
            if self._is_chain and index == 1:
                has_label &= labels[:, 0] > 0
            evaluation.add(
                logits[has_label, index],
                labels[has_label, index],
                None if weights is None else weights[has_label],
                None if true_p is None else true_p[has_label, index],
                None if groups is None else groups[has_label],
                None if segments is None else segments[has_label],
            )
        self.num_samples += len(labels)

    def quality(
        self, train_rate: float | None = None, *, top_k: Sequence[int] = (), segment_column: str = "segment"
    ) -> Quality:
        """As `Evaluation.quality`, of all tasks that have labels, of which the first must be one; `train_rate` is not known of several labels."""
        found = {}
        for task, evaluation in zip(self._tasks, self._evaluations, strict=True):
            if not evaluation.num_samples and task is not self._tasks[0]:
                continue
            if not evaluation.num_samples:
                raise DataError(
                    f"there is nothing to evaluate of task `{task.name}`: no example of the {self.num_samples:,} has a label in "
                    f"`{task.label}`. Evaluate more of them (train.eval_samples), or leave the task out"
                )
            num_missing = self.num_samples - evaluation.num_samples
            found[task.name] = dataclasses.replace(
                evaluation.quality(top_k=top_k, segment_column=segment_column), num_missing=num_missing
            )
        first = found[self._tasks[0].name]
        without = tuple(task.name for task in self._tasks if task.name not in found)
        return dataclasses.replace(
            first, num_samples=self.num_samples, num_missing=None, tasks=found, tasks_without_labels=without
        )


class NumberEvaluation:
    """As `Evaluation`, for a label that is a number of any size."""

    def __init__(self, head: Head) -> None:
        self._head, self.num_samples = head, 0
        self._weight = self._label = self._prediction = self._square = 0.0

    def add(
        self,
        logits: Floats,
        labels: Floats,
        weights: Floats | None = None,
        true_p: Floats | None = None,
        groups: NDArray[np.int64] | None = None,
        segments: NDArray[np.int64] | None = None,
    ) -> None:
        """Add one batch: logits [B], labels [B], example weights [B]; the others do not apply to numbers."""
        predictions = self._head.predict(torch.from_numpy(logits)).numpy()
        if not np.isfinite(predictions).all():
            raise TrainingError(
                "the model's predictions are not finite: training diverged. Train again with lower learning rates, "
                "or set `clip` of the optimizers"
            )
        prediction, label = predictions.astype(np.float64), labels.astype(np.float64)
        weight = np.ones_like(label) if weights is None else weights.astype(np.float64)
        self.num_samples += len(label)
        self._weight += float(weight.sum())
        self._label += float((weight * label).sum())
        self._prediction += float((weight * prediction).sum())
        self._square += float((weight * (prediction - label) ** 2).sum())

    def quality(
        self, train_rate: float | None = None, *, top_k: Sequence[int] = (), segment_column: str = "segment"
    ) -> Quality:
        """The measures over all batches so far."""
        if self._weight <= 0:
            raise DataError("there is nothing to evaluate: the evaluation split has no examples of positive weight")
        return Quality(
            num_samples=self.num_samples,
            mse=self._square / self._weight,
            mean_label=self._label / self._weight,
            mean_prediction=self._prediction / self._weight,
            calibration=self._prediction / self._label if self._label else None,
        )
