"""What processes take that share the cores of one machine, as the roles of a fleet do which is started there."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rowstead.spec.bounds import require_not_negative
from rowstead.spec.errors import require
from rowstead.spec.timings import InStep, LayerTimes


@dataclass(frozen=True, kw_only=True)
class MessageCost:
    """Seconds of a core for messages between two processes: `call_s` for each, `id_s` for each id, `byte_s` for each byte."""

    call_s: float = 0.0
    """However small it is."""
    id_s: float = 0.0
    """One id of a batch: it is sorted by servers, packed and checked."""
    byte_s: float = 0.0
    """One byte of vectors or other numbers: it is copied, sent and received."""

    def __post_init__(self) -> None:
        require_not_negative(self, "call_s", "id_s", "byte_s")

    def seconds(self, *, num_calls: float = 0.0, num_ids: float = 0.0, num_bytes: float = 0.0) -> float:
        """Of so many messages with so much in them."""
        return self.call_s * num_calls + self.id_s * num_ids + self.byte_s * num_bytes


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Processes of one thread each on one machine, and what they say to each other."""

    layers: LayerTimes
    """Linear layers by one thread: small ones take what they take by all threads, and large ones as many times as long as there are cores."""
    dense: InStep
    """The dense part of a step by one thread, over what these layers take alone, and the interaction by all threads."""
    lookup: InStep
    """Look-ups by one thread, over what they take by all threads that the machine was measured with."""
    update: InStep
    """Updates of rows, likewise."""
    dense_optimizer: InStep
    """The dense optimizer, likewise."""
    crowding: float
    """How many times as long the work of one core takes when all others are busy too: caches and memory are everybody's."""
    asking: MessageCost
    """What a trainer's thread does for the look-up and the update of a batch; bytes are those of pooled vectors and their gradients, calls those
    of each server."""
    answering: MessageCost
    """What other threads of both processes do besides, the server's rows not counted, before an answer is there."""
    waiting_s: float
    """For each request, until threads that wait are awake."""
    handing: MessageCost
    """A message that is not touched on its way, as a batch from a reader: all threads of both ends."""
    averaging: MessageCost
    """An exchange of a trainer's dense parameters with the dense server, by their bytes: all threads of both ends."""

    def __post_init__(self) -> None:
        require(1 <= self.crowding < math.inf, "crowding", f"must be at least 1 and finite, got {self.crowding}")
        require_not_negative(self, "waiting_s")
