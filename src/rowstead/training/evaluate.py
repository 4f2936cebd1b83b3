"""Evaluates a model on one split of a log."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowstead.data.batch import Batch, share_bounds
from rowstead.data.file_log import FileLog
from rowstead.data.name_values import name_values
from rowstead.data.prefetch import Prefetch
from rowstead.data.source import Source
from rowstead.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from rowstead.nn.dlrm import DLRM
from rowstead.spec.errors import DataError
from rowstead.training.metrics import Evaluation, Quality
from rowstead.training.task_metrics import TaskEvaluation

EVAL_BATCH = 8192


def predict_logits(
    model: DLRM,
    source: Source,
    *,
    device: torch.device,
    max_samples: int | None = None,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Iterator[tuple[Batch, NDArray[np.float32]]]:
    """Each batch of the split, on the CPU, with the model's logits [B] or [B, T], in the order of the log.

    With `max_samples` it ends with the batch that contains the last of them. With a `process_group` each process computes its share of
    a batch, and gets the logits of all of it.
    """
    seen = 0
    batch_size = min(EVAL_BATCH, max_samples or EVAL_BATCH)
    was_training = model.training
    model.eval()
    try:
        with Prefetch(source.batches(batch_size), depth=2) as batches, torch.no_grad():
            for batch, _ in batches:
                own = model(batch.local_share(process_group.rank, process_group.world_size).to(device)).float().cpu()
                yield batch, _gather_shares(own, batch.num_samples, process_group).numpy()
                seen += batch.num_samples
                if max_samples is not None and seen >= max_samples:
                    return
    finally:
        model.train(was_training)


def _gather_shares(own: Tensor, num_samples: int, process_group: ProcessGroup) -> Tensor:
    """The logits of all processes; `own` are those of this one."""
    if process_group.world_size == 1:
        return own
    logits = own.new_zeros(num_samples, *own.shape[1:])
    logits[slice(*share_bounds(num_samples, process_group.rank, process_group.world_size))] = own
    process_group.all_reduce(logits)
    return logits


def evaluate(
    model: DLRM,
    source: Source,
    *,
    device: torch.device,
    negative_keep_rate: float = 1.0,
    max_samples: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    process_group: ProcessGroup = SINGLE_PROCESS,
    train_rate: float | None = None,
    top_k: Sequence[int] = (),
) -> Quality:
    """Measure the model's Quality on a split, or on its first `max_samples` examples.

    `progress` is called with the number done and the total. `train_rate` is the mean label of the training split, if it is known, and
    `top_k` the lengths of rankings for recall and NDCG within the log's groups.
    """
    evaluation: Evaluation | TaskEvaluation
    evaluation = (
        TaskEvaluation(model.tasks, is_chain=model.is_chain)
        if model.tasks
        else Evaluation(negative_keep_rate=negative_keep_rate)
    )
    log = source.file_log
    group, segment = (None, None) if log is None else (log.spec.group, log.spec.segment)
    columns = () if log is None else log.spec.group_columns
    for batch, logits in predict_logits(model, source, device=device, max_samples=max_samples, process_group=process_group):
        if batch.labels is None:
            raise DataError("the log to evaluate on has no label column")
        wanted = slice(None if max_samples is None else max_samples - evaluation.num_samples)
        weights = None if batch.weights is None else batch.weights.numpy()[wanted]
        true_p = None if batch.true_p is None else batch.true_p.numpy()[wanted]
        of_column = {} if batch.groups is None else dict(zip(columns, batch.groups.numpy()[wanted].T, strict=True))
        groups, segments = (None if name is None else of_column.get(name) for name in (group, segment))
        evaluation.add(logits[wanted], batch.labels.numpy()[wanted], weights, true_p, groups, segments)
        if progress is not None:
            progress(evaluation.num_samples, source.num_samples)
    quality = evaluation.quality(train_rate, top_k=top_k, segment_column=segment or "")
    if log is not None:
        quality = _with_names(quality, log)
    return quality


def _with_names(quality: Quality, log: FileLog) -> Quality:
    """The same with the values of the log that its segments stand for."""
    segments = quality.segments
    if segments is not None:
        segments = segments.with_names(name_values(log, segments.column, segments.codes))
    tasks = {task: _with_names(one, log) for task, one in quality.tasks.items()}
    return dataclasses.replace(quality, segments=segments, tasks=tasks)
