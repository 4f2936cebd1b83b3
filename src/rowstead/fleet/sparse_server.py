"""A sparse parameter server: holds shards of tables, pools lookups of trainers, and updates rows with their gradients.

| kind | facts | tensors | reply |
|---|---|---|---|
| `lookup` | `client`, `batch`, `keep`, and the batch (`fleet/router.py`) | the batch | vectors [B, width], distinct rows |
| `update` | `client`, `number`, `lr`, `step`; `batch`, or the batch itself | (the batch,) gradients | `lost`; or `unknown_batch` |
| `flush` | `client`, `sent` | | `lost` |
| `read_rows` | `table`, `part`, and `start`, `stop` | or the row numbers | rows |
| `write_rows` | `table`, `part`, `start` | rows | |
| `snapshot` | | | `num_rows`, `num_bytes`, once written |
| `status` | | | figures of the server |

The server keeps the batch of a lookup until its update arrives, so that ids are sent once. If it no longer has it, after a
restart or when out of memory for batches, it replies `unknown_batch` and the client resends the batch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rowstead.distributed.sharding import piece_layout
from rowstead.fleet.applied_updates import AppliedUpdates, ClientUpdates, UpdateJournal
from rowstead.fleet.deduplication import Caller
from rowstead.fleet.keys import Keys
from rowstead.fleet.lookup_request import LookupRequest
from rowstead.fleet.partition import Partition
from rowstead.fleet.rpc_server import DeferredReply, Handler, Server
from rowstead.fleet.snapshot import SnapshotResult, Snapshots
from rowstead.fleet.table_shard import TableShard
from rowstead.fleet.wire import Message
from rowstead.kernels.layout import layout_of
from rowstead.records.files import is_figure
from rowstead.spec.errors import DataError, RowsteadError
from rowstead.spec.run import RunSpec

KEPT_BATCHES_BYTES = 256 << 20
"""Bytes of batches that were looked up and not yet updated."""
SNAPSHOTS_FOLDER = "snapshots"
JOURNAL = "applied.journal"
"""In the snapshot folder: updates applied so far, so that a restart knows those that are in no snapshot."""

_MAX_LR = float(torch.finfo(torch.float32).max)


class SparseServer(Server):
    """Serves the rows of `shard`."""

    def __init__(
        self,
        shard: TableShard,
        *,
        address: str | None = None,
        keys: Keys | None = None,
        name: str = "sparse",
        snapshots: Path | None = None,
        snapshot_every_s: float | None = None,
        kept_batches_bytes: int = KEPT_BATCHES_BYTES,
    ) -> None:
        """`snapshots` is the server's own snapshot folder; it resumes from a snapshot found there.

        Without `snapshot_every_s`, snapshots are only taken on request.
        """
        self.shard = shard
        self.applied = AppliedUpdates()
        self.snapshots: Snapshots | None = None
        self._journal: UpdateJournal | None = None
        if snapshots is not None:
            self.snapshots = Snapshots(
                shard, snapshots, every_s=snapshot_every_s, get_counts=lambda: {"sent": self.applied.to_json()}
            )
            if (counts := self.snapshots.restore()) is not None:
                self.applied = AppliedUpdates.from_json(counts.get("sent", ()))
            self._journal = UpdateJournal(snapshots / JOURNAL)
            for client, number in self._journal.highest.items():
                self.applied.of(client).note_sent(number)
        self.num_lookups = self.num_samples = 0
        self._batches: OrderedDict[tuple[str, int], LookupRequest] = OrderedDict()
        """Batches between lookup and update."""
        self._batches_bytes, self._max_batches_bytes = 0, kept_batches_bytes
        handlers: dict[str, Handler] = {
            "lookup": self._lookup,
            "update": self._update,
            "flush": self._flush,
            "read_rows": self._read_rows,
            "write_rows": self._write_rows,
            "snapshot": self._snapshot,
        }
        super().__init__(handlers, address=address, keys=keys, name=name, status=self._own_status)

    def serve(self, until: Callable[[], bool] = lambda: False) -> None:
        if self.snapshots is not None:
            self.snapshots.start()
        super().serve(until)

    def close(self) -> None:
        """Stop; a snapshot in progress is finished."""
        if self.snapshots is not None:
            self.snapshots.close()
        super().close()
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _own_status(self) -> dict[str, Any]:
        sent, lost = self.applied.num_sent, self.applied.num_lost  # read once: updates arrive meanwhile
        return {
            "num_lookups": self.num_lookups,
            "num_samples": self.num_samples,
            "num_updates": sent - lost,
            "num_lost_updates": lost,
            "num_updates_sent": sent,
            "table_bytes": self.shard.num_bytes,
            "num_kept_batches": len(self._batches),
            "kept_batches_bytes": self._batches_bytes,
            **({} if self.snapshots is None else self.snapshots.status()),
        }

    # Handlers

    def _lookup(self, message: Message, caller: Caller) -> Message:
        request, left = self.shard.parser.parse(message)
        if left:
            raise DataError(f"a lookup has {len(left)} extra tensors")
        reply = self.shard.lookup(request)
        if message.facts.get("keep"):
            self._store_batch((_client_of(message), _number(message, "batch")), request)
        self.num_lookups += 1
        self.num_samples += request.num_samples
        return Message("lookup", {}, reply)

    def _update(self, message: Message, caller: Caller) -> Message:
        facts, client, number = message.facts, _client_of(message), _number(message, "number")
        lr, step = facts.get("lr"), _number(message, "step")
        if not is_figure(lr) or abs(lr) > _MAX_LR:
            raise DataError(f"lr must be a finite number in 32 bits, got {str(lr)[:40]}")
        if self.shard.optimizer is None:
            raise DataError("this server was created for lookups only")
        if "samples" in facts:
            request, gradients = self.shard.parser.parse(message)
        else:
            found = self._pop_batch((client, _number(message, "batch")))
            if found is None:
                # An update applied before a restart does not need its batch again.
                return Message(
                    "update",
                    {"unknown_batch": not self.applied.of(client).has(number), "lost": self.applied.of(client).num_missing},
                )
            request, gradients = found, message.tensors
        self.shard.check_gradients(request, gradients)
        with self.shard.changing:
            sent = self.applied.of(client)
            if not sent.has(number):
                self.shard.update(request, gradients, lr=float(lr), step=step)
                sent.add(number)
                self._record(client, sent)
        return Message("update", {"lost": sent.num_missing})

    def _flush(self, message: Message, caller: Caller) -> Message:
        with self.shard.changing:
            sent = self.applied.of(client := _client_of(message))
            sent.note_sent(_number(message, "sent", least=0))
            self._record(client, sent)
        return Message("flush", {"lost": sent.num_missing})

    def _record(self, client: str, sent: ClientUpdates) -> None:
        """Record in the journal what is known of a client, before it is told."""
        if self._journal is not None:
            self._journal.write(client, sent.highest)

    def _read_rows(self, message: Message, caller: Caller) -> Message:
        table, part = str(message.facts.get("table")), str(message.facts.get("part"))
        if message.tensors:
            rows = message.tensors[0]
            if len(message.tensors) > 1 or rows.dim() != 1 or rows.dtype not in (torch.int32, torch.int64):
                raise DataError("row numbers must be one tensor, one-dimensional and int32 or int64")
            return Message("read_rows", {}, [self.shard.gather(table, part, rows)])
        start, stop = _number(message, "start", least=0), _number(message, "stop", least=0)
        return Message("read_rows", {}, [self.shard.read(table, part, start, stop)])

    def _write_rows(self, message: Message, caller: Caller) -> Message:
        if len(message.tensors) != 1 or message.tensors[0].dim() != 2:
            raise DataError("rows to write must be one two-dimensional tensor")
        facts = message.facts
        with self.shard.changing:
            start = _number(message, "start", least=0)
            self.shard.write(str(facts.get("table")), str(facts.get("part")), start, message.tensors[0])
        return Message("write_rows")

    def _snapshot(self, message: Message, caller: Caller) -> DeferredReply:
        if self.snapshots is None:
            raise RowsteadError("this server has no snapshot folder")
        reply = DeferredReply()

        def done(outcome: SnapshotResult | Exception) -> None:
            if isinstance(outcome, Exception):
                reply.send(RowsteadError(f"the snapshot failed: {outcome}"))
            else:
                facts = {"num_rows": outcome.num_rows, "num_bytes": outcome.num_bytes, "is_full": outcome.is_full}
                reply.send(Message("snapshot", facts))

        self.snapshots.request(done)
        return reply

    def _store_batch(self, key: tuple[str, int], request: LookupRequest) -> None:
        self._pop_batch(key)
        self._batches[key] = request
        self._batches_bytes += request.num_bytes
        while self._batches_bytes > self._max_batches_bytes and len(self._batches) > 1:
            self._pop_batch(next(iter(self._batches)))

    def _pop_batch(self, key: tuple[str, int]) -> LookupRequest | None:
        found = self._batches.pop(key, None)
        self._batches_bytes -= 0 if found is None else found.num_bytes
        return found


def build_sparse_server(
    spec: RunSpec, folder: Path, number: int, partition: Partition, *, dtype: torch.dtype = torch.float32, **options: Any
) -> SparseServer:
    """Build the server with the shards that a partition gives to server `number`; `options` are those of `SparseServer`.

    Its snapshots are in `snapshots/sparse-<number>` of the run's folder.
    """
    layout = layout_of(spec.features, spec.tables)
    partition.check(layout.tables)
    pieces = partition.pieces_of(layout, number)
    shard = TableShard(piece_layout(layout, pieces), spec.train.sparse_optimizer, seed=spec.seed, dtype=dtype)
    name = f"sparse-{number}"
    return SparseServer(shard, name=name, snapshots=folder / SNAPSHOTS_FOLDER / name, **options)


def _client_of(message: Message) -> str:
    client = message.facts.get("client")
    if not isinstance(client, str) or not 0 < len(client) <= 64:
        raise DataError("`client` must be a non-empty word of at most 64 letters")
    return client


def _number(message: Message, name: str, *, least: int = 1) -> int:
    value = message.facts.get(name)
    if type(value) is not int or not least <= value < 2**62:
        raise DataError(f"`{name}` must be an integer of at least {least}, got {str(value)[:40]}")
    return value
