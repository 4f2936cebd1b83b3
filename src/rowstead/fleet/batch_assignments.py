"""Which batches of a reader are assigned to which trainer, and which are done; and the log file of that.

A reader numbers the batches of its share from 0, across epochs. Every number below `next_number` is held by a trainer, to be
reassigned, or done. Only the first two are stored, each with its position in the log, so that the state stays small.

Each change is an event, a short JSON list. Applying the same events to an empty state, or to one restored by `from_json`, gives
the same state: this is how a killed reader recovers its assignments.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rowstead.data.row_order import Cursor
from rowstead.records.files import write_atomic
from rowstead.records.plain_files import is_count, parse_json, read_plain, shown
from rowstead.spec.errors import RowsteadError

Event = list[Any]
_COMPACT_BYTES = 1 << 20
"""Size above which the file is rewritten."""


@dataclass(frozen=True)
class AssignedBatch:
    """An assigned batch: where it begins in the log, and its number of samples."""

    epoch: int
    cursor: Cursor | None
    num_samples: int


@dataclass(frozen=True)
class Holder:
    """One incarnation of a trainer."""

    name: str
    incarnation: int
    """Increases with each restart."""


class BatchAssignments:
    """The assignments of one reader. `on_event` receives every event. No sockets, no files."""

    def __init__(self, on_event: Callable[[Event], None] = lambda event: None) -> None:
        self.on_event = on_event
        self.next_number = 0
        """Number of the next batch that was never assigned."""
        self.next_epoch = 0
        self.next_cursor: Cursor | None = None
        """Where that batch begins; None at the start of the epoch."""
        self.num_samples = 0
        """Samples of all assigned batches, each counted once."""
        self.num_done = 0
        self.num_repeated = 0
        """Batches reassigned because their holder was lost; they may have been trained on twice."""
        self.num_samples_repeated = 0
        self.num_resent = 0
        """Batches reassigned because they were lost in transit; they are trained on once."""
        self.num_skipped = 0
        """Bad rows skipped, in epochs that are completely assigned."""
        self.epoch_samples = 0
        self._held: dict[int, tuple[Holder, AssignedBatch]] = {}
        self._to_reassign: dict[int, tuple[bool, AssignedBatch]] = {}
        """Whether the batch may have been trained on before, and the batch."""
        self._incarnations: dict[str, int] = {}
        self._sequences: dict[Holder, int] = {}
        self._apply: dict[str, Callable[..., None]] = {
            "assign": self._on_assign,
            "reassign": self._on_reassign,
            "done": self._on_done,
            "keep": self._on_keep,
            "lost": self._on_lost,
            "release": self._on_release,
            "epoch": self._on_epoch,
        }

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def held_by(self) -> dict[str, int]:
        """Number of batches that each trainer holds, if any."""
        return dict(Counter(holder.name for holder, _ in self._held.values()))

    @property
    def to_reassign(self) -> dict[int, AssignedBatch]:
        """Batches to reassign, in the order of the log."""
        return {number: self._to_reassign[number][1] for number in sorted(self._to_reassign)}

    @property
    def first_lost(self) -> int | None:
        """The first batch lost in transit: later ones wait for it, so that a single trainer sees the log in order."""
        return min((number for number, (may_repeat, _) in self._to_reassign.items() if not may_repeat), default=None)

    @property
    def is_complete(self) -> bool:
        """Whether every assigned batch is done."""
        return not self._held and not self._to_reassign

    def is_replaced(self, holder: Holder) -> bool:
        """Whether a later incarnation of this trainer is known."""
        return holder.incarnation < self._incarnations.get(holder.name, holder.incarnation)

    def acknowledge(self, holder: Holder, sequence: int, held: Sequence[int], done: Sequence[int]) -> bool:
        """Record what a trainer reports with its request `sequence`: the batches that it holds, and those that are done.

        Batches assigned to this trainer that it neither holds nor has done were lost in transit. Those of its earlier incarnations
        are reassigned. Returns False, and changes nothing, if the request is older than one already recorded.
        """
        assert not self.is_replaced(holder)
        if sequence < self._sequences.get(holder, sequence):
            return False
        self._sequences[holder] = sequence
        self._release(lambda other: other.name == holder.name and other != holder)
        self._incarnations[holder.name] = holder.incarnation
        # A batch that is done stays done, even if its trainer was considered lost or another one holds it now.
        finished = [number for number in dict.fromkeys(done) if number in self._held or number in self._to_reassign]
        if finished:
            self._do(["done", finished])
        has = set(held)
        kept = [number for number in sorted(has) if number in self._to_reassign]
        if kept:  # the trainer was wrongly considered lost
            self._do(["keep", holder.name, holder.incarnation, kept])
        lost = [number for number, (other, _) in self._held.items() if other == holder and number not in has]
        if lost:
            self._do(["lost", sorted(lost)])
        return True

    def assign_next(self, holder: Holder, num_samples: int, cursor: Cursor) -> int:
        """Assign the next batch to a trainer; `cursor` is where the one after it begins. Returns its number."""
        self._do(["assign", holder.name, holder.incarnation, num_samples, cursor])
        return self.next_number - 1

    def reassign(self, holder: Holder, number: int) -> None:
        assert number in self._to_reassign
        self._do(["reassign", holder.name, holder.incarnation, number])

    def leave(self, holder: Holder) -> None:
        """Release the batches of a trainer that leaves."""
        self._release(lambda other: other == holder)

    def set_alive(self, names: Iterable[str]) -> None:
        """Set the live trainers; the batches of all others are released."""
        alive = set(names)
        self._release(lambda holder: holder.name not in alive)

    def end_epoch(self, num_rows: int) -> None:
        """End the epoch; this reader's share of it has `num_rows` rows, bad ones included."""
        self._do(["epoch", num_rows])

    def replay(self, event: Event) -> None:
        self._apply[event[0]](*event[1:])

    def replay_checked(self, event: Event) -> None:
        """Apply an event from a file, whose values may be anything."""
        for value in event[1:]:
            if isinstance(value, list):
                _check_counts(*value)
            elif not isinstance(value, str):
                (_check_cursor if isinstance(value, dict) else _check_counts)(value)
        if event[0] == "assign":
            _check_cursor(event[-1])
        self.replay(event)

    def _release(self, is_lost: Callable[[Holder], bool]) -> None:
        numbers = sorted(number for number, (holder, _) in self._held.items() if is_lost(holder))
        if numbers:
            self._do(["release", numbers])

    def _do(self, event: Event) -> None:
        self.replay(event)
        self.on_event(event)

    def _on_assign(self, name: str, incarnation: int, num_samples: int, cursor: Cursor) -> None:
        self._hold(self.next_number, Holder(name, incarnation), AssignedBatch(self.next_epoch, self.next_cursor, num_samples))
        self.next_number += 1
        self.next_cursor = cursor
        self.num_samples += num_samples
        self.epoch_samples += num_samples

    def _on_reassign(self, name: str, incarnation: int, number: int) -> None:
        may_repeat, entry = self._to_reassign.pop(number)
        self._hold(number, Holder(name, incarnation), entry)
        if may_repeat:
            self.num_repeated += 1
            self.num_samples_repeated += entry.num_samples
        else:
            self.num_resent += 1

    def _hold(self, number: int, holder: Holder, entry: AssignedBatch) -> None:
        self._held[number] = holder, entry
        self._incarnations[holder.name] = max(holder.incarnation, self._incarnations.get(holder.name, holder.incarnation))

    def _on_done(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if self._held.pop(number, None) is None:
                del self._to_reassign[number]
        self.num_done += len(numbers)

    def _on_keep(self, name: str, incarnation: int, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._hold(number, Holder(name, incarnation), self._to_reassign.pop(number)[1])

    def _on_lost(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._to_reassign[number] = False, self._held.pop(number)[1]

    def _on_release(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._to_reassign[number] = True, self._held.pop(number)[1]

    def _on_epoch(self, num_rows: int) -> None:
        self.num_skipped += num_rows - self.epoch_samples
        self.next_epoch += 1
        self.next_cursor, self.epoch_samples = None, 0

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON, without the sequence numbers of requests."""
        return {
            **{name: getattr(self, name) for name in _COUNTERS},
            "held": [[n, h.name, h.incarnation, e.epoch, e.cursor, e.num_samples] for n, (h, e) in self._held.items()],
            "to_reassign": [
                [n, may_repeat, e.epoch, e.cursor, e.num_samples] for n, (may_repeat, e) in self._to_reassign.items()
            ],
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> BatchAssignments:
        """The inverse of `to_json`; raises a ValueError, KeyError or TypeError for anything else."""
        assignments = cls()
        for name in _COUNTERS:
            (_check_cursor if name == "next_cursor" else _check_counts)(content[name])
            setattr(assignments, name, content[name])
        for number, name, incarnation, *entry in content["held"]:
            _check_counts(number, incarnation)
            assignments._hold(number, Holder(_check_name(name), incarnation), _assigned_batch(*entry))
        for number, may_repeat, *entry in content["to_reassign"]:
            _check_counts(number)
            assignments._to_reassign[number] = bool(may_repeat), _assigned_batch(*entry)
        return assignments


_COUNTERS = (
    *("next_number", "next_epoch", "next_cursor", "num_samples", "num_done"),
    *("num_repeated", "num_samples_repeated", "num_resent", "num_skipped", "epoch_samples"),
)
"""Attributes that are stored as they are."""


class AssignmentLog:
    """`BatchAssignments` in a file: the state, then one line per event. A file of another `identity` is refused.

    Events are written before they are acted on, so a reader that is killed at any moment loses nothing that others know. An
    incomplete last line was not acted on, and is dropped. There is no fsync: the file survives its process, not a power failure.
    """

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self._path, self._identity = path, identity
        self._new: list[Event] = []
        self._file: int | None = None
        self.assignments = self._restore() if path.exists() else BatchAssignments()
        self.assignments.on_event = self._new.append
        self._write_whole()

    def flush(self) -> None:
        """Append new events to the file; only after that may they be acted on."""
        if not self._new:
            return
        assert self._file is not None
        lines = b"".join(_line(event) for event in self._new)
        self._new.clear()
        try:
            while lines:
                written = os.write(self._file, lines)
                self._num_bytes += written
                lines = lines[written:]
            if self._num_bytes > _COMPACT_BYTES:
                self._write_whole()
        except OSError as error:
            raise RowsteadError(f"cannot write {self._path}, so no more batches are assigned: {error}") from None

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write_whole(self) -> None:
        self.close()
        content = _line({"share": self._identity, "assignments": self.assignments.to_json()})
        write_atomic(self._path, content, mode=0o600)
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        self._num_bytes = len(content)

    def _restore(self) -> BatchAssignments:
        try:
            identity, assignments = parse_log(read_plain(self._path))
        except (ValueError, OSError) as error:
            raise RowsteadError(
                f"{self._path} is not a reader's assignment log of this version ({error}): start a new run with the weights of "
                "this one (`rowstead train RECIPE --init-from RUN`)"
            ) from None
        if identity != self._identity:
            raise RowsteadError(
                f"{self._path} is of another reader or recipe: {identity}, expected {self._identity}. Start the reader as "
                "before, or remove the file to start over"
            )
        return assignments


def parse_log(content: bytes) -> tuple[dict[str, Any], BatchAssignments]:
    """Parse an assignment log: its identity and its state. Raises a ValueError if it is damaged, or of another version."""
    whole, _, _ = content.rpartition(b"\n")
    try:
        first, *events = [parse_json(line) for line in whole.splitlines()]
        identity, assignments = first["share"], BatchAssignments.from_json(first["assignments"])
        for event in events:
            assignments.replay_checked(event)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    return identity, assignments


def _assigned_batch(epoch: int, cursor: Cursor | None, num_samples: int) -> AssignedBatch:
    _check_counts(epoch, num_samples)
    _check_cursor(cursor)
    return AssignedBatch(epoch, cursor, num_samples)


def _check_counts(*values: Any) -> None:
    for value in values:
        if not is_count(value):
            raise ValueError(f"{shown(value)} is not a count")


def _check_cursor(cursor: Any) -> None:
    if cursor is not None and not (isinstance(cursor, dict) and all(map(is_count, cursor.values()))):
        raise ValueError(f"{shown(cursor)} is not a cursor")


def _check_name(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"{shown(name)} is not a name")
    return name


def _line(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"
