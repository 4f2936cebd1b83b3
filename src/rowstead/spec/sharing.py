"""Measured costs of processes that share the cores of one machine, such as the roles of a local fleet."""

from __future__ import annotations

from dataclasses import dataclass

from rowstead.spec.bounds import NotNegative, OneOrMore, Spec
from rowstead.spec.timings import InStep, LayerTimes


@dataclass(frozen=True, kw_only=True)
class MessageCost(Spec):
    """Core seconds of messages between two processes: `call_s` per message, `id_s` per id, `byte_s` per byte."""

    call_s: NotNegative = 0.0
    """Fixed cost per message."""
    id_s: NotNegative = 0.0
    """Cost per id: routing to its server, packing and checking."""
    byte_s: NotNegative = 0.0
    """Cost per byte of payload: copying, sending and receiving."""

    def seconds(self, *, num_calls: float = 0.0, num_ids: float = 0.0, num_bytes: float = 0.0) -> float:
        """Total cost of messages."""
        return self.call_s * num_calls + self.id_s * num_ids + self.byte_s * num_bytes


@dataclass(frozen=True, kw_only=True)
class Sharing(Spec):
    """Costs of single-threaded processes on one machine and of their messages."""

    layers: LayerTimes
    """Linear layers with one thread: small ones are as fast as with all threads, large ones slower by the number of cores."""
    dense: InStep
    """The dense part of a step with one thread, relative to these layers in isolation and the interaction with all threads."""
    lookup: InStep
    """Look-ups with one thread, relative to all threads that the machine was measured with."""
    update: InStep
    """Updates of rows, likewise."""
    dense_optimizer: InStep
    """The dense optimizer, likewise."""
    crowding: OneOrMore
    """Slowdown of one core when all others are busy: caches and memory bandwidth are shared."""
    asking: MessageCost
    """Work of a trainer's thread for look-up and update of a batch: bytes of pooled vectors and their gradients, one call per server."""
    answering: MessageCost
    """Work of the other threads of both processes until the reply arrives, without the server's row operations."""
    waiting_s: NotNegative
    """Wake-up latency of waiting threads, per request."""
    handing: MessageCost
    """A message that is passed on unchanged, such as a batch from a reader: all threads of both processes."""
    averaging: MessageCost
    """An exchange of dense parameters with the dense server, by bytes: all threads of both processes."""
