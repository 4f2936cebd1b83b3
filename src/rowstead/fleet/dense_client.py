"""The client of the dense servers: what a trainer calls to synchronise its dense parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rowstead.fleet.dense_server_state import ROUND_DEADLINE_S
from rowstead.fleet.rpc_client import Client, PendingReply, ServerUnavailable
from rowstead.fleet.wire import Message
from rowstead.spec.errors import RowsteadError
from rowstead.training.sync_base import DenseServerUnavailable

EXCHANGE_TIMEOUT_S = 5.0
"""Seconds that a trainer waits for a server before it continues without it."""
JOIN_TIMEOUT_S = 30.0
"""Seconds that it waits when it starts, as it needs the shared parameters, and when it sends its final ones."""
PROBE_TIMEOUT_S = 24 * 3600.0
"""Seconds of waiting after which the probe of an unavailable server is renewed."""


class DenseServerClient:
    """A `DenseServer` over RPC, for the member that the clients are named after: one client per server, any number of servers.

    Server i of n has range i of n of the flat parameters, ranges of equal bytes. Every rule of synchronisation is elementwise, so each
    server applies it to its range.

    While a server is unavailable, the first call waits for it up to its timeout, and later calls do not wait. Exchanges continue with
    the other servers, and leave the range of the missing one as it is in the trainer. What needs all servers, and an exchange
    without any, raises DenseServerUnavailable.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        *,
        exchange_timeout_s: float = EXCHANGE_TIMEOUT_S,
        join_timeout_s: float = JOIN_TIMEOUT_S,
    ) -> None:
        self._clients, self._exchange_timeout_s, self._join_timeout_s = clients, exchange_timeout_s, join_timeout_s
        self._probes: dict[int, PendingReply] = {}
        """Pending requests to unavailable servers, by number; a server is back when its request is answered."""
        self.num_partial = 0
        """Exchanges with some of the servers."""

    def join(self, parameters: Tensor) -> Tensor:
        is_first_try = not self._probes
        deadline_s = self._join_timeout_s if is_first_try else None
        return _join(self._call("join", parameters, deadline_s=deadline_s, is_patient=is_first_try, needs_all=True))

    def leave(self) -> None:
        self._call("leave")

    def finish(self, parameters: Tensor) -> None:
        self._call("finish", parameters, deadline_s=self._join_timeout_s, is_patient=True, needs_all=True)

    def pull(self) -> Tensor:
        return _join(self._call("pull", needs_all=True))

    def push(self, parameters: Tensor) -> None:
        self._exchange("push", parameters)

    def elastic_average(self, local: Tensor, alpha: float) -> Tensor:
        replies = self._exchange("elastic_average", local, {"alpha": alpha})
        return _fill(replies, local, torch.zeros_like)

    def average(self, tensor: Tensor, group: str) -> tuple[Tensor, int]:
        replies = self._exchange("average", tensor, {"group": group}, is_round=True)
        return _fill(replies, tensor), next(int(reply.facts["round"]) for reply in replies if reply is not None)

    def average_parameters(self, local: Tensor, *, momentum: float = 0.0, lr: float = 1.0) -> Tensor:
        return _fill(self._exchange("average_parameters", local, {"momentum": momentum, "lr": lr}, is_round=True), local)

    def save_state(self, name: str, tensor: Tensor) -> None:
        self._call("save_state", tensor, {"name": name})

    def load_state(self, name: str) -> Tensor | None:
        replies = self._call("load_state", facts={"name": name}, needs_all=True)
        return _join(replies) if all(reply is not None and reply.tensors for reply in replies) else None

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients:
            client.close()

    def _exchange(
        self, kind: str, tensor: Tensor, facts: Mapping[str, Any] = {}, *, is_round: bool = False
    ) -> list[Message | None]:
        """Exchange a tensor with the available servers; a server replies in a round when that closes."""
        deadline_s = self._exchange_timeout_s + 2 * ROUND_DEADLINE_S if is_round else None
        replies = self._call(kind, tensor, facts, deadline_s=deadline_s)
        self.num_partial += None in replies
        return replies

    def _call(
        self,
        kind: str,
        tensor: Tensor | None = None,
        facts: Mapping[str, Any] = {},
        *,
        deadline_s: float | None = None,
        is_patient: bool = False,
        needs_all: bool = False,
    ) -> list[Message | None]:
        """Send each server its range of a tensor, and return the replies: None from an unavailable server, but not from all.

        A patient caller waits for an unavailable server, up to its deadline.
        """
        num_servers = len(self._clients)
        available = [number for number in range(num_servers) if is_patient or self._is_available(number)]
        if needs_all and len(available) < num_servers:
            raise DenseServerUnavailable("a dense server is still unavailable")
        ranges: Sequence[Sequence[Tensor]] = [()] * num_servers
        if tensor is not None:
            # A client may still send it after a failure, when the caller changes its own: copy it.
            ranges = [(part,) for part in tensor.detach().to("cpu", copy=True).tensor_split(num_servers)]
        timeout_s = deadline_s or self._exchange_timeout_s
        pending = {
            number: self._clients[number].start(kind, facts, ranges[number], deadline_s=timeout_s) for number in available
        }
        replies: list[Message | None] = [None] * num_servers
        problem = ""
        for number, reply in pending.items():
            try:
                replies[number] = reply.wait()
            except ServerUnavailable as error:
                problem = f": {error}"
                self._probe(number)
        if not any(replies) or (needs_all and None in replies):
            raise DenseServerUnavailable(f"the dense server is unavailable; training continues without it{problem}")
        return replies

    def _is_available(self, number: int) -> bool:
        """Whether a server has answered since it became unavailable."""
        probe = self._probes.get(number)
        if probe is None:
            return True
        if not probe.is_done:
            return False
        del self._probes[number]
        try:
            probe.wait()
        except RowsteadError:
            self._probe(number)
            return False
        return True

    def _probe(self, number: int) -> None:
        if number not in self._probes or self._probes[number].is_done:  # one is enough
            self._probes[number] = self._clients[number].start("status", deadline_s=PROBE_TIMEOUT_S)


def _join(replies: Sequence[Message | None]) -> Tensor:
    return torch.cat([reply.tensors[0] for reply in replies if reply is not None])


def _fill(replies: Sequence[Message | None], local: Tensor, instead: Callable[[Tensor], Tensor] = lambda own: own) -> Tensor:
    """Join the ranges of the replies; for that of an unavailable server, take `instead` of the local one."""
    ranges = local.detach().cpu().tensor_split(len(replies))
    parts = [instead(own) if reply is None else reply.tensors[0] for reply, own in zip(replies, ranges, strict=True)]
    return torch.cat(parts)
