"""`BatchAssignments`: which batches of a reader were handed out, to whom, and which of them are done. Pure: no sockets, no files.

A reader numbers the batches of its share from 0, through all epochs. Every number below `next_number` is in one of three
states: held by a trainer, to be handed out again, or done. Only the first two are kept, each with the place in the log where
reading gives the batch once more, so that the book stays as small as what is under way.

Each change is also an event, a short list that JSON can hold. The same events, applied to an empty book or to one that was
restored from `to_plain`, lead to the same state: that is how a reader that was killed knows what it had handed out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rowstead.data.source import Cursor

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
    """The book of one reader. `log` hears of every event."""

    def __init__(self, log: Callable[[Event], None] = lambda event: None) -> None:
        self.log = log
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
        self._again: dict[int, tuple[bool, AssignedBatch]] = {}
        """Whether somebody may have trained on the batch before, and where it begins."""
        self._lives: dict[str, int] = {}
        self._turns: dict[Holder, int] = {}
        self._apply: dict[str, Callable[..., None]] = {
            "new": self._on_new,
            "again": self._on_again,
            "done": self._on_done,
            "back": self._on_back,
            "lost": self._on_lost,
            "gone": self._on_gone,
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
    def again(self) -> dict[int, AssignedBatch]:
        """Batches to be handed out again, in the order of the log."""
        return {number: self._again[number][1] for number in sorted(self._again)}

    @property
    def first_lost(self) -> int | None:
        """The first batch that was lost on its way: later ones wait for it, so that a trainer alone sees the log in order."""
        return min((number for number, (may_repeat, _) in self._again.items() if not may_repeat), default=None)

    @property
    def is_settled(self) -> bool:
        """Whether everything that was handed out is done."""
        return not self._held and not self._again

    @property
    def num_epochs_done(self) -> int:
        """Epochs of which every batch is done."""
        under_way = [entry.epoch for _, entry in (*self._held.values(), *self._again.values())]
        return min(under_way, default=self.next_epoch)

    def is_replaced(self, holder: Holder) -> bool:
        """Whether a later life of this trainer has been heard of."""
        return holder.incarnation < self._lives.get(holder.name, holder.incarnation)

    def settle(self, holder: Holder, turn: int, have: Sequence[int], done: Sequence[int]) -> bool:
        """Take in what a trainer says with its request number `turn`: all that it has and is not done with, and what is done.

        What the book has with this trainer, and it neither has nor did, was lost on its way. What an earlier life of the
        trainer held is to be handed out again. False where the request is older than one already taken in: then it means nothing.
        """
        assert not self.is_replaced(holder)
        if turn < self._turns.get(holder, turn):
            return False
        self._turns[holder] = turn
        self._release(lambda other: other.name == holder.name and other != holder)
        self._lives[holder.name] = holder.incarnation
        # Done is done, also where the trainer was taken for gone meanwhile, whoever has the batch now.
        finished = [number for number in dict.fromkeys(done) if number in self._held or number in self._again]
        if finished:
            self._do(["done", finished])
        kept = set(have)
        back = [number for number in sorted(kept) if number in self._again]
        if back:  # it was taken for gone, wrongly
            self._do(["back", holder.name, holder.incarnation, back])
        lost = [number for number, (other, _) in self._held.items() if other == holder and number not in kept]
        if lost:
            self._do(["lost", sorted(lost)])
        return True

    def hand_new(self, holder: Holder, num_samples: int, cursor: Cursor) -> int:
        """Give the next batch to a trainer; `cursor` is where the one after it begins. Returns its number."""
        self._do(["new", holder.name, holder.incarnation, num_samples, cursor])
        return self.next_number - 1

    def hand_again(self, holder: Holder, number: int) -> None:
        """Give a batch to a trainer that was handed out before."""
        assert number in self._again
        self._do(["again", holder.name, holder.incarnation, number])

    def leave(self, holder: Holder) -> None:
        """A trainer goes: what it still holds is to be handed out again."""
        self._release(lambda other: other == holder)

    def keep_only(self, names: Iterable[str]) -> None:
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
            self._do(["gone", numbers])

    def _do(self, event: Event) -> None:
        self.replay(event)
        self.log(event)

    def _on_new(self, name: str, incarnation: int, num_samples: int, cursor: Cursor) -> None:
        self._hold(self.next_number, Holder(name, incarnation), AssignedBatch(self.next_epoch, self.next_cursor, num_samples))
        self.next_number += 1
        self.next_cursor = cursor
        self.num_samples += num_samples
        self._epoch_samples += num_samples

    def _on_again(self, name: str, incarnation: int, number: int) -> None:
        may_repeat, entry = self._again.pop(number)
        self._hold(number, Holder(name, incarnation), entry)
        if may_repeat:
            self.num_repeated += 1
            self.num_samples_repeated += entry.num_samples
        else:
            self.num_resent += 1

    def _hold(self, number: int, holder: Holder, entry: AssignedBatch) -> None:
        self._held[number] = holder, entry
        self._lives[holder.name] = max(holder.incarnation, self._lives.get(holder.name, holder.incarnation))

    def _on_done(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if self._held.pop(number, None) is None:
                del self._again[number]
        self.num_done += len(numbers)

    def _on_back(self, name: str, incarnation: int, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._hold(number, Holder(name, incarnation), self._again.pop(number)[1])

    def _on_lost(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._again[number] = False, self._held.pop(number)[1]

    def _on_gone(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._again[number] = True, self._held.pop(number)[1]

    def _on_epoch(self, num_rows: int) -> None:
        self.num_skipped += num_rows - self._epoch_samples
        self.next_epoch += 1
        self.next_cursor, self._epoch_samples = None, 0

    def to_plain(self) -> dict[str, Any]:
        """All of it, for JSON; requests under way are no part of it."""
        return {
            **{name: getattr(self, attribute) for name, attribute in _FACTS.items()},
            "held": [[n, h.name, h.incarnation, e.epoch, e.cursor, e.num_samples] for n, (h, e) in self._held.items()],
            "again": [[n, may_repeat, e.epoch, e.cursor, e.num_samples] for n, (may_repeat, e) in self._again.items()],
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> BatchAssignments:
        """The book that `to_plain` gave."""
        book = cls()
        for name, attribute in _FACTS.items():
            setattr(book, attribute, plain[name])
        for number, name, incarnation, *entry in plain["held"]:
            book._hold(number, Holder(name, incarnation), AssignedBatch(*entry))
        for number, may_repeat, *entry in plain["again"]:
            book._again[number] = may_repeat, AssignedBatch(*entry)
        return book


_FACTS = {
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
