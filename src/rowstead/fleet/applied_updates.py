"""Which updates of each trainer a sparse server has applied, and which it has lost.

A server that restarts has the updates up to its last snapshot. The journal knows those that it had applied since then, even if other
roles died with it, so that they are counted as lost.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rowstead.records.plain_files import is_count
from rowstead.spec.errors import CheckpointError

_SLOT = struct.Struct("<qH")
"""Start of a slot: the highest number, and the length of the client's name, which follows."""
_SLOT_BYTES = 512
"""Divides the size of a page, so that the operating system writes a number as a whole."""
_GROW_BYTES = 128 * _SLOT_BYTES


@dataclass
class ClientUpdates:
    """The applied updates of one trainer, which numbers the updates that it sends to a server from 1."""

    highest: int = 0
    """Highest number seen."""
    missing: list[tuple[int, int]] = field(default_factory=list)
    """Lower numbers that never arrived, or were lost in a restart: first and last of each run."""

    @property
    def num_missing(self) -> int:
        return sum(last - first + 1 for first, last in self.missing)

    def has(self, number: int) -> bool:
        """Whether an update has been applied."""
        return number <= self.highest and not any(first <= number <= last for first, last in self.missing)

    def add(self, number: int) -> None:
        """Record that an update has been applied."""
        if number > self.highest:
            self.note_sent(number - 1)
            self.highest = number
            return
        runs = []
        for first, last in self.missing:
            if first <= number <= last:
                runs += [run for run in ((first, number - 1), (number + 1, last)) if run[0] <= run[1]]
            else:
                runs.append((first, last))
        self.missing = runs

    def note_sent(self, number: int) -> None:
        """Record that the trainer has sent updates up to this one; those that have not arrived are missing."""
        if number > self.highest:
            self.missing.append((self.highest + 1, number))
            self.highest = number


class AppliedUpdates:
    """Which updates of each trainer were applied, so that none counts twice and lost ones are known."""

    def __init__(self) -> None:
        self._sent: dict[str, ClientUpdates] = {}

    def of(self, client: str) -> ClientUpdates:
        """Return those of one trainer, or of one of its threads."""
        return self._sent.setdefault(client, ClientUpdates())

    @property
    def num_sent(self) -> int:
        """Number of updates that trainers are known to have sent, applied or lost."""
        return sum(sent.highest for sent in list(self._sent.values()))

    @property
    def num_lost(self) -> int:
        """Number of updates that were sent but not applied."""
        return sum(sent.num_missing for sent in list(self._sent.values()))

    @property
    def num_updates(self) -> int:
        return self.num_sent - self.num_lost

    def to_json(self) -> dict[str, Any]:
        return {client: [sent.highest, [list(run) for run in sent.missing]] for client, sent in list(self._sent.items())}

    @classmethod
    def from_json(cls, content: Any) -> AppliedUpdates:
        applied = cls()
        try:
            for client, (highest, missing) in content.items():
                runs = [(first, last) for first, last in missing]
                if not all(map(is_count, (highest, *itertools.chain(*runs)))):
                    raise ValueError("a number is not a count")
                applied._sent[client] = ClientUpdates(highest, runs)
        except (ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"the counts of a snapshot are not valid: {error}. Remove the snapshot to start with new rows"
            ) from None
        return applied


class UpdateJournal:
    """The highest update of each client in a file: slots of fixed size, each overwritten in place.

    There is no fsync: the file survives its process, not a power failure. It is allocated in advance, so that a disk that fills up
    later does not matter.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._num_bytes = os.fstat(self._file).st_size
        self._offsets: dict[str, int] = {}
        self.highest = dict(self._read())
        """By client, as an earlier process of this server left it."""

    def write(self, client: str, number: int) -> None:
        """Record the highest update of a client."""
        offset = self._offsets.get(client)
        if offset is None:
            self._add(client, number)
        else:
            os.pwrite(self._file, number.to_bytes(8, "little"), offset)

    def close(self) -> None:
        os.close(self._file)

    def _add(self, client: str, number: int) -> None:
        name, offset = client.encode(), len(self._offsets) * _SLOT_BYTES
        assert len(name) <= _SLOT_BYTES - _SLOT.size
        if offset + _SLOT_BYTES > self._num_bytes:
            os.posix_fallocate(self._file, self._num_bytes, _GROW_BYTES)
            self._num_bytes += _GROW_BYTES
        os.pwrite(self._file, _SLOT.pack(number, len(name)) + name, offset)
        self._offsets[client] = offset

    def _read(self) -> Iterator[tuple[str, int]]:
        content = os.pread(self._file, self._num_bytes, 0)
        for offset in range(0, len(content), _SLOT_BYTES):
            number, length = _SLOT.unpack_from(content, offset)
            if not length:
                return
            client = content[offset + _SLOT.size : offset + _SLOT.size + length].decode()
            self._offsets[client] = offset
            yield client, number
