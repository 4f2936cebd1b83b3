"""`BatchAssignments`: which batches of a reader were handed out, to whom, and which of them are done. Pure: no sockets, no files.

A reader numbers the batches of its share from 0, through all epochs. Every number below `next_number` is in one of three
states: held by a trainer, to be handed out again, or done. Only the first two are kept, each with the place in the log where
reading gives the batch once more, so that the book stays as small as what is under way.

Each change is also an event, a short list that JSON can hold. The same events, applied to an empty book or to one that was
restored from `to_json`, lead to the same state: that is how a reader that was killed knows what it had handed out.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rowstead.data.source import Cursor
from rowstead.records.files import write_atomic
from rowstead.spec.errors import RowsteadError

Event = list[Any]


@dataclass(frozen=True)
class AssignedBatch:
    """A batch that was handed out: where reading it begins, and how many examples it has."""

    epoch: int
    cursor: Cursor | None
    num_samples: int


@dataclass(frozen=True)
class Holder:
    """A trainer in one of its lives."""

    name: str
    incarnation: int
    """Larger in each life than in the one before."""


class BatchAssignments:
    """The book of one reader. `on_event` hears of every event."""

    def __init__(self, on_event: Callable[[Event], None] = lambda event: None) -> None:
        self.on_event = on_event
        self.next_number = 0
        """The batch that was never handed out and comes next."""
        self.next_epoch = 0
        self.next_cursor: Cursor | None = None
        """Where that batch begins; none at the start of the epoch."""
        self.num_samples = 0
        """Examples of all batches handed out, each counted once."""
        self.num_done = 0
        self.num_repeated = 0
        """Times that a batch went out again because whoever held it was gone, and may have trained on it."""
        self.num_samples_repeated = 0
        self.num_resent = 0
        """Times that a batch went out again because it was lost on its way: nobody had trained on it."""
        self.num_skipped = 0
        """Bad rows left out, of the epochs that were handed out to their end."""
        self._epoch_samples = 0
        self._held: dict[int, tuple[Holder, AssignedBatch]] = {}
        self._to_reassign: dict[int, tuple[bool, AssignedBatch]] = {}
        """Whether somebody may have trained on the batch before, and where it begins."""
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
        """How many batches each trainer holds, of those that hold any."""
        return dict(Counter(holder.name for holder, _ in self._held.values()))

    @property
    def to_reassign(self) -> dict[int, AssignedBatch]:
        """Batches to be handed out again, in the order of the log."""
        return {number: self._to_reassign[number][1] for number in sorted(self._to_reassign)}

    @property
    def first_lost(self) -> int | None:
        """The first batch that was lost on its way: later ones wait for it, so that a trainer alone sees the log in order."""
        return min((number for number, (may_repeat, _) in self._to_reassign.items() if not may_repeat), default=None)

    @property
    def is_complete(self) -> bool:
        """Whether everything that was handed out is done."""
        return not self._held and not self._to_reassign

    @property
    def num_epochs_done(self) -> int:
        """Epochs of which every batch is done."""
        under_way = [entry.epoch for _, entry in (*self._held.values(), *self._to_reassign.values())]
        return min(under_way, default=self.next_epoch)

    def is_replaced(self, holder: Holder) -> bool:
        """Whether a later life of this trainer has been heard of."""
        return holder.incarnation < self._incarnations.get(holder.name, holder.incarnation)

    def acknowledge(self, holder: Holder, sequence: int, held: Sequence[int], done: Sequence[int]) -> bool:
        """Take in what a trainer says with its request number `sequence`: all that it has and is not done with, and what is done.

        What the book has with this trainer, and it neither has nor did, was lost on its way. What an earlier life of the
        trainer held is to be handed out again. False where the request is older than one already taken in: then it means nothing.
        """
        assert not self.is_replaced(holder)
        if sequence < self._sequences.get(holder, sequence):
            return False
        self._sequences[holder] = sequence
        self._release(lambda other: other.name == holder.name and other != holder)
        self._incarnations[holder.name] = holder.incarnation
        # Done is done, also where the trainer was taken for gone meanwhile, whoever has the batch now.
        finished = [number for number in dict.fromkeys(done) if number in self._held or number in self._to_reassign]
        if finished:
            self._do(["done", finished])
        kept = set(held)
        back = [number for number in sorted(kept) if number in self._to_reassign]
        if back:  # it was taken for gone, wrongly
            self._do(["keep", holder.name, holder.incarnation, back])
        lost = [number for number, (other, _) in self._held.items() if other == holder and number not in kept]
        if lost:
            self._do(["lost", sorted(lost)])
        return True

    def assign_next(self, holder: Holder, num_samples: int, cursor: Cursor) -> int:
        """Give the next batch to a trainer; `cursor` is where the one after it begins. Returns its number."""
        self._do(["assign", holder.name, holder.incarnation, num_samples, cursor])
        return self.next_number - 1

    def reassign(self, holder: Holder, number: int) -> None:
        """Give a batch to a trainer that was handed out before."""
        assert number in self._to_reassign
        self._do(["reassign", holder.name, holder.incarnation, number])

    def leave(self, holder: Holder) -> None:
        """A trainer goes: what it still holds is to be handed out again."""
        self._release(lambda other: other == holder)

    def set_alive(self, names: Iterable[str]) -> None:
        """The trainers that live: what all others hold is to be handed out again."""
        alive = set(names)
        self._release(lambda holder: holder.name not in alive)

    def end_epoch(self, num_rows: int) -> None:
        """The epoch is handed out; this reader's share of it has `num_rows` rows, bad ones included."""
        self._do(["epoch", num_rows])

    def replay(self, event: Event) -> None:
        """Apply an event of an earlier life of this book."""
        self._apply[event[0]](*event[1:])

    def _release(self, is_gone: Callable[[Holder], bool]) -> None:
        numbers = sorted(number for number, (holder, _) in self._held.items() if is_gone(holder))
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
        self._epoch_samples += num_samples

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
        self.num_skipped += num_rows - self._epoch_samples
        self.next_epoch += 1
        self.next_cursor, self._epoch_samples = None, 0

    def to_json(self) -> dict[str, Any]:
        """All of it, for JSON; requests under way are no part of it."""
        return {
            **{name: getattr(self, attribute) for name, attribute in _COUNTERS.items()},
            "held": [[n, h.name, h.incarnation, e.epoch, e.cursor, e.num_samples] for n, (h, e) in self._held.items()],
            "to_reassign": [
                [n, may_repeat, e.epoch, e.cursor, e.num_samples] for n, (may_repeat, e) in self._to_reassign.items()
            ],
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> BatchAssignments:
        """The book that `to_json` gave."""
        assignments = cls()
        for name, attribute in _COUNTERS.items():
            setattr(assignments, attribute, content[name])
        for number, name, incarnation, *entry in content["held"]:
            assignments._hold(number, Holder(name, incarnation), AssignedBatch(*entry))
        for number, may_repeat, *entry in content["to_reassign"]:
            assignments._to_reassign[number] = may_repeat, AssignedBatch(*entry)
        return assignments


_COUNTERS = {
    name.lstrip("_"): name
    for name in (
        "next_number",
        "next_epoch",
        "next_cursor",
        "num_samples",
        "num_done",
        "num_repeated",
        "num_samples_repeated",
        "num_resent",
        "num_skipped",
        "_epoch_samples",
    )
}


_COMPACT_BYTES = 1 << 20


class AssignmentLog:
    """A book and its file. `identity` says of which reading it is; a file of another one is refused."""

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self._path, self._identity = path, identity
        self._new: list[Event] = []
        self._file: int | None = None
        self.assignments = self._restore() if path.exists() else BatchAssignments()
        self.assignments.on_event = self._new.append
        self._write_whole()

    def flush(self) -> None:
        """Put what has changed into the file; only then may it be told to anybody."""
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
            raise RowsteadError(f"{self._path} cannot be written, so nothing more is handed out: {error}") from None

    def close(self) -> None:
        """Let go of the file; harmless when closed."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write_whole(self) -> None:
        self.close()
        content = _line({"share": self._identity, "assignments": self.assignments.to_json()})
        write_atomic(self._path, content)
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        self._num_bytes = len(content)

    def _restore(self) -> BatchAssignments:
        whole, _, _ = self._path.read_bytes().rpartition(b"\n")
        try:
            first, *events = [json.loads(line) for line in whole.splitlines()]
            identity, assignments = first["share"], BatchAssignments.from_json(first["assignments"])
            if identity == self._identity:
                for event in events:
                    assignments.replay(event)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RowsteadError(
                f"{self._path} cannot be read as the progress of a reader ({error}): remove it to begin anew"
            ) from None
        if identity != self._identity:
            raise RowsteadError(
                f"{self._path} is the progress of another reading: {identity} instead of {self._identity}. Start the reader "
                "as it was started first, or remove the file to begin anew"
            )
        return assignments


def _line(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"
