"""The dense parameter server, which holds the shared dense parameters of all trainers, and its client.

| kind | facts | tensors | reply |
|---|---|---|---|
| `join` | | parameters | the shared parameters |
| `leave` | | | |
| `finish` | | parameters | |
| `pull` | | | the shared parameters |
| `push` | | parameters | |
| `elastic_average` | `alpha` | parameters | the change of the shared parameters |
| `average` | `group` | any | the mean of the round, once it closes; `round` |
| `average_parameters` | `momentum`, `lr` | parameters | the shared parameters after the round, once it closes |
| `save_state` | `name` | any | |
| `load_state` | `name` | | what was saved, if anything |
| `members` | `names` | | |
| `status` | | | figures of the server |

A client is named after its member: `trainer-3.1` is thread 1 of trainer 3. `members` names trainers.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from rowstead.fleet.deduplication import Caller
from rowstead.fleet.dense_server_state import PARAMETERS, ROUND_DEADLINE_S, DenseServerState
from rowstead.fleet.keys import Keys
from rowstead.fleet.rpc_client import Client, PendingReply, ServerUnavailable
from rowstead.fleet.rpc_server import DeferredReply, Server
from rowstead.fleet.wire import Message
from rowstead.records.files import write_atomic
from rowstead.spec.errors import RowsteadError
from rowstead.training.sync_base import DenseServerUnavailable

EXCHANGE_TIMEOUT_S = 5.0
"""Seconds that a trainer waits for the server before it continues without it."""
JOIN_TIMEOUT_S = 30.0
"""Seconds that it waits when it starts, as it needs the shared parameters, and when it sends its final ones."""
PROBE_TIMEOUT_S = 24 * 3600.0
"""Seconds of waiting after which the probe of an unavailable server is renewed."""
SNAPSHOT_EVERY_S = 5.0
"""Dense parameters are small: they are written often."""
_CHECK_EVERY_S = 0.05
_SAVED, _FINISHED = "saved.", "finished."
_log = logging.getLogger("rowstead.fleet")


class DenseServerProcess:
    """Serves a `DenseServerState`, and saves it to disk if it has a snapshot file."""

    def __init__(
        self,
        *,
        address: str = "tcp://127.0.0.1:0",
        keys: Keys | None = None,
        name: str = "dense-0",
        snapshot: Path | None = None,
        snapshot_every_s: float = SNAPSHOT_EVERY_S,
        round_deadline_s: float = ROUND_DEADLINE_S,
    ) -> None:
        """`snapshot` is the file that the state is saved to; an existing one is loaded."""
        self.state = DenseServerState(deadline_s=round_deadline_s)
        self.num_snapshots = self.num_snapshots_failed = 0
        self._snapshot, self._every_s = snapshot, snapshot_every_s
        self._writing = threading.Lock()
        if snapshot is not None and snapshot.exists():
            restore_snapshot(self.state, snapshot.read_bytes())
        handlers: dict[str, Callable[[Message, Caller], Message | DeferredReply]] = {
            "join": self._join,
            "leave": self._leave,
            "finish": self._finish,
            "pull": self._pull,
            "push": self._push,
            "elastic_average": self._elastic_average,
            "average": self._average,
            "average_parameters": self._average_parameters,
            "save_state": self._save_state,
            "load_state": self._load_state,
            "members": self._members,
        }
        self.server = Server(handlers, address=address, keys=keys, name=name, status=self.status)
        self._stopping = threading.Event()
        self._watch_thread = threading.Thread(target=self._check_regularly, name=f"{name}-watch", daemon=True)

    @property
    def address(self) -> str:
        """The address that clients connect to."""
        return self.server.address

    def start(self) -> DenseServerProcess:
        """Serve in a new thread."""
        self._watch_thread.start()
        self.server.start()
        return self

    def serve(self, until: Callable[[], bool]) -> None:
        """Serve in this thread."""
        self._watch_thread.start()
        self.server.serve(until)

    def close(self) -> None:
        """Stop, after writing the last state to disk."""
        self._stopping.set()
        if self._watch_thread.is_alive():
            self._watch_thread.join()
        self.server.close()
        self.write()

    def write(self) -> None:
        """Write the current state to the snapshot file, if any; a full disk is only logged."""
        with self._writing:
            if self._snapshot is None or (content := encode_snapshot(self.state)) is None:
                return
            try:
                self._snapshot.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(self._snapshot, content)
                self.num_snapshots += 1
            except OSError as error:
                self.num_snapshots_failed += 1
                _log.warning("cannot write the snapshot %s: %s", self._snapshot, error)

    def status(self) -> dict[str, Any]:
        """Figures that `status` adds to those of every server."""
        state = self.state
        return {
            "num_exchanges": state.num_exchanges,
            "num_rounds": state.num_rounds,
            "num_partial_rounds": state.num_partial_rounds,
            "num_waiting": state.num_waiting,
            "num_parameters": 0 if state.parameters is None else state.parameters.numel(),
            "num_snapshots": self.num_snapshots,
            "num_snapshots_failed": self.num_snapshots_failed,
        }

    def _check_regularly(self) -> None:
        """Close overdue rounds and write snapshots until stopped."""
        since_s = 0.0
        while not self._stopping.wait(_CHECK_EVERY_S):
            self.state.close_overdue()
            since_s += _CHECK_EVERY_S
            if since_s >= self._every_s:
                since_s = 0.0
                self.write()

    # Handlers

    def _join(self, message: Message, caller: Caller) -> Message:
        is_first = self.state.parameters is None
        common = self.state.join(caller.name, _flat(message))
        if is_first:
            self.write()  # else a restart would start from the parameters of a trainer that starts later
        return Message("join", tensors=[common])

    def _leave(self, message: Message, caller: Caller) -> Message:
        self.state.leave(caller.name)
        return Message("leave")

    def _finish(self, message: Message, caller: Caller) -> Message:
        self.state.finish(caller.name, _flat(message))
        self.write()  # the trainer exits: a restart that has lost its parameters would leave them out of the model
        return Message("finish")

    def _pull(self, message: Message, caller: Caller) -> Message:
        return Message("pull", tensors=[self.state.pull()])

    def _push(self, message: Message, caller: Caller) -> Message:
        self.state.push(_flat(message))
        return Message("push")

    def _elastic_average(self, message: Message, caller: Caller) -> Message:
        return Message("elastic_average", tensors=[self.state.elastic_average(_flat(message), _number(message, "alpha"))])

    def _average(self, message: Message, caller: Caller) -> DeferredReply:
        group = message.facts.get("group")
        if not isinstance(group, str) or not group or group == PARAMETERS:
            raise RowsteadError(f"`group` must be a word other than `{PARAMETERS}`")
        return self._enter_round(group, message, caller)

    def _average_parameters(self, message: Message, caller: Caller) -> DeferredReply:
        return self._enter_round(PARAMETERS, message, caller, momentum=_number(message, "momentum"), lr=_number(message, "lr"))

    def _enter_round(self, group: str, message: Message, caller: Caller, **rule: float) -> DeferredReply:
        reply = DeferredReply()

        def on_close(result: Tensor, number: int) -> None:
            reply.send(Message("round", {"round": number}, [result]))

        self.state.enter_round(group, caller.name, _flat(message), on_close, **rule)
        return reply

    def _save_state(self, message: Message, caller: Caller) -> Message:
        self.state.saved[_name(message)] = _flat(message)
        return Message("save_state")

    def _load_state(self, message: Message, caller: Caller) -> Message:
        found = self.state.saved.get(_name(message))
        return Message("load_state", tensors=[] if found is None else [found])

    def _members(self, message: Message, caller: Caller) -> Message:
        names = message.facts.get("names")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise RowsteadError("`names` must be a list of trainers")
        self.state.set_members(names)
        return Message("members")


def _flat(message: Message) -> Tensor:
    """Return the only tensor of a message."""
    if len(message.tensors) != 1 or message.tensors[0].dim() != 1 or not message.tensors[0].dtype.is_floating_point:
        raise RowsteadError(f"`{message.kind}` needs one flat tensor of floating-point numbers")
    return message.tensors[0]


def _number(message: Message, key: str) -> float:
    value = message.facts.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise RowsteadError(f"`{message.kind}` needs a number `{key}`, got {value!r}")
    return float(value)


def _name(message: Message) -> str:
    name = message.facts.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= 32:
        raise RowsteadError("`name` must be a word of at most 32 letters")
    return name


def encode_snapshot(state: DenseServerState) -> bytes | None:
    """Return all that a restart needs; None if there is nothing yet."""
    with state.locked():
        if state.parameters is None:
            return None
        tensors = {"parameters": state.parameters.clone()}
        tensors |= {f"{_SAVED}{name}": value for name, value in state.saved.items()}
        tensors |= {f"{_FINISHED}{name}": value for name, value in state.finished.items()}
    return safetensors.torch.save(tensors)


def restore_snapshot(state: DenseServerState, content: bytes) -> None:
    """Load the result of `encode_snapshot`; the first trainer with newer parameters replaces those loaded."""
    try:
        tensors = safetensors.torch.load(content)
    except safetensors.SafetensorError as error:
        raise RowsteadError(f"cannot read the dense server's snapshot: {error}. Remove it to start without") from None
    if unknown := [name for name in tensors if name != "parameters" and not name.startswith((_SAVED, _FINISHED))]:
        raise RowsteadError(f"the dense server's snapshot has unknown tensors {unknown}: it is of another version; remove it")
    state.parameters, state.is_stale = tensors.pop("parameters"), True
    state.saved = {name.removeprefix(_SAVED): value for name, value in tensors.items() if name.startswith(_SAVED)}
    state.finished = {name.removeprefix(_FINISHED): value for name, value in tensors.items() if name.startswith(_FINISHED)}


class DenseServerClient:
    """A `DenseServer` over RPC, for the member that the client is named after.

    While the server is unavailable, the first call raises DenseServerUnavailable after its timeout, and later calls immediately.
    """

    def __init__(
        self, client: Client, *, exchange_timeout_s: float = EXCHANGE_TIMEOUT_S, join_timeout_s: float = JOIN_TIMEOUT_S
    ) -> None:
        self._client, self._exchange_timeout_s, self._join_timeout_s = client, exchange_timeout_s, join_timeout_s
        self._probe: PendingReply | None = None
        """A pending request to an unavailable server; the server is back when it is answered."""

    def join(self, parameters: Tensor) -> Tensor:
        is_first_try = self._probe is None
        deadline_s = self._join_timeout_s if is_first_try else None
        return self._call("join", {}, [parameters], deadline_s=deadline_s, is_patient=is_first_try).tensors[0]

    def leave(self) -> None:
        self._call("leave")

    def finish(self, parameters: Tensor) -> None:
        self._call("finish", {}, [parameters], deadline_s=self._join_timeout_s, is_patient=True)

    def pull(self) -> Tensor:
        return self._call("pull").tensors[0]

    def push(self, parameters: Tensor) -> None:
        self._call("push", {}, [parameters])

    def elastic_average(self, local: Tensor, alpha: float) -> Tensor:
        return self._call("elastic_average", {"alpha": alpha}, [local]).tensors[0]

    def average(self, tensor: Tensor, group: str) -> tuple[Tensor, int]:
        reply = self._call("average", {"group": group}, [tensor], deadline_s=self._exchange_timeout_s + 2 * ROUND_DEADLINE_S)
        return reply.tensors[0], int(reply.facts["round"])

    def average_parameters(self, local: Tensor, *, momentum: float = 0.0, lr: float = 1.0) -> Tensor:
        facts, deadline_s = {"momentum": momentum, "lr": lr}, self._exchange_timeout_s + 2 * ROUND_DEADLINE_S
        return self._call("average_parameters", facts, [local], deadline_s=deadline_s).tensors[0]

    def save_state(self, name: str, tensor: Tensor) -> None:
        self._call("save_state", {"name": name}, [tensor])

    def load_state(self, name: str) -> Tensor | None:
        tensors = self._call("load_state", {"name": name}).tensors
        return tensors[0] if tensors else None

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _call(
        self,
        kind: str,
        facts: Mapping[str, Any] | None = None,
        tensors: Sequence[Tensor] = (),
        *,
        deadline_s: float | None = None,
        is_patient: bool = False,
    ) -> Message:
        """Send a request; a patient caller waits for an unavailable server, up to its deadline."""
        if not is_patient:
            self._check_probe()
        # The client may still send the tensors after a failure, when the caller changes its own: copy them.
        own = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
        try:
            return self._client.call(kind, facts, own, deadline_s=deadline_s or self._exchange_timeout_s)
        except ServerUnavailable as error:
            if self._probe is None or self._probe.is_done:  # one probe is enough
                self._probe = self._client.start("status", deadline_s=PROBE_TIMEOUT_S)
            raise DenseServerUnavailable(f"the dense server is unavailable; training continues without it: {error}") from None

    def _check_probe(self) -> None:
        """Raise immediately if the server has not answered since it became unavailable."""
        if self._probe is None:
            return
        if not self._probe.is_done:
            raise DenseServerUnavailable("the dense server is still unavailable")
        probe, self._probe = self._probe, None
        with contextlib.suppress(RowsteadError):
            probe.wait()
            return
        self._probe = self._client.start("status", deadline_s=PROBE_TIMEOUT_S)
        raise DenseServerUnavailable("the dense server is still unavailable")


def serve_dense(
    folder: Path,
    number: int,
    *,
    until: Callable[[], bool],
    ready: Callable[[str], None],
    address: str = "tcp://127.0.0.1:0",
    keys: Keys | None = None,
    incarnation: int = 0,
    snapshot_every_s: float = SNAPSHOT_EVERY_S,
    start_sampling: Callable[[Callable[[], dict[str, Any]]], None] | None = None,
) -> None:
    """Run the dense server of a run until `until()`.

    It learns the size of the model from the first trainer. Its snapshot is `snapshots/dense-<number>.safetensors` of the run's
    folder; it resumes from an existing one. `ready` receives the address, `start_sampling` a function that returns the status.
    """
    snapshot = folder / "snapshots" / f"dense-{number}.safetensors"
    server = DenseServerProcess(
        address=address, keys=keys, name=f"dense-{number}", snapshot=snapshot, snapshot_every_s=snapshot_every_s
    )
    try:
        if start_sampling is not None:
            start_sampling(lambda: {**server.server.status(), **server.status(), "incarnation": incarnation})
        ready(server.address)
        server.serve(until)
    finally:
        server.close()
