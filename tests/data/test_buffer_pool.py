"""The memory of an array is reused after its last reference is gone, and not before."""

from __future__ import annotations

import itertools
import threading

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rowstead.data.buffer_pool import ALIGNED_BYTES, SMALL_BYTES, BufferPool

LARGE = SMALL_BYTES // 8


def address(array):
    return array.ctypes.data


def test_memory_is_used_again_once_the_last_view_is_gone():
    pool = BufferPool()
    first = pool.empty((LARGE, 2), np.float64)
    assert first.shape == (LARGE, 2)
    assert address(first) % ALIGNED_BYTES == 0
    where, part = address(first), first[3:5, 1]
    del first
    other = pool.empty((LARGE, 2), np.float64)
    assert address(other) != where, "somebody still looks at a part of it"
    part[:] = 7
    del part
    assert address(pool.empty((2 * LARGE - 100,), np.int64)) == where, "a similar size reuses the memory"


def test_small_arrays_are_the_allocators():
    pool = BufferPool()
    assert pool.empty((3, 4), np.float32).base is None
    assert pool.empty((0,), np.int64).shape == (0,)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(LARGE, 5 * LARGE)), max_size=40))
def test_no_two_arrays_overlap_and_memory_is_bounded_by_what_was_in_use(asked):
    pool, held, most = BufferPool(), {}, 0
    for index, size in asked:
        held.pop(index, None)
        held[index] = pool.empty((size,), np.int64)
        spans = sorted((address(a), address(a) + a.nbytes) for a in held.values())
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
        most = max(most, sum(a.nbytes for a in held.values()))
        free = sum(len(memory) for memory in (*pool._free, *pool._returned))
        assert sum(a.nbytes for a in held.values()) + free <= most * 17 / 16 + 5 * 8 * LARGE


def test_threads_may_ask_and_let_go_at_once():
    pool, wrong = BufferPool(), []

    def work(number):
        for turn in range(200):
            mine = pool.empty((LARGE + turn % 3,), np.int64)
            mine[:: LARGE // 4] = number
            if not (mine[:: LARGE // 4] == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
