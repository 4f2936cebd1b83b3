"""Batch assignments of a reader: no batch is lost, and repeated ones are counted, whatever is killed and whenever."""

from __future__ import annotations

import contextlib
import json
import resource
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rowstead.fleet.batch_assignments import AssignmentLog, BatchAssignments, Holder, parse_log
from rowstead.spec.errors import RowsteadError

NAMES = ("trainer-0", "trainer-1", "trainer-2")
names = st.sampled_from(NAMES)


class Trainer:
    """What a trainer knows; all of it is lost when it is killed."""

    def __init__(self, incarnation):
        self.incarnation, self.sequence = incarnation, 0
        self.has, self.done = set(), []


class Fleet(RuleBasedStateMachine):
    """A reader with `total` batches, `per_epoch` per epoch, three trainers, and a coordinator that may be wrong."""

    @initialize(total=st.integers(0, 25), per_epoch=st.integers(1, 10))
    def begin(self, total, per_epoch):
        self.total, self.per_epoch = total, per_epoch
        self.trainers = {name: Trainer(1) for name in NAMES}
        self.trained = Counter()
        self.num_released = 0
        self.events = []
        self.assignments = BatchAssignments(self.record)
        self.saved = json.dumps(self.assignments.to_json())

    def record(self, event):
        self.events.append(json.dumps(event))
        self.num_released += len(event[1]) if event[0] == "release" else 0

    @rule(name=names, want=st.integers(0, 5), arrives=st.booleans())
    def ask(self, name, want, arrives):
        """A request whose reply may be lost."""
        trainer, holder = self.trainers[name], Holder(name, self.trainers[name].incarnation)
        trainer.sequence += 1
        assert self.assignments.acknowledge(holder, trainer.sequence, sorted(trainer.has), list(trainer.done))
        assigned = []
        for _ in range(want):
            if again := list(self.assignments.to_reassign):
                self.assignments.reassign(holder, again[0])
                assigned.append(again[0])
            elif self.assignments.next_number < self.total:
                number = self.assignments.assign_next(holder, 10, {"row": self.assignments.next_number + 1})
                assigned.append(number)
                if (number + 1) % self.per_epoch == 0:
                    self.assignments.end_epoch(10 * self.per_epoch + 1)
        if arrives:
            assert not trainer.has.intersection(assigned), "a trainer was assigned a batch that it has"
            trainer.has.update(assigned)
            trainer.done = []

    @rule(name=names, pick=st.integers(0, 100))
    def train(self, name, pick):
        trainer = self.trainers[name]
        if trainer.has:
            number = sorted(trainer.has)[pick % len(trainer.has)]
            trainer.has.remove(number)
            trainer.done.append(number)
            self.trained[number] += 1

    @rule(name=names)
    def kill_trainer(self, name):
        self.trainers[name] = Trainer(self.trainers[name].incarnation + 1)

    @rule(alive=st.sets(names))
    def coordinator_reports_live_trainers(self, alive):
        self.assignments.set_alive(alive)

    @rule(name=names)
    def leave(self, name):
        trainer = self.trainers[name]
        holder = Holder(name, trainer.incarnation)
        trainer.sequence += 1
        self.assignments.acknowledge(holder, trainer.sequence, sorted(trainer.has), list(trainer.done))
        self.assignments.leave(holder)
        self.trainers[name] = Trainer(trainer.incarnation + 1)

    @rule(name=names)
    def an_old_request_arrives_late(self, name):
        trainer, before = self.trainers[name], self.assignments.to_json()
        if trainer.sequence > 1 and not self.is_restarted:
            assert not self.assignments.acknowledge(
                Holder(name, trainer.incarnation), trainer.sequence - 1, [], list(range(self.total))
            )
            assert self.assignments.to_json() == before

    is_restarted = False

    @rule()
    def kill_reader(self):
        restored = BatchAssignments.from_json(json.loads(self.saved))
        for event in self.events:
            restored.replay(json.loads(event))
        assert restored.to_json() == self.assignments.to_json()
        restored.on_event = self.record
        self.assignments, self.is_restarted = restored, True  # it no longer knows the sequence numbers

    @rule()
    def save(self):
        self.saved, self.events = json.dumps(self.assignments.to_json()), []

    @invariant()
    def every_batch_is_held_or_to_reassign_or_done(self):
        if hasattr(self, "assignments"):
            assignments = self.assignments
            assert (
                assignments.num_done + assignments.num_held + len(assignments.to_reassign)
                == assignments.next_number
                <= self.total
            )
            assert assignments.num_samples == 10 * assignments.next_number
            assert sum(assignments.held_by.values()) == assignments.num_held
            assert assignments.num_skipped == assignments.next_number // self.per_epoch == assignments.next_epoch
            assert assignments.is_complete == (assignments.num_done == assignments.next_number)

    @invariant()
    def batches_trained_on_twice_are_counted(self):
        if hasattr(self, "assignments"):
            twice = sum(self.trained.values()) - len(self.trained)
            assert twice <= self.assignments.num_repeated <= self.num_released
            assert self.assignments.num_samples_repeated == 10 * self.assignments.num_repeated

    def teardown(self):
        if not hasattr(self, "assignments"):
            return
        for _ in range(2):  # the first round reports new incarnations, the second trains
            for name in NAMES:
                self.ask(name, self.total, True)
                while self.trainers[name].has:
                    self.train(name, 0)
                self.ask(name, 0, True)
        assert self.assignments.is_complete
        assert self.assignments.next_number == self.total
        assert set(self.trained) == set(range(self.total)), "a batch was lost"
        assert self.assignments.next_epoch == self.total // self.per_epoch
        self.every_batch_is_held_or_to_reassign_or_done()
        self.batches_trained_on_twice_are_counted()


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_each_batch_is_assigned_once_when_nothing_fails():
    assignments, a, b = BatchAssignments(), Holder("a", 1), Holder("b", 1)
    taken = {a: [], b: []}
    for sequence in range(1, 11):
        for holder in (a, b):
            assert assignments.acknowledge(holder, sequence, [], taken[holder][-1:])
            taken[holder].append(assignments.assign_next(holder, 3, {"row": sequence}))
    assert sorted(taken[a] + taken[b]) == list(range(20))
    assert assignments.num_repeated == assignments.num_resent == 0


def test_a_restarted_trainer_is_detected_without_the_coordinator():
    assignments = BatchAssignments()
    for _ in range(3):
        assignments.assign_next(Holder("a", 1), 5, {"row": 1})
    assert assignments.acknowledge(Holder("a", 2), 1, [], [])
    assert list(assignments.to_reassign) == [0, 1, 2]
    assert assignments.is_replaced(Holder("a", 1))
    assignments.reassign(Holder("a", 2), 0)
    assert (assignments.num_repeated, assignments.num_samples_repeated, assignments.num_resent) == (1, 5, 0)


def test_a_batch_lost_in_transit_is_not_counted_as_repeated():
    assignments, a = BatchAssignments(), Holder("a", 1)
    assignments.assign_next(a, 5, {"row": 1})
    assignments.acknowledge(a, 1, [], [])
    assert assignments.first_lost == 0
    assignments.reassign(a, 0)
    assert (assignments.num_repeated, assignments.num_resent, assignments.first_lost) == (0, 1, None)


def test_a_trainer_wrongly_considered_lost_keeps_its_batches():
    assignments, a = BatchAssignments(), Holder("a", 1)
    assignments.assign_next(a, 5, {"row": 1})
    assignments.assign_next(a, 5, {"row": 2})
    assignments.set_alive(["b"])
    assert list(assignments.to_reassign) == [0, 1]
    assignments.acknowledge(a, 1, [1], [0])
    assert (list(assignments.to_reassign), assignments.num_held, assignments.num_done, assignments.num_repeated) == (
        [],
        1,
        1,
        0,
    )


def test_a_log_restores_the_assignments_without_an_incomplete_line(tmp_path):
    path, a = tmp_path / "reader-0.progress", Holder("a", 1)
    progress = AssignmentLog(path, {"reader": 0})
    progress.assignments.assign_next(a, 5, {"row": 5})
    progress.assignments.assign_next(a, 5, {"row": 10})
    progress.flush()
    before = progress.assignments.to_json()
    progress.close()
    with open(path, "ab") as file:
        file.write(b'["done",[0')
    again = AssignmentLog(path, {"reader": 0})
    assert again.assignments.to_json() == before
    again.assignments.acknowledge(a, 1, [1], [0])
    again.flush()
    after = again.assignments.to_json()
    again.close()
    assert after["num_done"] == 1
    assert AssignmentLog(path, {"reader": 0}).assignments.to_json() == after


def test_a_log_whose_disk_was_full_for_a_moment_has_no_part_of_a_line_and_nothing_after_it(tmp_path):
    path = tmp_path / "reader-0.progress"
    log, holder = AssignmentLog(path, {"reader": 0}), Holder("trainer-0", 1)
    with contextlib.closing(log):
        log.assignments.assign_next(holder, 64, {})
        log.flush()
        before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
        for _ in range(2):
            log.assignments.assign_next(holder, 64, {})
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 50, limits[1]))  # in the second line
        try:
            with pytest.raises(RowsteadError, match="so no more batches are assigned"):
                log.flush()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        log.assignments.acknowledge(holder, 1, [0], [1])
        with pytest.raises(RowsteadError, match="so no more batches are assigned"):
            log.flush()  # though there is space again: the batch that is done was never assigned in the file
    assert path.read_bytes() == before
    assert parse_log(before)[1].next_number == 1


def test_a_log_stays_short(tmp_path):
    path, a = tmp_path / "reader-0.progress", Holder("a", 1)
    progress = AssignmentLog(path, {"reader": 0})
    for sequence in range(20_000):
        number = progress.assignments.assign_next(a, 5, {"window": sequence, "row": 123_456, "of": 1_000_000})
        progress.assignments.acknowledge(a, sequence, [], [number])
        progress.flush()
        assert sequence % 1000 or path.stat().st_size < 1.2 * (1 << 20)
    restored = AssignmentLog(path, {"reader": 0})
    assert restored.assignments.to_json() == progress.assignments.to_json()


def test_a_log_of_another_share_or_format_is_refused(tmp_path):
    path = tmp_path / "reader-0.progress"
    AssignmentLog(path, {"batch_size": 64}).close()
    with pytest.raises(RowsteadError, match=r"another reader or recipe.*remove the file"):
        AssignmentLog(path, {"batch_size": 32})
    for content in (b"{}\n", b"\xff\n", b"", b'{"share": {}, "assignments": {}}\n["what"]\n'):
        path.write_bytes(content)
        with pytest.raises(RowsteadError, match=r"not a reader's assignment log.*--init-from"):
            AssignmentLog(path, {"batch_size": 32})
