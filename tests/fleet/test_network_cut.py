"""A fleet on two networks whose link is cut for ten seconds during training."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rowstead.spec.fleet import RoleKind
from tests.fleet.disturbed import (
    NE_WITHIN,
    NUM_STEPS,
    NUM_TRAINERS,
    ROLES,
    check_counts,
    check_every_update_is_known,
    check_exchanges,
    recipe,
    steps_of,
    training,
)
from tests.fleet.test_fleet import command
from tests.small_runs import wait_until

CUT_S = 10.0
ADDRESSES = {"here": "10.197.65.1", "there": "10.197.65.2"}
HERE: list[tuple[RoleKind, int]] = [("reader", 0), ("dense", 0), ("sparse", 0), ("trainer", 0)]
THERE: list[tuple[RoleKind, int]] = [("sparse", 1), ("trainer", 1)]

pytestmark = pytest.mark.slow


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Networks:
    """Two network namespaces, `here` and `there`, with one address each."""

    def __init__(self) -> None:
        self.names = {side: f"rf{os.getpid() % 100_000}{side[0]}" for side in ADDRESSES}

    def within(self, side: str) -> list[str]:
        """The prefix of a command that runs on a side."""
        return ["ip", "netns", "exec", self.names[side]]

    def create(self) -> None:
        here, there = self.names.values()
        ip("netns", "add", here)
        ip("netns", "add", there)
        ip("-n", here, "link", "add", f"{here}v", "type", "veth", "peer", "name", f"{there}v", "netns", there)
        for side, name in self.names.items():
            ip("-n", name, "addr", "add", f"{ADDRESSES[side]}/30", "dev", f"{name}v")
            ip("-n", name, "link", "set", f"{name}v", "up")
            ip("-n", name, "link", "set", "lo", "up")

    def set_link(self, state: str) -> None:
        """`up` or `down`."""
        name = self.names["there"]
        ip("-n", name, "link", "set", f"{name}v", state)

    def remove(self) -> None:
        for name in self.names.values():
            with contextlib.suppress(subprocess.CalledProcessError):  # it was not created
                ip("netns", "del", name)


@pytest.fixture
def networks() -> Iterator[Networks]:
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command `ip` (package iproute2)")
    networks = Networks()
    try:
        try:
            networks.create()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"cannot create network namespaces: {error.stderr!r}")
        yield networks
    finally:
        networks.remove()


@contextlib.contextmanager
def run_roles(networks: Networks, out: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """All roles of a fleet, started manually on both sides; killed at the end."""
    roles = []
    try:
        for side, members in (("here", HERE), ("there", THERE)):
            for kind, number in members:
                listens = ["--address", f"tcp://{ADDRESSES[side]}:0"]
                roles.append(subprocess.Popen([*networks.within(side), *command("role", kind, out, number, *listens)]))
        yield roles
    finally:
        for role in roles:
            role.kill()
            role.wait()


def test_a_network_cut_of_ten_seconds_costs_no_quality_and_no_batch_or_update_is_lost_or_repeated(
    networks: Networks, undisturbed_ne: float, tmp_path: Path
) -> None:
    manual = f"manual,{ROLES}"
    with training(tmp_path, recipe(tmp_path), manual, networks.within("here")) as fleet:
        wait_until(lambda: (fleet.out / "fleet.json").exists(), what="the roster")
        with run_roles(networks, fleet.out) as roles:
            fleet.wait_for_steps(NUM_STEPS // 3)
            networks.set_link("down")
            threading.Event().wait(CUT_S)
            steps_at_cut = sum(steps_of(fleet.out).values())
            networks.set_link("up")
            assert steps_at_cut < NUM_STEPS, "the cut came during training"
            figures = fleet.finish()
            assert [role.wait(60) for role in roles] == [0] * len(roles)
    check_counts(fleet.out, figures)
    check_every_update_is_known(fleet.out)
    check_exchanges(fleet.out)
    assert (figures["num_restarts"], figures["num_batches_repeated"], figures["num_lost_updates"]) == (0, 0, 0)
    assert figures["num_batches_resent"] <= 16 * NUM_TRAINERS, "at most what was in flight"
    assert sum(steps_of(fleet.out).values()) == NUM_STEPS
    assert figures["trainer_num_resent"] > 0, "requests in flight were sent again"
    assert figures["ne_expected"] == pytest.approx(undisturbed_ne, rel=NE_WITHIN)
