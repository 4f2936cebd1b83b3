"""Each role killed in the midst of training: the fleet ends as good a model, and its record counts what was repeated and lost."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from rowstead.fleet.roster import Roster
from rowstead.fleet.rpc_client import Client
from rowstead.fleet.sparse_server import AppliedUpdates
from rowstead.spec.fleet import RoleKind
from tests.fleet.disturbed import (
    NE_WITHIN,
    NUM_SPARSE,
    NUM_STEPS,
    NUM_TRAINERS,
    ROLES,
    Fleet,
    book_of,
    check_counts,
    check_every_update_is_known,
    check_exchanges,
    last_of,
    recipe,
    samples_of,
    steps_of,
    training,
)
from tests.fleet.test_fleet import of_role
from tests.small_runs import wait_until

MOST_HELD = 16
"""Batches that a trainer may have got and not be done with: those that it has asked for ahead, twice."""

pytestmark = pytest.mark.slow


def killed(fleet: Fleet, kind: RoleKind, *, num_restarts: int = 1) -> dict[str, float]:
    """Kill the first role of a kind and let the fleet end, after so many kills in all; the figures of its record."""
    os.kill(of_role(fleet.out, kind).pid, signal.SIGKILL)
    figures = fleet.end()
    assert f"{kind} 0 was killed by SIGKILL: starting it again" in fleet.printed
    assert figures["num_restarts"] == num_restarts
    check_counts(fleet.out, figures)
    return figures


def test_a_killed_trainer_costs_no_quality_and_what_it_held_is_counted_as_repeated(
    undisturbed_ne: float, tmp_path: Path
) -> None:
    with training(tmp_path, recipe(tmp_path), ROLES) as fleet:
        fleet.wait_for_steps(NUM_STEPS // 3)
        figures = killed(fleet, "trainer")
    assert 0 < figures["num_batches_repeated"] <= MOST_HELD
    assert figures["num_lost_updates"] == 0
    book, steps = book_of(fleet.out), steps_of(fleet.out)
    dead = ("trainer-0", 0)
    for who in steps.keys() - {dead}:
        assert book.done_by.get(who, 0) == steps[who], "whoever lived has done what it trained on, once"
    assert book.done_by[dead] + figures["num_batches_repeated"] >= steps[dead]
    for number in range(NUM_SPARSE):  # what the dead one did in vain is in the rows, and no more of it than is reported
        server = last_of(fleet.out, "sparse", number)
        assert 0 <= server["num_updates"] - NUM_STEPS <= figures["num_batches_repeated"]
    assert figures["ne_expected"] == pytest.approx(undisturbed_ne, rel=NE_WITHIN)


def test_a_killed_sparse_server_costs_no_quality_and_every_update_it_lost_is_counted(
    undisturbed_ne: float, tmp_path: Path
) -> None:
    with training(tmp_path, recipe(tmp_path), ROLES) as fleet:
        fleet.wait_for_steps(NUM_STEPS // 3)
        with Client(Roster(fleet.out).address("sparse", 0), name="test") as client:
            before: dict[str, Any] = dict(client.call("status").facts)
            status: dict[str, Any] = {}
            wait_until(lambda: has_unsaved(client, before, status), what="updates that are in no snapshot")
        pid = of_role(fleet.out, "sparse").pid
        os.kill(pid, signal.SIGSTOP)  # so that its last snapshot can be read
        saved = json.loads((fleet.out / "snapshots" / "sparse-0" / "snapshot.json").read_text())["counts"]
        with Client(Roster(fleet.out).address("sparse", 1), name="test") as client:
            num_updates = client.call("status").facts["num_updates"]  # of the other, which gets as many
        figures = killed(fleet, "sparse")
    in_snapshot = AppliedUpdates.from_json(saved["sent"]).num_updates
    assert 0 < status["num_updates"] - in_snapshot <= figures["num_lost_updates"]
    under_way = 2 * NUM_TRAINERS
    assert figures["num_lost_updates"] == pytest.approx(num_updates - in_snapshot, abs=under_way)
    assert last_of(fleet.out, "sparse", 1)["num_lost_updates"] == 0
    check_every_update_is_known(fleet.out)
    assert (figures["num_batches_repeated"], sum(steps_of(fleet.out).values())) == (0, NUM_STEPS)
    assert figures["ne_expected"] == pytest.approx(undisturbed_ne, rel=NE_WITHIN)


def has_unsaved(client: Client, before: dict[str, Any], status: dict[str, Any]) -> bool:
    """Whether a server has updates that are in no snapshot; `status` becomes what it says, `before` what it said at the snapshot."""
    status.update(client.call("status").facts)
    if status["num_snapshots"] != before["num_snapshots"]:
        before.update(status)
    return bool(status["num_updates"] >= before["num_updates"] + 25)


def test_a_killed_dense_server_and_then_a_killed_reader_cost_no_quality_and_nothing_is_trained_on_twice(
    undisturbed_ne: float, tmp_path: Path
) -> None:
    with training(tmp_path, recipe(tmp_path), ROLES) as fleet:
        fleet.wait_for_steps(NUM_STEPS // 4)
        os.kill(of_role(fleet.out, "dense").pid, signal.SIGKILL)
        fleet.wait_for_steps(NUM_STEPS // 2)
        figures = killed(fleet, "reader", num_restarts=2)
    assert "dense 0 was killed by SIGKILL: starting it again" in fleet.printed
    assert figures["num_batches_repeated"] == figures["num_lost_updates"] == 0
    assert figures["num_batches_resent"] <= NUM_TRAINERS * MOST_HELD, "at most what was on its way from the reader"
    assert sum(steps_of(fleet.out).values()) == NUM_STEPS
    check_every_update_is_known(fleet.out)
    check_exchanges(fleet.out)
    trainers = [last_of(fleet.out, "trainer", number) for number in range(NUM_TRAINERS)]
    assert figures["trainer_num_missed"] == sum(trainer["num_alone"] for trainer in trainers)
    assert samples_of(fleet.out, "dense", 0)[1][-1]["num_exchanges"] > 0, "they have met again since"
    assert figures["ne_expected"] == pytest.approx(undisturbed_ne, rel=NE_WITHIN)
