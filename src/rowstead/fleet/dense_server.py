"""The dense parameter server, which holds the shared dense parameters of all trainers, or with several servers a range of them.

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

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from rowstead.fleet.deduplication import Caller
from rowstead.fleet.dense_server_state import PARAMETERS, ROUND_DEADLINE_S, DenseServerState
from rowstead.fleet.keys import Keys
from rowstead.fleet.rpc_server import DeferredReply, Handler, Server
from rowstead.fleet.wire import Message
from rowstead.records.files import is_figure, write_atomic
from rowstead.records.plain_files import read_plain, shown
from rowstead.spec.errors import CheckpointError, RowsteadError

SNAPSHOT_EVERY_S = 5.0
"""Dense parameters are small: they are written often."""
MAX_SNAPSHOT_BYTES = 1 << 34
_CHECK_EVERY_S = 0.05
_SAVED, _FINISHED = "saved.", "finished."
_log = logging.getLogger("rowstead.fleet")


class DenseServerProcess(Server):
    """Serves a `DenseServerState`, and saves it to disk if it has a snapshot file. It learns the size of the model from the first trainer."""

    def __init__(
        self,
        *,
        address: str | None = None,
        keys: Keys | None = None,
        name: str = "dense-0",
        snapshot: Path | None = None,
        snapshot_every_s: float = SNAPSHOT_EVERY_S,
        round_deadline_s: float = ROUND_DEADLINE_S,
    ) -> None:
        """`snapshot` is the file that the state is saved to; an existing one is loaded."""
        state = self.state = DenseServerState(deadline_s=round_deadline_s)
        self.num_snapshots = self.num_snapshots_failed = self._num_exchanges_saved = 0
        self._snapshot, self._every_s = snapshot, snapshot_every_s
        self._writing = threading.Lock()
        if snapshot is not None and os.path.lexists(snapshot):
            restore_snapshot(state, read_snapshot(snapshot))
        self._stopping = threading.Event()
        self._watch_thread = threading.Thread(target=self._check_regularly, name=f"{name}-watch", daemon=True)
        run: dict[str, Callable[[Message, str], Tensor | None]] = {
            "join": self._join,
            "leave": lambda message, member: state.leave(member),
            "finish": self._finish,
            "pull": lambda message, member: state.pull(),
            "push": lambda message, member: state.push(_flat(message)),
            "elastic_average": lambda message, member: state.elastic_average(_flat(message), _number(message, "alpha")),
            "save_state": lambda message, member: state.save(_name(message), _flat(message)),
            "load_state": lambda message, member: state.saved.get(_name(message)),
            "members": lambda message, member: state.set_members(_names(message)),
        }
        handlers = {kind: _replying(handle) for kind, handle in run.items()}
        handlers |= {"average": self._average, "average_parameters": self._average_parameters}
        super().__init__(handlers, address=address, keys=keys, name=name, status=self._own_status)

    def serve(self, until: Callable[[], bool] = lambda: False) -> None:
        self._watch_thread.start()
        super().serve(until)

    def close(self) -> None:
        """Stop, after writing the last state to disk."""
        self._stopping.set()
        if self._watch_thread.is_alive():
            self._watch_thread.join()
        super().close()
        self.write()

    def write(self) -> None:
        """Write the current state to the snapshot file, if any; a full disk is only logged."""
        with self._writing:
            num_exchanges = self.state.num_exchanges
            if self._snapshot is None or (content := encode_snapshot(self.state)) is None:
                return
            try:
                self._snapshot.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(self._snapshot, content)
                self.num_snapshots += 1
                self._num_exchanges_saved = num_exchanges
            except OSError as error:
                self.num_snapshots_failed += 1
                _log.warning("cannot write the snapshot %s: %s", self._snapshot, error)

    def _own_status(self) -> dict[str, Any]:
        state = self.state
        return {
            "num_exchanges": state.num_exchanges,
            "num_unsaved_exchanges": state.num_exchanges - self._num_exchanges_saved,
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

    def _join(self, message: Message, member: str) -> Tensor:
        is_first = self.state.parameters is None
        common = self.state.join(member, _flat(message))
        if is_first:
            self.write()  # else a restart would start from the parameters of a trainer that starts later
        return common

    def _finish(self, message: Message, member: str) -> None:
        self.state.finish(member, _flat(message))
        self.write()  # the trainer exits: a restart that has lost its parameters would leave them out of the model

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


def _replying(run: Callable[[Message, str], Tensor | None]) -> Handler:
    """A handler that replies with the tensor, if any, that `run` returns for a message and the name of its sender."""

    def handle(message: Message, caller: Caller) -> Message:
        result = run(message, caller.name)
        return Message(message.kind, tensors=[] if result is None else [result])

    return handle


def _flat(message: Message) -> Tensor:
    """Return the only tensor of a message."""
    if len(message.tensors) != 1 or message.tensors[0].dim() != 1 or not message.tensors[0].dtype.is_floating_point:
        raise RowsteadError(f"`{message.kind}` needs one flat tensor of floating-point numbers")
    return message.tensors[0]


_MAX_NUMBER = float(torch.finfo(torch.float32).max)


def _number(message: Message, key: str) -> float:
    value = message.facts.get(key)
    if not is_figure(value) or not 0 <= value <= _MAX_NUMBER:
        raise RowsteadError(f"`{message.kind}` needs a number `{key}`, got {str(value)[:40]}")
    return float(value)


def _names(message: Message) -> list[str]:
    names = message.facts.get("names")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RowsteadError("`names` must be a list of trainers")
    return names


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


def read_snapshot(path: Path) -> bytes:
    """The content of a snapshot file."""
    try:
        return read_plain(path, MAX_SNAPSHOT_BYTES)
    except OSError as error:
        raise CheckpointError(
            f"cannot read the dense server's snapshot {path}: {error.strerror}. Remove it to start without"
        ) from None


def restore_snapshot(state: DenseServerState, content: bytes) -> None:
    """Load the result of `encode_snapshot`; the first trainer with newer parameters replaces those loaded."""
    try:
        tensors = safetensors.torch.load(content)
    except (
        safetensors.SafetensorError,
        KeyError,
        ValueError,
        RuntimeError,
    ) as error:  # the last three for dtypes that torch lacks
        raise CheckpointError(f"cannot read the dense server's snapshot: {error}. Remove it to start without") from None
    if unknown := [name for name in tensors if name != "parameters" and not name.startswith((_SAVED, _FINISHED))]:
        raise RowsteadError(f"the dense server's snapshot has unknown tensors {unknown}: it is of another version; remove it")
    if "parameters" not in tensors:
        raise CheckpointError("the dense server's snapshot is not valid: it has no `parameters`. Remove it to start without")
    for name, value in tensors.items():
        is_flat = value.dim() == 1 and value.dtype.is_floating_point
        if not is_flat or (value.shape != tensors["parameters"].shape and not name.startswith(_SAVED)):
            raise CheckpointError(
                f"the dense server's snapshot is not valid: {shown(name)} must be one flat tensor of floating-point numbers, as many as "
                "there are parameters. Remove it to start without"
            )
    state.parameters, state.is_stale = tensors.pop("parameters"), True
    state.saved = {name.removeprefix(_SAVED): value for name, value in tensors.items() if name.startswith(_SAVED)}
    state.finished = {name.removeprefix(_FINISHED): value for name, value in tensors.items() if name.startswith(_FINISHED)}
