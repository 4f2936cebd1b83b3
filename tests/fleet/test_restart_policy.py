"""Decisions about roles that have exited, tested without processes."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowstead.distributed.launch import USER_ERROR
from rowstead.fleet.restart_policy import MAX_DELAY_S, STOPPED, ExitedRole, decide
from rowstead.spec.errors import RowsteadError
from rowstead.spec.fleet import KINDS, FleetSpec, parse_fleet

SPEC = FleetSpec(num_trainers=2, num_sparse=2, max_restarts=3, healthy_s=100.0)
KILLED = ExitedRole(kind="sparse", number=1, code=-9, was_ready=True, ran_s=5.0, num_restarts=0, num_other_trainers=2)

exited_roles = st.builds(
    ExitedRole,
    kind=st.sampled_from(KINDS),
    number=st.integers(0, 7),
    code=st.integers(-15, 3),
    was_ready=st.booleans(),
    ran_s=st.floats(0, 1000),
    num_restarts=st.integers(0, 5),
    num_other_trainers=st.integers(0, 3),
)


def changed(**changes: object) -> ExitedRole:
    return dataclasses.replace(KILLED, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_role_is_restarted_at_once(kind: str) -> None:
    decision = decide(changed(kind=kind), SPEC)
    assert (decision.action, decision.delay_s, decision.num_restarts) == ("restart", 0.0, 1)
    assert decision.reason == f"{kind} 1 was killed by SIGKILL: restarting it (1 of 3)"


def test_only_a_trainer_may_exit_by_itself() -> None:
    assert decide(changed(kind="trainer", code=0), SPEC).action == "done"
    for kind in ("sparse", "dense", "reader"):
        assert decide(changed(kind=kind, code=0), SPEC).action == "restart"


def test_a_user_error_and_a_failed_start_are_not_retried_but_a_killed_start_is() -> None:
    assert decide(changed(code=USER_ERROR), SPEC).action == "give up"
    assert decide(changed(code=1, was_ready=False), SPEC).action == "give up"
    assert decide(changed(code=-9, was_ready=False), SPEC).action == "restart"


def test_a_fleet_continues_without_a_trainer_but_not_without_its_last() -> None:
    exhausted = changed(kind="trainer", num_restarts=3)
    assert decide(exhausted, SPEC).action == "continue without"
    assert decide(dataclasses.replace(exhausted, num_other_trainers=0), SPEC).action == "give up"
    assert decide(changed(num_restarts=3), SPEC).action == "give up"


def test_restarts_of_a_role_that_ran_long_no_longer_count() -> None:
    decision = decide(changed(num_restarts=3, ran_s=100.0), SPEC)
    assert (decision.action, decision.num_restarts) == ("restart", 1)


@given(exited_roles)
def test_every_role_is_restarted_a_bounded_number_of_times(role: ExitedRole) -> None:
    quick = dataclasses.replace(role, ran_s=1.0)
    starts, waited_s = 0, 0.0
    while (decision := decide(quick, SPEC)).action == "restart":
        starts, waited_s = starts + 1, waited_s + decision.delay_s
        assert decision.delay_s <= MAX_DELAY_S
        quick = dataclasses.replace(quick, num_restarts=decision.num_restarts)
    assert starts <= SPEC.max_restarts
    assert decision.action in ("done", "continue without", "give up")
    assert decision.action != "continue without" or role.kind == "trainer"


def test_a_fleet_is_read_from_the_command_line() -> None:
    fleet = parse_fleet("trainers=2, sparse=3,dense=1,readers=4,snapshot_every_s=5", FleetSpec(max_restarts=7))
    assert (fleet.num_trainers, fleet.num_sparse, fleet.num_dense, fleet.num_readers) == (2, 3, 1, 4)
    assert (fleet.snapshot_every_s, fleet.max_restarts) == (5.0, 7)
    assert fleet.roles()[:3] == [("sparse", 0), ("sparse", 1), ("sparse", 2)]
    assert fleet.roles()[-1] == ("trainer", 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sprse=2", "did you mean `sparse`?"),
        ("trainers", "`trainers` needs a value"),
        ("trainers=many", "num_trainers: expected whole number, got 'many'"),
        ("trainers=0", "num_trainers: must be at least 1, got 0"),
        ("dense=-1", "num_dense: must not be negative, got -1"),
        ("sparse=0", "num_sparse: must be at least 1"),
        ("tables=local,trainers=2", "tables: can be `local` only with one trainer"),
        (" ,", "--fleet is empty: give the number of roles"),
        ("trainers=2,trainers=3", "`trainers` is given twice"),
        ("ray,manual", "`start` is given twice"),
        ("by_hand,trainers=2", "`by_hand` is now called `manual`"),
        ("start=by_hand", "`by_hand` is now called `manual`"),
    ],
)
def test_an_invalid_fleet_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(RowsteadError, match="--fleet") as refused:
        parse_fleet(text)
    assert message in str(refused.value)


def test_a_trainer_that_was_stopped_from_outside_is_restarted() -> None:
    """Otherwise a fleet whose only trainer is stopped from outside would count its log as finished."""
    stopped = changed(kind="trainer", code=STOPPED)
    decision = decide(stopped, SPEC)
    assert (decision.action, decision.reason) == (
        "restart",
        "trainer 1 was stopped from outside: restarting it (1 of 3)",
    )
    assert decide(dataclasses.replace(stopped, was_ready=False), SPEC).action == "restart"
    local = FleetSpec(num_trainers=1, num_sparse=0, tables="local")
    assert decide(stopped, local).action == "give up"
