"""The embedding store of a trainer whose rows are on sparse parameter servers.

A lookup is one request to each server, in parallel; so is an update, which returns once it is sent. A server runs the requests
of one client in order, so a lookup sees all updates sent before it.

With a staleness of k, lookups are sent up to k batches early and overlap with training: the lookup of a batch may miss the
updates of the k batches before it, and of no others. At most k updates are unanswered. With 0, a lookup is sent after the
update of the previous batch, and training is exact.

Letters: B examples, F features, S servers.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rowstead.data.batch import Sparse
from rowstead.fleet.history_router import HistoryRouter, HistorySplit, JoinedRequest
from rowstead.fleet.partition import Partition
from rowstead.fleet.remote_rows import RemoteRows
from rowstead.fleet.router import ServerRequest, ServerRouter, Split
from rowstead.fleet.rpc_client import Client, PendingReply
from rowstead.kernels.layout import Layout
from rowstead.kernels.row_state import compute_dtype
from rowstead.spec.errors import RowsteadError
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.stores.base import EmbeddingStore
from rowstead.stores.state import SavedState, StatePart

Connect = Callable[[int], Client]
"""Creates a client of server `number`, with a name that is unique in the fleet."""


@dataclass(eq=False)
class _RemoteBatch:
    """A batch that was prefetched or is being trained on."""

    sparse: Sparse
    number: int
    split: Split | HistorySplit
    replies: list[PendingReply | None] | None = None
    """Replies to its lookup, once sent; None for a server without a request."""

    @property
    def requests(self) -> Sequence[ServerRequest | JoinedRequest]:
        """One per server."""
        return self.split.requests


@dataclass(eq=False)
class _Update:
    batch: _RemoteBatch
    gradients: list[list[Tensor]]
    lr: float
    step: int
    numbers: list[int]
    """Number of this update at each server."""
    replies: dict[int, PendingReply] = field(default_factory=dict)
    """Outstanding replies by server."""


class RemoteStore(EmbeddingStore):
    """An EmbeddingStore whose rows are on the servers of a partition, for batches in CPU memory.

    `connect` creates its clients on first use. One thread at a time may use it; `copy_for_thread` gives another thread its own. A trainer on
    a GPU wraps it in a HostStore. With `check`, a batch that does not fit the tables is refused before anything is sent.

    For a layout with histories `lookup` and the gradient of `update` are flat, as those of a `HistoryStore`.
    """

    def __init__(
        self,
        layout: Layout,
        optimizer: SparseOptimizerSpec | None,
        partition: Partition,
        connect: Connect,
        *,
        staleness: int = 0,
        dtype: torch.dtype = torch.float32,
        check: bool = True,
    ) -> None:
        super().__init__(layout, check=check)
        if staleness < 0:
            raise RowsteadError(f"staleness must not be negative, got {staleness}: 0 is exact, k sends lookups k batches early")
        self.optimizer, self.partition = optimizer, partition
        self.staleness, self._dtype = staleness, dtype
        self._connect = connect
        self._router: ServerRouter | HistoryRouter
        self._router = (HistoryRouter if layout.is_history else ServerRouter)(layout, partition, dtype)
        self._clients: dict[int, Client] = {}
        kind = "sgd" if optimizer is None else optimizer.kind
        self._rows = RemoteRows(layout.tables, partition, kind, dtype, self._client, self._quiesce)
        self._client_id = secrets.token_hex(12)
        self._sent = [0] * partition.num_servers
        """Updates sent to each server."""
        self._lost = [0] * partition.num_servers
        self._prefetched: deque[_RemoteBatch] = deque()
        self._current: _RemoteBatch | None = None
        self._unanswered: deque[_Update] = deque()
        self._num_batches = 0
        self._num_updated = 0
        """Batches whose update was sent, or never will be."""
        self._lock = threading.RLock()
        self.num_lookups_early = 0
        """Lookups sent ahead of their batch."""

    def copy_for_thread(self) -> RemoteStore:
        """Return a store over the same rows for another thread, with its own clients."""
        return RemoteStore(
            self.layout,
            self.optimizer,
            self.partition,
            self._connect,
            staleness=self.staleness,
            dtype=self._dtype,
            check=self._check,
        )

    # An EmbeddingStore

    @property
    def kernel(self) -> str:
        return "remote"

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def lookup(self, sparse: Sparse) -> Tensor:
        with self._lock:
            if not self.training:  # evaluation between training batches
                return self._join_replies(self._start_lookup(_RemoteBatch(sparse, 0, self._split(sparse))))
            batch = self._claim_batch(sparse)
            if batch.replies is None:
                self._start_lookup(batch)
            # A resent update reaches its server after the lookup: then look up again.
            if not self.staleness and self._wait_for_updates():
                self._start_lookup(batch)
            pooled = self._join_replies(batch)
            batch.replies = []  # the vectors are no longer needed
            self._current = batch
            return pooled

    @torch.no_grad()
    def update(self, sparse: Sparse, grad: Tensor, *, lr: float, step: int) -> None:
        assert self.optimizer is not None, "this store was created for lookups only"
        if self._check:
            sparse = self.check_batch(sparse)
            self._router.check_gradient(sparse, grad)
        assert grad.dtype == compute_dtype(self._dtype), f"rows are {self._dtype}, their gradient is {grad.dtype}"
        with self._lock:
            batch, self._current = self._current, None
            is_known = batch is not None and _is_same(batch.sparse, sparse)
            if batch is None or not is_known:
                batch = _RemoteBatch(sparse, self._next_number(), self._split(sparse))
            while self._unanswered and len(self._unanswered) >= max(1, self.staleness):
                self._wait_for_oldest()
            self._start_update(batch, batch.split.gradients(grad, self.optimizer.clip), lr, step, is_known)
            self._num_updated = max(self._num_updated, batch.number)
            self._send_prefetched()

    @property
    def batches_ahead(self) -> int:
        """The staleness: how early lookups may be sent."""
        return self.staleness

    def prefetch(self, sparse: Sparse) -> None:
        """Split a batch over the servers and send its lookup as early as the staleness allows."""
        with self._lock:
            split = self._split(sparse)
            self._prefetched.append(_RemoteBatch(sparse, self._next_number(), split))
            self._send_prefetched()

    def drop_prefetched(self) -> None:
        """Discard prefetched batches, after waiting for their replies."""
        with self._lock:
            for batch in self._prefetched:
                for reply in batch.replies or []:
                    if reply is not None:
                        with contextlib.suppress(RowsteadError):
                            reply.wait()
            self._prefetched.clear()
            self._num_updated = self._num_batches

    def rows(self, table: str, ids: Tensor) -> Tensor:
        return self._rows.rows(table, ids)

    def parts(self) -> list[StatePart]:
        return self._rows.parts()

    def load_state(self, state: Mapping[str, Tensor] | SavedState, *, rows_only: bool = False) -> None:
        self.drop_prefetched()
        super().load_state(state, rows_only=rows_only)

    # Only remote stores

    def wait(self) -> None:
        with self._lock:
            self._wait_for_updates()

    def flush(self) -> None:
        """Wait until every update is answered, and ask the servers how many they have lost."""
        with self._lock:
            self._wait_for_updates()
            for server, sent in enumerate(self._sent):
                if sent:
                    reply = self._client(server).call("flush", {"client": self._client_id, "sent": sent})
                    self._lost[server] = int(reply.facts["lost"])

    @property
    def num_lost_updates(self) -> int:
        """Known updates that servers had and lost in a restart; each server counts."""
        return sum(self._lost)

    def figures(self) -> dict[str, float]:
        clients = list(self._clients.values())
        return {
            "num_updates_sent": sum(self._sent),
            "num_lost_updates": self.num_lost_updates,
            "num_lookups_early": self.num_lookups_early,
            "num_resent": sum(client.num_resent for client in clients),
            "num_bytes_sent": sum(client.num_bytes_sent for client in clients),
            "num_bytes_received": sum(client.num_bytes_received for client in clients),
            "waited_s": sum(client.waited_s for client in clients),
        }

    def close(self) -> None:
        """Close the connections; call `flush` first if the last updates matter."""
        with self._lock:
            for client in self._clients.values():
                client.close()
            self._clients.clear()
            self._prefetched.clear()
            self._unanswered.clear()

    # Lookups

    def _split(self, sparse: Sparse) -> Split | HistorySplit:
        return self._router.split(self.check_batch(sparse))

    def _next_number(self) -> int:
        self._num_batches += 1
        return self._num_batches

    def _claim_batch(self, sparse: Sparse) -> _RemoteBatch:
        """Return the prefetched batch of `sparse`, or a new one."""
        if any(_is_same(batch.sparse, sparse) for batch in self._prefetched):
            while not _is_same((batch := self._prefetched.popleft()).sparse, sparse):
                pass
        else:
            batch = _RemoteBatch(sparse, self._next_number(), self._split(sparse))
        self._num_updated = max(self._num_updated, batch.number - 1)
        return batch

    def _send_prefetched(self) -> None:
        """Send the lookups of prefetched batches that may be sent: all but k earlier batches have been updated."""
        if not self.staleness:
            return
        for batch in self._prefetched:
            if batch.number - 1 - self._num_updated > self.staleness:
                return
            if batch.replies is None:
                self._start_lookup(batch)
                self.num_lookups_early += 1

    def _start_lookup(self, batch: _RemoteBatch) -> _RemoteBatch:
        keeps = batch.number > 0 and self.optimizer is not None
        batch.replies = []
        for server, request in enumerate(batch.requests):
            if request.is_empty:
                batch.replies.append(None)
                continue
            facts, tensors = request.message()
            facts |= {"client": self._client_id, "batch": batch.number, "keep": True} if keeps else {"client": self._client_id}
            batch.replies.append(self._client(server).start("lookup", facts, tensors))
        return batch

    def _join_replies(self, batch: _RemoteBatch) -> Tensor:
        assert batch.replies is not None
        return batch.split.join([[] if reply is None else reply.wait().tensors for reply in batch.replies])

    # Updates

    def _start_update(self, batch: _RemoteBatch, gradients: list[list[Tensor]], lr: float, step: int, is_known: bool) -> None:
        update = _Update(batch, gradients, lr, step, [0] * len(gradients))
        for server, request in enumerate(batch.requests):
            if request.is_empty or not len(request.sent_ids):
                continue
            self._sent[server] += 1
            update.numbers[server] = self._sent[server]
            update.replies[server] = self._send_update(update, server, is_known)
        if update.replies:
            self._unanswered.append(update)

    def _send_update(self, update: _Update, server: int, is_known: bool) -> PendingReply:
        facts: dict[str, Any] = {
            "client": self._client_id,
            "number": update.numbers[server],
            "lr": update.lr,
            "step": update.step,
        }
        if is_known:
            return self._client(server).start("update", {**facts, "batch": update.batch.number}, update.gradients[server])
        batch_facts, tensors = update.batch.requests[server].message()
        return self._client(server).start("update", {**facts, **batch_facts}, [*tensors, *update.gradients[server]])

    def _wait_for_updates(self) -> bool:
        """Wait until every update is answered; returns whether one was resent."""
        was_resent = False
        while self._unanswered:
            was_resent |= self._wait_for_oldest()
        return was_resent

    def _wait_for_oldest(self) -> bool:
        """Wait until all servers have answered the oldest update; returns whether it was resent."""
        update, was_resent = self._unanswered[0], False
        while update.replies:
            server, reply = update.replies.popitem()
            facts = reply.wait().facts
            self._lost[server] = int(facts.get("lost", self._lost[server]))
            if facts.get("unknown_batch"):  # the server was restarted, or has evicted the batch: send the batch as well
                update.replies[server] = self._send_update(update, server, is_known=False)
                was_resent = True
        self._unanswered.popleft()
        return was_resent

    @contextlib.contextmanager
    def _quiesce(self) -> Iterator[None]:
        """Context in which no request is in flight and no other thread uses the clients."""
        with self._lock:
            self._wait_for_updates()
            yield

    def _client(self, server: int) -> Client:
        if server not in self._clients:
            self._clients[server] = self._connect(server)
        return self._clients[server]


def _is_same(one: Sparse, other: Sparse) -> bool:
    return one.ids is other.ids and one.offsets is other.offsets
