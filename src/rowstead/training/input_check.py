"""What a run says of its input while it trains: values that are too large, and rows that are not in random order."""

from __future__ import annotations

from collections.abc import Callable

from rowstead.data.batch import Batch, StagedBatch
from rowstead.data.order_test import LABEL, OrderSample, batch_columns, order_warning
from rowstead.spec.run import RunSpec
from rowstead.training.advice import scale_warning

BATCHES, BATCH_ROWS = 256, 256
"""Rows of so many batches of the first epoch are looked at, so many of each."""
_ENOUGH = 0.95
"""The share of the first epoch after which its order is judged: bad rows may make it shorter than foreseen."""


class InputCheck:
    """Looks at the first batch, and at some of the first epoch; each sentence is said once.

    Batches are looked at as they are trained on, after shuffling: a sorted log that is shuffled enough is not reported.
    """

    def __init__(self, spec: RunSpec, *, num_rows: int, first_step: int, on_message: Callable[[str], None]) -> None:
        """`num_rows` are those of the training split. A run that is resumed at `first_step` is not looked at again."""
        self._dense = [feature.name for feature in spec.features.expanded_dense()]
        self._sample = OrderSample([LABEL, *(f"`{feature.name}`" for feature in spec.features.expanded_sparse())])
        num_steps = -(-num_rows // spec.train.batch_size)
        self._every, self._last = max(1, num_steps // BATCHES), int(_ENOUGH * num_steps)
        self._is_over, self._on_message = first_step > 0, on_message
        files = spec.data.files
        self._remedy = "shuffle it"
        if files is not None:
            self._remedy = (
                f"set `data.{files.kind}.shuffle_rows: {num_rows}`, all rows, with `data.cache` if they do not fit in memory, "
                "or shuffle the files"
            )

    def add(self, step: int, batch: StagedBatch, device_batch: Batch) -> None:
        """Look at the batch of a step, from 0, in system memory and as the device has it."""
        if self._is_over or step % self._every:
            return
        if step == 0 and (warning := scale_warning(device_batch.dense, self._dense)) is not None:
            self._on_message(warning)
        self._sample.add(batch_columns(batch, BATCH_ROWS))
        if step + self._every >= self._last:
            self._is_over = True
            if found := self._sample.find_clustered():
                self._on_message(order_warning(found, self._remedy))
