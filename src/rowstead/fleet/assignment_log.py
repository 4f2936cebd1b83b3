"""The file that a reader's book is kept in: the book as it was, then what has changed since, a line each.

Lines are added before anybody is told of what they say, so a process that is killed at any moment loses nothing that others
know. A line that it was in the middle of writing was told to nobody, and is left out. When the file has grown, it is written
anew. Nothing is forced to the disk in between: the file outlives its process, not a power cut.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rowstead.fleet.batch_assignments import BatchAssignments, Event
from rowstead.records.files import write_atomic
from rowstead.spec.errors import RowsteadError

_LONG_BYTES = 1 << 20


class AssignmentLog:
    """A book and its file. `identity` says of which reading it is; a file of another one is refused."""

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self._path, self._identity = path, identity
        self._new: list[Event] = []
        self._file: int | None = None
        self.book = self._restored() if path.exists() else BatchAssignments()
        self.book.log = self._new.append
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
            if self._num_bytes > _LONG_BYTES:
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
        content = _line({"reading": self._identity, "book": self.book.to_plain()})
        write_atomic(self._path, content)
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        self._num_bytes = len(content)

    def _restored(self) -> BatchAssignments:
        whole, _, _ = self._path.read_bytes().rpartition(b"\n")
        try:
            first, *events = [json.loads(line) for line in whole.splitlines()]
            identity, book = first["reading"], BatchAssignments.from_plain(first["book"])
            if identity == self._identity:
                for event in events:
                    book.replay(event)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RowsteadError(
                f"{self._path} cannot be read as the progress of a reader ({error}): remove it to begin anew"
            ) from None
        if identity != self._identity:
            raise RowsteadError(
                f"{self._path} is the progress of another reading: {identity} instead of {self._identity}. Start the reader "
                "as it was started first, or remove the file to begin anew"
            )
        return book


def _line(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"
