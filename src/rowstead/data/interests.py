"""A synthetic log of histories whose interests drift, with known best predictions: given the history, and given it without its order.

Each row has a history of items, from the oldest to the most recent, and an item that may be clicked. Items belong to topics. The older part of a
history, of a length drawn evenly from 0 to the whole, is of one topic and the rest of another. The click rate depends on the item's topic:
whether it is that of the most recent item of the history, was one before, or neither.

`true_p` is that rate, so no model does better. A model that does not see the order, such as one that pools the history, cannot know which of two
topics is the recent one: both orders are equally likely, whatever the items and their numbers are. So its best prediction is the mean
of the two rates (`InterestsLog.unordered_p`), and its best NE is known too.

Letters: R rows, nnz items of their histories, T topics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rowstead.data import draws
from rowstead.data.block import RawBlock
from rowstead.data.synth import SynthLog, SynthSplit, draw_labels
from rowstead.spec.data import InterestsSpec, SplitName
from rowstead.spec.errors import DataError

_ROWS, _LABELS = 300, 301
RECENT, PAST, OTHER = range(3)
"""What the topic of an item is to a history."""
_BOTH = 3
"""One of two topics of a history, which a model that does not see the order cannot tell apart."""


class InterestsLog(SynthLog):
    """A log of `num_rows` examples, the training split first. Rows do not depend on which rows were read before."""

    spec: InterestsSpec  # type: ignore[assignment]

    def __init__(self, spec: InterestsSpec) -> None:
        self.spec = spec
        self.dense_columns = ()
        self.sparse_columns = ("item", "history")
        self.num_rows = spec.num_train_samples + spec.num_eval_samples + spec.num_test_samples
        self._key, self._label_key = draws.key_of(spec.seed, _ROWS), draws.key_of(spec.seed, _LABELS)

    @property
    def rows_per_piece(self) -> int:
        return 4096

    def rows(
        self,
        start: int,
        stop: int,
        *,
        dense: Sequence[str] | None = None,
        sparse: Sequence[str] | None = None,
        labels: Sequence[str] = (),
    ) -> RawBlock:
        """Rows `start` to `stop` with these sparse columns in this order, by default all; with `labels`, that many columns of the one label."""
        self._column_indices(dense or (), self.dense_columns)
        picked = self._column_indices(self.sparse_columns if sparse is None else sparse, self.sparse_columns)
        items, history, offsets, relation = self._draw(start, stop)
        true_p = np.array(self.spec.click_rates, np.float32)[relation % _BOTH]
        if any(name != "label" for name in labels):
            raise DataError(f"the log of interests has one label, `label`, and no {', '.join(f'`{name}`' for name in labels)}")
        clicks = np.empty(stop - start, np.float32)
        draw_labels(self._label_key, start, true_p, clicks)
        columns = ((items, np.arange(len(items) + 1)), (history, offsets))
        return RawBlock(
            dense=np.empty((stop - start, 0), np.float32),
            ids=tuple(columns[index][0] for index in picked),
            offsets=tuple(columns[index][1] for index in picked),
            labels=np.stack([clicks] * len(labels), axis=1) if labels else clicks,
            true_p=np.stack([true_p] * len(labels), axis=1) if labels else true_p,
        )

    def unordered_p(self, start: int, stop: int) -> NDArray[np.float32]:
        """The best prediction for each row, [R], of a model that sees what is in the history, but not in which order."""
        recent, past, other = self.spec.click_rates
        rates = np.array([recent, past, other, (recent + past) / 2, (recent + past) / 2], np.float32)
        return np.asarray(rates[self._draw(start, stop)[3]])

    def dense_blocks(
        self, columns: Sequence[str], split: SplitName = "train", max_rows: int | None = None
    ) -> Iterator[RawBlock]:
        self._column_indices(columns, self.dense_columns)
        rows = self.split(split)[:max_rows]
        yield RawBlock(dense=np.empty((len(rows), 0), np.float32), ids=(), offsets=())

    def _draw(self, start: int, stop: int) -> tuple[NDArray[np.int64], ...]:
        """Items [R], histories [nnz] with offsets [R + 1], and what the item is to its history [R]."""
        if not 0 <= start <= stop <= self.num_rows:
            raise DataError(f"rows {start} to {stop} are out of range for a log of {self.num_rows} rows")
        spec, offsets = self.spec, np.zeros(stop - start + 1, np.int64)
        lengths = np.arange(1, spec.max_history + 1)
        thresholds = spec.empty_share + (1 - spec.empty_share) * np.log(lengths) / np.log(spec.max_history + 1)
        _draw_lengths(self._key, start, np.round(thresholds, 12), offsets)
        items, relation = np.empty(stop - start, np.int64), np.empty(stop - start, np.int64)
        history = np.empty(offsets[-1], np.int64)
        _draw_rows(self._key, start, spec.num_topics, spec.num_items // spec.num_topics, offsets, items, history, relation)
        return items, history, offsets, relation


class InterestsSplit(SynthSplit):
    """One split of such a log with the columns that the features select."""

    log_class = InterestsLog


@njit(nogil=True, cache=True)
def _draw_lengths(key, start, thresholds, offsets):  # type: ignore[no-untyped-def]
    """Fill offsets [R + 1] with the running sum of lengths: how many of the thresholds lie at or below a uniform number."""
    for r in range(offsets.size - 1):
        u = draws.unit(draws.at(draws.at(key, start + r), 0))
        offsets[r + 1] = offsets[r] + np.searchsorted(thresholds, u, side="right")


@njit(nogil=True, cache=True)
def _draw_rows(key, start, num_topics, items_per_topic, offsets, items, history, relation):  # type: ignore[no-untyped-def]
    """Fill items [R], history [nnz] and relation [R]: RECENT, PAST, OTHER, or _BOTH and one of the first two where there are two topics.

    Item i belongs to topic i modulo T.
    """
    for r in range(items.size):
        row = draws.at(key, start + r)
        length = offsets[r + 1] - offsets[r]
        old = np.int64(draws.unit(draws.at(row, 1)) * num_topics)
        new = (old + 1 + np.int64(draws.unit(draws.at(row, 2)) * (num_topics - 1))) % num_topics
        num_old = np.int64(draws.unit(draws.at(row, 3)) * (length + 1))
        for i in range(length):
            topic = old if i < num_old else new
            history[offsets[r] + i] = topic + num_topics * np.int64(draws.unit(draws.at(row, 6 + i)) * items_per_topic)
        choice = np.int64(draws.unit(draws.at(row, 4)) * 3 * (num_topics - 2))
        kind, other = choice // (num_topics - 2), choice % (num_topics - 2)
        if kind == 0:
            topic = new
        elif kind == 1:
            topic = old
        else:  # neither
            topic = other
            for taken in (min(old, new), max(old, new)):
                if topic >= taken:
                    topic += 1
        items[r] = topic + num_topics * np.int64(draws.unit(draws.at(row, 5)) * items_per_topic)
        is_old, is_new = num_old > 0 and topic == old, num_old < length and topic == new
        has_both = 0 < num_old < length
        if is_new or (is_old and not has_both):
            relation[r] = RECENT + (_BOTH if has_both else 0)
        elif is_old:
            relation[r] = PAST + _BOTH
        else:
            relation[r] = OTHER
