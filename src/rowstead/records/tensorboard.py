"""Scalars for TensorBoard, written without it: TFRecord frames around directly encoded protobuf.

The messages (field numbers from tensorflow/core/util/event.proto and framework/summary.proto):

    Event      1 wall_time double   2 step int64   3 file_version string   5 summary   7 session_log
    Summary    1 value, repeated    Value: 1 tag string, 2 simple_value float
    SessionLog 1 status             1 is START: TensorBoard drops what it has seen from this step on
"""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from rowstead.spec.errors import RowsteadError


class ScalarWriter:
    """Adds scalars to an event file of its own in `folder`; each `write` reaches the file before it returns."""

    def __init__(self, folder: Path | str, *, resumed_step: int | None = None) -> None:
        """With `resumed_step`, earlier files' scalars beyond that step disappear from TensorBoard."""
        self.path = Path(folder) / f"events.out.tfevents.{time.time_ns():020d}.{socket.gethostname()}.{os.getpid()}"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise RowsteadError(f"cannot write to {self.path}: {error.strerror or error}") from error
        self._add(_event(0, _bytes_field(3, b"brain.Event:2")))
        if resumed_step is not None:
            self._add(_event(resumed_step + 1, _bytes_field(7, _varint_field(1, 1))))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add the value of each tag at one step."""
        values = b"".join(
            _bytes_field(1, _bytes_field(1, tag.encode()) + _key(2, 5) + struct.pack("<f", _float32(float(value))))
            for tag, value in scalars.items()
        )
        self._add(_event(step, _bytes_field(5, values)))

    def close(self) -> None:
        self._file.close()

    def _add(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        frame = length + struct.pack("<I", masked_crc32c(length)) + event + struct.pack("<I", masked_crc32c(event))
        try:
            while frame:
                frame = frame[self._file.write(frame) :]
        except OSError as error:
            raise RowsteadError(f"cannot write to {self.path}: {error.strerror or error}") from error


def _event(step: int, rest: bytes) -> bytes:
    return _key(1, 1) + struct.pack("<d", time.time()) + _varint_field(2, step) + rest


def _key(field: int, wire_type: int) -> bytes:
    return bytes([field << 3 | wire_type])


def _varint_field(field: int, value: int) -> bytes:
    return _key(field, 0) + _varint(value)


def _bytes_field(field: int, value: bytes) -> bytes:
    return _key(field, 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _float32(value: float) -> float:
    """`value`, or an infinity where it is too large for 32 bits."""
    return math.copysign(math.inf, value) if abs(value) > 3.4028235e38 else value


def _crc32c_table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table


_TABLE = _crc32c_table()


def masked_crc32c(data: bytes) -> int:
    """CRC-32C, rotated and shifted as TFRecord files store it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
