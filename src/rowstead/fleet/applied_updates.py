"""Which updates of each trainer a sparse server has, so that none counts twice and those that were lost are known.

Every trainer numbers the updates that it sends to a server, from 1. A server that comes back from a snapshot has those up to
then; the first that it hears of afterwards shows how many are missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class ClientUpdates:
    """The updates of one trainer."""

    highest: int = 0
    """Number of the last one that was heard of."""
    missing: list[tuple[int, int]] = field(default_factory=list)
    """Numbers below it that never arrived here, or were lost with what was here: first and last of each run."""

    @property
    def num_missing(self) -> int:
        return sum(last - first + 1 for first, last in self.missing)

    def has(self, number: int) -> bool:
        """Whether an update is in the rows already."""
        return number <= self.highest and not any(first <= number <= last for first, last in self.missing)

    def add(self, number: int) -> None:
        """An update is in the rows now."""
        if number > self.highest:
            self.heard_of(number - 1)
            self.highest = number
            return
        runs = []
        for first, last in self.missing:
            if first <= number <= last:
                runs += [run for run in ((first, number - 1), (number + 1, last)) if run[0] <= run[1]]
            else:
                runs.append((first, last))
        self.missing = runs

    def heard_of(self, number: int) -> None:
        """The trainer has sent updates up to this one; those that have not arrived are missing."""
        if number > self.highest:
            self.missing.append((self.highest + 1, number))
            self.highest = number


class AppliedUpdates:
    """The updates of all trainers."""

    def __init__(self) -> None:
        self._sent: dict[str, ClientUpdates] = {}

    def of(self, who: str) -> ClientUpdates:
        """Those of one trainer, or of one thread of it."""
        return self._sent.setdefault(who, ClientUpdates())

    @property
    def num_updates(self) -> int:
        """That are in the rows."""
        return sum(sent.highest - sent.num_missing for sent in list(self._sent.values()))

    @property
    def num_lost(self) -> int:
        """That were sent and are not in the rows."""
        return sum(sent.num_missing for sent in list(self._sent.values()))

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        return {who: [sent.highest, [list(run) for run in sent.missing]] for who, sent in list(self._sent.items())}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> AppliedUpdates:
        """What `to_json` gave."""
        tally = cls()
        for who, (highest, missing) in plain.items():
            tally._sent[who] = ClientUpdates(int(highest), [(int(first), int(last)) for first, last in missing])
        return tally
