"""A reader over RPC: the role that reads, decodes, hashes and batches one share of a log for the trainers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rowstead.data.batch import share_bounds
from rowstead.data.source import Source
from rowstead.fleet.deduplication import Caller
from rowstead.fleet.keys import Keys
from rowstead.fleet.log_share import LogShare
from rowstead.fleet.packing import fits_int32
from rowstead.fleet.reader import READ_AHEAD_BYTES, BatchRequest, Reader
from rowstead.fleet.roster import ROLES_FOLDER, create_roles_folder
from rowstead.fleet.rpc_server import DeferredReply, Server
from rowstead.fleet.wire import Limits, Message, WireError
from rowstead.kernels.layout import Layout

_LIMITS = Limits(facts_bytes=1 << 20, frame_bytes=1 << 20, message_bytes=1 << 20, num_tensors=1, kept_replies_bytes=128 << 20)
"""Requests to a reader are short; only its replies are long."""


class ReaderServer(Server):
    """Answers `request_batches` of trainers and `members` of the coordinator, and owns its reader."""

    def __init__(self, reader: Reader, *, address: str | None = None, keys: Keys | None = None, name: str = "reader") -> None:
        self._reader = reader
        handlers = {"request_batches": self._request_batches, "members": self._members}
        super().__init__(handlers, address=address, keys=keys, limits=_LIMITS, name=name, status=reader.status)

    def close(self) -> None:
        super().close()
        self._reader.close()

    def _request_batches(self, message: Message, caller: Caller) -> Message | DeferredReply:
        deferred = DeferredReply()
        reply = self._reader.request_batches(BatchRequest.from_facts(message.facts), deferred.send)
        return deferred if reply is None else reply

    def _members(self, message: Message, caller: Caller) -> Message:
        names = message.facts.get("names")
        if not isinstance(names, list):
            raise WireError("`members` needs the names of the live trainers")
        self._reader.set_alive([str(name) for name in names])
        return Message("members")


def build_reader_server(
    source: Source,
    folder: Path,
    number: int,
    *,
    num_readers: int,
    batch_size: int,
    epochs: int = 1,
    max_steps: int | None = None,
    layout: Layout | None = None,
    read_ahead_bytes: int = READ_AHEAD_BYTES,
    address: str | None = None,
    keys: Keys | None = None,
) -> ReaderServer:
    """Build the server of reader `number`, which assigns its share of a log, or of `max_steps` batches, to trainers `epochs` times.

    `folder` is the run's; the assignment log is `roles/reader-<number>.progress` there, and a restarted reader resumes from it. With a
    `layout` it checks every batch against the tables, so that trainers need not.
    """
    progress = assignment_log_path(folder, number)
    create_roles_folder(folder)
    share = LogShare(
        source if layout is None else source.check_ids(layout),
        number=number,
        num_readers=num_readers,
        batch_size=batch_size,
        epochs=epochs,
        max_batches=None if max_steps is None else steps_of_reader(max_steps, number, num_readers),
        narrow_ids=None if layout is None else fits_int32(layout),
    )
    reader = Reader(share, progress, read_ahead_bytes=read_ahead_bytes)
    return ReaderServer(reader, address=address, keys=keys, name=f"reader-{number}")


def assignment_log_path(folder: Path, number: int) -> Path:
    """Return the path of the assignment log of reader `number`."""
    return folder / ROLES_FOLDER / f"reader-{number}.progress"


def steps_of_reader(max_steps: int, number: int, num_readers: int) -> int:
    """Return one reader's share of `max_steps` batches."""
    return max_steps // num_readers + (number < max_steps % num_readers)


@dataclass(frozen=True, kw_only=True)
class ReaderPlan:
    """What one reader assigns in a whole run."""

    num_batches: int
    """Batches, if the log has no bad rows; the last batch of an epoch may be smaller."""
    num_rows: int
    """Rows of all epochs, bad ones included."""

    def is_done(self, status: Mapping[str, Any]) -> bool:
        """Whether a reader with this status has nothing left to do; where bad rows were skipped, there are fewer batches."""
        if status["num_done"] >= self.num_batches:
            return True
        num_read = status["num_samples"] + status.get("num_skipped", 0)
        return bool(status["num_done"] == status["num_batches"] and num_read >= self.num_rows)


def plan_readers(
    num_samples: int, num_readers: int, *, batch_size: int, epochs: int = 1, max_steps: int | None = None
) -> list[ReaderPlan]:
    """Return what each reader of a log will do."""
    plans = []
    for number in range(num_readers):
        first, last = share_bounds(num_samples, number, num_readers)
        count = epochs * math.ceil((last - first) / batch_size)
        num_batches = count if max_steps is None else min(count, steps_of_reader(max_steps, number, num_readers))
        plans.append(ReaderPlan(num_batches=num_batches, num_rows=epochs * (last - first)))
    return plans
