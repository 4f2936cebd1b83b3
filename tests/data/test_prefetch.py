"""Work done ahead comes in order, is bounded, ends when asked, and its errors arrive where they belong."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowstead.data.prefetch import Prefetch, chain_ahead, map_ahead

DEADLINE_S = 20


def threads_named(prefix):
    return [t for t in threading.enumerate() if t.name.startswith(prefix)]


@given(st.lists(st.integers()), st.integers(1, 4))
def test_prefetch_yields_the_same_items(items, depth):
    with Prefetch(iter(items), depth) as ahead:
        assert list(ahead) == items
        assert list(ahead) == []
        assert ahead.waited_s >= 0


def test_prefetch_stays_at_most_depth_ahead():
    made = threading.Semaphore(0)
    count = 0

    def items():
        nonlocal count
        while True:
            count += 1
            made.release()
            yield count

    with Prefetch(items(), 3) as ahead:
        for _ in range(3):
            assert made.acquire(timeout=DEADLINE_S)
        assert not made.acquire(timeout=0.05)
        assert next(ahead) == 1
        assert made.acquire(timeout=DEADLINE_S)
        assert count == 4


def test_prefetch_raises_the_threads_error_after_the_good_items():
    def items():
        yield 1
        raise KeyError("lost")

    with Prefetch(items(), 2) as ahead:
        assert next(ahead) == 1
        with pytest.raises(KeyError, match="lost"):
            next(ahead)
        assert list(ahead) == []


def test_closing_a_prefetch_closes_its_iterator_and_ends_the_thread():
    closed = threading.Event()

    def items():
        try:
            while True:
                yield 1
        finally:
            closed.set()

    ahead = Prefetch(items(), 2)
    assert next(ahead) == 1
    ahead.close()
    ahead.close()
    assert closed.is_set()
    assert not threads_named("prefetch")


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(), max_size=5), max_size=6), st.integers(1, 4), st.integers(0, 10))
def test_chain_ahead_is_chain_for_any_number_of_threads(streams, threads, max_size):
    made = chain_ahead([lambda s=s: iter(s) for s in streams], threads=threads, size=lambda _: 1, max_size=max_size)
    assert list(made) == [x for s in streams for x in s]
    assert not threads_named("decode-")


def test_an_error_in_a_stream_comes_in_its_turn():
    def fails():
        yield 2
        raise KeyError("lost")

    made = chain_ahead([lambda: iter([1]), fails, lambda: iter([3])], threads=3, size=lambda _: 1, max_size=10)
    assert [next(made), next(made)] == [1, 2]
    with pytest.raises(KeyError, match="lost"):
        next(made)
    assert not threads_named("decode-")


def test_closing_a_chain_ends_its_threads():
    def endless():
        while True:
            yield 1

    made = chain_ahead([endless, endless, endless], threads=2, size=lambda _: 1, max_size=5)
    assert next(made) == 1
    made.close()
    assert not threads_named("decode-")


@settings(max_examples=50)
@given(st.lists(st.integers()), st.integers(1, 4))
def test_map_ahead_is_map_for_any_number_of_threads(items, threads):
    assert list(map_ahead(lambda x: 2 * x, iter(items), threads=threads, size=lambda _: 1)) == [2 * x for x in items]
    assert not threads_named("make")


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("in_function", [False, True])
def test_an_error_comes_after_what_was_made_before_it(threads, in_function):
    def items():
        yield from (1, 2)
        if in_function:
            yield 0
        raise KeyError("lost")

    made = map_ahead(lambda x: 2 / x, items(), threads=threads, size=lambda _: 1)
    assert [next(made), next(made)] == [2, 1]
    with pytest.raises(ZeroDivisionError if in_function else KeyError):
        next(made)
    assert not threads_named("make")


def test_closing_a_map_ends_its_threads_and_closes_its_items():
    closed = threading.Event()

    def endless():
        try:
            while True:
                yield 1
        finally:
            closed.set()

    made = map_ahead(lambda x: x, endless(), threads=2, size=lambda _: 1)
    assert next(made) == 1
    made.close()
    assert closed.is_set()
    assert not threads_named("make")
