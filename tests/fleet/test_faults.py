"""Each role killed during training, one frozen, all killed at once: the record counts repeated and lost work."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from rowstead.fleet.applied_updates import AppliedUpdates
from rowstead.fleet.roster import Roster, read_address
from rowstead.fleet.rpc_client import Client
from rowstead.spec.fleet import RoleKind
from tests.fleet.disturbed import (
    NE_WITHIN,
    NUM_SPARSE,
    NUM_STEPS,
    NUM_TRAINERS,
    ROLES,
    Fleet,
    check_counts,
    check_every_update_is_known,
    check_exchanges,
    last_of,
    read_assignments,
    recipe,
    samples_of,
    steps_of,
    training,
)
from tests.fleet.test_fleet import address_of
from tests.small_runs import wait_until

MAX_HELD = 16
"""Maximum number of batches that a trainer holds: twice its prefetched batches."""

pytestmark = pytest.mark.slow


def kill_role(fleet: Fleet, kind: RoleKind, *, num_restarts: int = 1) -> dict[str, float]:
    """Kill the first role of a kind, let the fleet finish, and return the figures of its record; `num_restarts` kills in all."""
    os.kill(address_of(fleet.out, kind).pid, signal.SIGKILL)
    figures = fleet.finish()
    assert f"{kind} 0 was killed by SIGKILL: restarting it" in fleet.printed
    assert figures["num_restarts"] == num_restarts
    check_counts(fleet.out, figures)
    return figures


def test_a_killed_trainer_costs_no_quality_and_its_batches_are_counted_as_repeated(
    undisturbed_ne: float, tmp_path: Path
) -> None:
    with training(tmp_path, recipe(tmp_path), ROLES) as fleet:
        fleet.wait_for_steps(NUM_STEPS // 3)
        figures = kill_role(fleet, "trainer")
    assert 0 < figures["num_batches_repeated"] <= MAX_HELD
    assert figures["num_lost_updates"] == 0
    log, steps = read_assignments(fleet.out), steps_of(fleet.out)
    dead = ("trainer-0", 0)
    for who in steps.keys() - {dead}:
        assert log.done_by.get(who, 0) == steps[who], (
            "a trainer that was not killed has finished every batch it trained on, once"
        )
    assert log.done_by[dead] + figures["num_batches_repeated"] >= steps[dead]
    for number in range(NUM_SPARSE):  # the repeated work of the killed trainer is in the rows, and is at most what is reported
        server = last_of(fleet.out, "sparse", number)
        assert 0 <= server["num_updates"] - NUM_STEPS <= figures["num_batches_repeated"]
    assert figures["ne_expected"] == pytest.approx(undisturbed_ne, rel=NE_WITHIN)


def test_a_killed_sparse_server_costs_no_quality_and_its_lost_updates_are_counted(
    undisturbed_ne: float, tmp_path: Path
) -> None:
    with training(tmp_path, recipe(tmp_path), ROLES) as fleet:
        fleet.wait_for_steps(NUM_STEPS // 3)
        with Client(Roster(fleet.out).address("sparse", 0), name="test") as client:
            before: dict[str, Any] = dict(client.call("status").facts)
            status: dict[str, Any] = {}
            wait_until(lambda: has_unsaved(client, before, status), what="updates that are in no snapshot")
        pid = address_of(fleet.out, "sparse").pid
        os.kill(pid, signal.SIGSTOP)  # so that its last snapshot can be read
        saved = json.loads((fleet.out / "snapshots" / "sparse-0" / "snapshot.json").read_text())["counts"]
        with Client(Roster(fleet.out).address("sparse", 1), name="test") as client:
            num_updates = client.call("status").facts["num_updates"]  # of the other server, which gets as many
        figures = kill_role(fleet, "sparse")
    in_snapshot = AppliedUpdates.from_json(saved["sent"]).num_updates
    assert 0 < status["num_updates"] - in_snapshot <= figures["num_lost_updates"]
    in_flight = 2 * NUM_TRAINERS
    assert figures["num_lost_updates"] == pytest.approx(num_updates - in_snapshot, abs=in_flight)
    assert last_of(fleet.out, "sparse", 1)["num_lost_updates"] == 0
    check_every_update_is_known(fleet.out)
    assert (figures["num_batches_repeated"], sum(steps_of(fleet.out).values())) == (0, NUM_STEPS)
    assert figures["ne_expected"] == pytest.approx(undisturbed_ne, rel=NE_WITHIN)


def has_unsaved(client: Client, before: dict[str, Any], status: dict[str, Any]) -> bool:
    """Whether a server has updates that are in no snapshot; sets `status` to its status, `before` to its status at the snapshot."""
    status.update(client.call("status").facts)
    if status["num_snapshots"] != before["num_snapshots"]:
        before.update(status)
    return bool(status["num_updates"] >= before["num_updates"] + 25)


def test_a_killed_dense_server_and_then_a_killed_reader_cost_no_quality_and_nothing_is_trained_on_twice(
    undisturbed_ne: float, tmp_path: Path
) -> None:
    with training(tmp_path, recipe(tmp_path), ROLES) as fleet:
        fleet.wait_for_steps(NUM_STEPS // 4)
        os.kill(address_of(fleet.out, "dense").pid, signal.SIGKILL)
        fleet.wait_for_steps(NUM_STEPS // 2)
        figures = kill_role(fleet, "reader", num_restarts=2)
    assert "dense 0 was killed by SIGKILL: restarting it" in fleet.printed
    assert figures["num_batches_repeated"] == figures["num_lost_updates"] == 0
    assert figures["num_batches_resent"] <= NUM_TRAINERS * MAX_HELD, "at most what was in flight from the reader"
    assert sum(steps_of(fleet.out).values()) == NUM_STEPS
    check_every_update_is_known(fleet.out)
    check_exchanges(fleet.out)
    trainers = [last_of(fleet.out, "trainer", number) for number in range(NUM_TRAINERS)]
    assert figures["trainer_num_missed"] == sum(trainer["num_missed"] for trainer in trainers)
    assert samples_of(fleet.out, "dense", 0)[1][-1]["num_exchanges"] > 0, "exchanges resumed after the restart"
    assert figures["ne_expected"] == pytest.approx(undisturbed_ne, rel=NE_WITHIN)


def test_one_killed_dense_server_of_two_costs_no_quality_and_the_other_exchanges_on(
    undisturbed_ne: float, tmp_path: Path
) -> None:
    with training(tmp_path, recipe(tmp_path), ROLES.replace("dense=1", "dense=2")) as fleet:
        fleet.wait_for_steps(NUM_STEPS // 4)
        figures = kill_role(fleet, "dense")
    assert figures["num_batches_repeated"] == figures["num_lost_updates"] == 0
    check_every_update_is_known(fleet.out)
    trainers = [last_of(fleet.out, "trainer", number) for number in range(NUM_TRAINERS)]
    assert figures["trainer_num_missed"] == sum(trainer["num_missed"] for trainer in trainers)
    exchanges = sum(trainer["num_exchanges"] for trainer in trainers)
    assert last_of(fleet.out, "dense", 1)["num_exchanges"] == exchanges, "the other server missed none"
    assert samples_of(fleet.out, "dense", 0)[1][-1]["num_exchanges"] > 0, "exchanges resumed after the restart"
    sizes = [last_of(fleet.out, "dense", number)["num_parameters"] for number in (0, 1)]
    assert abs(sizes[0] - sizes[1]) <= 1
    assert figures["ne_expected"] == pytest.approx(undisturbed_ne, rel=NE_WITHIN)


def test_a_frozen_server_is_replaced_and_when_all_roles_die_at_once_every_update_is_applied_or_counted_as_lost(
    tmp_path: Path,
) -> None:
    with training(tmp_path, recipe(tmp_path), ROLES.removesuffix(",snapshot_every_s=2")) as fleet:
        fleet.wait_for_steps(NUM_STEPS // 8)
        frozen = address_of(fleet.out, "sparse").pid
        os.kill(frozen, signal.SIGSTOP)
        wait_until(
            lambda: (found := read_address(fleet.out, "sparse", 0)) is not None and found.pid != frozen, what="its successor"
        )
        fleet.wait_for_steps(NUM_STEPS // 2)
        manifests = [fleet.out / "snapshots" / f"sparse-{number}" / "snapshot.json" for number in range(NUM_SPARSE)]
        wait_until(lambda: all(path.exists() for path in manifests), what="the first snapshots")
        fork_server = psutil.Process(address_of(fleet.out, "sparse").pid).parent()
        assert fork_server is not None
        fork_server.kill()
        figures = fleet.finish()
    assert not psutil.pid_exists(frozen)
    assert "sparse 0 has given no sign of life for 15 s: killing it" in fleet.printed
    assert "the fork server was killed by SIGKILL, and all roles with it: restarting them" in fleet.printed
    assert f"{figures['num_lost_updates']:,.0f} updates of rows were lost" in fleet.printed
    check_counts(fleet.out, figures)
    assert figures["num_restarts"] == 1 + NUM_SPARSE + 1 + 1 + NUM_TRAINERS, "nobody but the frozen server was blamed"
    for number in range(NUM_SPARSE):  # what readers count as done, servers have applied or count as lost
        server = last_of(fleet.out, "sparse", number)
        known = server["num_updates"] + server["num_lost_updates"]
        assert NUM_STEPS <= known <= NUM_STEPS + figures["num_batches_repeated"], server
        assert 0 < server["num_lost_updates"] < NUM_STEPS // 2
