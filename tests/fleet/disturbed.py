"""A fleet to be disturbed while it trains, and what the files of its roles say of the work that was done, lost and repeated."""

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
from rowstead.spec.fleet import KINDS, RoleKind
from tests.fleet.test_fleet import command, figures_of, left_behind
from tests.small_runs import small_plain, wait_until

NUM_TRAINERS, NUM_SPARSE = 2, 2
ROLES = f"trainers={NUM_TRAINERS},sparse={NUM_SPARSE},dense=1,readers=1,snapshot_every_s=2"
NUM_STEPS, BATCH_SIZE, PERIOD = 2000, 96, 4
NE_WITHIN = 0.003
"""Of the undisturbed run's NE, in expectation under the log's teacher: labels add no noise."""


def recipe(folder: Path) -> Path:
    """A log on which a fleet is busy for some ten seconds.

    It is learned so well that two models that began with other weights differ by a tenth of a percent in NE: more would hide what a
    fault costs.
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
    """A fleet at work: its head's process, its run's folder, and what it prints."""

    def __init__(self, folder: Path, recipe: Path, fleet: str, within: Sequence[str] = ()) -> None:
        """`within` are the words before the command, such as those that lead into a network namespace."""
        self.out, self._printed = folder / "fleet", folder / "printed.txt"
        started = [*within, *command("train", recipe, "--fleet", fleet, "--out", self.out)]
        with open(self._printed, "w") as file:
            self.head = subprocess.Popen(started, stdout=file, stderr=subprocess.STDOUT, text=True)

    @property
    def printed(self) -> str:
        return self._printed.read_text()

    def wait_for_steps(self, num_steps: int) -> None:
        """Return once all trainers together have made so many."""

        def has_come() -> bool:
            assert self.head.poll() is None, f"the fleet has ended too early:\n{self.printed}"
            return sum(steps_of(self.out).values()) >= num_steps

        wait_until(has_come, what=f"{num_steps} steps")

    def end(self, deadline_s: float = 240.0) -> dict[str, float]:
        """Wait until it has trained to the end; the figures of its record."""
        code = self.head.wait(deadline_s)
        assert code == 0, self.printed
        return figures_of(self.out)


@contextlib.contextmanager
def training(folder: Path, recipe: Path, fleet: str, within: Sequence[str] = ()) -> Iterator[Fleet]:
    """A fleet that is gone at the end, whatever happens."""
    fleet_at_work = Fleet(folder, recipe, fleet, within)
    try:
        yield fleet_at_work
    finally:
        fleet_at_work.head.kill()
        fleet_at_work.head.wait()


def train_undisturbed(folder: Path) -> float:
    """NE of the same fleet on the same samples, when nothing happens to it."""
    with training(folder, recipe(folder), ROLES) as fleet:
        figures = fleet.end()
        check_counts(fleet.out, figures)
        assert figures["num_batches_repeated"] == figures["num_batches_resent"] == figures["num_lost_updates"] == 0
        return figures["ne_expected"]


# What the roles' own files say


def samples_of(out: Path, kind: RoleKind, number: int) -> dict[int, list[dict[str, Any]]]:
    """What a role has sampled of itself, in each of its lives."""
    lives: dict[int, list[dict[str, Any]]] = {}
    try:
        lines = (out / "roles" / f"{kind}-{number}.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return {}
    for line in lines:
        with contextlib.suppress(ValueError):  # torn when its process was killed, or not yet written whole
            sample = json.loads(line)
            lives.setdefault(sample["incarnation"], []).append(sample)
    return lives


def last_of(out: Path, kind: RoleKind, number: int) -> dict[str, Any]:
    """The last that a role has sampled."""
    lives = samples_of(out, kind, number)
    return lives[max(lives)][-1] if lives else {}


def steps_of(out: Path) -> dict[tuple[str, int], int]:
    """Steps by trainer and life, as each has counted them itself; exact for a life that was not cut short."""
    return {
        (f"trainer-{number}", life): int(samples[-1].get("num_steps", 0))
        for number in range(NUM_TRAINERS)
        for life, samples in samples_of(out, "trainer", number).items()
    }


@dataclass(frozen=True, kw_only=True)
class Book:
    """The reader's file, read line by line: who got which batch, and whose it was when it was done."""

    done_by: Mapping[tuple[str, int], int]
    """Batches by trainer and life, lives counted from 0."""
    num_again: int
    """Times that a batch went to somebody after it had gone to somebody before."""
    num_again_after_death: int
    """Of those, after the first of the two was gone."""


def book_of(out: Path) -> Book:
    """From the beginning, or since the reader was started last."""
    first, *events = [json.loads(line) for line in (out / "roles" / "reader-0.progress").read_text().splitlines()]
    holder = {number: (name, life) for number, name, life, *_ in first["book"]["held"]}
    next_number = first["book"]["next_number"]
    gone: set[int] = set()
    done_by: Counter[tuple[str, int]] = Counter()
    num_again = num_again_after_death = 0
    for event, *facts in events:
        if event == "new":
            holder[next_number] = facts[0], facts[1]
            next_number += 1
        elif event == "again":
            holder[facts[2]] = facts[0], facts[1]
            num_again += 1
            num_again_after_death += facts[2] in gone
            gone.discard(facts[2])
        elif event == "back":
            holder.update(dict.fromkeys(facts[2], (facts[0], facts[1])))
            gone.difference_update(facts[2])
        elif event == "gone":
            gone.update(facts[0])
        elif event == "done":
            done_by.update(holder[number] for number in facts[0])
    lives = {name: sorted({life for other, life in done_by if other == name}) for name, _ in done_by}
    numbered = {(name, lives[name].index(life)): count for (name, life), count in done_by.items()}
    return Book(done_by=numbered, num_again=num_again, num_again_after_death=num_again_after_death)


def check_counts(out: Path, figures: Mapping[str, float]) -> None:
    """What holds for every run that has ended: all is done once by the reader's book, and the record says what the roles' files say."""
    assert left_behind(out) == []
    said = json_line({name: value for name, value in figures.items() if name.startswith("num_")})
    assert (figures["num_steps"], figures["num_samples"]) == (NUM_STEPS, NUM_STEPS * BATCH_SIZE), said
    reader, book = last_of(out, "reader", 0), book_of(out)
    assert reader["num_done"] == reader["num_batches"] == NUM_STEPS, said
    assert figures["num_batches_repeated"] == book.num_again_after_death, said
    assert figures["num_batches_resent"] == book.num_again - book.num_again_after_death, said
    assert figures["num_samples_repeated"] == BATCH_SIZE * figures["num_batches_repeated"], said
    servers = [last_of(out, "sparse", number) for number in range(NUM_SPARSE)]
    assert figures["num_lost_updates"] == sum(server["num_lost_updates"] for server in servers), said
    restarts = sum(max(samples_of(out, kind, 0), default=0) for kind in KINDS)
    assert figures["num_restarts"] == restarts, said


def check_every_update_is_known(out: Path) -> None:
    """Each batch that was trained on is an update in each server's rows, or is counted as lost there. Where no trainer was killed."""
    num_steps = sum(steps_of(out).values())
    for number in range(NUM_SPARSE):
        server = last_of(out, "sparse", number)
        assert server["num_updates"] + server["num_lost_updates"] == num_steps, (number, num_steps, server)


def check_exchanges(out: Path) -> None:
    """Every exchange that was due took place or is counted as one that did not."""
    for number in range(NUM_TRAINERS):
        trainer = last_of(out, "trainer", number)
        due = -(-trainer["num_steps"] // PERIOD)
        # One that got as far as the exchange but not as far as leaving the optimizer's state is both; so may the last word be.
        assert due <= trainer["num_exchanges"] + trainer["num_missed"] <= due + 2, (number, due, trainer)
