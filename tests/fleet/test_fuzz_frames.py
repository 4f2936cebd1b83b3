"""Damaged and made-up messages: never a crash, a hang or a traceback, and the servers go on serving."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rowstead.fleet.packing import unpack
from rowstead.fleet.rpc_client import RefusedError
from rowstead.fleet.wire import Message, WireError
from tests.fleet.fuzz_frames import Fuzzer, build_requests, run_cases

NUM_CASES = 600


def test_damaged_frames_and_made_up_messages_are_refused_or_answered(tmp_path: Path) -> None:
    outcomes = run_cases(tmp_path, 0, NUM_CASES)
    for outcome in ("refused", "decoded", "batch refused", "batch unpacked", "answered by an error", "answered"):
        assert outcomes[outcome] > 10, outcomes


HUGE = json.loads("1e400")
FLAT = torch.ones(6)


@pytest.mark.parametrize(
    ("server", "message", "reason"),
    [
        ("reader", {"incarnation": HUGE}, "not a request for batches"),
        ("reader", {"held": [10**30]}, "not a request for batches"),
        (
            "sparse",
            Message("read_rows", {"table": "t0", "part": "rows"}, [torch.arange(2)] * 2),
            "row numbers must be one tensor",
        ),
        ("sparse", Message("update", {"client": "a", "number": 1, "step": 1, "lr": 10**400}), "lr must be a finite number"),
        ("sparse", Message("update", {"client": "a", "number": 1, "step": 1, "lr": 1e300}), "lr must be a finite number"),
        ("dense", Message("elastic_average", {"alpha": 10**400}, [FLAT]), "needs a number `alpha`"),
        ("dense", Message("average_parameters", {"momentum": 1e300, "lr": 1.0}, [FLAT]), "needs a number `momentum`"),
    ],
)
def test_numbers_and_tensors_that_a_server_cannot_use_are_refused_by_name(
    tmp_path: Path, server: str, message: Message | dict[str, object], reason: str
) -> None:
    with Fuzzer(tmp_path) as fuzzer:
        if isinstance(message, dict):
            message = Message("request_batches", {**build_requests()["reader"][0].facts, **message})
        with pytest.raises(RefusedError, match=reason) as refused:
            fuzzer.clients[server].call(message.kind, message.facts, message.tensors)
        assert "failed at" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "lengths"),
    [
        ({"length": 10**40}, None),
        ({"length": -1}, None),
        ({"length": HUGE}, None),
        ({"features": 2**40, "length": 0}, None),
        ({"features": 2**27, "length": 0}, None),  # offsets of gigabytes, for a message of a few bytes
        ({}, torch.zeros(0, dtype=torch.int16)),
        ({}, torch.tensor(1, dtype=torch.uint8)),
    ],
)
def test_a_batch_whose_bags_do_not_fit_its_ids_is_refused_before_its_offsets_are_made(
    changes: dict[str, object], lengths: torch.Tensor | None
) -> None:
    facts = {"features": 1, "has": [], **changes}
    tensors = [torch.zeros(2, 1), torch.zeros(2, dtype=torch.int32)] + ([] if lengths is None else [lengths])
    with pytest.raises(WireError):
        unpack(facts, tensors)
