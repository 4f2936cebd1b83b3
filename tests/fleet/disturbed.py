"""A fleet for fault-injection tests, and the work that was finished, lost and repeated according to its roles' files."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rowstead.records.files import json_line
from rowstead.spec.fleet import RoleKind
from tests.fleet.test_fleet import command, figures_of, left_behind
from tests.small_runs import small_plain, wait_until

NUM_TRAINERS, NUM_SPARSE = 2, 2
ROLES = f"trainers={NUM_TRAINERS},sparse={NUM_SPARSE},dense=1,readers=1,snapshot_every_s=2"
NUM_STEPS, BATCH_SIZE, PERIOD = 2000, 96, 4
NE_WITHIN = 0.003
"""Relative tolerance of NE against the undisturbed run, in expectation under the log's teacher: labels add no noise."""


def recipe(folder: Path) -> Path:
    """Write a recipe that a fleet trains for some ten seconds.

    It is learned so well that two models with different initial weights differ by only a tenth of a percent in NE: more would hide the cost
    of a fault.
    """
    plain = small_plain()
    plain["data"]["synth"] |= {"num_train_samples": NUM_STEPS * BATCH_SIZE, "num_eval_samples": 20_000}
    plain["data"]["synth"] |= {"signal": 1.0, "interaction_share": 0.0}
    plain["model"] |= {"bottom": [64], "top": [64]}
    plain["train"] = {
        "batch_size": BATCH_SIZE,
        "schedule": {"decay": "linear"},
        "sparse_optimizer": {"lr": 0.1},
        "dense_optimizer": {"lr": 0.02},
        "sync": {"period": PERIOD},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(plain))
    return path


class Fleet:
    """A running fleet: the coordinator's process, the run's folder, and its output."""

    def __init__(self, folder: Path, recipe: Path, fleet: str, within: Sequence[str] = ()) -> None:
        """`within` is a prefix of the command, such as one that enters a network namespace."""
        self.out, self._printed = folder / "fleet", folder / "printed.txt"
        started = [*within, *command("train", recipe, "--fleet", fleet, "--out", self.out)]
        with open(self._printed, "w") as file:
            self.coordinator = subprocess.Popen(started, stdout=file, stderr=subprocess.STDOUT, text=True)

    @property
    def printed(self) -> str:
        return self._printed.read_text()

    def wait_for_steps(self, num_steps: int) -> None:
        """Wait until all trainers together have made `num_steps`."""

        def is_reached() -> bool:
            assert self.coordinator.poll() is None, f"the fleet exited too early:\n{self.printed}"
            return sum(steps_of(self.out).values()) >= num_steps

        wait_until(is_reached, what=f"{num_steps} steps")

    def finish(self, deadline_s: float = 240.0) -> dict[str, float]:
        """Wait for the end of training, and return the figures of its record."""
        code = self.coordinator.wait(deadline_s)
        assert code == 0, self.printed
        return figures_of(self.out)


@contextlib.contextmanager
def training(folder: Path, recipe: Path, fleet: str, within: Sequence[str] = ()) -> Iterator[Fleet]:
    """Run a fleet, and kill it at the end."""
    running = Fleet(folder, recipe, fleet, within)
    try:
        yield running
    finally:
        running.coordinator.kill()
        running.coordinator.wait()


def train_undisturbed(folder: Path) -> float:
    """Train the same fleet without faults, and return its NE."""
    with training(folder, recipe(folder), ROLES) as fleet:
        figures = fleet.finish()
        check_counts(fleet.out, figures)
        assert figures["num_batches_repeated"] == figures["num_batches_resent"] == figures["num_lost_updates"] == 0
        return figures["ne_expected"]


# The roles' files


def samples_of(out: Path, kind: RoleKind, number: int) -> dict[int, list[dict[str, Any]]]:
    """The usage samples of a role, by incarnation."""
    samples: dict[int, list[dict[str, Any]]] = {}
    try:
        lines = (out / "roles" / f"{kind}-{number}.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return {}
    for line in lines:
        with contextlib.suppress(ValueError):  # cut off when its process was killed, or not yet complete
            sample = json.loads(line)
            samples.setdefault(sample["incarnation"], []).append(sample)
    return samples


def last_of(out: Path, kind: RoleKind, number: int) -> dict[str, Any]:
    """The last usage sample of a role."""
    samples = samples_of(out, kind, number)
    return samples[max(samples)][-1] if samples else {}


def steps_of(out: Path) -> dict[tuple[str, int], int]:
    """Steps by trainer and incarnation, as each has counted them; exact for an incarnation that was not killed."""
    return {
        (f"trainer-{number}", incarnation): int(samples[-1].get("num_steps", 0))
        for number in range(NUM_TRAINERS)
        for incarnation, samples in samples_of(out, "trainer", number).items()
    }


@dataclass(frozen=True, kw_only=True)
class AssignmentCounts:
    """Counts from the reader's assignment log: which trainer got which batch, and which had it when it was done."""

    done_by: Mapping[tuple[str, int], int]
    """Batches by trainer and incarnation."""
    num_reassigned: int
    """Batches that were assigned again."""
    num_repeated: int
    """Of those, after the first trainer was lost."""


def read_assignments(out: Path) -> AssignmentCounts:
    """Read the log from the beginning, or since the last start of the reader."""
    first, *events = [json.loads(line) for line in (out / "roles" / "reader-0.progress").read_text().splitlines()]
    holder = {number: (name, client) for number, name, client, *_ in first["assignments"]["held"]}
    next_number = first["assignments"]["next_number"]
    released: set[int] = set()
    done_by: Counter[tuple[str, int]] = Counter()
    num_reassigned = num_repeated = 0
    for event, *facts in events:
        if event == "assign":
            holder[next_number] = facts[0], facts[1]
            next_number += 1
        elif event == "reassign":
            holder[facts[2]] = facts[0], facts[1]
            num_reassigned += 1
            num_repeated += facts[2] in released
            released.discard(facts[2])
        elif event == "keep":
            holder.update(dict.fromkeys(facts[2], (facts[0], facts[1])))
            released.difference_update(facts[2])
        elif event == "release":
            released.update(facts[0])
        elif event == "done":
            done_by.update(holder[number] for number in facts[0])
    clients = {name: sorted({client for other, client in done_by if other == name}) for name, _ in done_by}
    numbered = {(name, clients[name].index(client)): count for (name, client), count in done_by.items()}
    return AssignmentCounts(done_by=numbered, num_reassigned=num_reassigned, num_repeated=num_repeated)


def check_counts(out: Path, figures: Mapping[str, float]) -> None:
    """Check what holds for every finished run: every batch is done once, and the record agrees with the roles' files."""
    assert left_behind(out) == []
    said = json_line({name: value for name, value in figures.items() if name.startswith("num_")})
    assert (figures["num_steps"], figures["num_samples"]) == (NUM_STEPS, NUM_STEPS * BATCH_SIZE), said
    reader, log = last_of(out, "reader", 0), read_assignments(out)
    assert reader["num_done"] == reader["num_batches"] == NUM_STEPS, said
    assert figures["num_batches_repeated"] == log.num_repeated, said
    assert figures["num_batches_resent"] == log.num_reassigned - log.num_repeated, said
    assert figures["num_samples_repeated"] == BATCH_SIZE * figures["num_batches_repeated"], said
    servers = [last_of(out, "sparse", number) for number in range(NUM_SPARSE)]
    assert figures["num_lost_updates"] == sum(server["num_lost_updates"] for server in servers), said
    roles = [path.stem.split("-") for path in (out / "roles").glob("*.jsonl")]
    restarts = sum(max(samples_of(out, kind, int(number)), default=0) for kind, number in roles)  # type: ignore[arg-type]
    assert figures["num_restarts"] == restarts, said


def check_every_update_is_known(out: Path) -> None:
    """Check, where no trainer was killed, that every trained batch is applied to each server's rows or counted as lost there."""
    num_steps = sum(steps_of(out).values())
    for number in range(NUM_SPARSE):
        server = last_of(out, "sparse", number)
        assert server["num_updates"] + server["num_lost_updates"] == num_steps, (number, num_steps, server)


def check_exchanges(out: Path) -> None:
    """Check that every due exchange took place or is counted as missed."""
    for number in range(NUM_TRAINERS):
        trainer = last_of(out, "trainer", number)
        due = -(-trainer["num_steps"] // PERIOD)
        # An exchange that failed after its first half counts as both; so may the last one.
        assert due <= trainer["num_exchanges"] + trainer["num_missed"] <= due + 2, (number, due, trainer)
