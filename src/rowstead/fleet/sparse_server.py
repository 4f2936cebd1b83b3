"""A sparse parameter server: keeps pieces of tables, pools what trainers look up, and trains rows by the gradients they send.

| kind | facts | tensors | answer |
|---|---|---|---|
| `lookup` | `client`, `batch`, `keep`, and the batch (`fleet/router.py`) | the batch | vectors [B, width], distinct rows |
| `update` | `client`, `number`, `lr`, `step`; `batch`, or the batch itself | (the batch,) gradients | `lost`; or `unknown_batch` |
| `flush` | `client`, `sent` | | `lost` |
| `read_rows` | `table`, `part`, and `start`, `stop` | or the rows' numbers | rows |
| `write_rows` | `table`, `part`, `start` | rows | |
| `snapshot` | | | `num_rows`, `num_bytes`, once it is written |
| `status` | | | how the server does |

The batch of a look-up is remembered until its update comes, so that ids travel once. One that is forgotten, since the server
was started anew or had no more room, is sent again by whoever asked. Requests are applied one after another; with several
threads, those of different trainers side by side (Hogwild: each is exact by itself, and where two meet in a row one change may
be lost).
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rowstead.distributed.sharding import piece_layout
from rowstead.fleet.deduplication import Caller
from rowstead.fleet.keys import Keys
from rowstead.fleet.lookup_request import LookupRequest
from rowstead.fleet.partition import Partition
from rowstead.fleet.roster import Roster
from rowstead.fleet.rpc_server import DeferredReply, Server
from rowstead.fleet.snapshot import SnapshotResult, Snapshots
from rowstead.fleet.table_shard import TableShard
from rowstead.fleet.wire import Limits, Message
from rowstead.kernels.layout import layout_of
from rowstead.spec.errors import DataError, RowsteadError
from rowstead.spec.run import RunSpec

REMEMBERED_BYTES = 256 << 20
"""Of batches that were looked up and not updated yet."""
SNAPSHOTS_FOLDER = "snapshots"


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
        """The trainer has sent updates up to this one; those that have not arrived are missing."""
        if number > self.highest:
            self.missing.append((self.highest + 1, number))
            self.highest = number


class AppliedUpdates:
    """The updates of all trainers."""

    def __init__(self) -> None:
        self._sent: dict[str, ClientUpdates] = {}

    def of(self, client: str) -> ClientUpdates:
        """Those of one trainer, or of one thread of it."""
        return self._sent.setdefault(client, ClientUpdates())

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
        return {client: [sent.highest, [list(run) for run in sent.missing]] for client, sent in list(self._sent.items())}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> AppliedUpdates:
        """What `to_json` gave."""
        applied = cls()
        for client, (highest, missing) in plain.items():
            applied._sent[client] = ClientUpdates(int(highest), [(int(first), int(last)) for first, last in missing])
        return applied


class SparseServer:
    """Answers for the rows of `shard`, from `start` or `serve` on."""

    def __init__(
        self,
        shard: TableShard,
        *,
        address: str = "tcp://127.0.0.1:0",
        keys: Keys | None = None,
        threads: int = 1,
        name: str = "sparse",
        limits: Limits | None = None,
        snapshots: Path | None = None,
        snapshot_every_s: float | None = None,
        remembered_bytes: int = REMEMBERED_BYTES,
    ) -> None:
        """`snapshots` is the folder of its own in which it keeps them; what it finds there it goes on from."""
        self.shard = shard
        self.applied = AppliedUpdates()
        self.snapshots: Snapshots | None = None
        if snapshots is not None:
            self.snapshots = Snapshots(
                shard, snapshots, every_s=snapshot_every_s, counted=lambda: {"sent": self.applied.to_json()}
            )
            if (counts := self.snapshots.restore()) is not None:
                self.applied = AppliedUpdates.from_json(counts["sent"])
        self.num_lookups = self.num_samples = 0
        self._batches: OrderedDict[tuple[str, int], LookupRequest] = OrderedDict()
        self._batches_bytes, self._max_batches_bytes = 0, remembered_bytes
        self._lock = threading.Lock()
        self.server = Server(
            {
                "lookup": self._lookup,
                "update": self._update,
                "flush": self._flush,
                "read_rows": self._read_rows,
                "write_rows": self._write_rows,
                "snapshot": self._snapshot,
            },
            address=address,
            keys=keys,
            threads=threads,
            name=name,
            status=self.status,
            **({} if limits is None else {"limits": limits}),
        )

    @property
    def address(self) -> str:
        """Where it answers."""
        return self.server.address

    def start(self) -> SparseServer:
        """Serve in a thread."""
        if self.snapshots is not None:
            self.snapshots.start()
        self.server.start()
        return self

    def serve(self, until: Callable[[], bool]) -> None:
        """Serve in this thread."""
        if self.snapshots is not None:
            self.snapshots.start()
        self.server.serve(until)

    def close(self) -> None:
        """End; a snapshot that is being written is finished."""
        if self.snapshots is not None:
            self.snapshots.close()
        self.server.close()

    def status(self) -> dict[str, Any]:
        """What `status` tells besides what every server does."""
        return {
            "num_lookups": self.num_lookups,
            "num_samples": self.num_samples,
            "num_updates": self.applied.num_updates,
            "num_lost_updates": self.applied.num_lost,
            "table_bytes": self.shard.num_bytes,
            "num_batches_remembered": len(self._batches),
            "batches_remembered_bytes": self._batches_bytes,
            **({} if self.snapshots is None else self.snapshots.status()),
        }

    # Handlers

    def _lookup(self, message: Message, caller: Caller) -> Message:
        request, left = self.shard.parser.parse(message)
        if left:
            raise DataError(f"a look-up has {len(left)} tensors too many")
        answer = self.shard.lookup(request)
        if message.facts.get("keep"):
            self._store_batch((_client_of(message), _number(message, "batch")), request)
        self.num_lookups += 1
        self.num_samples += request.num_samples
        return Message("lookup", {}, answer)

    def _update(self, message: Message, caller: Caller) -> Message:
        facts, client, number = message.facts, _client_of(message), _number(message, "number")
        lr, step = facts.get("lr"), _number(message, "step")
        if not isinstance(lr, (int, float)) or not math.isfinite(lr):
            raise DataError(f"lr must be a finite number, got {lr!r}")
        if self.shard.optimizer is None:
            raise DataError("this server was made for look-ups only")
        if "samples" in facts:
            request, gradients = self.shard.parser.parse(message)
        else:
            found = self._pop_batch((client, _number(message, "batch")))
            if found is None:
                # One that it had before it was started anew is in the rows already.
                return Message(
                    "update",
                    {"unknown_batch": not self.applied.of(client).has(number), "lost": self.applied.of(client).num_missing},
                )
            request, gradients = found, message.tensors
        self.shard.check_gradients(request, gradients)
        with self.shard.changing():
            sent = self.applied.of(client)
            if not sent.has(number):
                self.shard.update(request, gradients, lr=float(lr), step=step)
                sent.add(number)
        return Message("update", {"lost": sent.num_missing})

    def _flush(self, message: Message, caller: Caller) -> Message:
        with self.shard.changing():
            sent = self.applied.of(_client_of(message))
            sent.note_sent(_number(message, "sent", least=0))
        return Message("flush", {"lost": sent.num_missing})

    def _read_rows(self, message: Message, caller: Caller) -> Message:
        table, part = str(message.facts.get("table")), str(message.facts.get("part"))
        if message.tensors:
            (rows,) = message.tensors
            if rows.dim() != 1 or rows.dtype not in (torch.int32, torch.int64):
                raise DataError("the numbers of rows must be int32 or int64 and of one dimension")
            return Message("read_rows", {}, [self.shard.gather(table, part, rows)])
        start, stop = _number(message, "start", least=0), _number(message, "stop", least=0)
        return Message("read_rows", {}, [self.shard.read(table, part, start, stop)])

    def _write_rows(self, message: Message, caller: Caller) -> Message:
        if len(message.tensors) != 1 or message.tensors[0].dim() != 2:
            raise DataError("rows to be written are one tensor of two dimensions")
        facts = message.facts
        with self.shard.changing():
            start = _number(message, "start", least=0)
            self.shard.write(str(facts.get("table")), str(facts.get("part")), start, message.tensors[0])
        return Message("write_rows")

    def _snapshot(self, message: Message, caller: Caller) -> DeferredReply:
        if self.snapshots is None:
            raise RowsteadError("this server was started without a folder for snapshots")
        reply = DeferredReply()

        def done(outcome: SnapshotResult | Exception) -> None:
            if isinstance(outcome, Exception):
                reply.fail(f"the snapshot failed: {outcome}")
            else:
                facts = {"num_rows": outcome.num_rows, "num_bytes": outcome.num_bytes, "is_full": outcome.is_full}
                reply.send(Message("snapshot", facts))

        self.snapshots.request(done)
        return reply

    # Batches between look-up and update

    def _store_batch(self, key: tuple[str, int], request: LookupRequest) -> None:
        with self._lock:
            before = self._batches.pop(key, None)
            self._batches[key] = request
            self._batches_bytes += request.num_bytes - (0 if before is None else before.num_bytes)
            while self._batches_bytes > self._max_batches_bytes and len(self._batches) > 1:
                _, oldest = self._batches.popitem(last=False)
                self._batches_bytes -= oldest.num_bytes

    def _pop_batch(self, key: tuple[str, int]) -> LookupRequest | None:
        with self._lock:
            found = self._batches.pop(key, None)
            self._batches_bytes -= 0 if found is None else found.num_bytes
            return found


def serve_sparse(
    spec: RunSpec,
    folder: Path,
    number: int,
    *,
    until: Callable[[], bool],
    ready: Callable[[str], None],
    partition: Partition | Mapping[str, Any] | None = None,
    address: str = "tcp://127.0.0.1:0",
    keys: Keys | None = None,
    incarnation: int = 0,
    dtype: torch.dtype = torch.float32,
    threads: int = 1,
    snapshot_every_s: float | None = None,
    sampled: Callable[[Callable[[], dict[str, Any]]], None] | None = None,
) -> None:
    """The role: keep the pieces that a partition, by default that in `fleet.json`, gives to server `number`, until told to end.

    Snapshots are in `snapshots/sparse-<number>` of the run's folder; with one there the server goes on from it. Without
    `snapshot_every_s` they are only taken when asked for. `ready` is called with the address, `sampled` with what gives the
    status.
    """
    layout = layout_of(spec.features, spec.tables)
    if not isinstance(partition, Partition):
        partition = Partition.from_json(Roster(folder).facts["partition"] if partition is None else partition)
    partition.check(layout.tables)
    if not 0 <= number < partition.num_servers:
        raise RowsteadError(f"there is no sparse server {number}: the tables are shared by {partition.num_servers}, from 0 on")
    pieces = partition.pieces_of(layout, number)
    shard = TableShard(piece_layout(layout, pieces), spec.train.sparse_optimizer, seed=spec.seed, dtype=dtype)
    server = SparseServer(
        shard,
        address=address,
        keys=keys,
        threads=threads,
        name=f"sparse-{number}",
        snapshots=folder / SNAPSHOTS_FOLDER / f"sparse-{number}",
        snapshot_every_s=snapshot_every_s,
    )
    try:
        if sampled is not None:
            sampled(lambda: {**server.server.status_facts(), **server.status(), "incarnation": incarnation})
        ready(server.address)
        server.serve(until)
    finally:
        server.close()


def _client_of(message: Message) -> str:
    client = message.facts.get("client")
    if not isinstance(client, str) or not 0 < len(client) <= 64:
        raise DataError("`client` must be a word that is the sender's own")
    return client


def _number(message: Message, name: str, *, least: int = 1) -> int:
    value = message.facts.get(name)
    if type(value) is not int or not least <= value < 2**62:
        raise DataError(f"`{name}` must be a whole number of at least {least}, got {value!r}")
    return value
