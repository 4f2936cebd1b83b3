"""Costs: the median piece counts, whichever thread did it, and only processor time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from rowstead.records.cost import MAX_PIECES, Cost, counted


def test_nothing_was_measured_before_any_work() -> None:
    cost = Cost()
    cost.add(1.0, 0)
    assert cost.s_per_item is None


def test_a_first_piece_that_compiles_does_not_count() -> None:
    cost = Cost()
    for spent_s in (30.0, 0.2, 0.2, 0.4):
        cost.add(spent_s, 100)
    assert cost.s_per_item == pytest.approx(0.002)


def test_pieces_come_from_any_thread() -> None:
    cost = Cost()
    threads = [threading.Thread(target=cost.add, args=(0.1 * number, 1)) for number in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cost.s_per_item == pytest.approx(0.2)


def test_old_pieces_are_forgotten() -> None:
    cost = Cost()
    for _ in range(MAX_PIECES):
        cost.add(5.0, 1)
    for _ in range(MAX_PIECES):
        cost.add(1.0, 1)
    assert cost.s_per_item == 1.0


def test_work_counts_and_waiting_does_not() -> None:
    def items() -> Iterator[int]:
        for size in (10, 20):
            threading.Event().wait(0.05)
            before_s = time.thread_time()
            while time.thread_time() - before_s < 0.001 * size:
                pass
            yield size

    cost = Cost()
    assert list(counted(items(), cost, lambda size: size)) == [10, 20]
    assert cost.s_per_item == pytest.approx(0.001, rel=0.5)


def test_closing_closes_what_is_counted() -> None:
    closed = threading.Event()

    def endless() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.set()

    items = counted(endless(), Cost(), lambda _: 1)
    assert next(items) == 1
    items.close()
    assert closed.is_set()
