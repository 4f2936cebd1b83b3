"""Messages as bytes: a fixed header, a little JSON, and the tensors as they lie in memory. No pickle.

Everything here takes what it is given for hostile: any bytes either become a `Message` of the sizes that `Limits` allows, or raise a
`WireError`. Layout, little-endian, one ZeroMQ message of 1 + n frames:

    frame 0      header (112 bytes): magic "RSTD", version, role, number, sender, answered_below, bytes of the JSON, n,
                 bytes of all tensors, kind (32 bytes), name (32 bytes);
                 then of each tensor: dtype (1 byte), number of dimensions (1 byte), each dimension (8 bytes);
                 then the facts as a JSON object, or nothing where there are none
    frame 1..n   one tensor each, row-major

Magic, version, role and number stay where they are in all versions, so that a refusal reaches whoever speaks another one.
"""

from __future__ import annotations

import functools
import json
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rowstead.spec.errors import RowsteadError

MAGIC = b"RSTD"
VERSION = 2

REQUEST, REPLY, ERROR = 1, 2, 3
"""Roles of a message. The facts of an error are {"error": text}."""

_START = struct.Struct("<4sHBxQ")
_HEADER = struct.Struct("<4sHBxQQQIIQ32s32s")
_NAME_BYTES = 32

HEADER_BYTES = _HEADER.size
COPY_BELOW_BYTES = 64 * 1024
"""Smaller buffers are copied on sending: handing over a reference costs more."""

_DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
"""Their places here are their codes on the wire: add at the end, and only there."""
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_ITEM_BYTES = tuple(torch.empty((), dtype=dtype).element_size() for dtype in _DTYPES)
_MAX_DIMENSIONS = 8
_SHAPES = tuple(struct.Struct(f"<BB{num_dimensions}Q") for num_dimensions in range(_MAX_DIMENSIONS + 1))

_write_json = json.JSONEncoder(separators=(",", ":")).encode
_read_json = json.JSONDecoder().raw_decode

Buffer = bytes | memoryview


class WireError(RowsteadError):
    """Bytes that are no message of ours, or one that is larger than allowed."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much a message, a client and a server may hold; past it a message is refused or its sender waits."""

    facts_bytes: int = 4 << 20
    """Of the JSON of one message."""
    num_tensors: int = 256
    """In one message."""
    frame_bytes: int = 1 << 30
    """Of one tensor. The sender of a larger one is cut off before any of it is read."""
    message_bytes: int = 2 << 30
    """Of all tensors of one message."""
    in_flight_per_client: int = 64
    """Requests of one client that wait or run at a time, in the server."""
    queued_bytes: int = 1 << 30
    """Of requests that wait for a thread; past it the server reads no more until some have run."""
    remembered_bytes: int = 256 << 20
    """Of answers that are kept in case their request comes again."""
    num_clients: int = 4096
    """Of which the server knows what it has answered; past it the one not heard of for longest is forgotten."""

    @property
    def first_frame_bytes(self) -> int:
        """The most that header, shapes and facts can take."""
        return HEADER_BYTES + self.num_tensors * _SHAPES[-1].size + self.facts_bytes


DEFAULT_LIMITS = Limits()


@dataclass(slots=True)
class Message:
    """A kind, a few facts that JSON can hold, and tensors on the CPU.

    Tensors that came over the wire lie in the received bytes; they are this message's alone and may be written to.
    """

    kind: str
    facts: dict[str, Any] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)


class Header(NamedTuple):
    """Who says what to whom, beside the message itself."""

    role: int
    """`REQUEST`, `REPLY` or `ERROR`."""
    number: int
    """Of the request, counted by its client; the answer has the same."""
    sender: int
    """Drawn by chance by each client and each server when it starts."""
    answered_below: int
    """In requests: the client has the answers to all numbers below, and will not ask for them again."""
    kind: str
    name: str
    """Of the sender."""
    facts_bytes: int = 0
    num_tensors: int = 0
    tensors_bytes: int = 0


def encode(message: Message, *, role: int, number: int, sender: int, name: str, answered_below: int = 0) -> list[Buffer]:
    """The frames of a message. Those of tensors are views of them: they must not change until the frames are sent."""
    buffers = [_bytes_of(tensor) for tensor in message.tensors]
    facts = _write_json(message.facts).encode() if message.facts else b""
    header = _HEADER.pack(
        MAGIC,
        VERSION,
        role,
        number,
        sender,
        answered_below,
        len(facts),
        len(buffers),
        sum(map(len, buffers)),
        _encode_word(message.kind),
        _encode_word(name),
    )
    shapes = [
        _SHAPES[len(shape)].pack(_CODES[tensor.dtype], len(shape), *shape)
        for tensor in message.tensors
        for shape in (tensor.shape,)
    ]
    return [b"".join((header, *shapes, facts)), *buffers]


def number_of(frame: bytes) -> int | None:
    """The number of a request of ours in any version; None where the bytes are nothing of the kind."""
    if len(frame) < _START.size:
        return None
    magic, _, role, number = _START.unpack_from(frame)
    return int(number) if magic == MAGIC and role == REQUEST else None


def decode_header(frame: bytes, limits: Limits) -> Header:
    """What the first frame says, once its sizes are within bounds."""
    if len(frame) < _START.size or frame[:4] != MAGIC:
        raise WireError("these bytes are not a message of rowstead")
    version = _START.unpack_from(frame)[1]
    if version != VERSION:
        raise WireError(f"the message is of version {version}, here it is {VERSION}: run the same rowstead everywhere")
    if len(frame) < _HEADER.size:
        raise WireError(f"the header has {len(frame)} bytes instead of {_HEADER.size}")
    _, _, role, number, sender, answered_below, facts_bytes, num_tensors, tensors_bytes, kind, name = _HEADER.unpack_from(frame)
    if role not in (REQUEST, REPLY, ERROR):
        raise WireError(f"no role has the number {role}")
    if facts_bytes > limits.facts_bytes or num_tensors > limits.num_tensors or tensors_bytes > limits.message_bytes:
        raise WireError(
            f"the message has {facts_bytes:,} bytes of facts and {num_tensors:,} tensors of {tensors_bytes:,} bytes; at most "
            f"{limits.facts_bytes:,}, {limits.num_tensors:,} and {limits.message_bytes:,} are taken"
        )
    return Header(
        role, number, sender, answered_below, _decode_word(kind), _decode_word(name), facts_bytes, num_tensors, tensors_bytes
    )


def decode(header: Header, first: bytes, rest: Sequence[Any]) -> Message:
    """The message of a header that was checked; `rest` are the buffers of its tensors, writable, which it keeps."""
    if len(rest) != header.num_tensors:
        raise WireError(f"the message has {len(rest)} tensors instead of {header.num_tensors}")
    tensors = []
    offset, num_bytes = HEADER_BYTES, 0
    for buffer in rest:
        if offset + 2 > len(first):
            raise WireError("the shapes of the tensors end too soon")
        code, num_dimensions = first[offset], first[offset + 1]
        if code >= len(_DTYPES) or num_dimensions > _MAX_DIMENSIONS:
            raise WireError(f"no tensor is of type {code} with {num_dimensions} dimensions")
        layout = _SHAPES[num_dimensions]
        if offset + layout.size > len(first):
            raise WireError("the shapes of the tensors end too soon")
        tensors.append(_view_tensor(buffer, code, layout.unpack_from(first, offset)[2:]))
        offset += layout.size
        num_bytes += len(buffer)
    if num_bytes != header.tensors_bytes:
        raise WireError(f"the tensors have {num_bytes:,} bytes instead of {header.tensors_bytes:,}")
    if len(first) - offset != header.facts_bytes:
        raise WireError(f"the facts have {len(first) - offset:,} bytes instead of {header.facts_bytes:,}")
    return Message(header.kind, _decode_facts(first[offset:]) if header.facts_bytes else {}, tensors)


def size_of(frames: Iterable[Buffer]) -> int:
    """Bytes of all frames."""
    return sum(map(len, frames))


def _bytes_of(tensor: Tensor) -> Buffer:
    assert tensor.is_cpu, "a tensor must be on the CPU to be sent"
    assert tensor.dtype in _CODES, f"{tensor.dtype} is not sent"
    if tensor.numel() == 0:
        return b""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:  # NumPy has none
        tensor = tensor.view(torch.int16)
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return tensor.numpy().data.cast("B")


@functools.lru_cache(maxsize=256)
def _encode_word(word: str) -> bytes:
    encoded = word.encode()
    assert 0 < len(encoded) <= _NAME_BYTES, f"{word!r} must have 1 to {_NAME_BYTES} bytes"
    return encoded


@functools.lru_cache(maxsize=256)
def _decode_word(padded: bytes) -> str:
    try:
        word = padded.rstrip(b"\0").decode()
    except UnicodeDecodeError:
        word = ""
    if not word or not word.isprintable():
        raise WireError("kind and name must be printable words")
    return word


def _decode_facts(encoded: bytes) -> dict[str, Any]:
    try:
        text = encoded.decode()
        facts, end = _read_json(text)
    except (ValueError, RecursionError):
        raise WireError("the facts are not JSON") from None
    if end != len(text) or not isinstance(facts, dict):
        raise WireError("the facts are not one JSON object")
    return facts


def _view_tensor(buffer: Any, code: int, shape: tuple[int, ...]) -> Tensor:
    item_bytes, dtype = _ITEM_BYTES[code], _DTYPES[code]
    num_items = math.prod(shape)
    if num_items * item_bytes != len(buffer):
        raise WireError(f"a tensor {dtype} {shape} has {len(buffer):,} bytes")
    if num_items == 0:
        if max(shape) >= 1 << 31:
            raise WireError(f"no tensor has the shape {shape}")
        return torch.empty(shape, dtype=dtype)
    if dtype is torch.bool:  # any byte but 0 and 1 would be undefined
        return (torch.frombuffer(buffer, dtype=torch.uint8) != 0).view(shape)
    flat = torch.frombuffer(buffer, dtype=dtype)
    if flat.data_ptr() % item_bytes:  # small frames lie anywhere in ZeroMQ's buffer
        flat = torch.frombuffer(bytearray(buffer), dtype=dtype)
    return flat if len(shape) == 1 else flat.view(shape)
