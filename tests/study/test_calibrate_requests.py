"""Costs of requests between processes that share cores."""

from __future__ import annotations

import numpy as np
import psutil
import pytest
import torch

from rowstead.spec.sharing import MessageCost
from rowstead.study.calibration.machine_speed import MachineSpeed
from rowstead.study.calibration.requests import CALLS, SIZES, _fit_cost, _subtract, measure_requests


def terms() -> np.ndarray:
    return np.array([[CALLS, one.num_tables * one.num_ids * one.batch_size, 2.0 * one.num_bytes] for one in SIZES])


def test_request_loads_separate_the_costs_of_messages_ids_and_bytes() -> None:
    wanted = MessageCost(call_s=2e-4, id_s=8e-9, byte_s=2e-10)
    taken = [wanted.seconds(num_calls=calls, num_ids=ids, num_bytes=num) for calls, ids, num in terms()]
    found = _fit_cost(terms(), taken)
    assert vars(found) == pytest.approx(vars(wanted), rel=1e-6)


def test_a_difference_of_costs_is_never_negative() -> None:
    left = _subtract(MessageCost(call_s=3e-4, id_s=1e-9), MessageCost(call_s=1e-4, id_s=2e-9, byte_s=1e-10))
    assert vars(left) == pytest.approx({"call_s": 2e-4, "id_s": 0.0, "byte_s": 0.0})


@pytest.mark.slow
def test_a_server_in_another_process_is_measured_and_gone_afterwards() -> None:
    before = torch.get_num_threads()
    found = measure_requests(MachineSpeed(), is_short=True)
    assert found is not None
    assert found.asking.call_s + found.answering.call_s > 1e-5
    assert found.handing.byte_s > 0
    assert found.averaging.byte_s > 0  # includes copying and comparing the parameters
    assert 1 <= found.crowding < 10
    assert torch.get_num_threads() == before
    assert not any("rowstead.study.calibration.requests" in one.cmdline() for one in psutil.Process().children())
