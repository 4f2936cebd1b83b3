"""Messages survive a round trip; any other bytes raise a WireError and nothing else."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rowstead.fleet.wire import (
    HEADER_BYTES,
    REPLY,
    REQUEST,
    Limits,
    Message,
    WireError,
    decode,
    decode_header,
    encode,
    number_of,
)

DTYPES = [
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
]
FACTS = st.dictionaries(
    st.text(max_size=8),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=8,
    ),
    max_size=5,
)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    plain = torch.randint(0, 2**40, shape, generator=seed)
    dtype = draw(st.sampled_from(DTYPES))
    tensor = plain % 2 == 1 if dtype is torch.bool else (plain % 100).to(dtype)
    return tensor.T if draw(st.booleans()) and tensor.ndim == 2 else tensor


def sent(message: Message, **header: Any) -> list[bytes]:
    return [bytes(frame) for frame in encode(message, **{"role": REQUEST, "number": 3, "sender": 9, "name": "me", **header})]


def received(frames: list[bytes], limits: Limits = Limits()) -> Message:  # noqa: B008 (frozen)
    header = decode_header(frames[0], limits)
    return decode(header, frames[0], [bytearray(frame) for frame in frames[1:]])


@given(facts=FACTS, content=st.lists(tensors(), max_size=4), kind=st.text("abcdefg_é-0", min_size=1, max_size=16))
def test_a_message_comes_back_as_it_was_sent(facts: dict[str, Any], content: list[Tensor], kind: str) -> None:
    frames = sent(Message(kind, facts, content), number=2**64 - 1, sender=2**63, answered_below=7, role=REPLY)
    header = decode_header(frames[0], Limits())
    assert (header.role, header.number, header.sender, header.answered_below) == (REPLY, 2**64 - 1, 2**63, 7)
    assert (header.kind, header.name) == (kind, "me")
    back = received(frames)
    assert (back.kind, back.facts) == (kind, facts)
    assert [tensor.dtype for tensor in back.tensors] == [tensor.dtype for tensor in content]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(back.tensors, content, strict=True))


def test_large_tensors_are_neither_copied_when_sent_nor_when_received() -> None:
    tensor = torch.randn(300, 100)
    frames = encode(Message("x", {}, [tensor]), role=REQUEST, number=0, sender=0, name="me")
    tensor[0, 0] = 7.0
    buffer = bytearray(frames[1])
    back = decode(decode_header(bytes(frames[0]), Limits()), bytes(frames[0]), [buffer]).tensors[0]
    assert back[0, 0] == 7.0
    buffer[:4] = struct.pack("<f", 8.0)
    assert back[0, 0] == 8.0


def test_an_unaligned_tensor_is_aligned() -> None:
    frames = sent(Message("x", {}, [torch.arange(5.0, dtype=torch.float64)]))
    off_by_one = memoryview(bytearray(b"\0" + frames[1]))[1:]
    back = decode(decode_header(frames[0], Limits()), frames[0], [off_by_one]).tensors[0]
    assert back.data_ptr() % 8 == 0
    assert torch.equal(back, torch.arange(5.0, dtype=torch.float64))


def test_gradients_and_views_are_sent_by_their_values() -> None:
    leaf = torch.randn(4, 6, requires_grad=True)
    back = received(sent(Message("x", {}, [leaf, leaf.T, leaf[1:3, ::2]]))).tensors
    assert torch.equal(back[0], leaf.detach())
    assert torch.equal(back[1], leaf.detach().T)
    assert torch.equal(back[2], leaf.detach()[1:3, ::2])


@settings(max_examples=150)
@given(data=st.data(), content=st.lists(tensors(), max_size=3), facts=FACTS)
def test_any_damage_gives_a_message_or_a_wire_error(data: st.DataObject, content: list[Tensor], facts: dict[str, Any]) -> None:
    frames = [bytearray(frame) for frame in sent(Message("kind", facts, content))]
    for _ in range(data.draw(st.integers(1, 4))):
        frame = frames[data.draw(st.integers(0, len(frames) - 1))]
        at = data.draw(st.integers(0, len(frame)))
        match data.draw(st.sampled_from(["flip", "cut", "add"])):
            case "flip" if at < len(frame):
                frame[at] ^= data.draw(st.integers(1, 255))
            case "cut":
                del frame[at:]
            case _:
                frame[at:at] = data.draw(st.binary(max_size=20))
    try:
        message = received([bytes(frame) for frame in frames])
    except WireError:
        return
    assert isinstance(message.facts, dict)


@given(frames=st.lists(st.binary(max_size=200), min_size=1, max_size=3))
def test_noise_is_not_a_message(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        received(frames)


def test_another_version_is_named_in_the_error_and_its_number_can_still_be_read() -> None:
    frame = bytearray(sent(Message("x"), number=41)[0])
    frame[4:6] = struct.pack("<H", 7)
    with pytest.raises(WireError, match="version 7, expected 2"):
        decode_header(bytes(frame), Limits())
    assert number_of(bytes(frame)) == 41


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(facts_bytes=100), Message("x", {"long": "y" * 100})),
        (Limits(num_tensors=2), Message("x", {}, [torch.zeros(1)] * 3)),
        (Limits(message_bytes=100), Message("x", {}, [torch.zeros(26)])),
    ],
)
def test_messages_over_a_limit_are_refused(limits: Limits, message: Message) -> None:
    with pytest.raises(WireError, match="the limits are"):
        received(sent(message), limits)


@pytest.mark.parametrize("facts", [b"[1]", b"{} ", b"{}x", b"nul", b"\xff\xfe", b"[" * 100_000, b"1" * 5000])
def test_facts_that_are_not_a_json_object_are_refused(facts: bytes) -> None:
    header = bytearray(sent(Message("x", {"a": 1}))[0][:HEADER_BYTES])
    struct.pack_into("<I", header, 32, len(facts))
    assert json.loads(sent(Message("x", {"a": 1}))[0][HEADER_BYTES:]) == {"a": 1}
    with pytest.raises(WireError, match="JSON"):
        received([bytes(header) + facts])


def test_a_shape_whose_product_overflows_is_refused() -> None:
    frames = sent(Message("x", {}, [torch.zeros(1, 1)]))
    header = bytearray(frames[0])
    struct.pack_into("<QQ", header, HEADER_BYTES + 2, 2**32, 2**32)
    with pytest.raises(WireError, match="has 4 bytes"):
        received([bytes(header), frames[1]])
    struct.pack_into("<QQ", header, HEADER_BYTES + 2, 2**63, 0)
    struct.pack_into("<Q", header, 40, 0)
    with pytest.raises(WireError, match="invalid tensor shape"):
        received([bytes(header), b""])
