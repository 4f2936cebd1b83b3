"""The message format: a fixed header, a small JSON object, and raw tensor bytes. No pickle.

All input is treated as hostile: bytes either decode to a `Message` within `Limits` or raise a `WireError`. A message is one
little-endian multipart ZeroMQ message of 1 + n frames:

    frame 0      header (112 bytes): magic "RSTD", version, role, number, sender, answered_below, bytes of the JSON, n,
                 bytes of all tensors, kind (32 bytes), name (32 bytes);
                 per tensor: dtype (1 byte), number of dimensions (1 byte), each dimension (8 bytes);
                 then the facts as a JSON object, empty if there are none
    frame 1..n   one tensor each, row-major

Magic, version, role and number keep their offsets in all versions, so that a peer with another version receives the error.
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
"""Smaller buffers are copied when sent: for those a copy is cheaper than reference counting."""

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
"""The index is the code on the wire: only append."""
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_ITEM_BYTES = tuple(torch.empty((), dtype=dtype).element_size() for dtype in _DTYPES)
_MAX_DIMENSIONS = 8
_SHAPES = tuple(struct.Struct(f"<BB{num_dimensions}Q") for num_dimensions in range(_MAX_DIMENSIONS + 1))

_write_json = json.JSONEncoder(separators=(",", ":")).encode
_read_json = json.JSONDecoder().raw_decode

Buffer = bytes | memoryview


class WireError(RowsteadError):
    """Bytes that are not a valid message, or a message over the limits."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a message, a client and a server; a message over them is refused, or its sender blocked."""

    facts_bytes: int = 4 << 20
    """JSON bytes per message."""
    num_tensors: int = 256
    """Tensors per message."""
    frame_bytes: int = 1 << 30
    """Bytes per tensor. The sender of a larger one is disconnected before it is read."""
    message_bytes: int = 2 << 30
    """Bytes of all tensors of one message."""
    in_flight_per_client: int = 64
    """Unanswered requests of one client."""
    unread_bytes_per_client: int = 256 << 20
    """Bytes of replies that a connection has not read; above it its requests wait."""
    unread_bytes: int = 2 << 30
    """The same of all connections; at half of it, those that have unread replies wait."""
    kept_replies_bytes: int = 256 << 20
    """Bytes of replies kept in case their request is resent."""
    num_clients: int = 4096
    """Clients whose replies the server tracks; above it the least recently seen client is dropped."""

    @property
    def first_frame_bytes(self) -> int:
        """The largest possible size of header, shapes and facts."""
        return HEADER_BYTES + self.num_tensors * _SHAPES[-1].size + self.facts_bytes


DEFAULT_LIMITS = Limits()


@dataclass(slots=True)
class Message:
    """A kind, JSON fields (`facts`) and CPU tensors.

    Received tensors are views of the received buffer; the message owns it, so they are writable.
    """

    kind: str
    facts: dict[str, Any] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)


class Header(NamedTuple):
    """Routing information of a message."""

    role: int
    """`REQUEST`, `REPLY` or `ERROR`."""
    number: int
    """Number of the request, counted by its client; the reply has the same number."""
    sender: int
    """Random id that each client and each server draws when it starts."""
    answered_below: int
    """In requests: the client has the replies to all lower numbers and will not resend those requests."""
    kind: str
    name: str
    """Name of the sender."""
    facts_bytes: int = 0
    num_tensors: int = 0
    tensors_bytes: int = 0


def encode(message: Message, *, role: int, number: int, sender: int, name: str, answered_below: int = 0) -> list[Buffer]:
    """Return the frames of a message. Tensor frames are views: the tensors must not change until the frames are sent."""
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
    """Return the number of a request of any protocol version; None if the bytes are not a request."""
    if len(frame) < _START.size:
        return None
    magic, _, role, number = _START.unpack_from(frame)
    return int(number) if magic == MAGIC and role == REQUEST else None


def decode_header(frame: bytes, limits: Limits) -> Header:
    """Parse the first frame and check its sizes against `limits`."""
    if len(frame) < _START.size or frame[:4] != MAGIC:
        raise WireError("not a rowstead message")
    version = _START.unpack_from(frame)[1]
    if version != VERSION:
        raise WireError(f"the message has protocol version {version}, expected {VERSION}: run the same rowstead everywhere")
    if len(frame) < _HEADER.size:
        raise WireError(f"the header has {len(frame)} bytes, expected {_HEADER.size}")
    _, _, role, number, sender, answered_below, facts_bytes, num_tensors, tensors_bytes, kind, name = _HEADER.unpack_from(frame)
    if role not in (REQUEST, REPLY, ERROR):
        raise WireError(f"unknown role {role}")
    if facts_bytes > limits.facts_bytes or num_tensors > limits.num_tensors or tensors_bytes > limits.message_bytes:
        raise WireError(
            f"the message has {facts_bytes:,} bytes of facts and {num_tensors:,} tensors of {tensors_bytes:,} bytes; the limits are "
            f"{limits.facts_bytes:,}, {limits.num_tensors:,} and {limits.message_bytes:,}"
        )
    return Header(
        role, number, sender, answered_below, _decode_word(kind), _decode_word(name), facts_bytes, num_tensors, tensors_bytes
    )


def decode(header: Header, first: bytes, rest: Sequence[Any]) -> Message:
    """Decode the message of a checked header; `rest` are the writable buffers of its tensors, which the message keeps."""
    if len(rest) != header.num_tensors:
        raise WireError(f"the message has {len(rest)} tensors, expected {header.num_tensors}")
    tensors = []
    offset, num_bytes = HEADER_BYTES, 0
    for buffer in rest:
        if offset + 2 > len(first):
            raise WireError("the tensor shapes are truncated")
        code, num_dimensions = first[offset], first[offset + 1]
        if code >= len(_DTYPES) or num_dimensions > _MAX_DIMENSIONS:
            raise WireError(f"unknown dtype {code} or too many dimensions ({num_dimensions})")
        layout = _SHAPES[num_dimensions]
        if offset + layout.size > len(first):
            raise WireError("the tensor shapes are truncated")
        tensors.append(_view_tensor(buffer, code, layout.unpack_from(first, offset)[2:]))
        offset += layout.size
        num_bytes += len(buffer)
    if num_bytes != header.tensors_bytes:
        raise WireError(f"the tensors have {num_bytes:,} bytes, expected {header.tensors_bytes:,}")
    if len(first) - offset != header.facts_bytes:
        raise WireError(f"the facts have {len(first) - offset:,} bytes, expected {header.facts_bytes:,}")
    return Message(header.kind, _decode_facts(first[offset:]) if header.facts_bytes else {}, tensors)


def size_of(frames: Iterable[Buffer]) -> int:
    return sum(map(len, frames))


def _bytes_of(tensor: Tensor) -> Buffer:
    assert tensor.is_cpu, "only CPU tensors can be sent"
    assert tensor.dtype in _CODES, f"tensors of {tensor.dtype} cannot be sent"
    if tensor.numel() == 0:
        return b""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:  # NumPy has no bfloat16
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
        raise WireError("the facts are not a JSON object")
    return facts


def _view_tensor(buffer: Any, code: int, shape: tuple[int, ...]) -> Tensor:
    item_bytes, dtype = _ITEM_BYTES[code], _DTYPES[code]
    num_items = math.prod(shape)
    if num_items * item_bytes != len(buffer):
        raise WireError(f"a tensor {dtype} {shape} has {len(buffer):,} bytes")
    if num_items == 0:
        if max(shape) >= 1 << 31:
            raise WireError(f"invalid tensor shape {shape}")
        return torch.empty(shape, dtype=dtype)
    if dtype is torch.bool:  # bytes other than 0 and 1 are undefined behaviour
        return (torch.frombuffer(buffer, dtype=torch.uint8) != 0).view(shape)
    flat = torch.frombuffer(buffer, dtype=dtype)
    if flat.data_ptr() % item_bytes:  # small frames are not aligned in ZeroMQ's buffer
        flat = torch.frombuffer(bytearray(buffer), dtype=dtype)
    return flat if len(shape) == 1 else flat.view(shape)
