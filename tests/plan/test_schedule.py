"""A step is a schedule: dependencies, overlapped tasks and bottlenecks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowstead.plan.schedule import Task, bottlenecks, busy_s, lay_out, overlapped, period_s
from rowstead.spec.phases import Phase


def task(name: str, resource: str, seconds: float, *after: str, hidden: bool = False, busy: float | None = None) -> Task:
    return Task(name=name, phase=Phase.FORWARD, resource=resource, seconds=seconds, after=after, hidden=hidden, busy_s=busy)


def test_tasks_on_different_resources_overlap_unless_one_waits_for_the_other() -> None:
    assert period_s([task("a", "x", 2), task("b", "y", 3)]) == 3
    assert period_s([task("a", "x", 2), task("b", "y", 3, "a")]) == 5
    assert period_s([task("a", "x", 2), task("b", "x", 3)]) == 5


def test_a_hidden_task_keeps_its_resource_busy_and_makes_nobody_wait() -> None:
    tasks = [task("read", "net", 4, hidden=True), task("a", "x", 2), task("b", "y", 1, "a", "read")]
    assert period_s(tasks) == 4
    assert max(slot.end_s for slot in lay_out(tasks)) == 3


def test_hidden_tasks_are_shown_where_their_resource_limits_the_step() -> None:
    step = [task("a", "x", 2), task("b", "net", 1, "a")]
    (slot,) = overlapped([task("read", "net", 4, hidden=True), task("other", "z", 3, hidden=True), *step])
    assert (slot.task.name, slot.start_s, slot.end_s) == ("read", 3, 7)
    assert overlapped([task("read", "net", 1, hidden=True), *step]) == []
    assert [one.task.name for one in overlapped([task("read", "net", 1, hidden=True), *step], in_flight=2)] == ["read"]
    (served,) = overlapped([task("apply", "server", 1, hidden=True, busy=9), *step])
    assert (served.start_s, served.end_s) == (0, 9)


def test_steps_in_flight_share_the_path_but_not_a_resource() -> None:
    tasks = [task("a", "x", 2), task("b", "y", 2, "a")]
    assert period_s(tasks, in_flight=1) == 4
    assert period_s(tasks, in_flight=2) == period_s(tasks, in_flight=8) == 2


def test_a_server_of_many_trainers_is_busy_for_longer_than_one_waits() -> None:
    assert period_s([task("serve", "server", 1, busy=5), task("a", "x", 2, "serve")]) == 5


def test_the_next_bottleneck_is_what_is_left_without_the_first() -> None:
    tasks = [task("a", "x", 5), task("b", "y", 3, "a"), task("c", "z", 1, "b")]
    assert [one.resource for one in bottlenecks(tasks)] == ["x", "y", "z"]
    assert bottlenecks(tasks)[0].saved_share == pytest.approx(2.5 / 9)


def test_waiting_for_a_task_that_comes_later_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="listed before its predecessors"):
        lay_out([task("b", "y", 1, "a"), task("a", "x", 1)])


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.floats(0, 10), st.booleans()), min_size=1, max_size=12))
def test_a_period_is_between_the_busiest_resource_and_the_sum(drawn: list[tuple[str, float, bool]]) -> None:
    tasks = [
        task(str(i), resource, seconds, *([str(i - 1)] if waits else [])) for i, (resource, seconds, waits) in enumerate(drawn)
    ]
    found = period_s(tasks)
    assert max(busy_s(tasks).values()) <= found + 1e-9
    assert found <= sum(one.seconds for one in tasks) + 1e-9
